/* The GPU against the CPU reference machine, buffer by buffer: every buffer a step exchanges, of every layer where the
 * model keeps them apart, over several steps, ragged lengths and batches.  The reference chooses experts by the GPU's
 * router logits, which are compared too: near ties would otherwise look like large errors.  Skips itself without a
 * GPU. */
#include "bf16.h"
#include "gpu/helper.h"
#include "gpu/helper_pages.h"

#include "../templates/random.h"

#include "../templates/packed.h" /* needs random.h */

#define NAME "GPU against the CPU machine (" NMK_MODEL ")"

enum { MOST_LEN = NMK_MAX_CONTEXT < 8192 ? NMK_MAX_CONTEXT : 8192, STEPS = 3 };
/* Where a model has no window, a long row. */
enum { WINDOW = NMK_WINDOW < MOST_LEN - 32 ? NMK_WINDOW : MOST_LEN - 32 };
static const double LIMIT = 1e-2;

/* ---- comparison ---- */

/* Buffers compared, by the part of the name before "_": width of a column's row and whether it is bf16. */
static const struct {
    const char *base;
    int width, is_bf16;
} EXCHANGED[] = {
    {"xb", NMK_HIDDEN, 1},    {"logits", NMK_EXPERTS, 0},   {"qkv", (NMK_HEADS + 2 * NMK_KV_HEADS) * NMK_HEAD_DIM, 1},
    {"attn", NMK_Q_WIDTH, 1}, {"dense_h", NMK_DENSE_FF, 1},
};

static int kind_of(const char *name) {
    for (size_t k = 0; k < sizeof EXCHANGED / sizeof *EXCHANGED; k++) {
        const size_t n = strlen(EXCHANGED[k].base);
        if (!strncmp(name, EXCHANGED[k].base, n) &&
            (name[n] == 0 || name[n] == '_' || (name[n] >= '0' && name[n] <= '9')))
            return (int)k;
    }
    return -1;
}

/* Element i of column n; logits may be sums, of which there are copies (ops/router_sum.cu). */
static double value_of(const uint8_t *arena, int b, int k, int n, int i) {
    const void *from = arena + (size_t)nmk_buffers[b].offset128 * 128;
    const int row = (NMK_EXPERTS + 15) / 16 * 16 + 2,
              columns = (int)nmk_buffers[b].bytes / (row * (int)sizeof(int64_t));
    if (!strcmp(EXCHANGED[k].base, "logits") && columns >= NMK_COLUMNS) {
        double sum = 0;
        for (int c = n; c < columns; c += NMK_COLUMNS) sum += (double)((const int64_t *)from)[c * row + i];
        return sum;
    }
    const int at = n * EXCHANGED[k].width + i;
    return EXCHANGED[k].is_bf16 ? bf16(((const uint16_t *)from)[at]) : ((const float *)from)[at];
}

/* The relative error of every buffer; largest of the step, printed when `verbose`. */
static double compare(const uint8_t *gpu, const uint8_t *cpu, const nmk_column *column, bool verbose) {
    double most = 0;
    for (int b = 0; b < nmk_buffer_count; b++) {
        const int k = kind_of(nmk_buffers[b].name);
        if (k < 0) continue;
        distance d = {0};
        for (int n = 0; n < NMK_COLUMNS; n++)
            for (int i = 0; i < EXCHANGED[k].width && column[n].pos >= 0; i++)
                add(&d, value_of(gpu, b, k, n, i), value_of(cpu, b, k, n, i));
        if (verbose || !(relative(&d) < LIMIT))
            printf("#   %-12s relative %.2e, worst %.2e\n", nmk_buffers[b].name, relative(&d), d.worst);
        if (!(relative(&d) <= most)) most = relative(&d);
    }
    return most;
}

static void run_case(nmk_engine *gpu, nmk_engine *cpu, const char *name, const int *len, int rows, int ring,
                     bool prompt) {
    nmk_err e = {0};
    uint8_t *ga = xmalloc(NMK_ARENA_BYTES), *ca = xmalloc(NMK_ARENA_BYTES);
    nmk_column column[NMK_COLUMNS], after[NMK_COLUMNS];
    nmk_column gc[NMK_COLUMNS], cc[NMK_COLUMNS];
    double most = 0;
    int equal = 1, steps = prompt ? 1 : STEPS;
    for (int n = 0; n < NMK_COLUMNS; n++) column[n] = nmk_column_idle();
    for (int r = 0; r < rows; r++) {
        if (nmk_engine_take_row(gpu, r, len[r] + 16, &e) || nmk_engine_take_row(cpu, r, len[r] + 16, &e)) goto out;
        column[r] = column_at(r, r, len[r]);
    }
    if (prompt) /* several positions of one row */
        for (int n = 0; n < NMK_POSITIONS; n++) {
            column[n] = column_at(0, 0, len[0] + n);
            column[n].base = len[0];
            column[n].flags = n == NMK_POSITIONS - 1;
        }
    if (copy_pool(gpu, cpu, 0, &e) || copy_pool(gpu, cpu, 1, &e)) goto out;
    nmk_engine_set_ring(gpu, ring, 0);
    for (int s = 0; s < steps; s++) {
        int32_t gt[NMK_COLUMNS], ct[NMK_COLUMNS];
        if (nmk_engine_poison(gpu, 0xff, &e) || nmk_engine_poison(cpu, 0xff, &e)) goto out;
        if (nmk_engine_step(gpu, column, gt, &e) || nmk_engine_read_arena(gpu, ga, &e)) goto out;
        if (NMK_EXPERTS) nmk_engine_force_experts(cpu, ga);
        if (nmk_engine_step(cpu, column, ct, &e) || nmk_engine_read_arena(cpu, ca, &e)) goto out;
        const double d = compare(ga, ca, column, s == 0 && !ring);
        if (!(d <= most)) most = d;
        for (int n = 0; n < NMK_COLUMNS; n++)
            if (gt[n] != ct[n]) equal = 0, printf("#   column %d: GPU token %d, CPU token %d\n", n, gt[n], ct[n]);
        if (nmk_engine_get_columns(gpu, gc, &e) || nmk_engine_get_columns(cpu, cc, &e)) goto out;
        for (int n = 0; n < NMK_COLUMNS; n++) {
            after[n] = cc[n];
            after[n].token = gc[n].token; /* tokens may differ where two logits tie within rounding */
            if (memcmp(&after[n], &gc[n], sizeof *after)) check(0, "%s: control of column %d after the step", name, n);
        }
        memcpy(column, gc, sizeof column);
    }
out:
    nmk_engine_force_experts(cpu, NULL);
    for (int r = 0; r < rows; r++) nmk_engine_drop_row(gpu, r, &e), nmk_engine_drop_row(cpu, r, &e);
    check(!e.text[0] && most < LIMIT, "%s: largest relative error %.2e, tokens %s %s", name, most,
          equal ? "equal" : "differ", e.text);
    free(ga), free(ca);
}

/* ---- logits that are equal ---- */

/* Of every router the row tiles, 16 experts each, are the first `kinds` again and again; 0: all weights are 0.  Where the
 * GPU has packed tiles, padded to 256 columns, the CPU machine has rows one after the other. */
static int repeat_experts(nmk_engine *g, bool packed, int kinds, nmk_err *e) {
    nmk_machine *m = g->machine;
    int rc = 0;
    for (int k = 0; k < nmk_array_count; k++) {
        const nmk_array *a = &nmk_arrays[k];
        if (strcmp(a->name, "router")) continue;
        const size_t tile = (size_t)(packed ? nmk_packed_cols(a->cols) : a->cols) * 16 * 2;
        const size_t tiles = (size_t)(a->rows + 15) / 16;
        uint8_t *weights = xcalloc(tiles, tile);
        for (int layer = 0; layer < a->layers && !rc; layer++) {
            const uint64_t at =
                g->params.weights + ((uint64_t)a->kib + (uint64_t)layer * (uint64_t)a->layer_kib) * 1024;
            if (kinds) rc = m->calls->read(m, weights, at, tile * tiles, e);
            for (size_t i = (size_t)kinds; i < tiles && kinds; i++)
                memcpy(weights + i * tile, weights + i % (size_t)kinds * tile, tile);
            if (!rc) rc = m->calls->write(m, at, weights, tile * tiles, e);
        }
        free(weights);
    }
    return rc;
}

int main(void) {
    nmk_err e = {0};
    nmk_engine *cpu = NULL, *gpu = open_gpu(NAME, MOST_LEN, 1u << 30);
    if (NMK_EXPERTS && !nmk_engine_buffer(gpu, "logits_1"))
        leave(NAME, "layers share their buffers, so one layer's router logits cannot be told from another's", true);
    nmk_options o = test_options("cpu", MOST_LEN, 1u << 30);
    if (nmk_engine_open(&cpu, &o, &e)) leave(NAME, e.text, false);
    if (nmk_engine_random_kv(gpu, 3, &e)) leave(NAME, e.text, false);
    static const int one[] = {0}, page[] = {63}, next[] = {64}, window[] = {WINDOW + 5}, longest[] = {MOST_LEN - 24};
    static const int ragged[] = {1, 300, 64, MOST_LEN / 2, 2, 129, WINDOW - 1, WINDOW};
    static const int five[] = {65, 1000, 7, 127, 128};
    run_case(gpu, cpu, "first token", one, 1, 0, false);
    run_case(gpu, cpu, "one row, end of a page", page, 1, 0, false);
    run_case(gpu, cpu, "one row, start of a page", next, 1, 0, false);
    run_case(gpu, cpu, "one row across the window", window, 1, 0, false);
    run_case(gpu, cpu, "one long row", longest, 1, 0, false);
    run_case(gpu, cpu, "eight ragged rows", ragged, 8, 0, false);
    run_case(gpu, cpu, "five rows, ring of 4", five, 5, 4, false);
    run_case(gpu, cpu, "eight rows, ring of 11", ragged, 8, 11, false);
    if (NMK_COLUMNS > 8) {
        int all[NMK_COLUMNS];
        for (int n = 0; n < NMK_COLUMNS; n++) all[n] = n < 8 ? ragged[n] : 1 + 37 * n % (MOST_LEN / 8);
        run_case(gpu, cpu, "all columns", all, NMK_COLUMNS, 0, false);
        run_case(gpu, cpu, "all but one", all, NMK_COLUMNS - 1, 5, false);
    }
    run_case(gpu, cpu, "eight positions of a prompt, from the start", one, 1, 0, true);
    run_case(gpu, cpu, "eight positions of a prompt, across a page", page, 1, 0, true);
    run_case(gpu, cpu, "eight positions of a prompt, across the window", window, 1, 0, true);
    for (int kinds = 3; NMK_EXPERTS && kinds >= 0; kinds -= 3) {
        if (repeat_experts(gpu, true, kinds, &e) || repeat_experts(cpu, false, kinds, &e)) leave(NAME, e.text, false);
        run_case(gpu, cpu, kinds ? "one row, equal logits" : "one row, all logits equal", page, 1, 0, false);
        run_case(gpu, cpu, kinds ? "eight rows, equal logits" : "eight rows, all logits equal", ragged, 8, 0, false);
    }
    nmk_engine_close(gpu), nmk_engine_close(cpu);
    return failures != 0;
}
