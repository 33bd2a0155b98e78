/*@op
  name    = "cut",
  summary = "one digit of where top_k (units 0 to 2) or top_p (3 to 5) cuts a column's distribution: what lies where",
  optional = true,
  params  = { {"vocab", "i32"}, {"vocab_rows", "i32"} },
  tile    = "every",
  task    = { {"unit", "i32"} },
  reads   = { {"cand", "f32", role = "help", lo = "0", hi = "sms"},
              {"scores", "f32", role = "help", lo = "0", hi = "vocab_rows//16"},
              {"cuts", "u64", role = "help", lo = "unit*columns", hi = "unit*columns+columns"},
              {"cutoff", role = "help", scope = "sm"}, {"control", role = "help", launch = "older"} },
  writes  = { {"cuts", "u64", role = "help", adds = true, lo = "unit*columns+columns", hi = "unit*columns+2*columns"},
              {"cutoff", role = "help", scope = "sm"} },
  cost    = "0",
@*/
//@device help
/* Three digits of 8 bits, the most significant first; a digit is known when all SMs of the column have counted what
 * follows the digits before it, so this task reads what the one before added up (bins `unit`) and adds to its own
 * (`unit` + 1).  top_k counts tokens; top_p counts mass, of what min_p and top_k have left.  A column that lacks one
 * skips its tasks.  Rows that only pad the vocabulary have the score -INFINITY: no mass, and as tokens they come last.
 */
DEVICE void help(Helper &c, const Task &t)
{
    constexpr int HALF_BITS = NMK_MASS_BITS / 2; /* masses are added up in two words */
    constexpr float HALF = 1 << HALF_BITS;
    constexpr float WHOLE = 1 << 23, MIDDLE = 3 << 22; /* adding one rounds to an integer, of which it has the bits */
    constexpr int MOST = 1 << 31 - HALF_BITS + 1; /* tokens whose masses one word holds */
    constexpr bool ONCE = (P::vocab_rows / 16 / (NMK_SMS / NMK_COLUMNS) + 1) * 16 < MOST; /* an SM has no more */
    Share mine;
    if (!c.share(P::vocab_rows, mine)) return;
    const bool mass = t.unit >= 3;
    const int digit = mass ? t.unit - 3 : t.unit, shift = 16 - 8 * digit, n = mine.column;
    if (!c.wants(n, mass ? NMK_COLUMN_CUTS_P : NMK_COLUMN_CUTS_K)) return;
    u64 *bins = c.buffer<u64>(t.cuts) + (t.unit * NMK_COLUMNS + n) * 256;
    const bool second = mass && digit == 0 && c.wants(n, NMK_COLUMN_CUTS_K);
    if (digit == 0 && !second) c.begin_cut(n, c.buffer<float>(t.cand));
    else c.narrow(bins, mass && digit == 1 ? __ldcg(&c.column(n)->top_p) : 0);
    if (second) c.end_cut();
    const Cut cut = c.s.cut;
    const u32 limit = mass ? cut.limit : NMK_KEY_MOST;
    bins += NMK_COLUMNS * 256;
#pragma unroll 1
    for (int done = 0; done < (ONCE ? 1 : mine.count); done += MOST / 2) {
#pragma unroll 1
        for (int i = c.lane; i < 256; i += 32) c.s.bin_low[i] = c.s.bin_high[i] = 0;
        const float *scores = c.buffer<float>(t.scores) + n * P::vocab_rows + mine.first + done;
        c.scan<4>(scores, ONCE ? mine.count : min(mine.count - done, MOST / 2), [&](bool inside, int, float score) {
            const u32 key = nmk_score_key(cut.best, score), bin = key >> shift & 255;
            const float w = exp_fast(score - cut.best) * HALF, high = w + WHOLE;
            const float low = (w - (high - WHOLE)) * HALF + MIDDLE;
            if (inside && key <= limit && key >> shift >> 8 == cut.prefix) {
                atomicAdd(&c.s.bin_low[bin], mass ? __float_as_uint(low) - __float_as_uint(MIDDLE) : 1);
                atomicAdd(&c.s.bin_high[bin], mass ? __float_as_uint(high) - __float_as_uint(WHOLE) : 0);
            }
        });
        __syncwarp();
#pragma unroll 1
        for (int i = c.lane; i < 256; i += 32) {
            const u64 v = ((u64)c.s.bin_high[i] << HALF_BITS) + (long long)(int)c.s.bin_low[i];
            if (v) atomicAdd(bins + i, v);
        }
        __syncwarp();
    }
}

//@reference
const int mass = t.unit >= 3, digit = t.unit % 3, shift = 16 - 8 * digit;
struct share mine;
if (!share(vm, sm->id, P.vocab_rows, &mine)) return 0;
const int n = mine.column;
const struct nmk_column *c = &vm->control->column[n];
if (!(c->flags & (mass ? NMK_COLUMN_CUTS_P : NMK_COLUMN_CUTS_K))) return 0;
uint64_t *bins = (uint64_t *)buffer(vm, t.cuts) + (t.unit * NMK_COLUMNS + n) * 256;
struct cut *cut = &sm->cut;
const int second = mass && digit == 0 && c->flags & NMK_COLUMN_CUTS_K;
if (digit == 0 && !second) begin_cut(cut, c, buffer(vm, t.cand), n);
else narrow(cut, bins, mass && digit == 1 ? c->top_p : 0);
if (second) end_cut(cut);
const float *score = (const float *)buffer(vm, t.scores) + (size_t)n * P.vocab_rows;
for (int i = mine.first; i < mine.first + mine.count && i < P.vocab; i++) {
    const uint32_t key = nmk_score_key(cut->best, score[i]);
    if ((mass && key > cut->limit) || key >> shift >> 8 != cut->prefix) continue;
    const float part = expf(score[i] - cut->best) * (float)(1ull << NMK_MASS_BITS);
    const uint64_t w = !mass ? 1 : part > 0 ? (uint64_t)part : 0; /* NaN has none */
    __atomic_fetch_add(&bins[NMK_COLUMNS * 256 + (key >> shift & 255)], w, __ATOMIC_RELAXED);
}
