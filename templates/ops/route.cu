/*@op
  name    = "route",
  summary = "top-k of the router logits per column and their weights; ascending list of active experts",
  params  = { {"experts", "i32"}, {"experts_per_token", "i32"}, {"route_score", "i32"} },
  tile    = "every",
  task    = { {"ticket", "i32"} },
  reads   = { {"logits", "f32", role = "compute", lo = "0", hi = "experts", awaits = true} },
  writes  = { {"route", role = "compute", scope = "sm", awaits = true} },
  cost    = "0",
@*/
//@device compute
typedef Router<P::experts, P::experts_per_token, P::route_score> R;
constexpr int ROWS = R::ROWS;

#ifdef NMK_WIDE
/* The pairs of columns and experts: every thread is an expert, then a choice. */
DEVICE void list_pairs(Consumer &c, int b)
{
    const int lane = c.lane, thread = c.warp * 32 + lane;
    Routes &r = c.s.routes[b];
    Choices &s = c.s.choices;
    u64 columns = 0;
    int pairs = 0, before = 0; /* of the warp's experts up to this one; before the warp's first */
    u32 mine = 0;
    if (c.warp < 4) {
        columns = s.columns[thread], pairs = count_bits(columns);
        mine = __ballot_sync(~0u, columns != 0);
#pragma unroll 1
        for (int i = 1; i <= 16; i <<= 1) {
            const int v = __shfl_up_sync(~0u, pairs, i);
            if (lane >= i) pairs += v;
        }
        if (lane == 31) s.pairs[c.warp] = pairs, s.active[c.warp] = mine;
    }
    barrier_compute();
    int all = 0, pairs_before = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        if (w < c.warp) before += __popc(s.active[w]), pairs_before += s.pairs[w];
        all += __popc(s.active[w]);
    }
    if (c.warp < 4 && columns != 0) {
        const int slot = before + __popc(mine & ((1u << lane) - 1));
        s.slot[thread] = slot, c.s.expert[b][slot] = thread;
        r.columns[slot] = columns, r.first[slot] = pairs_before + pairs - count_bits(columns);
        if (slot + 1 == all) r.first[all] = pairs_before + pairs;
    }
    if (thread == 0) c.s.active[b] = all;
    barrier_compute();
#pragma unroll 1
    for (int i = thread; i < PLACES * P::experts_per_token; i += WARPS_COMPUTE * 32) {
        const int n = i / P::experts_per_token, k = i % P::experts_per_token;
        if (!c.live(n)) continue;
        const int slot = s.slot[s.expert[n][k]], pair = r.first[slot] + count_bits(r.columns[slot] & below(n));
        r.column[pair] = n, r.weight[pair] = s.weight[n][k];
    }
    barrier_compute();
}
#endif

/* The lane's four logits of a column. */
DEVICE void load_keys(Consumer &c, const float *logits, int column, u32 (&key)[4])
{
    float4 v = make_float4(0, 0, 0, 0);
    u32 looks = 0;
#pragma unroll 1
    do {
        if (c.lane * 4 < P::experts) v = load_floats((const float4 *)(logits + column * ROWS) + c.lane);
    } while (POSTED && c.lacks(least(v), looks));
    R::keys_of(v, c.lane, key);
}

#ifndef NMK_WIDE
/* One less where a < b.  By the borrow: what the compiler makes of a comparison has one more instruction, and each
 * waits for the last. */
DEVICE void count_less(u32 &count, u32 a, u32 b)
{
    asm("{\n.reg .u32 t;\nsub.cc.u32 t, %1, %2;\nsubc.u32 %0, %0, 0;\n}" : "+r"(count) : "r"(a), "r"(b));
}

/* How many of 32 keys come before the lane's, which is one of them: those that are larger, and of equal ones those of
 * lower lanes. */
DEVICE int rank_of(const u32 *keys, u32 mine, int lane)
{
    u32 count[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint4 v = ((const uint4 *)keys)[i];
        count_less(count[0], mine, v.x), count_less(count[1], mine, v.y);
        count_less(count[2], mine, v.z), count_less(count[3], mine, v.w);
    }
    return __popc(__match_any_sync(~0u, mine) & ((1u << lane) - 1)) - (count[0] + count[1] + count[2] + count[3]);
}

/* One live column: four warps find the eight largest of 32 logits each, and the first the eight largest of those, by
 * counting.  Choosing one after the other has many more steps, of which each waits for the last. */
DEVICE void route_alone(Consumer &c, const float *logits, int b)
{
    Shared &s = c.s;
    const int lane = c.lane, thread = c.warp * 32 + lane;
    int expert = thread, rank = 0;
    u32 mine = 0;
    if (c.warp < 4) {
        float v = 0;
        u32 looks = 0;
        logits += s.only * ROWS;
#pragma unroll 1
        do {
            if (P::experts == 128 || thread < P::experts) v = load_float(logits + thread);
        } while (POSTED && c.lacks(__float_as_uint(v), looks));
        mine = P::experts == 128 || thread < P::experts ? key_of(v) : 0;
        s.logit[thread] = mine;
        const u32 *keys = s.logit + c.warp * 32;
        int to = c.warp * 8;
#pragma unroll 1
        for (;;) {
            __syncwarp();
            rank = rank_of(keys, mine, lane);
            if (rank < 8) s.best[to + rank] = mine, s.best_expert[to + rank] = expert;
            if (to == 32) break;
            barrier_compute();
            if (c.warp > 0) break;
            keys = s.best, to = 32, mine = s.best[lane], expert = s.best_expert[lane];
        }
    } else {
        if (c.warp < 6) s.weight[b][thread - 128] = 0.f;
        barrier_compute();
    }
    if (c.warp == 0) {
        __syncwarp();
        const int place = min(lane, P::experts_per_token - 1);
        const u32 *best = s.best_expert + 32;
        const u32 logit = s.best[32 + place];
        u32 count = 0;
        expert = best[place];
#pragma unroll
        for (int j = 0; j < P::experts_per_token; j++) count_less(count, best[j], expert);
        const int slot = -count;
        s.expert[b][slot] = expert; /* some lanes the same */
        s.active[b] = P::experts_per_token;
        c.arrive(&s.route_listed[b]);
        float all = 0, most = value_of(s.best[32]);
        if (P::route_score == SOFTMAX_ALL) {
            const uint4 v = ((const uint4 *)s.logit)[lane];
            const u32 key[4] = {v.x, v.y, v.z, v.w};
            all = R::sum_all(key, most);
        }
        s.weight[b][slot * 8 + s.only] = R::weigh(lane, logit, most, all);
    } else {
        c.arrive(&s.route_listed[b]);
    }
    c.arrive(&s.route_ready[b]);
}
#endif

DEVICE void compute(Consumer &c, const Task &t)
{
    const int b = c.desc()[7] & 1;
    const float *logits = c.exchange<float>(t.logits);
    Shared &s = c.s;
#ifdef NMK_WIDE
    const int lane = c.lane, thread = c.warp * 32 + lane;
    if (c.warp < 4) s.choices.columns[thread] = 0;
    barrier_compute();
#pragma unroll 1
    for (int n = c.warp; n < PLACES; n += WARPS_COMPUTE) { /* one warp a column */
        if (!c.live(n)) continue;
        u32 key[4], logit = 0;
        int expert = 0;
        float all = 0, most = 0;
        load_keys(c, logits, n, key);
        if (P::route_score == SOFTMAX_ALL) all = R::sum_all(key, most);
        choose_largest<P::experts_per_token>(key, lane, expert, logit);
        if (P::route_score == SOFTMAX_CHOSEN) most = value_of(__shfl_sync(~0u, logit, 0));
        const float weight = R::weigh(lane, logit, most, all);
        if (lane >= P::experts_per_token) continue;
        atomicOr(&s.choices.columns[expert], (Mask)1 << n);
        s.choices.expert[n][lane] = expert, s.choices.weight[n][lane] = weight;
    }
    barrier_compute();
    list_pairs(c, b);
    c.arrive(&s.route_listed[b]), c.arrive(&s.route_ready[b]);
#else
    if constexpr (POSTED) c.wait(&s.route_free[b], (c.desc()[7] >> 1 & 1) ^ 1);
    if (s.only >= 0) route_alone(c, logits, b);
    else R::route_all(c, b, [&](int n, u32 (&key)[4]) { load_keys(c, logits, n, key); });
#endif
    if (threadIdx.x == 0 && blockIdx.x == 0) count_active(c, t.ticket, s.active[b]);
}

//@reference
const float *from = vm->forced ? (const float *)(vm->forced + (size_t)t.logits * 128) : buffer(vm, t.logits);
const int rows = (P.experts + 15) / 16 * 16;
float logits[NMK_COLUMNS][P.experts];
for (int n = 0; n < NMK_COLUMNS; n++) memcpy(logits[n], from + n * rows, sizeof logits[n]);
make_route(vm, sm, d, t.ticket, P.experts, P.experts_per_token, P.route_score, logits[0]);
