/* How long launches take, and whose turn it is: what chunks of prompts may take beside sequences that decode.
 *
 * Costs are learned from the machine's own clock.  A chunk costs something whatever its size, as all weights are read,
 * and more by its *work*: a token at position 0 is 1, one further on as much more as attention has more keys there.  A
 * line through the last chunks says what the next may have.  Until one was timed a chunk is small; afterwards it has
 * at most half as much work again as any that was.  One that took far longer than it should counts for a little more
 * only, so a hiccup is soon forgotten, and a machine that became slower is known after a few.
 *
 * Turns: beside sequences that decode, a chunk that took t is paid back by t share / (1 - share) of steps before the
 * next one, so that decoding keeps its share of the time; there is one step at least.  Time that nobody needed is not
 * saved up, and a hiccup holds up prompts for no longer than a chunk of three times what was expected would.
 *
 * Knows no engine, no requests, no clock. */
#ifndef NMK_SERVER_PACE_H
#define NMK_SERVER_PACE_H

#include <stdbool.h>

enum {
    NMK_PACE_FIRST = 256,  /* work of a chunk before any was timed, and what any may have */
    NMK_PACE_IDLE_MS = 500 /* of a chunk that nobody waits for: who comes meanwhile does */
};

typedef struct {
    /* of the model: work of a key that a token sees, in all layers that see everything, and in those of a window */
    double key_work, window_key_work;
    int window;
    double budget_ms, share; /* 0 <= share < 1 */
    /* of chunks: sums over the last ones, each weighing less than the next, and by its own time: an error counts by how
     * great it is beside that */
    double weight, work, ms, work_squared, work_ms, most_work;
    double step_ms;   /* 0: none was timed */
    double owed_ms;   /* of steps, before the next chunk, for what has ended; */
    double queued_ms; /* the same of what is queued, by what it is expected to take: steps take off it */
} nmk_pace;

/* Of `count` tokens from `pos` on. */
double nmk_pace_work(const nmk_pace *pace, int pos, int count);
/* Most tokens from `pos` on whose work is no more than that; not more than `most`. */
int nmk_pace_tokens(const nmk_pace *pace, int pos, double work, int most);

/* Work of the next chunk: beside sequences that decode, or alone. */
double nmk_pace_room(const nmk_pace *pace, bool beside);
/* How long a chunk of that work takes, as far as is known; 0: nothing is. */
double nmk_pace_chunk_ms(const nmk_pace *pace, double work);

/* A launch is queued: how long it is expected to take; then it has ended (ms -1: its time is not known).  Beside: it
 * counts for the share, by what is expected and then by what it took.  One that took far longer counts as one that took
 * longer. */
double nmk_pace_queue_chunk(nmk_pace *pace, double work, bool beside);
void nmk_pace_end_chunk(nmk_pace *pace, double work, double ms, double expected_ms, bool beside);
double nmk_pace_queue_step(nmk_pace *pace, bool beside);
void nmk_pace_end_step(nmk_pace *pace, double ms, double expected_ms, bool beside);

/* Whether decoding has had its share since the last chunk, or has it with one step more.  From now on it has; and
 * nothing is queued. */
bool nmk_pace_may_chunk(const nmk_pace *pace, bool behind_step);
void nmk_pace_forgive(nmk_pace *pace);
void nmk_pace_drop(nmk_pace *pace);

#endif
