/*@op
  name    = "route",
  summary = "top-k of the router logits per column and their weights; ascending list of active experts",
  params  = { {"experts", "i32"}, {"experts_per_token", "i32"}, {"route_score", "i32"} },
  tile    = "every",
  task    = { {"ticket", "i32"} },
  reads   = { {"logits", "f32", role = "compute", lo = "0", hi = "experts"} },
  writes  = { {"route", role = "compute", scope = "sm"} },
  cost    = "0",
@*/
//@device compute
/* A chosen expert's weight: its logit's sigmoid, or the softmax over those chosen, or over all. */
enum { SIGMOID, SOFTMAX_CHOSEN, SOFTMAX_ALL };
constexpr int ROWS = (P::experts + 15) / 16 * 16; /* of the router */
constexpr int WORDS = (P::experts + 31) / 32;
static_assert(WORDS <= 4 && P::experts_per_token <= 8, "route holds 4 logits a lane and 8 choices a column");

#ifdef NMK_WIDE
/* The pairs of columns and experts: every thread is an expert, then a choice.  Returns the active experts. */
DEVICE int list_pairs(Consumer &c, int b)
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
    return all;
}
#endif

DEVICE void compute(Consumer &c, const Task &t)
{
    const int b = c.desc()[7] & 1;
    Shared &s = c.s;
    const int lane = c.lane;
#ifdef NMK_WIDE
    if (c.warp < 4) s.choices.columns[c.warp * 32 + lane] = 0;
    barrier_compute();
#endif
#pragma unroll 1
    for (int turn = 0; turn < COLUMN_TILES; turn++) {
        const int n = turn * TILE_COLUMNS + c.warp; /* one warp a column */
#ifndef NMK_WIDE
        if (lane < 4) s.chosen[n][lane] = 0;
#endif
        if (c.live(n)) {
            u32 key[4] = {0, 0, 0, 0};
            if (lane * 4 < P::experts) {
                const float4 v = __ldcg((const float4 *)(c.buffer<float>(t.logits) + n * ROWS) + lane);
                key[0] = key_of(v.x), key[1] = key_of(v.y), key[2] = key_of(v.z), key[3] = key_of(v.w);
#pragma unroll
                for (int j = 1; j < 4; j++)
                    if (P::experts % 4 && lane * 4 + j >= P::experts) key[j] = 0;
            }
            float all = 0, most = 0; /* the largest logit; the sum of exponentials relative to it */
            if (P::route_score == SOFTMAX_ALL) {
                most = value_of(__reduce_max_sync(~0u, max(max(key[0], key[1]), max(key[2], key[3]))));
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (key[j]) all += __expf(value_of(key[j]) - most);
                all = warp_sum(all);
            }
            int expert = 0;
            u32 logit = 0;
            choose_largest<P::experts_per_token>(key, lane, expert, logit);
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
                s.top_expert[n][lane] = expert;
                float &weight = s.top_weight[n][lane];
#endif
                weight = P::route_score == SIGMOID ? 1.f / (1.f + __expf(-v)) : __expf(v - most) / all;
            }
#ifndef NMK_WIDE
#pragma unroll
            for (int q = 0; q < WORDS; q++) {
                const bool in = lane < P::experts_per_token && expert >> 5 == q;
                const u32 mask = __reduce_or_sync(~0u, in ? 1u << (expert & 31) : 0u);
                if (lane == 0) s.chosen[n][q] = mask;
            }
#endif
        }
    }
    barrier_compute();
#ifdef NMK_WIDE
    const int active = list_pairs(c, b);
    if (c.warp != 0) return;
#else
    if (c.warp != 0) return;
    u32 mask[WORDS];
    int before[WORDS + 1];
    before[0] = 0;
#pragma unroll
    for (int q = 0; q < WORDS; q++) {
        mask[q] = __reduce_or_sync(~0u, lane < 8 ? s.chosen[lane][q] : 0u);
        before[q + 1] = before[q] + __popc(mask[q]);
        if (lane == 0) s.active_mask[q] = mask[q], s.active_before[q] = before[q];
        if (mask[q] >> lane & 1) s.expert[b][before[q] + __popc(mask[q] & ((1u << lane) - 1))] = q * 32 + lane;
    }
    const int active = before[WORDS];
#pragma unroll 1
    for (int i = lane; i < active * 8; i += 32) s.weight[b][i] = 0.f;
    if (lane == 0) s.active[b] = active;
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < 8 * P::experts_per_token; i += 32) {
        const int m = i / P::experts_per_token, k = i % P::experts_per_token;
        if (!c.live(m)) continue;
        const int e = s.top_expert[m][k];
        const int slot = s.active_before[e >> 5] + __popc(s.active_mask[e >> 5] & ((1u << (e & 31)) - 1));
        s.weight[b][slot * 8 + m] = s.top_weight[m][k];
    }
#endif
    if (lane == 0 && blockIdx.x == 0) {
        u32 *tickets = (u32 *)c.p.tickets + t.ticket * 64;
        tickets[(c.p.epoch + 1 & 1) * 32] = 0; /* the next step's: nobody draws from it in this one */
        atomicAdd(tickets + 1, (u32)active);   /* active experts so far, for benchmarks and metrics */
    }
    c.arrive(&s.route_ready[b]);
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
int pairs = 0;
r->instance = d[7], r->active = 0;
for (int e = 0; e < P.experts; e++) {
    int chosen = 0;
    for (int n = 0; n < NMK_COLUMNS; n++) chosen |= weight[n][e] != 0;
    if (!chosen) continue;
    r->expert[r->active] = e;
    for (int n = 0; n < NMK_COLUMNS; n++) {
        r->weight[r->active][n] = weight[n][e];
        r->row[r->active][n] = NMK_COLUMNS > 8 ? pairs : r->active * NMK_COLUMNS + n;
        pairs += weight[n][e] != 0;
    }
    r->active++;
}
if (sm->id == 0) {
    atomic_store(ticket_at(vm, t.ticket, vm->epoch + 1), 0);
    atomic_fetch_add(ticket_at(vm, t.ticket, 0) + 1, (uint32_t)r->active);
}
