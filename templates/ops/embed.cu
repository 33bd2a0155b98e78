/*@op
  name    = "embed",
  summary = "x = E[token]: gather the rows of the packed embedding, bf16 to f32; xb the same in bf16",
  params  = { {"hidden", "i32"} },
  tile    = "owner",
  task    = { {"tile", "i32"}, {"weight_kib", "i32"} },
  reads   = { {"control", role = "compute", launch = "older"} },
  writes  = { {"acc", role = "compute", scope = "sm"},
              {"x", "f32", role = "store", lo = "tile*16", hi = "tile*16+16", posts = true, unkept = true},
              {"xb", "bf16", role = "store", lo = "tile*16", hi = "tile*16+16", posts = true} },
  cost    = "16*2*columns",
@*/
//@device compute
/* A sum like any other, of which the first warp has all. */
DEVICE void compute(Consumer &c, const Task &t)
{
    typedef Packed<P::hidden> L;
    const nmk_control *control = (const nmk_control *)c.p.control;
    const int k = t.tile * 16 + (c.g() & ~1);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
        float v[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int column = n * TILE_COLUMNS + 2 * c.t() + j;
            if (c.warp || !c.live(column)) continue;
            const int token = __ldcg(&control->column[column].token);
            const u8 *row_tile = c.weights(t.weight_kib) + (u64)(token >> 4) * L::tile_bytes;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const u32 pair = __ldg((const u32 *)(row_tile + L::pair_offset(token & 15, k + 8 * i)));
                v[2 * i + j] = c.g() & 1 ? bf16_high(pair) : bf16_low(pair);
            }
        }
        if (c.live_tile(n)) c.hand(v);
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (NMK_X_KEPT) c.acc[n][i] = v[i];
    }
}

//@device store
DEVICE void store(Storer &c, const Task &t)
{
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < 1; c.next_job(at)) {
        if (!c.mine()) continue;
        const PairedRows<P::hidden> shared(c, at, c.exchange<bf16>(t.xb) + t.tile * 16);
        float v[4];
        shared.clear(c);
        c.wait_job();
        c.take(v);
        shared.post(c, v);
#if !NMK_X_KEPT
        float *x = c.exchange<float>(t.x) + t.tile * 16 + c.g();
        post_rows<P::hidden>(c, at, x, v);
        clear_rows<P::hidden>(c, at, x);
#endif
    }
}

//@reference
uint16_t *xb = buffer(vm, t.xb);
for (int n = 0; n < NMK_COLUMNS; n++) {
    const struct nmk_column *c = &vm->control->column[n];
    const uint16_t *e = active(vm, n) ? weight_row(vm, t.weight_kib, 0, 0, P.hidden, c->token) : NULL;
    for (int i = 0; i < 16; i++) {
        const int at = n * P.hidden + t.tile * 16 + i;
        xb[at] = e ? e[t.tile * 16 + i] : 0;
#if NMK_X_KEPT
        sm->x[i][n] = bf16_value(xb[at]);
#else
        ((float *)buffer(vm, t.x))[at] = bf16_value(xb[at]);
#endif
    }
}
