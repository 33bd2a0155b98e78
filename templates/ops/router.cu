/*@op
  name     = "router",
  summary  = "logits = xn * Wrouter, f32",
  pipeline = "gemm_x",
  eased    = true, -- releases that the whole machine waits for (the residual, logits, q k v) stand behind these loads
  params   = { {"hidden", "i32"}, {"experts", "i32"} },
  tile     = "spread",
  task     = { {"tile", "i32"}, {"tiles", "i32"}, {"weight_kib", "i32"} },
  reads    = { {"xn", "bf16", role = "compute", scope = "sm", wide = { lo = "0", hi = "columns" }} },
  writes   = { {"logits", "f32", role = "store", lo = "tile*16", hi = "(tile+tiles)*16", posts = true} },
  cost     = "tiles*32*hidden",
@*/
//@device store
constexpr int ROWS = (P::experts + 15) / 16 * 16; /* of the packed matrix */

DEVICE void store(Storer &c, const Task &t)
{
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < t.tiles; c.next_job(at)) {
        if (!c.mine()) continue;
        float v[4];
        float *to = c.exchange<float>(t.logits) + c.column(at) * ROWS + (t.tile + at.row) * 16 + c.g();
        if constexpr (POSTED) {
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (c.stored(c.column(at) + j)) c.clear(to + j * ROWS), c.clear(to + j * ROWS + 8);
        }
        c.wait_job();
        c.take(v);
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (c.live(c.column(at) + j)) c.post(to + j * ROWS, v[j]), c.post(to + j * ROWS + 8, v[2 + j]);
    }
}

//@reference
float *logits = buffer(vm, t.logits);
const int rows = (P.experts + 15) / 16 * 16;
for (int row = t.tile * 16; row < (t.tile + t.tiles) * 16; row++)
    for (int n = 0; n < NMK_COLUMNS; n++)
        if (active(vm, n))
            logits[n * rows + row] =
                TIMES_X(weight_row(vm, t.weight_kib, 0, 0, P.hidden, row), n);
