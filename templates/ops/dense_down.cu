/*@op
  name     = "dense_down",
  summary  = "acc += dense_h * Wdown, for the SM's own 16 rows of the residual",
  params   = { {"dense_ff", "i32"}, {"hidden", "i32"}, {"hands", "i32"} },
  pipeline = "row_tile",
  tile     = "owner",
  task     = { {"tile", "i32"}, {"weight_kib", "i32"} },
  reads    = { {"dense_h", "bf16", role = "compute", lo = "0", hi = "dense_ff", awaits = true},
               {"acc", role = "compute", scope = "sm"} },
  writes   = { {"acc", role = "compute", scope = "sm"} },
  cost     = "32*dense_ff",
@*/
//@device load
DEVICE void load(Loader &c, const Task &t) { row_tile_load<P::dense_ff>(c, t); }

//@device compute
constexpr int WIDTH = P::dense_ff;
static_assert(WIDTH % 16 == 0, "row_tile loads 16 bytes at once");

DEVICE const bf16 *compute(Consumer &c, const Task &t) { return c.exchange<bf16>(t.dense_h); }

//@reference
const uint16_t *h = buffer(vm, t.dense_h);
for (int i = 0; i < 16; i++)
    for (int n = 0; n < NMK_COLUMNS; n++)
        if (active(vm, n))
            sm->acc[i][n] +=
                dot(weight_row(vm, t.weight_kib, 0, 0, P.dense_ff, t.tile * 16 + i), h + n * P.dense_ff, P.dense_ff);
