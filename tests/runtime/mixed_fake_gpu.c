/* A step and a chunk in one launch of a GPU made up of host memory: one launch is queued, the step's tokens are read
 * while the chunk still runs, each has its own time, and a hang says in which part it was. */
#include "fake_gpu.h"

#include <math.h>

enum { TOKENS = 300 };

static nmk_engine *g;
static int32_t prompt[TOKENS];

static int open_rows(nmk_prefill_mode mode, nmk_err *e) {
    const nmk_options o = {
        .random_weights = true, .device = "cuda:0", .max_len = 640, .kv_bytes = 64 << 20, .prefill_mode = mode};
    nmk_column column[NMK_COLUMNS];
    if (nmk_engine_open(&g, &o, e)) return -1;
    for (int r = 0; r < 2; r++)
        if (nmk_engine_take_row(g, r, 400, e)) return -1;
    for (int c = 0; c < NMK_COLUMNS; c++) column[c] = nmk_column_idle();
    column[2] = nmk_column_decode(&(nmk_sampler){0}, 2, 0, 5, 3, 100);
    return nmk_engine_set_columns(g, column, e);
}

static int both(uint64_t *step, uint64_t *chunk, nmk_err *e) {
    const nmk_span span = {.count = TOKENS, .slot = 1};
    return nmk_engine_queue_both(g, 1, &span, 1, prompt, step, chunk, e);
}

static void test_order(void) {
    nmk_err e = {0};
    uint64_t step, chunk;
    const int32_t *token;
    if (!check(open_rows(NMK_PREFILL_MIXED, &e) == 0, "opens", "%s", e.text)) return;
    for (int i = 0; i < 3; i++) {
        const int steps = steps_run, launches = mixed_launches, chunks = seen_chunks;
        int rc = both(&step, &chunk, &e) || nmk_engine_wait_step(g, step, &token, &e);
        check(rc == 0 && mixed_launches == launches + 1 && steps_run == steps + 1 && token[2] == 6 + i &&
                  seen_chunks == chunks,
              "the token is read before the chunk", "%d steps, %d launches: %s", steps_run - steps,
              mixed_launches - launches, e.text);
        rc = nmk_engine_wait_step(g, chunk, &token, &e);
        check(rc == 0 && chunk == step + 1 && seen_chunks == chunks + 1 && token[2] == -1, "and then the chunk is over",
              "%d chunks: %s", seen_chunks - chunks, e.text);
        const double step_ms = g->machine->calls->step_ms(g->machine, step),
                     chunk_ms = g->machine->calls->step_ms(g->machine, chunk);
        check(fabs(step_ms - 1.5) < 1e-3 && (i == 0 || fabs(chunk_ms - (10 + 0.02 * TOKENS)) < 1e-3),
              "both have their times", "%g and %g ms", step_ms, chunk_ms);
    }
    int32_t out[NMK_COLUMNS];
    uint64_t number;
    int rc = nmk_engine_step(g, NULL, out, &e);
    check(rc == 0 && out[2] == 9, "a step alone", "%d: %s", out[2], e.text);
    const nmk_span span = {.count = TOKENS, .slot = 0};
    rc = nmk_engine_queue_chunk(g, &span, 1, prompt, &number, &e) || nmk_engine_wait_step(g, number, NULL, &e);
    check(rc == 0, "a chunk alone, of any row", "%s", e.text);
}

static void test_hang(void) {
    static const char *const part[] = {"; in the step of its launch", "; in the chunk of its launch"};
    nmk_err e = {0};
    uint64_t step, chunk;
    const int32_t *token;
    for (int i = 0; i < 2; i++) {
        fake.hang_at = steps_run + 1 + i;
        int rc = both(&step, &chunk, &e) || nmk_engine_wait_step(g, step, &token, &e);
        if (i) check(rc == 0 && token[2] >= 0, "the step before a chunk that hangs", "%d: %s", token[2], e.text);
        /* it is the next step that says so, as behind any chunk */
        if (i) rc = nmk_engine_queue_step(g, 1, &step, &e) || nmk_engine_wait_step(g, step, NULL, &e);
        check(rc && strstr(e.text, "the kernel hung: SM 17") && strstr(e.text, part[i]), "a hang", "%s", e.text);
        fake.hang_at = 0;
        rc = both(&step, &chunk, &e) || nmk_engine_wait_step(g, step, &token, &e) ||
             nmk_engine_wait_step(g, chunk, NULL, &e);
        check(rc == 0 && token[2] >= 0, "the engine goes on after it", "%s", e.text);
    }
}

static void test_alternate(void) {
    nmk_err e = {0};
    uint64_t step, chunk;
    const int32_t *token;
    const int launches = mixed_launches;
    if (!check(open_rows(NMK_PREFILL_ALTERNATE, &e) == 0, "opens for launches that take turns", "%s", e.text)) return;
    int rc = both(&step, &chunk, &e) || nmk_engine_wait_step(g, step, &token, &e);
    check(rc == 0 && token[2] == 6 && chunk == step + 1 && mixed_launches == launches, "they do", "%s", e.text);
}

int main(void) {
    nmk_err e = {0};
    if (fake_install(&e)) return puts(e.text), 2;
    test_order();
    if (g) test_hang();
    nmk_engine_close(g), g = NULL;
    test_alternate();
    nmk_engine_close(g);
    return failures != 0;
}
