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

static void test_chunks(void) {
    int wrong = 0;
    for (int sliding = 0; sliding < 2; sliding++)
        for (int base = 0; base < 5000; base++) {
            const nmk_column c = {.pos = base + base % NMK_COLUMNS, .base = base};
            const struct chunks s = chunks_of(&c, sliding, NMK_WINDOW);
            const int lo = sliding && c.pos >= NMK_WINDOW ? c.pos - NMK_WINDOW + 1 : 0;
            wrong += s.lo != lo || s.count < 1 || s.count > NMK_CHUNKS_MAX || s.count > s.pages;
            wrong += base > lo && (s.first * PAGE > lo || (s.first + s.pages) * PAGE < base ||
                                   (s.first + s.pages - 1) * PAGE >= base || (s.first + 1) * PAGE <= lo);
        }
    result(wrong == 0, "chunks", "%d of 10000 rows with pages too few or too many", wrong);
}

/* ---- attention and combine against a softmax in double ---- */

static struct nmk_vm vm;
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
    offset += NMK_PART_SLOTS * (SLOT_FLOATS + 16) * 4 / 128;
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

int main(void) {
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
    free(vm.arena);
    return failures != 0;
}
