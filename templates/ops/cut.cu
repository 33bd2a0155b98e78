/*@op
  name    = "cut",
  summary = "one digit of where top_k (units 0 to 2) or top_p (3 to 5) cuts a column's distribution: what lies where",
  optional = true,
  params  = { {"vocab", "i32"} },
  tile    = "spread",
  task    = { {"tile", "i32"}, {"tiles", "i32"}, {"unit", "i32"} },
  reads   = { {"cand", "f32", role = "help", lo = "0", hi = "sms"},
              {"scores", "f32", role = "help", lo = "tile", hi = "tile+tiles"},
              {"cuts", "u64", role = "help", lo = "unit*columns", hi = "unit*columns+columns"},
              {"cutoff", role = "help", scope = "sm"}, {"control", role = "help", launch = "older"} },
  writes  = { {"cuts", "u64", role = "help", adds = true, lo = "unit*columns+columns", hi = "unit*columns+2*columns"},
              {"cutoff", role = "help", scope = "sm"} },
  cost    = "0",
@*/
//@device help
/* Three digits of 8 bits, the most significant first; a digit is known when all SMs have counted what follows the
 * digits before it, so this task reads what the one before added up (bins `unit`) and adds to its own (`unit` + 1).
 * top_k counts tokens; top_p counts mass, of what min_p and top_k have left.  A column that lacks one skips its tasks.
 */
DEVICE void help(Helper &c, const Task &t)
{
    const bool mass = t.unit >= 3;
    const int digit = mass ? t.unit - 3 : t.unit, shift = 16 - 8 * digit;
    u64 *bins = c.buffer<u64>(t.cuts);
    constexpr float HALF = 1 << NMK_MASS_BITS / 2; /* masses are added up in two words */
    static_assert(P::vocab / 16 / NMK_SMS * 16 + 16 < 4096, "the low halves of an SM's masses add up to 32 bits");
#pragma unroll 1
    for (int n = 0; n < NMK_COLUMNS; n++) {
        if (!c.wants(n, mass ? NMK_COLUMN_CUTS_P : NMK_COLUMN_CUTS_K)) continue;
        const bool both = c.wants(n, NMK_COLUMN_CUTS_K);
        const u64 *before = bins + (t.unit * NMK_COLUMNS + n) * 256;
        if (digit == 0 && !(mass && both)) c.begin_cut(n, c.buffer<float>(t.cand));
        else c.narrow(n, before, mass && digit == 1 ? __ldcg(&c.column(n)->top_p) : 0);
        if (digit == 0 && mass && both) c.end_cut(n);
        const Cut cut = c.s.cut[n];
        const u32 limit = mass ? cut.limit : NMK_KEY_MOST;
#pragma unroll 1
        for (int i = c.lane; i < 256; i += 32) c.s.bin_low[i] = c.s.bin_high[i] = 0;
        const float *scores = c.buffer<float>(t.scores) + n * P::vocab + t.tile * 16;
        c.scan<8>(scores, t.tiles * 16, [&](bool inside, int, float score) {
            const u32 key = nmk_score_key(cut.best, score), bin = key >> shift & 255;
            const float w = exp2_fast((score - cut.best) * 1.4426950408889634f) * HALF;
            const u32 high = mass ? (u32)w : 0, low = mass ? (u32)((w - (float)high) * HALF) : 1;
            if (inside && key <= limit && key >> shift >> 8 == cut.prefix)
                atomicAdd(&c.s.bin_low[bin], low), atomicAdd(&c.s.bin_high[bin], high);
        });
        __syncwarp();
        u64 *to = bins + ((t.unit + 1) * NMK_COLUMNS + n) * 256;
#pragma unroll 1
        for (int i = c.lane; i < 256; i += 32) {
            const u64 v = c.s.bin_low[i] + ((u64)c.s.bin_high[i] << NMK_MASS_BITS / 2);
            if (v) atomicAdd(to + i, v);
        }
        __syncwarp();
    }
}

//@reference
const int mass = t.unit >= 3, digit = t.unit % 3, shift = 16 - 8 * digit;
uint64_t *bins = buffer(vm, t.cuts);
for (int n = 0; n < NMK_COLUMNS; n++) {
    const struct nmk_column *c = &vm->control->column[n];
    if (!active(vm, n) || !(c->flags & (mass ? NMK_COLUMN_CUTS_P : NMK_COLUMN_CUTS_K))) continue;
    const int both = c->flags & NMK_COLUMN_CUTS_K;
    struct cut *cut = &sm->cut[n];
    if (digit == 0 && !(mass && both)) begin_cut(cut, c, buffer(vm, t.cand), n);
    else narrow(cut, bins + (t.unit * NMK_COLUMNS + n) * 256, mass && digit == 1 ? c->top_p : 0);
    if (digit == 0 && mass && both) end_cut(cut);
    const float *score = (const float *)buffer(vm, t.scores) + (size_t)n * P.vocab;
    for (int i = t.tile * 16; i < (t.tile + t.tiles) * 16; i++) {
        const uint32_t key = nmk_score_key(cut->best, score[i]);
        if ((mass && key > cut->limit) || key >> shift >> 8 != cut->prefix) continue;
        const uint64_t w = mass ? (uint64_t)(expf(score[i] - cut->best) * (float)(1ull << NMK_MASS_BITS)) : 1;
        __atomic_fetch_add(&bins[((t.unit + 1) * NMK_COLUMNS + n) * 256 + (key >> shift & 255)], w, __ATOMIC_RELAXED);
    }
}
