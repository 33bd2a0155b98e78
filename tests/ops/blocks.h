/* Norms, row tiles and routers of a small model against plain arithmetic: the machine of whatever model refvm.c is.
 * Built and run by blocks.sh. */
#include "refvm.c"

enum { TOKENS = 3, PLACE = 1 << 14 }; /* PLACE: bytes between the buffers of a test */

static int failures;

/* One line for a case. */
__attribute__((format(printf, 2, 3))) static int check(int good, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf(good ? "ok - " : "not ok - ");
    vprintf(format, args), putchar('\n');
    va_end(args);
    failures += !good;
    return good;
}

static struct nmk_control control;
static struct nmk_vm vm = {.control = &control};
static struct vm_sm sm;
static uint64_t state = 7;

static float uniform(void) { return (float)((double)(draw(&state) >> 11) * 0x1p-52 - 1); }

/* A buffer in units of 128 bytes. */
static int32_t place(int n) { return n * (PLACE / 128); }

static int run(int32_t *d, int opcode) {
    d[0] = opcode;
    sm.err[0] = 0;
    return execute(&vm, &sm, d) == 0 || check(0, "%s: %s", nmk_opcode_names[opcode], sm.err);
}

/* x far from zero, so that a variance from sums of squares would show. */
static void test_norm(void) {
    uint16_t *x = buffer(&vm, place(0));
    const uint16_t *gamma = (const uint16_t *)(const void *)vm.weights;
    int32_t d[WORDS] = {0};
    double worst = 0;
    d[NMK_WORD_NORM_XB] = place(0);
    for (int n = 0; n < NMK_COLUMNS; n++)
        for (int i = 0; i < NMK_HIDDEN; i++)
            x[n * NMK_HIDDEN + i] = bf16_round((NMK_NORM_MEAN ? 300 : 0) + uniform() * (float)(n + 1));
    if (!run(d, NMK_OP_NORM)) return;
    for (int n = 0; n < TOKENS; n++) {
        double row[NMK_HIDDEN], sum = 0, squares = 0;
        for (int i = 0; i < NMK_HIDDEN; i++) row[i] = (double)bf16_value(x[n * NMK_HIDDEN + i]), sum += row[i];
        const double mean = NMK_NORM_MEAN ? sum / NMK_HIDDEN : 0;
        for (int i = 0; i < NMK_HIDDEN; i++) squares += pow(row[i] - mean, 2);
        for (int i = 0; i < NMK_HIDDEN; i++) {
            const double scale = 1 / sqrt(squares / NMK_HIDDEN + (double)NMK_NORM_EPS);
            const double want = (row[i] - mean) * scale * (double)bf16_value(gamma[i]);
            const double got = (double)bf16_value(sm.xn[n][i]) * (double)sm.factor[n];
            worst = fmax(worst, fabs(want - got) / (fabs(want) + 0.1));
        }
    }
    check(worst < 5e-3, "%s of %d columns: largest relative error %.1e", NMK_NORM_MEAN ? "LayerNorm" : "RMSNorm",
          NMK_HIDDEN, worst);
    int idle = 0;
    for (int i = 0; i < NMK_HIDDEN; i++) idle += sm.xn[TOKENS][i] != 0;
    check(!idle, "an idle column is zero");
}

static void test_row_tile(int opcode, int width, int in, int tile_word, int kib_word, const char *name) {
    uint16_t *a = buffer(&vm, place(1));
    const uint16_t *w = (const uint16_t *)(const void *)vm.weights;
    int32_t d[WORDS] = {0};
    double worst = 0;
    d[in] = place(1), d[tile_word] = 2, d[kib_word] = 0;
    for (int i = 0; i < NMK_COLUMNS * width; i++) a[i] = bf16_round(uniform());
    memset(sm.acc, 0, sizeof sm.acc);
    if (!run(d, opcode)) return;
    for (int i = 0; i < 16; i++)
        for (int n = 0; n < TOKENS; n++) {
            double want = 0;
            for (int k = 0; k < width; k++)
                want += (double)bf16_value(a[n * width + k]) * (double)bf16_value(w[(32 + i) * width + k]);
            worst = fmax(worst, fabs(want - (double)sm.acc[i][n]));
        }
    check(worst < 1e-3, "%s of %d columns: largest error %.1e", name, width, worst);
}

/* Every expert's score from the definition, then the best ones. */
static void test_route(void) {
    enum { STRIDE = (NMK_EXPERTS + 15) / 16 * 16 };
    float *logits = buffer(&vm, place(2));
    int32_t d[WORDS] = {0};
    int wrong = 0;
    double worst = 0;
    d[NMK_WORD_ROUTE_LOGITS] = place(2);
    for (int i = 0; i < NMK_COLUMNS * STRIDE; i++) logits[i] = 4 * uniform();
    for (int n = 0; n < NMK_COLUMNS; n++)
        for (int e = NMK_EXPERTS; e < STRIDE; e++) logits[n * STRIDE + e] = 1e9f; /* nobody may look at these */
    if (!run(d, NMK_OP_ROUTE)) return;
    for (int n = 0; n < TOKENS; n++) {
        const float *l = logits + n * STRIDE;
        double all = 0, chosen = 0;
        for (int e = 0; e < NMK_EXPERTS; e++) {
            int above = 0;
            for (int o = 0; o < NMK_EXPERTS; o++) above += l[o] > l[e];
            all += exp((double)l[e]), chosen += above < NMK_EXPERTS_PER_TOKEN ? exp((double)l[e]) : 0;
        }
        for (int e = 0; e < NMK_EXPERTS; e++) {
            int above = 0, slot = 0;
            for (int o = 0; o < NMK_EXPERTS; o++) above += l[o] > l[e];
            const double v = exp((double)l[e]), score[] = {v / (1 + v), v / chosen, v / all};
            while (slot < sm.route[0].active && sm.route[0].expert[slot] != e) slot++;
            const float got = slot < sm.route[0].active ? sm.route[0].weight[slot][n] : 0;
            if (above < NMK_EXPERTS_PER_TOKEN)
                worst = fmax(worst, fabs((double)got - score[NMK_ROUTE_SCORE]));
            else
                wrong += got != 0;
        }
    }
    check(!wrong && worst < 1e-6, "route %d, %d of %d experts: largest error %.1e, %d chosen wrongly", NMK_ROUTE_SCORE,
          NMK_EXPERTS_PER_TOKEN, NMK_EXPERTS, worst, wrong);
}

int main(void) {
    const size_t rows = 48, widest = NMK_DENSE_FF > NMK_Q_WIDTH ? NMK_DENSE_FF : NMK_Q_WIDTH;
    uint16_t *weights = calloc(rows * widest, sizeof *weights);
    vm.arena = calloc(3, PLACE * 4), vm.tickets = calloc(NMK_TICKETS * 2, NMK_COUNTER_WORDS * sizeof *vm.tickets);
    if (!weights || !vm.arena || !vm.tickets) return 1;
    for (size_t i = 0; i < rows * widest; i++) weights[i] = bf16_round(uniform());
    vm.weights = (const uint8_t *)weights;
    for (int n = 0; n < NMK_COLUMNS; n++) control.column[n].pos = n < TOKENS ? 5 : -1;
    test_norm();
    test_row_tile(NMK_OP_O_PROJ, NMK_Q_WIDTH, NMK_WORD_O_PROJ_ATTN, NMK_WORD_O_PROJ_TILE, NMK_WORD_O_PROJ_WEIGHT_KIB,
                  "o_proj");
    test_row_tile(NMK_OP_DENSE_DOWN, NMK_DENSE_FF, NMK_WORD_DENSE_DOWN_DENSE_H, NMK_WORD_DENSE_DOWN_TILE,
                  NMK_WORD_DENSE_DOWN_WEIGHT_KIB, "dense_down");
    test_route();
    free(weights), free(vm.arena), free(vm.tickets);
    return failures != 0;
}
