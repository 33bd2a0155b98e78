/* The ops of attention on the CPU machine, from the normed input to the heads' outputs and what is left in the pages,
 * against the plain definition in double: projections with their bias, norms of q and k, RoPE, a softmax over all that
 * a position sees.  Built for every shape of tests/gpu/specs beside the toy. */
#include "refvm.c"

#include <stdbool.h>

enum { SEQUENCES = 2, LONGEST = 1024, LAST = NMK_COLUMNS - 1 };
enum { Q_ROWS = NMK_HEADS * HEAD_DIM, KV_ROWS = NMK_KV_HEADS * HEAD_DIM, ALL_ROWS = Q_ROWS + 2 * KV_ROWS };

static const double EPS = NMK_EPS;
static int failures;
static uint64_t state = 1;

static void *zeroed(size_t bytes) {
    void *p = calloc(1, bytes);
    if (!p) abort();
    return p;
}

/* A bf16 number, uniform in -most .. most. */
static uint16_t some(double most) { return bf16_round((float)(most * ((double)(draw(&state) >> 11) * 0x1p-52 - 1))); }

/* ---- the model in double ---- */

static uint16_t *weights; /* [ALL_ROWS][NMK_HIDDEN], then the bias, then gamma of q and of k */
static uint16_t *xn[NMK_COLUMNS];
static double *cache[2];                        /* [2: K, V][SEQUENCES][LONGEST][NMK_KV_HEADS][HEAD_DIM], by kind */
static double projected[NMK_COLUMNS][ALL_ROWS]; /* this step's q, k, v, all rounded as an exact machine would not */

static double *cached(int sliding, int is_v, int sequence, int pos, int head) {
    return cache[sliding] +
           ((((size_t)is_v * SEQUENCES + (size_t)sequence) * LONGEST + (size_t)pos) * NMK_KV_HEADS + (size_t)head) *
               HEAD_DIM;
}

static void norm_head(double *head, const uint16_t *gamma) {
    double squares = 0;
    for (int i = 0; i < HEAD_DIM; i++) squares += head[i] * head[i];
    for (int i = 0; i < HEAD_DIM; i++) head[i] *= bf16_value(gamma[i]) / sqrt(squares / HEAD_DIM + EPS);
}

static void turn_head(double *head, int pos) {
    for (int i = 0; i < HEAD_DIM / 2; i++) {
        const double angle = pos * pow(NMK_ROPE_THETA, -2.0 * i / HEAD_DIM);
        double *a = head + (NMK_ROPE_HALVES ? i : 2 * i), *b = NMK_ROPE_HALVES ? a + HEAD_DIM / 2 : a + 1;
        const double x = *a, y = *b;
        *a = x * cos(angle) - y * sin(angle), *b = x * sin(angle) + y * cos(angle);
    }
}

static void project(int n, int pos) {
    const uint16_t *bias = weights + (size_t)ALL_ROWS * NMK_HIDDEN, *gamma = bias + ALL_ROWS;
    for (int row = 0; row < ALL_ROWS; row++) {
        double sum = NMK_QKV_BIAS ? bf16_value(bias[row]) : 0;
        for (int i = 0; i < NMK_HIDDEN; i++)
            sum += (double)bf16_value(weights[(size_t)row * NMK_HIDDEN + (size_t)i]) * bf16_value(xn[n][i]);
        projected[n][row] = sum;
    }
    for (int h = 0; h < NMK_HEADS + NMK_KV_HEADS; h++) {
        if (NMK_QK_NORM) norm_head(projected[n] + h * HEAD_DIM, gamma + (h < NMK_HEADS ? 0 : HEAD_DIM));
        turn_head(projected[n] + h * HEAD_DIM, pos);
    }
}

/* Head h of column n: its sequence's cache up to `base`, then this step's columns of the same sequence. */
static void attention(const nmk_control *control, int sliding, int n, int h, double *o) {
    const nmk_column *c = &control->column[n];
    const int kv = h / (NMK_HEADS / NMK_KV_HEADS),
              first = sliding && c->pos >= NMK_WINDOW ? c->pos - NMK_WINDOW + 1 : 0;
    double sum = 0, top = -INFINITY, score[LONGEST];
    const double *v[LONGEST];
    for (int pos = first; pos <= c->pos; pos++) {
        const double *k;
        if (pos < c->base) {
            k = cached(sliding, 0, c->slot, pos, kv), v[pos] = cached(sliding, 1, c->slot, pos, kv);
        } else {
            k = projected[c->group + pos - c->base] + Q_ROWS + kv * HEAD_DIM, v[pos] = k + KV_ROWS;
        }
        score[pos] = 0;
        for (int i = 0; i < HEAD_DIM; i++) score[pos] += projected[n][h * HEAD_DIM + i] * k[i];
        score[pos] /= sqrt(HEAD_DIM);
        top = fmax(top, score[pos]);
    }
    memset(o, 0, sizeof(double) * HEAD_DIM);
    for (int pos = first; pos <= c->pos; pos++) {
        const double p = exp(score[pos] - top);
        sum += p;
        for (int i = 0; i < HEAD_DIM; i++) o[i] += p * v[pos][i];
    }
    for (int i = 0; i < HEAD_DIM; i++) o[i] /= sum;
}

/* ---- the machine ---- */

static struct nmk_vm vm;
static nmk_control control;
static int32_t table[SEQUENCES * LONGEST / PAGE], out[NMK_COLUMNS];

/* Where dim i of K is in its page: pairs that turn together lie side by side.  V is as it is. */
static int k_place(int i) { return NMK_ROPE_HALVES ? i % (HEAD_DIM / 2) * 2 + i / (HEAD_DIM / 2) : i; }

static uint16_t *stored(int sliding, int is_v, int sequence, int pos, int layer, int head) {
    const nmk_column c = {.slot = sequence};
    return kv_page(&vm, &c, pos, sliding, sliding ? NMK_SLIDING_LAYERS : NMK_FULL_LAYERS, layer, NMK_KV_HEADS, head) +
           (is_v * PAGE + pos % PAGE) * HEAD_DIM;
}

/* Whether the model has layers of that kind. */
static bool has(int sliding) { return (sliding ? NMK_SLIDING_LAYERS : NMK_FULL_LAYERS) > 0; }

static void fill_caches(void) {
    for (int sliding = 0; sliding < 2; sliding++)
        for (int at = 0; has(sliding) && at < 2 * SEQUENCES * LONGEST * NMK_KV_HEADS; at++) {
            const int head = at % NMK_KV_HEADS, pos = at / NMK_KV_HEADS % LONGEST,
                      sequence = at / NMK_KV_HEADS / LONGEST % SEQUENCES,
                      is_v = at / NMK_KV_HEADS / LONGEST / SEQUENCES;
            const int layer = (sliding ? NMK_SLIDING_LAYERS : NMK_FULL_LAYERS) - 1;
            uint16_t *to = stored(sliding, is_v, sequence, pos, layer, head);
            double *plain = cached(sliding, is_v, sequence, pos, head);
            for (int i = 0; i < HEAD_DIM; i++) {
                const uint16_t b = some(1);
                plain[i] = bf16_value(b), to[is_v ? i : k_place(i)] = b;
            }
        }
}

/* Where chunks are claimed, SM after SM has one until none is left. */
static int run(struct vm_sm *sms, int32_t *d, int first_word) {
    int broken = 0, more = 1;
    for (int s = 0; s < NMK_SMS; s++) sms[s].id = s, sms[s].claimed = 0, sms[s].held = -1;
    while (more) {
        more = 0;
        for (int s = 0; s < NMK_SMS; s++) {
            if (sms[s].claimed < 0) continue;
            if (first_word) d[first_word] = s;
            const int got = execute(&vm, &sms[s], d);
            broken |= got < 0, more |= got == MORE;
            if (got != MORE) sms[s].claimed = -1;
        }
    }
    char err[160];
    return broken || report_unclaimed(&vm, err, sizeof err);
}

static double error_of(const double *want, const uint16_t *got, int n) {
    double wrong = 0, all = 0;
    for (int i = 0; i < n; i++) {
        const double x = bf16_value(got[i]) - want[i];
        wrong += x * x, all += want[i] * want[i];
    }
    return sqrt(wrong / all);
}

/* Columns 0 .. LAST-1 are the next positions of sequence 0, column LAST is the next of sequence 1. */
static void test_step(int sliding, int base, int other) {
    static struct vm_sm sms[NMK_SMS];
    const int layer = (sliding ? NMK_SLIDING_LAYERS : NMK_FULL_LAYERS) - 1;
    int32_t q[WORDS] = {0}, d[WORDS] = {0}, e[WORDS] = {0};
    int offset = 0; /* qkv, squares, part, attn one after the other */
    q[0] = NMK_OP_QKV, q[NMK_WORD_QKV_TILES] = ALL_ROWS / 16, q[NMK_WORD_QKV_ROPE] = 1;
    q[NMK_WORD_QKV_SLIDING] = sliding, q[NMK_WORD_QKV_KV_LAYER] = layer;
    const size_t matrix = (size_t)ALL_ROWS * NMK_HIDDEN * 2; /* hidden is a multiple of 256: nothing is padded */
    q[NMK_WORD_QKV_BIAS_KIB] = (int32_t)(matrix / 1024), q[NMK_WORD_QKV_GAMMA_KIB] = (int32_t)(matrix / 1024) + 64;
    d[0] = NMK_OP_ATTENTION, d[NMK_WORD_ATTENTION_SLIDING] = sliding, d[NMK_WORD_ATTENTION_KV_LAYER] = layer;
    e[0] = NMK_OP_COMBINE, e[NMK_WORD_COMBINE_SLIDING] = sliding;
    e[NMK_WORD_COMBINE_STEP] = NMK_SMS, e[NMK_WORD_COMBINE_END] = NMK_ATTN_UNITS;
    q[NMK_WORD_QKV_QKV] = d[NMK_WORD_ATTENTION_QKV] = offset, offset += (NMK_COLUMNS * ALL_ROWS * 2 + 127) / 128;
    q[NMK_WORD_QKV_SQUARES] = d[NMK_WORD_ATTENTION_SQUARES] = offset,
    offset += (NMK_COLUMNS * ALL_ROWS / 4 + 127) / 128;
    d[NMK_WORD_ATTENTION_PART] = e[NMK_WORD_COMBINE_PART] = offset;
    offset += (NMK_PART_SLOTS * (SLOT_FLOATS + 4 * PAIRS) * 4 + 127) / 128;
    e[NMK_WORD_COMBINE_ATTN] = offset, offset += (NMK_COLUMNS * Q_ROWS * 2 + 127) / 128;
    memset(vm.arena, 0xff, (size_t)offset * 128);

    for (int n = 0; n < NMK_COLUMNS; n++) {
        control.column[n] = n == LAST ? (nmk_column){.pos = other, .base = other, .group = n, .slot = 1}
                                      : (nmk_column){.pos = base + n, .base = base, .slot = 0};
        for (int i = 0; i < NMK_HIDDEN; i++) xn[n][i] = some(1);
        memcpy(sms[0].xn[n], xn[n], sizeof sms[0].xn[n]), sms[0].factor[n] = 1;
        project(n, control.column[n].pos);
    }
    memset(vm.state->claims, 0, sizeof vm.state->claims);
    memset(vm.tickets, 0, sizeof(uint32_t) * NMK_TICKETS * 2 * NMK_COUNTER_WORDS);
    /* qkv's whole task on one SM */
    bool broken = execute(&vm, &sms[0], q) != 0;
    broken |= run(sms, d, 0) | run(sms, e, NMK_WORD_COMBINE_FIRST);

    const uint16_t *attn = buffer(&vm, e[NMK_WORD_COMBINE_ATTN]);
    double most = 0, most_k = 0, most_v = 0;
    for (int n = 0; n < NMK_COLUMNS; n++) {
        const nmk_column *c = &control.column[n];
        for (int h = 0; h < NMK_HEADS; h++) {
            double o[HEAD_DIM];
            attention(&control, sliding, n, h, o);
            most = fmax(most, error_of(o, attn + (n * NMK_HEADS + h) * HEAD_DIM, HEAD_DIM));
        }
        for (int h = 0; h < NMK_KV_HEADS; h++) { /* what later steps will find */
            const uint16_t *k = stored(sliding, 0, c->slot, c->pos, layer, h);
            uint16_t natural[HEAD_DIM];
            for (int i = 0; i < HEAD_DIM; i++) natural[i] = k[k_place(i)];
            most_k = fmax(most_k, error_of(projected[n] + Q_ROWS + h * HEAD_DIM, natural, HEAD_DIM));
            most_v = fmax(most_v, error_of(projected[n] + Q_ROWS + KV_ROWS + h * HEAD_DIM,
                                           stored(sliding, 1, c->slot, c->pos, layer, h), HEAD_DIM));
        }
    }
    /* of a head's outputs a few bf16 roundings, of what is stored one or two */
    const bool good = !broken && most < 1.5e-2 && most_k < 4e-3 && most_v < 3e-3;
    printf("%s - %s attention of %s after %d and %d tokens: relative error of a head %.1e, of K %.1e, of V %.1e\n",
           good ? "ok" : "not ok", sliding ? "sliding" : "full", NMK_MODEL, base, other, most, most_k, most_v);
    failures += !good;
    fill_caches(); /* the step's K and V have replaced some */
}

int main(void) {
    static const int lengths[][2] = {{0, 0}, {1, 64}, {63, 128}, {65, 300}, {127, 500}, {640, 129}, {1000, 1020}};
    const size_t matrix = (size_t)ALL_ROWS * NMK_HIDDEN;
    weights = zeroed(matrix * 2 + 128 * 1024);
    for (size_t i = 0; i < matrix; i++) weights[i] = some(2 / sqrt(NMK_HIDDEN));
    for (int i = 0; i < ALL_ROWS; i++) weights[matrix + (size_t)i] = some(0.5);
    for (int i = 0; i < 2 * HEAD_DIM; i++) /* gamma: where project() looks, and where the op is told to */
        weights[matrix + ALL_ROWS + (size_t)i] = weights[matrix + 32 * 1024 + (size_t)i] =
            bf16_round(1 + bf16_value(some(0.5)));
    for (int n = 0; n < NMK_COLUMNS; n++) xn[n] = zeroed(NMK_HIDDEN * 2);
    float *rope = zeroed(sizeof(float) * LONGEST * HEAD_DIM);
    for (int i = 0; i < LONGEST * HEAD_DIM / 2; i++) {
        const double angle = i / (HEAD_DIM / 2) * pow(NMK_ROPE_THETA, -2.0 * (i % (HEAD_DIM / 2)) / HEAD_DIM);
        rope[2 * i] = (float)cos(angle), rope[2 * i + 1] = (float)sin(angle);
    }
    for (int i = 0; i < SEQUENCES * LONGEST / PAGE; i++) table[i] = SEQUENCES * LONGEST / PAGE - 1 - i;
    vm = (struct nmk_vm){
        .weights = (const uint8_t *)weights,
        .arena = zeroed((size_t)NMK_ARENA_BYTES),
        .kv_full = zeroed((size_t)NMK_KV_PAGE_BYTES_FULL * SEQUENCES * LONGEST / PAGE),
        .kv_sliding = zeroed((size_t)NMK_KV_PAGE_BYTES_SLIDING * SEQUENCES * LONGEST / PAGE),
        .control = &control,
        .table_full = table,
        .table_sliding = table,
        .table_stride = LONGEST / PAGE,
        .rope = rope,
        .tickets = zeroed(sizeof(uint32_t) * NMK_TICKETS * 2 * NMK_COUNTER_WORDS),
        .state = zeroed(sizeof(struct nmk_vm_state)),
        .out = out,
    };
    for (int i = 0; i < 2; i++) cache[i] = zeroed(sizeof(double) * 2 * SEQUENCES * LONGEST * KV_ROWS);
    fill_caches();
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int sliding = 0; sliding < 2; sliding++)
            if (has(sliding)) test_step(sliding, lengths[i][0], lengths[i][1]);
    return failures != 0;
}
