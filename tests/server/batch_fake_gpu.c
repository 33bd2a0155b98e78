/* Continuous batching on a GPU made up of host memory: what each step computes, who takes turns, hangs, the loss
 * of the engine. */
#include "batch.h"
#include "tasks.h"

#include "runtime/fake_gpu.h"
#include "server/batch_helper.h"

enum { MANY = 14, CHUNK = NMK_COLUMNS / 2, MAX_LEN = 640 };

static client many[MANY];

/* Nothing that others computed is of use to it. */
static void fill(client *k, int number, int prompt_tokens, int max_tokens) {
    static uint64_t salt;
    memset(k, 0, sizeof *k);
    for (int i = 0; i < prompt_tokens; i++) k->prompt[i] = 100 + number * 200 + i % 150;
    k->rq = (nmk_batch_request){.prompt_tokens = prompt_tokens, .max_tokens = max_tokens, .salt = ++salt};
}

static bool counts_up(const client *k) {
    int32_t last = k->prompt[k->rq.prompt_tokens - 1];
    bool good = true;
    for (int i = 0; i < k->count; i++) good &= k->token[i] == last + 1 + i;
    return good;
}

static bool is_whole(client *k) {
    return wait_end(k) && k->ends == 1 && k->end == NMK_BATCH_LENGTH && k->count == k->rq.max_tokens && counts_up(k);
}

/* Of all steps seen: a group is the consecutive positions of one row, from a multiple of CHUNK if they are fed, alone
 * if they decode; no position past what the longest request may have. */
static int bad_columns(int most) {
    int bad = 0;
    for (int i = 0; i < seen_count; i++) {
        const nmk_column *c = &seen[i];
        int column = seen_at[i].column;
        bool good = c->slot >= 0 && c->slot < nmk_rows && c->pos < most && c->remaining >= 1;
        if (c->flags & 1)
            good &= c->base == c->pos && c->group == column;
        else
            good &= c->base % CHUNK == 0 && c->group == column / CHUNK * CHUNK && c->pos == c->base + column % CHUNK;
        for (int j = i + 1; j < seen_count && seen_at[j].step == seen_at[i].step; j++)
            good &= (seen[j].slot == c->slot) == (seen[j].group == c->group);
        bad += !good;
    }
    return bad;
}

static void reset(nmk_batch *b) {
    quiet(b);
    seen_count = 0, most_queued_steps = 0;
}

static void test_many(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0, good = 0;
    reset(b);
    for (int i = 0; i < MANY; i++) {
        fill(&many[i], i, 1 + 7 * i, 20 + 9 * (i % 5));
        rc |= submit(b, &many[i], &e);
        if (i % 3 == 2) usleep(500);
    }
    for (int i = 0; i < MANY; i++) good += is_whole(&many[i]);
    quiet(b);
    check(rc == 0 && good == MANY, "rows join and leave", "%d of %d: %s", good, MANY, e.text);
    check(bad_columns(92 + 56) == 0 && seen_count < MOST_SEEN, "columns are as the kernel wants them",
          "%d of %d are not", bad_columns(92 + 56), seen_count);
}

/* Seven rows decode while a long prompt is fed. */
static void test_turns(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0, last[NMK_COLUMNS] = {0}, most_rest = 0, fed = 0, first = 0, end = 0, tokens = 0;
    bool good = true;
    reset(b);
    for (int i = 0; i < 7; i++) {
        fill(&many[i], i, 1, 300);
        if (i == 0) many[i].hold_at = 1;
        rc |= submit(b, &many[i], &e);
    }
    go_on(&many[0], 30);
    wait_tokens(&many[0], 30);
    fill(&many[7], 7, 201, 30);
    rc |= submit(b, &many[7], &e);
    go_on(&many[0], 0);
    for (int i = 0; i < 8; i++) good &= is_whole(&many[i]);
    quiet(b);
    for (int i = 0; i < seen_count; i++)
        if (!(seen[i].flags & 1)) first = first ? first : seen_at[i].step, end = seen_at[i].step, fed++;
    for (int i = 0; i < seen_count; i++) {
        int slot = seen[i].slot, step = seen_at[i].step;
        if (!(seen[i].flags & 1) || step > end) continue;
        if (step > first && step - last[slot] - 1 > most_rest) most_rest = step - last[slot] - 1;
        tokens += step >= first;
        last[slot] = step;
    }
    check(rc == 0 && good && fed == 200 && end - first + 1 == 200 / CHUNK, "a prompt is fed beside seven rows",
          "%d positions in %d steps: %s", fed, end - first + 1, e.text);
    check(most_rest == 1 && tokens == (end - first + 1) * CHUNK, "which take turns: none rests for two steps in a row",
          "%d steps, %d tokens in %d steps", most_rest, tokens, end - first + 1);
    check(bad_columns(300) == 0, "in columns as the kernel wants them", "%d", bad_columns(300));
    check(most_queued_steps == 8, "eight steps are in flight where all decode", "%d", most_queued_steps);
}

/* Three rows that are left of eight, wherever they are, lose at most one step to a prompt that comes. */
static void test_few(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0, first = 0, end = 0, last[NMK_COLUMNS] = {0}, rests = 0;
    bool good = true;
    reset(b);
    for (int i = 0; i < 8; i++) {
        fill(&many[i], i, 1, i == 0 || i == 4 || i == 7 ? 300 : 10);
        if (i == 0) many[i].hold_at = 1;
        rc |= submit(b, &many[i], &e);
    }
    go_on(&many[0], 50);
    wait_tokens(&many[0], 50);
    fill(&many[8], 8, 101, 30);
    rc |= submit(b, &many[8], &e);
    go_on(&many[0], 0);
    for (int i = 0; i < 9; i++) good &= is_whole(&many[i]);
    quiet(b);
    for (int i = 0; i < seen_count; i++)
        if (!(seen[i].flags & 1)) first = first ? first : seen_at[i].step, end = seen_at[i].step;
    for (int i = 0; i < seen_count; i++) {
        int slot = seen[i].slot, step = seen_at[i].step;
        if (!(seen[i].flags & 1) || step > end) continue;
        if (step >= first && last[slot]) rests += step - last[slot] - 1;
        last[slot] = step;
    }
    check(rc == 0 && good && end - first + 1 == 100 / CHUNK, "a prompt is fed beside three rows", "%d steps: %s",
          end - first + 1, e.text);
    check(rests <= 1, "which rest no more than it takes to move one", "%d steps", rests);
}

static void test_hang(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0, failed = 0, good = 0;
    nmk_batch_stats before = quiet(b), s;
    fake.hang_at = steps_run + 60;
    for (int i = 0; i < 8; i++) {
        fill(&many[i], i, 40 * (i % 3) + 1, 250);
        if (i == 0) many[i].hold_at = 1;
        rc |= submit(b, &many[i], &e);
    }
    for (int i = 8; i < 12; i++) {
        fill(&many[i], i, 11 * i, 25);
        rc |= submit(b, &many[i], &e);
    }
    go_on(&many[0], 0);
    for (int i = 0; i < 12; i++) {
        bool ended = wait_end(&many[i]) && many[i].ends == 1 && counts_up(&many[i]);
        failed +=
            ended && many[i].end == NMK_BATCH_FAILED && strstr(many[i].message, "the kernel hung: SM 17") && i < 8;
        good += ended && many[i].end == NMK_BATCH_LENGTH && i >= 8;
    }
    s = quiet(b);
    check(rc == 0 && failed == 8 && many[0].count > 0 && many[0].count < 60, "a hang fails those that run",
          "%d of 8 failed, %d tokens: %s", failed, many[0].count, many[0].message);
    check(good == 4 && s.failed == before.failed + 8 && !s.lost, "those that wait are served", "%d of 4, %d failed",
          good, (int)(s.failed - before.failed));
    fill(&many[0], 3, 100, 30);
    rc = submit(b, &many[0], &e);
    check(rc == 0 && is_whole(&many[0]), "and those that come later", "%s", e.text);
    fake.hang_at = steps_run + 3, fake.silent = true; /* while a prompt is fed */
    rc = submit(b, &many[0], &e);
    check(rc == 0 && wait_end(&many[0]) && many[0].end == NMK_BATCH_FAILED && many[0].count == 0,
          "a hang while a prompt is fed", "end %d, %d tokens", many[0].end, many[0].count);
    quiet(b);
    fake.hang_at = 0, fake.silent = false;
    rc = submit(b, &many[0], &e);
    check(rc == 0 && is_whole(&many[0]), "the next is served", "%s", e.text);
}

/* A step that was given up did not end the column of a row whose last token it would have brought. */
static void test_hang_at_end(nmk_batch *b) {
    nmk_err e = {0};
    quiet(b);
    fill(&many[0], 0, 1, 200), fill(&many[1], 1, 1, 8), fill(&many[2], 2, 1, 20);
    many[0].hold_at = many[1].hold_at = 1;
    int rc = submit(b, &many[0], &e);
    wait_tokens(&many[0], 1);
    rc |= submit(b, &many[1], &e);
    go_on(&many[0], 0);
    wait_tokens(&many[1], 1);
    fake.hang_at = steps_run + 4;
    go_on(&many[1], 0);
    bool ended = wait_end(&many[0]) && wait_end(&many[1]);
    check(rc == 0 && ended && many[0].end == NMK_BATCH_FAILED && many[1].end == NMK_BATCH_FAILED,
          "a hang with a row's last steps in flight", "%d tokens", many[1].count);
    reset(b);
    fake.hang_at = 0;
    rc = submit(b, &many[2], &e);
    bool whole = is_whole(&many[2]);
    quiet(b);
    check(rc == 0 && whole && seen_count == 20, "nothing of it stays in the columns", "%d columns", seen_count);
}

/* What a trace of tasks came to. */
typedef struct {
    int times, given;
    char why[1024];
} tracer;

static void on_tasks(void *user, nmk_tasks *tasks, const char *why) {
    tracer *t = user;
    pthread_mutex_lock(&clients);
    t->times++, t->given += tasks != NULL;
    snprintf(t->why, sizeof t->why, "%s", why ? why : "");
    pthread_cond_broadcast(&client_news);
    pthread_mutex_unlock(&clients);
    nmk_tasks_free(tasks);
}

static void wait_traced(tracer *t) {
    pthread_mutex_lock(&clients);
    while (!t->times) pthread_cond_wait(&client_news, &clients);
    pthread_mutex_unlock(&clients);
}

static void test_trace(nmk_batch *b) {
    nmk_err e = {0};
    tracer whole = {0}, other = {0}, waits = {0}, few = {0}, hung = {0};
    quiet(b);
    traced_steps = 0;
    check_message(nmk_batch_trace(b, 3, false, on_tasks, &other, &e), &e, "no sequence runs", "no trace of nothing");
    fill(&many[0], 0, 1, 200);
    many[0].hold_at = 1;
    int rc = submit(b, &many[0], &e);
    wait_tokens(&many[0], 1);
    rc |= nmk_batch_trace(b, 3, false, on_tasks, &whole, &e);
    check_message(nmk_batch_trace(b, 3, false, on_tasks, &other, &e), &e, "under way", "one trace at a time");
    go_on(&many[0], 0);
    check(rc == 0 && is_whole(&many[0]), "a request is served while steps are traced", "%s", e.text);
    wait_traced(&whole);
    quiet(b);
    check(whole.given == 1 && traced_steps == 3, "as many steps are traced as asked for", "%d: %s", traced_steps,
          whole.why);

    traced_steps = 0;
    rc = nmk_batch_trace(b, 8, true, on_tasks, &waits, &e);
    usleep(20000);
    fill(&many[0], 0, 1, 5);
    rc |= submit(b, &many[0], &e);
    wait_traced(&waits);
    check(rc == 0 && waits.given == 1 && traced_steps == 5 && !other.times,
          "a trace waits for a request, and ends with it", "%d steps: %s", traced_steps, waits.why);

    fill(&many[0], 0, 1, 200);
    many[0].hold_at = 199;
    rc = submit(b, &many[0], &e);
    wait_tokens(&many[0], 199);
    rc |= nmk_batch_trace(b, 8, false, on_tasks, &few, &e); /* by now its last step is queued */
    go_on(&many[0], 0);
    wait_traced(&few);
    check(rc == 0 && few.times == 1, "a trace that comes too late ends too", "%s", few.why);
    quiet(b);

    fill(&many[0], 0, 1, 200);
    many[0].hold_at = 1;
    rc = submit(b, &many[0], &e);
    wait_tokens(&many[0], 1);
    rc |= nmk_batch_trace(b, 8, false, on_tasks, &hung, &e);
    fake.hang_at = steps_run + queued_steps + 3;
    go_on(&many[0], 0);
    wait_traced(&hung);
    check(rc == 0 && hung.times == 1 && !hung.given && strstr(hung.why, "the kernel hung"), "a hang ends a trace", "%s",
          hung.why);
    wait_end(&many[0]);
    fake.hang_at = 0, traced_steps = 0;
    rc = submit(b, &many[0], &e);
    check(rc == 0 && is_whole(&many[0]) && traced_steps == 0, "and later steps are not traced", "%d", traced_steps);
    quiet(b);
}

/* Who wants to know when the engine is lost. */
typedef struct {
    int times, ended; /* of those that ran or waited, before it was told */
    char why[1024];
} mourner;

static void on_lost(void *user, const char *why) {
    mourner *m = user;
    pthread_mutex_lock(&clients);
    m->times++, m->ended = 0;
    for (int i = 0; i < 10; i++) m->ended += many[i].ends == 1;
    snprintf(m->why, sizeof m->why, "%s", why);
    pthread_cond_broadcast(&client_news);
    pthread_mutex_unlock(&clients);
}

static void test_lost(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0, failed = 0, waited = 0;
    nmk_batch_stats s;
    mourner first = {0}, late = {0};
    quiet(b);
    nmk_batch_set_on_lost(b, on_lost, &first);
    for (int i = 0; i < 10; i++) {
        fill(&many[i], i, 50, 100);
        if (i == 0) many[i].hold_at = 1;
        rc |= submit(b, &many[i], &e);
        if (i == 0) wait_tokens(&many[0], 1);
    }
    go_on(&many[0], 10), wait_tokens(&many[0], 10);
    bool loaded = wait_load(b, 8, 2);
    fake.fail = true;
    go_on(&many[0], 0);
    for (int i = 0; i < 8; i++) failed += wait_end(&many[i]) && many[i].end == NMK_BATCH_FAILED;
    for (int i = 8; i < 10; i++) waited += wait_end(&many[i]) && many[i].end == NMK_BATCH_LOST && !many[i].count;
    check(rc == 0 && loaded && failed == 8 && strstr(many[0].message, "the engine is lost"),
          "a lost engine fails what runs", "%d of 8: %s", failed, many[0].message);
    check(waited == 2 && strstr(many[9].message, "the engine is lost"), "and ends what waits otherwise", "%d of 2: %s",
          waited, many[9].message);
    check_message(submit(b, &many[0], &e), &e, "the engine is lost", "and takes no more");
    nmk_batch_read_stats(b, &s);
    check(s.lost && s.running == 0 && s.waiting == 0, "it says so", "lost %d, %d, %d", s.lost, s.running, s.waiting);
    pthread_mutex_lock(&clients);
    while (!first.times) pthread_cond_wait(&client_news, &clients);
    pthread_mutex_unlock(&clients);
    nmk_batch_set_on_lost(b, on_lost, &late);
    check(first.times == 1 && first.ended == 0 && strstr(first.why, "the engine is lost"),
          "tells who wants to know before all others", "%d times, %d ended: %s", first.times, first.ended, first.why);
    check(late.times == 1, "also who asks later", "%d times", late.times);
}

/* ---- guides ---- */

/* Allows one token at each position, another for each request; takes its time. */
typedef struct {
    int number, at, late_us, lost_at; /* lost_at: the token that it does not know on at; 0: none */
    int wrong;
} guide;

static int32_t guided_token(int number, int at) { return 1000 + number * 160 + at % 160; }

static bool guide_mask(void *of, uint32_t *mask, nmk_err *e) {
    guide *g = of;
    if (g->late_us) usleep((unsigned)(g->late_us * (g->at % 3)));
    if (g->lost_at && g->at == g->lost_at) return nmk_fail(e, "lost at %d", g->at), false;
    memset(mask, 0, sizeof *mask * ((NMK_VOCAB + 31) / 32));
    int32_t token = guided_token(g->number, g->at);
    mask[token / 32] |= (uint32_t)1 << token % 32;
    return true;
}

static bool guide_take(void *of, int32_t token, nmk_err *e) {
    guide *g = of;
    (void)e;
    g->wrong += token != guided_token(g->number, g->at);
    g->at++;
    return true;
}

static guide guides[MANY];

static void fill_guided(client *k, int number, int prompt_tokens, int max_tokens) {
    fill(k, number, prompt_tokens, max_tokens);
    guides[number] = (guide){.number = number, .late_us = number % 3 * 400};
    k->rq.guide = (nmk_batch_guide){&guides[number], guide_mask, guide_take};
}

static bool is_guided(const client *k, int number) {
    bool good = true;
    for (int i = 0; i < k->count; i++) good &= k->token[i] == guided_token(number, i);
    return good && !guides[number].wrong;
}

/* Rows with guides beside others, joining, leaving and changing columns: each gets the tokens of its own masks. */
static void test_guides(nmk_batch *b) {
    nmk_err e = {0};
    int rc = 0, good = 0;
    reset(b);
    for (int i = 0; i < MANY; i++) {
        if (i % 3 == 2)
            fill(&many[i], i, 1 + 7 * i, 20 + 9 * (i % 5));
        else
            fill_guided(&many[i], i, 1 + 9 * i, 3 + 11 * (i % 7));
        rc |= submit(b, &many[i], &e);
        if (i % 4 == 3) usleep(700);
    }
    for (int i = 0; i < MANY; i++)
        if (i % 3 == 2)
            good += is_whole(&many[i]);
        else
            good += wait_end(&many[i]) && many[i].end == NMK_BATCH_LENGTH && many[i].count == many[i].rq.max_tokens &&
                    is_guided(&many[i], i);
    quiet(b);
    check(rc == 0 && good == MANY, "rows with guides get the tokens of their own masks", "%d of %d: %s", good, MANY,
          e.text);

    for (int i = 0; i < MANY; i++) {
        fill_guided(&many[i], i, 3 + i, 60);
        if (i % 2) many[i].cancel_after = 5 + i;
        if (i == 4) guides[i].lost_at = 7;
        rc |= submit(b, &many[i], &e);
    }
    good = 0;
    for (int i = 0; i < MANY; i++) {
        const nmk_batch_end end = i % 2 ? NMK_BATCH_CANCEL : i == 4 ? NMK_BATCH_ASTRAY : NMK_BATCH_LENGTH;
        good += wait_end(&many[i]) && many[i].end == end && is_guided(&many[i], i) &&
                (i != 4 || (many[i].count == 7 && strstr(many[i].message, "lost at 7")));
    }
    quiet(b);
    check(rc == 0 && good == MANY, "they leave, and one whose guide is lost fails alone", "%d of %d", good, MANY);

    /* a cap puts tokens in: the guide is told of them */
    static const int32_t then[] = {1000 + 5, 1000 + 6};
    fill_guided(&many[0], 0, 4, 20);
    many[0].rq.cap = (nmk_batch_cap){.after = 5, .opens = -1, .closes = 2, .then = then, .then_count = 2};
    rc = submit(b, &many[0], &e);
    check(rc == 0 && wait_end(&many[0]) && many[0].count == 20 && is_guided(&many[0], 0) && guides[0].at >= 19,
          "a guide hears of the tokens that a cap puts in", "%d tokens, %d told", many[0].count, guides[0].at);

    fake.hang_at = steps_run + 20;
    for (int i = 0; i < 4; i++) fill_guided(&many[i], i, 3, 60), rc |= submit(b, &many[i], &e);
    good = 0;
    for (int i = 0; i < 4; i++) good += wait_end(&many[i]) && many[i].end == NMK_BATCH_FAILED;
    fill_guided(&many[5], 5, 3, 60);
    rc |= submit(b, &many[5], &e);
    good += wait_end(&many[5]) && many[5].count == 60 && is_guided(&many[5], 5);
    check(rc == 0 && good == 5, "a hang with guides, and after it", "%d", good);
}

int main(void) {
    nmk_err e = {0};
    nmk_engine *g;
    nmk_batch *b;
    if (fake_install(&e)) return puts(e.text), 2;
    nmk_options o = {.random_weights = true, .device = "cuda:0", .max_len = MAX_LEN, .no_prefill = true};
    if (!check(nmk_engine_open(&g, &o, &e) == 0, "the engine opens", "%s", e.text)) return 1;
    if (!check(nmk_batch_open(&b, g, 0, &e) == 0, "the batch opens", "%s", e.text)) return 1;
    test_many(b);
    test_turns(b);
    test_few(b);
    test_guides(b);
    test_hang(b);
    test_hang_at_end(b);
    test_trace(b);
    test_lost(b);
    nmk_batch_close(b);
    free(self);
    return failures != 0;
}
