/* A client of a batch: counts its callbacks, keeps its tokens. */
#ifndef NMK_TESTS_BATCH_HELPER_H
#define NMK_TESTS_BATCH_HELPER_H

#include "batch.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { MOST_TOKENS = 1024, WAIT_S = 60 };

typedef struct {
    nmk_batch_request rq;
    uint64_t id;
    int32_t prompt[2 * MOST_TOKENS];
    /* by `clients` */
    int32_t token[MOST_TOKENS];
    int count, ends;
    int starts, cached;
    nmk_batch_end end;
    char message[1024];
    uint64_t first_ns; /* when the first token came */
    /* cancels itself after this many tokens; 0: never */
    int cancel_after;
    nmk_batch *batch;
    /* holds up the batch in the callback of this token, until go_on; 0: never */
    int hold_at;
} client;

static pthread_mutex_t clients = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t client_news = PTHREAD_COND_INITIALIZER;

static void client_start(void *user, int cached_tokens) {
    client *k = user;
    pthread_mutex_lock(&clients);
    k->starts++, k->cached = cached_tokens;
    pthread_mutex_unlock(&clients);
}

static void client_token(void *user, int32_t token, const nmk_logprobs *logprobs) {
    (void)logprobs;
    client *k = user;
    pthread_mutex_lock(&clients);
    if (k->count == 0) k->first_ns = nmk_now_ns();
    if (k->count < MOST_TOKENS) k->token[k->count] = token;
    bool enough = ++k->count == k->cancel_after;
    pthread_cond_broadcast(&client_news);
    while (k->hold_at == k->count) pthread_cond_wait(&client_news, &clients);
    pthread_mutex_unlock(&clients);
    if (enough) nmk_batch_cancel(k->batch, k->id);
}

static void client_end(void *user, nmk_batch_end end, const char *message) {
    client *k = user;
    pthread_mutex_lock(&clients);
    k->ends++, k->end = end;
    snprintf(k->message, sizeof k->message, "%s", message ? message : "");
    pthread_cond_broadcast(&client_news);
    pthread_mutex_unlock(&clients);
}

static int submit(nmk_batch *b, client *k, nmk_err *e) {
    k->count = k->ends = k->starts = k->cached = 0, k->first_ns = 0, k->message[0] = 0;
    k->rq.prompt = k->prompt, k->rq.user = k, k->rq.on_token = client_token, k->rq.on_end = client_end;
    if (!k->rq.on_start) k->rq.on_start = client_start;
    k->batch = b;
    return nmk_batch_submit(b, &k->rq, &k->id, e);
}

/* Until the client has that many tokens (INT32_MAX: until its end), or has ended; false: it takes too long. */
static bool wait_tokens(client *k, int tokens) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += time_limit(WAIT_S);
    int rc = 0;
    pthread_mutex_lock(&clients);
    while (rc == 0 && k->ends == 0 && k->count < tokens) rc = pthread_cond_timedwait(&client_news, &clients, &until);
    pthread_mutex_unlock(&clients);
    return rc == 0;
}

static bool wait_end(client *k) { return wait_tokens(k, INT32_MAX); }

/* To the next token to hold at; 0: none. */
__attribute__((unused)) static void go_on(client *k, int hold_at) {
    pthread_mutex_lock(&clients);
    k->hold_at = hold_at;
    pthread_cond_broadcast(&client_news);
    pthread_mutex_unlock(&clients);
}

/* Until nothing runs or waits and the thread sleeps. */
__attribute__((unused)) static nmk_batch_stats quiet(nmk_batch *b) {
    nmk_batch_stats s = {0};
    uint64_t steps = UINT64_MAX;
    for (int i = 0; i < time_limit(1000); i++) {
        nmk_batch_read_stats(b, &s);
        if (s.running == 0 && s.waiting == 0 && s.steps == steps) break;
        steps = s.steps;
        usleep(20000);
    }
    return s;
}

/* Until that many run and wait. */
__attribute__((unused)) static bool wait_load(nmk_batch *b, int running, int waiting) {
    nmk_batch_stats s;
    for (int i = 0; i < time_limit(WAIT_S * 1000); i++) {
        nmk_batch_read_stats(b, &s);
        if (s.running == running && s.waiting == waiting) return true;
        usleep(1000);
    }
    return false;
}

#endif
