/* /v1/responses over a batch that the test plays: what becomes of items, what is said of an answer (literally, as
 * tests/server/data/responses_* have it), what is kept, what is refused. */
#define _GNU_SOURCE /* memmem */
#include "played_batch.h"

#define PATH  "/v1/responses"
#define TOOLS "\"tools\":[{\"type\":\"function\",\"name\":\"f\",\"parameters\":{}}]"
#define CALL                                                                                                   \
    "I call.<|END_THINKING|><|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": " \
    "{\"a\": [1, 2.50]}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>"
/* The answer to a body when the model says that, with log-probabilities where they are asked for; `prompt` (or NULL) gets
 * what the model was asked. */
static reply ask(const char *body, const char *said, nmk_batch_end how, nmk_buf *prompt) {
    int id = submits + 1, fd = begin(PATH, body, id);
    nmk_ids ids = ids_of(said);
    if (prompt) *prompt = prompt_of(id);
    submitted[id - 1].sampler.logprobs ? say_likely(id, &ids, 0, ids.count) : say(id, said);
    end(id, how, NULL);
    nmk_ids_free(&ids);
    return reply_read(fd);
}

static void prompt_ends(const char *name, const char *body, const char *wanted) {
    nmk_buf prompt;
    reply r = ask(body, "x", NMK_BATCH_LENGTH, &prompt);
    check_end(name, &r, &prompt, wanted);
}

#define USER   "<|START_OF_TURN_TOKEN|><|USER_TOKEN|><|START_TEXT|>"
#define BOT    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
#define END    "<|END_TEXT|><|END_OF_TURN_TOKEN|>"
#define BEGINS BOT "<|START_THINKING|>"

static void test_items(void) {
    prompt_ends("a text", "{\"input\":\"hi\"}", USER "hi" END BEGINS);
    prompt_ends("instructions, and a developer's message",
                "{\"instructions\":\"Be brief.\",\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_text\","
                "\"text\":\"a\"},{\"type\":\"input_text\",\"text\":\"b\"}]}]}",
                "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TEXT|>Be brief." END USER "ab" END BEGINS);
    prompt_ends(
        "a turn with reasoning, text and two calls is one, outputs follow",
        "{\"input\":[{\"type\":\"message\",\"role\":\"user\",\"content\":\"q\"},"
        "{\"type\":\"reasoning\",\"id\":\"rs_1\",\"summary\":[],\"content\":[{\"type\":\"reasoning_text\","
        "\"text\":\"Hm\"}]},"
        "{\"type\":\"message\",\"role\":\"assistant\",\"id\":\"msg_1\",\"status\":\"completed\",\"content\":["
        "{\"type\":\"output_text\",\"text\":\"Wait\",\"annotations\":[]}]},"
        "{\"type\":\"function_call\",\"call_id\":\"c1\",\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1}\"},"
        "{\"type\":\"function_call\",\"call_id\":\"c2\",\"name\":\"g\",\"arguments\":\"\"},"
        "{\"type\":\"function_call_output\",\"call_id\":\"c1\",\"output\":\"one\"},"
        "{\"type\":\"function_call_output\",\"call_id\":\"c2\",\"output\":[{\"type\":\"input_text\","
        "\"text\":\"two\"}]}]," TOOLS "}",
        BOT "<|START_THINKING|>Hm<|END_THINKING|><|START_TEXT|>Wait<|END_TEXT|><|START_ACTION|>[{\"tool_call_id\": "
            "\"0\", \"tool_name\": \"f\", \"parameters\": {\"a\": 1}}, {\"tool_call_id\": \"1\", \"tool_name\": \"g\", "
            "\"parameters\": {}}]<|END_ACTION|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>"
            "<|START_TOOL_RESULT|>[{\"tool_call_id\": \"0\", \"results\": {\"0\": {\"content\": \"one\"}}, "
            "\"is_error\": null}, {\"tool_call_id\": \"1\", \"results\": {\"0\": {\"content\": \"two\"}}, "
            "\"is_error\": null}]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>" BEGINS);
}

static void test_whole(void) {
    reply r = ask("{\"input\":\"hi\"," TOOLS "}", CALL, NMK_BATCH_STOP, NULL);
    nmk_buf body = steady(r.body);
    same_as("a response with reasoning and a call", body.data, "responses_call");
    nmk_buf_free(&body), reply_free(&r);

    r = ask(
        "{\"input\":\"hi\",\"instructions\":\"Be brief.\",\"temperature\":0.5,\"max_output_tokens\":9,\"store\":false,"
        "\"metadata\":{\"a\":\"b\"},\"reasoning\":{\"effort\":\"none\"},\"user\":\"u\",\"truncation\":\"auto\"}",
        "<|START_TEXT|>Well, it is", NMK_BATCH_LENGTH, NULL);
    body = steady(r.body);
    same_as("a response that is cut, with what was asked", body.data, "responses_cut");
    nmk_buf_free(&body), reply_free(&r);
}

static void test_stream(void) {
    reply r = ask("{\"stream\":true,\"input\":\"hi\"," TOOLS "}",
                  "Hm<|END_THINKING|><|START_TEXT|>Wait.<|END_TEXT|><|START_ACTION|>[{\"tool_name\": \"f\", "
                  "\"parameters\": {\"a\": 1}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
                  NMK_BATCH_STOP, NULL);
    nmk_buf body = steady(r.body);
    check(strstr(r.raw.data, "text/event-stream") != NULL, "a stream of events", "%s", r.raw.data);
    same_as("every event of a response, in order", body.data, "responses_events");
    nmk_buf_free(&body), reply_free(&r);

    r = ask("{\"stream\":true,\"input\":\"hi\"}", "Hm", NMK_BATCH_LENGTH, NULL);
    const char *last = strstr(r.body, "event: response.incomplete\n");
    check(last && strstr(last, "\"status\":\"incomplete\",\"background\":false,\"error\":null,"
                               "\"incomplete_details\":{\"reason\":\"max_output_tokens\"}"),
          "a stream that is cut", "%s", r.body);
    reply_free(&r);

    int id = submits + 1, fd = begin(PATH, "{\"stream\":true,\"input\":\"hi\"}", id);
    say(id, "Hm");
    end(id, NMK_BATCH_FAILED, "task 7 waited");
    r = reply_read(fd);
    const char *error = strstr(r.body, "event: error\ndata: {\"type\":\"error\",\"sequence_number\":6,"
                                       "\"code\":\"engine_failed\",\"message\":\"The engine failed: task 7 waited\"");
    last = strstr(r.body, "event: response.failed\n");
    check(error && last && error < last && strstr(last, "\"status\":\"failed\"") &&
              strstr(last, "\"error\":{\"code\":\"server_error\","),
          "a stream that fails", "%s", r.body);
    reply_free(&r);
}

/* The value of `name` in the data of every event of a type, in a list; the caller puts it away. */
static struct json_object *of_events(const char *body, const char *type, const char *name) {
    struct json_object *all = json_object_new_array();
    char *begins = xasprintf("event: %s\ndata: ", type);
    for (const char *p = strstr(body, begins); p; p = strstr(p + 1, begins)) {
        nmk_err e;
        const char *data = p + strlen(begins), *stop = strstr(data, "\n\n");
        struct json_object *v = nmk_json_parse(data, (size_t)(stop - data), &e);
        json_object_array_add(all, json_object_get(at(v, name)));
        json_object_put(v);
    }
    free(begins);
    return all;
}

/* Whether these are the log-probabilities of that text's tokens, of which the first is the nth that was said. */
static bool tell(struct json_object *logprobs, const char *text, int nth, int alternatives) {
    nmk_buf bytes = {0};
    bool good = likely_are(logprobs, &bytes, nth, alternatives) && bytes.length == strlen(text) &&
                !memcmp(bytes.data, text, bytes.length);
    nmk_buf_free(&bytes);
    return good;
}

#define LIKELY "\"include\":[\"reasoning.encrypted_content\",\"message.output_text.logprobs\"],\"top_logprobs\":2"

/* Of the text alone: neither those of reasoning and calls nor markers. */
static void test_logprobs(void) {
    static const char before[] = "I think.<|END_THINKING|><|START_TEXT|>", text[] = "It is \xf0\x9f\x98\x80 here.";
    nmk_ids ids = ids_of(before);
    int first = (int)ids.count;
    char *said = xasprintf("%s%s<|END_TEXT|><|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {}}]<|END_ACTION|>"
                           "<|END_OF_TURN_TOKEN|>",
                           before, text);
    reply r = ask("{\"input\":\"hi\"," TOOLS "," LIKELY "}", said, NMK_BATCH_STOP, NULL);
    struct json_object *content = at(r.json, "output.1.content.0");
    check(tell(at(content, "logprobs"), text, first, 2) && !strcmp(text_at(content, "text"), text) &&
              int_at(r.json, "top_logprobs") == 2,
          "a response's logprobs are those of its text", "%s", r.body);
    char *more = xasprintf("{\"input\":\"on\",\"previous_response_id\":\"%s\"}", text_at(r.json, "id"));
    reply_free(&r);
    nmk_buf prompt;
    r = ask(more, "x", NMK_BATCH_LENGTH, &prompt);
    check(strstr(prompt.data, text) && !strstr(prompt.data, "logprob"), "it is gone on with", "%s", prompt.data);
    free(more), nmk_buf_free(&prompt), reply_free(&r);

    r = ask("{\"stream\":true,\"input\":\"hi\"," TOOLS "," LIKELY "}", said, NMK_BATCH_STOP, NULL);
    struct json_object *deltas = of_events(r.body, "response.output_text.delta", "logprobs"),
                       *part = of_events(r.body, "response.content_part.done", "part.logprobs"),
                       *done = of_events(r.body, "response.output_text.done", "logprobs"),
                       *whole = of_events(r.body, "response.completed", "response.output.1.content.0.logprobs");
    struct json_object *all = json_object_new_array();
    for (size_t i = 0; i < json_object_array_length(deltas); i++) {
        struct json_object *one = json_object_array_get_idx(deltas, i);
        for (size_t k = 0; k < json_object_array_length(one); k++)
            json_object_array_add(all, json_object_get(json_object_array_get_idx(one, k)));
    }
    check(json_object_array_length(deltas) > 2 && tell(all, text, first, 2),
          "a stream's come with the text that they are of", "%s", r.body);
    check(json_object_equal(at(done, "0"), all) && json_object_equal(at(whole, "0"), all) &&
              json_object_equal(json_object_array_get_idx(part, json_object_array_length(part) - 1), all),
          "and once more at its end", "%s", r.body);
    json_object_put(deltas), json_object_put(part), json_object_put(done), json_object_put(whole);
    json_object_put(all), reply_free(&r), free(said), nmk_ids_free(&ids);

    r = ask("{\"input\":\"hi\",\"stop\":\" here\",\"include\":[\"message.output_text.logprobs\"]}",
            "<|END_THINKING|><|START_TEXT|>It is here.", NMK_BATCH_CANCEL, NULL);
    check(tell(at(r.json, "output.0.content.0.logprobs"), "It is", 2, 0), "none of a stop string, no alternatives",
          "%s", r.body);
    reply_free(&r);

    r = ask("{\"input\":\"hi\",\"top_logprobs\":3}", "<|END_THINKING|><|START_TEXT|>a", NMK_BATCH_LENGTH, NULL);
    check(r.status == 200 && json_object_array_length(at(r.json, "output.0.content.0.logprobs")) == 0 &&
              !submitted[submits - 1].sampler.logprobs,
          "top_logprobs alone asks for none", "%s", r.body);
    reply_free(&r);
}

/* The id of the response in an answer. */
static char *id_of(const reply *r) { return xstrdup(text_at(r->json, "id")); }

static void test_kept(void) {
    nmk_buf prompt;
    reply r = ask("{\"instructions\":\"Once.\",\"input\":\"q1\"}", "R<|END_THINKING|><|START_TEXT|>a1<|END_TEXT|>",
                  NMK_BATCH_STOP, NULL);
    char *first = id_of(&r), *item = xstrdup(text_at(r.json, "output.1.id"));
    nmk_buf body = {0};
    nmk_buf_puts(&body, r.body);
    reply_free(&r);

    char *path = xasprintf(PATH "/%s", first);
    r = get(port, path);
    check(r.status == 200 && !strcmp(r.body, body.data), "a response is found again", "%d %s", r.status, r.body);
    reply_free(&r);

    char *ask_on = xasprintf("{\"previous_response_id\":\"%s\",\"input\":\"q2\"}", first);
    r = ask(ask_on, "<|END_THINKING|><|START_TEXT|>a2<|END_TEXT|>", NMK_BATCH_STOP, &prompt);
    check(!strcmp(prompt.data,
                  "<BOS_TOKEN>" USER "q1" END BEGINS "R<|END_THINKING|><|START_TEXT|>a1" END USER "q2" END BEGINS),
          "it is gone on with, without its instructions", "%s", prompt.data);
    check(!strcmp(text_at(r.json, "previous_response_id"), first), "and it is named", "%s", r.body);
    char *second = id_of(&r);
    free(ask_on), nmk_buf_free(&prompt), reply_free(&r);

    ask_on = xasprintf("{\"previous_response_id\":\"%s\",\"store\":false,\"input\":\"q3\"}", second);
    r = ask(ask_on, "x", NMK_BATCH_LENGTH, &prompt);
    check(strstr(prompt.data, "q1" END BEGINS "R<|END_THINKING|><|START_TEXT|>a1" END USER "q2" END BEGINS
                              "<|END_THINKING|><|START_TEXT|>a2" END USER "q3" END BEGINS),
          "two back", "%s", prompt.data);
    char *third = id_of(&r);
    nmk_buf_free(&prompt), reply_free(&r);

    char *refer =
        xasprintf("{\"input\":[{\"role\":\"user\",\"content\":\"q\"},{\"type\":\"item_reference\",\"id\":\"%s\"},"
                  "{\"role\":\"user\",\"content\":\"r\"}]}",
                  item);
    r = ask(refer, "x", NMK_BATCH_LENGTH, &prompt);
    check(strstr(prompt.data, USER "q" END BEGINS "<|END_THINKING|><|START_TEXT|>a1" END USER "r" END) != NULL,
          "an item by its id", "%s", prompt.data);
    nmk_buf_free(&prompt), reply_free(&r);

    char *gone = xasprintf(PATH "/%s", third);
    r = get(port, gone);
    check(r.status == 404 && *text_at(r.json, "error.message"), "store false is not kept", "%d %s", r.status, r.body);
    reply_free(&r);
    r = reply_read(request_open(port, "DELETE", path, "", ""));
    check(r.status == 200 && !strcmp(text_at(r.json, "id"), first) && strstr(r.body, "\"deleted\":true"),
          "a response is deleted", "%d %s", r.status, r.body);
    reply_free(&r);
    r = get(port, path);
    check(r.status == 404, "and not found any more", "%d", r.status);
    reply_free(&r);
    r = post(port, PATH, ask_on);
    check(r.status == 400 && !strcmp(text_at(r.json, "error.code"), "previous_response_not_found") &&
              !strcmp(text_at(r.json, "error.param"), "previous_response_id"),
          "nor gone on with from what followed it", "%d %s", r.status, r.body);
    reply_free(&r);
    r = post(port, PATH, refer);
    check(r.status == 404 && !strcmp(text_at(r.json, "error.param"), "input[1].id"), "nor its items", "%d %s", r.status,
          r.body);
    reply_free(&r);
    free(ask_on), free(first), free(second), free(third), free(path), free(gone), free(refer), free(item);
    nmk_buf_free(&body);
}

static void test_refused(void) {
    static const struct {
        const char *body, *param, *code;
    } cases[] = {
        {"{}", "input", "missing_required_parameter"},
        {"{\"input\":7}", "input", "invalid_type"},
        {"{\"input\":[]}", "input", "invalid_value"},
        {"{\"input\":[7]}", "input[0]", "invalid_type"},
        {"{\"input\":[{\"type\":7}]}", "input[0].type", "invalid_type"},
        {"{\"input\":[{\"type\":\"web_search_call\"}]}", "input[0].type", "unsupported_value"},
        {"{\"input\":[{\"content\":\"a\"}]}", "input[0].role", "missing_required_parameter"},
        {"{\"input\":[{\"role\":\"tool\",\"content\":\"a\"}]}", "input[0].role", "invalid_value"},
        {"{\"input\":[{\"role\":\"user\"}]}", "input[0].content", "missing_required_parameter"},
        {"{\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_image\"}]}]}", "input[0].content[0].type",
         "unsupported_value"},
        {"{\"input\":[{\"type\":\"function_call\",\"name\":\"f\",\"arguments\":\"\"}]}", "input[0].call_id",
         "missing_required_parameter"},
        {"{\"input\":[{\"type\":\"function_call\",\"call_id\":\"c\",\"name\":\"\",\"arguments\":\"\"}]}",
         "input[0].name", "invalid_value"},
        {"{\"input\":[{\"type\":\"function_call\",\"call_id\":\"c\",\"name\":\"f\",\"arguments\":7}]}",
         "input[0].arguments", "invalid_type"},
        {"{\"input\":[{\"type\":\"function_call_output\",\"call_id\":\"c\"}]}", "input[0].output",
         "missing_required_parameter"},
        {"{\"input\":[{\"type\":\"function_call_output\",\"call_id\":\"c\",\"output\":7}]}", "input[0].output",
         "invalid_type"},
        {"{\"input\":[{\"type\":\"reasoning\",\"content\":7}]}", "input[0].content", "invalid_type"},
        {"{\"input\":[{\"type\":\"reasoning\",\"summary\":[{}]}]}", "input[0].summary[0].text",
         "missing_required_parameter"},
        {"{\"input\":[{\"type\":\"item_reference\"}]}", "input[0].id", "missing_required_parameter"},
        {"{\"input\":\"a\",\"instructions\":7}", "instructions", "invalid_type"},
        {"{\"input\":\"a\",\"previous_response_id\":\"resp_x\"}", "previous_response_id",
         "previous_response_not_found"},
        {"{\"input\":\"a\",\"store\":1}", "store", "invalid_type"},
        {"{\"input\":\"a\",\"max_output_tokens\":0}", "max_output_tokens", "invalid_value"},
        {"{\"input\":\"a\",\"tools\":{}}", "tools", "invalid_type"},
        {"{\"input\":\"a\",\"tools\":[{\"type\":\"web_search\"}]}", "tools[0].type", "invalid_value"},
        {"{\"input\":\"a\",\"tools\":[{\"type\":\"function\"}]}", "tools[0].name", "invalid_value"},
        {"{\"input\":\"a\",\"tool_choice\":7}", "tool_choice", "invalid_type"},
        {"{\"input\":\"a\",\"tool_choice\":{\"type\":\"mcp\"}}", "tool_choice.type", "invalid_value"},
        {"{\"input\":\"a\",\"text\":7}", "text", "invalid_type"},
        {"{\"input\":\"a\",\"text\":{\"format\":7}}", "text.format", "invalid_type"},
        {"{\"input\":\"a\",\"reasoning\":7}", "reasoning", "invalid_type"},
        {"{\"input\":\"a\",\"reasoning\":{\"effort\":\"great\"}}", "reasoning.effort", "invalid_value"},
        {"{\"input\":\"a\",\"reasoning\":{\"summary\":7}}", "reasoning.summary", "invalid_type"},
        {"{\"input\":\"a\",\"reasoning\":{\"max_tokens\":0}}", "reasoning.max_tokens", "invalid_value"},
        {"{\"input\":\"a\",\"include\":[7]}", "include", "invalid_type"},
        {"{\"input\":\"a\",\"include\":\"x\"}", "include", "invalid_type"},
        {"{\"input\":\"a\"," LIKELY "1}", "top_logprobs", "invalid_value"},
        {"{\"input\":\"a\",\"top_logprobs\":-1}", "top_logprobs", "invalid_value"},
        {"{\"input\":\"a\",\"truncation\":\"some\"}", "truncation", "invalid_value"},
        {"{\"input\":\"a\",\"background\":true}", "background", "unsupported_parameter"},
        {"{\"input\":\"a\",\"conversation\":\"c\"}", "conversation", "unsupported_parameter"},
        {"{\"input\":\"a\",\"prompt\":{\"id\":\"p\"}}", "prompt", "unsupported_parameter"},
        {"{\"input\":\"a\",\"temperature\":3}", "temperature", "invalid_value"},
        {"{\"input\":\"a\",\"model\":\"other\"}", "model", "model_not_found"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        reply r = post(port, PATH, cases[i].body);
        check((r.status == 400 || (r.status == 404 && !strcmp(cases[i].param, "model"))) &&
                  !strcmp(text_at(r.json, "error.param"), cases[i].param) &&
                  !strcmp(text_at(r.json, "error.code"), cases[i].code) && *text_at(r.json, "error.message"),
              cases[i].body, "%d %s", r.status, r.body);
        reply_free(&r);
    }
}

/* More than the store holds: the longest unused go. */
static void test_room(void) {
    char *large = xasprintf("{\"input\":\"%0*d\"}", 3000, 0), *ids[40];
    for (int i = 0; i < 40; i++) {
        reply r = ask(large, "x", NMK_BATCH_LENGTH, NULL);
        ids[i] = id_of(&r);
        reply_free(&r);
        if (i > 2) { /* the first one is used all the time, by what follows it */
            char *body = xasprintf("{\"previous_response_id\":\"%s\",\"store\":false,\"input\":[7]}", ids[0]);
            r = post(port, PATH, body);
            reply_free(&r), free(body);
        }
    }
    int found = 0;
    for (int i = 0; i < 40; i++) {
        char *path = xasprintf(PATH "/%s", ids[i]);
        reply r = get(port, path);
        found += r.status == 200;
        if (i == 1) check(r.status == 404, "the longest unused response goes", "%d", r.status);
        if (i == 39) check(r.status == 200, "the newest stays", "%d", r.status);
        reply_free(&r), free(path), free(ids[i]);
    }
    check(found > 5 && found < 20, "as many are kept as have room", "%d", found);
    free(large);
}

static void play_with(size_t kept_bytes, void (*test)(void)) {
    nmk_api_options o = {.kept_bytes = kept_bytes};
    play(&o, NULL, 0);
    test();
    play_end(&o);
}

static void test_none_kept(void) {
    reply r = ask("{\"input\":\"a\"}", "x", NMK_BATCH_LENGTH, NULL);
    char *id = id_of(&r), *path = xasprintf(PATH "/%s", id);
    reply_free(&r);
    r = get(port, path);
    check(r.status == 404, "without a store nothing is found", "%d", r.status);
    reply_free(&r), free(id), free(path);
}

int main(void) {
    nmk_api_options o = {.kept_bytes = 1 << 20};
    play(&o, NULL, 0);
    test_items();
    test_whole();
    test_stream();
    test_logprobs();
    test_kept();
    test_refused();
    play_end(&o);
    play_with(40000, test_room);
    play_with(0, test_none_kept);
    return failures != 0;
}
