/* The cache of pages, preemption and the queue, on a GPU made up of host memory.
 *
 * That GPU has a memory here: a step writes, for each token, a signature into the pages that the tables name, made of
 * the signature before it in the full pages, of all in the window of the sliding ones, of the token, and of its distance
 * from the base of its chunk, on which the real one's rounding depends.  The token that it samples is made of that.  So a
 * text is right only if every page that was read held what this very request would have computed. */
#include "batch.h"

#include "runtime/fake_gpu.h"
#include "runtime/kv_sound.h"
#include "server/batch_helper.h"

enum { MANY = 40, CHUNK = NMK_COLUMNS / 2, PAGE = NMK_PAGE_TOKENS, MAX_LEN = 1024, NO_TOKEN = 3333 };

static client many[MANY];
static uint32_t seed;
static bool spoiled; /* the model answers no number when it sees NO_TOKEN */
static nmk_options options = {.random_weights = true, .device = "cuda:0", .max_len = MAX_LEN};

static int draw(int below) {
    seed = seed * 1664525u + 1013904223u;
    return (int)((uint64_t)(seed >> 4) * (uint64_t)below >> 28);
}

/* ---- the model ---- */

static uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = (a + 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u + b;
    return (x ^ x >> 29) * 0x94d049bb133111ebu;
}

static uint64_t next_mark(uint64_t before, uint64_t window_sum, int32_t token, int from_base) {
    return mix(mix(before, window_sum), (uint64_t)token * (CHUNK + 1) + (uint64_t)from_base);
}

static int32_t token_of(uint64_t mark) { return (int32_t)(mix(mark, 1) % 3000); }

static uint64_t *mark_at(const nmk_params *p, int slot, int pos, int sliding) {
    const int32_t *table = (const int32_t *)(uintptr_t)(sliding ? p->table_sliding : p->table_full);
    uint64_t bytes = sliding ? NMK_KV_PAGE_BYTES_SLIDING : NMK_KV_PAGE_BYTES_FULL;
    uint64_t page = (uint64_t)table[slot * p->table_stride + pos / PAGE];
    return (uint64_t *)(uintptr_t)((sliding ? p->kv_sliding : p->kv_full) + page * bytes) + pos % PAGE;
}

static int32_t model(const nmk_params *p, const nmk_column *c) {
    uint64_t sum = 0, before = c->pos ? *mark_at(p, c->slot, c->pos - 1, 0) : 0;
    for (int pos = c->pos - 1; pos >= 0 && pos > c->pos - NMK_WINDOW; pos--) sum += *mark_at(p, c->slot, pos, 1);
    uint64_t mark = next_mark(before, sum, c->token, in_chunk ? CHUNK : c->pos - c->base);
    *mark_at(p, c->slot, c->pos, 0) = *mark_at(p, c->slot, c->pos, 1) = mark;
    return spoiled && c->token == NO_TOKEN ? -1 : token_of(mark);
}

/* What the request says if nothing is cached, or if tokens from `from` to `to` of its prompt were decoded. */
static void say(const client *k, int from, int to, int32_t *out) {
    static uint64_t mark[2 * MOST_TOKENS];
    static int32_t token[2 * MOST_TOKENS];
    int prompt = k->rq.prompt_tokens;
    memcpy(token, k->prompt, sizeof *token * (size_t)prompt);
    for (int pos = 0; pos < prompt - 1 + k->rq.max_tokens; pos++) {
        uint64_t sum = 0;
        for (int q = pos - 1; q >= 0 && q > pos - NMK_WINDOW; q--) sum += mark[q];
        bool decoded = pos >= prompt - 1 || (pos >= from && pos < to);
        mark[pos] = next_mark(pos ? mark[pos - 1] : 0, sum, token[pos],
                              decoded              ? 0
                              : options.no_prefill ? pos % CHUNK
                                                   : CHUNK);
        if (pos >= prompt - 1) out[pos - (prompt - 1)] = token[pos + 1] = token_of(mark[pos]);
    }
}

/* ---- helpers ---- */

static bool says(const client *k, int from, int to) {
    static int32_t want[MOST_TOKENS];
    say(k, from, to, want);
    return k->count <= k->rq.max_tokens && !memcmp(k->token, want, sizeof *want * (size_t)k->count);
}

static bool is_whole(client *k) {
    return wait_end(k) && k->ends == 1 && k->end == NMK_BATCH_LENGTH && k->count == k->rq.max_tokens &&
           k->starts == 1 && says(k, 0, 0);
}

/* A prompt that begins with `common` tokens of family `family`. */
static void fill(client *k, int family, int common, int prompt_tokens, int max_tokens) {
    static int number;
    memset(k, 0, sizeof *k);
    number++;
    for (int i = 0; i < prompt_tokens; i++)
        k->prompt[i] = (i < common ? 7 * family + i : 1000 + 31 * number + i) % 3000;
    k->rq = (nmk_batch_request){.prompt_tokens = prompt_tokens, .max_tokens = max_tokens};
}

static bool run_one_request(nmk_batch *b, client *k) {
    nmk_err e = {0};
    if (submit(b, k, &e)) return check(false, "submitted", "%s", e.text);
    return is_whole(k);
}

static int fed_positions(void) {
    int fed = 0;
    for (int i = 0; i < seen_count; i++) fed += !(seen[i].flags & 1);
    for (int i = 0; i < seen_chunks; i++) fed += seen_chunk[i].tokens;
    return fed;
}

static void reset(nmk_batch *b) {
    quiet(b);
    seen_count = seen_chunks = 0;
}

static bool open_batch(nmk_engine **g, nmk_batch **b, uint64_t kv_bytes) {
    nmk_err e = {0};
    options.kv_bytes = kv_bytes;
    fake_model = model;
    bool good = nmk_engine_open(g, &options, &e) == 0 && nmk_batch_open(b, *g, 0, &e) == 0;
    return check(good, "opens", "%s", e.text);
}

static uint64_t bytes_for(int full, int sliding) {
    return (uint64_t)full * NMK_KV_PAGE_BYTES_FULL + (uint64_t)sliding * NMK_KV_PAGE_BYTES_SLIDING;
}

static void check_given_back(nmk_batch *b, const nmk_engine *g) {
    nmk_batch_stats s = quiet(b);
    const char *why = kv_sound(&g->kv);
    check(kv_is_given_back(&g->kv) && s.kv_used == 0, "every page is free or kept in the end", "%s; %g used",
          why ? why : "some are held", s.kv_used);
}

/* ---- the cache ---- */

static void test_hits(nmk_batch *b) {
    static const struct {
        int common, prompt, cached;
        const char *name;
    } cases[] = {{300, 300, 256, "the same prompt: all full pages"},
                 {300, 257, 256, "a beginning of it"},
                 {300, 256, 192, "whose last token ends a page: that is computed"},
                 {130, 400, 128, "two pages in common"},
                 {127, 400, 64, "not quite two pages"},
                 {60, 400, 0, "less than a page"},
                 {300, 1, 0, "a prompt of one token"},
                 {300, 64, 0, "of one page"},
                 {300, 65, 64, "of one page and a token"}};
    fill(&many[0], 1, 300, 300, 20);
    check(run_one_request(b, &many[0]) && many[0].cached == 0, "nothing is cached at first", "%d", many[0].cached);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nmk_batch_stats before = quiet(b), after;
        client *k = &many[1];
        fill(k, 1, cases[i].common, cases[i].prompt, 20);
        bool good = run_one_request(b, k);
        after = quiet(b);
        check(good && k->cached == cases[i].cached &&
                  after.cache_hits - before.cache_hits == (uint64_t)cases[i].cached &&
                  after.cache_queries - before.cache_queries == (uint64_t)cases[i].prompt &&
                  after.prompt_tokens - before.prompt_tokens == (uint64_t)cases[i].prompt,
              cases[i].name, "%d cached, %d hits of %d", k->cached, (int)(after.cache_hits - before.cache_hits),
              (int)(after.cache_queries - before.cache_queries));
    }
    fill(&many[1], 1, 300, 300, 20);
    many[1].rq.salt = 5;
    check(run_one_request(b, &many[1]) && many[1].cached == 0, "another salt finds nothing", "%d", many[1].cached);
    fill(&many[1], 1, 300, 300, 20);
    many[1].rq.salt = 5;
    check(run_one_request(b, &many[1]) && many[1].cached == 256, "the same salt does", "%d", many[1].cached);
}

/* The pages of one that runs serve another; four that come at once compute their prompt once. */
static void test_running(nmk_batch *b) {
    nmk_err e = {0};
    fill(&many[0], 2, 400, 400, 200);
    many[0].hold_at = 3;
    int rc = submit(b, &many[0], &e);
    wait_tokens(&many[0], 3);
    fill(&many[1], 2, 400, 450, 20);
    rc |= submit(b, &many[1], &e);
    go_on(&many[0], 0);
    bool good = is_whole(&many[0]);
    good &= is_whole(&many[1]);
    check(rc == 0 && good && many[1].cached == 384, "hits while the first runs", "%d cached", many[1].cached);

    reset(b);
    for (int i = 0; i < 4; i++) {
        fill(&many[i], 3, 500, 500, 20);
        rc |= submit(b, &many[i], &e);
    }
    good = true;
    int cached = 0;
    for (int i = 0; i < 4; i++) good &= is_whole(&many[i]), cached += many[i].cached;
    quiet(b);
    check(rc == 0 && good && cached == 3 * 448 && fed_positions() == 499 + 3 * (499 - 448),
          "the same prompt four times at once is computed once", "%d cached, %d fed", cached, fed_positions());
}

/* The second turn of a chat: the first prompt, the answer, and more. */
static void next_turn(client *next, const client *k, int more, int max_tokens) {
    int n = k->rq.prompt_tokens;
    memset(next, 0, sizeof *next);
    memcpy(next->prompt, k->prompt, sizeof *k->prompt * (size_t)n);
    memcpy(next->prompt + n, k->token, sizeof *k->token * (size_t)k->count);
    n += k->count;
    for (int i = 0; i < more; i++) next->prompt[n++] = 2000 + i;
    next->rq = (nmk_batch_request){.prompt_tokens = n, .max_tokens = max_tokens};
}

static void test_chat(nmk_batch *b) {
    nmk_err e = {0};
    fill(&many[0], 4, 150, 150, 180);
    bool good = run_one_request(b, &many[0]);
    next_turn(&many[1], &many[0], 30, 40);
    /* 149 + 180 positions were computed, 320 of them in full pages */
    int rc = submit(b, &many[1], &e);
    bool ended = wait_end(&many[1]);
    check(good && rc == 0 && ended && many[1].cached == 320 && many[1].count == 40 && says(&many[1], 149, 320),
          "the next turn of a chat finds the answer's pages", "%d cached", many[1].cached);
    next_turn(&many[2], &many[0], 30, 40);
    many[2].rq.exact = true;
    check(run_one_request(b, &many[2]) && many[2].cached == 128, "an exact request uses no generated tokens",
          "%d cached", many[2].cached);
    next_turn(&many[2], &many[0], 30, 40);
    many[2].rq.exact = true;
    check(run_one_request(b, &many[2]) && many[2].cached == 320, "but what another exact one computed", "%d cached",
          many[2].cached);
}

/* ---- little memory ---- */

static void test_eviction(void) {
    nmk_engine *g;
    nmk_batch *b;
    if (!open_batch(&g, &b, bytes_for(24, 16))) return;
    int good = 0, hits = 0;
    for (int i = 0; i < 60; i++) {
        int family = draw(4), common = 64 * (1 + draw(4)) + draw(20);
        fill(&many[0], 10 + family, common, common + 1 + draw(150), 1 + draw(40));
        good += run_one_request(b, &many[0]);
        hits += many[0].cached > 0;
    }
    check(good == 60 && hits > 5, "texts are right while pages come and go", "%d of 60, %d hits; %d and %d pages", good,
          hits, g->kv.pages[0], g->kv.pages[1]);
    check_given_back(b, g);
    nmk_batch_close(b);
}

/* A large max_tokens takes no pages before it uses them. */
static void test_demand(void) {
    nmk_err e = {0};
    nmk_engine *g;
    nmk_batch *b;
    if (!open_batch(&g, &b, bytes_for(24, 32))) return;
    int rc = 0;
    for (int i = 0; i < NMK_COLUMNS; i++) {
        fill(&many[i], 0, 0, 10, MAX_LEN - 10);
        rc |= submit(b, &many[i], &e);
    }
    bool all = wait_load(b, NMK_COLUMNS, 0);
    all &= wait_tokens(&many[0], 5);
    for (int i = 1; i < NMK_COLUMNS; i++) all &= wait_tokens(&many[i], 5);
    nmk_batch_stats s;
    nmk_batch_read_stats(b, &s);
    check(rc == 0 && all && s.running == NMK_COLUMNS && s.kv_used > 0 && s.kv_used < 0.9,
          "rows that may grow to the whole context run side by side", "%d run, %g used: %s", s.running, s.kv_used,
          e.text);
    for (int i = 0; i < NMK_COLUMNS; i++) nmk_batch_cancel(b, many[i].id);
    for (int i = 0; i < NMK_COLUMNS; i++) all &= wait_end(&many[i]);
    check_given_back(b, g);
    nmk_batch_close(b);
    if (!open_batch(&g, &b, bytes_for(20, 12))) return;

    /* a prompt that has no room beside the others waits, and a short one behind it does not overtake it */
    fill(&many[0], 0, 0, 1000, 20);
    many[0].hold_at = 2;
    rc = submit(b, &many[0], &e);
    all = wait_tokens(&many[0], 2);
    fill(&many[1], 0, 0, 900, 20), fill(&many[2], 0, 0, 5, 20);
    rc |= submit(b, &many[1], &e) | submit(b, &many[2], &e);
    go_on(&many[0], 15);
    all &= wait_tokens(&many[0], 15);
    nmk_batch_read_stats(b, &s);
    check(rc == 0 && all && s.running == 1 && s.waiting == 2, "a prompt without room holds up those behind it",
          "%d run, %d wait", s.running, s.waiting);
    go_on(&many[0], 0);
    bool good = is_whole(&many[0]);
    good &= is_whole(&many[1]);
    good &= is_whole(&many[2]);
    check(good, "until it has it", "a text is wrong");
    check_given_back(b, g);
    nmk_batch_close(b);
    if (!open_batch(&g, &b, bytes_for(8, 4))) return;
    fill(&many[0], 0, 0, 500, MAX_LEN - 500);
    check_message(submit(b, &many[0], &e), &e, "not so much memory for keys and values",
                  "what can never fit is refused");
    nmk_batch_close(b);
}

/* Two rows share a pool that both fill, each half of it.  The second needs a page when the first ends, `early` steps
 * before or after: it is preempted, or was lucky, with steps in flight whose tokens nobody reads any more. */
static int preempted_at(int early) {
    enum { HALF = 8 };
    nmk_err e = {0};
    nmk_engine *g;
    nmk_batch *b;
    options.kv_bytes = bytes_for(2 * HALF, 8);
    if (nmk_engine_open(&g, &options, &e) || nmk_batch_open(&b, g, 0, &e)) return check(false, "opens", "%s", e.text);
    fill(&many[0], 0, 0, 1, HALF * PAGE - early), fill(&many[1], 0, 0, 1, HALF * PAGE + 100);
    many[0].rq.exact = many[1].rq.exact = true;
    many[0].rq.client = 1;
    int rc = submit(b, &many[0], &e) | submit(b, &many[1], &e);
    bool good = is_whole(&many[0]);
    good &= is_whole(&many[1]);
    nmk_batch_stats s = quiet(b);
    good &= rc == 0 && g->kv.pages[0] == 2 * HALF && kv_is_given_back(&g->kv) &&
            s.tokens == (uint64_t)(2 * HALF * PAGE + 100 - early);
    nmk_batch_close(b);
    return good ? (int)s.preemptions : -100;
}

static void test_preemption(void) {
    int preemptions = 0;
    for (int early = -3; early <= 9; early += 2) preemptions += preempted_at(early);
    check(preemptions >= 3 && preemptions <= 7, "a row that lost its pages says what it would have said", "%d did",
          preemptions);
}

/* A row that went on behind generated pages of another loses them, and computes them again as they were. */
static void test_preempted_chat(void) {
    nmk_err e = {0};
    nmk_engine *g;
    nmk_batch *b;
    if (!open_batch(&g, &b, bytes_for(18, 8))) return;
    fill(&many[0], 4, 150, 150, 180);
    bool good = run_one_request(b, &many[0]);
    next_turn(&many[1], &many[0], 30, 600);
    /* older, and it grows until two pages are left for others */
    fill(&many[2], 0, 0, 1, 16 * PAGE - 1);
    many[2].hold_at = 1;
    int rc = submit(b, &many[2], &e);
    wait_tokens(&many[2], 1);
    rc |= submit(b, &many[1], &e);
    seen_count = 0;
    go_on(&many[2], 0);
    good &= is_whole(&many[2]);
    bool ended = wait_end(&many[1]);
    nmk_batch_stats s = quiet(b);
    int again = 0; /* positions of the prompt that were not fed in chunks */
    for (int i = 0; i < seen_count; i++)
        again += !(seen[i].flags & 1) && seen[i].pos >= 149 && seen[i].pos < 320 && seen[i].base == seen[i].pos;
    check(rc == 0 && good && ended && many[1].cached == 320 && many[1].count == 600 && says(&many[1], 149, 320) &&
              s.preemptions == 1 && again == 320 - 149,
          "one that used generated pages does not notice their loss",
          "%d cached, %d preemptions, %d computed again: %s", many[1].cached, (int)s.preemptions, again, e.text);
    check_given_back(b, g);
    nmk_batch_close(b);
}

/* Random requests that together need many times the pages there are. */
static void test_storm(int round) {
    nmk_err e = {0};
    nmk_engine *g;
    nmk_batch *b;
    /* long answers in rows that find a window's pages but not a whole sequence's, or prompts of all sizes */
    bool grows = round < 3;
    if (!open_batch(&g, &b, grows ? bytes_for(30 + draw(10), 24) : bytes_for(16 + draw(14), 10 + draw(10)))) return;
    int rc = 0, good = 0, cancels = 0, count = 14 + draw(MANY - 14);
    for (int i = 0; i < count; i++) {
        client *k = &many[i];
        int prompt = 1 + draw(!grows ? 500 : draw(4) ? 60 : 300), common = draw(3) ? prompt - draw(prompt) : 0;
        fill(k, 20 + draw(3), common, prompt, 1 + draw(grows ? 700 : 100));
        k->rq.exact = true, k->rq.client = (uint64_t)draw(3);
        if (round % 2 && draw(3) == 0) k->cancel_after = 1 + draw(k->rq.max_tokens);
        rc |= submit(b, k, &e);
        if (draw(4) == 0) usleep((useconds_t)draw(3000));
    }
    for (int i = 0; round % 2 && i < count; i += 5) {
        usleep((useconds_t)draw(4000));
        nmk_batch_cancel(b, many[i].id);
    }
    for (int i = 0; i < count; i++) {
        client *k = &many[i];
        bool ended = wait_end(k) && k->ends == 1 && k->starts <= 1 && says(k, 0, 0);
        if (ended && k->end == NMK_BATCH_CANCEL && round % 2)
            good++, cancels++;
        else
            good += ended && k->end == NMK_BATCH_LENGTH && k->count == k->rq.max_tokens && k->starts == 1;
    }
    nmk_batch_stats s = quiet(b);
    check(rc == 0 && good == count, "a storm: each says what it would alone", "round %d: %d of %d: %s", round, good,
          count, e.text);
    printf("# %d requests, %d cancelled, %d and %d pages, %d preemptions, %d hits, %d steps\n", count, cancels,
           g->kv.pages[0], g->kv.pages[1], (int)s.preemptions, (int)s.cache_hits, (int)s.steps);
    check_given_back(b, g);
    nmk_batch_close(b);
}

/* One request is cancelled after 0, 1, 2 .. steps of others. */
static void test_cancel_anywhen(void) {
    nmk_err e = {0};
    nmk_engine *g;
    nmk_batch *b;
    if (!open_batch(&g, &b, bytes_for(18, 12))) return;
    int good = 0, rc = 0, rounds = 120;
    for (int i = 0; i < rounds; i++) {
        nmk_batch_stats s, before = quiet(b);
        for (int j = 0; j < 3; j++) {
            fill(&many[j], 30 + j, 200 * (i % 2), 250, 30);
            many[j].rq.exact = true;
            rc |= submit(b, &many[j], &e);
        }
        do nmk_batch_read_stats(b, &s);
        while (s.steps < before.steps + (uint64_t)i && (s.running || s.waiting));
        nmk_batch_cancel(b, many[i % 3].id);
        for (int j = 0; j < 3; j++) {
            bool ended = wait_end(&many[j]) && many[j].ends == 1 && says(&many[j], 0, 0);
            good += ended && (many[j].end == NMK_BATCH_LENGTH || (j == i % 3 && many[j].end == NMK_BATCH_CANCEL));
        }
        if (kv_sound(&g->kv)) good = -10000;
    }
    check(rc == 0 && good == 3 * rounds, "cancelled at every moment", "%d of %d: %s", good, 3 * rounds, e.text);
    check_given_back(b, g);
    nmk_batch_close(b);
}

/* ---- the queue ---- */

static int start_order[MANY], start_count;

static void note_start(void *user, int cached_tokens) {
    client_start(user, cached_tokens);
    pthread_mutex_lock(&clients);
    start_order[start_count++] = (int)((client *)user - many);
    pthread_mutex_unlock(&clients);
}

static void test_fair(nmk_batch *b) {
    nmk_err e = {0};
    /* requests 0 to 7, each of its own client, have rows that become free one after the other.  The others' clients, and
     * the rounds: 8 14 18, 9 15 19, 10 16, 11 17, 12, 13 */
    static const int of[12] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3};
    static const int want[12] = {8, 14, 18, 9, 15, 19, 10, 16, 11, 17, 12, 13};
    int rc = 0, right = 0;
    quiet(b);
    start_count = 0;
    for (int i = 0; i < 20; i++) {
        fill(&many[i], 0, 0, 1, i < 8 ? 30 + 40 * i : 400);
        if (i == 0) many[i].hold_at = 1;
        many[i].rq.client = i < 8 ? 100 + (uint64_t)i : (uint64_t)of[i - 8];
        many[i].rq.on_start = note_start;
        rc |= submit(b, &many[i], &e);
        if (i == 0) wait_tokens(&many[0], 1);
    }
    go_on(&many[0], 0);
    bool good = true;
    for (int i = 0; i < 20; i++) good &= is_whole(&many[i]);
    for (int i = 0; i < 12; i++) right += start_order[8 + i] == want[i];
    check(rc == 0 && good && start_count == 20 && right == 12, "clients take turns", "%d of %d in order: %s", right,
          start_count, e.text);
}

/* A client that comes again as soon as it is served does not hold up another's. */
static void test_fair_again(nmk_batch *b) {
    nmk_err e = {0};
    static const int want[6] = {8, 12, 9, 13, 10, 11};
    int rc = 0, right = 0;
    quiet(b);
    start_count = 0;
    for (int i = 0; i < 13; i++) {
        fill(&many[i], 0, 0, 1, i < 8 ? 30 + 40 * i : 400);
        if (i == 0 || i == 12) many[i].hold_at = 1;
        many[i].rq.client = i < 8 ? 100 + (uint64_t)i : i < 12 ? 1 : 2;
        many[i].rq.on_start = note_start;
        rc |= submit(b, &many[i], &e);
        if (i == 0) wait_tokens(&many[0], 1);
    }
    go_on(&many[0], 0);
    bool good = wait_tokens(&many[12], 1);
    fill(&many[13], 0, 0, 1, 10);
    many[13].rq.client = 2, many[13].rq.on_start = note_start;
    rc |= submit(b, &many[13], &e);
    go_on(&many[12], 0);
    for (int i = 0; i < 14; i++) good &= is_whole(&many[i]);
    for (int i = 0; i < 6; i++) right += start_order[8 + i] == want[i];
    check(rc == 0 && good && start_count == 14 && right == 6, "also who comes again", "%d of %d in order: %s", right,
          start_count, e.text);
}

/* ---- failures ---- */

static void test_hang(nmk_batch *b) {
    nmk_err e = {0};
    fill(&many[0], 40, 300, 300, 20);
    bool good = run_one_request(b, &many[0]);
    fake.hang_at = steps_run + 10;
    fill(&many[1], 40, 300, 310, 20);
    int rc = submit(b, &many[1], &e);
    good &= wait_end(&many[1]) && many[1].end == NMK_BATCH_FAILED && many[1].cached == 256;
    quiet(b);
    fake.hang_at = 0;
    fill(&many[2], 40, 300, 310, 20);
    check(rc == 0 && good && run_one_request(b, &many[2]) && many[2].cached == 0, "after a hang nothing is cached",
          "%d cached", many[2].cached);
}

/* A request whose numbers are none fails alone, and leaves nothing behind. */
static void test_poison(nmk_batch *b, nmk_engine *g) {
    nmk_err e = {0};
    spoiled = true;
    fill(&many[0], 41, 200, 200, 100), fill(&many[1], 41, 200, 230, 20);
    many[0].hold_at = 5;
    int rc = submit(b, &many[0], &e);
    wait_tokens(&many[0], 5);
    many[1].prompt[229] = NO_TOKEN;
    rc |= submit(b, &many[1], &e);
    go_on(&many[0], 0);
    bool failed = wait_end(&many[1]) && many[1].end == NMK_BATCH_FAILED && many[1].cached == 192;
    bool good = is_whole(&many[0]);
    quiet(b);
    spoiled = false;
    check(rc == 0 && failed && good && strstr(many[1].message, "in place of a token"),
          "a request without numbers fails, its neighbour goes on", "end %d: %s", many[1].end, many[1].message);
    check(g->kv.free_count[0] == g->kv.pages[0] && g->kv.free_count[1] == g->kv.pages[1], "nothing of them is kept",
          "%d and %d are free", g->kv.free_count[0], g->kv.free_count[1]);
    fill(&many[2], 41, 200, 250, 20);
    check(run_one_request(b, &many[2]) && many[2].cached == 0, "the next computes all", "%d cached", many[2].cached);
}

/* Prompts that steps feed, or chunks. */
static bool test_all(bool chunks) {
    nmk_engine *g;
    nmk_batch *b;
    options.no_prefill = !chunks;
    printf("# prompts are fed by %s\n", chunks ? "chunks" : "steps");
    if (!open_batch(&g, &b, 0)) return false;
    test_hits(b);
    test_running(b);
    test_chat(b);
    test_fair(b);
    test_fair_again(b);
    test_hang(b);
    test_poison(b, g);
    check_given_back(b, g);
    nmk_batch_close(b);
    test_eviction();
    test_demand();
    test_preemption();
    test_preempted_chat();
    for (int round = 0; round < 6; round++) test_storm(round);
    test_cancel_anywhen();
    return true;
}

int main(int argc, char **argv) {
    nmk_err e = {0};
    seed = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 0) : (uint32_t)nmk_now_ns() ^ (uint32_t)getpid();
    printf("# seed %u\n", seed);
    if (fake_install(&e)) return puts(e.text), 2;
    if (!test_all(false) || !test_all(true)) return 1;
    free(self);
    return failures != 0;
}
