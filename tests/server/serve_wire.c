/* nmk-serve with the toy on the CPU: every endpoint, what it refuses, streams, disconnects, keys, draining. */
#define _GNU_SOURCE /* memmem */
#include <math.h>

#include "serve_helper.h"

#define TOY "--checkpoint", "examples/nmc-toy"
#define RUN "build/nmc-toy/nmk-run --checkpoint examples/nmc-toy --device cpu "
#define ASK "\"messages\":[{\"role\":\"user\",\"content\":\"What is 17 + 25?\"}]"
#define TURN                                                                                               \
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|><|START_TEXT|>What is 17 + 25?<|END_TEXT|><|END_OF_TURN_TOKEN|>" \
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>"
#define CHAT "/v1/chat/completions"
#define TEXT "/v1/completions"
/* Takes some seconds unless somebody ends it. */
#define LONG "\"prompt\":\"def is_prime\",\"temperature\":0,\"ignore_eos\":true,\"max_tokens\":3000"

/* What nmk-run says; without the newline at its end. */
static nmk_buf run(const char *flags) {
    nmk_buf text = {0};
    char part[4096];
    size_t n;
    char *command = xasprintf(RUN "%s 2>/dev/null", flags);
    FILE *f = popen(command, "r");
    nmk_buf_puts(&text, "");
    while (f && (n = fread(part, 1, sizeof part, f))) nmk_buf_add(&text, part, n);
    if (f) pclose(f);
    if (text.length) text.data[--text.length] = 0;
    free(command);
    return text;
}

static void same(const char *name, const char *got, const char *wanted) {
    check(!strcmp(got, wanted), name, "got '%s', wanted '%s'", shown(got), shown(wanted));
}

/* Posts; the status, and the error's code and param where they are given. */
static void refused(int port, const char *name, const char *path, const char *body, int status, const char *code,
                    const char *param) {
    reply r = post(port, path, body);
    bool good = r.status == status && *text_at(r.json, "error.message") && *text_at(r.json, "error.type") &&
                (!code || !strcmp(text_at(r.json, "error.code"), code)) &&
                (!param || !strcmp(text_at(r.json, "error.param"), param));
    check(good, name, "status %d, %s", r.status, shown(r.body));
    reply_free(&r);
}

static void test_plain(int port) {
    reply r = get(port, "/v1/models");
    check(r.status == 200 && !strcmp(text_at(r.json, "data.0.id"), "nmc-toy") &&
              int_at(r.json, "data.0.max_model_len") == 4096,
          "models", "%s", r.body);
    reply_free(&r);
    r = get(port, "/v1/models/nmc-toy");
    check(r.status == 200 && !strcmp(text_at(r.json, "object"), "model"), "a model", "%s", r.body);
    reply_free(&r);
    r = get(port, "/v1/models/a/b");
    check(r.status == 404 && !strcmp(text_at(r.json, "error.code"), "model_not_found"), "no such model", "%s", r.body);
    reply_free(&r);
    r = get(port, "/health");
    check(r.status == 200, "health", "%d", r.status);
    reply_free(&r);
    r = get(port, "/version");
    check(r.status == 200 && strstr(text_at(r.json, "version"), "nmc-toy"), "version", "%s", r.body);
    reply_free(&r);
}

static void test_chat(int port) {
    nmk_buf text = run("--max-tokens 64 --prompt '" TURN "'");
    char reasoning[256] = "", content[256] = "";
    sscanf(text.data, "%255[^<]<|END_THINKING|><|START_TEXT|>%255[^<]", reasoning, content);
    check(*reasoning && *content, "nmk-run answers the question", "%s", text.data);

    reply r = post(port, CHAT, "{\"model\":\"nmc-toy\",\"temperature\":0," ASK "}");
    same("a chat's answer is that of nmk-run", text_at(r.json, "choices.0.message.content"), content);
    same("its reasoning too", text_at(r.json, "choices.0.message.reasoning_content"), reasoning);
    same("its finish reason", text_at(r.json, "choices.0.finish_reason"), "stop");
    int tokens = int_at(r.json, "usage.completion_tokens");
    check(tokens > 1 && int_at(r.json, "usage.prompt_tokens") > 1, "its usage", "%s", r.body);
    reply_free(&r);

    r = post(port, CHAT,
             "{\"temperature\":0,\"stream\":true,\"stream_options\":{\"include_usage\":true},\"top_p\":1," ASK "}");
    told t = told_read(&r, true);
    same("a stream's shape", t.wrong, "");
    same("a stream's text", t.text.data, content);
    same("a stream's reasoning", t.reasoning.data, reasoning);
    same("a stream's finish", t.ended, "stop");
    check(t.usage_tokens == tokens, "a stream's usage", "%d, alone %d", t.usage_tokens, tokens);
    told_free(&t), reply_free(&r);

    r = post(port, CHAT, "{\"temperature\":0,\"stream\":true," ASK "}");
    t = told_read(&r, true);
    check(!t.wrong[0] && t.usage_tokens == -1, "no usage unless asked", "%s", t.wrong);
    told_free(&t), reply_free(&r);

    r = post(port, CHAT, "{\"temperature\":0,\"include_reasoning\":false," ASK "}");
    check(!at(r.json, "choices.0.message.reasoning_content") &&
              !strcmp(text_at(r.json, "choices.0.message.content"), content),
          "without reasoning", "%s", r.body);
    reply_free(&r);
    r = post(port, CHAT, "{\"temperature\":0,\"max_tokens\":3," ASK "}");
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "length") &&
              int_at(r.json, "usage.completion_tokens") == 3,
          "max_tokens", "%s", r.body);
    reply_free(&r);
    r = post(port, CHAT, "{\"temperature\":0,\"max_completion_tokens\":40,\"ignore_eos\":true," ASK "}");
    check(int_at(r.json, "usage.completion_tokens") == 40, "ignore_eos", "%s", r.body);
    reply_free(&r);
    r = post(port, CHAT, "{\"temperature\":0,\"max_tokens\":40,\"min_tokens\":30," ASK "}");
    check(int_at(r.json, "usage.completion_tokens") >= 30, "min_tokens", "%s", r.body);
    reply_free(&r);
    r = post(port, CHAT, "{\"temperature\":0,\"max_tokens\":30,\"reasoning_effort\":\"none\"," ASK "}");
    check(r.status == 200 && !at(r.json, "choices.0.message.reasoning_content"), "reasoning_effort", "%s", r.body);
    reply_free(&r);
    r = post(port, CHAT,
             "{\"temperature\":0,\"max_tokens\":30,\"chat_template_kwargs\":{\"reasoning\":false}," ASK "}");
    check(r.status == 200 && !at(r.json, "choices.0.message.reasoning_content"), "chat_template_kwargs", "%s", r.body);
    reply_free(&r);
    r = post(
        port, CHAT,
        "{\"temperature\":0,\"max_tokens\":60,\"tool_choice\":\"auto\",\"tools\":[{\"type\":\"function\",\"function\":"
        "{\"name\":\"get_weather\",\"description\":\"Weather of a city\",\"parameters\":{\"type\":\"object\","
        "\"properties\":{\"city\":{\"type\":\"string\"}}}}}],"
        "\"messages\":[{\"role\":\"user\",\"content\":\"What is the weather in Paris?\"}]}");
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "tool_calls") &&
              !strcmp(text_at(r.json, "choices.0.message.tool_calls.0.function.name"), "get_weather") &&
              !strcmp(text_at(r.json, "choices.0.message.tool_calls.0.function.arguments"), "{\"city\": \"Paris\"}"),
          "a tool is called", "%s", r.body);
    reply_free(&r);
    nmk_buf_free(&text);
}

/* Reasoning that is capped, or off, in the words of each API. */
static void test_thinking(int port) {
    static const struct {
        const char *name, *path, *field;
        int reasoning; /* tokens of it */
    } cases[] = {{"thinking_token_budget", CHAT, "\"thinking_token_budget\":2", 2},
                 {"a budget of none", CHAT, "\"thinking_token_budget\":0", 0},
                 {"thinking with budget_tokens", CHAT, "\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":3}", 3},
                 {"thinking disabled", CHAT, "\"thinking\":{\"type\":\"disabled\"}", 0},
                 {"reasoning with max_tokens", CHAT, "\"reasoning\":{\"max_tokens\":1}", 1},
                 {"reasoning with effort none", CHAT, "\"reasoning\":{\"effort\":\"none\"}", 0},
                 {"a budget that is not reached", CHAT, "\"thinking_token_budget\":200", -1},
                 {"a response's reasoning", "/v1/responses", "\"reasoning\":{\"max_tokens\":2}", 2}};
    reply r = post(port, CHAT, "{\"temperature\":0," ASK "}");
    int all = int_at(r.json, "usage.completion_tokens_details.reasoning_tokens");
    reply_free(&r);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool chat = cases[i].path[4] == 'c';
        char *body = xasprintf("{\"temperature\":0,%s,%s}", cases[i].field,
                               chat ? ASK : "\"input\":\"What is 17 + 25?\",\"max_output_tokens\":60");
        r = post(port, cases[i].path, body);
        int wanted = cases[i].reasoning < 0 ? all : cases[i].reasoning;
        int got = int_at(r.json, chat ? "usage.completion_tokens_details.reasoning_tokens"
                                      : "usage.output_tokens_details.reasoning_tokens");
        bool answered = *text_at(r.json, "choices.0.message.content") || *text_at(r.json, "output.1.content.0.text");
        check(r.status == 200 && got == wanted && answered && all > 5, cases[i].name, "%d of %d: %s", got, all, r.body);
        free(body), reply_free(&r);
    }
    r = post(port, "/v1/messages",
             "{\"temperature\":0,\"max_tokens\":60,\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":4}," ASK "}");
    check(!strcmp(text_at(r.json, "content.0.type"), "thinking") && *text_at(r.json, "content.1.text"),
          "a message's thinking", "%s", r.body);
    reply_free(&r);
    r = post(port, "/v1/messages", "{\"temperature\":0,\"max_tokens\":60," ASK "}");
    check(!strcmp(text_at(r.json, "content.0.type"), "text"), "a message without it", "%s", r.body);
    reply_free(&r);
}

static void test_text(int port) {
    nmk_buf text = run("--max-tokens 24 --prompt 'def is_prime'");
    reply r = post(port, TEXT, "{\"prompt\":\"def is_prime\",\"temperature\":0,\"max_tokens\":24}");
    same("a completion is that of nmk-run", text_at(r.json, "choices.0.text"), text.data);
    reply_free(&r);
    r = post(port, TEXT, "{\"prompt\":\"def is_prime\",\"temperature\":0,\"max_tokens\":24,\"stream\":true}");
    told t = told_read(&r, false);
    same("a streamed completion's shape", t.wrong, "");
    same("a streamed completion", t.text.data, text.data);
    told_free(&t), reply_free(&r);

    reply ids = post(port, "/tokenize", "{\"prompt\":\"def is_prime\",\"return_token_strs\":true}");
    const char *list = json_object_to_json_string(at(ids.json, "tokens"));
    check(int_at(ids.json, "tokens.0") == 1 && !strcmp(text_at(ids.json, "token_strs.1"), "def"), "tokenize", "%s",
          ids.body);
    char *body = xasprintf("{\"prompt\":[%s,%s],\"temperature\":0,\"max_tokens\":24,\"echo\":true}", list, list);
    r = post(port, TEXT, body);
    const char *second = text_at(r.json, "choices.1.text");
    check(!strncmp(second, "def is_prime", 12) && !strcmp(second + 12, text.data), "token ids, a list of them, echo",
          "%s", r.body);
    check(int_at(r.json, "usage.completion_tokens") == 48, "usage of two", "%s", r.body);
    free(body), reply_free(&r), reply_free(&ids);

    r = post(port, TEXT,
             "{\"prompt\":\"def is_prime\",\"temperature\":0,\"max_tokens\":60,\"stop\":[\"the inp\",\"zz\"]}");
    const char *cut = strstr(text.data, "the inp");
    check(cut && !strncmp(text_at(r.json, "choices.0.text"), text.data, (size_t)(cut - text.data)) &&
              !text_at(r.json, "choices.0.text")[cut - text.data],
          "a stop string across tokens", "%s", r.body);
    same("and its finish", text_at(r.json, "choices.0.finish_reason"), "stop");
    reply_free(&r);
    r = post(port, TEXT,
             "{\"prompt\":\"def is_prime\",\"temperature\":0,\"max_tokens\":60,\"stop\":\"the inp\",\"stream\":true,"
             "\"include_stop_str_in_output\":true}");
    t = told_read(&r, false);
    check(!t.wrong[0] && cut && t.text.length == (size_t)(cut - text.data) + 7 && !strcmp(t.ended, "stop"),
          "a stop string that is kept, streamed", "%s: %s", t.wrong, shown(t.text.data));
    told_free(&t), reply_free(&r);

    /* the id of a token as a stop: it is not part of the text */
    ids = post(port, "/tokenize", "{\"prompt\":\" input\",\"add_special_tokens\":false}");
    body = xasprintf("{\"prompt\":\"def is_prime\",\"temperature\":0,\"max_tokens\":60,\"stop_token_ids\":%s}",
                     json_object_to_json_string(at(ids.json, "tokens")));
    r = post(port, TEXT, body);
    cut = strstr(text.data, " input");
    check(int_at(ids.json, "count") == 1 && cut &&
              strlen(text_at(r.json, "choices.0.text")) == (size_t)(cut - text.data),
          "stop_token_ids", "%s", r.body);
    free(body), reply_free(&r), reply_free(&ids);
    nmk_buf_free(&text);
}

/* As evaluation harnesses ask: how likely is this text? */
static void test_likelihood(int port) {
    reply said = post(port, TEXT, "{\"prompt\":\"def is_prime\",\"temperature\":0,\"max_tokens\":12,\"logprobs\":1}");
    struct json_object *before = at(said.json, "choices.0.logprobs.token_logprobs");
    nmk_buf body = {0};
    nmk_buf_puts(&body, "{\"echo\":true,\"temperature\":0,\"max_tokens\":1,\"logprobs\":1,\"prompt\":");
    char *whole = xasprintf("def is_prime%s", text_at(said.json, "choices.0.text"));
    struct json_object *quoted = json_object_new_string(whole);
    nmk_buf_puts(&body, json_object_to_json_string(quoted));
    nmk_buf_puts(&body, "}");
    reply r = post(port, TEXT, body.data);
    struct json_object *now = at(r.json, "choices.0.logprobs.token_logprobs");
    size_t prompt = (size_t)int_at(r.json, "usage.prompt_tokens"), near = 0, greedy = 0;
    for (size_t i = 0; i < 12 && now && before && json_object_array_length(now) == prompt + 1; i++) {
        double x = json_object_get_double(json_object_array_get_idx(before, i)), most = -1e9;
        double y = json_object_get_double(json_object_array_get_idx(now, prompt - 12 + i));
        struct json_object *top =
            json_object_array_get_idx(at(r.json, "choices.0.logprobs.top_logprobs"), prompt - 12 + i);
        near += fabs(x - y) < 0.05 * (1 + fabs(x));
        json_object_object_foreach(top, key, value) {
            (void)key;
            most = fmax(most, json_object_get_double(value));
        }
        greedy += y == most;
    }
    check(near == 12 && greedy == 12 && !strncmp(text_at(r.json, "choices.0.text"), whole, strlen(whole)),
          "a text that was said is as likely as it was then, and the most likely one", "%zu near, %zu greedy: %s", near,
          greedy, r.body);
    json_object_put(quoted), free(whole), nmk_buf_free(&body), reply_free(&said), reply_free(&r);
}

static void test_seeds(int port) {
    static const char first[] = "{\"prompt\":\"The\",\"temperature\":1,\"seed\":7,\"max_tokens\":24}";
    reply a = post(port, TEXT, first);
    int others[3];
    for (int i = 0; i < 3; i++) others[i] = request_open(port, "POST", TEXT, "", "{" LONG "}");
    metric_becomes(port, "vllm:num_requests_running", 3, 2000);
    reply b = post(port, TEXT, first);
    for (int i = 0; i < 3; i++) close(others[i]);
    same("the same seed, the same text, in company", text_at(b.json, "choices.0.text"),
         text_at(a.json, "choices.0.text"));
    reply_free(&b);
    b = post(port, TEXT, "{\"prompt\":\"The\",\"temperature\":1,\"seed\":7,\"max_tokens\":24,\"n\":2}");
    check(!strcmp(text_at(b.json, "choices.0.text"), text_at(a.json, "choices.0.text")) &&
              strcmp(text_at(b.json, "choices.1.text"), text_at(a.json, "choices.0.text")),
          "n answers differ, the first is that of the seed", "%s", b.body);
    reply_free(&b);
    b = post(port, TEXT, "{\"prompt\":\"The\",\"temperature\":1,\"max_tokens\":24}");
    check(strcmp(text_at(b.json, "choices.0.text"), text_at(a.json, "choices.0.text")), "no seed", "%s", b.body);
    reply_free(&a), reply_free(&b);
    check(metric_becomes(port, "vllm:num_requests_running", 0, 2000), "rows of clients that left", "still running");
}

static void test_refusals(int port) {
    refused(port, "broken JSON", CHAT, "{\"messages\":[", 400, "invalid_json", NULL);
    refused(port, "no messages", CHAT, "{}", 400, "missing_required_parameter", "messages");
    refused(port, "an unknown model", CHAT, "{\"model\":\"gpt\"," ASK "}", 404, "model_not_found", "model");
    refused(port, "a wrong type", CHAT, "{\"temperature\":\"hot\"," ASK "}", 400, "invalid_type", "temperature");
    static const char *const odd[][2] = {
        {"top_p", "1.5"},
        {"top_k", "-2"},
        {"min_p", "-0.1"},
        {"presence_penalty", "2.5"},
        {"frequency_penalty", "-2.5"},
        {"repetition_penalty", "0"},
        {"logit_bias", "{\"99999999\":1}"},
        {"top_logprobs", "5"},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        char *text = xasprintf("{\"%s\":%s," ASK "}", odd[i][0], odd[i][1]);
        refused(port, odd[i][0], CHAT, text, 400, "invalid_value", odd[i][0]);
        free(text);
    }
    reply r = post(port, CHAT,
                   "{\"max_tokens\":1,\"top_k\":-1,\"min_p\":0.1,\"top_p\":0.9,\"presence_penalty\":0.5,"
                   "\"frequency_penalty\":0.5,\"repetition_penalty\":1.1,\"logit_bias\":{\"5\":1},\"seed\":3," ASK "}");
    check(r.status == 200, "every way to sample", "%s", r.body);
    reply_free(&r);

    r = post(port, CHAT, "{\"temperature\":0,\"max_tokens\":32000," ASK "}");
    check(r.status == 200, "max_tokens beyond the context is cut to it", "%s", r.body);
    reply_free(&r);

    nmk_buf body = {0};
    nmk_buf_puts(&body, "{\"stream\":true,\"prompt\":[1");
    for (int i = 0; i < 5000; i++) nmk_buf_puts(&body, ",20");
    nmk_buf_puts(&body, "]}");
    r = post(port, TEXT, body.data);
    check(r.status == 400 && strstr(text_at(r.json, "error.message"), "maximum context length is 4096 tokens") &&
              !strcmp(text_at(r.json, "error.code"), "context_length_exceeded"),
          "a prompt that does not fit", "%s", r.body);
    reply_free(&r);
    body.length = 0;
    nmk_buf_puts(&body, "{\"messages\":[{\"role\":\"user\",\"content\":\"");
    for (int i = 0; i < 1 << 18; i++) nmk_buf_puts(&body, "word");
    nmk_buf_puts(&body, "\"}]}");
    refused(port, "a prompt of a megabyte", CHAT, body.data, 400, "context_length_exceeded", "messages");
    nmk_buf_free(&body);
    r = get(port, CHAT);
    check(r.status == 405, "GET of a chat", "%d", r.status);
    reply_free(&r);
    r = post(port, "/v1/nothing", "{}");
    check(r.status == 404 && *text_at(r.json, "error.message"), "an unknown path", "%d", r.status);
    reply_free(&r);
}

/* What nobody should send: an answer of 400 each, to every endpoint, and the server goes on. */
static void test_hostile(int port) {
    static const char *const paths[] = {CHAT, TEXT, "/tokenize", "/detokenize"};
    nmk_buf deep = {0}, wide = {0}, bias = {0}, tools = {0};
    nmk_buf_puts(&deep, "{\"messages\":[{\"role\":\"user\",\"content\":");
    for (int i = 0; i < 100000; i++) nmk_buf_puts(&deep, "[");
    nmk_buf_puts(
        &wide, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"prompt\":\"x\",\"tokens\":[1],\"stop\":[\"a\"");
    for (int i = 0; i < 100000; i++) nmk_buf_puts(&wide, ",\"a\"");
    nmk_buf_puts(&wide, "],\"temperature\":\"x\",\"add_special_tokens\":2,\"tokens\":3}");
    nmk_buf_puts(&bias, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"logit_bias\":{\"0\":1");
    for (int i = 1; i < 100000; i++) nmk_buf_printf(&bias, ",\"%d\":-100", i);
    nmk_buf_puts(&bias, "}}");
    nmk_buf_puts(&tools, "{" ASK ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":");
    for (int i = 0; i < 70; i++) nmk_buf_puts(&tools, "{\"properties\":");
    nmk_buf_puts(&tools, "1");
    for (int i = 0; i < 70; i++) nmk_buf_puts(&tools, "}");
    nmk_buf_puts(&tools, "}}]}");
    const struct {
        const char *name, *body;
    } cases[] = {
        {"deep JSON", deep.data},
        {"wide JSON", wide.data},
        {"deep tools", tools.data},
        {"nothing", ""},
        {"blanks", " \n\t"},
        {"a lone quote", "\""},
        {"a number", "1e999"},
        {"bad UTF-8", "{\"model\":\"\xff\xfe\",\"prompt\":\"x\"}"},
        {"an overlong NUL", "{\"prompt\":\"\xc0\x80\",\"tokens\":[1]}"},
        {"half a surrogate", "{\"prompt\":\"\\ud800\",\"tokens\":[1],\"messages\":[]}"},
        {"NaN", "{\"temperature\":NaN,\"prompt\":\"x\"}"},
        {"Infinity", "{\"top_p\":Infinity,\"prompt\":\"x\"}"},
        {"1e999", "{\"prompt\":\"x\",\"temperature\":1e999}"},
        {"an integer beyond 64 bits", "{\"seed\":99999999999999999999,\"prompt\":\"x\"}"},
        {"a key twice", "{\"n\":1,\"n\":2,\"prompt\":\"x\",\"tokens\":[1]}"},
        {"a control character", "{\"prompt\":\"a\nb\",\"tokens\":[1]}"},
        {"comments", "{/* */\"prompt\":\"x\"}"},
        {"a model that is a list", "{\"model\":[],\"prompt\":\"x\",\"tokens\":[1]}"},
        {"null everywhere", "{\"messages\":null,\"prompt\":null,\"tokens\":null}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int refusals = 0;
        for (size_t k = 0; k < sizeof paths / sizeof *paths; k++) {
            reply r = post(port, paths[k], cases[i].body);
            refusals += r.status == 400 && *text_at(r.json, "error.message");
            if (r.status != 400) printf("# %s: %d %.200s\n", paths[k], r.status, r.body);
            reply_free(&r);
        }
        check(refusals == 4, cases[i].name, "%d of 4 refused", refusals);
    }
    refused(port, "a hundred thousand biases", CHAT, bias.data, 400, "invalid_value", "logit_bias");
    refused(port, "a bias of 1e999", CHAT, "{\"logit_bias\":{\"5\":1e999}," ASK "}", 400, "invalid_json", NULL);
    refused(port, "a bias that is no number", CHAT, "{\"logit_bias\":{\"5\":null}," ASK "}", 400, NULL, "logit_bias");
    refused(port, "two billion answers", CHAT, "{\"n\":2000000000," ASK "}", 400, "invalid_value", "n");
    refused(port, "answers times prompts", TEXT, "{\"n\":100,\"prompt\":[\"a\",\"b\"]}", 400, "invalid_value", "n");
    nmk_buf_free(&deep), nmk_buf_free(&wide), nmk_buf_free(&bias), nmk_buf_free(&tools);
    reply r = get(port, "/health");
    check(r.status == 200, "and it is well", "%d", r.status);
    reply_free(&r);
}

static void test_tokens(int port) {
    static const char text[] = "Gr\\u00fc\\u00dfe, \\ud83d\\ude00\\n\\tdef f(x): return x";
    char *body = xasprintf("{\"prompt\":\"%s\",\"add_special_tokens\":false}", text);
    reply r = post(port, "/tokenize", body);
    free(body);
    body = xasprintf("{\"tokens\":%s}", json_object_to_json_string(at(r.json, "tokens")));
    reply back = post(port, "/detokenize", body);
    same("tokenize and back", text_at(back.json, "prompt"),
         "Gr\xc3\xbc\xc3\x9f"
         "e, \xf0\x9f\x98\x80\n\tdef f(x): return x");
    free(body), reply_free(&r), reply_free(&back);
    r = post(port, "/tokenize", "{" ASK "}");
    check(int_at(r.json, "tokens.0") == 1 && int_at(r.json, "tokens.1") == 3 && int_at(r.json, "count") > 10,
          "a chat's tokens, with one BOS", "%s", r.body);
    reply_free(&r);
    r = post(port, "/tokenize", "{\"prompt\":\"<BOS_TOKEN>x\"}");
    check(int_at(r.json, "tokens.0") == 1 && int_at(r.json, "tokens.1") != 1, "a text that begins with BOS has one",
          "%s", r.body);
    reply_free(&r);
    refused(port, "a token that is none", "/detokenize", "{\"tokens\":[1,99999999]}", 400, "invalid_value",
            "tokens[1]");
}

static void test_concurrent(int port) {
    static const char *const bodies[] = {
        "{\"stream\":true,\"temperature\":0,\"max_tokens\":120,\"prompt\":\"def is_prime\"}",
        "{\"stream\":true,\"temperature\":0.8,\"seed\":3,\"max_tokens\":120,\"prompt\":\"class Queue\"}",
    };
    nmk_buf alone[2] = {0};
    int fd[2];
    for (int i = 0; i < 2; i++) {
        reply r = post(port, TEXT, bodies[i]);
        told t = told_read(&r, false);
        nmk_buf_puts(&alone[i], t.text.data);
        told_free(&t), reply_free(&r);
    }
    for (int i = 0; i < 2; i++) fd[i] = request_open(port, "POST", TEXT, "", bodies[i]);
    check(metric_becomes(port, "vllm:num_requests_running", 2, 1000), "two run at once", "they do not");
    for (int i = 0; i < 2; i++) {
        reply r = reply_read(fd[i]);
        told t = told_read(&r, false);
        check(!t.wrong[0] && !strcmp(t.text.data, alone[i].data),
              i ? "the second as if alone" : "the first as if alone", "%s: %s", t.wrong, shown(t.text.data));
        told_free(&t), reply_free(&r), nmk_buf_free(&alone[i]);
    }
}

/* Cached tokens that usage tells of, for a prompt of 200 tokens that begin with `first`. */
static int cached(int port, const char *field, int first, const char *more) {
    nmk_buf body = {0};
    nmk_buf_printf(&body, "{\"max_tokens\":1,\"temperature\":0%s,\"prompt\":[%d", more, first);
    for (int i = 1; i < 200; i++) nmk_buf_printf(&body, ",%d", 20 + i);
    nmk_buf_puts(&body, "]}");
    reply r = reply_read(request_open(port, "POST", TEXT, field, body.data));
    int n = int_at(r.json, "usage.prompt_tokens_details.cached_tokens");
    if (int_at(r.json, "usage.prompt_tokens") != 200) check(false, "a prompt of 200 tokens", "%s", r.raw.data);
    reply_free(&r), nmk_buf_free(&body);
    return n;
}

static void test_cache(int port) {
    double hits = metric(port, "vllm:prefix_cache_hits_total");
    int n[] = {cached(port, "", 7, ""),
               cached(port, "", 7, ""),
               cached(port, "", 8, ""),
               cached(port, "", 7, ",\"cache_salt\":\"s\""),
               cached(port, "", 7, ",\"cache_salt\":\"s\""),
               cached(port, "", 7, ",\"seed\":1")};
    check(!n[0] && n[1] >= 128 && n[1] < 200 && !n[2], "a prompt that comes again is cached, another is not",
          "%d, %d, %d", n[0], n[1], n[2]);
    check(!n[3] && n[4] == n[1] && n[5] == n[1], "salts are apart", "%d, %d, without %d", n[3], n[4], n[5]);
    check(metric(port, "vllm:prefix_cache_hits_total") - hits == n[1] + n[4] + n[5], "hits are counted", "%g",
          metric(port, "vllm:prefix_cache_hits_total") - hits);
}

static void test_disconnect(int port) {
    nmk_buf text = {0};
    int fd = request_open(port, "POST", TEXT, "", "{\"stream\":true," LONG "}");
    check(get_until(fd, &text, "Check", 5000), "a long stream begins", "%s", text.data ? text.data : "");
    double aborted = metric(port, "vllm:num_requests_running");
    close(fd);
    check(aborted == 1 && metric_becomes(port, "vllm:num_requests_running", 0, 3000),
          "a client that leaves its stream frees the row", "%g before", aborted);
    fd = request_open(port, "POST", TEXT, "", "{\"n\":3," LONG "}");
    bool ran = metric_becomes(port, "vllm:num_requests_running", 3, 2000);
    close(fd);
    check(ran && metric_becomes(port, "vllm:num_requests_running", 0, 3000),
          "a client that leaves while nothing is sent", "ran %d", ran);
    for (int i = 0; i < 60; i++) {
        fd = request_open(port, "POST", i % 3 ? TEXT : CHAT, "", i % 3 ? "{\"stream\":true," LONG "}" : "{" ASK "}");
        usleep((useconds_t)random_below(12000));
        close(fd);
    }
    check(metric_becomes(port, "vllm:num_requests_running", 0, 3000) &&
              metric_becomes(port, "vllm:num_requests_waiting", 0, 1000),
          "sixty that leave at any moment", "rows are not free");
    nmk_buf_free(&text);
}

static void test_key(void) {
    server s = server_start((const char *const[]){TOY, "--api-key", "one", "--api-key=two", "--served-model-name", "a",
                                                  "--served-model-name", "b/c", "--max-num-seqs", "1",
                                                  "--max-model-len", "1K", NULL});
    reply r = get(s.port, "/v1/models");
    check(r.status == 401 && *text_at(r.json, "error.message"), "no key", "%d", r.status);
    reply_free(&r);
    static const char *const guarded[] = {"/v1/models/a",    "/version",  "/v1/chat/completions",
                                          "/v1/completions", "/tokenize", "/detokenize"};
    int closed = 0;
    for (size_t i = 0; i < sizeof guarded / sizeof *guarded; i++) {
        r = i < 2 ? get(s.port, guarded[i]) : post(s.port, guarded[i], "{}");
        closed += r.status == 401;
        reply_free(&r);
    }
    check(closed == 6, "no endpoint without a key", "%d of 6", closed);
    r = get(s.port, "/health");
    check(r.status == 200, "health needs no key", "%d", r.status);
    reply_free(&r);
    r = reply_read(request_open(s.port, "GET", "/v1/models", "Authorization: Bearer two\r\n", ""));
    check(r.status == 200 && !strcmp(text_at(r.json, "data.1.id"), "b/c") &&
              int_at(r.json, "data.0.max_model_len") == 1024,
          "a key, names, a length", "%s", r.body);
    reply_free(&r);
    static const char key[] = "Authorization: Bearer one\r\n";
    int mine = cached(s.port, key, 7, ""), other = cached(s.port, "Authorization: Bearer two\r\n", 7, "");
    mine += cached(s.port, key, 7, "");
    check(mine >= 128 && !other, "keys share no cache", "%d, %d", mine, other);
    int first = request_open(s.port, "POST", TEXT, key, "{\"stream\":true," LONG "}");
    metric_becomes(s.port, "vllm:num_requests_running", 1, 1000);
    int second = request_open(s.port, "POST", TEXT, key, "{\"model\":\"b/c\",\"prompt\":\"x\",\"max_tokens\":4}");
    int third = request_open(s.port, "POST", TEXT, key, "{\"n\":2,\"prompt\":\"x\",\"max_tokens\":4}");
    check(metric_becomes(s.port, "vllm:num_requests_waiting", 3, 1000) &&
              metric(s.port, "vllm:num_requests_running") == 1,
          "--max-num-seqs", "more run");
    close(third);
    check(metric_becomes(s.port, "vllm:num_requests_waiting", 1, 1000), "one that leaves while it waits",
          "waits still");
    close(first);
    r = reply_read(second);
    check(r.status == 200 && !strcmp(text_at(r.json, "model"), "b/c"), "the next one's turn", "%s", r.body);
    reply_free(&r);
    int rc = server_end(&s, SIGTERM, 5000);
    check(rc == 0, "an idle server ends at once", "%d", rc);
}

/* A server opened for 12 rows has steps of 16 columns; it runs 12 at once, and each says what it says alone. */
static void test_rows(void) {
    enum { ROWS = 12, ASKED = 14 };
    server s = server_start((const char *const[]){TOY, "--max-batch", "12", NULL});
    int fd[ASKED], same_text = 0;
    char body[160];
    for (int i = 0; i < ASKED; i++) {
        snprintf(body, sizeof body, "{\"prompt\":[%d,9,17],\"temperature\":1,\"seed\":%d,\"ignore_eos\":true,%s}",
                 40 + i, i, "\"max_tokens\":120");
        fd[i] = request_open(s.port, "POST", TEXT, "", body);
    }
    bool full = metric_becomes(s.port, "vllm:num_requests_running", ROWS, 5000);
    check(full && metric(s.port, "vllm:num_requests_waiting") == ASKED - ROWS, "--max-batch 12", "%g run",
          metric(s.port, "vllm:num_requests_running"));
    for (int i = 0; i < ASKED; i++) {
        reply r = reply_read(fd[i]);
        snprintf(body, sizeof body, "{\"prompt\":[%d,9,17],\"temperature\":1,\"seed\":%d,\"ignore_eos\":true,%s}",
                 40 + i, i, "\"max_tokens\":120");
        reply alone = post(s.port, TEXT, body);
        const char *text = text_at(r.json, "choices.0.text");
        same_text += r.status == 200 && *text && !strcmp(text, text_at(alone.json, "choices.0.text"));
        reply_free(&r), reply_free(&alone);
    }
    check(same_text == ASKED, "each as if alone", "%d of %d", same_text, ASKED);
    int rc = server_end(&s, SIGTERM, 5000);
    check(rc == 0, "a server of 12 rows ends well", "%d", rc);
}

static void test_drain(void) {
    nmk_buf text = {0};
    server s = server_start((const char *const[]){TOY, NULL});
    int fd =
        request_open(s.port, "POST", TEXT, "",
                     "{\"stream\":true,\"temperature\":0,\"ignore_eos\":true,\"max_tokens\":100,\"prompt\":\"def\"}");
    get_until(fd, &text, "data: ", 5000);
    kill(s.pid, SIGTERM);
    pause_ms(100);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)s.port)};
    int late = socket(AF_INET, SOCK_STREAM, 0);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    check(connect(late, (struct sockaddr *)&a, sizeof a) != 0, "no new connection while draining", "it was taken");
    close(late);
    get_all(fd, &text, 30000);
    close(fd);
    check(strstr(text.data, "\"finish_reason\":\"length\"") && strstr(text.data, "[DONE]"),
          "a stream that runs is finished", "%s", shown(text.data));
    int rc = server_end(&s, 0, 5000);
    check(rc == 0, "then the server ends", "%d", rc);

    s = server_start((const char *const[]){TOY, NULL});
    fd = request_open(s.port, "POST", TEXT, "", "{\"stream\":true," LONG "}");
    text.length = 0;
    get_until(fd, &text, "data: ", 5000);
    kill(s.pid, SIGINT);
    pause_ms(50);
    uint64_t start = nmk_now_ns();
    rc = server_end(&s, SIGINT, 5000);
    check(rc == 0 && nmk_now_ns() - start < time_limit_ns(2000), "a second signal ends it at once", "%d", rc);
    close(fd);
    nmk_buf_free(&text);
}

static void test_random(void) {
    server s = server_start((const char *const[]){"--random-weights", "1", "--max-model-len", "512", NULL});
    reply r = post(s.port, TEXT, "{\"prompt\":[1,5,9],\"max_tokens\":3,\"temperature\":0,\"ignore_eos\":true}");
    int a, b, c, n = sscanf(text_at(r.json, "choices.0.text"), "%d %d %d", &a, &b, &c);
    check(r.status == 200 && n == 3, "without a tokenizer, ids in and out", "%s", r.body);
    reply_free(&r);
    refused(s.port, "without a template, no chats", CHAT, "{" ASK "}", 400, "unsupported_parameter", "messages");
    refused(s.port, "without a tokenizer, no text", TEXT, "{\"prompt\":\"x\"}", 400, "unsupported_parameter", "prompt");
    server_end(&s, SIGTERM, 5000);
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    server s = server_start((const char *const[]){TOY, NULL});
    test_plain(s.port);
    test_chat(s.port);
    test_thinking(s.port);
    test_text(s.port);
    test_tokens(s.port);
    test_likelihood(s.port);
    test_seeds(s.port);
    test_refusals(s.port);
    test_hostile(s.port);
    test_concurrent(s.port);
    test_cache(s.port);
    test_disconnect(s.port);
    int rc = server_end(&s, SIGTERM, 5000);
    check(rc == 0, "ends well", "%d", rc);
    test_key();
    test_rows();
    test_drain();
    test_random();
    return failures != 0;
}
