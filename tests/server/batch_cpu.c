/* Continuous batching on the CPU machine with the trained toy: what a request says does not depend on its company. */
#include "batch.h"

#include <limits.h>
#include <math.h>

#include "engine.h"
#include "json.h"
#include "runtime/kv_sound.h"
#include "server/batch_helper.h"

enum { COUNT = 12, MANY = 20, GREEDY = 64 };

static client clients_of[COUNT], many[MANY];
static int32_t alone[COUNT][MOST_TOKENS], generated[COUNT][MOST_TOKENS];

static const struct {
    int prompt_tokens, max_tokens;
    float temperature;
} shape[COUNT] = {{1, 40, 1.5f},  {2, 33, 0},   {5, 20, 1.2f},  {9, 50, 1.3f}, {30, 12, 0},   {64, 25, 1},
                  {65, 17, 0.3f}, {100, 30, 0}, {131, 8, 0.9f}, {200, 22, 1},  {6, 64, 1.5f}, {4, 10, 2}};

static void fill(client *k, int prompt_tokens, int max_tokens, float temperature, unsigned seed) {
    memset(k, 0, sizeof *k);
    unsigned s = seed * 2654435761u + 1;
    for (int i = 0; i < prompt_tokens; i++) {
        s = s * 1664525u + 1013904223u;
        k->prompt[i] = (int32_t)(300 + (s >> 8) % 3000);
    }
    k->rq = (nmk_batch_request){.prompt_tokens = prompt_tokens,
                                .max_tokens = max_tokens,
                                .sampler = {.temperature = temperature, .seed = 0x9e3779b97f4a7c15u * (seed + 1)}};
}

static void fill_all(void) {
    for (int i = 0; i < COUNT; i++)
        fill(&clients_of[i], shape[i].prompt_tokens, shape[i].max_tokens, shape[i].temperature, (unsigned)i);
}

/* How many of the clients ended by length with the tokens that each gave alone. */
static int equal_to_alone(void) {
    int equal = 0;
    for (int i = 0; i < COUNT; i++) {
        client *k = &clients_of[i];
        equal += wait_end(k) && k->ends == 1 && k->end == NMK_BATCH_LENGTH && k->count == k->rq.max_tokens &&
                 !memcmp(k->token, alone[i], sizeof(int32_t) * (size_t)k->count);
    }
    return equal;
}

static void test_alone(nmk_batch *b) {
    nmk_err e = {0};
    int good = 0;
    fill_all();
    for (int i = 0; i < COUNT; i++) {
        client *k = &clients_of[i];
        good += submit(b, k, &e) == 0 && wait_end(k) && k->starts == 1 && k->ends == 1 && k->end == NMK_BATCH_LENGTH &&
                k->count == k->rq.max_tokens;
        memcpy(alone[i], k->token, sizeof alone[i]);
    }
    check(good == COUNT, "twelve requests, one after the other", "%d are right: %s", good, e.text);
}

static int keep(void *user, int row, int32_t token, const nmk_logprobs *logprobs) {
    (void)logprobs;
    client *k = user;
    (void)row;
    k->token[k->count++] = token;
    return 0;
}

/* Cuts of a prompt differ beyond one chunk, and bits may then; up to one they are the same.  Before the batch takes the
 * engine. */
static void generate_alone(nmk_engine *g) {
    nmk_err e = {0};
    fill_all();
    for (int i = 0; i < COUNT; i++) {
        client *k = &clients_of[i];
        nmk_request rq = {.prompt = k->prompt,
                          .prompt_tokens = k->rq.prompt_tokens,
                          .max_tokens = k->rq.max_tokens,
                          .sampler = k->rq.sampler};
        check(nmk_engine_generate(g, &rq, 1, NMK_IGNORE_STOP, keep, k, &e) == 0, "generated", "%s", e.text);
        memcpy(generated[i], k->token, sizeof generated[i]);
    }
}

static void test_generated(void) {
    int equal = 0;
    for (int i = 0; i < COUNT; i++) {
        bool same = !memcmp(generated[i], alone[i], sizeof(int32_t) * (size_t)shape[i].max_tokens);
        equal += same;
        if (shape[i].prompt_tokens > 5) continue;
        check(same, "as nmk_engine_generate", "request %d", i);
    }
    printf("# %d of %d equal what nmk_engine_generate gives\n", equal, COUNT);
}

static void test_company(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0;
    fill_all();
    for (int i = 0; i < COUNT; i++) rc |= submit(b, &clients_of[i], &e);
    int equal = equal_to_alone();
    check(rc == 0 && equal == COUNT, "all at once: each as alone", "%d of %d: %s", equal, COUNT, e.text);
    fill_all();
    for (int i = COUNT; i-- > 0;) rc |= submit(b, &clients_of[i], &e);
    equal = equal_to_alone();
    check(rc == 0 && equal == COUNT, "in the other order", "%d of %d: %s", equal, COUNT, e.text);
    for (int round = 0; round < 3; round++) {
        fill_all();
        for (int i = 0; i < COUNT; i++) {
            int at = (i * 5 + round) % COUNT;
            rc |= submit(b, &clients_of[at], &e);
            usleep((useconds_t)(1000 * ((i * 7 + round * 11) % 23)));
        }
        equal = equal_to_alone();
        check(rc == 0 && equal == COUNT, "staggered", "%d of %d: %s", equal, COUNT, e.text);
    }
}

/* Greedy text of transformers, all prompts of the golden file at once. */
static void test_golden(nmk_batch *b, struct json_object *prompts) {
    nmk_err e = {0};
    int count = (int)json_object_array_length(prompts), rc = 0, equal = 0;
    if (count > MANY) count = MANY;
    for (int i = 0; i < count; i++) {
        client *k = &many[i];
        struct json_object *ids = nmk_json_get(json_object_array_get_idx(prompts, (size_t)i), "ids");
        memset(k, 0, sizeof *k);
        int n = (int)json_object_array_length(ids);
        for (int j = 0; j < n && j < MOST_TOKENS; j++)
            k->prompt[j] = json_object_get_int(json_object_array_get_idx(ids, (size_t)j));
        k->rq = (nmk_batch_request){.prompt_tokens = n, .max_tokens = GREEDY};
        rc |= submit(b, k, &e);
    }
    for (int i = 0; i < count; i++) {
        struct json_object *want = nmk_json_get(json_object_array_get_idx(prompts, (size_t)i), "greedy64");
        bool same = wait_end(&many[i]) && many[i].count == GREEDY;
        for (int j = 0; same && j < GREEDY; j++)
            same = many[i].token[j] == json_object_get_int(json_object_array_get_idx(want, (size_t)j));
        equal += same;
    }
    check(rc == 0 && equal == count, "the greedy text of transformers", "%d of %d: %s", equal, count, e.text);
}

static void test_stops(nmk_batch *b) {
    nmk_err e = {0};
    client *k = &clients_of[10];
    /* the first token from the tenth on that did not come before */
    int at = 10;
    for (int i = 0; i < at && at < 60; i++)
        if (alone[10][i] == alone[10][at]) at++, i = -1;
    int32_t stop[3] = {4095, alone[10][at], 4094}, *mine = xmalloc(sizeof stop);
    memcpy(mine, stop, sizeof stop);
    fill_all();
    k->rq.stop_ids = mine, k->rq.stop_count = 3;
    int rc = submit(b, k, &e);
    free(mine); /* it was copied */
    bool ended = wait_end(k);
    check(rc == 0 && ended && k->end == NMK_BATCH_STOP && k->count == at + 1 && k->token[at] == stop[1],
          "a stop id ends a request and is its last token", "%d tokens, end %d: %s", k->count, k->end, e.text);
    k->rq.stop_ids = stop, k->rq.min_tokens = at + 1;
    rc = submit(b, k, &e), ended = wait_end(k);
    check(rc == 0 && ended && k->end == NMK_BATCH_STOP && k->count == at + 1, "also as the last of min_tokens",
          "%d tokens, end %d", k->count, k->end);
    k->rq.min_tokens = at + 2;
    rc = submit(b, k, &e), ended = wait_end(k);
    check(rc == 0 && ended && k->count > at + 1 && !memcmp(k->token, alone[10], sizeof(int32_t) * (size_t)k->count),
          "but not before min_tokens", "%d tokens, end %d", k->count, k->end);
}

static void test_cancel(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0;
    bool ended = true;
    for (int i = 0; i < 10; i++) {
        fill(&many[i], 3 + i, 900, 0, (unsigned)i);
        rc |= submit(b, &many[i], &e);
    }
    check(rc == 0 && wait_load(b, nmk_rows, 10 - nmk_rows), "rows are filled, the others wait", "%s", e.text);
    nmk_batch_cancel(b, many[9].id);
    ended = wait_end(&many[9]);
    check(ended && many[9].end == NMK_BATCH_CANCEL && many[9].count == 0, "cancelled while waiting", "%d tokens",
          many[9].count);
    ended = wait_tokens(&many[0], 3);
    nmk_batch_cancel(b, many[0].id);
    ended &= wait_end(&many[0]);
    check(ended && many[0].end == NMK_BATCH_CANCEL && many[0].count >= 3 && many[0].count < 900,
          "cancelled while decoding", "%d tokens", many[0].count);
    ended = wait_tokens(&many[8], 2);
    check(ended && many[8].count >= 2, "its row goes to who waits", "%d tokens", many[8].count);
    nmk_batch_cancel(b, many[0].id), nmk_batch_cancel(b, 12345678), nmk_batch_cancel(b, 0);
    for (int i = 1; i < 9; i++) nmk_batch_cancel(b, many[i].id), nmk_batch_cancel(b, many[i].id);
    for (int i = 1; i < 9; i++) ended &= wait_end(&many[i]);
    quiet(b);
    int ends = 0;
    for (int i = 0; i < 10; i++) ends += many[i].ends;
    check(ended && ends == 10, "each is told once", "%d ends", ends);

    fill(&many[0], 900, 50, 0, 0);
    rc = submit(b, &many[0], &e);
    nmk_batch_stats s = {0}, was = quiet(b);
    fill(&many[1], 900, 50, 0, 1);
    rc |= submit(b, &many[1], &e);
    for (int i = 0; i < 60000 && !s.running; i++) usleep(100), nmk_batch_read_stats(b, &s);
    nmk_batch_cancel(b, many[1].id);
    ended = wait_end(&many[1]);
    nmk_batch_read_stats(b, &s);
    check(rc == 0 && ended && many[1].end == NMK_BATCH_CANCEL && many[1].count == 0 && s.steps < was.steps + 3,
          "cancelled while its prompt is fed", "%d tokens, %d steps", many[1].count, (int)(s.steps - was.steps));

    fill(&many[0], 9, 50, 0, 2);
    many[0].cancel_after = 7;
    rc = submit(b, &many[0], &e);
    ended = wait_end(&many[0]);
    check(rc == 0 && ended && many[0].end == NMK_BATCH_CANCEL && many[0].count == 7, "cancelled by its own callback",
          "%d tokens", many[0].count);
}

static void test_refusals(nmk_batch *b, int most_waiting) {
    nmk_err e = {0};
    uint64_t id = 77;
    client *k = &many[0];
    fill(k, 1000, 25, 0, 0);
    check_message(submit(b, k, &e), &e, "1000 tokens of prompt and 25 of answer: the context holds 1024", "too long");
    k->rq.max_tokens = INT_MAX;
    check_message(submit(b, k, &e), &e, "the context holds 1024", "far too long");
    k->rq.max_tokens = 0;
    check_message(submit(b, k, &e), &e, "max_tokens is 0", "no tokens wanted");
    k->rq.max_tokens = 5, k->rq.prompt_tokens = 0;
    check_message(submit(b, k, &e), &e, "the prompt is empty", "no prompt");
    k->rq.prompt_tokens = 5, k->rq.sampler.temperature = -1;
    check_message(submit(b, k, &e), &e, "temperature -1", "a negative temperature");
    k->rq.sampler.temperature = 0, k->prompt[4] = 4096;
    check_message(submit(b, k, &e), &e, "token 4096 is not in 0 to 4095", "a token outside the vocabulary");
    k->prompt[4] = 5, k->rq.min_tokens = -1;
    check_message(submit(b, k, &e), &e, "min_tokens is -1", "a negative min_tokens");
    check(k->ends == 0 && k->count == 0 && id == 77, "no callback after a refusal", "%d", k->ends);

    int rc = 0;
    for (int i = 0; i < nmk_rows; i++) {
        fill(&many[i], 3, 900, 0, (unsigned)i);
        rc |= submit(b, &many[i], &e);
    }
    bool full = wait_load(b, nmk_rows, 0);
    for (int i = nmk_rows; i < nmk_rows + most_waiting; i++) {
        fill(&many[i], 3, 5, 0, (unsigned)i);
        rc |= submit(b, &many[i], &e);
    }
    fill(&clients_of[0], 3, 5, 0, 0);
    check(rc == 0 && full, "the queue takes as many as it may", "%s", e.text);
    check_message(submit(b, &clients_of[0], &e), &e, "requests are waiting already", "and no more");
    for (int i = 0; i < nmk_rows; i++) nmk_batch_cancel(b, many[i].id);
    int good = 0;
    for (int i = 0; i < nmk_rows + most_waiting; i++) good += wait_end(&many[i]) && many[i].ends == 1;
    check(good == nmk_rows + most_waiting, "all of them end", "%d", good);
}

static void test_close(nmk_batch *b, int most_waiting) {
    nmk_err e = {0};
    int rc = 0, good = 0, count = nmk_rows + most_waiting / 2;
    for (int i = 0; i < count; i++) {
        fill(&many[i], 10 + 20 * i, 300, 0, (unsigned)i);
        rc |= submit(b, &many[i], &e);
        if (i == nmk_rows - 1) wait_tokens(&many[0], 4);
    }
    nmk_batch_close(b);
    for (int i = 0; i < count; i++) good += many[i].ends == 1 && many[i].end == NMK_BATCH_CANCEL;
    check(rc == 0 && good == count, "closing ends everything", "%d of %d: %s", good, count, e.text);
}

/* What every one of the steps so far had to do, from the requests alone. */
static void test_stats(nmk_batch *b) {
    nmk_err e = {0};
    nmk_batch_stats before = quiet(b), s;
    fill(&many[0], 30, 12, 0, 0);
    uint64_t start_ms = nmk_now_ns() / 1000000;
    int rc = submit(b, &many[0], &e);
    bool ended = wait_end(&many[0]);
    s = quiet(b);
    check(rc == 0 && ended && s.running == 0 && s.waiting == 0 && s.requests == before.requests + 1 &&
              s.prompt_tokens == before.prompt_tokens + 30 && s.tokens == before.tokens + 12 &&
              s.steps == before.steps + 1 + 12 && s.failed == 0 && s.last_step_ms >= start_ms && !s.lost,
          "statistics", "%d steps, %d prompt tokens, %d tokens, %d failed", (int)(s.steps - before.steps),
          (int)(s.prompt_tokens - before.prompt_tokens), (int)(s.tokens - before.tokens), (int)s.failed);
    struct timespec cpu[2];
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu[0]);
    usleep(200000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu[1]);
    double ms = 1e3 * (double)(cpu[1].tv_sec - cpu[0].tv_sec) + 1e-6 * (double)(cpu[1].tv_nsec - cpu[0].tv_nsec);
    check(ms < 50, "an idle batch sleeps", "%.0f ms of CPU in 200", ms);
}

/* Again, and all but one page of the prompts need not be computed. */
static void test_cached(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0, cached = 0, want = 0;
    fill_all();
    for (int i = 0; i < COUNT; i++) rc |= submit(b, &clients_of[i], &e);
    int equal = equal_to_alone();
    for (int i = 0; i < COUNT; i++)
        cached += clients_of[i].cached, want += (shape[i].prompt_tokens - 1) / NMK_PAGE_TOKENS * NMK_PAGE_TOKENS;
    check(rc == 0 && equal == COUNT && cached == want, "from cached pages: each as alone",
          "%d of %d, %d tokens cached: %s", equal, COUNT, cached, e.text);
}

/* The next turn of chats: what was generated is decoded once and fed once, which may round differently. */
static void test_chat(nmk_batch *b) {
    enum { CHATS = 3, ANSWER = 100, NEXT = 30 };
    static client turn[3]; /* as it comes; exact; with no page of others */
    nmk_err e = {0};
    int rc = 0, exact = 0, same = 0, cached = 0;
    bool ended = true;
    for (int i = 0; i < CHATS; i++) {
        fill(&many[0], 70 + 9 * i, ANSWER, i % 2 ? 1 : 0, 100 + (unsigned)i);
        rc |= submit(b, &many[0], &e);
        ended &= wait_end(&many[0]);
        for (int j = 0; j < 3; j++) {
            client *k = &turn[j];
            int n = many[0].rq.prompt_tokens;
            fill(k, n + ANSWER + 10, NEXT, i % 2 ? 1 : 0, 200 + (unsigned)i);
            memcpy(k->prompt, many[0].prompt, sizeof(int32_t) * (size_t)n);
            memcpy(k->prompt + n, many[0].token, sizeof(int32_t) * ANSWER);
            k->rq.exact = j == 1, k->rq.salt = j == 2 ? 1000 + (uint64_t)i : 0;
            rc |= submit(b, k, &e);
            ended &= wait_end(k) && k->count == NEXT;
        }
        cached += turn[0].cached - turn[1].cached;
        same += !memcmp(turn[0].token, turn[2].token, sizeof(int32_t) * NEXT);
        exact += !memcmp(turn[1].token, turn[2].token, sizeof(int32_t) * NEXT) && turn[2].cached == 0 &&
                 turn[1].cached == (many[0].rq.prompt_tokens - 1) / NMK_PAGE_TOKENS * NMK_PAGE_TOKENS;
    }
    check(rc == 0 && ended && exact == CHATS, "an exact request says what it would without a cache", "%d of %d: %s",
          exact, CHATS, e.text);
    check(cached >= CHATS * NMK_PAGE_TOKENS, "others use pages of what was generated", "%d tokens", cached);
    printf("# with %d cached tokens that were generated, %d of %d texts are the same all the same\n", cached, same,
           CHATS);
}

/* Likelihoods that a client was told. */
static struct {
    int prompts, tokens, wrong;
    nmk_logprobs prompt[MOST_TOKENS], token[MOST_TOKENS];
} likely;

static void likely_prompt(void *user, int index, const nmk_logprobs *l) {
    (void)user;
    likely.wrong += index != likely.prompts + 1 || likely.tokens;
    likely.prompt[index] = *l, likely.prompts++;
}

/* Rows lose their pages to others again and again, in another batch than `ample`. */
static void test_preempted(nmk_batch *ample) {
    enum { ROWS = 6, ANSWER = 140 };
    nmk_err e = {0};
    nmk_engine *g;
    nmk_batch *b;
    nmk_options o = {.checkpoint = "examples/nmc-toy",
                     .device = "cpu",
                     .max_len = 1024,
                     .kv_bytes = 12 * (uint64_t)NMK_KV_PAGE_BYTES_FULL + 8 * (uint64_t)NMK_KV_PAGE_BYTES_SLIDING};
    if (!check(nmk_engine_open(&g, &o, &e) == 0 && nmk_batch_open(&b, g, COUNT, &e) == 0, "opens", "%s", e.text))
        return;
    int rc = 0, equal = 0;
    bool ended = true;
    memset(&likely, 0, sizeof likely);
    for (int round = 0; round < 2; round++) {
        likely.prompts = 0;
        for (int i = 0; i < ROWS; i++) {
            client *k = &many[i];
            fill(k, 5 + 13 * i, ANSWER, i % 2 ? 1 : 0, 300 + (unsigned)i);
            /* which the machine counts, and has to be told anew of a row that comes again */
            if (i) k->rq.sampler.repetition_penalty = 1.3f, k->rq.sampler.frequency_penalty = 0.2f;
            if (i == ROWS - 1) k->rq.prompt_logprobs = 1, k->rq.on_prompt = likely_prompt;
            rc |= submit(round ? b : ample, k, &e);
        }
        for (int i = 0; i < ROWS; i++) {
            ended &= wait_end(&many[i]) && many[i].count == ANSWER;
            if (round) equal += !memcmp(many[i].token, alone[i], sizeof(int32_t) * ANSWER);
            memcpy(alone[i], many[i].token, sizeof alone[i]);
        }
    }
    nmk_batch_stats s = quiet(b);
    check(rc == 0 && ended && equal == ROWS && s.preemptions > 0, "rows that lost their pages say the same",
          "%d of %d, %d preemptions: %s", equal, ROWS, (int)s.preemptions, e.text);
    check(likely.prompts == many[ROWS - 1].rq.prompt_tokens - 1 && !likely.wrong,
          "likelihoods of a prompt are told once", "%d, %d out of order", likely.prompts, likely.wrong);
    check(kv_is_given_back(&g->kv), "every page is free or kept in the end", "some are held");
    printf("# %d preemptions, %d and %d pages\n", (int)s.preemptions, g->kv.pages[0], g->kv.pages[1]);
    nmk_batch_close(b);
}

/* The tokens of a cap come where it stands, and what follows them is what follows them in a prompt. */
static void test_caps(nmk_batch *b) {
    enum { AT = 10, ALL = 48 };
    static const int32_t then[] = {400, 401, 402};
    static client free_one, capped, after, company[3];
    static const struct {
        const char *name;
        int opens, closes, at; /* opens, closes: which of the free one's tokens; -1: none, ALL: one that it lacks */
        bool holds;
    } cases[] = {{"a cap", -1, -1, AT, true},
                 {"a cap on what was opened", 3, -1, AT, true},
                 {"a cap at the first token", -1, -1, 1, true},
                 {"a cap on what was closed before", -1, 4, AT, false},
                 {"a cap on what is never opened", ALL, -1, AT, false},
                 {"a cap beyond the end", -1, -1, ALL, false}};
    nmk_err e = {0};
    fill(&free_one, 30, ALL, 1.1f, 77);
    if (!check(submit(b, &free_one, &e) == 0 && wait_end(&free_one), "without a cap", "%s", e.text)) return;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int at = cases[i].at, rest = at + 3;
        fill(&capped, 30, ALL, 1.1f, 77);
        capped.rq.cap = (nmk_batch_cap){.after = at,
                                        .opens = cases[i].opens < 0      ? -1
                                                 : cases[i].opens == ALL ? INT32_MAX
                                                                         : free_one.token[cases[i].opens],
                                        .closes = cases[i].closes < 0 ? -1 : free_one.token[cases[i].closes],
                                        .then = then,
                                        .then_count = 3};
        for (int k = 0; k < 3; k++) { /* others come and go meanwhile */
            fill(&company[k], 20 + k, 5 + 9 * k, 1, (unsigned)(80 + k));
            submit(b, &company[k], &e);
        }
        bool good =
            submit(b, &capped, &e) == 0 && wait_end(&capped) && capped.count == ALL && capped.end == NMK_BATCH_LENGTH;
        for (int k = 0; k < 3; k++) good &= wait_end(&company[k]);
        if (!cases[i].holds) {
            check(good && !memcmp(capped.token, free_one.token, sizeof(int32_t) * ALL), cases[i].name,
                  "%d tokens, others than without it", capped.count);
            continue;
        }
        /* Noise is the seed's and the position's, so the same prompt goes on the same way, but for rounding. */
        fill(&after, 30, ALL - rest, 1.1f, 77);
        memcpy(after.prompt + 30, capped.token, sizeof(int32_t) * (size_t)rest);
        after.rq.prompt_tokens = 30 + rest;
        int equal = 0;
        good &= submit(b, &after, &e) == 0 && wait_end(&after);
        while (equal < ALL - rest && after.token[equal] == capped.token[rest + equal]) equal++;
        check(good && !memcmp(capped.token, free_one.token, sizeof(int32_t) * (size_t)at) &&
                  !memcmp(capped.token + at, then, sizeof then) && equal >= 4,
              cases[i].name, "%d tokens, %d of those behind it as expected", capped.count, equal);
    }
    fill(&capped, 30, AT + 2, 1.1f, 77);
    capped.rq.cap = (nmk_batch_cap){.after = AT, .opens = -1, .closes = -1, .then = then, .then_count = 3};
    check(submit(b, &capped, &e) == 0 && wait_end(&capped) && capped.count == AT + 2 &&
              capped.end == NMK_BATCH_LENGTH && capped.token[AT + 1] == then[1],
          "the answer ends within the tokens of a cap", "%d tokens", capped.count);
}

static void likely_token(void *user, int32_t token, const nmk_logprobs *l) {
    if (l) likely.token[likely.tokens] = *l;
    likely.tokens++;
    client_token(user, token, l);
}

/* Submits as submit() does, with the two functions above. */
static bool run_likely(nmk_batch *b, client *k) {
    nmk_err e;
    memset(&likely, 0, sizeof likely);
    k->rq.prompt = k->prompt, k->rq.user = k, k->batch = b;
    k->rq.on_token = likely_token, k->rq.on_end = client_end, k->rq.on_prompt = likely_prompt;
    return nmk_batch_submit(b, &k->rq, &k->id, &e) == 0 && wait_end(k) && k->end == NMK_BATCH_LENGTH;
}

/* A prompt's tokens are as likely as they were when the model said them, whoever else runs. */
static void test_prompt_logprobs(nmk_batch *b) {
    enum { FIRST = 21, SAID = 90, TOP = 5 };
    static client said, asked, company[5];
    static nmk_logprobs wanted[SAID], alone_said[SAID + FIRST];
    nmk_err e = {0};
    fill(&said, FIRST, SAID, 0.9f, 90);
    said.rq.sampler.logprobs = TOP;
    if (!check(run_likely(b, &said) && likely.tokens == SAID, "likelihoods of an answer", "%d", likely.tokens)) return;
    memcpy(wanted, likely.token, sizeof wanted);
    for (int round = 0; round < 2; round++) {
        fill(&asked, FIRST, 2, 0, 91);
        memcpy(asked.prompt, said.prompt, sizeof *said.prompt * FIRST);
        memcpy(asked.prompt + FIRST, said.token, sizeof *said.token * SAID);
        asked.rq.prompt_tokens = FIRST + SAID, asked.rq.prompt_logprobs = TOP, asked.rq.salt = 17 + (uint64_t)round;
        for (int i = 0; i < 5 * round; i++) {
            fill(&company[i], 20 + 30 * i, 40, 1, 92 + (unsigned)i);
            submit(b, &company[i], &e);
        }
        bool good = run_likely(b, &asked);
        for (int i = 0; i < 5 * round; i++) good &= wait_end(&company[i]);
        int near = 0, same_top = 0, bits = 0;
        for (int i = 0; i < SAID; i++) {
            const nmk_logprobs *l = &likely.prompt[FIRST + i];
            near += fabsf(l->chosen - wanted[i].chosen) < 0.05f * (1 + fabsf(wanted[i].chosen));
            same_top += l->count == TOP - 1 && l->id[0] == wanted[i].id[0];
        }
        for (int i = 1; i < FIRST + SAID; i++)
            bits += !memcmp(&likely.prompt[i].chosen, &alone_said[i - 1].chosen, sizeof(float));
        check(good && !likely.wrong && likely.prompts == FIRST + SAID - 1 && asked.count == 2 && near >= SAID - 1 &&
                  same_top >= SAID - 2,
              round ? "likelihoods of a prompt, in company" : "likelihoods of a prompt",
              "%d of %d told, %d of them as before, %d with the same best one, %d out of order", likely.prompts,
              FIRST + SAID - 1, near, same_top, likely.wrong);
        if (round) check(bits == FIRST + SAID - 1, "and they are the same, bit for bit", "%d are", bits);
        memcpy(alone_said, likely.prompt + 1, sizeof *alone_said * (FIRST + SAID - 1));
    }
    fill(&asked, 1, 2, 0, 93);
    asked.rq.prompt_logprobs = 1;
    check(run_likely(b, &asked) && !likely.prompts && asked.count == 2, "a prompt of one token has none", "%d",
          likely.prompts);
    fill(&asked, 9, 2, 0, 93);
    asked.rq.prompt_logprobs = NMK_TOP_LOGPROBS + 2;
    check(submit(b, &asked, &e) && strstr(e.text, "prompt_logprobs"), "more than there are", "%s", e.text);
}

int main(void) {
    enum { MOST_WAITING = 12 };
    nmk_err e = {0};
    nmk_engine *g;
    nmk_batch *b;
    struct json_object *golden = nmk_json_read("tests/golden/nmc-toy.json", 16 << 20, &e);
    if (!golden) return puts(e.text), 2;
    nmk_options o = {.checkpoint = "examples/nmc-toy", .device = "cpu", .max_len = 1024};
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "the engine opens", "%s", e.text)) return 1;
    generate_alone(g);
    if (!check(nmk_batch_open(&b, g, MOST_WAITING, &e) == 0, "the batch opens", "%s", e.text)) return 1;
    test_alone(b);
    test_generated();
    test_stats(b);
    test_company(b);
    test_cached(b);
    test_chat(b);
    test_golden(b, nmk_json_get(golden, "prompts"));
    test_stops(b);
    test_caps(b);
    test_prompt_logprobs(b);
    test_cancel(b);
    test_refusals(b, MOST_WAITING);
    test_preempted(b); /* the texts of `alone` are others from here on */
    test_close(b, MOST_WAITING);
    nmk_batch_close(NULL);
    json_object_put(golden);
    return failures != 0;
}
