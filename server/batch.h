/* Continuous batching: one thread that owns an engine and keeps its rows busy.
 *
 * Requests join and leave at step boundaries.  In a step that feeds a prompt, one half of the columns takes its next
 * positions and the other half decodes: up to NMK_COLUMNS / 2 rows lose nothing by it, apart from one step when a row
 * has to change its column; more rows take turns, and none rests for two steps in a row.  Without rows that decode, two
 * prompts are fed at a time.  A step that feeds nothing decodes all rows.
 *
 * Guaranteed: a request's tokens depend on its prompt and sampler alone, bit for bit, whatever else runs and
 * whenever it came.  For that a prompt is always cut at multiples of NMK_COLUMNS / 2 positions, its last token apart.
 * nmk_engine_generate cuts at NMK_COLUMNS: for longer prompts its bits differ, and now and then a token.
 *
 * Requests start in the order they were submitted: one for whose pages there is no room yet holds up those behind it.
 * Prompts are fed in that order too.  Knows tokens, no text; knows no HTTP.
 *
 * submit and cancel may be called from any thread; callbacks come from the batch's thread and must not call back into
 * it, except for cancel.  Every submitted request gets exactly one on_end, and no callback after it; that may be before
 * submit returns. */
#ifndef NMK_SERVER_BATCH_H
#define NMK_SERVER_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "nmk.h"

typedef struct nmk_batch nmk_batch;

typedef enum {
    NMK_BATCH_STOP,   /* a stop id; it is the last token given */
    NMK_BATCH_LENGTH, /* max_tokens */
    NMK_BATCH_CANCEL,
    NMK_BATCH_FAILED /* message says why; the engine goes on with others if it can */
} nmk_batch_end;

typedef struct {
    const int32_t *prompt; /* copied; at least one token, and fits the engine's max_len with max_tokens */
    int prompt_tokens;
    int max_tokens, min_tokens; /* a stop id ends nothing before it is token min_tokens or later */
    nmk_sampler sampler;        /* bias is copied */
    const int32_t *stop_ids;    /* copied */
    int stop_count;
    uint64_t salt;   /* requests with different salts share no cached pages */
    uint64_t client; /* whose turn it is in the queue: clients take turns */
    void *user;
    /* once, when it first gets a row; cached_tokens: of the prompt, found in the cache then; may be NULL */
    void (*on_start)(void *user, int cached_tokens);
    /* may be NULL; logprobs is good during the call, NULL if not asked for */
    void (*on_token)(void *user, int32_t token, const nmk_logprobs *logprobs);
    /* message: of NMK_BATCH_FAILED, else NULL */
    void (*on_end)(void *user, nmk_batch_end end, const char *message);
} nmk_batch_request;

typedef struct {
    int running, waiting; /* requests now */
    /* ever: submitted, fed, sampled for a request, read, ended so */
    uint64_t requests, prompt_tokens, tokens, steps, failed, cancelled;
    uint64_t last_step_ms; /* monotonic time of the last finished step; 0: none */
    bool lost;             /* the engine cannot go on */
} nmk_batch_stats;

/* Takes over the engine (closed by nmk_batch_close), if it succeeds.  most_waiting: requests that may queue beside
 * those that run; 0: 1024. */
int nmk_batch_open(nmk_batch **batch, nmk_engine *engine, int most_waiting, nmk_err *e);

/* *id is never 0, and is set before the first callback.  -1: the queue is full, the batch is closing or lost, or the
 * request cannot fit; no callback then. */
int nmk_batch_submit(nmk_batch *batch, const nmk_batch_request *request, uint64_t *id, nmk_err *e);
/* The request ends within a step, if it has not ended before. */
void nmk_batch_cancel(nmk_batch *batch, uint64_t id);

void nmk_batch_read_stats(nmk_batch *batch, nmk_batch_stats *stats);

/* Ends everything with NMK_BATCH_CANCEL, joins the thread, closes the engine. NULL is fine. */
void nmk_batch_close(nmk_batch *batch);

#endif
