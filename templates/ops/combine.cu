/*@op
  name     = "combine",
  summary  = "attn = the chunks' partials of each head, merged in chunk order",
  params   = { {"heads", "i32"}, {"kv_heads", "i32"}, {"head_dim", "i32"}, {"part_slots", "i32"} },
  tile     = "cyclic",
  in_chain = "compute",
  task     = { {"first", "i32"}, {"step", "i32"}, {"end", "i32"}, {"sliding", "i32"} },
  reads    = { {"part", "f32", role = "help", lo = "0", hi = "part_slots", awaits = true} },
  writes   = { {"attn", "bf16", role = "help", lo = "first", hi = "end", step = "step", posts = true} },
  cost     = "0",
@*/
//@device compute
static_assert(NMK_CHUNKS_MAX <= NMK_MAX_PARTS, "combine holds all partials of a head at once");
constexpr int GROUP = P::heads / P::kv_heads, PAIRS = (GROUP + 1) / 2, DIM_TILES = P::head_dim / 16;
constexpr int SLOT = DIM_TILES * 8 * PAIRS, UNITS = SLOT / 8; /* float4 of a partial, and units; see attention */

/* 8 float4 of up to 4 * EACH partials: lane group p takes partials p, p+4, ...; 2 heads x 2 dims a lane.  Behind the
 * last partial there is the last one again, which is no traffic and is scaled by 0: a condition would cost registers.
 * Two lanes have the same heads: where partials are many each takes maxima and sums of every other one only, and tells
 * its neighbour what they scale by.  Leaves the lane's share of o and of the sum. */
template <int EACH>
DEVICE void merge(Context &c, float4 &o, float2 &sum, const float4 *from, const float4 *ml, int last, int lane)
{
    constexpr bool SHARE = EACH > 4 && (POSTED || EACH % 2 == 0); /* else one has one more, and no register for it */
    constexpr int MINE = SHARE ? (EACH + 1) / 2 : EACH;
    const int high = lane & 1;
    float2 m[MINE], l[MINE];
    float4 v[EACH];
    auto fetch = [&] {
#pragma unroll
        for (int j = 0; j < EACH; j++) v[j] = load_floats(from + min(4 * j, last) * SLOT);
    };
    u32 looks = 0;
#pragma unroll 1
    for (;;) {
        u32 word = 0;
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const int k = SHARE ? 4 * high + 8 * j : 4 * j;
            const float4 both = load_floats(ml + min(k, last) * PAIRS);
            m[j] = k <= last ? make_float2(both.x, both.y) : make_float2(-1e30f, -1e30f);
            l[j] = make_float2(both.z, both.w);
            if constexpr (POSTED) word = least(word, least(both));
        }
        if constexpr (!POSTED || !SHARE) fetch();
        if constexpr (POSTED && !SHARE) {
#pragma unroll
            for (int j = 0; j < EACH; j++) word = least(word, least(v[j]));
        }
        if (!POSTED || !c.lacks(word, looks)) break;
    }
    float2 top = m[0];
#pragma unroll
    for (int j = 1; j < MINE; j++) top.x = fmaxf(top.x, m[j].x), top.y = fmaxf(top.y, m[j].y);
#pragma unroll
    for (int k = SHARE ? 1 : 8; k <= 16; k = k == 1 ? 8 : 2 * k) {
        top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, k));
        top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, k));
    }
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        m[j].x = exp2_fast(m[j].x - top.x), m[j].y = exp2_fast(m[j].y - top.y);
        sum.x += l[j].x * m[j].x, sum.y += l[j].y * m[j].y;
    }
    if constexpr (POSTED && SHARE) { /* while sums have to be held there are no registers to look at so many */
#pragma unroll 1
        for (;;) {
            u32 word = 0;
            fetch();
#pragma unroll
            for (int j = 0; j < EACH; j++) word = least(word, least(v[j]));
            if (!c.lacks(word, looks)) break;
        }
    }
    if constexpr (POSTED) {
#pragma unroll
        for (int j = 0; j < EACH; j++) /* nobody else reads them, and all lanes have */
            if (4 * j <= last) store_words((void *)(from + 4 * j * SLOT), make_uint4(ABSENT, ABSENT, ABSENT, ABSENT));
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        float a = m[SHARE ? j / 2 : j].x, b = m[SHARE ? j / 2 : j].y;
        if constexpr (SHARE) {
            const int owner = (lane & ~1) + (j & 1);
            a = __shfl_sync(~0u, a, owner), b = __shfl_sync(~0u, b, owner);
        }
        o.x += v[j].x * a, o.y += v[j].y * b, o.z += v[j].z * a, o.w += v[j].w * b;
    }
    if constexpr (SHARE) sum.x += __shfl_xor_sync(~0u, sum.x, 1), sum.y += __shfl_xor_sync(~0u, sum.y, 1);
}

/* By a warp.  A unit is (column, kv head, 8 float4 of a partial). */
DEVICE void merge_units(Context &c, const Task &t, int first, int step)
{
    const Shared &s = c.s;
    const int kind = t.sliding, lane = c.lane, p = lane >> 3, d4 = lane & 7, high = lane & 1;
    const float4 *part = c.exchange<float4>(t.part), *part_ml = part + (u64)P::part_slots * SLOT;
    bf16 *attn = c.exchange<bf16>(t.attn);
#pragma unroll 1
    for (int u = first; u < t.end; u += step) {
        const int n = u / (P::kv_heads * UNITS), kv_head = u / UNITS % P::kv_heads, i8 = u % UNITS;
        const int chunks = s.chunks[kind][n];
        if (!POSTED && chunks == 0) {
            if (NMK_TURNS && s.chunk0[kind][n] == s.chunk0[kind][PLACES]) break; /* nor is a column behind it live */
            continue;
        }
        const int pairs = i8 * 4 + (d4 >> 1), pair = pairs % PAIRS, dims = pairs / PAIRS; /* dims: by twos */
        auto place = [&] {
            const int dim = dims / 4 * 16 + dims % 4 * 2 + high * 8;
            return attn + (n * P::heads + kv_head * GROUP + 2 * pair) * P::head_dim + dim;
        };
        auto clear = [&] {
            c.clear(place());
            if (GROUP % 2 == 0 || pair < PAIRS - 1) c.clear(place() + P::head_dim);
        };
        if (POSTED && chunks == 0) {
            if (p == 0) clear();
            continue;
        }
        const int slot = s.chunk0[kind][n] + kv_head * chunks + p, last = chunks - 1 - p;
        const float4 *from = part + (u64)slot * SLOT + i8 * 8 + d4, *ml = part_ml + (u64)slot * PAIRS + pair;
        constexpr int MOST = (NMK_CHUNKS_MAX + 3) / 4, FEW = MOST < 4 ? MOST : 4;
        float4 o = make_float4(0, 0, 0, 0);
        float2 sum = make_float2(0, 0);
        if (MOST <= FEW || chunks <= 4 * FEW) merge<FEW>(c, o, sum, from, ml, last, lane);
        else merge<MOST>(c, o, sum, from, ml, last, lane);
#pragma unroll
        for (int k = 8; k <= 16; k <<= 1) {
            sum.x += __shfl_xor_sync(~0u, sum.x, k), sum.y += __shfl_xor_sync(~0u, sum.y, k);
            o.x += __shfl_xor_sync(~0u, o.x, k), o.y += __shfl_xor_sync(~0u, o.y, k);
            o.z += __shfl_xor_sync(~0u, o.z, k), o.w += __shfl_xor_sync(~0u, o.w, k);
        }
        const float ra = 1.f / sum.x, rb = 1.f / sum.y;
        o.x *= ra, o.z *= ra, o.y *= rb, o.w *= rb;
        /* lanes d4 and d4+1 hold dims g and g+1 (g even): one keeps the low half of the tile, the other dims + 8 */
        const float xa = __shfl_xor_sync(~0u, high ? o.x : o.z, 1), xb = __shfl_xor_sync(~0u, high ? o.y : o.w, 1);
        const u32 a = high ? bf16_pair(xa, o.z) : bf16_pair(o.x, xa);
        const u32 b = high ? bf16_pair(xb, o.w) : bf16_pair(o.y, xb);
        if (p == 0) {
            bf16 *to = place();
            c.post((u32 *)to, a);
            if (GROUP % 2 == 0 || pair < PAIRS - 1) c.post((u32 *)(to + P::head_dim), b);
            if constexpr (POSTED) clear();
        }
    }
}

/* Nothing else is to be done until attn is there, so the units are done side by side. */
DEVICE void compute(Consumer &c, const Task &t)
{
    c.forget_x();
    merge_units(c, t, t.first + c.warp * t.step, WARPS_COMPUTE * t.step);
}

//@device help
DEVICE void help(Helper &c, const Task &t) { merge_units(c, t, t.first, t.step); }

//@reference
/* A unit is 8 quadruples of a slot of one (column, kv head): 2 dims by 2 heads each, as part_float has them. */
enum { UNITS = SLOT_FLOATS / 32 };
const float *part = buffer(vm, t.part), *part_ml = part + (size_t)P.part_slots * SLOT_FLOATS;
uint16_t *attn = buffer(vm, t.attn);
int start[NMK_COLUMNS], count[NMK_COLUMNS], slot = 0;
for (int n = 0; n < NMK_COLUMNS; n++) {
    start[n] = slot, count[n] = 0;
    if (active(vm, n)) count[n] = chunks_of(vm, &vm->control->column[n], t.sliding, NMK_WINDOW).count;
    slot += P.kv_heads * count[n];
}
for (int u = t.first; u < t.end; u += t.step) {
    const int n = u / (P.kv_heads * UNITS), kv_head = u / UNITS % P.kv_heads;
    if (n >= NMK_COLUMNS || !active(vm, n)) continue;
    for (int i = u % UNITS * 32; i < u % UNITS * 32 + 32; i++) { /* i: float within the slot, see part_float */
        const int pairs = i / 8 % PAIRS, dims = i / 8 / PAIRS;
        const int head = pairs * 2 + i % 2, dim = dims / 4 * 16 + dims % 4 * 2 + i / 4 % 2 + i / 2 % 2 * 8;
        const int slot0 = start[n] + kv_head * count[n];
        const float *ml0 = part_ml + (size_t)(slot0 * PAIRS + pairs) * 4 + i % 2; /* max; two further: sum */
        float top = -1e30f, sum = 0, o = 0;
        if (head >= GROUP) continue;
        for (int s = 0; s < count[n]; s++)
            if (ml0[s * PAIRS * 4] > top) top = ml0[s * PAIRS * 4];
        for (int s = 0; s < count[n]; s++) {
            const float scale = exp2f(ml0[s * PAIRS * 4] - top);
            sum += ml0[s * PAIRS * 4 + 2] * scale, o += part[(size_t)(slot0 + s) * SLOT_FLOATS + i] * scale;
        }
        attn[(n * P.heads + kv_head * GROUP + head) * HEAD_DIM + dim] = bf16_round(o / sum);
    }
}
