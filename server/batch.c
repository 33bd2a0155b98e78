/* The step loop of a server: who decodes and who is fed in each step.
 *
 * The batch's thread alone touches the engine, the rows and the columns; `lock` guards what other threads see: the
 * queue, the ids and cancel marks of running requests, the statistics.  Callbacks run without it.
 *
 * A column that decodes is moved on by the machine itself, so the host writes a column only when it changes hands, and
 * may queue many steps before it reads a token.  A row that leaves its column rests until the host has read all its
 * tokens; then it can go on in any column.  While prompts are fed the host stays FEED_AHEAD steps ahead, which makes
 * that one step of rest.  An ended row costs nothing more than its column in steps that are queued already: it cannot
 * pass `remaining`, for which it has pages, and whoever gets the pages writes them in later steps. */
#include "batch.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum {
    CHUNK = NMK_COLUMNS / 2, /* positions of a prompt in one step, cut at multiples of it */
    HALVES = 2,              /* a chunk takes the first columns of a half: where it stands changes no sum */
    FEED_AHEAD = 2,
    MOST_WAITING = 1024,
    RECORDS = 64
};
_Static_assert(NMK_COLUMNS % HALVES == 0 && CHUNK > 0, "halves");

typedef struct request request;
struct request {
    request *next; /* in the queue */
    uint64_t id;
    nmk_batch_request rq; /* with its own copies of prompt and stop ids */
    bool cancelled;       /* by lock */
    /* of a running one */
    int fed;           /* positions in queued steps, of the prompt but its last token, which is the first to decode */
    int queued, given; /* tokens: queued steps bring; the callback got */
    int column;        /* of the last queued step; -1: it is fed, or rests, or all its steps are queued */
    int32_t last;      /* the token at its next position, if queued == given */
    uint64_t since;    /* plan that gave or took its column */
};

struct nmk_batch {
    nmk_engine *engine;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* by lock */
    bool closing;
    bool cancels;              /* some request's mark is new */
    request *first, **end;     /* the queue */
    request *row[NMK_COLUMNS]; /* running, by slot of the page tables; changed by the thread alone */
    int most_waiting, max_len;
    uint64_t last_id;
    nmk_batch_stats stats;
    /* of the thread */
    request *on[NMK_COLUMNS]; /* decodes in this column, as of the last queued step */
    bool idle[NMK_COLUMNS];   /* the machine's column is known to be inactive after that step */
    int feed_half;
    uint64_t plans; /* steps planned */
    uint64_t done;  /* steps read; engine->steps - done are in flight */
    struct {
        uint64_t id[NMK_COLUMNS]; /* request whose token the step brings; 0: none */
    } record[RECORDS];
};

/* ---- requests ---- */

static void free_request(request *r) {
    if (!r) return;
    free((void *)(uintptr_t)r->rq.prompt);
    free((void *)(uintptr_t)r->rq.stop_ids);
    free(r);
}

static int slot_of(const nmk_batch *b, const request *r) {
    int s = 0;
    while (b->row[s] != r) s++;
    return s;
}

static bool is_fed(const request *r) { return r->fed < r->rq.prompt_tokens - 1; }

/* Has tokens that no queued step brings, and its prompt in the pages. */
static bool decodes(const request *r) { return !is_fed(r) && r->queued < r->rq.max_tokens; }

static bool ends_at(const request *r, int32_t token) {
    if (r->given < r->rq.min_tokens) return false;
    for (int i = 0; i < r->rq.stop_count; i++)
        if (r->rq.stop_ids[i] == token) return true;
    return false;
}

static void *copy_of(const void *from, size_t bytes) { return memcpy(xmalloc(bytes ? bytes : 1), from, bytes); }

/* Tells the end of a request that is in no list any more, and frees it. */
static void tell_end(nmk_batch *b, request *r, nmk_batch_end end, const char *message) {
    pthread_mutex_lock(&b->lock);
    b->stats.failed += end == NMK_BATCH_FAILED;
    b->stats.cancelled += end == NMK_BATCH_CANCEL;
    pthread_mutex_unlock(&b->lock);
    if (r->rq.on_end) r->rq.on_end(r->rq.user, end, message);
    free_request(r);
}

/* A running request ends; its column is taken back at the next step boundary. */
static void finish(nmk_batch *b, request *r, nmk_batch_end end, const char *message) {
    int slot = slot_of(b, r);
    if (r->column >= 0) b->on[r->column] = NULL;
    nmk_kv_drop(&b->engine->kv, slot);
    pthread_mutex_lock(&b->lock);
    b->row[slot] = NULL, b->stats.running--;
    pthread_mutex_unlock(&b->lock);
    tell_end(b, r, end, message);
}

/* ---- failures ---- */

static void end_waiting(nmk_batch *b, nmk_batch_end end, const char *message) {
    pthread_mutex_lock(&b->lock);
    request *list = b->first;
    b->first = NULL, b->end = &b->first, b->stats.waiting = 0;
    pthread_mutex_unlock(&b->lock);
    while (list) {
        request *r = list;
        list = r->next;
        tell_end(b, r, end, message);
    }
}

static void end_running(nmk_batch *b, nmk_batch_end end, const char *message) {
    for (int s = 0; s < NMK_COLUMNS; s++)
        if (b->row[s]) finish(b, b->row[s], end, message);
}

/* No queued step counts any more; every column is written anew. */
static void fail(nmk_batch *b, const nmk_err *why) {
    nmk_machine *m = b->engine->machine;
    nmk_err second = {0};
    bool lost = strstr(why->text, "the engine is lost") || m->lost || m->calls->wait_all(m, &second);
    b->done = b->engine->steps;
    memset(b->idle, 0, sizeof b->idle);
    if (lost) {
        pthread_mutex_lock(&b->lock);
        b->stats.lost = true;
        pthread_mutex_unlock(&b->lock);
    }
    end_running(b, NMK_BATCH_FAILED, why->text);
    if (lost) end_waiting(b, NMK_BATCH_FAILED, why->text);
}

/* ---- joining and leaving ---- */

static bool has_pages(const nmk_kv *kv, int tokens, const int have[2]) {
    for (int k = 0; k < 2; k++)
        if (nmk_kv_row_pages(&kv->shape, k, tokens) > have[k]) return false;
    return true;
}

static int free_slot(const nmk_batch *b) {
    for (int s = 0; s < NMK_COLUMNS; s++)
        if (!b->row[s]) return s;
    return -1;
}

/* The head of the queue if there is a row and pages for it.  Nobody overtakes it.  Call with the lock. */
static bool can_join(const nmk_batch *b) {
    const nmk_kv *kv = &b->engine->kv;
    return b->first && free_slot(b) >= 0 &&
           has_pages(kv, b->first->rq.prompt_tokens + b->first->rq.max_tokens, kv->free_count);
}

static int join(nmk_batch *b, nmk_err *e) {
    for (;;) {
        pthread_mutex_lock(&b->lock);
        request *r = can_join(b) ? b->first : NULL;
        int slot = free_slot(b);
        if (r) {
            if (!(b->first = r->next)) b->end = &b->first;
            b->row[slot] = r, b->stats.waiting--, b->stats.running++;
        }
        pthread_mutex_unlock(&b->lock);
        if (!r) return 0;
        if (nmk_engine_take_row(b->engine, slot, r->rq.prompt_tokens + r->rq.max_tokens, e)) return -1;
        if (r->rq.on_start) r->rq.on_start(r->rq.user, 0); /* nothing is cached yet */
    }
}

static void leave_cancelled(nmk_batch *b) {
    request *gone = NULL;
    pthread_mutex_lock(&b->lock);
    bool some = b->cancels;
    b->cancels = false;
    for (request **at = &b->first; some && *at;) {
        request *r = *at;
        if (!r->cancelled) {
            at = &r->next;
            continue;
        }
        *at = r->next, r->next = gone, gone = r, b->stats.waiting--;
    }
    if (some)
        for (b->end = &b->first; *b->end; b->end = &(*b->end)->next) {}
    bool marked[NMK_COLUMNS];
    for (int s = 0; s < NMK_COLUMNS; s++) marked[s] = some && b->row[s] && b->row[s]->cancelled;
    pthread_mutex_unlock(&b->lock);
    while (gone) {
        request *r = gone;
        gone = r->next;
        tell_end(b, r, NMK_BATCH_CANCEL, NULL);
    }
    for (int s = 0; s < NMK_COLUMNS; s++)
        if (marked[s]) finish(b, b->row[s], NMK_BATCH_CANCEL, NULL);
}

/* ---- a step ---- */

/* The oldest request that has prompt left, after `before`. */
static request *next_fed(const nmk_batch *b, const request *before) {
    request *found = NULL;
    for (int s = 0; s < NMK_COLUMNS; s++) {
        request *r = b->row[s];
        if (r && is_fed(r) && (!before || r->id > before->id) && (!found || r->id < found->id)) found = r;
    }
    return found;
}

/* A row that rests and can go on, the one that waits longest first. */
static request *next_ready(const nmk_batch *b) {
    request *found = NULL;
    for (int s = 0; s < NMK_COLUMNS; s++) {
        request *r = b->row[s];
        if (r && decodes(r) && r->column < 0 && r->queued == r->given && r->since < b->plans &&
            (!found || r->since < found->since))
            found = r;
    }
    return found;
}

static void take_column(nmk_batch *b, int c) {
    b->on[c]->column = -1, b->on[c]->since = b->plans;
    b->on[c] = NULL;
}

/* A column for a row: a free one, else that of the row that has had one longest; -1: none. */
static int find_column(const nmk_batch *b, request *const feed[HALVES]) {
    int found = -1;
    for (int c = 0; c < NMK_COLUMNS; c++) {
        if (feed[c / CHUNK]) continue;
        if (!b->on[c]) return c;
        if (b->on[c]->since < b->plans && (found < 0 || b->on[c]->since < b->on[found]->since)) found = c;
    }
    return found;
}

/* Which prompt each half of the columns feeds.  Beside rows that decode it is one, in the half with fewer of them. */
static void choose_fed(nmk_batch *b, request *feed[HALVES]) {
    int decoding = 0, in_half[HALVES] = {0};
    feed[0] = next_fed(b, NULL), feed[1] = NULL;
    if (!feed[0]) return;
    for (int s = 0; s < NMK_COLUMNS; s++) decoding += b->row[s] && decodes(b->row[s]);
    if (!decoding) {
        feed[1] = next_fed(b, feed[0]);
        return;
    }
    for (int c = 0; c < NMK_COLUMNS; c++) in_half[c / CHUNK] += b->on[c] != NULL;
    if (in_half[0] != in_half[1]) b->feed_half = in_half[1] < in_half[0];
    if (b->feed_half) feed[1] = feed[0], feed[0] = NULL;
}

static void feed_columns(nmk_batch *b, request *r, nmk_column *column, int group) {
    int base = r->fed, end = r->rq.prompt_tokens - 1;
    assert(base % CHUNK == 0);
    for (int i = 0; i < CHUNK && base + i < end; i++, r->fed++)
        column[i] = (nmk_column){.token = r->rq.prompt[base + i],
                                 .pos = base + i,
                                 .base = base,
                                 .group = group,
                                 .slot = slot_of(b, r),
                                 .remaining = 1};
    if (!is_fed(r)) r->since = b->plans;
}

static nmk_column decode_column(const nmk_batch *b, const request *r, int c) {
    int pos = r->rq.prompt_tokens - 1 + r->queued;
    return nmk_column_decode(&r->rq.sampler, c, slot_of(b, r), r->last, pos, r->rq.max_tokens - r->queued);
}

/* Decides what the next step computes: column[] and which of them to write.  Returns the live ones. */
static int plan(nmk_batch *b, nmk_column column[NMK_COLUMNS], bool write[NMK_COLUMNS]) {
    request *feed[HALVES], *r;
    int live = 0;
    b->plans++;
    choose_fed(b, feed);
    for (int c = 0; c < NMK_COLUMNS; c++) {
        column[c] = nmk_column_idle();
        if (b->on[c] && feed[c / CHUNK]) take_column(b, c);
        write[c] = !b->on[c] && !b->idle[c];
    }
    for (int c; (r = next_ready(b)) && (c = find_column(b, feed)) >= 0;) {
        if (b->on[c]) take_column(b, c);
        b->on[c] = r, r->column = c, r->since = b->plans;
        column[c] = decode_column(b, r, c), write[c] = true;
    }
    for (int h = 0; h < HALVES; h++)
        if (feed[h]) {
            feed_columns(b, feed[h], column + h * CHUNK, h * CHUNK);
            for (int i = 0; i < CHUNK; i++) write[h * CHUNK + i] = true;
        }
    for (int c = 0; c < NMK_COLUMNS; c++) {
        live += b->on[c] || column[c].pos >= 0;
        if (write[c]) b->idle[c] = column[c].pos < 0;
    }
    return live;
}

/* Neighbours that change are one write. */
static int write_columns(nmk_batch *b, const nmk_column column[NMK_COLUMNS], const bool write[NMK_COLUMNS],
                         nmk_err *e) {
    nmk_machine *m = b->engine->machine;
    uint64_t to = b->engine->params.control + offsetof(nmk_control, column);
    for (int c = 0, n; c < NMK_COLUMNS; c += n ? n : 1) {
        for (n = 0; c + n < NMK_COLUMNS && write[c + n];) n++;
        if (n &&
            m->calls->queue_write(m, to + sizeof *column * (uint64_t)c, column + c, sizeof *column * (uint64_t)n, e))
            return -1;
    }
    return 0;
}

/* 1: queued; 0: there is nothing to compute before tokens of queued steps are read; -1: failed. */
static int queue_step(nmk_batch *b, nmk_err *e) {
    nmk_column column[NMK_COLUMNS];
    bool write[NMK_COLUMNS];
    uint64_t number, fed = 0;
    for (int s = 0; s < NMK_COLUMNS; s++)
        if (b->row[s]) fed -= (uint64_t)b->row[s]->fed;
    int live = plan(b, column, write);
    if (!live) {
        for (int c = 0; c < NMK_COLUMNS; c++) b->idle[c] = b->idle[c] && !write[c];
        return 0;
    }
    if (write_columns(b, column, write, e) || nmk_engine_queue_step(b->engine, live, &number, e)) return -1;
    for (int c = 0; c < NMK_COLUMNS; c++) {
        request *r = b->on[c];
        b->record[number % RECORDS].id[c] = r ? r->id : 0;
        if (!r) continue;
        if (r->queued++ == 0) fed++; /* a prompt's last token */
        if (decodes(r)) continue;
        r->column = -1, b->on[c] = NULL, b->idle[c] = true; /* the machine itself ends it */
    }
    for (int s = 0; s < NMK_COLUMNS; s++)
        if (b->row[s]) fed += (uint64_t)b->row[s]->fed;
    pthread_mutex_lock(&b->lock);
    b->stats.prompt_tokens += fed;
    pthread_mutex_unlock(&b->lock);
    return 1;
}

/* Waits for the oldest step in flight and hands its tokens out. */
static int read_step(nmk_batch *b, nmk_err *e) {
    const int32_t *out;
    if (nmk_engine_wait_step(b->engine, b->done, &out, e)) return -1;
    const uint64_t *id = b->record[b->done++ % RECORDS].id;
    request *of[NMK_COLUMNS] = {0};
    int tokens = 0;
    for (int c = 0; c < NMK_COLUMNS; c++)
        for (int s = 0; id[c] && s < NMK_COLUMNS; s++)
            if (b->row[s] && b->row[s]->id == id[c]) of[c] = b->row[s], tokens++;
    pthread_mutex_lock(&b->lock);
    b->stats.steps++, b->stats.tokens += (uint64_t)tokens;
    b->stats.last_step_ms = nmk_now_ns() / 1000000;
    pthread_mutex_unlock(&b->lock);
    for (int c = 0; c < NMK_COLUMNS; c++) {
        request *r = of[c];
        if (!r) continue;
        if (out[c] < 0 || out[c] >= b->engine->vocab) {
            nmk_err why;
            nmk_fail(&why, "the step gave %d in place of a token", out[c]);
            finish(b, r, NMK_BATCH_FAILED, why.text);
            continue;
        }
        r->given++, r->last = out[c];
        if (r->rq.on_token) r->rq.on_token(r->rq.user, out[c], NULL);
        if (ends_at(r, out[c]))
            finish(b, r, NMK_BATCH_STOP, NULL);
        else if (r->given == r->rq.max_tokens)
            finish(b, r, NMK_BATCH_LENGTH, NULL);
    }
    return 0;
}

/* ---- the thread ---- */

/* Steps to keep in flight: few while rows change hands. */
static uint64_t ahead(const nmk_batch *b) {
    uint64_t most = (uint64_t)b->engine->steps_ahead;
    bool changes = false;
    for (int s = 0; s < NMK_COLUMNS; s++)
        if (b->row[s]) changes |= is_fed(b->row[s]) || (decodes(b->row[s]) && b->row[s]->column < 0);
    return changes && most > FEED_AHEAD ? FEED_AHEAD : most;
}

static int turn(nmk_batch *b, nmk_err *e) {
    if (join(b, e)) return -1;
    for (int more = 1; more && b->engine->steps - b->done < ahead(b);)
        if ((more = queue_step(b, e)) < 0) return -1;
    return b->done < b->engine->steps ? read_step(b, e) : 0;
}

/* Columns idle, no stop ids: those are compared here. */
static int clear_control(nmk_batch *b, nmk_err *e) {
    nmk_control control = {0};
    nmk_machine *m = b->engine->machine;
    for (int c = 0; c < NMK_COLUMNS; c++) control.column[c] = nmk_column_idle();
    return m->calls->enter(m, e) || nmk_engine_set_control(b->engine, &control, e) ? -1 : 0;
}

static void *run(void *argument) {
    nmk_batch *b = argument;
    nmk_err e = {0};
    if (clear_control(b, &e)) {
        nmk_fail_in(&e, "the engine is lost");
        fail(b, &e);
    }
    for (;;) {
        pthread_mutex_lock(&b->lock);
        while (!b->closing && !b->first && !b->stats.running && !b->cancels && b->done == b->engine->steps)
            pthread_cond_wait(&b->wake, &b->lock);
        bool closing = b->closing;
        pthread_mutex_unlock(&b->lock);
        if (closing) break;
        leave_cancelled(b);
        e.text[0] = 0;
        if (turn(b, &e)) fail(b, &e);
    }
    end_running(b, NMK_BATCH_CANCEL, NULL);
    end_waiting(b, NMK_BATCH_CANCEL, NULL);
    return NULL;
}

/* ---- for other threads ---- */

int nmk_batch_open(nmk_batch **batch, nmk_engine *engine, int most_waiting, nmk_err *e) {
    nmk_batch *b = xcalloc(1, sizeof *b);
    assert(engine->steps_ahead <= RECORDS);
    b->engine = engine, b->end = &b->first, b->done = engine->steps;
    b->most_waiting = most_waiting > 0 ? most_waiting : MOST_WAITING;
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->wake, NULL);
    int rc = pthread_create(&b->thread, NULL, run, b);
    if (rc) {
        pthread_cond_destroy(&b->wake), pthread_mutex_destroy(&b->lock);
        free(b);
        return nmk_fail(e, "no thread for the step loop: %s", strerror(rc));
    }
    *batch = b;
    return 0;
}

static int check_request(const nmk_batch *b, const nmk_batch_request *rq, nmk_err *e) {
    const nmk_engine *g = b->engine;
    if (rq->prompt_tokens < 1) return nmk_fail(e, "the prompt is empty");
    if (rq->max_tokens < 1) return nmk_fail(e, "max_tokens is %d, at least 1 is needed", rq->max_tokens);
    if (rq->min_tokens < 0) return nmk_fail(e, "min_tokens is %d, expected 0 or more", rq->min_tokens);
    int64_t tokens = (int64_t)rq->prompt_tokens + rq->max_tokens;
    if (tokens > g->max_len)
        return nmk_fail(e, "%d tokens of prompt and %d of answer: the context holds %d", rq->prompt_tokens,
                        rq->max_tokens, g->max_len);
    if (!has_pages(&g->kv, (int)tokens, g->kv.pages))
        return nmk_fail(e, "%d tokens of prompt and %d of answer: there is not so much memory for keys and values",
                        rq->prompt_tokens, rq->max_tokens);
    if (!(rq->sampler.temperature >= 0) || isinf(rq->sampler.temperature))
        return nmk_fail(e, "temperature %g, expected 0 or more", (double)rq->sampler.temperature);
    for (int i = 0; i < rq->prompt_tokens; i++)
        if (rq->prompt[i] < 0 || rq->prompt[i] >= g->vocab)
            return nmk_fail(e, "token %d is not in 0 to %d", rq->prompt[i], g->vocab - 1);
    return 0;
}

int nmk_batch_submit(nmk_batch *b, const nmk_batch_request *rq, uint64_t *id, nmk_err *e) {
    int rc = -1;
    if (check_request(b, rq, e)) return -1;
    request *r = xcalloc(1, sizeof *r);
    r->rq = *rq, r->column = -1, r->last = rq->prompt[rq->prompt_tokens - 1];
    r->rq.prompt = copy_of(rq->prompt, sizeof *rq->prompt * (size_t)rq->prompt_tokens);
    if (rq->stop_count < 0) r->rq.stop_count = 0;
    r->rq.stop_ids = r->rq.stop_count ? copy_of(rq->stop_ids, sizeof *rq->stop_ids * (size_t)rq->stop_count) : NULL;
    pthread_mutex_lock(&b->lock);
    if (b->closing)
        nmk_fail(e, "the server is shutting down");
    else if (b->stats.lost)
        nmk_fail(e, "the engine is lost");
    else if (b->stats.waiting >= b->most_waiting)
        nmk_fail(e, "%d requests are waiting already", b->stats.waiting);
    else
        rc = 0;
    if (rc == 0) {
        *id = r->id = ++b->last_id;
        *b->end = r, b->end = &r->next, r = NULL;
        b->stats.waiting++, b->stats.requests++;
        pthread_cond_signal(&b->wake);
    }
    pthread_mutex_unlock(&b->lock);
    free_request(r);
    return rc;
}

void nmk_batch_cancel(nmk_batch *b, uint64_t id) {
    request *found = NULL;
    pthread_mutex_lock(&b->lock);
    for (int s = 0; s < NMK_COLUMNS; s++)
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

void nmk_batch_close(nmk_batch *b) {
    if (!b) return;
    pthread_mutex_lock(&b->lock);
    b->closing = true;
    pthread_cond_signal(&b->wake);
    pthread_mutex_unlock(&b->lock);
    pthread_join(b->thread, NULL);
    nmk_engine_close(b->engine);
    pthread_cond_destroy(&b->wake), pthread_mutex_destroy(&b->lock);
    free(b);
}
