/* Prompts in chunks on the CPU machine with the trained toy: however they are cut, and whoever is in the same chunks, a
 * row gets the same keys and values bit by bit, and the token that follows is the one that steps find. */
#include "engine.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "json.h"

enum { MOST_PROMPT = 1024, ROWS = 3, PAGE = NMK_PAGE_TOKENS };

static int32_t prompt[ROWS][MOST_PROMPT];
static int count[ROWS]; /* fed, the last token not among them */

/* Rows' pages one after the other, in the order of positions. */
static uint8_t *pages_of(nmk_engine *g, int row, size_t *bytes, nmk_err *e) {
    const uint64_t page_bytes[2] = {NMK_KV_PAGE_BYTES_FULL, NMK_KV_PAGE_BYTES_SLIDING};
    const uint64_t pool[2] = {g->params.kv_full, g->params.kv_sliding};
    const int pages = (count[row] + PAGE - 1) / PAGE;
    uint8_t *all = xmalloc(*bytes = (size_t)pages * (page_bytes[0] + page_bytes[1])), *at = all;
    for (int k = 0; k < 2; k++)
        for (int p = 0; p < pages; p++, at += page_bytes[k]) {
            const int32_t page = g->kv.table[k][row * g->kv.stride + p];
            if (g->machine->calls->read(g->machine, at, pool[k] + page_bytes[k] * (uint64_t)page, page_bytes[k], e)) {
                free(all);
                return NULL;
            }
        }
    return all;
}

/* The next token of every row, by one step. */
static int next_tokens(nmk_engine *g, int first, int rows, int32_t *token, nmk_err *e) {
    nmk_column column[NMK_ROWS];
    int32_t out[NMK_ROWS];
    for (int c = 0; c < g->columns; c++) column[c] = nmk_column_idle();
    for (int r = first; r < first + rows; r++)
        column[r] = nmk_column_decode(&(nmk_sampler){0}, r, r, prompt[r][count[r]], count[r], 1);
    if (nmk_engine_step(g, column, out, e)) return -1;
    memcpy(token, out + first, sizeof *token * (size_t)rows);
    return 0;
}

/* Row `row` in chunks of at most `most` tokens; with `company` a neighbour in each of them, for as long as it has
 * tokens. */
static int feed(nmk_engine *g, int row, int most, int company, nmk_err *e) {
    int32_t token[MOST_PROMPT * 2];
    int at = 0, other = 0;
    uint64_t number;
    while (at < count[row]) {
        int n = count[row] - at < most ? count[row] - at : most, spans = 0, tokens = 0;
        nmk_span span[2];
        if (company >= 0 && other < count[company]) { /* in front, so that the row's tokens move */
            int m = count[company] - other < 37 ? count[company] - other : 37;
            span[spans++] = (nmk_span){.first = 0, .count = m, .pos = other, .slot = company};
            memcpy(token, prompt[company] + other, sizeof *token * (size_t)m);
            tokens = m, other += m;
        }
        if (n > nmk_engine_chunk_tokens(g) - tokens) n = nmk_engine_chunk_tokens(g) - tokens;
        span[spans++] = (nmk_span){.first = tokens, .count = n, .pos = at, .slot = row};
        memcpy(token + tokens, prompt[row] + at, sizeof *token * (size_t)n);
        if (nmk_engine_queue_chunk(g, span, spans, token, &number, e) || nmk_engine_wait_step(g, number, NULL, e))
            return -1;
        at += n;
    }
    return 0;
}

/* Its pages are zeros, so that what no token has written is the same too. */
static int grow(nmk_engine *g, int row, nmk_err *e) {
    nmk_kv_begin(&g->kv, row, 1);
    if (nmk_kv_grow(&g->kv, row, count[row] + 2)) return nmk_fail(e, "no pages");
    return nmk_engine_wipe_row(g, row, e) || nmk_engine_send_row(g, row, e) ? -1 : 0;
}

/* Steps feed row 0 in another engine. */
static int32_t token_by_steps(nmk_err *e) {
    const nmk_options o = {.checkpoint = "examples/nmc-toy", .device = "cpu", .max_len = 1024, .no_prefill = true};
    nmk_request rq = {.prompt = prompt[0], .prompt_tokens = count[0] + 1, .max_tokens = 2};
    nmk_engine *g = NULL;
    int32_t token = -2;
    nmk_stats s = {0};
    if (nmk_engine_open(&g, &o, e) == 0 && grow(g, 0, e) == 0) {
        for (int base = 0; base < count[0]; base += g->generation->positions) {
            nmk_column column[NMK_ROWS];
            for (int c = 0; c < g->columns; c++) {
                column[c] = nmk_column_idle();
                if (c < g->generation->positions && base + c < count[0])
                    column[c] =
                        (nmk_column){.token = rq.prompt[base + c], .pos = base + c, .base = base, .remaining = 1};
            }
            if (nmk_engine_step(g, column, NULL, e)) break;
        }
        if (next_tokens(g, 0, 1, &token, e)) token = -2;
        nmk_engine_stats(g, &s);
        check(s.prefill_tokens == 0, "without chunks", "%d", s.prefill_tokens);
    }
    nmk_engine_close(g);
    return token;
}

static int note_token(void *user, int row, int32_t token, const nmk_logprobs *logprobs) {
    (void)logprobs;
    ((int32_t *)user)[row] = token;
    return 0;
}

/* The first token of every prompt by nmk_engine_generate; returns the launches that took prompts, -1: it failed. */
static int generate(uint64_t kv_bytes, int32_t token[ROWS]) {
    nmk_options o = {.checkpoint = "examples/nmc-toy", .device = "cpu", .max_len = 1024, .kv_bytes = kv_bytes};
    nmk_request rq[ROWS];
    nmk_engine *g = NULL;
    nmk_stats stats = {0};
    for (int r = 0; r < ROWS; r++)
        rq[r] = (nmk_request){.prompt = prompt[r], .prompt_tokens = count[r] + 1, .max_tokens = 1};
    /* nobody wants to hear why */
    int rc = nmk_engine_open(&g, &o, NULL) || nmk_engine_generate(g, rq, ROWS, 0, note_token, token, NULL);
    if (g) nmk_engine_stats(g, &stats);
    nmk_engine_close(g);
    return rc ? -1 : (int)stats.prompt_steps;
}

/* Sliding layers take pages for the tokens of a chunk: with few of them chunks get shorter, and the answer is the same. */
static void test_few_pages(void) {
    int32_t token[ROWS] = {-1}, other[ROWS] = {-1};
    int launches = generate(0, token), more = generate(3 << 20, other);
    check(launches > 0 && more > launches && !memcmp(token, other, sizeof token), "few pages", "%d and %d launches",
          launches, more);
}

int main(void) {
    nmk_err e = {0};
    nmk_engine *g;
    const nmk_options o = {.checkpoint = "examples/nmc-toy", .device = "cpu", .max_len = 1024};
    struct json_object *golden = nmk_json_read("tests/golden/nmc-toy.json", 16 << 20, &e), *prompts;
    if (!golden) return puts(e.text), 2;
    prompts = nmk_json_get(golden, "prompts");
    /* the longest one, and its neighbours */
    for (size_t i = 0; i < json_object_array_length(prompts); i++) {
        struct json_object *ids = nmk_json_get(json_object_array_get_idx(prompts, i), "ids");
        const int n = (int)json_object_array_length(ids);
        if (n - 1 <= count[0] || n > MOST_PROMPT) continue;
        count[0] = n - 1;
        for (int k = 0; k < n; k++) prompt[0][k] = json_object_get_int(json_object_array_get_idx(ids, (size_t)k));
    }
    count[1] = 150, count[2] = 333;
    for (int r = 1; r < ROWS; r++)
        for (int k = 0; k <= count[r]; k++) prompt[r][k] = 5 + (k * 131 + r * 977) % 4000;
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "opens", "%s", e.text)) return 1;
    check(nmk_engine_chunk_tokens(g) == nmk_prefill->prefill_tokens, "the toy takes prompts in chunks", "%d tokens",
          nmk_engine_chunk_tokens(g));
    printf("# prompts of %d, %d and %d tokens\n", count[0] + 1, count[1] + 1, count[2] + 1);

    static const struct {
        int most, company;
    } cuts[] = {{MOST_PROMPT, -1}, {7, -1}, {64, -1}, {100, 1}, {MOST_PROMPT, 2}, {1, -1}};
    uint8_t *first = NULL, *pages;
    size_t bytes = 0;
    int32_t token[sizeof cuts / sizeof *cuts];
    const int whole = count[0];
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        char name[80];
        int rc = 0;
        /* chunks of one token take as long as others: a part of the prompt, which the whole one's pages begin with */
        if (cuts[i].most == 1) count[0] = 40;
        for (int r = 0; r < ROWS; r++) rc |= grow(g, r, &e);
        rc |= feed(g, 0, cuts[i].most, cuts[i].company, &e);
        pages = rc ? NULL : pages_of(g, 0, &bytes, &e);
        if (pages && cuts[i].most > 1) rc = next_tokens(g, 0, 1, &token[i], &e);
        snprintf(name, sizeof name, "chunks of %d tokens%s", cuts[i].most, cuts[i].company < 0 ? "" : ", in company");
        if (cuts[i].most == 1) {
            /* page 0 of the first full layer, token by token */
            bool same = pages && first;
            for (int head = 0; same && head < NMK_KV_HEADS * 2; head++)
                same = !memcmp(first + (size_t)head * PAGE * NMK_HEAD_DIM * 2,
                               pages + (size_t)head * PAGE * NMK_HEAD_DIM * 2, 40 * NMK_HEAD_DIM * 2);
            check(rc == 0 && same, name, "the first layer differs: %s", e.text);
        } else {
            check(rc == 0 && pages && (!first || !memcmp(first, pages, bytes)) && token[i] == token[0], name,
                  "keys and values differ, or tokens %d and %d: %s", token[0], token[i], e.text);
        }
        for (int r = 0; r < ROWS; r++) nmk_kv_drop(&g->kv, r);
        if (!first && pages)
            first = pages;
        else
            free(pages);
        nmk_engine_poison(g, 0xff, &e);
    }
    count[0] = whole;
    nmk_engine_close(g);
    const int32_t by_steps = token_by_steps(&e);
    check(by_steps == token[0], "steps give the same token", "%d, chunks %d: %s", by_steps, token[0], e.text);
    test_few_pages();
    free(first);
    json_object_put(golden);
    return failures != 0;
}
