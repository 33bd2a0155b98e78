/*@op
  name    = "attention",
  summary = "partial attention of chunks of one row's pages per kv head, online softmax in base 2",
  params  = { {"heads", "i32"}, {"kv_heads", "i32"}, {"head_dim", "i32"}, {"window", "i32"}, {"full_layers", "i32"},
              {"sliding_layers", "i32"}, {"part_slots", "i32"} },
  tile    = "every",
  task    = { {"sliding", "i32"}, {"kv_layer", "i32"} },
  reads   = { {"qkv", "bf16", role = "compute", lo = "0", hi = "(heads+2*kv_heads)*head_dim"},
              {"kv", role = "load", launch = "older"} },
  writes  = { {"part", "f32", role = "store", lo = "sm", hi = "part_slots", step = "sms"} },
  cost    = "0",
@*/
//@device load
constexpr int HALF_PAGE = NMK_PAGE_TOKENS * P::head_dim * 2; /* K, then V, of one kv head */
static_assert(P::head_dim == 128 && P::heads == 8 * P::kv_heads, "the 8 heads of a kv head are the 8 MMA columns");
static_assert(HALF_PAGE <= NMK_STAGE_BYTES, "half a page is a stage");

/* Two pages at a time: K K V V. */
DEVICE void load(Loader &c, const Task &t)
{
    const int kind = t.sliding, count = c.s.segments[kind];
    const u64 page_bytes = (u64)(kind ? P::sliding_layers : P::full_layers) * P::kv_heads * (2 * HALF_PAGE);
    const int *tables = (const int *)(kind ? c.p.table_sliding : c.p.table_full);
    const u8 *pool = (const u8 *)(kind ? c.p.kv_sliding : c.p.kv_full);
    int first = 0, second = 0; /* page ids, read one pair ahead */
    auto peek = [&](int i) {
        const Segment &g = c.s.segment[kind][i];
        const int *table = tables + (u64)c.s.table_row[g.column] * c.p.table_stride + g.page;
        first = __ldg(table), second = g.pages > 1 ? __ldg(table + 1) : 0;
    };
    if (count) peek(0);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const Segment g = c.s.segment[kind][i];
        const int *table = tables + (u64)c.s.table_row[g.column] * c.p.table_stride + g.page;
        const u8 *from = pool + ((u64)t.kv_layer * P::kv_heads + g.kv_head) * (2 * HALF_PAGE);
        int a = first, b = second;
        if (i + 1 < count) peek(i + 1);
#pragma unroll 1
        for (int k = 0; k < g.pages; k += 2) {
            const int two = min(2, g.pages - k);
            const int next_a = k + 2 < g.pages ? __ldg(table + k + 2) : 0;
            const int next_b = k + 3 < g.pages ? __ldg(table + k + 3) : 0;
#pragma unroll 1
            for (int q = 0; q < 2 * two; q++)
                c.push(from + (u64)(q & (two - 1) ? b : a) * page_bytes + (q >= two ? HALF_PAGE : 0), HALF_PAGE, 0);
            a = next_a, b = next_b;
        }
    }
}

//@device compute
constexpr int ROWS = (P::heads + 2 * P::kv_heads) * P::head_dim, K0 = P::heads * P::head_dim,
              V0 = K0 + P::kv_heads * P::head_dim;

DEVICE void fetch_q(Consumer &c, const bf16 *qkv, const Segment &g, uint4 (&q)[4])
{
    const bf16 *from = qkv + g.column * ROWS + (g.kv_head * 8 + c.g()) * P::head_dim + 8 * c.t();
#pragma unroll
    for (int i = 0; i < 4; i++) q[i] = load_l2(from + i * 32);
}

/* Column-wise (over lanes with the same t) maximum and sum of a tile's 16 tokens. */
DEVICE float tokens_max(float v)
{
#pragma unroll
    for (int s = 4; s <= 16; s <<= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, s));
    return v;
}

DEVICE float tokens_sum(float v)
{
#pragma unroll
    for (int s = 4; s <= 16; s <<= 1) v += __shfl_xor_sync(~0u, v, s);
    return v;
}

/* Scores and softmax of one 16-token tile by one warp; then every warp multiplies P by V of all tiles for its own 16
 * dims (rows g and g+8 of warp w: dims 16w+g, 16w+g+8; columns 2t, 2t+1: heads), so nothing is reduced at the end. */
DEVICE void compute(Consumer &c, const Task &t)
{
    Shared &s = c.s;
    const int kind = t.sliding, count = s.segments[kind], w = c.warp;
    const bf16 *qkv = c.buffer<bf16>(t.qkv);
    const float none = -1e30f;
    uint4 ahead[4];
    if (count) fetch_q(c, qkv, s.segment[kind][0], ahead);
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        asm volatile("" : "+r"(c.lane)); /* no lane-dependent address is worth a register from chunk to chunk */
        const int lane = c.lane, g = c.g(), t2 = 2 * c.t();
        const Segment seg = s.segment[kind][i];
        const int low = s.low[kind][seg.column], base = s.base[seg.column], token0 = seg.page * NMK_PAGE_TOKENS;
        uint4 q[4];
#pragma unroll
        for (int k = 0; k < 4; k++) q[k] = ahead[k];
        if (i + 1 < count) fetch_q(c, qkv, s.segment[kind][i + 1], ahead);
        float max0 = none, max1 = none, sum0 = 0, sum1 = 0, o[4] = {0, 0, 0, 0};
        if (seg.last) { /* this step's own tokens of the sequence, straight from L2: token g is column g */
            const int pos = s.pos[seg.column], own = s.group[seg.column];
            const bf16 *kv = qkv + seg.kv_head * P::head_dim;
            /* an idle column's position is below any low */
            auto seen = [&](int n) { return s.group[n] == own && s.pos[n] <= pos && s.pos[n] >= low; };
            const bool mine = seen(g);
            uint4 key[4], v = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                key[k] = make_uint4(0, 0, 0, 0);
                if (mine) key[k] = load_l2(kv + g * ROWS + K0 + k * 32 + 8 * c.t());
            }
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (seen(t2 + j)) {
                    const u16 *from = kv + (t2 + j) * ROWS + V0 + w * 16 + g;
                    v.x |= (u32)__ldcg(from) << 16 * j, v.y |= (u32)__ldcg(from + 8) << 16 * j;
                }
            float a[4] = {0, 0, 0, 0}, b[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mma(a, make_uint4(key[k].x, 0, key[k].y, 0), q[k].x, q[k].y);
                mma(b, make_uint4(key[k].z, 0, key[k].w, 0), q[k].z, q[k].w);
            }
            const float s0 = mine ? a[0] + b[0] : none, s1 = mine ? a[1] + b[1] : none;
            max0 = tokens_max(s0), max1 = tokens_max(s1);
            const float p0 = mine ? exp2_fast(s0 - max0) : 0, p1 = mine ? exp2_fast(s1 - max1) : 0;
            sum0 = tokens_sum(p0), sum1 = tokens_sum(p1);
            mma(o, v, transpose_8x8(bf16_pair(p0, p1)), 0);
        }
#pragma unroll 1
        for (int k = 0; k < seg.pages; k += 2) {
            const bool two = k + 1 < seg.pages, mine = w < 4 || two; /* warps 0-3: first page, 4-7: second */
            const int x = c.pair++ & 1;
            c.wait_full(c.slot);
            Slot at = c.slot;
            if (w >= 4) at.advance(c.p.ring_stages);
            if (two && w >= 4) c.wait_full(at);
            float a[4] = {0, 0, 0, 0}, b[4] = {0, 0, 0, 0};
            u32 seen = 0;
            if (mine) {
                uint4 key[8];
                const uint4 *from = (const uint4 *)(c.ring + at.index * NMK_STAGE_BYTES + (w & 3) * 4096 + lane * 16);
#pragma unroll
                for (int j = 0; j < 8; j++) key[j] = from[j * 32], seen |= key[j].x;
#pragma unroll
                for (int j = 0; j < 4; j++) mma(a, key[2 * j], q[j].x, q[j].y), mma(b, key[2 * j + 1], q[j].z, q[j].w);
#pragma unroll
                for (int j = 0; j < 4; j++) a[j] += b[j];
            }
            c.release(seen);
            if (two) c.wait_full(c.slot), c.release(seen);
            if (mine) {
                const int token = token0 + (k + (w >> 2)) * NMK_PAGE_TOKENS + (w & 3) * 16 + g;
                if (token < low || token >= base) a[0] = a[1] = -INFINITY;
                if (token + 8 < low || token + 8 >= base) a[2] = a[3] = -INFINITY;
                const float m0 = tokens_max(fmaxf(fmaxf(a[0], a[2]), none));
                const float m1 = tokens_max(fmaxf(fmaxf(a[1], a[3]), none));
                const float p0 = exp2_fast(a[0] - m0), p1 = exp2_fast(a[1] - m1), p2 = exp2_fast(a[2] - m0),
                            p3 = exp2_fast(a[3] - m1), l0 = tokens_sum(p0 + p2), l1 = tokens_sum(p1 + p3);
                s.prob[x][w][lane] = make_uint2(transpose_8x8(bf16_pair(p0, p1)), transpose_8x8(bf16_pair(p2, p3)));
                if (g == 0) {
                    *(float2 *)&s.score_max[x][w][t2] = make_float2(m0, m1);
                    *(float2 *)&s.score_sum[x][w][t2] = make_float2(l0, l1);
                }
            }
            barrier_compute();
            float new0 = max0, new1 = max1;
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j < 4 || two) {
                    const float2 m = *(const float2 *)&s.score_max[x][j][t2];
                    new0 = fmaxf(new0, m.x), new1 = fmaxf(new1, m.y);
                }
            const float r0 = exp2_fast(max0 - new0), r1 = exp2_fast(max1 - new1);
            max0 = new0, max1 = new1, sum0 *= r0, sum1 *= r1;
            o[0] *= r0, o[1] *= r1, o[2] *= r0, o[3] *= r1;
#pragma unroll 1
            for (int h = 0; h < (two ? 8 : 4); h += 4) {
                c.wait_full(c.slot);
                const uint4 *from = (const uint4 *)(c.ring + c.slot.index * NMK_STAGE_BYTES + w * 512 + lane * 16);
                uint4 v[4];
                seen = 0;
#pragma unroll
                for (int j = 0; j < 4; j++) v[j] = from[j * 256], seen |= v[j].x;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint2 p = s.prob[x][h + j][lane];
                    const float2 m = *(const float2 *)&s.score_max[x][h + j][t2];
                    const float2 l = *(const float2 *)&s.score_sum[x][h + j][t2];
                    const float s0 = exp2_fast(m.x - max0), s1 = exp2_fast(m.y - max1);
                    float z[4] = {0, 0, 0, 0};
                    mma(z, v[j], p.x, p.y);
                    sum0 += l.x * s0, sum1 += l.y * s1;
                    o[0] += z[0] * s0, o[1] += z[1] * s1, o[2] += z[2] * s0, o[3] += z[3] * s1;
                }
                c.release(seen);
            }
        }
        if (w == 0 && g == 0) {
            float *ml = s.part_ml[c.job % TAGS];
            ml[t2] = max0, ml[t2 + 1] = max1, ml[8 + t2] = sum0, ml[9 + t2] = sum1;
        }
        c.hand(o);
    }
}

//@device store
/* part: [slot][8 warps][32 lanes] float4 as the MMA left it, then [slot][16]: max and sum of the 8 heads. */
DEVICE void store(Storer &c, const Task &t)
{
    const int kind = t.sliding, count = c.s.segments[kind];
    float4 *part = c.buffer<float4>(t.part);
#pragma unroll 1
    for (int i = 0; i < count; i++, c.job++) {
        if (!c.mine()) continue;
        const int slot = blockIdx.x + i * NMK_SMS;
        c.wait_job();
        const float4 *d = c.job_data();
        float4 v[8], ml = make_float4(0, 0, 0, 0);
        if (c.lane < 4) ml = *(const float4 *)&c.s.part_ml[c.job % TAGS][c.lane * 4];
        u32 seen = __float_as_uint(ml.x);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = d[j * 32], seen |= __float_as_uint(v[j].x);
        if (c.lane < 4) part[(u64)P::part_slots * 256 + slot * 4 + c.lane] = ml;
#pragma unroll
        for (int j = 0; j < 8; j++) part[(u64)slot * 256 + j * 32 + c.lane] = v[j];
        c.free_job(seen);
    }
}

//@reference
const int width = (P.heads + 2 * P.kv_heads) * P.head_dim, layers = t.sliding ? P.sliding_layers : P.full_layers;
const uint16_t *qkv = buffer(vm, t.qkv);
float *part = buffer(vm, t.part), *part_ml = part + (size_t)P.part_slots * SLOT_FLOATS;
int slot = 0; /* of the column's first chunk */
for (int n = 0; n < NMK_COLUMNS; n++) {
    const struct nmk_column *c = &vm->control->column[n];
    if (!active(vm, n)) continue;
    const struct chunks s = chunks_of(c, t.sliding, P.window);
    for (int i = 0; i < P.kv_heads * s.count; i++, slot++) {
        if (slot % NMK_SMS != sm->id) continue;
        const int head = i / s.count, chunk = i % s.count;
        const uint16_t *q = qkv + n * width + head * GROUP * HEAD_DIM, *k[16], *v[16];
        struct softmax *state = &sm->softmax;
        int own = 0;
        memset(state, 0, sizeof *state);
        for (int h = 0; h < GROUP; h++) state->m[h] = -1e30f;
        if (chunk == s.count - 1) { /* the last chunk holds this step's tokens of the sequence too */
            for (int o = 0; o < NMK_COLUMNS; o++) {
                const struct nmk_column *other = &vm->control->column[o];
                if (!active(vm, o) || other->group != c->group || other->pos > c->pos || other->pos < s.lo) continue;
                k[own] = qkv + o * width + (P.heads + head) * HEAD_DIM;
                v[own++] = qkv + o * width + (P.heads + P.kv_heads + head) * HEAD_DIM;
            }
            attend(state, q, k, v, own);
        }
        const int page0 = s.first + s.pages * chunk / s.count, page1 = s.first + s.pages * (chunk + 1) / s.count;
        for (int at = page0 * PAGE; at < page1 * PAGE && at < c->base; at += 16) {
            int tokens = 0;
            const uint16_t *page = kv_page(vm, c, at, t.sliding, layers, t.kv_layer, P.kv_heads, head);
            for (int pos = at; pos < at + 16; pos++) {
                if (pos < s.lo || pos >= c->base) continue;
                k[tokens] = page + pos % PAGE * HEAD_DIM;
                v[tokens++] = page + (PAGE + pos % PAGE) * HEAD_DIM;
            }
            attend(state, q, k, v, tokens);
        }
        /* the order in which the device's warps hold the result: warp = 16 dims, lane = 4 * (dim % 8) + head / 2 */
        for (int h = 0; h < GROUP; h++) {
            float *to = part + (size_t)slot * SLOT_FLOATS + h / 2 * 4 + h % 2;
            for (int dim = 0; dim < HEAD_DIM; dim++)
                to[dim / 16 * 128 + dim % 8 * 16 + dim % 16 / 8 * 2] = state->o[h][dim];
            part_ml[slot * 16 + h] = state->m[h], part_ml[slot * 16 + 8 + h] = state->l[h];
        }
    }
}
