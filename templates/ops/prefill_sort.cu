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
/* A thread an expert: where its pairs begin follows from all SMs' counts, where this SM's go from those before it. */
constexpr int HELD = 2048; /* choices in shared memory at a time */
struct Sums {
    int all[2][P::experts], before[2][P::experts], start[P::experts + 1];
    alignas(16) int choice[HELD];
};
static_assert(P::experts <= 128 && sizeof(Sums) <= STAGING_BYTES, "two threads an expert");

DEVICE void compute(ChunkConsumer &c, const Task &t)
{
    Sums &s = *(Sums *)c.staging();
    int thread = threadIdx.x, sm = blockIdx.x;
    asm volatile("" : "+r"(thread), "+r"(sm)); /* else what follows from them is held through all tasks */
    const int e = thread & 127, half = thread >> 7;
    const int each = (c.k.tokens + NMK_SMS - 1) / NMK_SMS;
    const int first = min(sm * each, c.k.tokens) * P::experts_per_token;
    const int end = min(min(sm * each, c.k.tokens) + each, c.k.tokens) * P::experts_per_token;
    if (e < P::experts) {
        const int *counts = c.buffer<int>(t.counts) + e;
        int all = 0, before = 0;
#pragma unroll 3
        for (int i = half * (NMK_SMS / 2); i < (half ? NMK_SMS : NMK_SMS / 2); i++) {
            const int n = __ldcg(counts + i * P::experts);
            all += n, before += i < sm ? n : 0;
        }
        s.all[half][e] = all, s.before[half][e] = before;
    }
    barrier_compute();
    if (c.warp == 0) {
        constexpr int EACH = (P::experts + 31) / 32;
        int rows[EACH], sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int x = c.lane * EACH + i;
            const int n = x < P::experts ? s.all[0][x] + s.all[1][x] : 0;
            rows[i] = sum, sum += (n + BLOCK_TOKENS - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
        }
        int upto = sum;
#pragma unroll
        for (int i = 1; i <= 16; i <<= 1) {
            const int v = __shfl_up_sync(~0u, upto, i);
            if (c.lane >= i) upto += v;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (c.lane * EACH + i < P::experts) s.start[c.lane * EACH + i] = upto - sum + rows[i];
        if (c.lane == 31) s.start[P::experts] = upto;
    }
    barrier_compute();
    int *pairs = c.buffer<int>(t.pair), at = 0;
    if (sm == 0 && thread <= P::experts) c.buffer<int>(t.first)[thread] = s.start[thread];
    if (e < P::experts && half == 0) at = s.start[e] + s.before[0][e] + s.before[1][e];
#pragma unroll 1
    for (int x = sm; x < P::experts; x += NMK_SMS) /* behind the last pair */
        for (int i = s.start[x] + s.all[0][x] + s.all[1][x] + thread; i < s.start[x + 1]; i += WARPS_COMPUTE * 32)
            pairs[i] = -1;
    const int *choices = c.buffer<int>(t.choice);
#pragma unroll 1
    for (int base = first; base < end; base += HELD) {
        const int count = min(end - base, HELD);
        barrier_compute();
        for (int i = thread; i < HELD; i += WARPS_COMPUTE * 32)
            s.choice[i] = i < count ? __ldcg(choices + base + i) : -1;
        barrier_compute();
        if (e >= P::experts || half) continue;
#pragma unroll 2
        for (int i = 0; i < count; i += 4) {
            const int4 four = *(const int4 *)(s.choice + i);
            if (four.x == e) pairs[at++] = base + i;
            if (four.y == e) pairs[at++] = base + i + 1;
            if (four.z == e) pairs[at++] = base + i + 2;
            if (four.w == e) pairs[at++] = base + i + 3;
        }
    }
    barrier_compute(); /* the staging is anybody's again */
}

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
