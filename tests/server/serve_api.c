/* server/api.c over a batch that the test plays: what the engine rarely does, and any text from the model.
 * The functions of batch.h below stand in for those of server/batch.c. */
#define _GNU_SOURCE /* memmem */
#include <pthread.h>
#include <stdatomic.h>

#include "api.h"
#include "serve_helper.h"

enum { MOST = 64 };

/* What was submitted; by its id - 1. */
static nmk_batch_request submitted[MOST];
static atomic_int submits, cancels;
static _Atomic bool full, lost;

int nmk_batch_submit(nmk_batch *b, const nmk_batch_request *rq, uint64_t *id, nmk_err *e) {
    (void)b;
    if (full || lost) return nmk_fail(e, "the queue is full");
    submitted[submits] = *rq;
    *id = (uint64_t)submits + 1;
    submits++;
    return 0;
}

void nmk_batch_cancel(nmk_batch *b, uint64_t id) { (void)b, (void)id, cancels++; }

void nmk_batch_read_stats(nmk_batch *b, nmk_batch_stats *s) {
    (void)b;
    *s = (nmk_batch_stats){.lost = lost, .waiting = full ? 1024 : 0};
}

/* ---------------------------------------------------------------- */

static nmk_tokenizer *tokenizer;
static nmk_http *http;
static int port;

static void *loop(void *unused) {
    nmk_err e;
    (void)unused;
    if (nmk_http_run(http, &e) < 0) printf("not ok - nmk_http_run: %s\n", e.text);
    return NULL;
}

/* Posts, and waits until `count` sequences were submitted in all. */
static int begin(const char *path, const char *body, int count) {
    int fd = request_open(port, "POST", path, "", body);
    for (int i = 0; i < 2000 && submits < count; i++) usleep(1000);
    if (submits < count) check(false, "submitted", "%d of %d", (int)submits, count);
    return fd;
}

static void token(int id, int32_t t) { submitted[id - 1].on_token(submitted[id - 1].user, t, NULL); }
static void end(int id, nmk_batch_end how, const char *message) {
    submitted[id - 1].on_end(submitted[id - 1].user, how, message);
}

/* The tokens of a text; special tokens by their names. */
static void say(int id, const char *text) {
    nmk_ids ids = {0};
    nmk_err e;
    if (nmk_tokenizer_encode(tokenizer, text, strlen(text), NMK_PARSE_SPECIAL, &ids, &e)) exit(1);
    for (size_t i = 0; i < ids.count; i++) token(id, ids.id[i]);
    nmk_ids_free(&ids);
}

#define CHAT  "/v1/chat/completions"
#define TEXT  "/v1/completions"
#define ASK   "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define TOOLS "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}]"
#define CALL                                                                                                   \
    "I call.<|END_THINKING|><|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": " \
    "{\"a\": [1, 2.50]}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>"

static void test_calls(void) {
    int id = submits + 1, fd = begin(CHAT, "{" TOOLS "," ASK "}", id);
    say(id, CALL);
    end(id, NMK_BATCH_STOP, NULL);
    reply r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "tool_calls") &&
              !strcmp(text_at(r.json, "choices.0.message.tool_calls.0.function.arguments"), "{\"a\": [1, 2.50]}") &&
              !strncmp(text_at(r.json, "choices.0.message.tool_calls.0.id"), "call_", 5) &&
              !strcmp(text_at(r.json, "choices.0.message.reasoning_content"), "I call."),
          "a tool call", "%s", r.body);
    reply_free(&r);

    fd = begin(CHAT, "{\"stream\":true," TOOLS "," ASK "}", ++id);
    say(id, CALL);
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    const char *first = strstr(r.body, "\"tool_calls\":[{\"index\":0,\"id\":\"call_");
    check(first && strstr(first, "\"name\":\"f\"") && strstr(first, "\"finish_reason\":\"tool_calls\"") &&
              strstr(first, "[DONE]"),
          "a streamed tool call", "%s", r.body);
    reply_free(&r);

    fd = begin(CHAT, "{\"tool_choice\":\"none\"," TOOLS "," ASK "}", ++id);
    say(id, CALL);
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "stop") && !at(r.json, "choices.0.message.tool_calls"),
          "tool_choice none", "%s", r.body);
    reply_free(&r);

    fd = begin(CHAT, "{" TOOLS "," ASK "}", ++id);
    say(id, "I<|END_THINKING|><|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"a\": ");
    end(id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "length"), "a call that is cut", "%s", r.body);
    reply_free(&r);
}

static void test_stops(void) {
    /* A stop id that does not end the answer is text like any other. */
    nmk_ids ids = {0};
    nmk_err e;
    nmk_tokenizer_encode(tokenizer, " input", 6, 0, &ids, &e);
    char *body = xasprintf("{\"prompt\":\"x\",\"min_tokens\":3,\"max_tokens\":9,\"stop_token_ids\":[%d]}", ids.id[0]);
    int id = submits + 1, fd = begin(TEXT, body, id);
    const nmk_batch_request *rq = &submitted[id - 1];
    check(rq->min_tokens == 3 && rq->max_tokens == 9 && rq->stop_count == 3, "what the batch is asked for",
          "%d stop ids", rq->stop_count);
    token(id, ids.id[0]);
    say(id, " of");
    token(id, ids.id[0]);
    end(id, NMK_BATCH_STOP, NULL);
    reply r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.text"), " input of"), "a stop id before min_tokens", "%s", r.body);
    reply_free(&r);
    fd = begin(TEXT, body, ++id);
    token(id, ids.id[0]);
    end(id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    check(!strcmp(text_at(r.json, "choices.0.text"), " input"), "a stop id that max_tokens cut", "%s", r.body);
    reply_free(&r), free(body), nmk_ids_free(&ids);

    /* The row is cancelled; what it still says is not heard. */
    int before = cancels;
    fd = begin(TEXT, "{\"stream\":true,\"prompt\":\"x\",\"stop\":\"b c\"}", ++id);
    say(id, "a b c d e");
    r = reply_read(fd);
    told t = told_read(&r, false);
    check(!t.wrong[0] && !strcmp(t.text.data, "a ") && !strcmp(t.ended, "stop") && cancels == before + 1,
          "a stop string ends the row", "%s: %s, %d cancelled", t.wrong, shown(t.text.data), cancels - before);
    say(id, " f");
    end(id, NMK_BATCH_CANCEL, NULL);
    told_free(&t), reply_free(&r);
}

static void test_failures(void) {
    int id = submits + 1, fd = begin(CHAT, "{" ASK "}", id);
    say(id, "I");
    end(id, NMK_BATCH_FAILED, "task 7 waited");
    reply r = reply_read(fd);
    check(r.status == 500 && strstr(text_at(r.json, "error.message"), "task 7 waited"), "a failure", "%s", r.body);
    reply_free(&r);

    /* One of two fails: the other is cancelled, the client is told once. */
    int before = cancels;
    fd = begin(CHAT, "{\"n\":2,\"stream\":true," ASK "}", id += 2);
    say(id - 1, "I<|END_THINKING|>");
    end(id, NMK_BATCH_FAILED, "task 7 waited");
    r = reply_read(fd);
    const char *error = strstr(r.body, "data: {\"error\":{");
    check(r.status == 200 && error && strstr(error, "data: [DONE]") && !strstr(r.body, "\"finish_reason\":\""),
          "a failure within a stream", "%s", r.body);
    end(id - 1, NMK_BATCH_CANCEL, NULL);
    check(cancels > before, "the other answer is cancelled", "it is not");
    reply_free(&r);

    full = true;
    r = post(port, CHAT, "{\"stream\":true," ASK "}");
    check(r.status == 503 && strstr(r.raw.data, "Retry-After: ") &&
              !strcmp(text_at(r.json, "error.code"), "overloaded"),
          "a full queue", "%s", r.raw.data);
    reply_free(&r);
    full = false;
    lost = true;
    r = get(port, "/health");
    check(r.status == 503, "health of a lost engine", "%d", r.status);
    reply_free(&r);
    r = post(port, CHAT, "{" ASK "}");
    check(r.status == 503 && !strcmp(text_at(r.json, "error.code"), "engine_lost"), "a lost engine", "%s", r.body);
    reply_free(&r);
    lost = false;
    r = get(port, "/metrics");
    check(strstr(r.body, "finished_reason=\"error\"} 3") != NULL, "failures are counted", "%s", r.body);
    reply_free(&r);
}

static void test_stall(void) {
    usleep(100000);
    reply r = get(port, "/health");
    check(r.status == 200, "health of an idle engine", "%d", r.status);
    reply_free(&r);
    int id = submits + 1, fd = begin(CHAT, "{" ASK "}", id);
    usleep(100000);
    r = get(port, "/health");
    check(r.status == 503, "health without steps", "%d", r.status);
    reply_free(&r);
    end(id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    reply_free(&r);
    r = get(port, "/health");
    check(r.status == 200, "health afterwards", "%d", r.status);
    reply_free(&r);
}

/* Closing with requests under way leaves nothing behind (the sanitizers' leak check). */
static void test_close(pthread_t thread, nmk_api *api) {
    int id = submits + 1, fd = begin(CHAT, "{\"stream\":true," ASK "}", id);
    say(id, "I");
    nmk_http_drain(http, 0);
    pthread_join(thread, NULL);
    nmk_api_stop(api);
    say(id, " and");
    end(id, NMK_BATCH_CANCEL, NULL);
    nmk_http_close(http);
    nmk_api_close(api);
    close(fd);
    check(true, "closed while a stream ran", "it was not");
}

int main(void) {
    static const char *const names[] = {"toy"};
    static const int32_t stop_ids[] = {4, 2};
    nmk_err e;
    nmk_template *chat_template;
    pthread_t thread;
    nmk_api *api = nmk_api_new();
    nmk_http_options ho = {.routes = nmk_api_routes, .route_count = nmk_api_route_count};
    if (nmk_tokenizer_load("examples/nmc-toy", &tokenizer, &e) ||
        nmk_template_load("examples/nmc-toy", NULL, &chat_template, &e) ||
        nmk_http_open(&http, &ho, &nmk_api_callbacks, api, &e)) {
        printf("not ok - set-up: %s\n", e.text);
        return 1;
    }
    nmk_api_options o = {.tokenizer = tokenizer,
                         .chat_template = chat_template,
                         .bos_token = "<BOS_TOKEN>",
                         .eos_token = "<|END_OF_TURN_TOKEN|>",
                         .names = names,
                         .name_count = 1,
                         .stop_ids = stop_ids,
                         .stop_count = 2,
                         .max_len = 4096,
                         .stall_ms = 50,
                         .version = "test"};
    nmk_request_limits_init(&o.limits, nmk_tokenizer_size(tokenizer));
    port = nmk_http_port(http);
    nmk_api_start(api, http, &o);
    pthread_create(&thread, NULL, loop, NULL);
    test_calls();
    test_stops();
    test_failures();
    test_stall();
    test_close(thread, api);
    nmk_template_free(chat_template);
    nmk_tokenizer_free(tokenizer);
    return failures != 0;
}
