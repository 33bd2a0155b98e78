/* nmk-serve's log as an operator reads it, of the real program with the toy: an event a line, figures of each request, no
 * prompt and no key; and the flags that change what requests get. */
#define _GNU_SOURCE
#include "helper.h"
#include "serve_helper.h"

static const char chat[] = "{\"temperature\":0,\"messages\":[{\"role\":\"user\",\"content\":\"What is 17 + 25?\"}]}";
static const char key_line[] = "Authorization: Bearer sesame-open\r\n";

/* The first line whose message is this, as JSON; NULL: there is none.  Every line has to be an object. */
static struct json_object *event(const server *s, const char *message) {
    nmk_buf text = {0};
    nmk_err e;
    struct json_object *found = NULL;
    /* the line of a request comes before the answer's last byte, that of its connection after it */
    for (int i = 0; i < time_limit(100) && !found; i++) {
        server_log(s, &text);
        for (char *line = text.data, *end; (end = strchr(line, '\n')); line = end + 1) {
            struct json_object *o = nmk_json_parse(line, (size_t)(end - line), &e);
            if (!o) check(false, "a line of the log is JSON", "%.*s: %s", (int)(end - line), line, e.text);
            struct json_object *m = nmk_json_get(o, "message");
            if (o && m && !found && !strcmp(json_object_get_string(m), message))
                found = o;
            else
                json_object_put(o);
        }
        if (!found) usleep(20000);
    }
    nmk_buf_free(&text);
    return found;
}

static const char *word(struct json_object *o, const char *key) {
    struct json_object *v = nmk_json_get(o, key);
    return v ? json_object_get_string(v) : "";
}
static double number(struct json_object *o, const char *key) {
    struct json_object *v = nmk_json_get(o, key);
    return v ? json_object_get_double(v) : -1;
}

static void test_json(void) {
    const char *flags[] = {
        "--checkpoint", "examples/nmc-toy", "--log-format", "json", "--api-key", "sesame-open", NULL};
    server s = server_start(flags);
    reply whole = reply_read(request_open(s.port, "POST", "/v1/chat/completions", key_line, chat));
    struct json_object *o = event(&s, "request finished");
    check(o && whole.status == 200 && number(o, "status") == 200 && !strcmp(word(o, "finish"), "stop") &&
              !strcmp(word(o, "endpoint"), "/v1/chat/completions") && !strcmp(word(o, "level"), "info"),
          "a request's line", "%s", o ? json_object_to_json_string(o) : "none");
    check(number(o, "prompt_tokens") == json_object_get_int(at(whole.json, "usage.prompt_tokens")) &&
              number(o, "tokens") == json_object_get_int(at(whole.json, "usage.completion_tokens")) &&
              number(o, "cached_tokens") >= 0 && number(o, "id") > 0,
          "its tokens are the usage's", "%s", o ? json_object_to_json_string(o) : "none");
    check(number(o, "ttft_ms") > 0 && number(o, "duration_ms") >= number(o, "ttft_ms"), "its times", "%s",
          o ? json_object_to_json_string(o) : "none");
    json_object_put(o), reply_free(&whole);

    reply bad = reply_read(request_open(s.port, "POST", "/v1/chat/completions", key_line, "{\"messages\":3}"));
    o = event(&s, "request refused");
    check(o && number(o, "status") == bad.status && bad.status == 400 && !strcmp(word(o, "param"), "messages") &&
              !strcmp(word(o, "level"), "warning"),
          "a refused request", "%s", o ? json_object_to_json_string(o) : "none");
    json_object_put(o), reply_free(&bad);
    bad = post(s.port, "/v1/chat/completions", chat);
    o = event(&s, "http refused");
    check(o && bad.status == 401 && number(o, "status") == 401 && !strcmp(word(o, "path"), "/v1/chat/completions"),
          "a request without the key", "%s", o ? json_object_to_json_string(o) : "none");
    json_object_put(o), reply_free(&bad);

    int fd = request_open(s.port, "POST", "/v1/completions", key_line,
                          "{\"prompt\":\"a\",\"ignore_eos\":true,\"max_tokens\":3000,\"stream\":true}");
    usleep(300000), close(fd);
    o = event(&s, "request cancelled");
    check(o && number(o, "status") == 499 && !strcmp(word(o, "finish"), "cancelled") && number(o, "tokens") >= 0,
          "a client that leaves", "%s", o ? json_object_to_json_string(o) : "none");
    json_object_put(o);

    o = event(&s, "opened");
    check(o && number(o, "weight_bytes") > 2e7 && number(o, "step_bytes_one") > 1e7 &&
              number(o, "resident_bytes") > 1e6 && !strcmp(word(o, "defaults"), "top_p 0.95") &&
              !strcmp(word(o, "chat_template"), "chat_template.jinja"),
          "the start's figures", "%s", o ? json_object_to_json_string(o) : "none");
    json_object_put(o);
    check(server_end(&s, SIGTERM, 10000) == 0, "ends", "not at once");
    o = event(&s, "draining: finishing what runs");
    check(o, "a drain is told", "no line");
    json_object_put(o);
    o = event(&s, "drained");
    check(number(o, "cut") == 0, "and its end", "no line");
    json_object_put(o);
    nmk_buf text = {0};
    server_log(&s, &text);
    check(!strstr(text.data, "17 + 25") && !strstr(text.data, "sesame"), "no prompt and no key", "%s", text.data);
    nmk_buf_free(&text);
}

static void test_text(void) {
    const char *flags[] = {"--checkpoint",
                           "examples/nmc-toy",
                           "--disable-log-requests",
                           "--generation-config",
                           "vllm",
                           "--gpu-memory-utilization",
                           "0.9",
                           NULL};
    server s = server_start(flags);
    nmk_buf text = {0};
    reply whole = post(s.port, "/v1/chat/completions", chat);
    reply models = get(s.port, "/v1/models");
    reply bad = post(s.port, "/v1/chat/completions", "{");
    check(whole.status == 200 && models.status == 200 && bad.status == 400, "answers", "%d, %d", whole.status,
          bad.status);
    check(server_end(&s, SIGTERM, 10000) == 0, "ends, again", "not at once");
    server_log(&s, &text);
    check(strstr(text.data, "info starting model=nmc-toy\n") && strstr(text.data, " warning request refused id="),
          "lines of text", "%s", text.data);
    check(!strstr(text.data, "request finished") && !strstr(text.data, "/v1/models"), "requests are not logged", "%s",
          text.data);
    check(strstr(text.data, "defaults: none\n"), "no defaults of the checkpoint's", "%s", text.data);
    check(strstr(text.data, "  step      reads 16.88 MB with 1 sequence, 57.15 MB with 8, of 4096 tokens each\n"),
          "the step's bytes", "%s", text.data);
    reply_free(&whole), reply_free(&models), reply_free(&bad), nmk_buf_free(&text);
}

static void test_template(void) {
    char path[] = "/tmp/nmk-template-XXXXXX";
    static const char source[] = "{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}";
    int fd = mkstemp(path);
    bool written = write(fd, source, sizeof source - 1) == sizeof source - 1;
    close(fd);
    const char *flags[] = {"--checkpoint", "examples/nmc-toy", "--chat-template", path, NULL};
    server s = server_start(flags);
    reply tokens = post(s.port, "/tokenize",
                        "{\"messages\":[{\"role\":\"user\",\"content\":\"abc\"}],\"return_token_strs\":true}");
    nmk_buf said = {0};
    struct json_object *list = nmk_json_get(tokens.json, "token_strs");
    for (size_t i = 0; list && i < json_object_array_length(list); i++)
        nmk_buf_puts(&said, json_object_get_string(json_object_array_get_idx(list, i)));
    check(written && said.data && strstr(said.data, "<abc>") && !strstr(said.data, "USER_TOKEN"), "another template",
          "%s", tokens.body);
    server_end(&s, SIGTERM, 10000);
    unlink(path), nmk_buf_free(&said), reply_free(&tokens);
}

/* Tokens of a long prompt's second request that the first one had computed. */
static int cached_tokens(const char *flag) {
    const char *flags[] = {"--checkpoint", "examples/nmc-toy", flag, NULL};
    server s = server_start(flags);
    nmk_buf body = {0};
    nmk_buf_puts(&body, "{\"max_tokens\":1,\"prompt\":[1");
    for (int i = 1; i < 150; i++) nmk_buf_printf(&body, ",%d", 100 + i);
    nmk_buf_puts(&body, "]}");
    reply first = post(s.port, "/v1/completions", body.data), second = post(s.port, "/v1/completions", body.data);
    struct json_object *cached = at(second.json, "usage.prompt_tokens_details.cached_tokens");
    int tokens = first.status == 200 && second.status == 200 && cached ? json_object_get_int(cached) : -1;
    server_end(&s, SIGTERM, 10000);
    nmk_buf_free(&body), reply_free(&first), reply_free(&second);
    return tokens;
}

static void test_cache(void) {
    int with = cached_tokens("--enable-prefix-caching"), without = cached_tokens("--no-enable-prefix-caching");
    check(with == 128, "a prefix is computed once", "%d tokens", with);
    check(without == 0, "--no-enable-prefix-caching", "%d tokens", without);
}

int main(void) {
    test_cache();
    test_json();
    test_text();
    test_template();
    return failures != 0;
}
