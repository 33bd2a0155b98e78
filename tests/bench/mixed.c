/* What it costs rows that decode that somebody's prompt is fed meanwhile, and him that they decode: a step and a chunk
 * in one launch, and in launches that take turns.
 *
 * bench-mixed [--checkpoint DIR | --random-weights SEED] [--rows 4] [--context 8192] [--prompt 8192]
 *             [--chunks 256,512,1024,2048] [--runs 3] [--ahead 2]
 *
 * Rows of `context` random tokens decode; the prompt comes in chunks of so many tokens, one behind each step, with
 * `ahead` of those pairs queued.  Both ways by turns in each run, on one engine; of the runs the median. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "util.h"
#include "values.h"

enum { MOST_CASES = 16, MOST_RUNS = 32, MOST_PAIRS = 1024, WARM_UP = 8, WAYS = 2 };

typedef struct {
    double prompt_ms, step_ms, chunk_ms, gap_ms, longest_ms; /* gap: from token to token, the median and the longest */
} figures;

static int rows = 4, context = 8192, prompt_tokens = 8192, ahead = 2;

static int run_once(nmk_engine *g, int tokens, bool mixed, figures *f, nmk_err *e) {
    static double step_ms[MOST_PAIRS], chunk_ms[MOST_PAIRS], gap_ms[MOST_PAIRS];
    uint64_t step[MOST_PAIRS], chunk[MOST_PAIRS];
    nmk_column column[NMK_ROWS];
    int32_t *token = xcalloc((size_t)prompt_tokens, sizeof *token);
    const int pairs = (prompt_tokens + tokens - 1) / tokens;
    int rc = -1;
    g->mixed = mixed;
    for (int i = 0; i < prompt_tokens; i++) token[i] = (int32_t)((unsigned)i * 2654435761u >> 8) % NMK_VOCAB;
    for (int c = 0; c < g->columns; c++) column[c] = nmk_column_idle();
    for (int r = 0; r <= rows; r++) {
        const int all = r < rows ? context + WARM_UP + pairs + 2 : prompt_tokens;
        nmk_kv_begin(&g->kv, r, 1);
        if (nmk_kv_grow(&g->kv, r, all)) {
            nmk_fail(e, "no pages for row %d", r);
            goto out;
        }
        if (nmk_engine_send_row(g, r, e)) goto out;
        if (r < rows) column[r] = nmk_column_decode(&(nmk_sampler){0}, r, r, 1000 + 17 * r, context, context);
    }
    if (nmk_engine_set_columns(g, column, e) || nmk_engine_run(g, WARM_UP, rows, NULL, NULL, e)) goto out;
    uint64_t start_ns = nmk_now_ns(), last_ns = start_ns;
    f->longest_ms = 0;
    for (int queued = 0, done = 0; done < pairs; done++) {
        for (; queued < pairs && queued - done < ahead; queued++) {
            const int at = queued * tokens;
            const nmk_span span = {
                .count = prompt_tokens - at < tokens ? prompt_tokens - at : tokens, .pos = at, .slot = rows};
            if (nmk_engine_queue_both(g, rows, &span, 1, token + at, &step[queued], &chunk[queued], e)) goto out;
        }
        if (nmk_engine_wait_step(g, step[done], NULL, e)) goto out;
        const uint64_t now_ns = nmk_now_ns();
        gap_ms[done] = 1e-6 * (double)(now_ns - last_ns), last_ns = now_ns;
        if (gap_ms[done] > f->longest_ms) f->longest_ms = gap_ms[done];
        if (done && nmk_engine_wait_step(g, chunk[done - 1], NULL, e)) goto out;
        step_ms[done] = g->machine->calls->step_ms(g->machine, step[done]);
        if (done) chunk_ms[done - 1] = g->machine->calls->step_ms(g->machine, chunk[done - 1]);
    }
    if (nmk_engine_wait_step(g, chunk[pairs - 1], NULL, e)) goto out;
    f->prompt_ms = 1e-6 * (double)(nmk_now_ns() - start_ns);
    chunk_ms[pairs - 1] = g->machine->calls->step_ms(g->machine, chunk[pairs - 1]);
    f->step_ms = median_of(step_ms, pairs), f->chunk_ms = median_of(chunk_ms, pairs),
    f->gap_ms = median_of(gap_ms, pairs);
    rc = 0;
out:
    for (int r = 0; r <= rows; r++) nmk_kv_drop(&g->kv, r);
    free(token);
    return rc;
}

static int run_case(nmk_engine *g, int tokens, int runs, nmk_err *e) {
    static figures f[WAYS][MOST_RUNS];
    double v[MOST_RUNS];
    for (int i = -1; i < runs; i++) /* the first one warms up */
        for (int way = 0; way < WAYS; way++)
            if (run_once(g, tokens, way, &f[way][i < 0 ? 0 : i], e)) return -1;
    for (int way = 0; way < WAYS; way++) {
        printf("| %d | %s |", tokens, way ? "mixed" : "alternate");
        const size_t at[] = {offsetof(figures, prompt_ms), offsetof(figures, step_ms), offsetof(figures, chunk_ms),
                             offsetof(figures, gap_ms), offsetof(figures, longest_ms)};
        for (size_t k = 0; k < sizeof at / sizeof *at; k++) {
            for (int i = 0; i < runs; i++) v[i] = *(const double *)(const void *)((const char *)&f[way][i] + at[k]);
            printf(" %.3f |", median_of(v, runs));
        }
        printf("\n");
    }
    fflush(stdout);
    return 0;
}

static int numbers(const char *text, int *list) {
    int n = 0;
    for (char *end; *text && n < MOST_CASES; text = *end ? end + 1 : end) list[n++] = (int)strtol(text, &end, 10);
    return n;
}

int main(int argc, char **argv) {
    nmk_options o = {.random_weights = true, .weights_seed = 1, .device = "cuda:0", .prefill_mode = NMK_PREFILL_MIXED};
    int tokens[MOST_CASES] = {256, 512, 1024, 2048}, cases = 4, runs = 3, rc = 0;
    nmk_err e = {0};
    nmk_engine *g = NULL;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *v = argv[i + 1];
        if (!strcmp(argv[i], "--checkpoint"))
            o.checkpoint = v, o.random_weights = false;
        else if (!strcmp(argv[i], "--random-weights"))
            o.weights_seed = strtoull(v, NULL, 10);
        else if (!strcmp(argv[i], "--rows"))
            rows = atoi(v);
        else if (!strcmp(argv[i], "--context"))
            context = atoi(v);
        else if (!strcmp(argv[i], "--prompt"))
            prompt_tokens = atoi(v);
        else if (!strcmp(argv[i], "--chunks"))
            cases = numbers(v, tokens);
        else if (!strcmp(argv[i], "--runs"))
            runs = atoi(v);
        else if (!strcmp(argv[i], "--ahead"))
            ahead = atoi(v);
        else
            return fprintf(stderr, "bench-mixed: unknown flag %s\n", argv[i]), 2;
    }
    if (runs < 1 || runs > MOST_RUNS) return fprintf(stderr, "bench-mixed: --runs: 1 to %d\n", MOST_RUNS), 2;
    if (ahead < 1 || ahead > 8) return fprintf(stderr, "bench-mixed: --ahead: 1 to 8\n"), 2;
    o.max_len = (context > prompt_tokens ? context : prompt_tokens) + WARM_UP + MOST_PAIRS;
    if (nmk_engine_open(&g, &o, &e) || nmk_engine_random_kv(g, 1, &e))
        return fprintf(stderr, "bench-mixed: %s\n", e.text), 1;
    if (rows < 1 || rows >= g->rows) return fprintf(stderr, "bench-mixed: --rows: 1 to %d\n", g->rows - 1), 2;
    if (!nmk_engine_chunk_tokens(g)) return fprintf(stderr, "bench-mixed: prompts go through steps here\n"), 1;
    for (int i = 0; i < cases; i++)
        if (tokens[i] < 1 || tokens[i] > nmk_engine_chunk_tokens(g) || prompt_tokens / tokens[i] >= MOST_PAIRS)
            return fprintf(stderr, "bench-mixed: --chunks: %d is out of range\n", tokens[i]), 2;
    const nmk_jit_result *kernel = g->machine->kernel;
    printf("%s on %s: %d rows of %d tokens decode while a prompt of %d is fed; kernels of %zu, %zu and %zu bytes\n\n",
           g->stats.model, g->stats.device, rows, context, prompt_tokens, kernel[NMK_STEPS].text_bytes,
           kernel[NMK_CHUNKS].text_bytes, kernel[NMK_MIXED].text_bytes);
    printf(
        "| tokens a chunk | launches | ms for the prompt | ms a step | ms a chunk | ms from token to token | longest "
        "|\n|--|--|--|--|--|--|--|\n");
    for (int i = 0; i < cases && !rc; i++) rc = run_case(g, tokens[i], runs, &e);
    if (rc) fprintf(stderr, "bench-mixed: %s\n", e.text);
    nmk_engine_close(g);
    return rc != 0;
}
