/* The same step again gives the same bits, alone or in a batch: a moving error is a race.
 *
 * Invariance: every row alone against the same row in batches of eight, reversed, and five, over several steps; its
 * residual, attention and token.  Stress: steps from the same state with the arena poisoned, with several ring depths
 * and lengths; everything in the arena is compared.  Skips itself without a GPU.  Argument: stress steps (5000). */
#include <ctype.h>

#include "gpu/helper.h"

#define NAME "repeated steps (" NMK_MODEL ")"

enum { MOST_LEN = NMK_MAX_CONTEXT < 8192 ? NMK_MAX_CONTEXT : 8192, STEPS = 3 };

static nmk_engine *gpu;

/* What of a row is compared after each step. */
typedef struct {
    uint16_t x[NMK_HIDDEN];
    uint16_t attn[NMK_Q_WIDTH];
    int32_t token;
} row_result;

/* Base, a number, a layer: xb4, attn_3. */
static const nmk_buffer *last_of(const char *base) {
    const nmk_buffer *b = NULL;
    const size_t n = strlen(base);
    for (int i = 0; i < nmk_buffer_count; i++)
        if (!strncmp(nmk_buffers[i].name, base, n) && !islower((unsigned char)nmk_buffers[i].name[n]))
            b = &nmk_buffers[i];
    return b;
}

/* How row r draws. */
static const nmk_sampler samplers[8] = {
    {.temperature = 0},
    {.temperature = 0.8f},
    {.temperature = 1, .top_p = 0.95f},
    {.temperature = 1, .top_k = 40, .logprobs = 21},
    {.temperature = 0.9f, .top_k = 500, .top_p = 0.9f, .min_p = 0.001f, .presence_penalty = 0.5f},
    {.temperature = 0, .repetition_penalty = 1.3f, .frequency_penalty = 0.2f},
    {.temperature = 2, .min_p = 0.02f, .logprobs = 1},
    {.temperature = 1.5f, .top_p = 0.5f},
};

/* Runs STEPS steps of the rows order[0..count), column i being row order[i]; the rows keep their pages. */
static int run_rows(const nmk_column *start, const int *order, int count, row_result (*result)[STEPS], nmk_err *e) {
    static uint8_t arena[NMK_ARENA_BYTES];
    nmk_column column[NMK_COLUMNS];
    nmk_column now[NMK_COLUMNS];
    const nmk_buffer *x = last_of("xb"), *attn = last_of("attn");
    for (int n = 0; n < NMK_COLUMNS; n++) column[n] = nmk_column_idle();
    for (int i = 0; i < count; i++) {
        const nmk_column *c = &start[order[i]];
        column[i] = *c, column[i].group = i;
        if (nmk_engine_set_adjust(gpu, c->slot, &samplers[order[i] % 8], &c->token, 1, NULL, 0, e)) return -1;
    }
    for (int s = 0; s < STEPS; s++) {
        int32_t token[NMK_COLUMNS];
        if (nmk_engine_poison(gpu, 0xff, e) || nmk_engine_step(gpu, column, token, e) ||
            nmk_engine_read_arena(gpu, arena, e) || nmk_engine_get_columns(gpu, now, e))
            return -1;
        for (int i = 0; i < count; i++) {
            row_result *r = &result[order[i]][s];
            memcpy(r->x, arena + (size_t)x->offset128 * 128 + (size_t)i * sizeof r->x, sizeof r->x);
            memcpy(r->attn, arena + (size_t)attn->offset128 * 128 + (size_t)i * sizeof r->attn, sizeof r->attn);
            r->token = token[i];
        }
        memcpy(column, now, sizeof column);
    }
    return 0;
}

/* Where the first of a row's results differ. */
static void tell_difference(int row, int step, int rows, const row_result *a, const row_result *b) {
    int x = 0, attn = 0;
    while (x < NMK_HIDDEN && a->x[x] == b->x[x]) x++;
    while (attn < NMK_Q_WIDTH && a->attn[attn] == b->attn[attn]) attn++;
    printf("# row %d, step %d, alone and of %d:", row, step, rows);
    if (attn < NMK_Q_WIDTH) printf(" attn[%d] %04x %04x", attn, a->attn[attn], b->attn[attn]);
    if (x < NMK_HIDDEN) printf(" x[%d] %04x %04x", x, a->x[x], b->x[x]);
    printf(" token %d %d\n", a->token, b->token);
}

static void invariance(int set) {
    nmk_err e = {0};
    static row_result alone[NMK_COLUMNS][STEPS], batch[NMK_COLUMNS][STEPS];
    nmk_column start[NMK_COLUMNS];
    int orders[4][NMK_COLUMNS], different = 0, compared = 0;
    static const int few[2][5] = {{2, 6, 1, 7, 4}, {5, 3}}, counts[] = {NMK_COLUMNS, NMK_COLUMNS, 5, 2};
    for (int i = 0; i < NMK_COLUMNS; i++) orders[0][i] = i, orders[1][i] = NMK_COLUMNS - 1 - i;
    memcpy(orders[2], few[0], sizeof few[0]), memcpy(orders[3], few[1], sizeof few[1]);
    for (int r = 0; r < NMK_COLUMNS; r++) {
        const int len = set == 0 && r < 8 ? (int[]){0, 1, 63, 64, 65, 300, 1000, 2000}[r] % (MOST_LEN - 8)
                                          : (int)(rng() % (MOST_LEN - 8));
        if (nmk_engine_take_row(gpu, r, len + 8, &e)) goto out;
        start[r] = column_at(r, r, len);
        nmk_sampler sampler = samplers[r % 8];
        sampler.seed = rng();
        start[r] = nmk_column_decode(&sampler, r, r, start[r].token, len, 1 << 30);
    }
    for (int r = 0; r < NMK_COLUMNS; r++)
        if (run_rows(start, &r, 1, alone, &e)) goto out;
    for (int o = 0; o < 4; o++) {
        if (run_rows(start, orders[o], counts[o], batch, &e)) goto out;
        for (int i = 0; i < counts[o]; i++)
            for (int s = 0; s < STEPS; s++) {
                const int r = orders[o][i];
                compared++;
                if (!memcmp(&alone[r][s], &batch[r][s], sizeof(row_result))) continue;
                if (!different++) tell_difference(r, s, counts[o], &alone[r][s], &batch[r][s]);
            }
    }
out:
    check(!e.text[0] && compared && !different, "lengths %d: a row alone and in a batch: %d of %d row-steps differ %s",
          set, different, compared, e.text);
    for (int r = 0; r < NMK_COLUMNS; r++) nmk_engine_drop_row(gpu, r, &e);
}

/* Which of an SM's two storers saw its best candidate depends on who claimed what before: one row of the better. */
static void merge_candidates(uint8_t *arena) {
    enum { VALUES = NMK_SMS * 2 * NMK_COLUMNS };
    float *value = (float *)(void *)(arena + (size_t)last_of("cand")->offset128 * 128);
    int32_t *id = (int32_t *)(void *)(value + VALUES);
    for (int s = 0; s < NMK_SMS; s++)
        for (int n = 0; n < NMK_COLUMNS; n++) {
            const int a = s * 2 * NMK_COLUMNS + n, b = a + NMK_COLUMNS;
            if (value[b] > value[a] || (value[b] == value[a] && id[b] < id[a])) value[a] = value[b], id[a] = id[b];
            value[b] = 0, id[b] = 0;
        }
}

static void stress(int steps) {
    static uint8_t first[NMK_ARENA_BYTES], again[NMK_ARENA_BYTES];
    static const struct {
        int rows, ring, in_flight;
    } cases[] = {{NMK_COLUMNS, 12, 0},  {1, 12, 0}, {5, 9, 0},  {8, 4, 2},
                 {NMK_COLUMNS, 12, 12}, {3, 11, 1}, {1, 12, 12}};
    enum { CASES = sizeof cases / sizeof *cases };
    nmk_err e = {0};
    int done = 0, different = 0;
    for (int c = 0; c < CASES && !e.text[0]; c++) {
        nmk_column column[NMK_COLUMNS];
        for (int n = 0; n < NMK_COLUMNS; n++) column[n] = nmk_column_idle();
        for (int r = 0; r < cases[c].rows; r++) {
            const int len = (int)(rng() % (MOST_LEN - 8));
            if (nmk_engine_take_row(gpu, r, len + 8, &e)) break;
            column[r] = column_at(r, r, len);
        }
        nmk_engine_set_ring(gpu, cases[c].ring, cases[c].in_flight);
        int32_t tokens[NMK_COLUMNS], expected[NMK_COLUMNS];
        for (int s = 0; s < steps / CASES + 1 && !e.text[0]; s++) {
            if (nmk_engine_poison(gpu, 0xff, &e) || nmk_engine_step(gpu, column, tokens, &e) ||
                nmk_engine_read_arena(gpu, again, &e))
                break;
            merge_candidates(again);
            if (s == 0) memcpy(first, again, sizeof first), memcpy(expected, tokens, sizeof tokens);
            different += memcmp(first, again, sizeof first) || memcmp(expected, tokens, sizeof tokens);
            done++;
        }
        for (int r = 0; r < cases[c].rows; r++) nmk_engine_drop_row(gpu, r, &e);
    }
    nmk_engine_set_ring(gpu, 0, 0);
    check(!e.text[0] && done >= steps && !different, "stress: %d of %d steps differ %s", different, done, e.text);
}

int main(int argc, char **argv) {
    nmk_err e = {0};
    gpu = open_gpu(NAME, MOST_LEN, 0);
    if (nmk_engine_random_kv(gpu, 5, &e)) leave(NAME, e.text, false);
    for (int set = 0; set < 3; set++) invariance(set);
    stress(argc > 1 ? atoi(argv[1]) : 5000);
    nmk_engine_close(gpu);
    return failures != 0;
}
