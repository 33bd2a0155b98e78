/*@op
  name    = "round_x",
  summary = "xb = x in bf16, behind what a spec inserts at x",
  params  = { {"hidden", "i32"} },
  tile    = "spread",
  task    = { {"tile", "i32"}, {"tiles", "i32"} },
  reads   = { {"x", "f32", role = "help", lo = "tile*16", hi = "(tile+tiles)*16"} },
  writes  = { {"xb", "bf16", role = "help", lo = "tile*16", hi = "(tile+tiles)*16"} },
  cost    = "0",
@*/
//@device help
DEVICE void help(Helper &c, const Task &t)
{
    const int end = (t.tile + t.tiles) * 16;
#pragma unroll 1
    for (int n = 0; n < NMK_COLUMNS; n++) {
        if (!c.live(n)) continue;
        const float *x = c.buffer<float>(t.x) + n * P::hidden;
        bf16 *xb = c.buffer<bf16>(t.xb) + n * P::hidden;
#pragma unroll 1
        for (int i = t.tile * 16 + 2 * c.lane; i < end; i += 64) {
            const float2 v = __ldcg((const float2 *)(x + i));
            *(u32 *)(xb + i) = bf16_pair(v.x, v.y);
        }
    }
}

//@reference
const float *x = buffer(vm, t.x);
uint16_t *xb = buffer(vm, t.xb);
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = t.tile * 16; active(vm, n) && i < (t.tile + t.tiles) * 16; i++)
        xb[n * P.hidden + i] = bf16_round(x[n * P.hidden + i]);
