/* What chunks may have and whose turn it is, on machines made up of a formula. */
#include "pace.h"

#include <math.h>

#include "check.h"

enum { LAUNCHES = 4000, PROMPT = 8192, MOST = 8192 };

/* As North Mini Code has it: 13 layers that see everything, 36 that see 4096 tokens. */
static nmk_pace new_pace(double budget_ms, double share) {
    const double key = 2.8e-6;
    return (nmk_pace){
        .key_work = 13 * key, .window_key_work = 36 * key, .window = 4096, .budget_ms = budget_ms, .share = share};
}

/* A machine: what its launches take. */
typedef struct {
    double least_ms, token_ms, step_ms;
    double times;  /* slower than that */
    int hiccup_at; /* this chunk takes a second more; 0: none */
    int chunks;
} machine;

typedef struct {
    int chunks, steps;
    double chunk_ms, step_ms, longest_ms, last_longest_ms; /* last: of the second half of the prompt's chunks */
    double most_steps_ms;                                  /* of those between two chunks */
    int smallest, largest, first;
    double share; /* of steps, from the first chunk's beginning to the last one's */
} figures;

/* A prompt of so many tokens from `pos` on, beside rows that decode; all launches are read two later, as a batch does. */
static figures feed(nmk_pace *p, machine *m, int pos, int count) {
    struct {
        double work, ms, expected_ms;
        bool chunk;
    } queue[2];
    figures f = {.smallest = MOST};
    int in_flight = 0, end = pos + count, start = pos;
    double steps_ms = 0, last_ms = 0;
    bool chunk_last = false;
    for (int i = 0; pos < end && i < LAUNCHES; i++) {
        if (in_flight == 2) {
            if (queue[0].chunk)
                nmk_pace_end_chunk(p, queue[0].work, queue[0].ms, queue[0].expected_ms, true);
            else
                nmk_pace_end_step(p, queue[0].ms, queue[0].expected_ms, true);
            queue[0] = queue[1], in_flight = 1;
        }
        queue[in_flight].chunk = !chunk_last && nmk_pace_may_chunk(p, false);
        if ((chunk_last = queue[in_flight].chunk)) {
            const int left = end - pos < MOST ? end - pos : MOST;
            int tokens = nmk_pace_tokens(p, pos, nmk_pace_room(p, true), left);
            if (tokens < 64) tokens = left < 64 ? left : 64;
            const double work = nmk_pace_work(p, pos, tokens);
            const double hiccup_ms = ++m->chunks == m->hiccup_at ? 1000 : 0;
            const double ms = (m->least_ms + m->token_ms * work) * m->times + hiccup_ms;
            queue[in_flight].work = work, queue[in_flight].ms = ms;
            queue[in_flight].expected_ms = nmk_pace_queue_chunk(p, work, true);
            if (!f.chunks) f.first = tokens;
            if (tokens < f.smallest && pos + tokens < end) f.smallest = tokens;
            if (tokens > f.largest) f.largest = tokens;
            if (ms > f.longest_ms) f.longest_ms = ms;
            if (pos > start + count / 2 && ms > f.last_longest_ms) f.last_longest_ms = ms;
            if (f.chunks && steps_ms > f.most_steps_ms) f.most_steps_ms = steps_ms;
            f.chunks++, f.chunk_ms += ms, pos += tokens, steps_ms = 0;
            last_ms = ms;
        } else {
            const double ms = queue[in_flight].ms = m->step_ms * m->times;
            queue[in_flight].expected_ms = nmk_pace_queue_step(p, true);
            f.steps++, f.step_ms += ms, steps_ms += ms;
        }
        in_flight++;
    }
    nmk_pace_drop(p); /* what is in flight is not read any more */
    f.share = f.step_ms / (f.step_ms + f.chunk_ms - last_ms);
    return f;
}

static void test_work(void) {
    const nmk_pace p = new_pace(25, 0.7);
    double sum = 0;
    for (int pos = 0; pos < 10000; pos++) sum += nmk_pace_work(&p, pos, 1);
    check(fabs(nmk_pace_work(&p, 0, 10000) - sum) < 1e-6 * sum, "work of a span is that of its tokens", "%g, not %g",
          nmk_pace_work(&p, 0, 10000), sum);
    int bad = 0;
    for (int pos = 0; pos < 300000; pos += 997)
        for (double work = 1; work < 20000; work *= 3) {
            const int n = nmk_pace_tokens(&p, pos, work, MOST);
            bad += nmk_pace_work(&p, pos, n) > work || (n < MOST && nmk_pace_work(&p, pos, n + 1) <= work);
        }
    check(bad == 0, "as many tokens as the work allows", "%d wrong", bad);
    check(nmk_pace_tokens(&p, 0, 1e18, 77) == 77, "and no more than there are", "%d", nmk_pace_tokens(&p, 0, 1e18, 77));
}

/* The machine that the defaults are for, then one that is as slow as a CPU, and one where the budget is never kept. */
static void test_share(void) {
    static const struct {
        const char *what;
        machine m;
        double budget_ms, share;
    } cases[] = {
        {"at the default share", {.least_ms = 20, .token_ms = 0.0135, .step_ms = 4.5, .times = 1}, 25, 0.7},
        {"half of the time", {.least_ms = 20, .token_ms = 0.0135, .step_ms = 4.5, .times = 1}, 45, 0.5},
        {"nearly all of it", {.least_ms = 12, .token_ms = 0.02, .step_ms = 2, .times = 1}, 25, 0.95},
        {"on a slow machine", {.least_ms = 50, .token_ms = 2, .step_ms = 60, .times = 1}, 1000, 0.7},
        {"below the least that a chunk takes",
         {.least_ms = 20, .token_ms = 0.0135, .step_ms = 4.5, .times = 1},
         5,
         0.7},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nmk_pace p = new_pace(cases[i].budget_ms, cases[i].share);
        machine m = cases[i].m;
        figures f = feed(&p, &m, 0, PROMPT);
        const double least = m.least_ms + m.token_ms * NMK_PACE_FIRST;
        const double most = least > cases[i].budget_ms ? least : cases[i].budget_ms;
        check(f.share >= cases[i].share && f.share < cases[i].share + (1 - cases[i].share) * 0.3,
              "decoding has its share", "%s: %.3f of %.3f", cases[i].what, f.share, cases[i].share);
        check(f.last_longest_ms < 1.05 * most && f.first <= NMK_PACE_FIRST, "chunks within the budget",
              "%s: %.1f ms, %.1f at first, tokens %d to %d", cases[i].what, f.last_longest_ms, f.longest_ms, f.smallest,
              f.largest);
        check(f.chunk_ms / f.chunks > 0.8 * most || least > cases[i].budget_ms, "which they use",
              "%s: %d chunks of %.1f ms", cases[i].what, f.chunks, f.chunk_ms / f.chunks);
    }
}

/* At a share of 0 chunk and step take turns. */
static void test_no_share(void) {
    nmk_pace p = new_pace(25, 0);
    machine m = {.least_ms = 20, .token_ms = 0.0135, .step_ms = 4.5, .times = 1};
    figures f = feed(&p, &m, 0, PROMPT);
    check(f.steps >= f.chunks - 1 && f.steps <= f.chunks + 1, "without a share there is a step after each chunk",
          "%d chunks, %d steps", f.chunks, f.steps);
}

/* Tokens further on cost more: there are fewer of them in a chunk of the same time. */
static void test_far(void) {
    nmk_pace p = new_pace(25, 0.7);
    machine m = {.least_ms = 15, .token_ms = 0.0135, .step_ms = 4.5, .times = 1};
    feed(&p, &m, 0, PROMPT);
    figures near = feed(&p, &m, 0, PROMPT), far = feed(&p, &m, 32768, PROMPT);
    check(near.largest > 2 * far.largest && far.longest_ms < 26 && near.longest_ms < 26,
          "chunks become shorter as contexts grow", "%d and %d tokens, %.1f and %.1f ms", near.largest, far.largest,
          near.longest_ms, far.longest_ms);
}

/* Where attention is faster than the work says, long chunks far on mislead about short ones: not for long. */
static void test_misled(void) {
    nmk_pace p = new_pace(40, 0.7);
    machine m = {.least_ms = 20, .token_ms = 0.0205, .step_ms = 4, .times = 1};
    for (int pos = 0; pos < 262144; pos += MOST) {
        const double tokens = MOST, work = nmk_pace_work(&p, pos, MOST);
        nmk_pace_end_chunk(&p, work, 20 + 0.0205 * (tokens + 0.55 * (work - tokens)), 0, false);
    }
    figures f = feed(&p, &m, 0, PROMPT);
    check(f.longest_ms < 60 && f.last_longest_ms < 43 && f.chunks < 14, "long chunks mislead little about short ones",
          "%.1f ms, later %.1f, %d chunks", f.longest_ms, f.last_longest_ms, f.chunks);
}

static void test_changes(void) {
    nmk_pace p = new_pace(25, 0.7);
    machine m = {.least_ms = 15, .token_ms = 0.0135, .step_ms = 4.5, .times = 1};
    const figures before = feed(&p, &m, 0, PROMPT);
    m.hiccup_at = m.chunks + 5;
    const figures with = feed(&p, &m, 0, PROMPT);
    check(with.longest_ms > 1000 && with.most_steps_ms < 200 && with.chunks <= before.chunks + 8,
          "a hiccup is no great matter", "%d chunks, %d before; %.0f ms of steps in a row", with.chunks, before.chunks,
          with.most_steps_ms);
    const figures after = feed(&p, &m, 0, PROMPT);
    check(after.chunks <= before.chunks + 2 && after.longest_ms < 26, "and forgotten", "%d chunks, %d before, %.1f ms",
          after.chunks, before.chunks, after.longest_ms);
    m.times = 1.2;
    figures slow = feed(&p, &m, 0, PROMPT);
    check(slow.last_longest_ms < 27.5 && slow.smallest >= 150, "a machine that becomes slower gets shorter chunks",
          "%.1f ms, %d to %d tokens", slow.last_longest_ms, slow.smallest, slow.largest);
    m.times = 1;
    figures fast = feed(&p, &m, 0, 4 * PROMPT);
    check(fast.last_longest_ms > 22 && fast.last_longest_ms < 26 && fast.share >= 0.7,
          "one that becomes faster gets longer ones", "%.1f ms", fast.last_longest_ms);
}

/* Nobody decodes: all at once, but not for seconds. */
static void test_alone(void) {
    nmk_pace p = new_pace(25, 0.7);
    check(nmk_pace_tokens(&p, 0, nmk_pace_room(&p, false), MOST) == MOST, "alone a prompt is fed at once", "%d",
          nmk_pace_tokens(&p, 0, nmk_pace_room(&p, false), MOST));
    nmk_pace_end_chunk(&p, nmk_pace_work(&p, 0, MOST), 184, 0, false);
    check(nmk_pace_tokens(&p, 0, nmk_pace_room(&p, false), MOST) == MOST, "also when it is known how long that takes",
          "%d", nmk_pace_tokens(&p, 0, nmk_pace_room(&p, false), MOST));
    const int beside = nmk_pace_tokens(&p, 0, nmk_pace_room(&p, true), MOST);
    check(beside <= NMK_PACE_FIRST, "which says little of short chunks", "%d", beside);
    const int far = nmk_pace_tokens(&p, 250000, nmk_pace_room(&p, false), MOST);
    check(far < MOST && far > MOST / 16, "far on there is a bound", "%d", far);
}

int main(void) {
    test_work();
    test_share();
    test_no_share();
    test_far();
    test_misled();
    test_changes();
    test_alone();
    return failures != 0;
}
