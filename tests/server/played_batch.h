/* For tests of server/api.c over a batch that the test plays: the functions of batch.h below stand in for those of
 * server/batch.c, and the test says what tokens come. */
#ifndef NMK_TESTS_PLAYED_BATCH_H
#define NMK_TESTS_PLAYED_BATCH_H

#include <ctype.h>
#include <pthread.h>
#include <stdatomic.h>

#include "api.h"
#include "serve_helper.h"

enum { MOST = 512 };

/* What was submitted; by its id - 1. */
static nmk_batch_request submitted[MOST];
static atomic_int submits, cancels;
static atomic_int waiting;
static _Atomic bool lost;

int nmk_batch_submit(nmk_batch *b, const nmk_batch_request *rq, uint64_t *id, nmk_err *e) {
    (void)b;
    if (lost) return nmk_fail(e, "the engine is lost");
    submitted[submits] = *rq;
    *id = (uint64_t)submits + 1;
    submits++;
    return 0;
}

void nmk_batch_cancel(nmk_batch *b, uint64_t id) { (void)b, (void)id, cancels++; }

void nmk_batch_read_stats(nmk_batch *b, nmk_batch_stats *s) {
    (void)b;
    *s = (nmk_batch_stats){.lost = lost, .waiting = waiting};
}

int nmk_batch_trace(nmk_batch *b, int steps, bool wait, nmk_batch_tasks_fn on_tasks, void *user, nmk_err *e) {
    (void)b, (void)steps, (void)wait, (void)on_tasks, (void)user;
    return nmk_fail(e, "no steps here");
}

static nmk_tokenizer *tokenizer;
static nmk_http *http;
static int port;

__attribute__((unused)) static void *loop(void *unused) {
    nmk_err e;
    (void)unused;
    if (nmk_http_run(http, &e) < 0) printf("not ok - nmk_http_run: %s\n", e.text);
    return NULL;
}

/* Until so many sequences have been submitted. */
__attribute__((unused)) static void wait_submits(int count) {
    for (int i = 0; i < time_limit(2000) && submits < count; i++) usleep(1000);
}

/* Posts, and waits until `count` sequences were submitted in all. */
__attribute__((unused)) static int begin(const char *path, const char *body, int count) {
    int fd = request_open(port, "POST", path, "", body);
    wait_submits(count);
    if (submits < count) check(false, "submitted", "%d of %d", (int)submits, count);
    return fd;
}

__attribute__((unused)) static void token(int id, int32_t t) {
    submitted[id - 1].on_token(submitted[id - 1].user, t, NULL);
}
__attribute__((unused)) static void end(int id, nmk_batch_end how, const char *message) {
    submitted[id - 1].on_end(submitted[id - 1].user, how, message);
}

/* The tokens of a text; special tokens by their names. */
__attribute__((unused)) static void say(int id, const char *text) {
    nmk_ids ids = {0};
    nmk_err e;
    if (nmk_tokenizer_encode(tokenizer, text, strlen(text), NMK_PARSE_SPECIAL, &ids, &e)) exit(1);
    for (size_t i = 0; i < ids.count; i++) token(id, ids.id[i]);
    nmk_ids_free(&ids);
}

/* The same with log-probabilities: the one of the nth token is -n / 16, its alternatives are the token and ids from 0. */
__attribute__((unused)) static void say_likely(int id, const nmk_ids *ids, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) {
        nmk_logprobs l = {.chosen = -(float)i / 16, .count = submitted[id - 1].sampler.logprobs - 1};
        for (int k = 0; k < l.count; k++) l.id[k] = k ? k - 1 : ids->id[i], l.logprob[k] = l.chosen - (float)k;
        submitted[id - 1].on_token(submitted[id - 1].user, ids->id[i], &l);
    }
}

/* The tokens that an answer's logprobs name, one after the other; the values are -n / 16 from `first` on. */
__attribute__((unused)) static bool likely_are(struct json_object *content, nmk_buf *text, int first,
                                               int alternatives) {
    bool good = json_object_is_type(content, json_type_array);
    for (size_t i = 0; good && i < json_object_array_length(content); i++) {
        struct json_object *one = json_object_array_get_idx(content, i), *top = at(one, "top_logprobs");
        struct json_object *bytes = at(one, "bytes");
        good &= json_object_get_double(at(one, "logprob")) == -(double)(first + (int)i) / 16;
        good &= (int)json_object_array_length(top) == alternatives;
        if (alternatives > 0) good &= !strcmp(text_at(top, "0.token"), text_at(one, "token"));
        for (size_t k = 0; k < json_object_array_length(bytes); k++)
            nmk_buf_add(text, (char[]){(char)json_object_get_int(json_object_array_get_idx(bytes, k))}, 1);
    }
    return good;
}

__attribute__((unused)) static nmk_ids ids_of(const char *text) {
    nmk_ids ids = {0};
    nmk_err e;
    if (nmk_tokenizer_encode(tokenizer, text, strlen(text), NMK_PARSE_SPECIAL, &ids, &e)) exit(1);
    return ids;
}

__attribute__((unused)) static void start(int id, int cached) {
    submitted[id - 1].on_start(submitted[id - 1].user, cached);
}

/* The prompt of a sequence that was submitted, as text; the caller frees. */
__attribute__((unused)) static nmk_buf prompt_of(int id) {
    nmk_buf text = {0};
    nmk_buf_puts(&text, "");
    nmk_tokenizer_decode(tokenizer, submitted[id - 1].prompt, (size_t)submitted[id - 1].prompt_tokens, false, &text);
    return text;
}

/* The prompt of an answered request ends with `wanted`; frees both. */
__attribute__((unused)) static void check_end(const char *name, reply *r, nmk_buf *prompt, const char *wanted) {
    size_t n = strlen(wanted);
    check(prompt->length >= n && !strcmp(prompt->data + prompt->length - n, wanted), name,
          "status %d, got\n%s\nwanted\n%s", r->status, prompt->data, wanted);
    nmk_buf_free(prompt), reply_free(r);
}

/* ---------------------------------------------------------------- the server */

static nmk_api *played_api;
static pthread_t played_thread;

/* Serves with the toy's texts.  *o: what was made of it, to be changed and used again. */
__attribute__((unused)) static void play(nmk_api_options *o, const char *const *keys, unsigned key_count) {
    static const char *const names[] = {"toy"};
    static const int32_t stop_ids[] = {4, 2};
    nmk_err e;
    nmk_http_options ho = {
        .routes = nmk_api_routes, .route_count = nmk_api_route_count, .api_keys = keys, .api_key_count = key_count};
    played_api = nmk_api_new();
    if (nmk_tokenizer_load("examples/nmc-toy", &tokenizer, &e) ||
        (!o->chat_template && nmk_template_load("examples/nmc-toy", NULL, &o->chat_template, &e)) ||
        nmk_http_open(&http, &ho, &nmk_api_callbacks, played_api, &e)) {
        printf("not ok - set-up: %s\n", e.text);
        exit(1);
    }
    o->tokenizer = tokenizer;
    o->bos_token = "<BOS_TOKEN>", o->eos_token = "<|END_OF_TURN_TOKEN|>";
    o->names = names, o->name_count = 1;
    o->stop_ids = stop_ids, o->stop_count = 2;
    o->max_len = 4096, o->version = "test";
    nmk_request_limits_init(&o->limits, nmk_tokenizer_size(tokenizer));
    port = nmk_http_port(http);
    nmk_api_start(played_api, http, o);
    pthread_create(&played_thread, NULL, loop, NULL);
}

/* Nothing runs any more. */
__attribute__((unused)) static void play_end(nmk_api_options *o) {
    nmk_http_drain(http, 1000);
    pthread_join(played_thread, NULL);
    nmk_api_stop(played_api);
    nmk_http_close(http);
    nmk_api_close(played_api);
    nmk_template_free(o->chat_template);
    nmk_tokenizer_free(tokenizer);
}

/* An answer with what differs from run to run made the same: 24 letters of ids are ID, times are 7.  The caller frees. */
__attribute__((unused)) static nmk_buf steady(const char *text) {
    static const char *const before[] = {"resp_", "msg_", "rs_", "fc_", "call_"};
    static const char time[] = "\"created_at\":";
    nmk_buf out = {0};
    nmk_buf_puts(&out, "");
    while (*text) {
        size_t n = 1;
        const char *put_in = NULL;
        for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
            size_t m = strlen(before[i]), k = 0;
            if (strncmp(text, before[i], m)) continue;
            while (isalnum((unsigned char)text[m + k]) && k < NMK_ID_CHARS) k++;
            if (k == NMK_ID_CHARS) n = m, put_in = "ID";
        }
        if (!strncmp(text, time, sizeof time - 1)) n = sizeof time - 1, put_in = "7";
        nmk_buf_add(&out, text, n);
        text += n;
        if (!put_in) continue;
        nmk_buf_puts(&out, put_in);
        text += put_in[0] == 'I' ? NMK_ID_CHARS : strspn(text, "0123456789");
    }
    return out;
}

/* Compares with tests/server/data/FILE.txt, to which a newline more than the text belongs. */
__attribute__((unused)) static void same_as(const char *name, const char *got, const char *file) {
    nmk_err e = {""};
    char *wanted = NULL, *path = xasprintf("tests/server/data/%s.txt", file);
    size_t bytes = 0;
    bool good = !nmk_file_read(&wanted, &bytes, path, 1 << 20, &e) && bytes == strlen(got) + 1 &&
                !memcmp(wanted, got, bytes - 1);
    check(good, name, "%s is\n%s\nbut got\n%s", path, wanted ? wanted : e.text, got);
    free(wanted), free(path);
}

#endif
