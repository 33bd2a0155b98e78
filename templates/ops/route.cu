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
/* A chosen expert's weight: its logit's sigmoid, or the softmax over those chosen, or over all. */
enum { SIGMOID, SOFTMAX_CHOSEN, SOFTMAX_ALL };
constexpr int ROWS = (P::experts + 15) / 16 * 16; /* of the router */
constexpr int WORDS = (P::experts + 31) / 32;
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
#else
/* Of one live column, by all warps: lane i of the first warp gets the i-th largest logit, its expert, and its own four
 * keys.  Two threads count how many of the other logits come before that of their expert, each of half of them: few
 * steps, of which each waits for the last, where choose_largest has many. */
DEVICE void choose_alone(Consumer &c, const float *logits, u32 (&key)[4], int &expert, u32 &logit)
{
    constexpr int EIGHTS = (P::experts + 7) / 8;
    Shared &s = c.s;
    const int thread = c.warp * 32 + c.lane, e = thread / 2, odd = thread & 1;
    /* of an expert at least 1: so all logits have an order, and as many are chosen as are to be */
    if (thread < 128) {
        float v = 0;
        u32 looks = 0;
#pragma unroll 1
        do {
            if (thread < P::experts) v = load_float(logits + thread);
        } while (POSTED && c.lacks(__float_as_uint(v), looks));
        s.logit[thread] = thread < P::experts ? max(key_of(v), 1u) : 0;
    }
    barrier_compute();
    const u32 mine = s.logit[e];
    const uint4 *from = (const uint4 *)s.logit + odd;
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < EIGHTS; i++) {
        const uint4 v = from[2 * i];
        const u32 most = mine - (e / 4 > 2 * i + odd); /* of equal logits those of lower experts come first */
        rank += (v.x > most) + (v.y > most) + (v.z > most) + (v.w > most);
    }
    if (!odd) { /* the expert's own four */
        const uint4 v = ((const uint4 *)s.logit)[e / 4];
        rank += (e % 4 > 0 && v.x == mine) + (e % 4 > 1 && v.y == mine) + (e % 4 > 2 && v.z == mine);
    }
    rank += __shfl_xor_sync(~0u, rank, 1);
    if (!odd && rank < P::experts_per_token && e < P::experts) s.top_expert[rank] = e, s.top_logit[rank] = mine;
    barrier_compute();
    if (c.warp > 0) return;
    if (c.lane < P::experts_per_token) expert = s.top_expert[c.lane], logit = s.top_logit[c.lane];
    if (P::route_score == SOFTMAX_ALL) {
        const uint4 v = ((const uint4 *)s.logit)[c.lane];
        key[0] = v.x, key[1] = v.y, key[2] = v.z, key[3] = v.w;
    }
}

/* The list of what choose_alone left, by the first warp.  Returns the slot of the lane's expert. */
DEVICE int list_alone(Consumer &c, int b, int expert)
{
    int slot = 0;
#pragma unroll
    for (int j = 0; j < P::experts_per_token; j++) slot += c.s.top_expert[j] < expert;
    if (c.lane < P::experts_per_token) c.s.expert[b][slot] = expert;
    if (c.lane == 0) c.s.active[b] = P::experts_per_token;
    return slot;
}

/* The list of what every warp's column chose.  Returns the slot of the lane's expert. */
DEVICE int list_all(Consumer &c, int b, int expert)
{
    Shared &s = c.s;
    const int lane = c.lane;
    const bool chose = c.live(c.warp) && lane < P::experts_per_token;
    int slot = 0, active = 0;
#pragma unroll
    for (int q = 0; q < WORDS; q++) {
        const u32 mask = __reduce_or_sync(~0u, chose && expert >> 5 == q ? 1u << (expert & 31) : 0u);
        if (lane == 0) s.chosen[b][c.warp][q] = mask;
    }
    barrier_compute();
#pragma unroll
    for (int q = 0; q < WORDS; q++) {
        const u32 mask = __reduce_or_sync(~0u, lane < 8 ? s.chosen[b][lane][q] : 0u);
        if (c.warp == q && mask >> lane & 1) s.expert[b][active + __popc(mask & ((1u << lane) - 1))] = q * 32 + lane;
        if (expert >> 5 == q) slot = active + __popc(mask & ((1u << (expert & 31)) - 1));
        active += __popc(mask);
    }
    if (threadIdx.x == 0) s.active[b] = active;
    return slot;
}
#endif

/* The sum of the exponentials of all logits relative to the largest. */
DEVICE float sum_all(const u32 (&key)[4], float &most)
{
    float all = 0;
    most = value_of(__reduce_max_sync(~0u, max(max(key[0], key[1]), max(key[2], key[3]))));
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (key[j]) all += __expf(value_of(key[j]) - most);
    return warp_sum(all);
}

DEVICE void compute(Consumer &c, const Task &t)
{
    const int b = c.desc()[7] & 1;
    Shared &s = c.s;
    const int lane = c.lane, thread = c.warp * 32 + lane;
#ifdef NMK_WIDE
    constexpr bool alone = false;
    if (c.warp < 4) s.choices.columns[thread] = 0;
    barrier_compute();
#else
    const bool alone = s.only >= 0;
    if constexpr (POSTED) c.wait(&s.route_free[b], (c.desc()[7] >> 1 & 1) ^ 1);
    for (int i = thread; i < SLOTS * 4; i += WARPS_COMPUTE * 32) ((float2 *)s.weight[b])[i] = make_float2(0, 0);
#endif
#pragma unroll 1
    for (int turn = 0; turn < COLUMN_TILES; turn++) {
        const int n = alone ? s.only : turn * TILE_COLUMNS + c.warp; /* one warp a column */
        const bool mine = alone ? c.warp == 0 : c.live(n);
        const float *logits = c.exchange<float>(t.logits) + n * ROWS;
        u32 key[4] = {0, 0, 0, 0}, logit = 0;
        int expert = 0;
        float all = 0, most = 0; /* the largest logit; the sum of exponentials relative to it */
#ifndef NMK_WIDE
        if (alone) choose_alone(c, logits, key, expert, logit);
#endif
        if (mine && !alone) {
            float4 v = make_float4(0, 0, 0, 0);
            u32 looks = 0;
#pragma unroll 1
            do {
                if (lane * 4 < P::experts) v = load_floats((const float4 *)logits + lane);
            } while (POSTED && c.lacks(least(v), looks));
            key[0] = key_of(v.x), key[1] = key_of(v.y), key[2] = key_of(v.z), key[3] = key_of(v.w);
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (P::experts < 128 && lane * 4 + j >= P::experts) key[j] = 0;
        }
        if (P::route_score == SOFTMAX_ALL && mine) all = sum_all(key, most);
        if (mine && !alone) choose_largest<P::experts_per_token>(key, lane, expert, logit);
#ifndef NMK_WIDE
        int slot = 0;
        if (!alone) slot = list_all(c, b, expert);
        else if (mine) slot = list_alone(c, b, expert);
        c.arrive(&s.route_listed[b]);
#endif
        if (mine) {
            if (P::route_score == SOFTMAX_CHOSEN) {
                most = value_of(__shfl_sync(~0u, logit, 0));
                all = warp_sum(lane < P::experts_per_token ? __expf(value_of(logit) - most) : 0.f);
            }
            if (lane < P::experts_per_token) {
                const float v = value_of(logit);
#ifdef NMK_WIDE
                atomicOr(&s.choices.columns[expert], (Mask)1 << n);
                s.choices.expert[n][lane] = expert;
                float &weight = s.choices.weight[n][lane];
#else
                float &weight = s.weight[b][slot * 8 + n];
#endif
                weight = P::route_score == SIGMOID ? 1.f / (1.f + __expf(-v)) : __expf(v - most) / all;
                if (POSTED && weight == 0.f) weight = 1.17549435e-38f; /* it is chosen, and what it posts is awaited */
            }
        }
    }
#ifdef NMK_WIDE
    barrier_compute();
    list_pairs(c, b);
    c.arrive(&s.route_listed[b]);
#endif
    c.arrive(&s.route_ready[b]);
    if (thread == 0 && blockIdx.x == 0) {
        u32 *tickets = (u32 *)c.p.tickets + t.ticket * 64;
        tickets[(c.p.epoch + 1 & 1) * 32] = 0; /* the next step's: nobody draws from it in this one */
        atomicAdd(tickets + 1, (u32)s.active[b]); /* active experts so far, for benchmarks and metrics */
    }
}

//@reference
/* All scores are monotone, so the largest logits are the largest scores; ties go to the lowest expert. */
const float *logits = vm->forced ? (const float *)(vm->forced + (size_t)t.logits * 128) : buffer(vm, t.logits);
struct vm_route *r = &sm->route[d[7] & 1];
float weight[NMK_COLUMNS][P.experts];
memset(weight, 0, sizeof weight);
for (int n = 0; n < NMK_COLUMNS; n++, logits += (P.experts + 15) / 16 * 16) {
    if (!active(vm, n)) continue;
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
const int posted = variant_of(vm)->exchange_bytes > 0;
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
