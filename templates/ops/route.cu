/*@op
  name    = "route",
  summary = "top-k of the router logits per column and their weights; ascending list of active experts",
  params  = { {"experts", "i32"}, {"experts_per_token", "i32"}, {"route_score", "i32"}, {"summed", "i32"},
              {"logit_copies", "i32"}, {"logit_units", "i32"}, {"hidden", "i32"}, {"eps", "f32"} },
  tile    = "every",
  task    = { {"ticket", "i32"} },
  reads   = { {"logits", "f32", role = "compute", lo = "0", hi = "logit_units", awaits = true} },
  writes  = { {"route", role = "compute", scope = "sm", awaits = true} },
  cost    = "0",
@*/
//@device compute
/* A chosen expert's weight: its logit's sigmoid, or the softmax over those chosen, or over all. */
enum { SIGMOID, SOFTMAX_CHOSEN, SOFTMAX_ALL };
constexpr int ROWS = (P::experts + 15) / 16 * 16; /* of the router */
constexpr int WORDS = (P::experts + 31) / 32;
/* The logits come from router_sum. */
constexpr bool SUMMED = P::summed && !POSTED;
static_assert(WORDS <= 4 && P::experts_per_token <= 8, "route holds 4 logits a lane and 8 choices a column");

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

/* The weight of the i-th largest logit, by lane i; most and all: see sum_all. */
DEVICE float weigh(const Consumer &c, u32 logit, float most, float all)
{
    const float v = value_of(logit), each = __expf(P::route_score == SIGMOID ? -v : v - most);
    if (P::route_score == SOFTMAX_CHOSEN) {
        all = c.lane < P::experts_per_token ? each : 0.f;
#pragma unroll
        for (int i = 1; i < 8; i <<= 1) all += __shfl_xor_sync(~0u, all, i);
    }
    const float weight = P::route_score == SIGMOID ? 1.f / (1.f + each) : each / all;
    return POSTED && weight == 0.f ? 1.17549435e-38f : weight; /* it is chosen, and what it posts is awaited */
}

/* The largest logit and the sum of the exponentials of all relative to it. */
DEVICE float sum_all(const u32 (&key)[4], float &most)
{
    float all = 0;
    most = value_of(__reduce_max_sync(~0u, max(max(key[0], key[1]), max(key[2], key[3]))));
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (key[j]) all += __expf(value_of(key[j]) - most);
    return warp_sum(all);
}

/* A column's sums, and what makes logits of them. */
constexpr int SUMS = ROWS + 2;
DEVICE const long long *sums_of(const float *logits, int column) { return (const long long *)logits + column * SUMS; }
DEVICE longlong2 two_sums(const long long *sums)
{
    longlong2 sum = make_longlong2(0, 0);
#pragma unroll
    for (int i = 0; i < P::logit_copies; i++) {
        const longlong2 v = __ldcg((const longlong2 *)(sums + i * (NMK_COLUMNS * SUMS)));
        sum.x += v.x, sum.y += v.y;
    }
    return sum;
}
DEVICE float scale_of(const long long *sums)
{
    const longlong2 squares = two_sums(sums + ROWS);
    return rsqrtf(nmk_squares(squares.x, squares.y) * (1.f / P::hidden) + P::eps) * (1.f / (1 << NMK_FIXED_BITS));
}

/* The lane's four logits of a column. */
DEVICE void load_keys(Consumer &c, const float *logits, int column, u32 (&key)[4])
{
    float4 v = make_float4(0, 0, 0, 0);
    u32 looks = 0;
    if constexpr (SUMMED) {
        const long long *sums = sums_of(logits, column), *four = sums + min(c.lane * 4, ROWS - 4);
        const longlong2 u = two_sums(four), w = two_sums(four + 2);
        const float scale = scale_of(sums);
        v = make_float4((float)u.x * scale, (float)u.y * scale, (float)w.x * scale, (float)w.y * scale);
    } else {
#pragma unroll 1
        do {
            if (c.lane * 4 < P::experts) v = load_floats((const float4 *)(logits + column * ROWS) + c.lane);
        } while (POSTED && c.lacks(least(v), looks));
    }
    key[0] = key_of(v.x), key[1] = key_of(v.y), key[2] = key_of(v.z), key[3] = key_of(v.w);
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (P::experts < 128 && c.lane * 4 + j >= P::experts) key[j] = 0;
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
        if constexpr (SUMMED) {
            const long long *sums = sums_of(logits, s.only);
            const longlong2 two = two_sums(sums + min(thread & ~1, ROWS - 2));
            v = (float)(thread & 1 ? two.y : two.x) * scale_of(sums);
        } else {
            logits += s.only * ROWS;
#pragma unroll 1
            do {
                if (P::experts == 128 || thread < P::experts) v = load_float(logits + thread);
            } while (POSTED && c.lacks(__float_as_uint(v), looks));
        }
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
            all = sum_all(key, most);
        }
        s.weight[b][slot * 8 + s.only] = weigh(c, logit, most, all);
    } else {
        c.arrive(&s.route_listed[b]);
    }
    c.arrive(&s.route_ready[b]);
}

/* Each warp has a column. */
DEVICE void route_all(Consumer &c, const float *logits, int b)
{
    Shared &s = c.s;
    const int lane = c.lane, n = c.warp;
    const bool live = c.live(n), chose = live && lane < P::experts_per_token;
    u32 key[4], logit = 0;
    int expert = 0, slot = 0, active = 0;
    float all = 0, most = 0;
    ((float2 *)s.weight[b])[c.warp * 32 + lane] = make_float2(0, 0);
    if (live) {
        load_keys(c, logits, n, key);
        if (P::route_score == SOFTMAX_ALL) all = sum_all(key, most);
        choose_largest<P::experts_per_token>(key, lane, expert, logit);
    }
#pragma unroll
    for (int q = 0; q < WORDS; q++) {
        const u32 mask = __reduce_or_sync(~0u, chose && expert >> 5 == q ? 1u << (expert & 31) : 0u);
        if (lane == 0) s.chosen[b][n][q] = mask;
    }
    barrier_compute();
#pragma unroll
    for (int q = 0; q < WORDS; q++) {
        const u32 mask = __reduce_or_sync(~0u, lane < 8 ? s.chosen[b][lane][q] : 0u);
        if (n == q && mask >> lane & 1) s.expert[b][active + __popc(mask & ((1u << lane) - 1))] = q * 32 + lane;
        if (expert >> 5 == q) slot = active + __popc(mask & ((1u << (expert & 31)) - 1));
        active += __popc(mask);
    }
    if (threadIdx.x == 0) s.active[b] = active;
    c.arrive(&s.route_listed[b]);
    if (P::route_score == SOFTMAX_CHOSEN) most = value_of(__shfl_sync(~0u, logit, 0));
    const float weight = weigh(c, logit, most, all);
    if (chose) s.weight[b][slot * 8 + n] = weight;
    c.arrive(&s.route_ready[b]);
}
static_assert(sizeof(Shared::weight) == 2 * WARPS_COMPUTE * 32 * sizeof(float2), "weights of all slots");
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
        if (P::route_score == SOFTMAX_ALL) all = sum_all(key, most);
        choose_largest<P::experts_per_token>(key, lane, expert, logit);
        if (P::route_score == SOFTMAX_CHOSEN) most = value_of(__shfl_sync(~0u, logit, 0));
        const float weight = weigh(c, logit, most, all);
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
    else route_all(c, logits, b);
#endif
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        u32 *tickets = (u32 *)c.p.tickets + t.ticket * 64;
        tickets[(c.p.epoch + 1 & 1) * 32] = 0; /* the next step's: nobody draws from it in this one */
        atomicAdd(tickets + 1, (u32)s.active[b]); /* active experts so far, for benchmarks and metrics */
    }
}

//@reference
/* All scores are monotone, so the largest logits are the largest scores; ties go to the lowest expert. */
const void *from = vm->forced ? vm->forced + (size_t)t.logits * 128 : buffer(vm, t.logits);
const int posted = variant_of(vm)->exchange_bytes > 0, summed = P.summed && !posted, rows = (P.experts + 15) / 16 * 16;
const uint64_t *sums = from;
struct vm_route *r = &sm->route[d[7] & 1];
float weight[NMK_COLUMNS][P.experts], logits[P.experts];
memset(weight, 0, sizeof weight);
for (int n = 0; n < NMK_COLUMNS; n++) {
    if (!active(vm, n)) continue;
    uint64_t sum[rows + 2];
    memset(sum, 0, sizeof sum);
    for (int i = 0; summed && i < P.logit_copies * (rows + 2); i++)
        sum[i % (rows + 2)] += sums[(i / (rows + 2) * NMK_COLUMNS + n) * (rows + 2) + i % (rows + 2)];
    const float scale = 1.0f / sqrtf(nmk_squares(sum[rows], sum[rows + 1]) / P.hidden + P.eps) / (1 << NMK_FIXED_BITS);
    for (int e = 0; e < P.experts; e++)
        logits[e] = summed ? (float)(int64_t)sum[e] * scale : ((const float *)from)[n * rows + e];
    float most = 0, all = 0; /* of softmax */
    int chosen[P.experts_per_token];
    for (int k = 0; k < P.experts_per_token; k++) {
        int best = -1;
        for (int e = 0; e < P.experts; e++)
            if (weight[n][e] == 0 && (best < 0 || logits[e] > logits[best])) best = e;
        weight[n][best] = 1.0f / (1.0f + expf(-logits[best]));
        chosen[k] = best;
        if (k == 0) most = logits[best];
        all += expf(logits[best] - most);
    }
    if (P.route_score == 2)
        for (int e = (int)(all = 0); e < P.experts; e++) all += expf(logits[e] - most);
    for (int k = 0; P.route_score && k < P.experts_per_token; k++)
        weight[n][chosen[k]] = expf(logits[chosen[k]] - most) / all;
}
/* Of h: of each pair of both one after the other, in order of columns or of experts; or with room for all of them. */
int pairs = 0, of_column[NMK_COLUMNS];
for (int n = 0; n < NMK_COLUMNS; n++) of_column[n] = n * P.experts_per_token;
r->instance = d[7], r->active = 0;
for (int e = 0; e < P.experts; e++) {
    int chosen = 0;
    for (int n = 0; n < NMK_COLUMNS; n++) chosen |= weight[n][e] != 0;
    if (!chosen) continue;
    r->expert[r->active] = e;
    for (int n = 0; n < NMK_COLUMNS; n++) {
        r->weight[r->active][n] = weight[n][e];
        r->row[r->active][n] = NMK_COLUMNS > 8 ? pairs : posted ? of_column[n] : r->active * NMK_COLUMNS + n;
        pairs += weight[n][e] != 0, of_column[n] += weight[n][e] != 0;
    }
    r->active++;
}
if (sm->id == 0) {
    atomic_store(ticket_at(vm, t.ticket, vm->epoch + 1), 0);
    atomic_fetch_add(ticket_at(vm, t.ticket, 0) + 1, (uint32_t)r->active);
}
