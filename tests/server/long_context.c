/* A sequence as long as the model allows, on a GPU made up of host memory: the memory plan, the pages of every chunk
 * and step to the last position, and what is said when memory does not hold it.  For the toy, and for North Mini Code
 * with its 256K (long_context.sh). */
#include "batch.h"

#include "runtime/fake_gpu.h"

#include <pthread.h>
#include <time.h>

enum { ANSWER = 8, LONG = NMK_MAX_CONTEXT - ANSWER, PAGE = NMK_PAGE_TOKENS, PAGES = NMK_MAX_CONTEXT / PAGE };

/* ---- what launches find in the pages ---- */

static const nmk_engine *engine;
static int *owner[2]; /* by page of a pool: which page of the sequence was written there last */
static int bad_pages, positions, most_sliding;

/* Position `column->pos` is written, and its window is read. */
static int32_t look(const nmk_params *p, const nmk_column *column) {
    const int entry = column->pos / PAGE, stride = p->table_stride;
    const int32_t *table[2] = {(const int32_t *)(uintptr_t)p->table_full + column->slot * stride,
                               (const int32_t *)(uintptr_t)p->table_sliding + column->slot * stride};
    positions++;
    for (int k = 0; k < 2; k++) {
        if (table[k][entry] < 0 || table[k][entry] >= engine->kv.pages[k] || entry >= stride) return bad_pages++, 0;
        if (column->pos % PAGE == 0) owner[k][table[k][entry]] = entry;
    }
    if (column->pos % PAGE != PAGE - 1 && in_chunk) return 0;
    const int first = column->pos + 1 > NMK_WINDOW ? (column->pos + 1 - NMK_WINDOW) / PAGE : 0;
    for (int q = first; q <= entry; q++) bad_pages += owner[1][table[1][q]] != q;
    for (int q = in_chunk ? entry : 0; q <= entry; q++) bad_pages += owner[0][table[0][q]] != q;
    const int sliding = engine->kv.pages[1] - nmk_kv_available(&engine->kv, 1);
    if (sliding > most_sliding) most_sliding = sliding;
    return (column->token + 1) % NMK_VOCAB;
}

/* ---- a client ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;
static int given, ended;
static nmk_batch_end how;

static void on_token(void *user, int32_t token, const nmk_logprobs *logprobs) {
    (void)user, (void)token, (void)logprobs;
    given++;
}

static void on_end(void *user, nmk_batch_end end, const char *message) {
    (void)user;
    if (message) printf("# %s\n", message);
    pthread_mutex_lock(&lock);
    ended = 1, how = end;
    pthread_cond_signal(&news);
    pthread_mutex_unlock(&lock);
}

static int submit(nmk_batch *b, int tokens, int answer, nmk_err *e) {
    uint64_t id;
    int32_t *prompt = xmalloc(sizeof *prompt * (size_t)tokens);
    for (int i = 0; i < tokens; i++) prompt[i] = (int32_t)((uint32_t)i * 2654435761u % NMK_VOCAB);
    const nmk_batch_request rq = {
        .prompt = prompt, .prompt_tokens = tokens, .max_tokens = answer, .on_token = on_token, .on_end = on_end};
    ended = given = 0;
    const int rc = nmk_batch_submit(b, &rq, &id, e);
    free(prompt);
    return rc;
}

static bool wait_end(int seconds) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    int rc = 0;
    pthread_mutex_lock(&lock);
    while (!ended && !rc) rc = pthread_cond_timedwait(&news, &lock, &until);
    pthread_mutex_unlock(&lock);
    return rc == 0;
}

/* ---- cases ---- */

static void test_whole(void) {
    nmk_err e = {0};
    nmk_engine *g = NULL;
    nmk_batch *b = NULL;
    nmk_stats s;
    const nmk_options o = {.random_weights = true, .device = "cuda:0", .max_len = NMK_MAX_CONTEXT};
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "the whole context has room", "%s", e.text)) return;
    nmk_engine_stats(g, &s);
    engine = g;
    for (int k = 0; k < 2; k++) owner[k] = xcalloc((size_t)g->kv.pages[k], sizeof *owner[k]);
    check(s.max_len == NMK_MAX_CONTEXT && s.kv_pages[0] >= PAGES && g->kv.stride == PAGES, "in the plan",
          "%d tokens, %d pages, %d entries", s.max_len, s.kv_pages[0], g->kv.stride);
    check(s.weight_bytes + s.kv_bytes + s.other_bytes <= fake.total_bytes / 10 * 9, "which the memory holds",
          "%llu + %llu + %llu bytes", (unsigned long long)s.weight_bytes, (unsigned long long)s.kv_bytes,
          (unsigned long long)s.other_bytes);
    printf("# weights %.1f, keys and values %.1f, chunks of prompts %.1f, other %.1f MiB; pages %d + %d\n",
           (double)s.weight_bytes / 0x1p20, (double)s.kv_bytes / 0x1p20, (double)s.prefill_bytes / 0x1p20,
           (double)(s.other_bytes - s.prefill_bytes) / 0x1p20, s.kv_pages[0], s.kv_pages[1]);
    if (!check(nmk_batch_open(&b, g, 0, &e) == 0, "the batch opens", "%s", e.text)) return;
    const int rc = submit(b, LONG, ANSWER, &e);
    const bool done = rc == 0 && wait_end(200);
    check(done && how == NMK_BATCH_LENGTH && given == ANSWER, "a prompt that fills it is answered", "%s: %d tokens",
          e.text, given);
    const int chunk = nmk_prefill->prefill_tokens, bound = (NMK_WINDOW + chunk + PAGE - 2) / PAGE + 1;
    check(positions == LONG - 1 + ANSWER && bad_pages == 0, "every position finds its pages", "%d positions, %d bad",
          positions, bad_pages);
    check(most_sliding > 0 && most_sliding <= bound, "sliding layers hold a window and a chunk", "%d pages of %d",
          most_sliding, bound);
    check(seen_chunks >= (LONG - 1 + chunk - 1) / chunk && seen_count == ANSWER &&
              seen[ANSWER - 1].pos == NMK_MAX_CONTEXT - 2,
          "the last step draws the last token", "%d chunks, %d steps", seen_chunks, seen_count);
    check(submit(b, LONG + 1, ANSWER, &e) == -1 && strstr(e.text, "the context holds"), "one token more is refused",
          "%s", e.text);
    nmk_batch_close(b);
    for (int k = 0; k < 2; k++) free(owner[k]);
}

/* Memory for half of a sequence: the plan says so, and so does who gets more. */
static void test_half(void) {
    nmk_err e = {0};
    nmk_engine *g = NULL;
    nmk_batch *b = NULL;
    nmk_stats s;
    const nmk_kv_shape shape = {.sliding_layers = NMK_SLIDING_LAYERS,
                                .full_layers = NMK_FULL_LAYERS,
                                .kv_heads = NMK_KV_HEADS,
                                .head_dim = NMK_HEAD_DIM,
                                .window = NMK_WINDOW,
                                .columns = NMK_COLUMNS,
                                .page_tokens = PAGE};
    nmk_options o = {.random_weights = true, .device = "cuda:0", .max_len = NMK_MAX_CONTEXT};
    o.kv_bytes = nmk_kv_page_bytes(&shape, 0) * (PAGES / 2) +
                 nmk_kv_page_bytes(&shape, 1) * (uint64_t)nmk_kv_row_pages(&shape, 1, NMK_MAX_CONTEXT);
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "half of it has room", "%s", e.text)) return;
    nmk_engine_stats(g, &s);
    check(s.max_len >= NMK_MAX_CONTEXT / 4 && s.max_len <= NMK_MAX_CONTEXT * 3 / 4, "the plan says how long", "%d",
          s.max_len);
    if (!check(nmk_batch_open(&b, g, 0, &e) == 0, "the batch opens", "%s", e.text)) return;
    check_message(submit(b, LONG, ANSWER, &e), &e, "there is not so much memory for keys and values",
                  "what does not fit is refused");
    const int rc = submit(b, s.max_len - ANSWER, ANSWER, &e);
    check(rc == 0 && wait_end(200) && how == NMK_BATCH_LENGTH && given == ANSWER, "what fits is answered", "%s",
          e.text);
    nmk_batch_close(b);
    o.kv_bytes = nmk_kv_page_bytes(&shape, 1);
    check_message(nmk_engine_open(&g, &o, &e), &e, "MiB for keys and values are too little", "next to nothing");
}

int main(void) {
    nmk_err e = {0};
    if (fake_install(&e)) return puts(e.text), 2;
    if (NMK_WEIGHTS_KIB > 1 << 20) fake.total_bytes = fake.free_bytes = (size_t)141 << 30; /* an H200's */
    fake_model = look;
    test_whole();
    fake_model = NULL;
    test_half();
    free(self);
    return failures != 0;
}
