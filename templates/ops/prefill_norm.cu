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
/* A warp a token, 256 columns at a time, eight to a lane.  Once y is there it is read again: registers do not hold a
 * row, and L2 does. */
constexpr int PADDED = (P::hidden + 255) / 256 * 256;

DEVICE void add(float (&v)[8], const uint4 &more)
{
    v[0] += bf16_low(more.x), v[1] += bf16_high(more.x), v[2] += bf16_low(more.y), v[3] += bf16_high(more.y);
    v[4] += bf16_low(more.z), v[5] += bf16_high(more.z), v[6] += bf16_low(more.w), v[7] += bf16_high(more.w);
}

DEVICE void load_row(float (&v)[8], const float *from)
{
    const float4 a = __ldcg((const float4 *)from), b = __ldcg((const float4 *)from + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

constexpr int EACH = P::experts ? 8 : 1; /* most rows of mlp */

DEVICE void gather(float (&v)[8], ChunkConsumer &c, const Task &t, int n, int k)
{
    const float *x = c.buffer<float>(t.x) + (u64)n * P::hidden + k;
    const bf16 *mlp = c.buffer<bf16>(t.mlp) + (u64)n * t.mlp_rows * P::hidden + k;
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    uint4 row[EACH], o = load_l2(c.buffer<bf16>(t.o) + (u64)n * P::hidden + k);
    load_row(v, x); /* all are under way together, those too that do not count */
#pragma unroll
    for (int j = 0; j < EACH; j++) row[j] = load_l2(mlp + min(j, t.mlp_rows - 1) * P::hidden);
    if (t.from_o) add(sum, o);
    if (t.from_mlp) {
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (j < t.mlp_rows) add(sum, row[j]);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] += sum[j];
    float4 *y = (float4 *)(c.buffer<float>(t.y) + (u64)n * P::hidden + k);
    y[0] = make_float4(v[0], v[1], v[2], v[3]), y[1] = make_float4(v[4], v[5], v[6], v[7]);
}

/* Eight columns of each of four lanes: a lane is left with what lies together in an operand's row, see packed.h. */
DEVICE uint4 turn_four(const float (&v)[8], int lane)
{
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = bf16_pair(v[2 * j], v[2 * j + 1]);
    u32 a = __shfl_xor_sync(~0u, lane & 1 ? w[0] : w[1], 1), b = __shfl_xor_sync(~0u, lane & 1 ? w[2] : w[3], 1);
    if (lane & 1) w[0] = a, w[2] = b;
    else w[1] = a, w[3] = b;
    a = __shfl_xor_sync(~0u, lane & 2 ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, lane & 2 ? w[1] : w[3], 2);
    if (lane & 2) w[0] = a, w[1] = b;
    else w[2] = a, w[3] = b;
    return make_uint4(w[0], w[1], w[2], w[3]);
}

DEVICE void compute(ChunkConsumer &c, const Task &t)
{
    const bf16 *gamma = (const bf16 *)c.weights(t.gamma_kib);
#pragma unroll 1
    for (int turn = 0; turn * NMK_SMS * WARPS_COMPUTE < c.k.tokens; turn++) {
        const int n = token_of(c, turn);
        if (n >= c.k.tokens) continue;
        const float *y = c.buffer<float>(t.y) + (u64)n * P::hidden;
        float v[8], sum = 0, mean = 0, squares = 0;
#pragma unroll 2
        for (int k = c.lane * 8; k < P::hidden; k += 256) {
            gather(v, c, t, n, k);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += v[j], squares += v[j] * v[j];
        }
        if (P::norm_mean) {
            mean = warp_sum(sum) * (1.f / P::hidden), squares = 0;
#pragma unroll 2
            for (int k = c.lane * 8; k < P::hidden; k += 256) {
                load_row(v, y + k);
#pragma unroll
                for (int j = 0; j < 8; j++) squares += (v[j] - mean) * (v[j] - mean);
            }
        }
        const float scale = rsqrtf(warp_sum(squares) * (1.f / P::hidden) + P::eps);
        u8 *tiles = c.buffer<u8>(t.xn) + (u64)(n / BLOCK_TOKENS) * (PADDED / 64) * STAGE_BLOCK;
        bf16 *row = c.buffer<bf16>(t.xn_rows) + (u64)n * PADDED;
        tiles += n % BLOCK_TOKENS / 8 * 1024 + n % 8 * 16;
#pragma unroll 2
        for (int k = c.lane * 8; k < PADDED; k += 256) {
            const int from = P::hidden % 256 ? min(k, P::hidden - 8) : k;
            const bool inside = P::hidden % 256 == 0 || k < P::hidden;
            const uint4 g = __ldg((const uint4 *)(gamma + from));
            const float by[8] = {bf16_low(g.x), bf16_high(g.x), bf16_low(g.y), bf16_high(g.y),
                                 bf16_low(g.z), bf16_high(g.z), bf16_low(g.w), bf16_high(g.w)};
            load_row(v, y + from);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = inside ? (v[j] - mean) * scale * by[j] : 0.f; /* zeros pad the row */
            const uint4 four = turn_four(v, c.lane);
            const int at = nmk_packed_at(PADDED, (k & ~31) + (c.lane >> 1 & 1) * 4 + (c.lane & 1) * 2);
            *(uint4 *)(tiles + at / 64 * STAGE_BLOCK + at % 64 / 8 * 128) = four;
            if (P::experts) *(uint4 *)(row + at) = four;
        }
    }
}

//@reference
/* xn_rows, of which experts' operands are gathered, has the same places one after the other.  Those beyond the width
 * are zero. */
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
