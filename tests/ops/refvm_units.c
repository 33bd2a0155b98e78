/* The pieces of the reference machine by themselves: rounding, noise, chunks, single ops against plain arithmetic. */
#include "refvm.c"

#include "runtime/refvm_toy.h"

enum { ROWS = 2, LONGEST = 1024, QKV_ROWS = (NMK_HEADS + 2 * NMK_KV_HEADS) * NMK_HEAD_DIM };

static uint64_t state = 1;

/* Uniform in -1 .. 1. */
static float uniform(void) { return (float)((double)(draw(&state) >> 11) * 0x1p-52 - 1); }

static void test_rounding(void) {
    int wrong = 0;
    for (uint32_t i = 0; i < 1u << 22; i++) {
        const uint32_t u = i * 1021u + (i << 20);
        float f;
        memcpy(&f, &u, sizeof f);
        if (f != f || fabsf(f) > 0x1.fep127f) continue;
        const uint16_t low = (uint16_t)(u >> 16), high = (uint16_t)(low + 1);
        const double below = fabs((double)f - bf16_value(low)), above = fabs((double)bf16_value(high) - f);
        const uint16_t want = below < above || (below == above && !(low & 1)) ? low : high;
        wrong += bf16_round(f) != want;
    }
    result(wrong == 0, "bf16 rounding", "%d of 4 Mi values differ from round to nearest even", wrong);
    result(isnan(bf16_value(bf16_round(NAN))) && isinf(bf16_value(bf16_round(INFINITY))),
           "bf16 rounding of NaN, infinity", "kept");
}

static void test_dot(void) {
    uint16_t a[300], b[300];
    double worst = 0;
    for (int n = 1; n < 300; n++) {
        double want = 0, size = 0;
        for (int i = 0; i < n; i++) {
            a[i] = bf16_round(uniform()), b[i] = bf16_round(uniform());
            want += (double)bf16_value(a[i]) * bf16_value(b[i]);
            size += fabs((double)bf16_value(a[i]) * bf16_value(b[i]));
        }
        worst = fmax(worst, fabs(dot(a, b, n) - want) / size);
    }
    result(worst < 1e-6, "dot product", "largest error %.1e of the sum of magnitudes", worst);
}

static void test_noise(void) {
    enum { N = 1 << 20, CHOICES = 8, DRAWS = 40000 };
    double sum = 0, squares = 0, both = 0, low = 100, high = -100;
    for (int32_t id = 0; id < N; id++) {
        const double g = nmk_gumbel(1, 2, 3, id), next = nmk_gumbel(1, 2, 4, id);
        sum += g, squares += g * g, both += (g - 0.5772) * (next - 0.5772);
        low = fmin(low, g), high = fmax(high, g);
    }
    const double mean = sum / N, variance = squares / N - mean * mean;
    result(fabs(mean - 0.57722) < 0.01 && fabs(variance - 1.64493) < 0.02 && isfinite(low) && high < 17, "Gumbel noise",
           "mean %.4f (0.5772), variance %.4f (1.6449), %.2f to %.2f", mean, variance, low, high);
    result(fabs(both / N) < 0.01, "Gumbel noise of neighbouring positions", "covariance %.4f", both / N);

    static const float logits[CHOICES] = {2, 1, 0.5f, 0, -1, 1.5f, -2, 0.2f};
    double weights = 0, chi = 0;
    int count[CHOICES] = {0};
    for (int i = 0; i < DRAWS; i++) {
        struct candidate best = {-INFINITY, INT32_MAX};
        for (int c = 0; c < CHOICES; c++) better(&best, logits[c] + nmk_gumbel(99, 0, i, c * 1000), c);
        count[best.id]++;
    }
    for (int c = 0; c < CHOICES; c++) weights += exp(logits[c]);
    for (int c = 0; c < CHOICES; c++) {
        const double want = DRAWS * exp(logits[c]) / weights;
        chi += (count[c] - want) * (count[c] - want) / want;
    }
    result(chi < 24.3, "choices follow the softmax", "chi square %.1f, 7 degrees of freedom (24.3 is 1 in 1000)", chi);
}

static struct nmk_vm vm;

static void test_chunks(void) {
    enum { FARTHEST = 1 << 18 }; /* 256K, whatever the toy's context is */
    int wrong = 0;
    for (int sliding = 0; sliding < 2; sliding++)
        for (int base = 0; base < FARTHEST; base++) {
            const nmk_column c = {.pos = base + base % NMK_COLUMNS, .base = base};
            const struct chunks s = chunks_of(&vm, &c, sliding, NMK_WINDOW);
            const int lo = sliding && c.pos >= NMK_WINDOW ? c.pos - NMK_WINDOW + 1 : 0;
            wrong += s.lo != lo || s.count < 1 || s.count > NMK_CHUNKS_MAX || s.count > s.pages;
            wrong += base > lo && (s.first * PAGE > lo || (s.first + s.pages) * PAGE < base ||
                                   (s.first + s.pages - 1) * PAGE >= base || (s.first + 1) * PAGE <= lo);
            /* of full layers far on all chunks are at work, and none has twice what another has */
            const int least = s.pages / s.count, most = (s.pages + s.count - 1) / s.count;
            wrong += base > FARTHEST / 2 && !sliding && (s.count < NMK_CHUNKS_MAX || most > least + 1);
        }
    result(wrong == 0, "chunks", "%d of %d rows with pages too few or too many", wrong, 2 * FARTHEST);
}

/* ---- attention and combine against a softmax in double ---- */

static nmk_control control;
static int32_t table[ROWS * LONGEST / PAGE], out[NMK_COLUMNS];

static uint16_t *kv_at(int sliding, int row, int pos, int layer, int head, int is_v) {
    const nmk_column c = {.slot = row};
    return kv_page(&vm, &c, pos, sliding, sliding ? NMK_SLIDING_LAYERS : NMK_FULL_LAYERS, layer, NMK_KV_HEADS, head) +
           (is_v * PAGE + pos % PAGE) * HEAD_DIM;
}

static void want_attention(int sliding, int layer, const uint16_t *qkv, int n, int h, double *o) {
    const nmk_column *c = &control.column[n];
    const int lo = sliding && c->pos >= NMK_WINDOW ? c->pos - NMK_WINDOW + 1 : 0, head = h / GROUP;
    double sum = 0;
    memset(o, 0, sizeof(double) * HEAD_DIM);
    for (int pos = lo; pos <= c->pos; pos++) {
        /* this step's tokens are in qkv: position pos is in column group + pos - base */
        const uint16_t *own = qkv + (c->group + pos - c->base) * QKV_ROWS;
        const uint16_t *k =
            pos < c->base ? kv_at(sliding, c->slot, pos, layer, head, 0) : own + (NMK_HEADS + head) * HEAD_DIM;
        const uint16_t *v = pos < c->base ? kv_at(sliding, c->slot, pos, layer, head, 1)
                                          : own + (NMK_HEADS + NMK_KV_HEADS + head) * HEAD_DIM;
        double score = 0;
        for (int i = 0; i < HEAD_DIM; i++)
            score += (double)bf16_value(qkv[n * QKV_ROWS + h * HEAD_DIM + i]) * bf16_value(k[i]);
        const double p = exp2(score);
        sum += p;
        for (int i = 0; i < HEAD_DIM; i++) o[i] += p * bf16_value(v[i]);
    }
    for (int i = 0; i < HEAD_DIM; i++) o[i] /= sum;
}

/* Columns 0..2: the next three positions of row 0; column 5: the next of row 1. */
static void test_attention(int sliding, int base, int other) {
    static struct vm_sm sms[NMK_SMS];
    const int layer = sliding ? NMK_SLIDING_LAYERS - 1 : NMK_FULL_LAYERS - 1;
    int32_t d[WORDS] = {0}, e[WORDS] = {0};
    d[0] = NMK_OP_ATTENTION, d[NMK_WORD_ATTENTION_SLIDING] = sliding, d[NMK_WORD_ATTENTION_KV_LAYER] = layer;
    e[0] = NMK_OP_COMBINE, e[NMK_WORD_COMBINE_SLIDING] = sliding;
    e[NMK_WORD_COMBINE_STEP] = NMK_SMS, e[NMK_WORD_COMBINE_END] = NMK_ATTN_UNITS;
    int offset = 0; /* qkv, part, attn one after the other */
    uint16_t *qkv = buffer(&vm, offset);
    d[NMK_WORD_ATTENTION_QKV] = offset, offset += NMK_COLUMNS * QKV_ROWS * 2 / 128;
    d[NMK_WORD_ATTENTION_PART] = e[NMK_WORD_COMBINE_PART] = offset,
    offset += NMK_PART_SLOTS * (SLOT_FLOATS + 4 * PAIRS) * 4 / 128;
    e[NMK_WORD_COMBINE_ATTN] = offset;
    const uint16_t *attn = buffer(&vm, offset);
    memset(vm.arena, 0xff, (size_t)NMK_ARENA_BYTES);
    for (int n = 0; n < NMK_COLUMNS; n++) control.column[n] = (nmk_column){.pos = -1};
    for (int n = 0; n < 3; n++) control.column[n] = (nmk_column){.pos = base + n, .base = base, .group = 0, .slot = 0};
    control.column[5] = (nmk_column){.pos = other, .base = other, .group = 5, .slot = 1};
    for (int n = 0; n < NMK_COLUMNS; n++)
        for (int i = 0; i < QKV_ROWS && active(&vm, n); i++) qkv[n * QKV_ROWS + i] = bf16_round(0.4f * uniform());
    int broken = 0;
    for (int s = 0; s < NMK_SMS; s++) {
        sms[s].id = s;
        broken |= execute(&vm, &sms[s], d);
    }
    for (int s = 0; s < NMK_SMS; s++) {
        e[NMK_WORD_COMBINE_FIRST] = s;
        broken |= execute(&vm, &sms[s], e);
    }
    double wrong = 0, all = 0;
    for (int n = 0; n < NMK_COLUMNS; n++)
        for (int h = 0; h < NMK_HEADS && active(&vm, n); h++) {
            double o[HEAD_DIM];
            want_attention(sliding, layer, qkv, n, h, o);
            for (int i = 0; i < HEAD_DIM; i++) {
                const double got = bf16_value(attn[(n * NMK_HEADS + h) * HEAD_DIM + i]);
                wrong += (got - o[i]) * (got - o[i]), all += o[i] * o[i];
            }
        }
    result(!broken && sqrt(wrong / all) < 5e-3, sliding ? "sliding attention" : "full attention",
           "after %d and %d tokens: relative error %.1e", base, other, sqrt(wrong / all));
}

static void test_attentions(void) {
    static const int lengths[][2] = {{0, 0}, {1, 64}, {63, 128}, {65, 300}, {127, 500}, {640, 129}, {1000, 1020}};
    const size_t full = (size_t)NMK_KV_PAGE_BYTES_FULL * ROWS * LONGEST / PAGE;
    const size_t sliding = (size_t)NMK_KV_PAGE_BYTES_SLIDING * ROWS * LONGEST / PAGE;
    uint16_t *pool[2] = {zeroed(full), zeroed(sliding)};
    for (size_t i = 0; i < full / 2; i++) pool[0][i] = bf16_round(uniform());
    for (size_t i = 0; i < sliding / 2; i++) pool[1][i] = bf16_round(uniform());
    vm.kv_full = (uint8_t *)pool[0], vm.kv_sliding = (uint8_t *)pool[1];
    for (int i = 0; i < ROWS * LONGEST / PAGE; i++) table[i] = ROWS * LONGEST / PAGE - 1 - i;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int kind = 0; kind < 2; kind++) test_attention(kind, lengths[i][0], lengths[i][1]);
    free(pool[0]), free(pool[1]);
}

/* ---- routing, sampling ---- */

static void test_route(void) {
    static struct vm_sm sm;
    static uint8_t foreign[NMK_COLUMNS * NMK_EXPERTS * 4];
    float *logits = buffer(&vm, 0);
    int32_t d[WORDS] = {0};
    d[0] = NMK_OP_ROUTE, d[7] = 5; /* logits are at 0 */
    for (int n = 0; n < NMK_COLUMNS; n++) control.column[n] = (nmk_column){.pos = n == 1 || n == 6 ? 3 : -1};
    memset(logits, 0xff, sizeof foreign);
    for (int e = 0; e < NMK_EXPERTS; e++) {
        logits[1 * NMK_EXPERTS + e] = e == 9 ? 2 : e == 4 ? -7 : -1; /* 9, then ties: 0, 1, 2 */
        logits[6 * NMK_EXPERTS + e] = (float)-e;                     /* 0, 1, 2, 3 */
    }
    execute(&vm, &sm, d);
    const struct vm_route *r = &sm.route[1];
    int good = r->instance == 5 && r->active == NMK_EXPERTS_PER_TOKEN + 1;
    for (int i = 0; i < NMK_EXPERTS_PER_TOKEN; i++) good &= r->expert[i] == i;
    good &= r->expert[NMK_EXPERTS_PER_TOKEN] == 9 && fabsf(r->weight[NMK_EXPERTS_PER_TOKEN][1] - 0.880797f) < 1e-5f;
    good &= r->weight[0][6] == 0.5f && r->weight[NMK_EXPERTS_PER_TOKEN - 1][1] == 0 && r->weight[0][0] == 0;
    result(good, "route", "%d active experts, ties to the lowest", r->active);

    memcpy(foreign, logits, sizeof foreign);
    memset(logits, 0xff, sizeof foreign);
    vm.forced = foreign, d[7] = 6;
    execute(&vm, &sm, d);
    vm.forced = NULL;
    good = !memcmp(sm.route[0].weight, sm.route[1].weight, sizeof sm.route[0].weight[0] * (size_t)r->active);
    result(good && sm.route[0].active == r->active, "route by another machine's logits",
           "the same experts and weights");

    int32_t reader[WORDS] = {NMK_OP_EXPERT_DOWN, 1, -1, 0, -1, 0, -1, 7};
    result(execute(&vm, &sm, reader) && strstr(sm.err, "routing 7"), "stale routing is refused", "%s", sm.err);
}

static void test_sample(void) {
    static struct vm_sm sm;
    float *value = buffer(&vm, 0);
    int32_t *id = (int32_t *)(value + NMK_SMS * 2 * NMK_COLUMNS), d[WORDS] = {NMK_OP_SAMPLE};
    for (int i = 0; i < NMK_SMS * 2 * NMK_COLUMNS; i++)
        value[i] = (float)(i / NMK_COLUMNS % 50), id[i] = 3000 - i / NMK_COLUMNS;
    control.stop_ids[0] = 17, control.stop_ids[1] = 3000 - 249, control.stop_count = 1;
    for (int n = 0; n < NMK_COLUMNS; n++)
        control.column[n] =
            (nmk_column){.pos = n == 3 ? -1 : 10 + n, .base = 5, .flags = n != 2, .remaining = n == 4 ? 1 : 9};
    for (int n = 0; n < NMK_COLUMNS; n++) {
        out[n] = -1, d[NMK_WORD_SAMPLE_COLUMN] = n;
        if (n == 6) control.stop_count = 2;
        execute(&vm, &sm, d);
    }
    /* best are rows 49, 99, ... 249; the last has the lowest id */
    const nmk_column *c = control.column;
    int good = out[0] == 3000 - 249 && c[0].token == out[0] && c[0].pos == 11 && c[0].base == 11 && c[0].remaining == 8;
    result(good, "sample", "token %d, position %d", out[0], c[0].pos);
    good = out[2] == -1 && c[2].pos == 12 && out[3] == -1 && c[3].pos == -1;
    result(good, "sample leaves columns that do not sample", "positions %d, %d", c[2].pos, c[3].pos);
    good = out[4] >= 0 && c[4].pos == -1 && c[4].remaining == 0 && out[6] >= 0 && c[6].pos == -1 && c[5].pos == 16;
    result(good, "sample ends a row", "at its last token and at a stop id");
}

/* ---- where a distribution is cut, what is drawn, log-probabilities ---- */

static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static void test_score_key(void) {
    static const struct {
        float best, score;
        uint32_t key;
    } all[] = {
        {0, 0, 0},
        {5, 5, 0},
        {0, -0x1p-20f, 0},
        {0, -0x1p-19f, 0},
        {0, -0x1.00001ep-19f, 0},
        {0, -0x1.00002p-19f, 1},
        {0, -0x1p-18f, 1u << 19},
        {3, 2, 19u << 19},
        {0, -32, 24u << 19},
        {0, -0x1.ffffcp12f, 0xfffffe},
        {0, -0x1.ffffep12f, 0xffffff},
        {0, -0x1p13f, 0xffffff},
        {0, -1e30f, 0xffffff},
        {0, -INFINITY, 0xffffff},
        {-INFINITY, -INFINITY, 0xffffff},
        {0, NAN, 0xffffff},
    };
    int wrong = 0, turns = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        wrong += nmk_score_key(all[i].best, all[i].score) != all[i].key;
    for (int i = 0; i < 100000; i++) {
        const float a = 40 * uniform(), b = 40 * uniform();
        turns += a > b && nmk_score_key(40, a) > nmk_score_key(40, b);
    }
    result(!wrong && !turns, "keys of scores", "%d wrong, %d out of order", wrong, turns);
}

static void test_adjusted(void) {
    enum { PROMPT = NMK_SEEN_PROMPT };
    static const struct {
        float logit, bias;
        uint32_t seen;
        float presence, frequency, repetition, want;
    } all[] = {
        {2, 0, 0, 0.5f, 0.25f, 2, 2},        {2, 1.5f, 0, 0.5f, 0.25f, 2, 3.5f},    {2, 0, 1, 0.5f, 0.25f, 2, 0.25f},
        {-2, 0, 1, 0.5f, 0.25f, 2, -4.75f},  {2, 0, 3, 0.5f, 0.25f, 2, -0.25f},     {2, 0, PROMPT, 0.5f, 0.25f, 2, 1},
        {-2, 0, PROMPT, 0.5f, 0.25f, 2, -4}, {2, 0, PROMPT | 2, 0.5f, 0.25f, 2, 0}, {1, -3, PROMPT, 0, 0, 2, -4},
        {0, 0, 4, -0.5f, -0.25f, 1, 1.5f},   {-INFINITY, 1, 1, 0, 0, 2, -INFINITY},
    };
    int wrong = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        wrong += nmk_adjusted(all[i].logit, all[i].bias, all[i].seen, all[i].presence, all[i].frequency,
                              all[i].repetition) != all[i].want;
    result(wrong == 0, "bias and penalties", "%d wrong", wrong);
}

static void test_narrow(void) {
    static const struct {
        uint64_t target;
        float part;
        uint32_t bin;
        uint64_t left;
    } all[] = {{5, 0, 3, 5},    {6, 0, 7, 1},     {7, 0, 7, 2},      {100, 0, 7, 2},   {1, 0, 3, 1}, {0, 0, 3, 1},
               {0, 0.5f, 3, 3}, {0, 0.75f, 3, 5}, {0, 0.875f, 7, 1}, {0, 0.01f, 3, 1}, {0, 1, 7, 2}};
    uint64_t bins[256] = {[3] = 5, [7] = 2}, edge[256] = {[0] = 1, [255] = 1};
    int wrong = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct cut cut = {.prefix = 0x12, .target = all[i].target};
        narrow(&cut, bins, all[i].part);
        wrong += cut.prefix != (0x1200 | all[i].bin) || cut.target != all[i].left;
    }
    for (int target = 1; target <= 2; target++) {
        struct cut cut = {.target = (uint64_t)target};
        narrow(&cut, edge, 0);
        wrong += cut.prefix != (target == 1 ? 0 : 255) || cut.target != 1;
    }
    struct cut cut = {.prefix = 0x34, .limit = 0x33};
    end_cut(&cut);
    wrong += cut.limit != 0x33 || cut.prefix != 0;
    cut.prefix = 0x32, end_cut(&cut);
    wrong += cut.limit != 0x32;
    result(wrong == 0, "a digit of a cut", "%d wrong", wrong);
}

static void test_offer(void) {
    struct candidate top[NMK_TOPS];
    int good = 1;
    no_tops(top);
    offer(top, NAN, 1), offer(top, 3, 9), offer(top, 5, 8), offer(top, 3, 4), offer(top, 4, 6), offer(top, 3, 5);
    static const int32_t few[] = {8, 6, 4, 5, 9};
    for (int i = 0; i < 5; i++) good &= top[i].id == few[i];
    good &= top[5].id == INT32_MAX && top[5].value == -INFINITY;
    for (int i = 0; i < 100; i++) offer(top, (float)(i % 25), 1000 - i);
    for (int i = 0; i < NMK_TOPS; i++) /* 24, 24, 24, 24, 23 ...; lower ids first */
        good &= top[i].value == (float)(24 - i / 4) && top[i].id == 1000 - (99 - i / 4 - 25 * (i % 4));
    result(good, "the most likely tokens", "best %d, last %d", top[0].id, top[NMK_TOPS - 1].id);
}

/* Parts of logits and of squares as integers, and back. */
static void test_fixed(void) {
    const float limit = 1 << 26;
    result(nmk_fixed(1) == 1u << 28 && nmk_fixed(-0.5f) == (uint64_t) - (1 << 27) && nmk_fixed(0) == 0,
           "a part of a logit in units of 2^-28", "1 is %llx", nmk_fixed(1));
    result(nmk_fixed(1e30f) == nmk_fixed(limit) && nmk_fixed(-INFINITY) == nmk_fixed(-limit) &&
               nmk_fixed(NAN) == nmk_fixed(-limit) && nmk_fixed(limit) == 1ull << 54,
           "what is too large is cut off", "most %llx", nmk_fixed(limit));
    float worst = 0;
    for (float v = 1e-9f; v < 6e13f; v *= 1.37f) {
        const float back = nmk_squares(nmk_fixed_square(v, 0), nmk_fixed_square(v, 1)), wrong = fabsf(back - v) / v;
        if (wrong > worst) worst = wrong;
    }
    result(worst < 4e-6f && nmk_squares(nmk_fixed_square(NAN, 0), nmk_fixed_square(-1, 1)) == 0,
           "squares of any magnitude", "relative error %.1e", (double)worst);
}

static int32_t place(const char *name) {
    for (int i = 0; i < nmk_buffer_count; i++)
        if (!strcmp(nmk_buffers[i].name, name)) return nmk_buffers[i].offset128;
    die("no buffer %s", name);
}

static struct vm_sm cut_sm[NMK_SMS];
static float score[NMK_VOCAB], raw[NMK_VOCAB];
static nmk_adjust adjust[NMK_COLUMNS * NMK_VOCAB];
static nmk_tops tops[NMK_COLUMNS];

/* One step's end for one column, from the lm_head's scores on.  Returns what the last op said; each SM's cut stays. */
static int end_of_step(int n, nmk_column column) {
    const int32_t cand = place("cand"), scores = place("scores"), logits = place("raw_logits"), cuts = place("cuts"),
                  drawn = place("drawn"), told = place("tops");
    int32_t clear[WORDS] = {NMK_OP_CLEAR_CUTS}, end[WORDS] = {NMK_OP_SAMPLE};
    memset(vm.arena, 0xff, (size_t)NMK_ARENA_BYTES);
    memset(tops, 0xff, sizeof tops), memset(cut_sm, 0xff, sizeof cut_sm);
    vm.adjust = adjust, vm.tops = tops, control.stop_count = 0;
    for (int i = 0; i < NMK_COLUMNS; i++) control.column[i] = (nmk_column){.pos = -1};
    column.flags |= NMK_COLUMN_SAMPLES, column.pos = 41, column.remaining = 9, column.slot = 7 - n;
    control.column[n] = column;
    vm.filters = column.flags & NMK_COLUMN_FILTERS ? 1u << n : 0;
    memcpy((float *)buffer(&vm, scores) + n * NMK_VOCAB, score, sizeof score);
    memcpy((float *)buffer(&vm, logits) + n * NMK_VOCAB, raw, sizeof raw);
    float *best = buffer(&vm, cand);
    for (int s = 0, tile = 0; s < NMK_SMS; s++) {
        const int tiles = NMK_VOCAB / 16 / NMK_SMS + (s < NMK_VOCAB / 16 % NMK_SMS);
        cut_sm[s].id = s, best[2 * s * NMK_COLUMNS + n] = best[(2 * s + 1) * NMK_COLUMNS + n] = -INFINITY;
        for (int i = tile * 16; i < (tile + tiles) * 16; i++)
            if (score[i] > best[2 * s * NMK_COLUMNS + n]) best[2 * s * NMK_COLUMNS + n] = score[i];
        tile += tiles;
    }
    for (int i = 0; i < NMK_COLUMNS; i++) {
        clear[NMK_WORD_CLEAR_CUTS_COLUMN] = i, clear[NMK_WORD_CLEAR_CUTS_CUTS] = cuts;
        if (execute(&vm, &cut_sm[0], clear)) return -1;
    }
    for (int unit = 0; unit <= 6; unit++) /* the last is draw */
        for (int s = 0, tile = 0; s < NMK_SMS; s++) {
            const int tiles = NMK_VOCAB / 16 / NMK_SMS + (s < NMK_VOCAB / 16 % NMK_SMS); /* for log-probabilities */
            int32_t d[WORDS] = {unit < 6 ? NMK_OP_CUT : NMK_OP_DRAW};
            if (unit < 6) {
                d[NMK_WORD_CUT_UNIT] = unit, d[NMK_WORD_CUT_CAND] = cand, d[NMK_WORD_CUT_SCORES] = scores,
                d[NMK_WORD_CUT_CUTS] = cuts;
            } else {
                d[NMK_WORD_DRAW_TILE] = tile, d[NMK_WORD_DRAW_TILES] = tiles, d[NMK_WORD_DRAW_CAND] = cand;
                d[NMK_WORD_DRAW_SCORES] = scores, d[NMK_WORD_DRAW_RAW_LOGITS] = logits, d[NMK_WORD_DRAW_CUTS] = cuts;
                d[NMK_WORD_DRAW_DRAWN] = drawn, d[NMK_WORD_DRAW_TOPS] = told;
            }
            if (execute(&vm, &cut_sm[s], d)) return -1;
            tile += tiles;
        }
    end[NMK_WORD_SAMPLE_COLUMN] = n, end[NMK_WORD_SAMPLE_CAND] = cand, end[NMK_WORD_SAMPLE_DRAWN] = drawn;
    end[NMK_WORD_SAMPLE_TOPS] = told, end[NMK_WORD_SAMPLE_RAW_LOGITS] = logits;
    return execute(&vm, &cut_sm[0], end);
}

/* However many columns are cut, each token of each is one SM's. */
static void test_share(void) {
    static int owners[NMK_COLUMNS][NMK_VOCAB];
    int wrong = 0;
    for (unsigned mask = 1; mask < 1u << NMK_COLUMNS; mask++) {
        memset(owners, 0, sizeof owners);
        vm.filters = mask;
        for (int s = 0; s < NMK_SMS; s++) {
            struct share mine;
            if (!share(&vm, s, NMK_VOCAB, &mine)) continue;
            for (int i = mine.first; i < mine.first + mine.count; i++) owners[mine.column][i]++;
        }
        for (int n = 0; n < NMK_COLUMNS; n++)
            for (int i = 0; i < NMK_VOCAB; i++) wrong += owners[n][i] != (int)(mask >> n & 1);
    }
    result(wrong == 0, "columns that are cut share the SMs", "%d tokens have no SM or several", wrong);
}

static nmk_column asks(int top_k, float top_p, float min_p, uint32_t seed) {
    const int k = top_k > 0 ? NMK_COLUMN_CUTS_K : 0, p = top_p > 0 ? NMK_COLUMN_CUTS_P : 0;
    return (nmk_column){.flags = NMK_COLUMN_FILTERS | k | p,
                        .top_k = top_k,
                        .top_p = top_p,
                        .min_p = min_p,
                        .temperature = 1,
                        .seed_lo = seed};
}

/* The tokens of score[] that are kept and the one that is drawn must be those `want` says, in every SM. */
static int cuts_wrong(int n, nmk_column c, const char *want) {
    struct candidate best = {-INFINITY, INT32_MAX};
    int wrong = end_of_step(n, c) != 0;
    for (int i = 0; i < NMK_VOCAB; i++) {
        for (int s = 0; s < NMK_SMS; s++)
            wrong += (nmk_score_key(cut_sm[s].cut.best, score[i]) <= cut_sm[s].cut.limit) != want[i];
        if (want[i]) better(&best, score[i] + nmk_gumbel(c.seed_lo, 0, 41, i), i);
    }
    return wrong + (vm.out[n] != best.id) + (control.column[n].pos != 42);
}

/* The first `kept` of a list that is at ids 100, 137, ...; all other tokens are -INFINITY. */
static const char *first(int count, int kept) {
    static char want[NMK_VOCAB];
    memset(want, 0, sizeof want);
    for (int i = 0; i < kept && i < count; i++) want[100 + 37 * i] = 1;
    return want;
}

static void put(const float *list, int count) {
    for (int i = 0; i < NMK_VOCAB; i++) score[i] = -INFINITY;
    for (int i = 0; i < count; i++) score[100 + 37 * i] = list[i];
}

static void test_cuts(void) {
    enum { KEYS = 10, SHARES = 5 };
    static const uint32_t keys[KEYS] = {0, 1, 0xff, 0x100, 0xffff, 0x10000, 0x10001, 0x123456, 0xfeffff, 0xfffffe};
    float list[KEYS], shares[SHARES];
    int wrong = 0;
    for (int i = 0; i < KEYS; i++) {
        const uint32_t below = keys[i] ? (108u << 23) + (keys[i] << 4) : 0; /* 108: of 2^-19 */
        memcpy(&list[i], &below, sizeof below);
        list[i] = -list[i];
    }
    put(list, KEYS);
    for (int k = 1; k <= KEYS; k++)
        wrong += cuts_wrong(k % NMK_COLUMNS, asks(k, 0, 0, (uint32_t)k), first(KEYS, k)) != 0;
    result(wrong == 0, "top_k on both sides of each digit's border", "%d of %d wrong", wrong, KEYS);

    static const float ties[] = {0, -1, -1, -1, -2};
    static const int with_ties[] = {1, 4, 4, 4, 5};
    wrong = 0, put(ties, 5);
    for (int k = 1; k <= 5; k++) wrong += cuts_wrong(1, asks(k, 0, 0, 7), first(5, with_ties[k - 1])) != 0;
    result(wrong == 0, "top_k keeps what ties", "%d of 5 wrong", wrong);

    /* 8, 4, 2, 1, 1 of 16 */
    static const struct {
        int k;
        float p, min_p;
        int kept;
    } all[] = {{0, 0.01f, 0, 1},    {0, 0.49f, 0, 1},        {0, 0.51f, 0, 2},    {0, 0.74f, 0, 2},
               {0, 0.76f, 0, 3},    {0, 0.87f, 0, 3},        {0, 0.88f, 0, 5},    {0, 0.99f, 0, 5},
               {2, 0.66f, 0, 1},    {2, 0.68f, 0, 2},        {2, 0.99f, 0, 2},    {1, 0.99f, 0, 1},
               {0, 0.99f, 0.2f, 3}, {0, 0.8f, 0.2f, 2},      {0, 0, 0.2f, 3},     {0, 0, 0.9f, 1},
               {2, 0, 0.2f, 2},     {4, 0, 0.2f, 3},         {2, 0.68f, 0.9f, 1}, {4, 0.9f, 0.2f, 3},
               {5000, 0.76f, 0, 3}, {0, 0, 0.13f - 0.01f, 5}};
    const int cases = (int)(sizeof all / sizeof *all);
    for (int i = 0; i < SHARES; i++) shares[i] = -(float)(i < 4 ? i : 3) * 0.69314718f + 3;
    wrong = 0, put(shares, SHARES);
    for (int i = 0; i < cases; i++)
        for (uint32_t seed = 0; seed < 4; seed++)
            wrong += cuts_wrong(i % NMK_COLUMNS, asks(all[i].k, all[i].p, all[i].min_p, seed),
                                first(SHARES, all[i].kept)) != 0;
    result(wrong == 0, "top_p, and with top_k and min_p", "%d of %d wrong", wrong, 4 * cases);

    static char every[NMK_VOCAB];
    memset(every, 1, sizeof every);
    for (int i = 0; i < NMK_VOCAB; i++) score[i] = 5 * uniform();
    wrong = cuts_wrong(3, asks(NMK_VOCAB, 0, 0, 5), every) != 0;
    wrong += cuts_wrong(3, asks(1 << 30, 0, 0, 6), every) != 0;
    result(wrong == 0, "top_k of the vocabulary and more", "%d of 2 wrong", wrong);

    /* many tokens against sorting them */
    wrong = 0;
    for (int turn = 0; turn < 12; turn++) {
        static char want[NMK_VOCAB];
        const float heat = turn < 6 ? 8 : 0.01f;
        const int k = 1 + turn * 131;
        for (int i = 0; i < NMK_VOCAB; i++) score[i] = heat * uniform();
        for (int i = 0; i < NMK_VOCAB; i++) {
            int above = 0;
            for (int j = 0; j < NMK_VOCAB; j++) above += score[j] > score[i];
            want[i] = above < k;
        }
        float low = INFINITY, best = -INFINITY;
        for (int i = 0; i < NMK_VOCAB; i++) best = score[i] > best ? score[i] : best;
        for (int i = 0; i < NMK_VOCAB; i++)
            if (want[i] && score[i] < low) low = score[i];
        for (int i = 0; i < NMK_VOCAB; i++) want[i] |= bits_of(best - score[i]) >> 4 == bits_of(best - low) >> 4;
        wrong += cuts_wrong(turn % NMK_COLUMNS, asks(k, 0, 0, (uint32_t)turn), want) != 0;
    }
    result(wrong == 0, "top_k against counting", "%d of 12 wrong", wrong);
}

static void test_strange_scores(void) {
    static const float one[] = {-3};
    int wrong = 0;
    put(one, 1);
    wrong += cuts_wrong(0, asks(1, 0, 0, 1), first(1, 1)) != 0,
        wrong += cuts_wrong(0, asks(0, 0.5f, 0, 1), first(1, 1)) != 0;
    wrong += cuts_wrong(0, asks(0, 0, 0.5f, 1), first(1, 1)) != 0;
    result(wrong == 0, "one token that is possible", "%d of 3 wrong", wrong);

    score[5] = NAN; /* behind all others, and never drawn */
    wrong = end_of_step(2, asks(1, 0, 0, 1)) || vm.out[2] != 100;
    wrong += end_of_step(2, asks(3, 0, 0.1f, 1)) || vm.out[2] != 100;
    result(wrong == 0, "NaN among the scores", "%d of 2 wrong", wrong);
    for (int i = 0; i < NMK_VOCAB; i++) score[i] = NAN;
    const int failed = end_of_step(2, asks(3, 0, 0, 1));
    result(failed && strstr(cut_sm[0].err, "column 2"), "nothing but NaN is refused", "%s", cut_sm[0].err);
    cut_sm[0].err[0] = 0;
}

static void test_logprobs(void) {
    double sum = 0, worst = 0;
    int good = 1;
    for (int i = 0; i < NMK_VOCAB; i++)
        raw[i] = 6 * uniform(), score[i] = i == 77 ? 9 : -raw[i]; /* by the model alone */
    raw[3000] = raw[12] = raw[2000] = 7;                          /* ties */
    memset(adjust, 0, sizeof adjust);
    for (int i = 0; i < NMK_VOCAB; i++) sum += exp(raw[i]);
    nmk_column c = asks(1, 0, 0, 3);
    c.flags |= NMK_COLUMN_LOGPROBS | NMK_COLUMN_ADJUSTS;
    adjust[5 * NMK_VOCAB + 77].seen = NMK_SEEN_PROMPT | 4;
    good &= end_of_step(2, c) == 0 && vm.out[2] == 77;
    const nmk_tops *t = &tops[2];
    worst = fabs(t->chosen - (raw[77] - log(sum)));
    for (int i = 0; i < NMK_TOPS; i++) {
        int above = 0;
        if (t->id[i] < 0 || t->id[i] >= NMK_VOCAB) die("top %d is token %d", i, t->id[i]);
        for (int j = 0; j < NMK_VOCAB; j++)
            above += raw[j] > raw[t->id[i]] || (raw[j] == raw[t->id[i]] && j < t->id[i]);
        good &= above == i;
        worst = fmax(worst, fabs(t->logprob[i] - (raw[t->id[i]] - log(sum))));
    }
    good &= t->id[0] == 12 && t->id[1] == 2000 && t->id[2] == 3000;
    result(good && worst < 1e-5, "log-probabilities", "largest error %.1e", worst);
    good = adjust[5 * NMK_VOCAB + 77].seen == (NMK_SEEN_PROMPT | 5);
    for (int i = 0; i < NMK_COLUMNS * NMK_VOCAB; i++) good &= i == 5 * NMK_VOCAB + 77 || !adjust[i].seen;
    result(good, "what was given is counted", "%u times", adjust[5 * NMK_VOCAB + 77].seen & (NMK_SEEN_PROMPT - 1u));
}

/* Two tiles of the lm_head for columns that ask for different things. */
static void test_lm_head(void) {
    enum { ROWS_OF = 32, FIRST_TILE = 3 };
    static struct vm_sm sm;
    static const int flags[] = {0,
                                0,
                                NMK_COLUMN_ADJUSTS,
                                NMK_COLUMN_FILTERS | NMK_COLUMN_LOGPROBS,
                                NMK_COLUMN_FILTERS | NMK_COLUMN_ADJUSTS | NMK_COLUMN_LOGPROBS,
                                NMK_COLUMN_LOGPROBS};
    uint16_t *weights = zeroed(sizeof(uint16_t) * 16 * (FIRST_TILE + 2) * NMK_HIDDEN);
    int32_t d[WORDS] = {NMK_OP_LM_HEAD};
    int wrong = 0;
    memset(vm.arena, 0xff, (size_t)NMK_ARENA_BYTES);
    d[NMK_WORD_LM_HEAD_TILE] = FIRST_TILE, d[NMK_WORD_LM_HEAD_TILES] = 2, d[NMK_WORD_LM_HEAD_CAND] = place("cand");
    d[NMK_WORD_LM_HEAD_SCORES] = place("scores"), d[NMK_WORD_LM_HEAD_RAW_LOGITS] = place("raw_logits");
    for (int i = 0; i < 16 * (FIRST_TILE + 2) * NMK_HIDDEN; i++) weights[i] = bf16_round(uniform());
    for (int i = 0; i < NMK_COLUMNS * NMK_VOCAB; i++) adjust[i] = (nmk_adjust){uniform(), (uint32_t)i % 3};
    for (int n = 0; n < NMK_COLUMNS; n++) {
        const int asked = n < 6 ? flags[n] : 0;
        control.column[n] = (nmk_column){.pos = n == 6 ? -1 : 10 + n,
                                         .slot = n ^ 1,
                                         .temperature = n == 0 ? 0 : 0.5f,
                                         .flags = n == 7 ? 0 : NMK_COLUMN_SAMPLES | asked,
                                         .seed_lo = 3,
                                         .presence = 0.5f,
                                         .frequency = 0.25f,
                                         .repetition = 1.5f};
        for (int i = 0; i < NMK_HIDDEN; i++) sm.xn[n][i] = bf16_round(uniform());
        sm.factor[n] = 0.5f + (float)n;
    }
    const uint8_t *before = vm.weights;
    sm.id = 9, vm.weights = (const uint8_t *)weights;
    wrong += execute(&vm, &sm, d) != 0;
    vm.weights = before;
    const float *cand = buffer(&vm, place("cand")), *scores = buffer(&vm, place("scores"));
    const float *logits = buffer(&vm, place("raw_logits"));
    const int32_t *ids = (const int32_t *)(cand + NMK_SMS * 2 * NMK_COLUMNS);
    for (int n = 0; n < NMK_COLUMNS; n++) {
        const nmk_column *c = &control.column[n];
        const int live = n < 6, at = 9 * 2 * NMK_COLUMNS + n;
        double best = -INFINITY;
        for (int row = FIRST_TILE * 16; row < FIRST_TILE * 16 + ROWS_OF; row++) {
            const float *told = &logits[n * NMK_VOCAB + row], *kept = &scores[n * NMK_VOCAB + row];
            const nmk_adjust *a = &adjust[c->slot * NMK_VOCAB + row];
            double v = 0;
            for (int i = 0; i < NMK_HIDDEN; i++)
                v += (double)bf16_value(weights[row * NMK_HIDDEN + i]) * bf16_value(sm.xn[n][i]);
            v *= (double)sm.factor[n] * NMK_LOGIT_SCALE;
            wrong += live && c->flags & NMK_COLUMN_LOGPROBS ? !(fabs(*told - v) < 1e-4) : !isnan(*told);
            if (c->flags & NMK_COLUMN_ADJUSTS) {
                v += a->bias;
                if (a->seen) v = (v > 0 ? v / 1.5 : v * 1.5) - 0.25 * a->seen - 0.5;
            }
            if (c->temperature > 0) v /= c->temperature;
            wrong += live && c->flags & NMK_COLUMN_FILTERS ? !(fabs(*kept - v) < 1e-4) : !isnan(*kept);
            if (c->temperature > 0 && !(c->flags & NMK_COLUMN_FILTERS)) v += nmk_gumbel(3, 0, c->pos, row);
            best = fmax(best, v);
            if (live && ids[at] == row) wrong += !(fabs(cand[at] - v) < 1e-4);
        }
        wrong += live ? !(fabs(cand[at] - best) < 1e-4) || ids[at] < FIRST_TILE * 16 : cand[at] != -INFINITY;
        wrong += cand[at + NMK_COLUMNS] != -INFINITY; /* the other storer's row */
    }
    result(wrong == 0, "lm_head", "%d values wrong", wrong);
    free(weights);
}

int main(void) {
    vm.tickets = zeroed(TICKETS_BYTES);
    vm.arena = zeroed((size_t)NMK_ARENA_BYTES);
    vm.control = &control, vm.out = out;
    vm.table_full = vm.table_sliding = table, vm.table_stride = LONGEST / PAGE;
    test_rounding();
    test_dot();
    test_noise();
    test_chunks();
    test_attentions();
    test_route();
    test_sample();
    test_score_key();
    test_adjusted();
    test_fixed();
    test_narrow();
    test_offer();
    test_share();
    test_cuts();
    test_strange_scores();
    test_logprobs();
    test_lm_head();
    free(vm.tickets), free(vm.arena);
    return failures != 0;
}
