/*@op
  name    = "prefill_norm",
  summary = "y = x + what the layer before left (o, then the MLP's rows in order); xn = norm(y) * gamma, for products",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"hidden", "i32"}, {"eps", "f32"}, {"norm_mean", "i32"}, {"experts", "i32"} },
  tile    = "every",
  task    = { {"gamma_kib", "i32"}, {"from_o", "i32"}, {"from_mlp", "i32"}, {"mlp_rows", "i32"} },
  reads   = { {"x", "f32", role = "compute", lo = "0", hi = "1"},
              {"o", "bf16", role = "compute", lo = "0", hi = "from_o"},
              {"mlp", "bf16", role = "compute", lo = "0", hi = "from_mlp"} },
  writes  = { {"y", "f32", role = "compute", claim = true}, {"xn", "bf16", role = "compute", claim = true},
              {"xn_rows", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device compute
DEVICE void compute(Consumer &c, const Task &t) {}

//@reference
/* xn_rows, whose rows experts gather, has the same places one after the other.  Those beyond the width are zero. */
const int padded = nmk_packed_cols(P.hidden);
const uint16_t *gamma = weight_row(vm, t.gamma_kib, 0, 0, P.hidden, 0);
uint16_t place[P.hidden];
find_places(place, P.hidden);
for (size_t n = (size_t)sm->id; n < (size_t)vm->chunk->tokens; n += NMK_SMS) {
    const float *x = (const float *)buffer(vm, t.x) + n * P.hidden;
    const uint16_t *o = (const uint16_t *)buffer(vm, t.o) + n * P.hidden;
    const uint16_t *mlp = (const uint16_t *)buffer(vm, t.mlp) + n * t.mlp_rows * P.hidden;
    float *y = (float *)buffer(vm, t.y) + n * P.hidden;
    uint16_t *xn = buffer(vm, t.xn), *row = (uint16_t *)buffer(vm, t.xn_rows) + n * padded;
    double mean = 0, squares = 0;
    for (int k = 0; k < P.hidden; k++) {
        float sum = t.from_o ? bf16_value(o[k]) : 0;
        for (int i = 0; i < t.from_mlp * t.mlp_rows; i++) sum += bf16_value(mlp[i * P.hidden + k]);
        y[k] = x[k] + sum;
        if (P.norm_mean) mean += (double)y[k] / P.hidden;
    }
    for (int k = 0; k < P.hidden; k++) squares += ((double)y[k] - mean) * ((double)y[k] - mean);
    const float scale = 1.0f / sqrtf((float)(squares / P.hidden) + P.eps);
    for (int k = 0; k < padded; k++) {
        const int at = k < P.hidden ? place[k] : nmk_packed_at(padded, k);
        const float v = k < P.hidden ? (y[k] - (float)mean) * scale * bf16_value(gamma[k]) : 0;
        xn[operand_at(P.hidden, n, at)] = bf16_round(v);
        if (P.experts) row[at] = bf16_round(v);
    }
}

//@test tolerance=1e-5 adds what the layer before left
/* the weights, so gamma, are zeros here: xn is too; y is what is looked at */
float *x = input(test, t.x), *y = expect_f32(test, t.y), *xn = expect_bf16(test, t.xn);
uint16_t *o = input(test, t.o), *mlp = input(test, t.mlp);
for (int n = 0; live(test, n); n++)
    for (int k = 0; k < P.hidden; k++) {
        float sum = x[n * P.hidden + k] = uniform(test, -3, 3);
        o[n * P.hidden + k] = bf16_round(uniform(test, -1, 1));
        if (t.from_o) sum += bf16_value(o[n * P.hidden + k]);
        for (int i = 0; i < t.mlp_rows; i++) {
            uint16_t *v = &mlp[(n * t.mlp_rows + i) * P.hidden + k];
            *v = bf16_round(uniform(test, -1, 1));
            if (t.from_mlp) sum += bf16_value(*v);
        }
        y[n * P.hidden + k] = sum;
        xn[operand_at(P.hidden, (size_t)n, nmk_packed_at(nmk_packed_cols(P.hidden), k))] = 0;
    }
