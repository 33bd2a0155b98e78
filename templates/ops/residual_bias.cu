/*@op
  name    = "residual_bias",
  summary = "y = x + acc + bias for the SM's own 16 rows; acc starts again from zero",
  params  = { {"hidden", "i32"}, {"handed", "i32"} },
  tile    = "owner",
  task    = { {"tile", "i32"}, {"bias_kib", "i32"} },
  reads   = { {"acc", role = "compute", scope = "sm"},
              {"x", "f32", role = "store", lo = "tile*16", hi = "tile*16+16"} },
  writes  = { {"acc", role = "compute", scope = "sm"},
              {"y", "f32", role = "store", lo = "tile*16", hi = "tile*16+16"} },
  cost    = "0",
@*/
//@device compute
DEVICE void compute(Consumer &c, const Task &t)
{
    if (!P::handed) c.hand_sum();
}

//@device store
DEVICE void store(Storer &c, const Task &t)
{
    const u16 *bias = (const u16 *)c.weights(t.bias_kib) + t.tile * 16 + c.g();
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < 1; c.next_job(at)) {
        if (!c.mine()) continue;
        const float *x = c.buffer<float>(t.x) + t.tile * 16 + c.g();
        float *y = c.buffer<float>(t.y) + t.tile * 16 + c.g();
        const float add[2] = {bf16_low(__ldg(bias)), bf16_low(__ldg(bias + 8))};
        float old[4] = {0, 0, 0, 0}, v[4];
        c.wait_job(); /* x may be the other storer's, and only what compute knows is behind it */
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int n = (c.column(at) + j) * P::hidden;
            if (c.live(c.column(at) + j)) old[j] = __ldcg(x + n), old[2 + j] = __ldcg(x + n + 8);
        }
        c.take(v);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int n = (c.column(at) + j) * P::hidden;
            if (c.live(c.column(at) + j)) y[n] = old[j] + v[j] + add[0], y[n + 8] = old[2 + j] + v[2 + j] + add[1];
        }
    }
}

//@reference
const float *x = buffer(vm, t.x);
float *y = buffer(vm, t.y);
const uint16_t *bias = weight_row(vm, t.bias_kib, 0, 0, P.hidden, 0);
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = 0; i < 16; i++) {
        const int row = t.tile * 16 + i, at = n * P.hidden + row;
        y[at] = x[at] + sm->acc[i][n] + bf16_value(bias[row]);
        sm->acc[i][n] = 0;
    }
