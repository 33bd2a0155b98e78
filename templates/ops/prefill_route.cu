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
DEVICE void compute(Consumer &c, const Task &t) {}

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
