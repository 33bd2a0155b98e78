/* A step and a chunk in one launch of the CPU machine, with the trained toy: tokens, log-probabilities, keys and values
 * are bit by bit those of launches that take turns, however SMs get from one to the other; what may not be in one launch
 * is refused; and what fails says in which part. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

#include "broken_lists.h"
#include "check.h"

enum { ROWS = 3, CHUNKS = 6, CUT = 50, PAGE = NMK_PAGE_TOKENS, FED = ROWS - 1 };

static const int count[ROWS] = {70, 131,
                                CHUNKS *CUT}; /* tokens of the prompts, the last one's in chunks beside the others */
static int32_t prompt[ROWS][CHUNKS * CUT + 1];

static const nmk_sampler sampler[FED] = {{.temperature = 0},
                                         {.temperature = 0.9f, .seed = 7, .top_p = 0.9f, .logprobs = 4}};

static int feed(nmk_engine *g, int row, nmk_err *e) {
    const nmk_span span = {.count = count[row], .slot = row};
    uint64_t number;
    return nmk_engine_queue_chunk(g, &span, 1, prompt[row], &number, e) || nmk_engine_wait_step(g, number, NULL, e) ? -1
                                                                                                                    : 0;
}

static int open_rows(nmk_engine **g, nmk_prefill_mode mode, int threads, int remaining, nmk_err *e) {
    const nmk_options o = {.checkpoint = "examples/nmc-toy",
                           .device = "cpu",
                           .max_len = 1024,
                           .cpu_threads = threads,
                           .prefill_mode = mode};
    nmk_column column[NMK_ROWS];
    if (nmk_engine_open(g, &o, e)) return -1;
    for (int r = 0; r < ROWS; r++) {
        nmk_kv_begin(&(*g)->kv, r, 1);
        if (nmk_kv_grow(&(*g)->kv, r, count[r] + CHUNKS + 4)) return nmk_fail(e, "no pages");
        if (nmk_engine_wipe_row(*g, r, e) || nmk_engine_send_row(*g, r, e)) return -1;
    }
    for (int c = 0; c < (*g)->columns; c++) column[c] = nmk_column_idle();
    for (int r = 0; r < FED; r++) {
        if (feed(*g, r, e)) return -1;
        column[r] = nmk_column_decode(&sampler[r], r, r, prompt[r][count[r]], count[r], remaining);
    }
    return nmk_engine_set_columns(*g, column, e);
}

/* The next CUT tokens of the last row, from `at` on, beside a step. */
static int both(nmk_engine *g, int row, int at, uint64_t *step, uint64_t *chunk, nmk_err *e) {
    const nmk_span span = {.count = CUT, .pos = at, .slot = row};
    return nmk_engine_queue_both(g, FED, &span, 1, prompt[row] + at, step, chunk, e);
}

typedef struct {
    int32_t token[CHUNKS][FED], next;
    nmk_logprobs logprobs[CHUNKS];
    uint8_t *pages;
    size_t bytes;
} result;

static int read_pages(nmk_engine *g, result *r, nmk_err *e) {
    const uint64_t page_bytes[2] = {NMK_KV_PAGE_BYTES_FULL, NMK_KV_PAGE_BYTES_SLIDING};
    const uint64_t pool[2] = {g->params.kv_full, g->params.kv_sliding};
    for (int row = 0; row < ROWS; row++)
        for (int k = 0; k < 2; k++)
            for (int p = 0; p < (count[row] + CHUNKS) / PAGE + 1; p++) {
                r->pages = xrealloc(r->pages, r->bytes + page_bytes[k]);
                const uint64_t page = (uint64_t)g->kv.table[k][row * g->kv.stride + p];
                if (g->machine->calls->read(g->machine, r->pages + r->bytes, pool[k] + page_bytes[k] * page,
                                            page_bytes[k], e))
                    return -1;
                r->bytes += page_bytes[k];
            }
    return 0;
}

static int play(nmk_prefill_mode mode, int threads, result *r, nmk_err *e) {
    nmk_engine *g = NULL;
    nmk_column column[NMK_ROWS];
    int32_t out[NMK_ROWS];
    int rc = open_rows(&g, mode, threads, CHUNKS + 1, e);
    for (int i = 0; i < CHUNKS && !rc; i++) {
        uint64_t step, chunk;
        const int32_t *token;
        rc = both(g, FED, i * CUT, &step, &chunk, e) || nmk_engine_wait_step(g, step, &token, e);
        if (rc) break;
        rc = chunk != step + 1;
        memcpy(r->token[i], token, sizeof r->token[i]);
        nmk_engine_logprobs(g, step, 1, &sampler[1], &r->logprobs[i]);
        rc |= nmk_engine_wait_step(g, chunk, &token, e) || token[0] != -1;
    }
    if (!rc) {
        for (int c = 0; c < g->columns; c++) column[c] = nmk_column_idle();
        column[0] = nmk_column_decode(&sampler[0], 0, FED, prompt[FED][count[FED]], count[FED], 1);
        rc = nmk_engine_step(g, column, out, e);
        r->next = out[0];
    }
    if (!rc) rc = read_pages(g, r, e);
    nmk_engine_close(g);
    return rc;
}

static bool same(const result *a, const result *b) {
    return !memcmp(a->token, b->token, sizeof a->token) && a->next == b->next &&
           !memcmp(a->logprobs, b->logprobs, sizeof a->logprobs) && a->bytes == b->bytes &&
           !memcmp(a->pages, b->pages, a->bytes);
}

static void test_same(void) {
    static result turns, ways[3];
    static const int threads[3] = {1, 2, 1};
    nmk_err e = {0};
    if (!check(play(NMK_PREFILL_ALTERNATE, 1, &turns, &e) == 0, "steps and chunks take turns", "%s", e.text)) return;
    for (int i = 0; i < 3; i++) {
        /* the last one, told to take turns, shows that a difference would be one */
        const int rc = play(NMK_PREFILL_MIXED, threads[i], &ways[i], &e);
        if (i == 2 && !rc) ways[i].pages[ways[i].bytes - 1] ^= 1;
        check(rc == 0 && same(&turns, &ways[i]) == (i < 2),
              i == 2 ? "a bit of a page is a difference" : "mixed launches", "%d threads: %s", threads[i], e.text);
    }
    for (int i = 0; i < 3; i++) free(ways[i].pages);
    free(turns.pages);
}

/* A row with a live column is in no chunk of the same launch, until its column has ended. */
static void test_rows(void) {
    nmk_engine *g = NULL;
    nmk_err e = {0};
    uint64_t step, chunk;
    const int32_t *token;
    int rc = open_rows(&g, NMK_PREFILL_MIXED, 1, 2, &e);
    check(rc == 0 && both(g, 1, 0, &step, &chunk, &e) == -1 && strstr(e.text, "row 1 is in a step and in the chunk"),
          "a row in both parts", "%s", e.text);
    for (int i = 0; i < 2 && !rc; i++) {
        rc = both(g, FED, i * CUT, &step, &chunk, &e) || nmk_engine_wait_step(g, step, &token, &e);
        if (i == 0) check(!rc && both(g, 0, 0, &step, &chunk, &e) == -1, "it has one token to go", "%s", e.text);
    }
    check(rc == 0 && both(g, 1, 0, &step, &chunk, &e) == 0, "it has ended", "%s", e.text);
    nmk_engine_close(g);
}

/* The same by a token that ends it. */
static void test_stop(void) {
    nmk_engine *g = NULL;
    nmk_err e = {0};
    uint64_t step, chunk;
    const int32_t *token = NULL;
    int32_t first[2];
    int rc = open_rows(&g, NMK_PREFILL_MIXED, 1, 9, &e) || both(g, FED, 0, &step, &chunk, &e) ||
             nmk_engine_wait_step(g, step, &token, &e);
    if (!rc) memcpy(first, token, sizeof first);
    nmk_engine_close(g), g = NULL;
    nmk_column column[NMK_ROWS];
    rc = rc || open_rows(&g, NMK_PREFILL_MIXED, 1, 9, &e) || nmk_engine_get_columns(g, column, &e) ||
         nmk_engine_set_control(g, first, 1, &e) || nmk_engine_set_columns(g, column, &e);
    check(rc == 0 && both(g, FED, 0, &step, &chunk, &e) == 0 && both(g, 0, 0, &step, &chunk, &e) == -1,
          "nobody has read that a row has ended", "%s", e.text);
    check(rc == 0 && nmk_engine_wait_step(g, step, &token, &e) == 0 && token[0] == first[0] &&
              both(g, 0, 0, &step, &chunk, &e) == 0,
          "its token says so", "%s", e.text);
    nmk_engine_close(g);
}

/* A wait for more than there is, in either part; then the engine goes on. */
static void test_deadlock(void) {
    static const char *const part[] = {"the step: ", "the chunk: "};
    nmk_engine *g = NULL;
    nmk_err e = {0};
    for (int i = 0; i < 2; i++) {
        uint64_t step, chunk;
        if (open_rows(&g, NMK_PREFILL_MIXED, 1, 9, &e)) break;
        const broken_lists b = break_lists(g, i);
        int rc = g->machine->calls->write(g->machine, b.at, b.broken, b.bytes, &e);
        check(rc == 0 && both(g, FED, 0, &step, &chunk, &e) == -1 && strstr(e.text, part[i]) == e.text &&
                  strstr(e.text, "deadlock") && strstr(e.text, "SM 77"),
              "a deadlock says where", "%s", e.text);
        rc = g->machine->calls->write(g->machine, b.at, b.lists, b.bytes, &e) || both(g, FED, 0, &step, &chunk, &e) ||
             nmk_engine_wait_step(g, chunk, NULL, &e);
        check(rc == 0, "and the engine goes on", "%s", e.text);
        free(b.broken);
        nmk_engine_close(g), g = NULL;
    }
}

int main(void) {
    for (int r = 0; r < ROWS; r++)
        for (int k = 0; k <= count[r]; k++) prompt[r][k] = 5 + (k * 131 + r * 977) % 4000;
    test_same(), test_rows(), test_stop(), test_deadlock();
    return failures != 0;
}
