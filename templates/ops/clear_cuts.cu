/*@op
  name    = "clear_cuts",
  summary = "empties the bins in which cut adds up what of a distribution lies where",
  tile    = "columns",
  task    = { {"column", "i32"} },
  writes  = { {"cuts", "u64", role = "help", lo = "column", hi = "7*columns", step = "columns"} },
  cost    = "0",
@*/
//@device help
DEVICE void help(Helper &c, const Task &t)
{
    ulonglong2 *bins = c.buffer<ulonglong2>(t.cuts) + t.column * 128;
#pragma unroll 1
    for (int i = c.lane; i < 7 * 128; i += 32) bins[i / 128 * (NMK_COLUMNS * 128) + i % 128] = make_ulonglong2(0, 0);
}

//@reference
uint64_t *bins = buffer(vm, t.cuts);
for (int unit = 0; unit < 7; unit++) memset(bins + (unit * NMK_COLUMNS + t.column) * 256, 0, 256 * sizeof *bins);
