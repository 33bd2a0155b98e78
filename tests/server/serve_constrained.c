/* Answers of a given form, field by field: nmk-serve with the toy on the CPU machine.  The toy knows next to nothing of
 * JSON, so what comes out right does so by the masks. */
#define _GNU_SOURCE /* memmem */
#include <json-c/json_tokener.h>
#include <math.h>

#include "serve_helper.h"

#define CHAT "/v1/chat/completions"
#define TEXT "/v1/completions"
#define ASK  "\"messages\":[{\"role\":\"user\",\"content\":\"What is 7 times 8?\"}]"
#define HOT  "\"temperature\":1,\"max_tokens\":160,\"seed\":5"

#define PERSON                                                                                                   \
    "{\"type\":\"object\",\"properties\":{\"age\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":120},\"ok\":{" \
    "\"type\":\"boolean\"},\"tag\":{\"enum\":[\"a\",\"b\"]}},\"required\":[\"age\",\"ok\",\"tag\"]}"

static struct json_object *parsed(const char *text) {
    nmk_err e;
    return nmk_json_parse(text, strlen(text), &e);
}

/* Whether a text is a document of PERSON. */
static bool is_person(const char *text) {
    struct json_object *o = parsed(text);
    int age = int_at(o, "age");
    const char *tag = text_at(o, "tag");
    bool good = json_object_is_type(o, json_type_object) && json_object_object_length(o) == 3 && age >= 1 &&
                age <= 120 && json_object_is_type(at(o, "ok"), json_type_boolean) &&
                (!strcmp(tag, "a") || !strcmp(tag, "b"));
    json_object_put(o);
    return good;
}

/* The toy may never end one, and may say a key twice. */
static bool is_object(const char *text) {
    struct json_object *o = json_tokener_parse(text);
    bool good = o ? json_object_is_type(o, json_type_object) : *text == '{' && text[strlen(text) - 1] != '}';
    json_object_put(o);
    return good;
}
static bool is_two_digits(const char *text) { return strlen(text) == 2 && text[0] >= '1' && text[0] <= '9'; }

static bool is_digits(const char *text) { return strlen(text) == 4 && strspn(text, "0123456789") == 4; }
static bool is_choice(const char *text) { return !strcmp(text, "seven") || !strcmp(text, "fifty-six"); }
static bool is_sum(const char *text) {
    int a, b, end = 0;
    return sscanf(text, "%d + %d%n", &a, &b, &end) == 2 && !text[end];
}

/* A chat and a completion with a field; `good` looks at what was said. */
static void form(int port, const char *name, const char *field, bool (*good)(const char *)) {
    char *chat = xasprintf("{" HOT "," ASK ",%s}", field), *text = xasprintf("{" HOT ",\"prompt\":\"x = \",%s}", field);
    reply r = post(port, CHAT, chat);
    const char *said = text_at(r.json, "choices.0.message.content");
    bool ended = good == is_object || !strcmp(text_at(r.json, "choices.0.finish_reason"), "stop");
    check(r.status == 200 && ended && good(said) && *text_at(r.json, "choices.0.message.reasoning_content"), name, "%s",
          r.body);
    reply_free(&r);
    r = post(port, TEXT, text);
    said = text_at(r.json, "choices.0.text");
    ended = good == is_object || !strcmp(text_at(r.json, "choices.0.finish_reason"), "stop");
    char *title = xasprintf("%s, a completion", name);
    check(r.status == 200 && ended && good(said), title, "%s", r.body);
    reply_free(&r);
    free(chat), free(text), free(title);
}

static void test_forms(int port) {
    form(
        port, "response_format json_schema",
        "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"p\",\"strict\":true,\"schema\":" PERSON
        "}}",
        is_person);
    form(port, "response_format json_object", "\"response_format\":{\"type\":\"json_object\"}", is_object);
    form(port, "response_format json_object with a schema",
         "\"response_format\":{\"type\":\"json_object\",\"schema\":" PERSON "}", is_person);
    form(port, "structured_outputs json", "\"structured_outputs\":{\"json\":" PERSON "}", is_person);
    form(port, "structured_outputs json_object", "\"structured_outputs\":{\"json_object\":true}", is_object);
    form(port, "structured_outputs regex", "\"structured_outputs\":{\"regex\":\"[0-9]{4}\"}", is_digits);
    form(port, "structured_outputs choice", "\"structured_outputs\":{\"choice\":[\"seven\",\"fifty-six\"]}", is_choice);
    form(port, "structured_outputs grammar",
         "\"structured_outputs\":{\"grammar\":\"root ::= n \\\" + \\\" n\\nn ::= [1-9] [0-9]{0,3}\"}", is_sum);
    form(port, "guided_json", "\"guided_json\":" PERSON, is_person);
    form(port, "guided_json as text",
         "\"guided_json\":\"{\\\"type\\\":\\\"integer\\\",\\\"minimum\\\":10,\\\"maximum\\\":99}\"", is_two_digits);
    form(port, "guided_regex", "\"guided_regex\":\"^\\\\d\\\\d\\\\d\\\\d$\"", is_digits);
    form(port, "guided_choice", "\"guided_choice\":[\"seven\",\"fifty-six\"]", is_choice);
    form(port, "guided_grammar", "\"guided_grammar\":\"root ::= [0-9]{4}\"", is_digits);
    form(port, "grammar", "\"grammar\":\"root ::= [0-9]{4}\"", is_digits);
    form(port, "regex", "\"regex\":\"(seven|fifty-six)\"", is_choice);
    form(port, "json_schema", "\"json_schema\":" PERSON, is_person);
}

/* ---------------------------------------------------------------- tools */

#define CITY                                                                                                              \
    "{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"parameters\":{\"type\":\"object\",\"properties\":{"  \
    "\"city\":{\"enum\":[\"Paris\",\"Rome\"]},\"days\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":9}},\"required\":" \
    "[\"city\",\"days\"],\"additionalProperties\":false}%s}}"
#define NOTE                                                                                                                \
    "{\"type\":\"function\",\"function\":{\"name\":\"note\",\"parameters\":{\"type\":\"object\",\"properties\":{\"text\":{" \
    "\"type\":\"string\",\"maxLength\":20}},\"required\":[\"text\"]}%s}}"

static bool good_arguments(const char *name, const char *text) {
    struct json_object *o = parsed(text);
    bool good = json_object_is_type(o, json_type_object);
    if (!strcmp(name, "get_weather")) {
        const char *city = text_at(o, "city");
        int days = int_at(o, "days");
        good = good && (!strcmp(city, "Paris") || !strcmp(city, "Rome")) && days >= 1 && days <= 9;
    } else {
        good = good && !strcmp(name, "note") && json_object_is_type(at(o, "text"), json_type_string);
    }
    json_object_put(o);
    return good;
}

/* Calls of an answer, all with good arguments; -1: some are not. */
static int calls_of(struct json_object *root, const char *only) {
    struct json_object *calls = at(root, "choices.0.message.tool_calls");
    if (!json_object_is_type(calls, json_type_array)) return 0;
    for (size_t i = 0; i < json_object_array_length(calls); i++) {
        struct json_object *call = json_object_array_get_idx(calls, i);
        const char *name = text_at(call, "function.name");
        if ((only && strcmp(name, only)) || !good_arguments(name, text_at(call, "function.arguments"))) return -1;
    }
    return (int)json_object_array_length(calls);
}

static reply ask_tools(int port, const char *strict, const char *more) {
    char *tools = xasprintf(CITY "," NOTE, strict, strict);
    char *body = xasprintf("{\"temperature\":1,\"max_tokens\":900,\"tools\":[%s],%s," ASK "}", tools, more);
    reply r = post(port, CHAT, body);
    free(tools), free(body);
    return r;
}

static void test_tools(int port) {
    int most = 0, wrong = 0, other_end = 0;
    for (int seed = 0; seed < 6; seed++) {
        char more[96];
        snprintf(more, sizeof more, "\"tool_choice\":\"required\",\"seed\":%d", seed);
        reply r = ask_tools(port, "", more);
        int n = calls_of(r.json, NULL);
        wrong += r.status != 200 || n < 1;
        other_end += strcmp(text_at(r.json, "choices.0.finish_reason"), "tool_calls") != 0 &&
                     strcmp(text_at(r.json, "choices.0.finish_reason"), "length") != 0;
        if (n > most) most = n;
        if (wrong) printf("  %s\n", r.body);
        reply_free(&r);
    }
    check(!wrong && !other_end, "tool_choice required: nothing but calls, with arguments of their schemas", "%d, %d",
          wrong, other_end);

    reply r = ask_tools(port, "", "\"seed\":1,\"parallel_tool_calls\":false,\"tool_choice\":\"required\"");
    check(calls_of(r.json, NULL) == 1 && !strcmp(text_at(r.json, "choices.0.finish_reason"), "tool_calls"),
          "parallel_tool_calls false: one call, and the turn ends", "%s", r.body);
    reply_free(&r);
    r = ask_tools(
        port, "",
        "\"seed\":2,\"parallel_tool_calls\":false,\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":"
        "\"note\"}}");
    check(calls_of(r.json, "note") == 1, "tool_choice names a function", "%s", r.body);
    reply_free(&r);

    wrong = 0;
    for (int seed = 0; seed < 3; seed++) {
        char more[96];
        snprintf(more, sizeof more, "\"seed\":%d,\"reasoning_effort\":\"none\"", seed);
        r = ask_tools(port, ",\"strict\":true", more);
        bool cut = !strcmp(text_at(r.json, "choices.0.finish_reason"), "length");
        wrong += r.status != 200 || (calls_of(r.json, NULL) < 0 && !cut);
        if (wrong) printf("  %s\n", r.body);
        reply_free(&r);
    }
    check(!wrong, "strict tools: calls are of their schemas", "%d", wrong);

    char *city = xasprintf(CITY, "");
    char *body =
        xasprintf("{\"stream\":true,\"seed\":1,\"temperature\":1,\"max_tokens\":900,\"parallel_tool_calls\":false,"
                  "\"tool_choice\":\"required\",\"tools\":[%s]," ASK "}",
                  city);
    r = post(port, CHAT, body);
    told t = told_read(&r, true);
    check(!t.wrong[0] && t.calls == 1 && !strcmp(t.ended, "tool_calls") &&
              good_arguments("get_weather", t.arguments.data),
          "a streamed call", "%s %s", t.wrong, r.body);
    told_free(&t), reply_free(&r);
    free(city), free(body);
}

/* ---------------------------------------------------------------- with all else */

static void test_beside(int port) {
    /* log-probabilities are of what the mask leaves: they add up to 1, and nothing else is an alternative */
    reply r =
        post(port, TEXT,
             "{\"prompt\":\"x = \",\"temperature\":1,\"max_tokens\":8,\"logprobs\":10,\"guided_regex\":\"[01]{3}x\"}");
    struct json_object *top = at(r.json, "choices.0.logprobs.top_logprobs.0");
    double sum = 0;
    bool only = top != NULL;
    if (top) {
        json_object_object_foreach(top, key, value) {
            sum += exp(json_object_get_double(value));
            only &= strspn(key, "01x") == strlen(key);
        }
    }
    check(r.status == 200 && only && fabs(sum - 1) < 1e-3, "log-probabilities are of the tokens that may come", "%g %s",
          sum, r.body);
    reply_free(&r);

    /* the same seed, the same answer, and others are not disturbed */
    reply alone = post(port, CHAT, "{\"temperature\":0,\"max_tokens\":30," ASK "}");
    int fd[5];
    for (int i = 0; i < 4; i++)
        fd[i] =
            request_open(port, "POST", CHAT, "", "{" HOT ",\"response_format\":{\"type\":\"json_object\"}," ASK "}");
    fd[4] = request_open(port, "POST", CHAT, "", "{\"temperature\":0,\"max_tokens\":30," ASK "}");
    reply first = reply_read(fd[0]);
    bool same_answer = is_object(text_at(first.json, "choices.0.message.content")) && first.status == 200;
    for (int i = 1; i < 4; i++) {
        r = reply_read(fd[i]);
        same_answer &=
            !strcmp(text_at(r.json, "choices.0.message.content"), text_at(first.json, "choices.0.message.content"));
        reply_free(&r);
    }
    check(same_answer, "the same seed, the same answer", "%s", first.body);
    r = reply_read(fd[4]);
    check(!strcmp(text_at(r.json, "choices.0.message.content"), text_at(alone.json, "choices.0.message.content")) &&
              *text_at(r.json, "choices.0.message.content"),
          "others say what they say alone", "%s", r.body);
    reply_free(&r), reply_free(&first), reply_free(&alone);

    r = post(port, CHAT, "{\"stream\":true," HOT ",\"guided_json\":" PERSON "," ASK "}");
    told t = told_read(&r, true);
    check(!t.wrong[0] && !strcmp(t.ended, "stop") && is_person(t.text.data), "streamed", "%s %s", t.wrong, r.body);
    told_free(&t), reply_free(&r);

    r = post(
        port, TEXT,
        "{\"prompt\":[\"a\",\"b\"],\"n\":2,\"best_of\":2,\"temperature\":1,\"max_tokens\":9,\"regex\":\"[0-9]{4}\"}");
    bool all = r.status == 200;
    for (int i = 0; i < 4; i++) {
        char path[32];
        snprintf(path, sizeof path, "choices.%d.text", i);
        all &= is_digits(text_at(r.json, path));
    }
    check(all, "several answers to several prompts", "%s", r.body);
    reply_free(&r);

    r = post(port, TEXT, "{\"prompt\":\"x\",\"temperature\":0,\"max_tokens\":3,\"regex\":\"[0-9]{400}\"}");
    check(!strcmp(text_at(r.json, "choices.0.finish_reason"), "length"), "cut by max_tokens", "%s", r.body);
    reply_free(&r);

    /* clients that leave while masks are made */
    for (int i = 0; i < 12; i++) {
        fd[0] =
            request_open(port, "POST", CHAT, "", "{" HOT ",\"response_format\":{\"type\":\"json_object\"}," ASK "}");
        usleep(20000 * (unsigned)i);
        close(fd[0]);
    }
    r = post(port, TEXT, "{\"prompt\":\"x\",\"temperature\":0,\"max_tokens\":9,\"regex\":\"[0-9]{4}\"}");
    check(is_digits(text_at(r.json, "choices.0.text")), "after clients that left", "%s", r.body);
    reply_free(&r);
}

/* Refused alone, with the field and what about it. */
static void refused(int port, const char *field, const char *param, const char *words) {
    char *body = xasprintf("{\"max_tokens\":5," ASK ",%s}", field), *name = xasprintf("refused: %.90s", field);
    reply r = post(port, CHAT, body);
    check(r.status == 400 && !strcmp(text_at(r.json, "error.param"), param) &&
              strstr(text_at(r.json, "error.message"), words),
          name, "%d %s", r.status, r.body);
    reply_free(&r);
    free(body), free(name);
}

static void test_refusals(int port) {
    refused(port, "\"guided_json\":{\"properties\":{\"a\":{\"not\":{}}}}", "guided_json",
            "schema.properties.a.not: this keyword is not supported");
    refused(port, "\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"schema\":{\"$ref\":\"#/x\"}}}",
            "response_format.json_schema.schema", "there is no schema at '#/x'");
    refused(port, "\"guided_regex\":\"(a\"", "guided_regex", "a group without its )");
    refused(port, "\"guided_grammar\":\"root ::= x\"", "guided_grammar", "line 1: there is no rule x");
    refused(port, "\"grammar\":\"root ::= root \\\"a\\\" | \\\"b\\\"\"", "grammar", "left recursion");
    refused(
        port,
        "\"tool_choice\":\"required\",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{"
        "\"type\":\"x\"}}}]",
        "tools[0].function.parameters", "schema.type");
}

int main(void) {
    signal(SIGPIPE, SIG_IGN);
    server s = server_start((const char *const[]){"--checkpoint", "examples/nmc-toy", NULL});
    test_forms(s.port);
    test_tools(s.port);
    test_beside(s.port);
    test_refusals(s.port);
    int rc = server_end(&s, SIGTERM, 5000);
    check(rc == 0, "ends well", "%d", rc);
    return failures > 0;
}
