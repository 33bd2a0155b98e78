/* server/api.c and all that it calls: a request as it came, and what the model says to it, which a batch that is played
 * here gives token by token.  Whatever it was, the answer is HTTP, its body JSON or events of JSON, and no fault of ours.
 *
 * An input: a line "POST /v1/...", the body, a line "%%%% said", and the text. */
#define _GNU_SOURCE /* memmem */
#include "fuzz.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "api.h"
#include "json.h"
#include "utf8.h"

enum { VOCAB = 4096, GUIDED = 60 };

static nmk_tokenizer *tokenizer;
static nmk_http *http;
static nmk_ids said; /* what the model says to the input at hand */
static uint32_t turn;

/* ---------------------------------------------------------------- the batch */

static bool in(const int32_t *list, int count, int32_t token) {
    for (int i = 0; i < count; i++)
        if (list[i] == token) return true;
    return false;
}

static bool next_token(const nmk_batch_request *q, int at, int32_t *token, nmk_err *e) {
    uint32_t mask[VOCAB / 32] = {0}, seen = 0;
    if (!q->guide.of) return at < (int)said.count && (*token = said.id[at], true);
    if (!q->guide.mask(q->guide.of, mask, e)) return false;
    for (int id = 0; id < VOCAB; id++)
        if (mask[id / 32] >> id % 32 & 1 && (turn = turn * 1664525 + 1013904223) % ++seen == 0) *token = id;
    return seen && q->guide.take(q->guide.of, *token, e);
}

static nmk_logprobs likely(int count, int32_t token) {
    nmk_logprobs l = {.chosen = -0.5f, .count = count - 1};
    for (int k = 0; k < l.count; k++) l.id[k] = k ? k - 1 : token, l.logprob[k] = l.chosen - (float)k;
    return l;
}

/* Everything comes before submit returns, which the contract has room for. */
int nmk_batch_submit(nmk_batch *b, const nmk_batch_request *q, uint64_t *id, nmk_err *e) {
    static uint64_t ids;
    (void)b, (void)e;
    nmk_err why = {""};
    nmk_batch_end end = NMK_BATCH_LENGTH;
    if (q->prompt_tokens < 1 || q->max_tokens < 1 || q->prompt_tokens + q->max_tokens > 4096 ||
        q->sampler.logprobs - 1 > NMK_TOP_LOGPROBS || q->prompt_logprobs - 1 > NMK_TOP_LOGPROBS)
        fuzz_wrong("submitted: %d tokens, %d to come", q->prompt_tokens, q->max_tokens);
    for (int i = 0; i < q->prompt_tokens; i++)
        if (q->prompt[i] < 0 || q->prompt[i] >= VOCAB) fuzz_wrong("submitted: token %d", q->prompt[i]);
    *id = ++ids;
    if (q->on_start) q->on_start(q->user, 0);
    for (int i = 1; q->prompt_logprobs && i < q->prompt_tokens; i++) {
        const nmk_logprobs l = likely(q->prompt_logprobs, q->prompt[i]);
        q->on_prompt(q->user, i, &l);
    }
    for (int i = 0; i < q->max_tokens; i++) {
        int32_t token = 0;
        if (!next_token(q, i, &token, &why)) {
            if (q->guide.of) end = NMK_BATCH_ASTRAY;
            break;
        }
        const nmk_logprobs l = likely(q->sampler.logprobs, token);
        q->on_token(q->user, token, q->sampler.logprobs ? &l : NULL);
        if (i + 1 >= q->min_tokens && in(q->stop_ids, q->stop_count, token)) {
            end = NMK_BATCH_STOP;
            break;
        }
        if (q->guide.of && i == GUIDED) {
            end = NMK_BATCH_CANCEL;
            break;
        }
    }
    q->on_end(q->user, end, end == NMK_BATCH_ASTRAY ? why.text : NULL);
    return 0;
}

void nmk_batch_cancel(nmk_batch *b, uint64_t id) { (void)b, (void)id; }
void nmk_batch_read_stats(nmk_batch *b, nmk_batch_stats *s) { (void)b, *s = (nmk_batch_stats){0}; }
int nmk_batch_trace(nmk_batch *b, int steps, bool wait, nmk_batch_tasks_fn on_tasks, void *user, nmk_err *e) {
    (void)b, (void)steps, (void)wait, (void)on_tasks, (void)user;
    return nmk_fail(e, "no steps here");
}

/* ---------------------------------------------------------------- the server */

static void *loop(void *unused) {
    nmk_err e = {""};
    (void)unused;
    if (nmk_http_run(http, &e) < 0) fuzz_wrong("the server ended: %s", e.text);
    return NULL;
}

static void open_server(void) {
    static const char *const names[] = {"toy"};
    static const int32_t stop_ids[] = {4, 2};
    static nmk_api_options o;
    static nmk_api *api;
    nmk_err e;
    pthread_t thread;
    const nmk_http_options h = {.routes = nmk_api_routes, .route_count = nmk_api_route_count, .linger_ms = 50};
    const nmk_template_limits limits = {
        .memory_bytes = 64 << 20, .output_bytes = 4 << 20, .instructions = 3000000, .time_ns = 60000000000};
    api = nmk_api_new();
    if (nmk_tokenizer_load("examples/nmc-toy", &tokenizer, &e) ||
        nmk_template_load("examples/nmc-toy", &limits, &o.chat_template, &e) ||
        nmk_http_open(&http, &h, &nmk_api_callbacks, api, &e))
        fuzz_wrong("%s", e.text);
    o.tokenizer = tokenizer;
    o.bos_token = "<BOS_TOKEN>", o.eos_token = "<|END_OF_TURN_TOKEN|>";
    o.names = names, o.name_count = 1, o.stop_ids = stop_ids, o.stop_count = 2;
    o.max_len = 4096, o.kept_bytes = 1 << 20, o.version = "test", o.quiet = true;
    nmk_request_limits_init(&o.limits, VOCAB);
    nmk_api_start(api, http, &o);
    if (pthread_create(&thread, NULL, loop, NULL)) fuzz_wrong("no thread");
    pthread_detach(thread);
}

/* ---------------------------------------------------------------- the client */

static void check_json(const char *text, size_t bytes) {
    nmk_err e = {""};
    char *copy = xmalloc(bytes + 1);
    memcpy(copy, text, bytes), copy[bytes] = 0;
    struct json_object *tree = nmk_json_parse(copy, bytes, &e);
    if (!tree && !strstr(e.text, "nested too deeply")) fuzz_wrong("%s: <%s>", e.text, copy);
    json_object_put(tree);
    free(copy);
}

static void check_answer(nmk_buf *got) {
    nmk_buf_puts(got, "");
    if (got->length < 13 || memcmp(got->data, "HTTP/1.1 ", 9)) fuzz_wrong("an answer that is none: <%s>", got->data);
    int status = atoi(got->data + 9);
    char *body = strstr(got->data, "\r\n\r\n");
    if (status < 200 || status == 500 || status > 503 || !body) fuzz_wrong("an answer: <%s>", got->data);
    *body = 0, body += 4;
    size_t bytes = (size_t)(got->data + got->length - body);
    fuzz_feature(got->data + 9);
    if (!nmk_utf8_valid(body, bytes)) fuzz_wrong("an answer that is not UTF-8");
    if (strstr(got->data, "application/json")) {
        check_json(body, bytes);
    } else if (strstr(got->data, "text/event-stream")) {
        for (char *line = body, *end; line < got->data + got->length; line = end + 1) {
            end = memchr(line, '\n', (size_t)(got->data + got->length - line));
            if (!end) fuzz_wrong("a line without its end: <%s>", line);
            if (!strncmp(line, "data: ", 6) && strncmp(line + 6, "[DONE]", 6))
                check_json(line + 6, (size_t)(end - line) - 6);
        }
        if (bytes < 2 || memcmp(body + bytes - 2, "\n\n", 2)) fuzz_wrong("an event without its end: <%s>", body);
    }
}

static void run(const char *data, size_t bytes) {
    static const char mark[] = "\n%%%% said\n";
    const char *end = data + bytes, *line = memchr(data, '\n', bytes);
    if (!line || line - data > 200 || !memchr(data, ' ', (size_t)(line - data))) return;
    for (const char *c = data; c < line; c++)
        if ((unsigned char)*c <= ' ' && c != (const char *)memchr(data, ' ', (size_t)(line - data))) return;
    const char *body = line + 1, *past = memmem(body, (size_t)(end - body), mark, sizeof mark - 1);
    nmk_err e;
    nmk_buf out = {0}, got = {0};
    said.count = 0, turn = fuzz_below(1 << 30);
    if (past && nmk_tokenizer_encode(tokenizer, past + sizeof mark - 1, (size_t)(end - past) - (sizeof mark - 1),
                                     NMK_PARSE_SPECIAL, &said, &e))
        fuzz_wrong("%s", e.text);
    if (!past) past = end;
    nmk_buf_printf(&out, "%.*s HTTP/1.0\r\nHost: a\r\nContent-Length: %zu\r\n\r\n", (int)(line - data), data,
                   (size_t)(past - body));
    nmk_buf_add(&out, body, (size_t)(past - body));

    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)nmk_http_port(http))};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    char some[4096];
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger)); /* no TIME_WAIT */
    if (connect(fd, (struct sockaddr *)&a, sizeof a)) fuzz_wrong("the server takes no connection");
    if (send(fd, out.data, out.length, MSG_NOSIGNAL) != (ssize_t)out.length) fuzz_wrong("the server takes no request");
    for (ssize_t n; (n = recv(fd, some, sizeof some, 0)) > 0;) nmk_buf_add(&got, some, (size_t)n);
    close(fd);
    check_answer(&got);
    nmk_buf_free(&out), nmk_buf_free(&got);
}

#define SAY "\n%%%% said\n"
#define TOOLS \
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{\"x\":{\"type\":\"integer\"}}}}}]"
#define ACT \
    "<|END_THINKING|><|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"x\": 1}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>"
#define HI "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"
#define ANSWER \
    "I add.<|END_THINKING|><|START_TEXT|>It is <co>4</co: 0:[1]>. \xf0\x9f\x98\x80<|END_TEXT|><|END_OF_TURN_TOKEN|>"

static void seeds(void) {
    static const char *const texts[] = {
        "POST /v1/chat/completions\n{" HI
        ",\"stream\":true,\"stream_options\":{\"include_usage\":true},\"logprobs\":true,\"top_logprobs\":2}" SAY ANSWER,
        "POST /v1/chat/completions\n{" HI ",\"n\":2,\"stop\":[\"is\"],\"max_tokens\":20}" SAY ANSWER,
        "POST /v1/chat/completions\n{" HI "," TOOLS "}" SAY ACT,
        "POST /v1/chat/completions\n{" HI ",\"stream\":true," TOOLS ",\"tool_choice\":\"required\"}" SAY ACT,
        "POST /v1/chat/completions\n{" HI
        ",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"n\",\"schema\":{\"enum\":[\"a\",1]}}}}" SAY
            ANSWER,
        "POST /v1/completions\n{\"prompt\":[\"a\",[5,6]],\"echo\":true,\"logprobs\":2,\"max_tokens\":3}" SAY " 1 2 3 4",
        "POST /v1/completions\n{\"prompt\":\"a\",\"stream\":true,\"prompt_logprobs\":1,\"stop_token_ids\":[80],\"return_tokens_as_token_ids\":true}" SAY
        " b\xc3\xa9\x61",
        "POST /v1/responses\n{\"input\":\"Hi\",\"stream\":true,\"include\":[\"message.output_text.logprobs\"],\"tools\":[{\"type\":\"function\",\"name\":\"f\",\"parameters\":{}}]}" SAY
            ACT,
        "POST /v1/responses\n{\"input\":\"Hi\",\"instructions\":\"I\",\"include\":[\"message.output_text.logprobs\"],\"top_logprobs\":2,\"max_output_tokens\":9}" SAY
            ANSWER,
        "POST /v1/responses\n{\"input\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"stream\":true,\"text\":{\"format\":{\"type\":\"json_object\"}}}" SAY
            ANSWER,
        "POST /v1/messages\n{\"max_tokens\":50," HI
        ",\"stream\":true,\"tools\":[{\"name\":\"f\",\"input_schema\":{\"type\":\"object\"}}]}" SAY ACT,
        "POST /v1/messages\n{\"max_tokens\":50," HI
        ",\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024},\"stop_sequences\":[\"is\"]}" SAY ANSWER,
        "POST /v1/messages/count_tokens\n{" HI "}",
        "POST /tokenize\n{\"prompt\":\"a\xc3\xa9\",\"return_token_strs\":true}",
        "POST /detokenize\n{\"tokens\":[5,80,4000]}",
        "GET /v1/models\n",
        "GET /v1/models/toy\n",
        "GET /v1/responses/resp_1?stream=true\n",
        "DELETE /v1/responses/resp_1\n",
        "GET /metrics\n",
        "GET /health\n",
        "GET /\n",
        "POST /debug/trace?steps=3\n{}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) fuzz_seed_text(texts[i]);
    fuzz_words_of("server/{api,request*,reply*,schema,parse}.c");
    for (const char *const *w = (const char *const[]){SAY,
                                                      HI,
                                                      TOOLS,
                                                      "\"stream\":true,",
                                                      "null",
                                                      "true",
                                                      "[]",
                                                      "{}",
                                                      "\"\\u0000\"",
                                                      "\\ud83d",
                                                      "\xff",
                                                      "\xe2\x80\xa8",
                                                      "<|START_THINKING|>",
                                                      "<|END_THINKING|>",
                                                      "<|START_TEXT|>",
                                                      "<|END_TEXT|>",
                                                      "<|START_ACTION|>",
                                                      "<|END_ACTION|>",
                                                      "<|END_OF_TURN_TOKEN|>",
                                                      "<|START_RESPONSE|>",
                                                      "\"parameters\": ",
                                                      "\"tool_name\": \"f\"",
                                                      NULL};
         *w; w++)
        fuzz_word(*w);
}

const fuzz_target fuzz_serve = {"serve", seeds, open_server, run, 8 << 10, 2000};
