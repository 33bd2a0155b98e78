/* Continuous batching: one thread that owns an engine and keeps its rows busy.
 *
 * Requests join and leave at step boundaries.  Where the model has launches for prompts, these take chunks, of as many
 * prompts as have room in one; while rows decode, a chunk is as long as its budget of time allows, and between two of
 * them there are as many steps as give decoding its share of the time (pace.h).  Else steps feed prompts too.  In a
 * step that feeds a prompt, one half of the columns takes its next positions and the other half decodes: as many rows
 * as that has lose nothing by it, apart from one step when a row has to change its column; more rows take turns, and
 * none rests for two steps in a row.  Without rows that decode, two prompts are fed at a time.  A step that feeds
 * nothing decodes all rows.
 *
 * The cache: full pages of prompts and of generated tokens stay, and a request whose prompt begins with the same tokens
 * (and has the same salt) goes on behind them, also while the one that computed them runs.  The last token of a prompt
 * is always computed.  A prompt that is being fed jumps ahead when pages that it needs are there meanwhile, and one
 * that shares its next page with a prompt being fed waits for that.
 *
 * Guaranteed: a request's tokens depend on its prompt and sampler alone, bit for bit, whatever else runs and whenever
 * it came, with one exception: pages of tokens that another request generated.  Tokens decoded one by one and tokens
 * fed as a prompt give the same keys and values up to rounding only, and now and then a token differs.  A request that
 * is `exact` uses no such pages and knows no exception.  (Where steps feed, a prompt is always cut at multiples of as
 * many positions as a step feeds, its last token apart; how it is cut into chunks changes no bit.)
 *
 * Pages are taken as rows grow, not for max_tokens ahead.  When none is left, cached ones go, the longest unused first;
 * then the row that started last goes back to the head of the queue.  Later it computes what it lost in the way it did
 * at first, so its text is the same, bit for bit, and goes on where it was.
 *
 * The queue: clients take turns.  A request that comes joins the next round in which its client has none yet, and
 * rounds are served in order, each in the order in which its requests came.  A request for which there is no room holds
 * up all behind it, so nobody is overtaken for ever; room is what its prompt takes beside what the running rows still
 * need for theirs.  Prompts are fed in the order in which requests start.
 *
 * A hang fails what runs, and the engine goes on; nothing that was cached is used any more.  When the engine is lost
 * altogether everything ends, and nothing is taken any more: no other engine can be opened on that GPU in this process.
 *
 * A request may have a guide that says which tokens may come next.  Steps are queued ahead all the same: a step waits
 * for the masks of its columns only before it samples, and threads of the batch's own ask the guides as soon as a token
 * is known, while the step computes.  A guide that does not know on fails its request; no token goes out that it has
 * not allowed.
 *
 * Knows tokens, no text; knows no HTTP.
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

enum { NMK_BATCH_WAITING = 1024 }; /* requests that may wait, unless said otherwise */

typedef enum {
    NMK_BATCH_STOP,   /* a stop id; it is the last token given */
    NMK_BATCH_LENGTH, /* max_tokens */
    NMK_BATCH_CANCEL,
    NMK_BATCH_FAILED, /* message says why; the engine goes on with others if it can */
    NMK_BATCH_ASTRAY, /* the guide does not know on; message says why */
    NMK_BATCH_LOST    /* the engine was lost while the request waited; message says why */
} nmk_batch_end;

/* A cap on something that the model says, such as its reasoning: once `after` tokens were given, among them `opens`
 * (-1: it was open from the start) but not `closes`, the tokens `then` follow whatever the model would say, and it goes
 * on behind them.  They count as given. */
typedef struct {
    int after; /* 0: no cap */
    int32_t opens, closes;
    const int32_t *then; /* copied */
    int then_count;
} nmk_batch_cap;
/* Which tokens may come: asked for a mask, then told the token, and so on; on one thread at a time, and not after
 * on_end.  False: *e says why there is none, or why it was not allowed. */
typedef struct {
    void *of;
    bool (*mask)(void *of, uint32_t *mask, nmk_err *e);
    bool (*take)(void *of, int32_t token, nmk_err *e);
} nmk_batch_guide;

typedef struct {
    const int32_t *prompt; /* copied; at least one token, and fits the engine's max_len with max_tokens */
    int prompt_tokens;
    int max_tokens, min_tokens; /* a stop id ends nothing before it is token min_tokens or later */
    nmk_sampler sampler;        /* bias is copied; masked follows from the guide */
    nmk_batch_guide guide;      /* of: NULL: none */
    const int32_t *stop_ids;    /* copied */
    int stop_count;
    nmk_batch_cap cap;
    /* 0: none; n: the likelihood of each token of the prompt but the first, and the n - 1 most likely ones in its
     * place.  The positions of such a prompt are computed one by one, as those of an answer are.  Its salt should be
     * nobody else's: what others have computed says nothing of tokens. */
    int prompt_logprobs;
    uint64_t salt;   /* requests with different salts share no cached pages */
    uint64_t client; /* whose turn it is in the queue: clients take turns */
    bool exact;      /* uses no cached page of tokens that were generated */
    void *user;
    /* once, when its first position is queued; cached_tokens: those before it, found in the cache; may be NULL */
    void (*on_start)(void *user, int cached_tokens);
    /* of the prompt's token `index`, in order, all of them before the first token that is generated */
    void (*on_prompt)(void *user, int index, const nmk_logprobs *logprobs);
    /* may be NULL; logprobs is good during the call, NULL if not asked for; of a token that a cap put in it is 0 */
    void (*on_token)(void *user, int32_t token, const nmk_logprobs *logprobs);
    /* message: of NMK_BATCH_FAILED and NMK_BATCH_LOST, else NULL */
    void (*on_end)(void *user, nmk_batch_end end, const char *message);
} nmk_batch_request;

typedef struct {
    int running, waiting; /* requests now */
    /* ever: submitted, fed or found in the cache, sampled for a request, read, ended so */
    uint64_t requests, prompt_tokens, tokens, steps, failed, cancelled;
    uint64_t cache_queries, cache_hits; /* tokens of prompts: that started; of these, found in the cache */
    uint64_t preemptions;
    /* Launches that take chunks of prompts: how many, their tokens, their time by the machine's clock. */
    uint64_t chunks, chunk_tokens;
    double chunk_ms;
    double chunk_beside_ms, step_beside_ms; /* time of chunks beside rows that decode, and of steps beside prompts */
    uint64_t last_step_ms;                  /* monotonic time of the last finished step; 0: none */
    double kv_used; /* part of the memory for keys and values that running requests hold, 0 to 1 */
    bool lost;      /* nothing is taken any more */
} nmk_batch_stats;

/* A step that has ended: when it was queued, or the one before had ended, and when its tokens were read. */
typedef struct {
    uint64_t number, began_ns, ended_ns;
    double machine_ms; /* by the machine's own clock, from the end of the step before */
    int decoded, fed;  /* columns that decode, and that take positions of prompts */
    int tokens;        /* for requests */
    int running, waiting;
    double kv_used;
} nmk_batch_step;

/* Takes over the engine (closed by nmk_batch_close), if it succeeds.  most_waiting: requests that may queue beside
 * those that run; 0: NMK_BATCH_WAITING. */
int nmk_batch_open(nmk_batch **batch, nmk_engine *engine, int most_waiting, nmk_err *e);

/* How long rows that decode wait for a chunk of others' prompts, about: as the last ones took.  Not less than the
 * shortest chunk takes. */
enum { NMK_BATCH_BUDGET_MS = 25 };
void nmk_batch_set_budget(nmk_batch *batch, double ms);

/* How much of the machine's time rows that decode keep while prompts are fed; at 0 it is a step after each chunk.
 * 0 <= percent < 100. */
enum { NMK_BATCH_SHARE = 70 };
void nmk_batch_set_share(nmk_batch *batch, double percent);

/* Called once when the engine is lost, before requests end for it, on the batch's thread; here if it is lost already.
 * Before the first submit. */
typedef void (*nmk_batch_lost_fn)(void *user, const char *why);
void nmk_batch_set_on_lost(nmk_batch *batch, nmk_batch_lost_fn on_lost, void *user);

/* Called for each step that has ended, on the batch's thread, before its tokens go out.  Before the first submit. */
typedef void (*nmk_batch_step_fn)(void *user, const nmk_batch_step *step);
void nmk_batch_set_on_step(nmk_batch *batch, nmk_batch_step_fn on_step, void *user);

/* Traces the tasks of the next steps, up to NMK_TASKS_STEPS of them; fewer when the requests that run end before.
 * wait: also for a request that is yet to come.  -1: a trace is under way, nothing runs that could be waited for, or
 * the batch is closing or lost; no callback then.  Else on_tasks comes once, on the batch's thread: `tasks` is the
 * callee's, or NULL, and `why` says why. */
struct nmk_tasks;
typedef void (*nmk_batch_tasks_fn)(void *user, struct nmk_tasks *tasks, const char *why);
int nmk_batch_trace(nmk_batch *batch, int steps, bool wait, nmk_batch_tasks_fn on_tasks, void *user, nmk_err *e);

/* *id is never 0, and is set before the first callback.  -1: the queue is full, the batch is closing or lost, or the
 * request cannot fit; no callback then. */
int nmk_batch_submit(nmk_batch *batch, const nmk_batch_request *request, uint64_t *id, nmk_err *e);
/* The request ends within a step, if it has not ended before. */
void nmk_batch_cancel(nmk_batch *batch, uint64_t id);

void nmk_batch_read_stats(nmk_batch *batch, nmk_batch_stats *stats);

/* Ends everything with NMK_BATCH_CANCEL and joins the thread: no callback after it.  NULL is fine. */
void nmk_batch_stop(nmk_batch *batch);
/* The same, and closes the engine. */
void nmk_batch_close(nmk_batch *batch);

#endif
