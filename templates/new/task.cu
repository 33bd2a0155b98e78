/*@op
  name    = "NAME",
  summary = "out = in, every row scaled so that its largest magnitude is 1", -- one line for `nmkgen ops`
  params  = { {"floor", "f32"} },         -- fixed when generating: P::floor on the device, P.floor in C
  tile    = "spread",                     -- how the work is dealt: each SM gets the tiles tile .. tile + tiles - 1
  -- What differs per task: t.tile. Of the value that the op is inserted behind it may ask for width (elements of a
  -- column's row), extent (units of the buffer's index space) and tile_units (units of a tile of 16 elements).
  task    = { {"tile", "i32"}, {"tiles", "i32"}, {"width", "i32"}, {"extent", "i32"}, {"tile_units", "i32"} },
  -- Units lo .. hi - 1 are what a task touches, as expressions of its fields. Waits and signals follow from that: a
  -- region that is too small is a race, one that is too large costs time. `in` and `out` are the value before and
  -- after; without `out` an op changes `in` itself. Other names are the family's buffers.
  reads   = { {"in", "f32", role = "help", lo = "0", hi = "extent"} },
  writes  = { {"out", "f32", role = "help", lo = "tile*tile_units", hi = "(tile+tiles)*tile_units"} },
  cost    = "0",                          -- bytes of weights that a task streams
  try     = { value = "logits", with = { floor = 1e-6 } }, -- how its tests insert it into a model that lacks it
@*/
//@device help
/* The helper is one warp of an SM; it has waited before this, and signals after it. What this step wrote is read
 * through L2 (__ldcg), because L1 is not coherent. */
DEVICE void help(Helper &c, const Task &t)
{
    const float *in = c.buffer<float>(t.in);
    float *out = c.buffer<float>(t.out);
#pragma unroll 1
    for (int n = 0; n < NMK_COLUMNS; n++) {
        if (!c.live(n)) continue;
        const int row = n * t.width;
        float most = P::floor;
#pragma unroll 1
        for (int i = c.lane; i < t.width; i += 32) most = fmaxf(most, fabsf(__ldcg(in + row + i)));
#pragma unroll 1
        for (int s = 1; s < 32; s <<= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, s));
#pragma unroll 1
        for (int i = t.tile * 16 + c.lane; i < (t.tile + t.tiles) * 16; i += 32)
            out[row + i] = __fdividef(__ldcg(in + row + i), most);
    }
}

//@reference
/* The plainest correct C: the device is judged by it. */
const float *in = buffer(vm, t.in);
float *out = buffer(vm, t.out);
for (int n = 0; n < NMK_COLUMNS; n++) {
    if (!active(vm, n)) continue;
    const int row = n * t.width;
    float most = P.floor;
    for (int i = 0; i < t.width; i++) most = fmaxf(most, fabsf(in[row + i]));
    for (int i = t.tile * 16; i < (t.tile + t.tiles) * 16; i++) out[row + i] = in[row + i] / most;
}

//@test tolerance=1e-6 the largest magnitude of a row becomes 1
/* Fill what the op reads, and say what it must leave. */
float *in = input(test, t.in), *out = expect_f32(test, t.out);
for (int n = 0; n < NMK_COLUMNS; n++) {
    if (!live(test, n)) continue;
    const int largest = n % t.width;
    for (int i = 0; i < t.width; i++) {
        in[n * t.width + i] = i == largest ? -64 : uniform(test, -60, 60);
        out[n * t.width + i] = in[n * t.width + i] / 64;
    }
}

//@test tolerance=0 a row of zeros stays one
float *in = input(test, t.in), *out = expect_f32(test, t.out);
for (int i = 0; i < NMK_COLUMNS * t.width; i++) {
    in[i] = 0;
    if (live(test, i / t.width)) out[i] = 0;
}
