/*@op
  name    = "clear_logits",
  summary = "empties the sums in which router_sum adds up the router's logits",
  params  = { {"experts", "i32"}, {"logit_copies", "i32"} },
  tile    = "columns",
  task    = { {"column", "i32"} },
  writes  = { {"logits", "u64", role = "help", lo = "column", hi = "logit_copies*columns", step = "columns"} },
  cost    = "0",
@*/
//@device help
constexpr int ROW = (P::experts + 15) / 16 * 16 + 2; /* a unit: as ops/router_sum.cu lays them out */

DEVICE void help(Helper &c, const Task &t)
{
    ulonglong2 *sums = c.buffer<ulonglong2>(t.logits) + t.column * (ROW / 2);
#pragma unroll 1
    for (int i = c.lane; i < P::logit_copies * (ROW / 2); i += 32)
        sums[i / (ROW / 2) * (NMK_COLUMNS * (ROW / 2)) + i % (ROW / 2)] = make_ulonglong2(0, 0);
}

//@reference
const size_t row = (P.experts + 15) / 16 * 16 + 2;
uint64_t *sums = buffer(vm, t.logits);
for (int copy = 0; copy < P.logit_copies; copy++)
    memset(sums + (size_t)(copy * NMK_COLUMNS + t.column) * row, 0, row * sizeof *sums);
