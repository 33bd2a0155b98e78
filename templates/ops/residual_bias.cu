/*@op
  name    = "residual_bias",
  summary = "x += acc + bias for the SM's own 16 rows, yb the same in bf16",
  params  = { {"hidden", "i32"}, {"handed", "i32"} },
  tile    = "owner",
  task    = { {"tile", "i32"}, {"bias_kib", "i32"} },
  reads   = { {"acc", role = "compute", scope = "sm"},
              {"x", "f32", role = "store", lo = "tile*16", hi = "tile*16+16", unkept = true} },
  writes  = { {"acc", role = "compute", scope = "sm"},
              {"y", "f32", role = "store", lo = "tile*16", hi = "tile*16+16", unkept = true},
              {"yb", "bf16", role = "store", lo = "tile*16", hi = "tile*16+16"} },
  cost    = "0",
@*/
//@device compute
/* The storers add the bias to what they were handed. */
DEVICE void compute(Consumer &c, const Task &t)
{
    if (!P::handed) c.hand_sum();
    if (!NMK_X_KEPT || c.warp) return;
    const u16 *bias = (const u16 *)c.weights(t.bias_kib) + t.tile * 16 + c.g();
    const float add[2] = {bf16_low(__ldg(bias)), bf16_low(__ldg(bias + 8))};
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) c.acc[n][k] += add[k / 2];
}

//@device store
DEVICE void store(Storer &c, const Task &t)
{
    const u16 *bias = (const u16 *)c.weights(t.bias_kib) + t.tile * 16 + c.g();
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < 1; c.next_job(at)) {
        if (!c.mine()) continue;
        const float add[2] = {bf16_low(__ldg(bias)), bf16_low(__ldg(bias + 8))};
        float old[4] = {0, 0, 0, 0}, v[4];
        c.wait_job(); /* x may be the other storer's, and only what compute knows is behind it */
#if !NMK_X_KEPT
        load_rows<P::hidden>(c, at, c.buffer<float>(t.x) + t.tile * 16 + c.g(), old);
#endif
        c.take(v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = old[i] + v[i] + add[i / 2];
        PairedRows<P::hidden>(c, at, c.buffer<bf16>(t.yb) + t.tile * 16).post(c, v);
#if !NMK_X_KEPT
        post_rows<P::hidden>(c, at, c.buffer<float>(t.y) + t.tile * 16 + c.g(), v);
#endif
    }
}

//@reference
uint16_t *yb = buffer(vm, t.yb);
const uint16_t *bias = weight_row(vm, t.bias_kib, 0, 0, P.hidden, 0);
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = 0; i < 16; i++) {
        const int row = t.tile * 16 + i, at = n * P.hidden + row;
#if NMK_X_KEPT
        const float y = sm->x[i][n] += sm->acc[i][n] + bf16_value(bias[row]);
#else
        const float y = ((const float *)buffer(vm, t.x))[at] + sm->acc[i][n] + bf16_value(bias[row]);
        ((float *)buffer(vm, t.y))[at] = y;
#endif
        yb[at] = bf16_round(y);
        sm->acc[i][n] = 0;
    }
