/* The step loop of a server: who decodes and who is fed in each step.
 *
 * The batch's thread alone touches the engine, the rows and the columns; `lock` guards what other threads see: the
 * queue, the ids and cancel marks of running requests, the statistics, what the engine can hold.  Callbacks run without
 * it.
 *
 * A sequence is its prompt and what was generated; `at` is its next position that no queued step computes.  Positions
 * of the prompt are fed in chunks.  The others are decoded: a column that samples is moved on by the machine itself, so
 * the host writes a column only when it changes hands, and may queue many steps before it reads a token.  A row that
 * leaves such a column rests until the host has read all its tokens; then it can go on in any column.  Positions whose
 * tokens are known already (after a preemption) are decoded without sampling, in a column that the host writes for each
 * step: so keys and values get the bits that they had.  While prompts are fed the host stays FEED_AHEAD steps ahead,
 * which makes one step of rest.
 *
 * Guides: each request that has one is in at most one job of the guides' threads, which tells the guide a token and
 * makes the next mask; the token that this mask is for is not sampled before, so the next job comes after it.  A mask
 * goes to the step that wants it when both are known; what a row that leaves its column would have wanted is given up,
 * or steps would wait for it.
 *
 * Pages: a step is queued when all its positions have pages, and changed table entries are queued before it.  An ended
 * or preempted row costs nothing more than its column in steps that are queued already: those write pages that it held,
 * at positions that are in no kept page yet, and whoever gets the pages writes them in later steps. */
#include "batch.h"

#include <assert.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine.h"
#include "pace.h"
#include "tasks.h"

/* Those of one generation: engine->columns it is. */
#undef NMK_COLUMNS
#undef NMK_POSITIONS

enum {
    HALVES = 2, /* of the columns that may feed a prompt: a chunk has those of a half, where it stands changes no sum */
    FEED_AHEAD = 2,
    GUIDE_THREADS = 4, /* at most; fewer where there are few cores */
    MASK_WORDS = (NMK_VOCAB + 31) / 32,
    GUEST = 4, /* a chunk's part for the shortest prompt */
    RECORDS = 64,
    PAGE = NMK_PAGE_TOKENS
};

typedef struct request request;
struct request {
    request *next; /* in the queue */
    uint64_t id, turn;
    nmk_batch_request rq; /* with its own copies of stop ids and bias; the prompt is in `token` */
    bool cancelled;       /* by lock */
    int32_t *token;       /* the prompt and what was generated */
    int token_room;
    int given;        /* tokens that the callback got */
    bool capped;      /* its cap has not been looked at yet */
    int told_prompt;  /* tokens of the prompt whose likelihood the callback got, the first one without any */
    int32_t drawn;    /* the token that the machine's adjustments make it draw; -1: they are others */
    uint64_t started; /* its number among those that got a row; 0: not yet */
    uint64_t life;    /* counts its rows: what steps of an earlier life bring is not its */
    int counted;      /* positions that statistics have */
    int found;        /* positions that it did not compute, as long as it has computed none */
    bool begun;       /* it was told of its start */
    /* How each page is computed, see kv.h: as it was for the first `made` pages, for the others as it has to be. */
    uint8_t *fed;
    int made;
    /* of a running one */
    int at;
    int column;     /* of the last queued step; -1: it is fed, or rests, or all its steps are queued */
    bool moves;     /* the machine moves that column on */
    bool adjusted;  /* the machine has its adjustments, and counts on from there */
    uint64_t since; /* plan that gave or took its column */
    /* of one with a guide, by guide_lock */
    request *next_job;
    bool job;     /* queued or at work */
    int32_t told; /* the token of the job; -1: none */
    uint32_t *mask;
    bool masked; /* the mask is that of the next token */
    bool wanted; /* by a queued step: */
    uint64_t want_step;
    int want_column;
    bool lost_way; /* the guide does not know on: why */
    nmk_err why;
};

struct nmk_batch {
    nmk_engine *engine; /* what it can hold never changes, and other threads read that */
    int columns, rows;  /* the engine's */
    int chunk;          /* of a prompt in one step, cut at multiples of it */
    pthread_t thread;
    bool stopped; /* the thread has ended */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* by lock */
    bool closing;
    bool cancels;           /* some request's mark is new */
    request *first;         /* the queue: preempted ones as they started, then by turn, in a turn by id */
    request *row[NMK_ROWS]; /* running, by slot of the page tables; changed by the thread alone */
    int most_waiting;
    double budget_ms, share; /* what rows that decode may wait for a chunk; their share of the time */
    uint64_t last_id;
    uint64_t turn; /* the latest that was served */
    nmk_batch_stats stats;
    nmk_batch_lost_fn on_lost;
    void *lost_user;
    nmk_batch_step_fn on_step;
    void *step_user;
    nmk_batch_tasks_fn on_tasks; /* NULL: no trace is wanted or under way */
    void *tasks_user;
    int tasks_steps;
    bool tasks_wait;
    nmk_err why; /* it is lost */
    /* of the thread */
    request *on[NMK_ROWS]; /* decodes in this column, as of the last queued step */
    bool idle[NMK_ROWS];   /* the machine's column is known to be inactive after that step */
    int feed_half;
    bool chunk_last; /* the launch queued last was a chunk */
    nmk_pace pace;
    int32_t *chunk_token; /* room for those of one chunk; NULL: there are none */
    uint64_t starts;      /* requests that got a row */
    uint64_t plans;       /* steps planned */
    uint64_t done;        /* steps read; engine->steps - done are in flight */
    nmk_tasks *tasks;     /* the trace that is under way */
    uint64_t ended_ns;    /* of the step read last */
    struct {
        uint64_t id; /* of a request that had no room when so many pages were to spare */
        int spare[2];
    } refused;
    /* The guides' threads. */
    pthread_mutex_t guide_lock;
    pthread_cond_t guide_wake, guide_done;
    pthread_t guide[GUIDE_THREADS];
    int guides;
    bool guides_end; /* by guide_lock, as is what follows */
    request *job, **job_tail;
    struct {
        uint64_t id[NMK_ROWS]; /* request whose token the step brings; 0: none */
        int prompt[NMK_ROWS];  /* it is this one of its prompt; 0: a new one */
        uint64_t life[NMK_ROWS];
        uint64_t queued_ns;
        int decoded, fed;
        double work, expected_ms;
        bool chunk, beside; /* beside: rows decode and prompts are fed */
        bool idle;          /* nothing was in flight when it was queued */
    } record[RECORDS];
};

/* ---- requests ---- */

static void *copy_of(const void *from, int count, size_t bytes) {
    return count > 0 ? memcpy(xmalloc(bytes * (size_t)count), from, bytes * (size_t)count) : NULL;
}

static request *new_request(const nmk_batch_request *rq) {
    request *r = xcalloc(1, sizeof *r);
    int pages = (rq->prompt_tokens + rq->max_tokens + PAGE - 1) / PAGE;
    r->rq = *rq, r->column = -1;
    r->rq.prompt = NULL;
    r->token = copy_of(rq->prompt, r->token_room = rq->prompt_tokens, sizeof *rq->prompt);
    if (rq->stop_count < 0) r->rq.stop_count = 0;
    r->rq.stop_ids = copy_of(rq->stop_ids, rq->stop_count, sizeof *rq->stop_ids);
    r->rq.sampler.bias = copy_of(rq->sampler.bias, rq->sampler.bias_count, sizeof *rq->sampler.bias);
    r->rq.cap.then = copy_of(rq->cap.then, rq->cap.then_count, sizeof *rq->cap.then);
    r->told_prompt = rq->prompt_logprobs ? 1 : rq->prompt_tokens, r->drawn = -1;
    r->capped = rq->cap.after > 0 && rq->cap.after < rq->max_tokens;
    r->rq.sampler.masked = rq->guide.of != NULL;
    if (rq->guide.of) r->mask = xmalloc(sizeof *r->mask * MASK_WORDS);
    r->fed = xmalloc((size_t)pages);
    memset(r->fed, rq->exact ? PAGE : NMK_KV_ANY, (size_t)pages);
    return r;
}

static void free_request(request *r) {
    if (!r) return;
    free((void *)(uintptr_t)r->rq.stop_ids);
    free((void *)(uintptr_t)r->rq.sampler.bias);
    free((void *)(uintptr_t)r->rq.cap.then);
    free(r->token), free(r->fed), free(r->mask);
    free(r);
}

static int slot_of(const nmk_batch *b, const request *r) {
    int s = 0;
    while (b->row[s] != r) s++;
    return s;
}

/* The last position whose token is known, which is the next to sample, and the end of all positions it computes. */
static int known(const request *r) { return r->rq.prompt_tokens - 1 + r->given; }
/* At its cap a row rests until all its tokens are read and the cap is looked at. */
static int end_of(const request *r) {
    return r->rq.prompt_tokens - 1 + (r->capped ? r->rq.cap.after : r->rq.max_tokens);
}

/* Tokens of page p that are fed, if the row itself computes it: all but a prompt's last one, and none of a prompt whose
 * tokens' likelihood is asked for. */
static int own_way(const request *r, int p) {
    if (r->rq.prompt_logprobs) return 0;
    int left = r->rq.prompt_tokens - 1 - p * PAGE;
    return left < 0 ? 0 : left < PAGE ? left : PAGE;
}

/* The end of what a step feeds at `at`; not after `at` where tokens are decoded. */
static int feed_end(const nmk_batch *b, const request *r) {
    int p = r->at / PAGE, end = r->rq.prompt_tokens - 1, way = p < r->made ? r->fed[p] : own_way(r, p);
    if (end > p * PAGE + way) end = p * PAGE + way;
    return end < r->at + b->chunk ? end : r->at + b->chunk;
}

static bool is_fed(const nmk_batch *b, const request *r) { return feed_end(b, r) > r->at; }

/* The end of all that can be fed at `at` without decoding a token between. */
static int fed_until(const request *r) {
    int p = r->at / PAGE, end = r->rq.prompt_tokens - 1, way = PAGE;
    for (; way == PAGE && p * PAGE < end; p++) way = p < r->made ? r->fed[p] : own_way(r, p);
    p = way < PAGE ? (p - 1) * PAGE + way : end;
    return p < end ? p : end;
}

static bool decodes(const nmk_batch *b, const request *r) { return !is_fed(b, r) && r->at < end_of(r); }

static bool ends_at(const request *r, int32_t token) {
    if (r->given < r->rq.min_tokens) return false;
    for (int i = 0; i < r->rq.stop_count; i++)
        if (r->rq.stop_ids[i] == token) return true;
    return false;
}

static void add_token(request *r, int32_t token) {
    int n = r->rq.prompt_tokens + r->given++;
    if (n == r->token_room) r->token = xrealloc(r->token, sizeof token * (size_t)(r->token_room = 2 * n));
    r->token[n] = token;
}

/* The running request that started next after `before` (NULL: first). */
static request *next_started(const nmk_batch *b, const request *before) {
    request *found = NULL;
    for (int s = 0; s < b->rows; s++) {
        request *r = b->row[s];
        if (r && (!before || r->started > before->started) && (!found || r->started < found->started)) found = r;
    }
    return found;
}

/* ---- the queue ---- */

static bool before(const request *a, const request *b) {
    if (a->turn != b->turn) return a->turn < b->turn;
    return a->turn ? a->id < b->id : a->started < b->started;
}

/* Call with the lock. */
static void put_in_queue(nmk_batch *b, request *r) {
    request **at = &b->first;
    while (*at && before(*at, r)) at = &(*at)->next;
    r->next = *at, *at = r;
    b->stats.waiting++;
}

static void take_from_queue(nmk_batch *b, request *r) {
    request **at = &b->first;
    while (*at != r) at = &(*at)->next;
    *at = r->next, r->next = NULL;
    b->stats.waiting--;
}

/* The first round not begun yet in which the client has no request.  Call with the lock. */
static uint64_t turn_for(const nmk_batch *b, uint64_t client) {
    uint64_t turn = b->turn + 1;
    for (const request *r = b->first; r; r = r->next)
        if (r->rq.client == client && r->turn >= turn) turn = r->turn + 1;
    return turn;
}

/* ---- pages ---- */

/* The pages that the row has now are computed in the way that is fixed then. */
static void note_pages(nmk_batch *b, request *r, int slot) {
    const nmk_kv_row *row = &b->engine->kv.row[slot];
    for (; r->made < row->held; r->made++)
        r->fed[r->made] = (uint8_t)(r->made < row->known ? nmk_kv_fed(&b->engine->kv, slot, r->made) //
                                                         : own_way(r, r->made));
}

/* Prompts are counted once, whatever is computed again. */
static void count_prompt(nmk_batch *b, request *r, bool hit) {
    int to = r->at < r->rq.prompt_tokens ? r->at : r->rq.prompt_tokens;
    if (to <= r->counted) return;
    pthread_mutex_lock(&b->lock);
    b->stats.prompt_tokens += (uint64_t)(to - r->counted);
    if (hit) b->stats.cache_hits += (uint64_t)(to - r->counted);
    pthread_mutex_unlock(&b->lock);
    r->counted = to;
}

/* Goes on behind what is kept.  The last known token is computed, as what comes after it is not known. */
static void find_pages(nmk_batch *b, request *r, int slot) {
    bool untouched = r->at == r->found;
    int count =
        r->told_prompt < r->rq.prompt_tokens ? r->told_prompt - 1 : known(r); /* what is to be told is computed */
    r->at = nmk_kv_find(&b->engine->kv, slot, r->token, count, r->fed);
    if (untouched) r->found = r->at;
    note_pages(b, r, slot);
}

/* What is computed and whose tokens are known. */
static void keep_pages(nmk_batch *b, request *r) {
    nmk_kv_keep(&b->engine->kv, slot_of(b, r), r->token, r->at < known(r) ? r->at : known(r), r->fed);
}

/* ---- guides ---- */

/* Call with guide_lock.  The mask goes to the step that wants it; of a guide that is lost, nothing does. */
static void give_mask(nmk_batch *b, request *r) {
    if (!r->wanted || !(r->masked || r->lost_way)) return;
    nmk_engine_give_mask(b->engine, r->want_column, r->want_step, r->lost_way ? NULL : r->mask);
    r->wanted = false;
}

/* No token is added to the row meanwhile: the next one comes after the mask.  False: the guide does not know on. */
static bool work_on(request *r, nmk_err *why) {
    const nmk_batch_guide *g = &r->rq.guide;
    bool good = true;
    while (good && r->told < r->given) good = g->take(g->of, r->token[r->rq.prompt_tokens + r->told++], why);
    return good && g->mask(g->of, r->mask, why);
}

static void *run_guides(void *argument) {
    nmk_batch *b = argument;
    pthread_mutex_lock(&b->guide_lock);
    for (;;) {
        while (!b->job && !b->guides_end) pthread_cond_wait(&b->guide_wake, &b->guide_lock);
        request *r = b->job;
        if (!r) break;
        b->job = r->next_job;
        if (!b->job) b->job_tail = &b->job;
        pthread_mutex_unlock(&b->guide_lock);
        nmk_err why = {""};
        bool good = work_on(r, &why);
        pthread_mutex_lock(&b->guide_lock);
        r->job = false, r->masked = good, r->lost_way = !good, r->why = why;
        give_mask(b, r);
        pthread_cond_broadcast(&b->guide_done);
    }
    pthread_mutex_unlock(&b->guide_lock);
    return NULL;
}

/* Call with guide_lock. */
static void queue_job(nmk_batch *b, request *r) {
    r->job = true, r->masked = false, r->next_job = NULL;
    *b->job_tail = r, b->job_tail = &r->next_job;
    pthread_cond_signal(&b->guide_wake);
}

/* Step `number` is about to be queued, and column c samples the row's next unknown token in it. */
static void want_mask(nmk_batch *b, request *r, int c, uint64_t number) {
    pthread_mutex_lock(&b->guide_lock);
    r->wanted = true, r->want_step = number, r->want_column = c;
    if (!r->masked && !r->lost_way && !r->job) queue_job(b, r);
    give_mask(b, r);
    pthread_mutex_unlock(&b->guide_lock);
}

/* The first step in flight after `number` that samples for the row; false: none. */
static bool next_sample(const nmk_batch *b, const request *r, uint64_t number, uint64_t *step, int *column) {
    for (*step = number + 1; *step < b->engine->steps; ++*step)
        for (*column = 0; *column < b->columns; ++*column)
            if (b->record[*step % RECORDS].id[*column] == r->id && !b->record[*step % RECORDS].prompt[*column] &&
                b->record[*step % RECORDS].life[*column] == r->life)
                return true;
    return false;
}

/* Step `number` has brought a token. */
static void tell_guide(nmk_batch *b, request *r, uint64_t number) {
    pthread_mutex_lock(&b->guide_lock);
    r->wanted = next_sample(b, r, number, &r->want_step, &r->want_column);
    queue_job(b, r);
    pthread_mutex_unlock(&b->guide_lock);
}

/* The row leaves: its steps in flight wait for nothing any more. */
static void give_up_masks(nmk_batch *b, request *r) {
    if (!r->rq.guide.of) return;
    pthread_mutex_lock(&b->guide_lock);
    r->wanted = false;
    pthread_mutex_unlock(&b->guide_lock);
    uint64_t step = b->done - 1;
    for (int c; next_sample(b, r, step, &step, &c);) nmk_engine_give_mask(b->engine, c, step, NULL);
}

/* No guide works for the request any more. */
static void end_guide(nmk_batch *b, request *r) {
    if (!r->rq.guide.of) return;
    pthread_mutex_lock(&b->guide_lock);
    request **at = &b->job;
    while (*at && *at != r) at = &(*at)->next_job;
    if (*at) { /* nobody has begun with it */
        *at = r->next_job, r->job = false;
        if (!*at) b->job_tail = at;
    }
    while (r->job) pthread_cond_wait(&b->guide_done, &b->guide_lock);
    pthread_mutex_unlock(&b->guide_lock);
}

/* Whether the guide has allowed the token that came; false: *why. */
static bool is_allowed(nmk_batch *b, request *r, int32_t token, nmk_err *why) {
    if (!r->rq.guide.of) return true;
    pthread_mutex_lock(&b->guide_lock);
    bool good = r->masked && !r->lost_way && r->mask[token / 32] >> token % 32 & 1;
    *why = r->why;
    pthread_mutex_unlock(&b->guide_lock);
    if (!good && !r->lost_way) nmk_fail(why, "the step sampled token %d, which its mask leaves out", token);
    return good;
}

/* ---- ends ---- */

/* Tells the end of a request that is in no list any more, and frees it. */
static void tell_end(nmk_batch *b, request *r, nmk_batch_end end, const char *message) {
    pthread_mutex_lock(&b->lock);
    b->stats.failed += end == NMK_BATCH_FAILED || end == NMK_BATCH_ASTRAY;
    b->stats.cancelled += end == NMK_BATCH_CANCEL;
    pthread_mutex_unlock(&b->lock);
    end_guide(b, r);
    if (r->rq.on_end) r->rq.on_end(r->rq.user, end, message);
    free_request(r);
}

/* Its column is taken back at the next step boundary.  Preempted, it goes to the queue at once, for whoever cancels
 * it. */
static void leave_row(nmk_batch *b, request *r, bool preempted) {
    int slot = slot_of(b, r);
    give_up_masks(b, r);
    if (r->column >= 0) b->on[r->column] = NULL;
    r->column = -1;
    nmk_kv_drop(&b->engine->kv, slot);
    pthread_mutex_lock(&b->lock);
    b->row[slot] = NULL, b->stats.running--;
    b->stats.kv_used = nmk_kv_used(&b->engine->kv);
    if (preempted) put_in_queue(b, r), b->stats.preemptions++;
    pthread_mutex_unlock(&b->lock);
}

static void finish(nmk_batch *b, request *r, nmk_batch_end end, const char *message) {
    if (end != NMK_BATCH_FAILED) keep_pages(b, r);
    leave_row(b, r, false);
    tell_end(b, r, end, message);
}

/* Back to the head of the queue.  Tokens of queued steps are lost, and come again. */
static void preempt(nmk_batch *b, request *r) {
    keep_pages(b, r);
    r->life++, r->turn = 0;
    leave_row(b, r, true);
}

static void end_waiting(nmk_batch *b, nmk_batch_end end, const char *message) {
    pthread_mutex_lock(&b->lock);
    request *list = b->first;
    b->first = NULL, b->stats.waiting = 0;
    pthread_mutex_unlock(&b->lock);
    while (list) {
        request *r = list;
        list = r->next;
        tell_end(b, r, end, message);
    }
}

static void end_running(nmk_batch *b, nmk_batch_end end, const char *message) {
    for (int s = 0; s < b->rows; s++)
        if (b->row[s]) finish(b, b->row[s], end, message);
}

/* ---- traces ---- */

/* The trace, or why there is none, to who wants it. */
static void give_tasks(nmk_batch *b, const char *why) {
    pthread_mutex_lock(&b->lock);
    nmk_batch_tasks_fn on_tasks = b->on_tasks;
    b->on_tasks = NULL;
    pthread_mutex_unlock(&b->lock);
    nmk_tasks *tasks = b->tasks;
    b->tasks = NULL;
    if (why) nmk_tasks_free(tasks), tasks = NULL;
    if (on_tasks) on_tasks(b->tasks_user, tasks, why);
}

/* The trace that is wanted begins with the next step. */
static void begin_tasks(nmk_batch *b) {
    nmk_err e;
    pthread_mutex_lock(&b->lock);
    int steps = b->tasks || !b->on_tasks ? 0 : b->tasks_steps;
    pthread_mutex_unlock(&b->lock);
    if (steps && nmk_tasks_open(&b->tasks, b->engine, steps, &e)) give_tasks(b, e.text);
}

/* After a turn: whether the trace is complete, or nobody is left whose steps it could wait for. */
static void end_tasks(nmk_batch *b) {
    nmk_err e;
    nmk_tasks *t = b->tasks;
    pthread_mutex_lock(&b->lock);
    bool wanted = b->on_tasks, idle = !b->first && !b->stats.running && b->done == b->engine->steps;
    bool wait = b->tasks_wait;
    pthread_mutex_unlock(&b->lock);
    if (!wanted) return;
    if (t && (nmk_tasks_full(t) || (idle && nmk_tasks_some(t))))
        give_tasks(b, nmk_tasks_read(t, &e) ? e.text : NULL);
    else if (idle && !wait)
        give_tasks(b, "no sequence runs any more");
}

/* ---- failures ---- */

/* Columns idle, no stop ids: those are compared here. */
static int clear_control(nmk_batch *b, nmk_err *e) {
    nmk_machine *m = b->engine->machine;
    return m->calls->enter(m, e) || nmk_engine_set_control(b->engine, NULL, 0, e) ? -1 : 0;
}

/* Once, whichever comes first: the loss or who wants to know of it. */
static void tell_lost(nmk_batch *b) {
    pthread_mutex_lock(&b->lock);
    nmk_batch_lost_fn on_lost = b->stats.lost ? b->on_lost : NULL;
    if (on_lost) b->on_lost = NULL;
    pthread_mutex_unlock(&b->lock);
    if (on_lost) on_lost(b->lost_user, b->why.text);
}

static void lose(nmk_batch *b, const nmk_err *why) {
    pthread_mutex_lock(&b->lock);
    if (!b->stats.lost) b->stats.lost = true, b->why = *why;
    pthread_mutex_unlock(&b->lock);
    tell_lost(b);
}

/* What a request computed may be no numbers: its pages are zeroed. */
static int fail_request(nmk_batch *b, request *r, const char *message, bool lost, nmk_err *e) {
    nmk_kv_forget(&b->engine->kv);
    int rc = lost ? 0 : nmk_engine_wipe_row(b->engine, slot_of(b, r), e);
    finish(b, r, NMK_BATCH_FAILED, message);
    return rc;
}

/* No queued step counts any more; every column is written anew. */
static void fail(nmk_batch *b, const nmk_err *why) {
    nmk_machine *m = b->engine->machine;
    nmk_err second = {0};
    for (int s = 0; s < b->rows; s++)
        if (b->row[s]) give_up_masks(b, b->row[s]); /* or the steps in flight would not end */
    bool lost = strstr(why->text, "the engine is lost") || m->lost || m->calls->wait_all(m, &second);
    b->done = b->engine->steps;
    nmk_pace_drop(&b->pace);
    b->engine->params.trace = 0;
    if (b->tasks) give_tasks(b, why->text);
    memset(b->idle, 0, sizeof b->idle);
    if (lost) lose(b, why); /* before anybody hears of it and asks again */
    for (int s = 0; s < b->rows; s++)
        if (b->row[s] && fail_request(b, b->row[s], why->text, lost, &second)) lost = true;
    nmk_kv_forget(&b->engine->kv);
    if (!lost) return;
    lose(b, why);
    end_waiting(b, NMK_BATCH_LOST, why->text);
}

/* ---- joining and leaving ---- */

static bool fits(const nmk_kv_shape *shape, const int pages[2], int tokens) {
    return nmk_kv_row_pages(shape, 0, tokens) <= pages[0] && nmk_kv_row_pages(shape, 1, tokens) <= pages[1];
}

static int free_slot(const nmk_batch *b) {
    for (int s = 0; s < b->rows; s++)
        if (!b->row[s]) return s;
    return -1;
}

/* Pages that the row lacks to compute all known tokens. */
static int lacks(const nmk_batch *b, const request *r, int slot, int kind) {
    const nmk_kv_row *row = &b->engine->kv.row[slot];
    int n = nmk_kv_row_pages(&b->engine->kv.shape, kind, known(r) + 1) - row->held + (kind ? row->first : 0);
    return n > 0 ? n : 0;
}

/* Pages beside those that the running requests need for their prompts, and one for each of them to go on.  None runs:
 * any number, as it was made sure that each request alone has room. */
static int spare(const nmk_batch *b, int kind) {
    const nmk_kv *kv = &b->engine->kv;
    int need = 0, others = 0;
    for (int s = 0; s < b->rows; s++)
        if (b->row[s]) need += lacks(b, b->row[s], s, kind) + 1, others++;
    return others && kv->pages[kind] ? nmk_kv_available(kv, kind) - need : INT_MAX;
}

/* Finds what is kept for the request.  False: there is no room for the rest; everything is as before. */
static bool begin(nmk_batch *b, request *r, int slot) {
    int made = r->made;
    nmk_kv_begin(&b->engine->kv, slot, r->rq.salt);
    r->at = r->found = 0, r->adjusted = false, r->drawn = -1;
    find_pages(b, r, slot);
    if (lacks(b, r, slot, 0) <= spare(b, 0) && lacks(b, r, slot, 1) <= spare(b, 1)) return true;
    nmk_kv_drop(&b->engine->kv, slot);
    while (r->made > made) r->fed[--r->made] = r->rq.exact ? PAGE : NMK_KV_ANY;
    b->refused.id = r->id;
    for (int k = 0; k < 2; k++) b->refused.spare[k] = spare(b, k);
    return false;
}

/* The head of the queue has a row, if there is room for it.  Nobody overtakes it. */
static bool join_one(nmk_batch *b) {
    int slot = free_slot(b);
    pthread_mutex_lock(&b->lock);
    request *r = b->first;
    pthread_mutex_unlock(&b->lock);
    if (!r || slot < 0) return false;
    if (r->id == b->refused.id && spare(b, 0) <= b->refused.spare[0] && spare(b, 1) <= b->refused.spare[1])
        return false;
    if (!begin(b, r, slot)) return false;
    pthread_mutex_lock(&b->lock);
    take_from_queue(b, r);
    if (r->turn > b->turn) b->turn = r->turn;
    b->row[slot] = r, b->stats.running++;
    if (!r->started) b->stats.cache_queries += (uint64_t)r->rq.prompt_tokens;
    pthread_mutex_unlock(&b->lock);
    r->since = b->plans, r->moves = false;
    count_prompt(b, r, true);
    if (!r->started) r->started = ++b->starts;
    return true;
}

static void leave_cancelled(nmk_batch *b) {
    request *gone = NULL;
    pthread_mutex_lock(&b->lock);
    bool some = b->cancels;
    b->cancels = false;
    for (request *r = b->first, *next; some && r; r = next) {
        next = r->next;
        if (!r->cancelled) continue;
        take_from_queue(b, r);
        r->next = gone, gone = r;
    }
    bool marked[NMK_ROWS];
    for (int s = 0; s < b->rows; s++) marked[s] = some && b->row[s] && b->row[s]->cancelled;
    pthread_mutex_unlock(&b->lock);
    while (gone) {
        request *r = gone;
        gone = r->next;
        tell_end(b, r, NMK_BATCH_CANCEL, NULL);
    }
    for (int s = 0; s < b->rows; s++)
        if (marked[s]) finish(b, b->row[s], NMK_BATCH_CANCEL, NULL);
}

/* ---- a step ---- */

/* Prompts go on behind pages that are kept meanwhile. */
static void jump_ahead(nmk_batch *b) {
    for (int s = 0; s < b->rows; s++) {
        request *r = b->row[s];
        if (r && is_fed(b, r) && r->at == b->engine->kv.row[s].known * PAGE)
            find_pages(b, r, s), count_prompt(b, r, true);
    }
}

/* The next page of both is the same, and r has not begun with it. */
static bool shares_page(const nmk_batch *b, const request *r, const request *other) {
    const nmk_kv *kv = &b->engine->kv;
    int s = slot_of(b, r), o = slot_of(b, other), p = r->at / PAGE;
    if (r->at % PAGE || other->at / PAGE != p || r->rq.salt != other->rq.salt) return false;
    if (own_way(r, p) < PAGE || own_way(other, p) < PAGE || kv->row[s].known != p || kv->row[o].known != p)
        return false;
    if (kv->row[s].private || kv->row[o].private) return false;
    if (p && kv->table[0][s * kv->stride + p - 1] != kv->table[0][o * kv->stride + p - 1]) return false;
    return !memcmp(r->token + p * PAGE, other->token + p * PAGE, sizeof *r->token * PAGE);
}

/* Prompts are fed by launches of their own. */
static bool takes_chunks(const nmk_batch *b) { return b->chunk_token != NULL; }

static request *next_fed(const nmk_batch *b, const request *before_it) {
    request *r = next_started(b, before_it);
    while (r && !is_fed(b, r)) r = next_started(b, r);
    return r;
}

/* A row that rests and can go on, the one that waits longest first. */
static request *next_ready(const nmk_batch *b) {
    request *found = NULL;
    for (int s = 0; s < b->rows; s++) {
        request *r = b->row[s];
        if (r && decodes(b, r) && r->column < 0 && r->at <= known(r) && r->since < b->plans &&
            (!found || r->since < found->since))
            found = r;
    }
    return found;
}

static void take_column(nmk_batch *b, int c) {
    b->on[c]->column = -1, b->on[c]->since = b->plans;
    b->on[c] = NULL;
}

/* Whether a column belongs to a prompt that is fed. */
static bool feeds(const nmk_batch *b, request *const feed[HALVES], int c) {
    return c < HALVES * b->chunk && feed[c / b->chunk];
}

/* A column for a row: a free one, else that of the row that has had one longest; -1: none. */
static int find_column(const nmk_batch *b, request *const feed[HALVES]) {
    int found = -1;
    for (int c = 0; c < b->columns; c++) {
        if (feeds(b, feed, c)) continue;
        if (!b->on[c]) return c;
        if (b->on[c]->since < b->plans && (found < 0 || b->on[c]->since < b->on[found]->since)) found = c;
    }
    return found;
}

/* Which prompt each half of the columns feeds.  Beside rows that decode it is one, in the half with fewer of them. */
static void choose_fed(nmk_batch *b, request *feed[HALVES]) {
    int decoding = 0, in_half[HALVES] = {0};
    feed[0] = takes_chunks(b) ? NULL : next_fed(b, NULL), feed[1] = NULL;
    if (!feed[0]) return;
    for (int s = 0; s < b->rows; s++) decoding += b->row[s] && decodes(b, b->row[s]);
    if (!decoding) {
        feed[1] = next_fed(b, feed[0]);
        while (feed[1] && shares_page(b, feed[1], feed[0])) feed[1] = next_fed(b, feed[1]);
        return;
    }
    for (int c = 0; c < HALVES * b->chunk; c++) in_half[c / b->chunk] += b->on[c] != NULL;
    if (in_half[0] != in_half[1]) b->feed_half = in_half[1] < in_half[0];
    if (b->feed_half) feed[1] = feed[0], feed[0] = NULL;
}

/* There are no pages: the row that started last gives up its own. */
static void preempt_last(nmk_batch *b) {
    request *first = next_started(b, NULL), *last = first;
    for (request *next; (next = next_started(b, last));) last = next;
    /* what a request may need was compared with the pools when it came */
    assert(last != first);
    preempt(b, last);
}

/* Pages for the next positions of all that decode or are chosen to be fed; those that started first have the first
 * choice.  1: they have them; 0: a request is gone for it, so choose anew. */
static int make_room(nmk_batch *b, request *const feed[HALVES]) {
    nmk_kv *kv = &b->engine->kv;
    for (request *r = next_started(b, NULL); r; r = next_started(b, r)) {
        int slot = slot_of(b, r);
        if (!decodes(b, r) && r != feed[0] && r != feed[1]) continue;
        nmk_kv_pass(kv, slot, r->at);
        if (nmk_kv_grow(kv, slot, is_fed(b, r) ? feed_end(b, r) : r->at + 1)) {
            preempt_last(b);
            return 0;
        }
        note_pages(b, r, slot);
    }
    return 1;
}

static void feed_columns(nmk_batch *b, request *r, nmk_column *column, int group) {
    int base = r->at, end = feed_end(b, r);
    assert(base % b->chunk == 0);
    for (int i = 0; base + i < end; i++)
        column[i] = (nmk_column){.token = r->token[base + i],
                                 .pos = base + i,
                                 .base = base,
                                 .group = group,
                                 .slot = slot_of(b, r),
                                 .remaining = 1};
    r->at = end;
    count_prompt(b, r, false);
    if (!is_fed(b, r)) r->since = b->plans;
}

/* At this position of the prompt the machine draws the token that follows, for its likelihood. */
static bool asks_prompt(const request *r) { return r->at + 1 < r->rq.prompt_tokens && r->at + 1 >= r->told_prompt; }

/* Samples, or computes a token that is known. */
static nmk_column decode_column(const nmk_batch *b, request *r, int c) {
    int slot = slot_of(b, r);
    r->moves = r->at == known(r);
    if (r->moves) return nmk_column_decode(&r->rq.sampler, c, slot, r->token[r->at], r->at, end_of(r) - r->at);
    if (asks_prompt(r)) {
        const nmk_bias any = {0}; /* nmk_engine_set_drawn says which */
        const nmk_sampler likely = {.bias = &any, .bias_count = 1, .logprobs = r->rq.prompt_logprobs};
        return nmk_column_decode(&likely, c, slot, r->token[r->at], r->at, 1);
    }
    return (nmk_column){
        .token = r->token[r->at], .pos = r->at, .base = r->at, .group = c, .slot = slot, .remaining = 1};
}

/* Decides what the next step computes: column[] and which of them to write.  Returns the live ones. */
static int plan(nmk_batch *b, request *const feed[HALVES], nmk_column column[NMK_ROWS], bool write[NMK_ROWS]) {
    request *r;
    int live = 0;
    for (int c = 0; c < b->columns; c++) {
        column[c] = nmk_column_idle();
        if (b->on[c] && feeds(b, feed, c)) take_column(b, c);
        write[c] = !b->on[c] && !b->idle[c];
    }
    for (int c; (r = next_ready(b)) && (c = find_column(b, feed)) >= 0;) {
        if (b->on[c]) take_column(b, c);
        b->on[c] = r, r->column = c, r->since = b->plans, r->moves = false;
    }
    for (int c = 0; c < b->columns; c++)
        if (b->on[c] && !b->on[c]->moves) column[c] = decode_column(b, b->on[c], c), write[c] = true;
    for (int h = 0; h < HALVES; h++)
        if (feed[h]) {
            feed_columns(b, feed[h], column + h * b->chunk, h * b->chunk);
            for (int i = 0; i < b->chunk; i++) write[h * b->chunk + i] = true;
        }
    for (int c = 0; c < b->columns; c++) {
        live += b->on[c] || column[c].pos >= 0;
        if (write[c]) b->idle[c] = column[c].pos < 0;
    }
    return live;
}

/* Before a row samples for the first time in its slot the machine learns which tokens it has. */
static int write_adjusts(nmk_batch *b, const nmk_column column[NMK_ROWS], nmk_err *e) {
    for (int c = 0; c < b->columns; c++) {
        request *r = b->on[c];
        if (r && !r->moves && asks_prompt(r)) {
            if (nmk_engine_set_drawn(b->engine, column[c].slot, r->drawn, r->token[r->at + 1], e)) return -1;
            r->drawn = r->token[r->at + 1];
        }
        if (!r || !r->moves || r->adjusted) continue;
        int prompt = r->rq.prompt_tokens;
        if (nmk_engine_set_adjust(b->engine, column[c].slot, &r->rq.sampler, r->token, prompt, r->token + prompt,
                                  r->at + 1 - prompt, e))
            return -1;
        r->adjusted = true;
    }
    return 0;
}

/* Neighbours that change are one write. */
static int write_columns(nmk_batch *b, const nmk_column column[NMK_ROWS], const bool write[NMK_ROWS], nmk_err *e) {
    for (int c = 0, n; c < b->columns; c += n ? n : 1) {
        for (n = 0; c + n < b->columns && write[c + n];) n++;
        if (n && nmk_engine_set_some_columns(b->engine, c, n, column + c, e)) return -1;
    }
    return 0;
}

static int write_tables(nmk_batch *b, nmk_err *e) {
    for (int s = 0; s < b->rows; s++)
        if (b->row[s] && nmk_engine_send_row(b->engine, s, e)) return -1;
    return 0;
}

/* Whether the launch that is queued next begins from rest, so that its time would have that in it.  A machine whose
 * launches end with the call is never idle between them. */
static bool is_idle(const nmk_batch *b) {
    const uint64_t moment_ns = 200000; /* in which a launch that ends is read and the next one queued */
    return b->engine->machine->on_gpu && b->engine->steps == b->done && nmk_now_ns() - b->ended_ns > moment_ns;
}

static void note_queued(nmk_batch *b, uint64_t number, int live, bool idle, bool beside) {
    const int record = (int)(number % RECORDS);
    int decoded = 0;
    for (int c = 0; c < b->columns; c++) decoded += b->on[c] != NULL;
    b->record[record].queued_ns = nmk_now_ns(), b->record[record].chunk = false;
    b->record[record].decoded = decoded, b->record[record].fed = live - decoded;
    b->record[record].idle = idle, b->record[record].beside = beside;
    b->record[record].expected_ms = nmk_pace_queue_step(&b->pace, beside);
}

/* A step has ended; tokens: that it brought to requests. */
static void tell_step(nmk_batch *b, uint64_t number, int tokens) {
    const int record = (int)(number % RECORDS);
    nmk_batch_step s = {.number = number, .began_ns = b->record[record].queued_ns, .ended_ns = nmk_now_ns()};
    if (b->tasks) nmk_tasks_ended(b->tasks, number);
    if (s.began_ns < b->ended_ns) s.began_ns = b->ended_ns;
    b->ended_ns = s.ended_ns;
    if (!b->on_step) return;
    s.machine_ms = b->engine->machine->calls->step_ms(b->engine->machine, number);
    s.decoded = b->record[record].decoded, s.fed = b->record[record].fed, s.tokens = tokens;
    pthread_mutex_lock(&b->lock);
    s.running = b->stats.running, s.waiting = b->stats.waiting, s.kv_used = b->stats.kv_used;
    pthread_mutex_unlock(&b->lock);
    b->on_step(b->step_user, &s);
}

/* What a launch that is queued computed may be found by others, and who begins with it is told. */
static void note_computed(nmk_batch *b) {
    for (int s = 0; s < b->rows; s++) {
        request *r = b->row[s];
        if (!r || r->at == r->found) continue;
        keep_pages(b, r);
        if (!r->begun && r->rq.on_start) r->rq.on_start(r->rq.user, r->found);
        r->begun = true;
    }
}

/* ---- a chunk ---- */

/* Of a launch that has ended.  The machine counts from the end of the one before, so what it was idle for would count
 * too. */
static void note_pace(nmk_batch *b, uint64_t number) {
    const int record = (int)(number % RECORDS);
    const bool chunk = b->record[record].chunk, beside = b->record[record].beside, idle = b->record[record].idle;
    const double expected_ms = b->record[record].expected_ms, work = b->record[record].work;
    const double ms = idle ? expected_ms : b->engine->machine->calls->step_ms(b->engine->machine, number);
    if (chunk)
        nmk_pace_end_chunk(&b->pace, work, idle ? -1 : ms, expected_ms, beside);
    else
        nmk_pace_end_step(&b->pace, idle ? -1 : ms, expected_ms, beside);
    pthread_mutex_lock(&b->lock);
    if (chunk) b->stats.chunks++, b->stats.chunk_tokens += (uint64_t)b->record[record].fed, b->stats.chunk_ms += ms;
    if (beside) *(chunk ? &b->stats.chunk_beside_ms : &b->stats.step_beside_ms) += ms;
    pthread_mutex_unlock(&b->lock);
}

static bool some_decode(const nmk_batch *b) {
    for (int s = 0; s < b->rows; s++)
        if (b->row[s] && decodes(b, b->row[s])) return true;
    return false;
}

/* The end of a row's span in a chunk with room for so many more tokens: as far as there are pages beside those that the
 * others need for what is known of them. */
static int span_end(const nmk_batch *b, const request *r, int slot, int room, int64_t keys) {
    const nmk_kv *kv = &b->engine->kv;
    int64_t end = fed_until(r), keys_room = nmk_engine_span_room(b->engine, r->at, keys);
    if (end > r->at + room) end = r->at + room;
    if (end > r->at + keys_room) end = r->at + keys_room;
    for (int k = 0; k < 2; k++) {
        if (!kv->pages[k]) continue;
        const int64_t available = nmk_kv_available(kv, k);
        int64_t pages = (int64_t)spare(b, k) + lacks(b, r, slot, k) + 1;
        if (pages < 1) pages = 1; /* it goes on, if only by a page */
        if (pages > available) pages = available;
        pages += kv->row[slot].held;
        if (end > pages * PAGE) end = pages * PAGE;
    }
    return (int)end;
}

typedef struct {
    nmk_span span[NMK_ROWS];
    request *of[NMK_ROWS];
    int spans, tokens;
    int64_t keys;
    double work;
} chunk;

static bool waits_for(const nmk_batch *b, const request *r, request *const *others, int count) {
    for (int i = 0; i < count; i++)
        if (shares_page(b, r, others[i])) return true;
    return false;
}

/* A span of the row, of at most so many tokens and so much work, as far as there are pages.  False: there is none. */
static bool add_span(nmk_batch *b, chunk *k, request *r, int most, double work) {
    nmk_kv *kv = &b->engine->kv;
    const int slot = slot_of(b, r);
    nmk_kv_pass(kv, slot, r->at);
    int end = span_end(b, r, slot, most, k->keys), count = nmk_pace_tokens(&b->pace, r->at, work, end - r->at);
    /* where a token is much work a page of them is the least that a chunk is worth */
    if (count < PAGE && !k->spans) count = end - r->at < PAGE ? end - r->at : PAGE;
    if (count <= 0 || nmk_kv_grow(kv, slot, r->at + count)) return false;
    note_pages(b, r, slot);
    k->span[k->spans] = (nmk_span){.first = k->tokens, .count = count, .pos = r->at, .slot = slot};
    memcpy(b->chunk_token + k->tokens, r->token + r->at, sizeof *r->token * (size_t)count);
    k->keys += nmk_engine_span_keys(r->at, count), k->work += nmk_pace_work(&b->pace, r->at, count);
    k->tokens += count, k->of[k->spans++] = r;
    return true;
}

static double work_left(const nmk_batch *b, const request *r) {
    return nmk_pace_work(&b->pace, r->at, fed_until(r) - r->at);
}

/* Prompts are fed in the order in which they started, as users of vLLM expect; but a short one behind a long one need
 * not wait for all of it.  So where the first would fill the chunk, a part goes to that with the least left: the first
 * takes a third longer at most, and who asks little has its answer after a few chunks.  NULL: nobody gets ahead. */
static request *choose_guest(const nmk_batch *b, int room, double work) {
    request *first = next_fed(b, NULL), *guest = NULL, *passed[NMK_ROWS];
    int count = 0;
    double least = first ? work_left(b, first) : 0;
    if (!first || (fed_until(first) - first->at <= room - room / GUEST && least <= work - work / GUEST)) return NULL;
    for (request *r = first; r; passed[count++] = r, r = next_fed(b, r)) {
        const double left = work_left(b, r);
        if (r == first || left >= least || waits_for(b, r, passed, count)) continue;
        guest = r, least = left;
    }
    return guest;
}

/* The spans of the next chunk, without prompts that begin like another in it: these wait for its pages.  False: a
 * request is gone for want of pages, so choose anew. */
static bool choose_spans(nmk_batch *b, chunk *k) {
    const int most = nmk_engine_chunk_tokens(b->engine);
    *k = (chunk){.spans = 0};
    pthread_mutex_lock(&b->lock);
    b->pace.budget_ms = b->budget_ms, b->pace.share = b->share;
    pthread_mutex_unlock(&b->lock);
    const double work = nmk_pace_room(&b->pace, some_decode(b));
    request *guest = choose_guest(b, most, work);
    if (guest) add_span(b, k, guest, most / GUEST, work / GUEST);
    for (request *r = next_fed(b, NULL); r && k->tokens < most && k->work < work; r = next_fed(b, r)) {
        if (r == guest || waits_for(b, r, k->of, k->spans)) continue;
        if (add_span(b, k, r, most - k->tokens, work - k->work)) continue;
        if (k->spans) break;
        preempt_last(b);
        return false;
    }
    return true;
}

static void note_chunk(nmk_batch *b, const chunk *k, uint64_t number, bool idle, bool beside) {
    const int record = (int)(number % RECORDS);
    memset(b->record[record].id, 0, sizeof b->record[record].id);
    b->record[record].queued_ns = nmk_now_ns(), b->record[record].chunk = true;
    b->record[record].decoded = 0, b->record[record].fed = k->tokens, b->record[record].work = k->work;
    b->record[record].idle = idle, b->record[record].beside = beside;
    b->record[record].expected_ms = nmk_pace_queue_chunk(&b->pace, k->work, beside);
    for (int i = 0; i < k->spans; i++) {
        request *r = k->of[i];
        r->at += k->span[i].count;
        count_prompt(b, r, false);
        if (!is_fed(b, r)) r->since = b->plans;
    }
}

/* ---- launches ---- */

/* 1: queued; 0: there is nothing to compute before tokens of queued steps are read; -1: failed.  beside: prompts are
 * fed by chunks meanwhile; both: a chunk goes with the step, if there is one. */
static int queue_step(nmk_batch *b, bool beside, bool both, nmk_err *e) {
    chunk k = {.spans = 0};
    request *feed[HALVES];
    nmk_column column[NMK_ROWS];
    bool write[NMK_ROWS];
    uint64_t number, behind = 0;
    do {
        while (both && !choose_spans(b, &k)) {}
        choose_fed(b, feed);
    } while (!make_room(b, feed));
    int live = plan(b, feed, column, write);
    if (!live) {
        for (int c = 0; c < b->columns; c++) b->idle[c] = b->idle[c] && !write[c];
        return 0;
    }
    if (write_tables(b, e) || write_adjusts(b, column, e) || write_columns(b, column, write, e)) return -1;
    for (int c = 0; c < b->columns; c++) {
        request *q = b->on[c];
        if (q && q->moves && q->rq.guide.of && q->at == known(q)) want_mask(b, q, c, b->engine->steps);
    }
    if (b->tasks) nmk_tasks_queue(b->tasks);
    const bool idle = is_idle(b);
    if (k.spans ? nmk_engine_queue_both(b->engine, live, k.span, k.spans, b->chunk_token, &number, &behind, e)
                : nmk_engine_queue_step(b->engine, live, &number, e))
        return -1;
    if (b->tasks) nmk_tasks_queued(b->tasks, number);
    note_queued(b, number, live, idle, beside);
    for (int c = 0; c < b->columns; c++) {
        request *r = b->on[c];
        bool asks = r && !r->moves && asks_prompt(r);
        b->record[number % RECORDS].id[c] = r && (r->moves || asks) ? r->id : 0;
        b->record[number % RECORDS].prompt[c] = asks ? r->at + 1 : 0;
        b->record[number % RECORDS].life[c] = r ? r->life : 0;
        if (!r) continue;
        r->at++;
        count_prompt(b, r, false);
        if (decodes(b, r)) continue;
        take_column(b, c);
        b->idle[c] = r->moves; /* the machine itself ends it, or else leaves it as it is */
    }
    if (k.spans) note_chunk(b, &k, behind, false, true);
    note_computed(b);
    b->chunk_last = k.spans > 0;
    return 1;
}

/* As queue_step. */
static int queue_chunk(nmk_batch *b, nmk_err *e) {
    chunk k;
    uint64_t number;
    while (!choose_spans(b, &k)) {}
    if (!k.spans) return 0;
    const bool idle = is_idle(b), beside = some_decode(b);
    if (write_tables(b, e) || nmk_engine_queue_chunk(b->engine, k.span, k.spans, b->chunk_token, &number, e)) return -1;
    note_chunk(b, &k, number, idle, beside);
    note_computed(b);
    b->chunk_last = true;
    return 1;
}

/* A step or a chunk: where rows decode and prompts are fed, steps have their share of the time, and no chunk follows
 * another.  In a mixed engine a chunk goes in one launch with the step before it.  As queue_step. */
static int queue_launch(nmk_batch *b, nmk_err *e) {
    b->plans++;
    jump_ahead(b);
    const bool fed = takes_chunks(b) && next_fed(b, NULL), beside = fed && some_decode(b);
    if (!beside) nmk_pace_forgive(&b->pace);
    const bool both = beside && b->engine->mixed && nmk_pace_may_chunk(&b->pace, true);
    const bool first = fed && !(beside && (b->engine->mixed || b->chunk_last || !nmk_pace_may_chunk(&b->pace, false)));
    if (first) {
        const int queued = queue_chunk(b, e);
        if (queued) return queued;
    }
    const int queued = queue_step(b, beside, both, e);
    /* rows may rest until tokens are read; if none are to come, nobody is held up by a chunk */
    return queued || !fed || first || b->engine->steps != b->done ? queued : queue_chunk(b, e);
}

static bool was_given(const request *r, int32_t token) {
    for (int i = 0; i < r->given; i++)
        if (r->token[r->rq.prompt_tokens + i] == token) return true;
    return false;
}

/* The row stands at its cap: what has to follow is known now, and is computed without sampling.  False: that was the
 * end of the request. */
static bool look_at_cap(nmk_batch *b, request *r) {
    const nmk_batch_cap *cap = &r->rq.cap;
    const nmk_logprobs certain = {.chosen = 0};
    r->capped = false;
    if ((cap->opens >= 0 && !was_given(r, cap->opens)) || was_given(r, cap->closes)) return true;
    r->adjusted = false; /* the machine did not see them */
    for (int i = 0; i < cap->then_count; i++) {
        add_token(r, cap->then[i]);
        if (r->rq.on_token) r->rq.on_token(r->rq.user, cap->then[i], r->rq.sampler.logprobs ? &certain : NULL);
        if (r->given < r->rq.max_tokens) continue;
        finish(b, r, NMK_BATCH_LENGTH, NULL);
        return false;
    }
    return true;
}

/* Waits for the oldest step in flight and hands its tokens out. */
static int read_step(nmk_batch *b, nmk_err *e) {
    const int32_t *out;
    int rc = 0;
    if (nmk_engine_wait_step(b->engine, b->done, &out, e)) return -1;
    int record = (int)(b->done++ % RECORDS), tokens = 0;
    request *of[NMK_ROWS] = {0};
    for (int c = 0; c < b->columns; c++)
        for (int s = 0; s < b->rows; s++) {
            request *r = b->row[s];
            if (r && r->id == b->record[record].id[c] && r->life == b->record[record].life[c])
                of[c] = r, tokens += !b->record[record].prompt[c];
        }
    pthread_mutex_lock(&b->lock);
    b->stats.steps++, b->stats.tokens += (uint64_t)tokens;
    b->stats.last_step_ms = nmk_now_ns() / 1000000;
    b->stats.kv_used = nmk_kv_used(&b->engine->kv);
    pthread_mutex_unlock(&b->lock);
    note_pace(b, b->done - 1);
    tell_step(b, b->done - 1, tokens);
    for (int c = 0; c < b->columns; c++) {
        request *r = of[c];
        if (!r) continue;
        const int prompt = b->record[record].prompt[c];
        if (out[c] < 0 || out[c] >= b->engine->vocab || (prompt && out[c] != r->token[prompt])) {
            nmk_err why;
            nmk_fail(&why, "the step gave %d in place of %s", out[c], prompt ? "the prompt's token" : "a token");
            rc |= fail_request(b, r, why.text, false, e);
            continue;
        }
        nmk_logprobs logprobs;
        if (prompt) {
            const nmk_sampler likely = {.logprobs = r->rq.prompt_logprobs};
            r->told_prompt = prompt + 1;
            if (r->rq.on_prompt)
                r->rq.on_prompt(r->rq.user, prompt, nmk_engine_logprobs(b->engine, b->done - 1, c, &likely, &logprobs));
            continue;
        }
        nmk_err why = {""};
        if (!is_allowed(b, r, out[c], &why)) {
            finish(b, r, NMK_BATCH_ASTRAY, why.text);
            continue;
        }
        add_token(r, out[c]);
        keep_pages(b, r);
        if (r->rq.on_token)
            r->rq.on_token(r->rq.user, out[c],
                           nmk_engine_logprobs(b->engine, b->done - 1, c, &r->rq.sampler, &logprobs));
        if (ends_at(r, out[c]))
            finish(b, r, NMK_BATCH_STOP, NULL);
        else if (r->given == r->rq.max_tokens)
            finish(b, r, NMK_BATCH_LENGTH, NULL);
        else if ((!r->capped || r->given < r->rq.cap.after || look_at_cap(b, r)) && r->rq.guide.of)
            tell_guide(b, r, b->done - 1);
    }
    return rc;
}

/* ---- the thread ---- */

/* Steps to keep in flight: few while rows change hands.  Few with guides too: what is queued before a step may wait for
 * writes queued long before, and so for steps that wait for masks; these must come without this thread.  None behind a
 * long chunk beside which nobody decodes: who comes meanwhile need not wait for the next one too, which begins a little
 * later for it. */
static uint64_t ahead(const nmk_batch *b) {
    uint64_t most = (uint64_t)b->engine->steps_ahead;
    bool changes = false;
    for (int s = 0; s < b->rows; s++) {
        const request *r = b->row[s];
        if (r) changes |= is_fed(b, r) || (decodes(b, r) && r->column < 0) || r->rq.guide.of != NULL;
    }
    const int last = (int)((b->engine->steps - 1) % RECORDS);
    if (b->engine->steps != b->done && b->record[last].chunk && b->record[last].expected_ms > b->pace.budget_ms &&
        !some_decode(b))
        return 1;
    return changes && most > FEED_AHEAD ? FEED_AHEAD : most;
}

static int turn(nmk_batch *b, nmk_err *e) {
    while (join_one(b)) {}
    begin_tasks(b);
    for (int more = 1; more && b->engine->steps - b->done < ahead(b);)
        if ((more = queue_launch(b, e)) < 0) return -1;
    return b->done < b->engine->steps ? read_step(b, e) : 0;
}

static void *run(void *argument) {
    nmk_batch *b = argument;
    nmk_err e = {0};
    if (clear_control(b, &e)) {
        nmk_fail_in(&e, "the engine is lost");
        fail(b, &e);
    }
    while (!b->stats.lost) {
        pthread_mutex_lock(&b->lock);
        while (!b->closing && !b->first && !b->stats.running && !b->cancels && b->done == b->engine->steps)
            pthread_cond_wait(&b->wake, &b->lock);
        bool closing = b->closing;
        pthread_mutex_unlock(&b->lock);
        if (closing) break;
        leave_cancelled(b);
        e.text[0] = 0;
        if (turn(b, &e)) fail(b, &e);
        end_tasks(b);
    }
    give_tasks(b, "the server is shutting down");
    end_running(b, NMK_BATCH_CANCEL, NULL);
    end_waiting(b, NMK_BATCH_CANCEL, NULL);
    return NULL;
}

/* ---- for other threads ---- */

static void free_batch(nmk_batch *b) {
    pthread_mutex_lock(&b->guide_lock);
    b->guides_end = true;
    pthread_cond_broadcast(&b->guide_wake);
    pthread_mutex_unlock(&b->guide_lock);
    for (int i = 0; i < b->guides; i++) pthread_join(b->guide[i], NULL);
    pthread_cond_destroy(&b->guide_wake), pthread_cond_destroy(&b->guide_done);
    pthread_mutex_destroy(&b->guide_lock);
    pthread_cond_destroy(&b->wake), pthread_mutex_destroy(&b->lock);
    free(b->chunk_token), free(b);
}

/* A step reads two bytes of a weight for two operations with it, so a token's operations are as many as those bytes; a
 * key that it sees brings four for each element of all query heads. */
static void open_pace(nmk_batch *b) {
    const double token = (double)nmk_step_bytes(1, 0);
    const double key = 4.0 * NMK_HEADS * NMK_HEAD_DIM / token; /* of a layer: a key and a value, two bytes each */
    b->pace = (nmk_pace){
        .key_work = NMK_FULL_LAYERS * key, .window_key_work = NMK_SLIDING_LAYERS * key, .window = NMK_WINDOW};
}

int nmk_batch_open(nmk_batch **batch, nmk_engine *engine, int most_waiting, nmk_err *e) {
    nmk_batch *b = xcalloc(1, sizeof *b);
    assert(engine->steps_ahead <= RECORDS);
    b->most_waiting = most_waiting > 0 ? most_waiting : NMK_BATCH_WAITING;
    b->engine = engine, b->done = engine->steps, b->columns = engine->columns, b->rows = engine->rows;
    b->chunk =
        b->columns / HALVES < engine->generation->positions ? b->columns / HALVES : engine->generation->positions;
    assert(b->chunk > 0 && PAGE % b->chunk == 0 && "a page begins with a chunk");
    b->budget_ms = NMK_BATCH_BUDGET_MS, b->share = NMK_BATCH_SHARE / 100.0;
    open_pace(b);
    if (nmk_engine_chunk_tokens(engine))
        b->chunk_token = xcalloc((size_t)nmk_engine_chunk_tokens(engine), sizeof *b->chunk_token);
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->wake, NULL);
    pthread_mutex_init(&b->guide_lock, NULL);
    pthread_cond_init(&b->guide_wake, NULL), pthread_cond_init(&b->guide_done, NULL);
    b->job_tail = &b->job;
    long cores = sysconf(_SC_NPROCESSORS_ONLN), guides = cores / 2 < GUIDE_THREADS ? cores / 2 : GUIDE_THREADS;
    int rc = 0;
    while (!rc && b->guides < (guides > 1 ? guides : 1)) {
        rc = pthread_create(&b->guide[b->guides], NULL, run_guides, b);
        b->guides += !rc;
    }
    if (!rc) rc = pthread_create(&b->thread, NULL, run, b);
    if (rc) {
        free_batch(b);
        return nmk_fail(e, "no thread for the step loop: %s", strerror(rc));
    }
    *batch = b;
    return 0;
}

void nmk_batch_set_budget(nmk_batch *b, double ms) {
    pthread_mutex_lock(&b->lock);
    b->budget_ms = ms;
    pthread_mutex_unlock(&b->lock);
}

void nmk_batch_set_share(nmk_batch *b, double percent) {
    assert(percent >= 0 && percent < 100);
    pthread_mutex_lock(&b->lock);
    b->share = percent / 100;
    pthread_mutex_unlock(&b->lock);
}

void nmk_batch_set_on_lost(nmk_batch *b, nmk_batch_lost_fn on_lost, void *user) {
    pthread_mutex_lock(&b->lock);
    b->on_lost = on_lost, b->lost_user = user;
    pthread_mutex_unlock(&b->lock);
    tell_lost(b);
}

void nmk_batch_set_on_step(nmk_batch *b, nmk_batch_step_fn on_step, void *user) {
    pthread_mutex_lock(&b->lock);
    b->on_step = on_step, b->step_user = user;
    pthread_mutex_unlock(&b->lock);
}

int nmk_batch_trace(nmk_batch *b, int steps, bool wait, nmk_batch_tasks_fn on_tasks, void *user, nmk_err *e) {
    int rc = -1;
    assert(steps > 0 && steps <= NMK_TASKS_STEPS);
    pthread_mutex_lock(&b->lock);
    if (b->closing || b->stats.lost)
        nmk_fail(e, b->closing ? "the server is shutting down" : "the engine is lost");
    else if (b->on_tasks)
        nmk_fail(e, "a trace of tasks is under way");
    else if (!wait && !b->stats.running && !b->first)
        nmk_fail(e, "no sequence runs");
    else
        b->on_tasks = on_tasks, b->tasks_user = user, b->tasks_steps = steps, b->tasks_wait = wait, rc = 0;
    pthread_mutex_unlock(&b->lock);
    return rc;
}

static int check_request(const nmk_batch *b, const nmk_batch_request *rq, nmk_err *e) {
    if (rq->prompt_tokens < 1) return nmk_fail(e, "the prompt is empty");
    if (rq->max_tokens < 1) return nmk_fail(e, "max_tokens is %d, at least 1 is needed", rq->max_tokens);
    if (rq->min_tokens < 0) return nmk_fail(e, "min_tokens is %d, expected 0 or more", rq->min_tokens);
    int64_t tokens = (int64_t)rq->prompt_tokens + rq->max_tokens;
    const nmk_engine *g = b->engine;
    if (tokens > g->max_len)
        return nmk_fail(e, "%d tokens of prompt and %d of answer: the context holds %d", rq->prompt_tokens,
                        rq->max_tokens, g->max_len);
    if (!fits(&g->kv.shape, g->kv.pages, (int)tokens))
        return nmk_fail(e, "%d tokens of prompt and %d of answer: there is not so much memory for keys and values",
                        rq->prompt_tokens, rq->max_tokens);
    if (nmk_sampler_check(&rq->sampler, g->vocab, e)) return -1;
    if (rq->prompt_logprobs < 0 || rq->prompt_logprobs > NMK_TOP_LOGPROBS + 1)
        return nmk_fail(e, "prompt_logprobs %d, expected 0 to %d", rq->prompt_logprobs, NMK_TOP_LOGPROBS + 1);
    for (int i = 0; i < rq->prompt_tokens; i++)
        if (rq->prompt[i] < 0 || rq->prompt[i] >= g->vocab)
            return nmk_fail(e, "token %d is not in 0 to %d", rq->prompt[i], g->vocab - 1);
    return 0;
}

int nmk_batch_submit(nmk_batch *b, const nmk_batch_request *rq, uint64_t *id, nmk_err *e) {
    int rc = -1;
    pthread_mutex_lock(&b->lock);
    if (b->closing)
        nmk_fail(e, "the server is shutting down");
    else if (b->stats.lost)
        nmk_fail(e, "the engine is lost");
    else if (b->stats.waiting >= b->most_waiting)
        nmk_fail(e, "%d requests are waiting already", b->stats.waiting);
    else
        rc = check_request(b, rq, e);
    if (rc == 0) {
        request *r = new_request(rq);
        *id = r->id = ++b->last_id;
        r->turn = turn_for(b, rq->client);
        put_in_queue(b, r);
        b->stats.requests++;
        pthread_cond_signal(&b->wake);
    }
    pthread_mutex_unlock(&b->lock);
    return rc;
}

void nmk_batch_cancel(nmk_batch *b, uint64_t id) {
    request *found = NULL;
    pthread_mutex_lock(&b->lock);
    for (int s = 0; s < b->rows; s++)
        if (b->row[s] && b->row[s]->id == id) found = b->row[s];
    for (request *r = b->first; r && !found; r = r->next)
        if (r->id == id) found = r;
    if (found) {
        found->cancelled = b->cancels = true;
        pthread_cond_signal(&b->wake);
    }
    pthread_mutex_unlock(&b->lock);
}

void nmk_batch_read_stats(nmk_batch *b, nmk_batch_stats *stats) {
    pthread_mutex_lock(&b->lock);
    *stats = b->stats;
    pthread_mutex_unlock(&b->lock);
}

void nmk_batch_stop(nmk_batch *b) {
    if (!b || b->stopped) return;
    pthread_mutex_lock(&b->lock);
    b->closing = true;
    pthread_cond_signal(&b->wake);
    pthread_mutex_unlock(&b->lock);
    pthread_join(b->thread, NULL);
    b->stopped = true;
}

void nmk_batch_close(nmk_batch *b) {
    if (!b) return;
    nmk_batch_stop(b);
    nmk_engine_close(b->engine);
    free_batch(b);
}
