/*@op
  name    = "prefill_unpack",
  summary = "keys and values of all positions that the chunk's tokens see, from their pages, as attention takes them",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"kv_heads", "i32"}, {"head_dim", "i32"}, {"window", "i32"}, {"full_layers", "i32"},
              {"sliding_layers", "i32"} },
  tile    = "every",
  task    = { {"sliding", "i32"}, {"kv_layer", "i32"} },
  reads   = { {"pages", "bf16", role = "compute", lo = "0", hi = "1"} },
  writes  = { {"keys", "bf16", role = "compute", claim = true}, {"values", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device compute
constexpr int HALF_PAGE = NMK_PAGE_TOKENS * P::head_dim * 2; /* bytes of K, then of V, of one kv head */
constexpr int GRANULES = P::head_dim / 32;                   /* of 32 dims */
constexpr int PIECES = NMK_PAGE_TOKENS / 16 * GRANULES;      /* of 16 tokens x 32 dims: 1 KiB of K and of V */
constexpr int MINE = (PIECES + WARPS_COMPUTE - 1) / WARPS_COMPUTE;
constexpr int TILE_BYTES = KEY_TILE * P::head_dim * 2, KEY_GROUP = 8 * P::head_dim * 2; /* K of 8 keys */
constexpr int DIM_GROUP = KEY_TILE * 16;                                               /* V of 8 dims, of a tile */
static_assert(KEY_TILE == 2 * NMK_PAGE_TOKENS && PIECES % WARPS_COMPUTE == 0, "two pages are a tile of keys");

/* w[i] of the four lanes of a group to lane i: what lane j had of it becomes w[j]. */
DEVICE void transpose_4x4(u32 (&w)[4], int t)
{
    auto swap = [&](u32 &a, u32 &b, int bit) { /* a of the lane with the bit, and b of that without, change places */
        const u32 v = __shfl_xor_sync(~0u, t & bit ? a : b, bit);
        a = t & bit ? v : a, b = t & bit ? b : v;
    };
    swap(w[0], w[1], 1), swap(w[2], w[3], 1), swap(w[0], w[2], 2), swap(w[1], w[3], 2);
}

/* A unit is a page's K and V of one kv head.  What no page holds, or a page holds but no sequence, becomes zeros: its
 * probabilities are zeros, but what they are multiplied with has to be a number. */
DEVICE void compute(ChunkConsumer &c, const Task &t)
{
    const Plan &plan = c.k.attention.plan;
    const int sliding = t.sliding, layers = sliding ? P::sliding_layers : P::full_layers;
    const int units = plan.tile0[sliding][NMK_SPANS] * 2 * P::kv_heads, lane = c.lane, g = lane >> 2, q = lane & 3;
    const int *tables = (const int *)(sliding ? c.p.table_sliding : c.p.table_full);
    const u8 *pool = (const u8 *)(sliding ? c.p.kv_sliding : c.p.kv_full);
#pragma unroll 1
    for (int unit = blockIdx.x; unit < units; unit += NMK_SMS) {
        const int head = unit % P::kv_heads, half = unit / P::kv_heads, tile = half / 2;
        int at = 0;
#pragma unroll 1
        while (tile >= plan.tile0[sliding][at + 1]) at++;
        const nmk_span &span = plan.span[at];
        const int low = span_low(span, sliding), end = span.pos + span.count;
        const int pos = (low / KEY_TILE + tile - plan.tile0[sliding][at]) * KEY_TILE + half % 2 * NMK_PAGE_TOKENS;
        const bool held = pos < end && pos + NMK_PAGE_TOKENS > low;
        const int page = held ? __ldg(tables + (u64)span.slot * c.p.table_stride + pos / NMK_PAGE_TOKENS) : 0;
        const u8 *from = pool + (((u64)page * layers + t.kv_layer) * P::kv_heads + head) * (2 * HALF_PAGE);
        u8 *keys = c.buffer<u8>(t.keys) + ((u64)head * (NMK_KEY_TOKENS / KEY_TILE) + tile) * TILE_BYTES;
        u8 *values = c.buffer<u8>(t.values) + ((u64)head * (NMK_KEY_TOKENS / KEY_TILE) + tile) * TILE_BYTES;
        uint4 k[MINE][2], v[MINE][2];
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const uint4 *piece = (const uint4 *)(from + (c.warp + i * WARPS_COMPUTE) * 1024) + lane;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                k[i][j] = v[i][j] = make_uint4(0, 0, 0, 0);
                if (held) k[i][j] = load_l2(piece + j * 32), v[i][j] = load_l2(piece + HALF_PAGE / 16 + j * 32);
            }
        }
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int piece = c.warp + i * WARPS_COMPUTE, rows = piece / GRANULES * 16, dims = piece % GRANULES * 32;
            /* K: a lane has dims 8q .. 8q+7 of keys g and g+8, four of each from either of the two tiles */
            u8 *to = keys + (half % 2 * NMK_PAGE_TOKENS + rows) / 8 * KEY_GROUP + (dims / 8 + q) * 128 + g * 16;
            *(uint4 *)to = make_uint4(k[i][0].x, k[i][0].z, k[i][1].x, k[i][1].z);
            *(uint4 *)(to + KEY_GROUP) = make_uint4(k[i][0].y, k[i][0].w, k[i][1].y, k[i][1].w);
            /* V: pairs of keys 2q and 8+2q of dims g and g+8; exchanged, 8 keys from 8 * (q/2) of dim g + 8 * (q%2) */
            const int key = pos + rows + 2 * q;
            auto keep = [&](u32 pair, int first) {
                if (first >= end) pair &= 0xffff0000u;
                return first + 1 >= end ? pair & 0xffffu : pair;
            };
#pragma unroll
            for (int j = 0; j < 2; j++) {
                u32 w[4] = {keep(v[i][j].x, key), keep(v[i][j].y, key), keep(v[i][j].z, key + 8),
                            keep(v[i][j].w, key + 8)};
                transpose_4x4(w, q);
                to = values + (dims / 8 + 2 * j + (q & 1)) * DIM_GROUP + g * 16;
                to += ((half % 2 * NMK_PAGE_TOKENS + rows) / 8 + (q >> 1)) * 128;
                *(uint4 *)to = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    }
    fence_async_global(); /* attention reads this by bulk copies */
}

//@reference
/* Whole tiles of keys.  Of pages that are not held all becomes zeros; of a page that is, what is still to come stays in
 * K, whose scores are masked, and becomes zeros in V: that is multiplied. */
uint16_t *keys = buffer(vm, t.keys), *values = buffer(vm, t.values);
const int layers = t.sliding ? P.sliding_layers : P.full_layers;
const uint16_t zeros[HEAD_DIM] = {0};
int unit = 0;
for (int i = 0; i < vm->chunk->spans; i++) {
    const struct seen s = seen_by(vm->chunk, i, t.sliding, P.window);
    for (int u = 0; u < s.tiles * P.kv_heads; u++) {
        const int head = u % P.kv_heads, tile = u / P.kv_heads;
        if (unit++ % NMK_SMS != sm->id) continue;
        for (int j = tile * KEY_TILE; j < (tile + 1) * KEY_TILE; j++) {
            const int pos = s.low + j, held = pos / PAGE * PAGE < s.end && pos / PAGE >= s.lo / PAGE;
            const uint16_t *k = zeros, *v = zeros;
            if (held) k = page_row(vm, s.slot, pos, t.sliding, layers, t.kv_layer, P.kv_heads, head, 0);
            if (held && pos < s.end) v = page_row(vm, s.slot, pos, t.sliding, layers, t.kv_layer, P.kv_heads, head, 1);
            for (int d8 = 0; d8 < P.head_dim; d8 += 8)
                memcpy(keys + key_at(head, s.base + j, d8), k + d8, 16);
            for (int dim = 0; dim < P.head_dim; dim++) values[value_at(head, s.base + j, dim)] = v[dim];
        }
    }
}
