/* A step and a chunk of a prompt in one launch of the GPU, against launches that take turns: tokens and log-probabilities
 * of the rows that decode, and all keys and values, bit for bit, again and again; the step's tokens are read while the
 * chunk runs; a hang says in which part it was.  Skips itself without a GPU, and where the model takes no prompts in
 * chunks.  Arguments: repetitions (20), device. */
#include "gpu/helper.h"
#include "runtime/broken_lists.h"

#define NAME "mixed launches on the GPU (" NMK_MODEL ")"

enum { ROWS = 3, CHUNKS = 6, MAX_LEN = NMK_MAX_CONTEXT < 4096 ? NMK_MAX_CONTEXT : 4096, CONTEXT = MAX_LEN / 3 };

static nmk_engine *g;
static const nmk_sampler sampler[ROWS] = {
    {.temperature = 0}, {.temperature = 0.9f, .seed = 7, .top_p = 0.9f, .logprobs = 4}, {.temperature = 1, .seed = 3}};
/* Tokens of the chunks, one after the other, at most; some fill no tile, one is a single token. */
static const int cut[CHUNKS] = {MAX_LEN / 3, 64, 1, MAX_LEN / 8 + 5, 7, MAX_LEN / 4};

/* Those that have room from `at` on. */
static int room(int tokens, int at) {
    const int most = nmk_engine_span_room(g, at, 0);
    return tokens < most ? tokens : most;
}

static int32_t prompt[ROWS + 1][MAX_LEN];

/* Pages for the row's tokens from `at` to `end`, as far back as it sees. */
static int extend(int row, int at, int end, nmk_err *e) {
    nmk_kv_pass(&g->kv, row, at);
    if (nmk_kv_grow(&g->kv, row, end)) return nmk_fail(e, "no pages");
    return nmk_engine_send_row(g, row, e);
}

static int feed(int row, nmk_err *e) {
    uint64_t number;
    for (int at = 0, n; at < CONTEXT; at += n) {
        n = room(CONTEXT - at, at);
        const nmk_span span = {.count = n, .pos = at, .slot = row};
        if (extend(row, at, at + n, e) || nmk_engine_queue_chunk(g, &span, 1, prompt[row] + at, &number, e)) return -1;
    }
    return extend(row, CONTEXT, CONTEXT + CHUNKS + 2, e) || nmk_engine_wait_step(g, number, NULL, e) ? -1 : 0;
}

static int begin(nmk_err *e) {
    nmk_column column[NMK_ROWS];
    const uint64_t pool[2] = {g->params.kv_full, g->params.kv_sliding};
    for (int k = 0; k < 2; k++)
        if (nmk_kv_pool_bytes(&g->kv, k) &&
            g->machine->calls->fill(g->machine, pool[k], 0, nmk_kv_pool_bytes(&g->kv, k), e))
            return -1;
    for (int c = 0; c < g->columns; c++) column[c] = nmk_column_idle();
    for (int r = ROWS; r >= 0; r--) nmk_kv_drop(&g->kv, r);
    for (int r = 0; r <= ROWS; r++) nmk_kv_begin(&g->kv, r, 1);
    for (int r = 0; r < ROWS; r++) {
        if (feed(r, e)) return -1;
        column[r] = nmk_column_decode(&sampler[r], r, r, prompt[r][CONTEXT], CONTEXT, CHUNKS + 1);
    }
    return nmk_engine_set_columns(g, column, e);
}

/* Returns the chunk's tokens; -1: it failed. */
static int both(int i, int at, uint64_t *step, uint64_t *chunk, nmk_err *e) {
    const nmk_span span = {.count = room(cut[i], at), .pos = at, .slot = ROWS};
    if (extend(ROWS, at, at + span.count, e)) return -1;
    return nmk_engine_queue_both(g, ROWS, &span, 1, prompt[ROWS] + at, step, chunk, e) ? -1 : span.count;
}

typedef struct {
    int32_t token[CHUNKS][ROWS];
    nmk_logprobs logprobs[CHUNKS];
    uint8_t *pages;
    size_t bytes;
} result;

static int read_pages(result *r, nmk_err *e) {
    const uint64_t page_bytes[2] = {NMK_KV_PAGE_BYTES_FULL, NMK_KV_PAGE_BYTES_SLIDING};
    const uint64_t pool[2] = {g->params.kv_full, g->params.kv_sliding};
    r->bytes = 0;
    for (int row = 0; row <= ROWS; row++)
        for (int k = 0; k < 2; k++)
            for (int p = k ? g->kv.row[row].first : 0; page_bytes[k] && p < g->kv.row[row].held;
                 p++, r->bytes += page_bytes[k]) {
                const uint64_t page = (uint64_t)g->kv.table[k][row * g->kv.stride + p];
                r->pages = xrealloc(r->pages, r->bytes + page_bytes[k]);
                if (g->machine->calls->read(g->machine, r->pages + r->bytes, pool[k] + page_bytes[k] * page,
                                            page_bytes[k], e))
                    return -1;
            }
    return 0;
}

/* early: how often the step was over before its chunk, by more than half of the launch. */
static int play(bool mixed, result *r, int *early, nmk_err *e) {
    uint64_t step, chunk;
    const int32_t *token;
    int at = 0;
    g->mixed = mixed;
    if (begin(e)) return -1;
    for (int i = 0; i < CHUNKS; i++) {
        const uint64_t start_ns = nmk_now_ns();
        const int tokens = both(i, at, &step, &chunk, e);
        if (tokens < 0 || nmk_engine_wait_step(g, step, &token, e)) return -1;
        const uint64_t step_ns = nmk_now_ns() - start_ns;
        memcpy(r->token[i], token, sizeof r->token[i]);
        nmk_engine_logprobs(g, step, 1, &sampler[1], &r->logprobs[i]);
        if (nmk_engine_wait_step(g, chunk, NULL, e)) return -1;
        *early += step_ns < (nmk_now_ns() - start_ns) / 2;
        at += tokens;
    }
    return read_pages(r, e);
}

static const char *difference(const result *a, const result *b) {
    if (memcmp(a->token, b->token, sizeof a->token)) return "tokens";
    if (memcmp(a->logprobs, b->logprobs, sizeof a->logprobs)) return "log-probabilities";
    return a->bytes != b->bytes || memcmp(a->pages, b->pages, a->bytes) ? "keys or values" : NULL;
}

static void test_same(int repetitions) {
    static result turns, mixed;
    nmk_err e = {0};
    int early = 0, early_turns = 0;
    if (!check(play(false, &turns, &early_turns, &e) == 0, "%s: launches that take turns: %s", NAME, e.text)) return;
    for (int i = 0; i < repetitions; i++) {
        const int rc = play(true, &mixed, &early, &e);
        const char *what = rc ? e.text : difference(&turns, &mixed);
        if (what) {
            check(false, "%s: repetition %d of mixed launches: %s", NAME, i, what);
            return;
        }
    }
    check(true, "%s: %d times the bits of launches that take turns", NAME, repetitions);
    check(early > 0,
          "%s: tokens are read while the chunk runs: %d of %d times in the first half, %d of %d taking turns", NAME,
          early, repetitions * CHUNKS, early_turns, CHUNKS);
}

static void test_hang(void) {
    static const char *const part[] = {"in the step of its launch", "in the chunk of its launch"};
    nmk_err e = {0}, hang = {0};
    uint64_t step, chunk, number;
    g->mixed = true;
    for (int i = 0; i < 2; i++) {
        const broken_lists b = break_lists(g, i);
        const uint32_t patience_ms = g->params.patience_ms;
        g->params.patience_ms = 100;
        int rc = begin(&e) || g->machine->calls->write(g->machine, b.at, b.broken, b.bytes, &e);
        if (rc) check(false, "%s: %s", NAME, e.text);
        const uint64_t start_ns = nmk_now_ns();
        rc = both(0, 0, &step, &chunk, &hang) < 0 || nmk_engine_wait_step(g, step, NULL, &hang) ||
             nmk_engine_queue_step(g, ROWS, &number, &hang) || nmk_engine_wait_step(g, number, NULL, &hang);
        check(rc && strstr(hang.text, "the kernel hung") && strstr(hang.text, part[i]),
              "%s: a hang, told in %.2f s: %s", NAME, 1e-9 * (double)(nmk_now_ns() - start_ns), hang.text);
        g->params.patience_ms = patience_ms;
        rc = g->machine->calls->write(g->machine, b.at, b.lists, b.bytes, &e) || begin(&e) ||
             both(0, 0, &step, &chunk, &e) < 0 || nmk_engine_wait_step(g, step, NULL, &e) ||
             nmk_engine_wait_step(g, chunk, NULL, &e);
        check(rc == 0, "%s: the engine goes on after it: %s", NAME, e.text);
        free(b.broken);
    }
}

int main(int argc, char **argv) {
    nmk_err e = {0};
    nmk_options o = test_options(argc > 2 ? argv[2] : "cuda:0", MAX_LEN, NMK_LAYERS < 16 ? 1ull << 30 : 8ull << 30);
    o.prefill_mode = NMK_PREFILL_MIXED;
    if (!nmk_prefill) leave(NAME, "the model takes no prompts in chunks", true);
    if (nmk_engine_open(&g, &o, &e))
        leave(NAME, e.text, strstr(e.text, "libcuda") || strstr(e.text, "no CUDA") || strstr(e.text, "no GPU"));
    if (!nmk_engine_chunk_tokens(g)) leave(NAME, "prompts go through steps", true);
    const nmk_jit_result *kernel = &g->machine->kernel[NMK_MIXED];
    printf("# %s: the mixed kernel: %d registers, %d bytes of spills, %zu bytes of code\n", g->stats.device,
           kernel->registers, kernel->spill_store_bytes + kernel->spill_load_bytes, kernel->text_bytes);
    for (int r = 0; r <= ROWS; r++)
        for (int k = 0; k < MAX_LEN; k++) prompt[r][k] = (int32_t)(rng() % NMK_VOCAB);
    test_same(argc > 1 ? atoi(argv[1]) : 20);
    test_hang();
    nmk_engine_close(g);
    return failures != 0;
}
