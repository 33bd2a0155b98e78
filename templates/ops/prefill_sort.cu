/*@op
  name    = "prefill_sort",
  summary = "pairs of a token and its choice, by expert and in ascending order; an expert begins at a multiple of 64",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"experts", "i32"}, {"experts_per_token", "i32"} },
  tile    = "every",
  task    = { },
  reads   = { {"choice", "i32", role = "compute", lo = "0", hi = "1"},
              {"counts", "i32", role = "compute", lo = "0", hi = "1"} },
  writes  = { {"first", "i32", role = "compute", claim = true}, {"pair", "i32", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device compute
DEVICE void compute(Consumer &c, const Task &t) {}

//@reference
/* A pair is token * experts_per_token + choice, -1 where an expert's last 64 are not full.  first[experts]: the end. */
const int32_t *choices = buffer(vm, t.choice), *counts = buffer(vm, t.counts);
int32_t *firsts = buffer(vm, t.first), *pairs = buffer(vm, t.pair);
int at[P.experts], start = 0, end, first = routed(vm->chunk->tokens, sm->id, &end);
for (int e = 0; e < P.experts; e++) {
    int all = 0;
    for (int i = 0; i < NMK_SMS; i++) {
        if (i == sm->id) at[e] = start + all;
        all += counts[i * P.experts + e];
    }
    const int next = start + (all + 63) / 64 * 64;
    if (sm->id == 0) firsts[e] = start, firsts[e + 1] = next;
    for (int i = start + all; i < next && sm->id == e % NMK_SMS; i++) pairs[i] = -1;
    start = next;
}
for (int i = first * P.experts_per_token; i < end * P.experts_per_token; i++) pairs[at[choices[i]]++] = i;

//@test tolerance=0 every expert's pairs in ascending order, from a multiple of 64 on
/* Token n chooses n % 3 and the experts after it, so many as a token has, in steps of 3. */
int32_t *choice = input(test, t.choice), *counts = input(test, t.counts), at[P.experts + 1];
float *first = expect_f32(test, t.first), *pair = expect_f32(test, t.pair);
memset(counts, 0, sizeof(int32_t) * NMK_SMS * (size_t)P.experts);
for (int s = 0; s < NMK_SMS; s++) {
    int end, n = routed(test->chunk.tokens, s, &end);
    for (; n < end; n++)
        for (int k = 0; k < P.experts_per_token; k++) {
            choice[n * P.experts_per_token + k] = n % 3 + 3 * k;
            counts[s * P.experts + n % 3 + 3 * k]++;
        }
}
at[0] = 0;
for (int e = 0; e < P.experts; e++) {
    int32_t next = at[e];
    memcpy(first + e, &next, 4);
    for (int n = 0; live(test, n); n++)
        for (int k = 0; k < P.experts_per_token; k++)
            if (choice[n * P.experts_per_token + k] == e)
                memcpy(pair + next++, &(int32_t){n * P.experts_per_token + k}, 4);
    at[e + 1] = (next + 63) / 64 * 64;
}
memcpy(first + P.experts, at + P.experts, 4);
