/*@op
  name     = "o_proj",
  summary  = "acc += attn * Wo, for the SM's own 16 rows of the residual",
  params   = { {"q_width", "i32"}, {"hidden", "i32"}, {"attn_units", "i32"}, {"hands", "i32"} },
  pipeline = "row_tile",
  chained  = true, -- the release of attention stands behind these loads, and that of combine
  tile     = "owner",
  task     = { {"tile", "i32"}, {"weight_kib", "i32"} },
  reads    = { {"attn", "bf16", role = "compute", lo = "0", hi = "attn_units", awaits = true},
               {"acc", role = "compute", scope = "sm"} },
  writes   = { {"acc", role = "compute", scope = "sm"} },
  cost     = "32*q_width",
@*/
//@device load
DEVICE void load(Loader &c, const Task &t) { row_tile_load<P::q_width>(c, t); }

//@device compute
constexpr int WIDTH = P::q_width;
static_assert(WIDTH % 16 == 0, "row_tile loads 16 bytes at once");

DEVICE const bf16 *compute(Consumer &c, const Task &t) { return c.exchange<bf16>(t.attn); }

//@reference
const uint16_t *attn = buffer(vm, t.attn);
for (int i = 0; i < 16; i++)
    for (int n = 0; n < NMK_COLUMNS; n++)
        if (active(vm, n))
            sm->acc[i][n] +=
                dot(weight_row(vm, t.weight_kib, 0, 0, P.q_width, t.tile * 16 + i), attn + n * P.q_width, P.q_width);
