/* Prompts in launches of their own, on a GPU made up of host memory: who is in which chunk, how long chunks are beside
 * rows that decode, hangs.  tests/server/batch_cache.c does the pages, tests/runtime/prefill_cpu.c the numbers. */
#include "batch.h"

#include <math.h>

#include "runtime/fake_gpu.h"
#include "server/batch_helper.h"

enum { MANY = 10, MAX_LEN = 2048, BUDGET_MS = 20 };

static const double STEP_MS = 1.5;
static bool mixed; /* the engine's launches */

static client many[MANY];

/* Nothing that others computed is of use to it, unless it gets their salt. */
static void fill(client *k, int number, int prompt_tokens, int max_tokens) {
    static uint64_t salt;
    memset(k, 0, sizeof *k);
    for (int i = 0; i < prompt_tokens; i++) k->prompt[i] = 100 + number * 300 + i % 250;
    k->rq = (nmk_batch_request){.prompt_tokens = prompt_tokens, .max_tokens = max_tokens, .salt = ++salt};
}

static bool is_whole(client *k) {
    const int32_t last = k->prompt[k->rq.prompt_tokens - 1];
    bool good = wait_end(k) && k->ends == 1 && k->end == NMK_BATCH_LENGTH && k->count == k->rq.max_tokens;
    for (int i = 0; i < k->count; i++) good &= k->token[i] == last + 1 + i;
    return good;
}

static nmk_batch_stats quick_stats(nmk_batch *b) {
    nmk_batch_stats s;
    nmk_batch_read_stats(b, &s);
    return s;
}

static void reset(nmk_batch *b) {
    quiet(b);
    seen_count = seen_chunks = 0;
}

/* Chunks as the kernel wants them: spans one after the other, each from another row, going on where it stood. */
static int bad_chunks(void) {
    int bad = 0;
    for (int i = 0; i < seen_chunks; i++) {
        int tokens = 0;
        bool used[NMK_ROWS] = {0}, good = seen_chunk[i].spans > 0;
        for (int s = 0; s < seen_chunk[i].spans; s++) {
            const nmk_span *span = &seen_chunk[i].span[s];
            good &= span->first == tokens && span->count > 0 && span->slot >= 0 && span->slot < nmk_rows;
            good &= !used[span->slot];
            used[span->slot] = true, tokens += span->count;
        }
        bad += !(good && tokens == seen_chunk[i].tokens && tokens <= nmk_prefill->prefill_tokens);
    }
    return bad;
}

static int fed(void) {
    int tokens = 0;
    for (int i = 0; i < seen_chunks; i++) tokens += seen_chunk[i].tokens;
    return tokens;
}

/* Holds the batch in a first token while requests come, so that they come together. */
static int submit_together(nmk_batch *b, int first, int count) {
    nmk_err e = {0};
    many[0].hold_at = 1;
    int rc = submit(b, &many[0], &e);
    wait_tokens(&many[0], 1);
    for (int i = 0; i < count; i++) rc |= submit(b, &many[first + i], &e);
    go_on(&many[0], 0);
    return rc;
}

static void test_alone(nmk_batch *b) {
    nmk_err e = {0};
    reset(b);
    fill(&many[0], 0, 1000, 5);
    int rc = submit(b, &many[0], &e);
    check(rc == 0 && is_whole(&many[0]) && seen_chunks == 1 && fed() == 999, "a prompt is one chunk", "%d chunks of %d",
          seen_chunks, fed());
    fill(&many[0], 0, 1, 5);
    reset(b);
    rc = submit(b, &many[0], &e);
    check(rc == 0 && is_whole(&many[0]) && seen_chunks == 0, "of one token is none", "%d", seen_chunks);
}

static void test_packed(nmk_batch *b) {
    reset(b);
    fill(&many[0], 0, 1, 1);
    for (int i = 1; i < 6; i++) fill(&many[i], i, 150 + i, 4);
    int rc = submit_together(b, 1, 5);
    bool good = true;
    for (int i = 0; i < 6; i++) good &= is_whole(&many[i]);
    check(rc == 0 && good && bad_chunks() == 0 && seen_chunks == 1 && seen_chunk[0].spans == 5, "prompts share a chunk",
          "%d chunks, the first of %d spans", seen_chunks, seen_chunk[0].spans);
}

/* What is cached is not fed again; who begins like another waits for its pages. */
static void test_alike(nmk_batch *b) {
    reset(b);
    fill(&many[0], 0, 1, 1);
    fill(&many[1], 7, 400, 4), fill(&many[2], 7, 400, 4), fill(&many[3], 8, 200, 4);
    many[2].rq.salt = many[1].rq.salt;
    int rc = submit_together(b, 1, 3);
    bool good = true;
    for (int i = 0; i < 4; i++) good &= is_whole(&many[i]);
    check(rc == 0 && good && bad_chunks() == 0 && many[2].cached + many[1].cached == 384 && fed() == 399 + 15 + 199,
          "two that begin alike are computed once", "%d and %d cached, %d fed", many[1].cached, many[2].cached, fed());
}

/* A machine on which tokens further on cost more. */
static double slow_ms(const nmk_span *span, int spans) {
    double ms = spans ? 10 : STEP_MS;
    for (int i = 0; i < spans; i++) ms += 0.02 * span[i].count * (1 + (span[i].pos + span[i].count / 2) * 0.0005);
    return ms;
}

/* Rows decode while long prompts are fed: chunks within the budget once it is known how long they take, and between
 * them as many steps as decoding is to have. */
static void test_budget(nmk_batch *b, int share) {
    nmk_err e = {0};
    int rc = 0, filled = 0, before = 0, together = 0;
    double chunk_ms = 0, step_ms = 0, longest_ms = 0;
    bool good = true;
    reset(b);
    nmk_batch_set_budget(b, BUDGET_MS), nmk_batch_set_share(b, share);
    fake_ms = slow_ms;
    for (int i = 0; i < 4; i++) {
        fill(&many[i], i, 1, MOST_TOKENS - 1);
        if (i == 0) many[i].hold_at = 20;
        rc |= submit(b, &many[i], &e);
    }
    wait_tokens(&many[0], 20);
    for (int i = 4; i < 8; i++) {
        fill(&many[i], i, 1000, 30);
        rc |= submit(b, &many[i], &e);
    }
    const nmk_batch_stats old = quick_stats(b);
    const int mixed_before = mixed_launches;
    go_on(&many[0], 0);
    for (int i = 0; i < 8; i++) good &= is_whole(&many[i]);
    const nmk_batch_stats new = quiet(b);
    for (int i = 0; i < seen_chunks; i++) {
        together += i && seen_chunk[i].step == before + 1;
        if (i) step_ms += STEP_MS * (seen_chunk[i].step - before - 1), chunk_ms += seen_chunk[i - 1].ms;
        before = seen_chunk[i].step;
        if (i > 2 && seen_chunk[i].ms > longest_ms) longest_ms = seen_chunk[i].ms;
        filled += seen_chunk[i].ms > BUDGET_MS * 0.85;
    }
    const double part = step_ms / (step_ms + chunk_ms) * 100;
    check(rc == 0 && good && fed() == 4 * 999 && bad_chunks() == 0, "prompts are fed beside rows that decode", "%d: %s",
          fed(), e.text);
    check(mixed_launches - mixed_before == (mixed ? seen_chunks : 0), "each chunk in the way that was chosen",
          "%d of %d", mixed_launches - mixed_before, seen_chunks);
    check(together == 0, "which never wait for two chunks", "%d", together);
    check(longest_ms < BUDGET_MS * 1.1 && filled >= seen_chunks - 5, "nor longer than the budget",
          "%.1f ms, %d of %d as long as it allows", longest_ms, filled, seen_chunks);
    check(share ? part >= share && part < share + 6 : part < 15, "and keep their share", "%.1f %% of %d", part, share);
    const double told = 100 * (new.step_beside_ms - old.step_beside_ms) /
                        (new.step_beside_ms - old.step_beside_ms + new.chunk_beside_ms - old.chunk_beside_ms);
    check((int)(new.chunks - old.chunks) == seen_chunks && (int)(new.chunk_tokens - old.chunk_tokens) == fed() &&
              fabs(told - part) < 5,
          "as the figures say", "%d of %d chunks, %.1f of %.1f %%", (int)(new.chunks - old.chunks), seen_chunks, told,
          part);
    fake_ms = fake_launch_ms;
    nmk_batch_set_budget(b, NMK_BATCH_BUDGET_MS), nmk_batch_set_share(b, NMK_BATCH_SHARE);
}

/* The chunk that ends the prompt of a row, counted from 0. */
static int chunk_of(const client *k, int slot) {
    int fed_to = 0, i = 0;
    for (; i < seen_chunks && fed_to < k->rq.prompt_tokens - 1; i++)
        for (int s = 0; s < seen_chunk[i].spans; s++)
            if (seen_chunk[i].span[s].slot == slot) fed_to = seen_chunk[i].span[s].pos + seen_chunk[i].span[s].count;
    return i - 1;
}

/* A short prompt that came after long ones is fed beside the first of them; that one takes a little longer only, and
 * the long ones keep their order. */
static void test_short(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0;
    bool good = true;
    reset(b);
    nmk_batch_set_budget(b, BUDGET_MS);
    fill(&many[0], 0, 1, 1000);
    many[0].hold_at = 20;
    rc |= submit(b, &many[0], &e);
    wait_tokens(&many[0], 20);
    static const int tokens[] = {1000, 1000, 100, 1000};
    for (int i = 0; i < 4; i++) {
        fill(&many[1 + i], 1 + i, tokens[i], 5);
        rc |= submit(b, &many[1 + i], &e);
    }
    go_on(&many[0], 0);
    for (int i = 0; i < 5; i++) good &= is_whole(&many[i]);
    const int ended[4] = {chunk_of(&many[1], 1), chunk_of(&many[2], 2), chunk_of(&many[3], 3), chunk_of(&many[4], 4)};
    check(rc == 0 && good && bad_chunks() == 0 && ended[2] <= 2 && ended[2] < ended[0],
          "a short prompt does not wait for a long one", "in chunk %d, the first in %d", ended[2], ended[0]);
    check(ended[0] < ended[1] && ended[1] <= ended[3] && seen_chunk[0].spans == 2 && seen_chunk[0].span[1].slot == 1 &&
              seen_chunk[0].span[1].count >= 3 * seen_chunk[0].span[0].count,
          "which is fed first all the same", "chunks %d, %d, %d; %d beside %d tokens", ended[0], ended[1], ended[3],
          seen_chunk[0].span[1].count, seen_chunk[0].span[0].count);
    nmk_batch_set_budget(b, NMK_BATCH_BUDGET_MS);
}

/* Nobody decodes: prompts take whole chunks, one after the other. */
static void test_idle(nmk_batch *b) {
    nmk_err e = {0};
    const int most = nmk_prefill->prefill_tokens;
    reset(b);
    nmk_batch_set_budget(b, 1);
    fill(&many[0], 0, 1, 1);
    for (int i = 1; i < 4; i++) fill(&many[i], i, 1000, 4);
    int rc = submit_together(b, 1, 3);
    bool good = true;
    for (int i = 0; i < 4; i++) good &= is_whole(&many[i]);
    check(rc == 0 && good && bad_chunks() == 0 && seen_chunk[0].tokens == most && seen_chunk[1].tokens < most,
          "alone prompts take whole chunks", "%d and %d tokens of %d: %s", seen_chunk[0].tokens, seen_chunk[1].tokens,
          most, e.text);
    nmk_batch_set_budget(b, NMK_BATCH_BUDGET_MS);
}

static void test_cancel(nmk_batch *b) {
    nmk_err e = {0};
    reset(b);
    nmk_batch_set_budget(b, 1); /* so many chunks that the last is not queued before anybody sees the first */
    fill(&many[0], 0, 1, 200), fill(&many[1], 5, 2000, 5);
    many[0].hold_at = 10;
    int rc = submit(b, &many[0], &e);
    wait_tokens(&many[0], 10);
    rc |= submit(b, &many[1], &e);
    for (int at = 11; at < 200 && !seen_chunks; at++) go_on(&many[0], at), wait_tokens(&many[0], at);
    nmk_batch_cancel(b, many[1].id);
    go_on(&many[0], 0);
    bool ended = wait_end(&many[1]);
    check(rc == 0 && ended && many[1].end == NMK_BATCH_CANCEL && many[1].count == 0 && fed() < 1999,
          "cancelled while its prompt is fed", "end %d, %d tokens, %d fed", many[1].end, many[1].count, fed());
    check(is_whole(&many[0]), "its neighbour goes on", "end %d, %d tokens", many[0].end, many[0].count);
    fill(&many[2], 9, 300, 5);
    rc = submit(b, &many[2], &e);
    check(rc == 0 && is_whole(&many[2]), "and the next is served", "end %d", many[2].end);
    nmk_batch_set_budget(b, NMK_BATCH_BUDGET_MS);
}

/* A chunk that hangs: the step behind it says so, and names the task. */
static void test_hang(nmk_batch *b) {
    nmk_err e = {0};
    for (int silent = 0; silent < 2; silent++) {
        reset(b);
        fill(&many[0], 11 + silent, 500, 5);
        fake.hang_at = steps_run + 1, fake.silent = silent;
        int rc = submit(b, &many[0], &e);
        bool ended = wait_end(&many[0]);
        quiet(b);
        fake.hang_at = 0, fake.silent = false;
        check(rc == 0 && ended && many[0].end == NMK_BATCH_FAILED &&
                  strstr(many[0].message, silent ? "task 0" : "SM 17, role compute, task 1 (layer0.prefill_norm)"),
              silent ? "a chunk that hangs without a record" : "a chunk that hangs", "end %d: %s", many[0].end,
              many[0].message);
        fill(&many[1], 11 + silent, 500, 5);
        many[1].rq.salt = many[0].rq.salt;
        rc = submit(b, &many[1], &e);
        const bool whole = is_whole(&many[1]);
        check(rc == 0 && whole && many[1].cached == 0, "nothing of it is used, and the next is served",
              "end %d, %d cached: %s", many[1].end, many[1].cached, many[1].message);
    }
}

static void test_mode(nmk_prefill_mode mode) {
    nmk_err e = {0};
    nmk_engine *g;
    nmk_batch *b;
    nmk_options o = {.random_weights = true, .device = "cuda:0", .max_len = MAX_LEN, .prefill_mode = mode};
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "the engine opens", "%s", e.text)) return;
    if (!check(nmk_batch_open(&b, g, 0, &e) == 0, "the batch opens", "%s", e.text)) return;
    mixed = mode == NMK_PREFILL_MIXED;
    printf("# %s\n", mixed ? "mixed" : "alternating");
    test_alone(b);
    test_packed(b);
    test_alike(b);
    static const int shares[] = {0, 40, 80, NMK_BATCH_SHARE};
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) test_budget(b, shares[i]);
    test_short(b);
    test_idle(b);
    test_cancel(b);
    test_hang(b);
    nmk_batch_close(b);
}

int main(void) {
    nmk_err e = {0};
    if (fake_install(&e)) return puts(e.text), 2;
    test_mode(NMK_PREFILL_ALTERNATE);
    test_mode(NMK_PREFILL_MIXED);
    free(self);
    return failures != 0;
}
