/*@op
  name    = "prefill_gather",
  summary = "the row of xn of every pair of a token and an expert, as an operand: in the order of the pairs",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"hidden", "i32"}, {"experts", "i32"}, {"experts_per_token", "i32"} },
  tile    = "every",
  reads   = { {"xn_rows", "bf16", role = "compute", lo = "0", hi = "1"},
              {"first", "i32", role = "compute", lo = "0", hi = "1"},
              {"pair", "i32", role = "compute", lo = "0", hi = "1"} },
  writes  = { {"xn_pairs", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device compute
/* A warp's unit is eight pairs times so many blocks of 64 k: it takes 64 bytes of each row at a time to where the eight
 * are side by side.  Experts' loaders could do that, but every slab of an expert's weights takes the same rows.  All
 * pairs' first parts come first, and so on: what is read in a short while then stays in L2, beside what is written. */
constexpr int STEPS = stages_of(P::hidden), AT_ONCE = STEPS % 8 ? 4 : 8, PARTS = STEPS / AT_ONCE;
static_assert(STEPS % AT_ONCE == 0, "rows are padded to 256 k");

DEVICE void compute(ChunkConsumer &c, const Task &t)
{
    const int groups = __ldcg(c.buffer<int>(t.first) + P::experts) / 8, units = groups * PARTS;
    const int *pairs = c.buffer<int>(t.pair) + (c.lane & 7);
    auto pair_of = [&](int unit) { return unit < units ? __ldcg(pairs + unit % groups * 8) : -1; };
    int unit = blockIdx.x * WARPS_COMPUTE + c.warp, pair = pair_of(unit);
#pragma unroll 1
    for (; unit < units; unit += NMK_SMS * WARPS_COMPUTE) {
        const int token = max(pair, 0) / P::experts_per_token, step = unit / groups * AT_ONCE, group = unit % groups;
        const bool any = __any_sync(~0u, pair >= 0);
        pair = pair_of(unit + NMK_SMS * WARPS_COMPUTE);
        if (!any) continue; /* behind an expert's last */
        const bf16 *from = c.buffer<bf16>(t.xn_rows) + (u64)token * (STEPS * STAGE_K) + step * STAGE_K;
        u8 *to = c.buffer<u8>(t.xn_pairs) + ((u64)(group / 8) * STEPS + step) * STAGE_BLOCK + group % 8 * 1024;
        uint4 v[2 * AT_ONCE];
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++) v[i] = load_l2(from + i * 32 + (c.lane >> 3) * 8);
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++)
            *(uint4 *)(to + i / 2 * STAGE_BLOCK + i % 2 * 512 + c.lane / 8 * 128 + c.lane % 8 * 16) = v[i];
    }
}

//@reference
const int padded = nmk_packed_cols(P.hidden);
const int32_t *firsts = buffer(vm, t.first), *pairs = buffer(vm, t.pair);
uint16_t *to = buffer(vm, t.xn_pairs);
for (int i = sm->id; i < firsts[P.experts]; i += NMK_SMS) {
    if (pairs[i] < 0) continue;
    const uint16_t *from = (const uint16_t *)buffer(vm, t.xn_rows) + (size_t)(pairs[i] / P.experts_per_token) * padded;
    for (int at = 0; at < padded; at += 8) memcpy(to + operand_at(P.hidden, (size_t)i, at), from + at, 16);
}

//@test tolerance=0 eight rows side by side, whoever's they are
/* Experts have 64 rows each, of which 3 * e % 64 + 1 are pairs, of tokens in no order. */
const int padded = nmk_packed_cols(P.hidden);
int32_t *first = input(test, t.first), *pair = input(test, t.pair);
uint16_t *rows = input(test, t.xn_rows);
float *to = expect_bf16(test, t.xn_pairs);
for (int n = 0; live(test, n); n++)
    for (int at = 0; at < padded; at++) rows[n * padded + at] = bf16_round(uniform(test, -3, 3));
for (int e = 0; e < P.experts; e++) {
    first[e] = 64 * e, first[e + 1] = 64 * e + 64;
    for (int i = 64 * e; i < first[e + 1]; i++) {
        const int n = (i * 7 + e) % test->chunk.tokens;
        pair[i] = i % 64 <= 3 * e % 64 ? n * P.experts_per_token + i % P.experts_per_token : -1;
        for (int at = 0; pair[i] >= 0 && at < padded; at++)
            to[((size_t)i / 64 * (size_t)(padded / 64) + (size_t)at / 64) * 4096 +
               (size_t)((i % 64 / 8 * 8 + at % 64 / 8) * 64 + i % 8 * 8 + at % 8)] = bf16_value(rows[n * padded + at]);
    }
}
