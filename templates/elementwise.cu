/*@op
  name    = "elementwise",
  summary = "out = apply(in), element by element: what ops with this pipeline share",
  tile    = "spread",
  task    = { {"tile", "i32"}, {"tiles", "i32"}, {"width", "i32"}, {"tile_units", "i32"}, {"is_bf16", "i32"} },
  reads   = { {"in", "number", role = "help", lo = "tile*tile_units", hi = "(tile+tiles)*tile_units"} },
  writes  = { {"out", "number", role = "help", lo = "tile*tile_units", hi = "(tile+tiles)*tile_units"} },
  cost    = "0",
@*/
//@device help
/* A tile is 16 elements of every column's row. Four loads are in flight ahead of their use; those past the end are
 * clamped, which costs no registers. */
DEVICE void help(Helper &c, const Task &t)
{
    constexpr int AHEAD = 4;
    const int end = (t.tile + t.tiles) * 16;
#pragma unroll 1
    for (int n = 0; n < NMK_COLUMNS; n++) {
        if (!c.live(n)) continue;
        const int row = n * t.width;
#pragma unroll 1
        for (int i = t.tile * 16 + c.lane; i < end; i += 32 * AHEAD) {
            float v[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int at = row + min(i + 32 * k, end - 1);
                if (t.is_bf16) v[k] = bf16_low(__ldcg(c.buffer<bf16>(t.in) + at));
                else v[k] = __ldcg(c.buffer<float>(t.in) + at);
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int at = row + i + 32 * k;
                if (i + 32 * k >= end) break;
                v[k] = apply(v[k]);
                if (t.is_bf16) c.buffer<bf16>(t.out)[at] = (bf16)bf16_pair(v[k], 0.f);
                else c.buffer<float>(t.out)[at] = v[k];
            }
        }
    }
}

//@reference
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = t.tile * 16; active(vm, n) && i < (t.tile + t.tiles) * 16; i++) {
        const int at = n * t.width + i;
        const void *in = buffer(vm, t.in);
        void *out = buffer(vm, t.out);
        if (t.is_bf16) ((uint16_t *)out)[at] = bf16_round(apply(bf16_value(((const uint16_t *)in)[at])));
        else ((float *)out)[at] = apply(((const float *)in)[at]);
    }
