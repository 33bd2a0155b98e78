/*@op
  name    = "prefill_route",
  summary = "top-k of the logits of the SM's share of the tokens, ascending, with weights; how often each is chosen",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"experts", "i32"}, {"experts_per_token", "i32"}, {"route_score", "i32"} },
  tile    = "every",
  task    = { },
  reads   = { {"logits", "f32", role = "compute", lo = "0", hi = "1"} },
  writes  = { {"choice", "i32", role = "compute", claim = true}, {"weight", "f32", role = "compute", claim = true},
              {"counts", "i32", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device compute
constexpr int ROWS = (P::experts + 15) / 16 * 16; /* a token's logits */
enum { SIGMOID, SOFTMAX_CHOSEN, SOFTMAX_ALL };
static_assert(P::experts <= 128, "four experts a lane");

/* A warp a token of the SM's share; ops/route.cu has the rule. */
DEVICE void compute(ChunkConsumer &c, const Task &t)
{
    const int lane = c.lane, each = (c.k.tokens + NMK_SMS - 1) / NMK_SMS;
    const int first = min((int)blockIdx.x * each, c.k.tokens), end = min(first + each, c.k.tokens);
    int *counts = (int *)c.staging(), *choices = c.buffer<int>(t.choice);
    float *weights = c.buffer<float>(t.weight);
    if (threadIdx.x < P::experts) counts[threadIdx.x] = 0;
    barrier_compute();
#pragma unroll 1
    for (int n = first + c.warp; n < end; n += WARPS_COMPUTE) {
        u32 key[4] = {0, 0, 0, 0};
        if (lane * 4 < P::experts) {
            const float4 v = __ldcg((const float4 *)(c.buffer<float>(t.logits) + (u64)n * ROWS) + lane);
            key[0] = key_of(v.x), key[1] = key_of(v.y), key[2] = key_of(v.z), key[3] = key_of(v.w);
#pragma unroll
            for (int j = 1; j < 4; j++)
                if (P::experts % 4 && lane * 4 + j >= P::experts) key[j] = 0;
        }
        float all = 0, most = value_of(__reduce_max_sync(~0u, max(max(key[0], key[1]), max(key[2], key[3]))));
        if (P::route_score == SOFTMAX_ALL) {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (key[j]) all += __expf(value_of(key[j]) - most);
            all = warp_sum(all);
        }
        int expert = 0;
        u32 logit = 0;
        choose_largest<P::experts_per_token>(key, lane, expert, logit);
        const float v = value_of(logit);
        if (P::route_score == SOFTMAX_CHOSEN) all = warp_sum(lane < P::experts_per_token ? __expf(v - most) : 0.f);
        int place = 0; /* in ascending order */
#pragma unroll
        for (int i = 0; i < P::experts_per_token; i++) place += __shfl_sync(~0u, expert, i) < expert;
        if (lane < P::experts_per_token) {
            const int pair = n * P::experts_per_token + place;
            choices[pair] = expert;
            weights[pair] = P::route_score == SIGMOID ? 1.f / (1.f + __expf(-v)) : __expf(v - most) / all;
            atomicAdd(counts + expert, 1);
        }
    }
    barrier_compute();
    if (threadIdx.x < P::experts) c.buffer<int>(t.counts)[blockIdx.x * P::experts + threadIdx.x] = counts[threadIdx.x];
}

//@reference
/* The rule of ops/route.cu: the largest logits, ties to the lowest expert; a weight is the logit's sigmoid, or its
 * softmax over those chosen (1) or over all (2). */
const int rows = (P.experts + 15) / 16 * 16;
int32_t *choices = buffer(vm, t.choice), *counts = (int32_t *)buffer(vm, t.counts) + sm->id * P.experts;
float *weights = buffer(vm, t.weight);
int end, first = routed(vm->chunk->tokens, sm->id, &end);
memset(counts, 0, sizeof(int32_t) * (size_t)P.experts);
for (int n = first; n < end; n++) {
    const float *logits = vm->forced ? (const float *)(vm->forced + (size_t)t.logits * 128) : buffer(vm, t.logits);
    char chosen[P.experts];
    float most = 0, all = 0;
    logits += (size_t)n * rows;
    memset(chosen, 0, sizeof chosen);
    for (int k = 0; k < P.experts_per_token; k++) {
        int best = -1;
        for (int e = 0; e < P.experts; e++)
            if (!chosen[e] && (best < 0 || logits[e] > logits[best])) best = e;
        chosen[best] = 1;
        if (k == 0) most = logits[best];
        all += expf(logits[best] - most);
    }
    if (P.route_score == 2)
        for (int e = (int)(all = 0); e < P.experts; e++) all += expf(logits[e] - most);
    for (int e = 0, k = n * P.experts_per_token; e < P.experts; e++) {
        if (!chosen[e]) continue;
        choices[k] = e, counts[e]++;
        weights[k++] = P.route_score ? expf(logits[e] - most) / all : 1 / (1 + expf(-logits[e]));
    }
}

//@test tolerance=1e-5 the largest logits, the lower of two that are equal, and how often each is chosen
/* Logits are those of expert e + shift, so the largest are known: the last ones, turned by the shift. */
float *logits = input(test, t.logits), *weight = expect_f32(test, t.weight), *choice = expect_f32(test, t.choice);
const int rows = (P.experts + 15) / 16 * 16, most = P.experts_per_token;
for (int n = 0; live(test, n); n++) {
    char chosen[P.experts];
    double all = 0, every = 0;
    for (int e = 0; e < P.experts; e++) {
        const int rank = (e + 5 * n) % P.experts; /* all are different, but the last that is chosen has an equal */
        logits[n * rows + e] = (float)(rank == P.experts - most - 1 ? rank + 1 : rank) / 4 - 1;
    }
    int left = most;
    for (int e = 0; e < P.experts; e++) {
        const int rank = (e + 5 * n) % P.experts;
        chosen[e] = rank > P.experts - most, left -= chosen[e];
        every += exp(logits[n * rows + e]);
    }
    for (int e = 0; e < P.experts && left; e++)
        if (!chosen[e] && (e + 5 * n) % P.experts >= P.experts - most - 1) chosen[e] = 1, left--;
    for (int e = 0; e < P.experts; e++) all += chosen[e] ? exp(logits[n * rows + e]) : 0;
    for (int e = 0, k = n * most; e < P.experts; e++) {
        const double score = logits[n * rows + e];
        if (!chosen[e]) continue;
        memcpy(choice + k, &(int32_t){e}, 4);
        const double share = exp(score) / (P.route_score == 1 ? all : every);
        weight[k++] = (float)(P.route_score == 0 ? 1 / (1 + exp(-score)) : share);
    }
}
