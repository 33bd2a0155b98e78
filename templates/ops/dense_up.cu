/*@op
  name     = "dense_up",
  summary  = "dense_h = silu(gate * xn) * (up * xn)",
  pipeline = "gemm_x",
  params   = { {"hidden", "i32"}, {"dense_ff", "i32"} },
  tile     = "spread",
  task     = { {"tile", "i32"}, {"tiles", "i32"}, {"weight_kib", "i32"} },
  reads    = { {"xn", "bf16", role = "compute", scope = "sm", wide = { lo = "0", hi = "columns" }} },
  writes   = { {"dense_h", "bf16", role = "store", lo = "tile*8", hi = "(tile+tiles)*8", posts = true} },
  cost     = "tiles*32*hidden",
@*/
//@device store
DEVICE void store(Storer &c, const Task &t)
{
    bf16 *h = c.exchange<bf16>(t.dense_h);
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < t.tiles; c.next_job(at)) {
        if (!c.mine()) continue;
        float v[4];
        if constexpr (POSTED) {
            /* a word is two rows, of this lane and the next row's: one lane has it of column 2t, the other of 2t + 1 */
            const int odd = c.g() & 1, n = c.column(at) + odd;
            u32 *to = (u32 *)(h + n * P::dense_ff + (t.tile + at.row) * 8 + c.g() - odd);
            if (c.stored(n)) c.clear(to);
            c.wait_job();
            c.take(v);
#pragma unroll
            for (int j = 0; j < 2; j++) v[j] = v[j] / (1.f + __expf(-v[j])) * v[2 + j];
            const float got = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 4);
            if (c.live(n)) c.post(to, odd ? bf16_pair(got, v[1]) : bf16_pair(v[0], got));
            continue;
        }
        c.wait_job();
        c.take(v);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int n = c.column(at) + j;
            const float silu = v[j] / (1.f + __expf(-v[j]));
            if (c.live(n)) h[n * P::dense_ff + (t.tile + at.row) * 8 + c.g()] = (bf16)bf16_pair(silu * v[2 + j], 0.f);
        }
    }
}

//@reference
uint16_t *h = buffer(vm, t.dense_h);
for (int row = t.tile * 8; row < (t.tile + t.tiles) * 8; row++) {
    const uint16_t *gate = weight_row(vm, t.weight_kib, 0, 0, P.hidden, row);
    const uint16_t *up = weight_row(vm, t.weight_kib, 0, 0, P.hidden, P.dense_ff + row);
    for (int n = 0; n < NMK_COLUMNS; n++)
        if (active(vm, n))
            h[n * P.dense_ff + row] =
                bf16_round(silu(TIMES_X(gate, n)) * TIMES_X(up, n));
}
