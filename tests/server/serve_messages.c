/* /v1/messages over a batch that the test plays: what becomes of blocks, what is said of an answer (literally, as
 * tests/server/data/messages_* have it), the key in a field of its own, what is refused and in which shape. */
#define _GNU_SOURCE /* memmem */
#include "played_batch.h"

#define PATH  "/v1/messages"
#define COUNT PATH "/count_tokens"
#define KEY   "X-API-Key: open\r\nAnthropic-Version: 2023-06-01\r\n"
#define TOOLS "\"tools\":[{\"name\":\"f\",\"description\":\"F\",\"input_schema\":{\"type\":\"object\"}}]"
#define ASK   "\"max_tokens\":50,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define THINK "\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024}"

/* As begin(), with a key. */
static int open_one(const char *body, int count) {
    int fd = request_open(port, "POST", PATH "?beta=true", KEY, body);
    wait_submits(count);
    if (submits < count) check(false, "submitted", "%d of %d", (int)submits, count);
    return fd;
}

static reply ask(const char *body, const char *said, nmk_batch_end how, nmk_buf *prompt) {
    int id = submits + 1, fd = open_one(body, id);
    if (prompt) *prompt = prompt_of(id);
    say(id, said);
    end(id, how, NULL);
    return reply_read(fd);
}

static reply post_key(const char *path, const char *body) {
    return reply_read(request_open(port, "POST", path, KEY, body));
}

#define SYSTEM "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TEXT|>"
#define USER   "<|START_OF_TURN_TOKEN|><|USER_TOKEN|><|START_TEXT|>"
#define BOT    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>"
#define END    "<|END_TEXT|><|END_OF_TURN_TOKEN|>"

static void prompt_ends(const char *name, const char *body, const char *wanted) {
    nmk_buf prompt;
    reply r = ask(body, "x", NMK_BATCH_LENGTH, &prompt);
    check_end(name, &r, &prompt, wanted);
}

static void test_blocks(void) {
    prompt_ends("a text; who does not ask for thinking has none", "{" ASK "}", USER "hi" END BOT "<|END_THINKING|>");
    prompt_ends("thinking", "{" THINK "," ASK "}", USER "hi" END BOT);
    prompt_ends("a system text", "{\"system\":\"Be brief.\"," ASK "}",
                SYSTEM "Be brief." END USER "hi" END BOT "<|END_THINKING|>");
    prompt_ends("system blocks",
                "{\"system\":[{\"type\":\"text\",\"text\":\"A\",\"cache_control\":{\"type\":\"ephemeral\"}},"
                "{\"type\":\"text\",\"text\":\"B\"}]," ASK "}",
                SYSTEM "AB" END USER "hi" END BOT "<|END_THINKING|>");
    prompt_ends("a turn with thinking, text and two calls is one; results come before the text beside them",
                "{\"max_tokens\":9," THINK ",\"messages\":[{\"role\":\"user\",\"content\":\"q\"},"
                "{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\",\"thinking\":\"Hm\",\"signature\":\"\"},"
                "{\"type\":\"redacted_thinking\",\"data\":\"x\"},{\"type\":\"text\",\"text\":\"Wait\"},"
                "{\"type\":\"tool_use\",\"id\":\"c1\",\"name\":\"f\",\"input\":{\"a\":1}},"
                "{\"type\":\"tool_use\",\"id\":\"c2\",\"name\":\"g\",\"input\":{}}]},"
                "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"Go on.\"},"
                "{\"type\":\"tool_result\",\"tool_use_id\":\"c1\",\"content\":\"one\"},"
                "{\"type\":\"tool_result\",\"tool_use_id\":\"c2\",\"content\":[{\"type\":\"text\",\"text\":\"two\"}]}"
                "]}]}",
                USER "q" END BOT
                     "Hm<|END_THINKING|><|START_TEXT|>Wait<|END_TEXT|><|START_ACTION|>[{\"tool_call_id\": \"0\", "
                     "\"tool_name\": \"f\", \"parameters\": {\"a\": 1}}, {\"tool_call_id\": \"1\", \"tool_name\": "
                     "\"g\", \"parameters\": {}}]<|END_ACTION|><|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
                     "<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[{\"tool_call_id\": \"0\", \"results\": {\"0\": "
                     "{\"content\": \"one\"}}, \"is_error\": null}, {\"tool_call_id\": \"1\", \"results\": {\"0\": "
                     "{\"content\": \"two\"}}, \"is_error\": null}]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>" USER
                     "Go on." END BOT);
}

/* An answer that goes on with what the assistant is said to have begun. */
static void test_continued(void) {
    prompt_ends("a turn of the assistant's that is not over",
                "{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\","
                "\"content\":\"It is \"}]}",
                USER "q" END BOT "<|END_THINKING|><|START_TEXT|>It is ");
    reply r = ask("{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\","
                  "\"content\":[{\"type\":\"text\",\"text\":\"It is\"}]}]}",
                  " 4.<|END_TEXT|><|END_OF_TURN_TOKEN|>", NMK_BATCH_STOP, NULL);
    check(!strcmp(text_at(r.json, "content.0.text"), " 4.") && !at(r.json, "content.1"), "and what comes behind it",
          "%s", r.body);
    reply_free(&r);
    nmk_buf prompt;
    int id = submits + 1;
    static const char chat[] = "{\"continue_final_message\":true,\"messages\":[{\"role\":\"user\",\"content\":\"q\"},"
                               "{\"role\":\"assistant\",\"content\":\"q\"}]}";
    int fd = request_open(port, "POST", "/v1/chat/completions", KEY, chat);
    wait_submits(id);
    prompt = prompt_of(id);
    say(id, "x"), end(id, NMK_BATCH_LENGTH, NULL);
    r = reply_read(fd);
    check(strstr(prompt.data, USER "q" END BOT "<|END_THINKING|><|START_TEXT|>q") &&
              prompt.data[prompt.length - 1] == 'q' && !strcmp(text_at(r.json, "choices.0.message.content"), "x"),
          "continue_final_message of a chat", "%s", prompt.data);
    nmk_buf_free(&prompt), reply_free(&r);
    static const char *const refusals[] = {
        "{\"continue_final_message\":true,\"messages\":[{\"role\":\"user\",\"content\":\"q\"}]}",
        "{\"continue_final_message\":true,\"messages\":[{\"role\":\"assistant\",\"content\":\"\"}]}",
        "{\"continue_final_message\":true,\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"tool_calls\":["
        "{\"function\":{\"name\":\"f\"}}]}]}",
        "{\"continue_final_message\":true,\"add_generation_prompt\":true,\"messages\":[{\"role\":\"assistant\","
        "\"content\":\"a\"}]}",
        "{\"continue_final_message\":1,\"messages\":[{\"role\":\"assistant\",\"content\":\"a\"}]}"};
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        r = post_key("/v1/chat/completions", refusals[i]);
        check(r.status == 400 && !strcmp(text_at(r.json, "error.param"), "continue_final_message"), refusals[i],
              "%d %s", r.status, r.body);
        reply_free(&r);
    }
}

static void test_whole(void) {
    reply r = ask("{" THINK "," TOOLS "," ASK "}",
                  "Hm<|END_THINKING|><|START_TEXT|>Wait.<|END_TEXT|><|START_ACTION|>[{\"tool_name\": \"f\", "
                  "\"parameters\": {\"a\": 1}}]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
                  NMK_BATCH_STOP, NULL);
    nmk_buf body = steady(r.body);
    same_as("a message with thinking, text and a call", body.data, "messages_call");
    nmk_buf_free(&body), reply_free(&r);

    r = ask("{\"stop_sequences\":[\"xx\",\"b c\"]," ASK "}", "<|START_TEXT|>a b c d", NMK_BATCH_LENGTH, NULL);
    check(!strcmp(text_at(r.json, "content.0.text"), "a ") &&
              !strcmp(text_at(r.json, "stop_reason"), "stop_sequence") &&
              !strcmp(text_at(r.json, "stop_sequence"), "b c"),
          "a stop sequence", "%s", r.body);
    reply_free(&r);
    r = ask("{" ASK "}", "<|START_TEXT|>a b", NMK_BATCH_LENGTH, NULL);
    check(!strcmp(text_at(r.json, "stop_reason"), "max_tokens") && strstr(r.body, "\"stop_sequence\":null"),
          "max_tokens", "%s", r.body);
    reply_free(&r);
    r = ask("{" TOOLS "," ASK "}", "<|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"a\": ", NMK_BATCH_LENGTH,
            NULL);
    check(!strcmp(text_at(r.json, "stop_reason"), "max_tokens") && strstr(r.body, "\"name\":\"f\",\"input\":{}}"),
          "a call that is cut has no input", "%s", r.body);
    reply_free(&r);

    int id = submits + 1, fd = open_one("{" ASK "}", id);
    start(id, 4);
    say(id, "<|START_TEXT|>a");
    end(id, NMK_BATCH_STOP, NULL);
    r = reply_read(fd);
    check(int_at(r.json, "usage.input_tokens") + 4 == submitted[id - 1].prompt_tokens &&
              int_at(r.json, "usage.cache_read_input_tokens") == 4 && int_at(r.json, "usage.output_tokens") == 2,
          "what was cached is not input", "%s", r.body);
    reply_free(&r);
}

static void test_stream(void) {
    reply r = ask("{\"stream\":true," THINK "," TOOLS "," ASK "}",
                  "Hm<|END_THINKING|><|START_TEXT|>Wait.<|END_TEXT|><|START_ACTION|>[{\"tool_name\": \"f\", "
                  "\"parameters\": {\"a\": 1}}, {\"tool_name\": \"f\"}]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
                  NMK_BATCH_STOP, NULL);
    nmk_buf body = steady(r.body);
    same_as("every event of a message, in order", body.data, "messages_events");
    nmk_buf_free(&body), reply_free(&r);

    int id = submits + 1, fd = open_one("{\"stream\":true," ASK "}", id);
    say(id, "<|START_TEXT|>Hm");
    end(id, NMK_BATCH_FAILED, "task 7 waited");
    r = reply_read(fd);
    const char *error = strstr(r.body, "event: error\n");
    check(error && !strcmp(error, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\","
                                  "\"message\":\"The engine failed: task 7 waited\"}}\n\n"),
          "a stream that fails", "%s", r.body);
    reply_free(&r);
}

static void test_count(void) {
    reply r = post_key(COUNT, "{" ASK "}"), more = post_key(COUNT, "{" TOOLS ",\"system\":\"x\"," ASK "}");
    nmk_buf prompt;
    int tokens = int_at(r.json, "input_tokens");
    check(r.status == 200 && tokens > 5 && int_at(more.json, "input_tokens") > tokens, "count_tokens", "%s, %s", r.body,
          more.body);
    reply_free(&r), reply_free(&more);
    int id = submits + 1;
    r = ask("{" ASK "}", "x", NMK_BATCH_LENGTH, &prompt);
    check(submitted[id - 1].prompt_tokens == tokens, "and the prompt has as many", "%d, %d",
          submitted[id - 1].prompt_tokens, tokens);
    nmk_buf_free(&prompt), reply_free(&r);
}

static void test_budget(void) {
    int id = submits + 1;
    reply r = ask("{\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":7}," ASK "}", "x", NMK_BATCH_LENGTH, NULL);
    const nmk_batch_cap *cap = &submitted[id - 1].cap;
    check(cap->after == 7 && cap->opens == -1 && cap->then_count == 1 && cap->then[0] == cap->closes &&
              cap->closes == nmk_tokenizer_find(tokenizer, "<|END_THINKING|>"),
          "a budget caps what follows the prompt", "%d", cap->after);
    reply_free(&r);
}

static void test_choices(void) {
    reply r = ask("{" TOOLS ",\"tool_choice\":{\"type\":\"none\"}," ASK "}",
                  "<|START_ACTION|>[{\"tool_name\": \"f\"}]<|END_ACTION|>", NMK_BATCH_STOP, NULL);
    check(!strcmp(text_at(r.json, "stop_reason"), "end_turn") && !at(r.json, "content.0"), "tool_choice none", "%s",
          r.body);
    reply_free(&r);
    r = ask("{" TOOLS ",\"tool_choice\":{\"type\":\"auto\",\"disable_parallel_tool_use\":true}," ASK "}",
            "<|START_ACTION|>[{\"tool_name\": \"f\"}, {\"tool_name\": \"g\"}]<|END_ACTION|>", NMK_BATCH_STOP, NULL);
    check(!strcmp(text_at(r.json, "content.0.name"), "f") && !at(r.json, "content.1"), "one call alone", "%s", r.body);
    reply_free(&r);
}

/* The status and what begins the message. */
static void refused(const char *body, int status, const char *type, const char *part) {
    reply r = post_key(PATH, body);
    check(r.status == status && !strcmp(text_at(r.json, "type"), "error") &&
              !strcmp(text_at(r.json, "error.type"), type) && strstr(text_at(r.json, "error.message"), part),
          body, "%d %s", r.status, r.body);
    reply_free(&r);
}

static void test_refused(void) {
    static const struct {
        const char *body, *param;
    } cases[] = {
        {"{\"max_tokens\":9}", "messages"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}", "max_tokens"},
        {"{\"max_tokens\":0,\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]}", "max_tokens"},
        {"{\"max_tokens\":9,\"messages\":7}", "messages"},
        {"{\"max_tokens\":9,\"messages\":[]}", "messages"},
        {"{\"max_tokens\":9,\"messages\":[7]}", "messages[0]"},
        {"{\"max_tokens\":9,\"messages\":[{\"content\":\"a\"}]}", "messages[0].role"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":7,\"content\":\"a\"}]}", "messages[0].role"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"tool\",\"content\":\"a\"}]}", "messages[0].role"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"user\"}]}", "messages[0].content"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":7}]}", "messages[0].content"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":[7]}]}", "messages[0].content[0]"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":[{}]}]}", "messages[0].content[0].type"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image\"}]}]}",
         "messages[0].content[0].type"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"tool_use\"}]}]}",
         "messages[0].content[0].type"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}",
         "messages[0].content[0].text"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\"}]}]}",
         "messages[0].content[0].tool_use_id"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":"
         "\"c\",\"content\":[{\"type\":\"image\"}]}]}]}",
         "messages[0].content[0].content[0].type"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"c\","
         "\"name\":\"f\",\"input\":7}]}]}",
         "messages[0].content[0].input"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"c\","
         "\"name\":\"\"}]}]}",
         "messages[0].content[0].name"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\"}]}]}",
         "messages[0].content[0].thinking"},
        {"{\"max_tokens\":9,\"messages\":[{\"role\":\"assistant\",\"content\":[{\"type\":\"tool_use\",\"id\":\"c\","
         "\"name\":\"f\"}]}]}",
         "messages"},
        {"{\"system\":7," ASK "}", "system"},
        {"{\"system\":[{\"type\":\"image\"}]," ASK "}", "system[0].type"},
        {"{\"system\":[{\"type\":\"text\"}]," ASK "}", "system[0].text"},
        {"{\"stop_sequences\":7," ASK "}", "stop_sequences"},
        {"{\"stop_sequences\":[\"\"]," ASK "}", "stop_sequences"},
        {"{\"tools\":7," ASK "}", "tools"},
        {"{\"tools\":[7]," ASK "}", "tools[0]"},
        {"{\"tools\":[{\"type\":\"web_search_20250305\",\"name\":\"w\"}]," ASK "}", "tools[0].type"},
        {"{\"tools\":[{\"input_schema\":{}}]," ASK "}", "tools[0].name"},
        {"{\"tools\":[{\"name\":\"f\"}]," ASK "}", "tools[0].input_schema"},
        {"{\"tools\":[{\"name\":\"f\",\"input_schema\":7}]," ASK "}", "tools[0].input_schema"},
        {"{\"tool_choice\":\"auto\"," ASK "}", "tool_choice"},
        {"{\"tool_choice\":{}," ASK "}", "tool_choice.type"},
        {"{\"tool_choice\":{\"type\":\"some\"}," ASK "}", "tool_choice.type"},
        {"{\"tool_choice\":{\"type\":\"tool\"}," ASK "}", "tool_choice.name"},
        {"{\"tool_choice\":{\"type\":\"auto\",\"disable_parallel_tool_use\":1}," ASK "}",
         "tool_choice.disable_parallel_tool_use"},
        {"{\"thinking\":7," ASK "}", "thinking"},
        {"{\"thinking\":{}," ASK "}", "thinking.type"},
        {"{\"thinking\":{\"type\":\"some\"}," ASK "}", "thinking.type"},
        {"{\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":\"1\"}," ASK "}", "thinking.budget_tokens"},
        {"{\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":0}," ASK "}", "thinking.budget_tokens"},
        {"{\"output_config\":7," ASK "}", "output_config"},
        {"{\"output_config\":{\"effort\":\"great\"}," ASK "}", "output_config.effort"},
        {"{\"output_format\":{\"type\":\"xml\"}," ASK "}", "output_format"},
        {"{\"container\":\"c\"," ASK "}", "container"},
        {"{\"mcp_servers\":[{}]," ASK "}", "mcp_servers"},
        {"{\"temperature\":3," ASK "}", "temperature"},
        {"{\"top_k\":\"5\"," ASK "}", "top_k"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refused(cases[i].body, 400, "invalid_request_error", cases[i].param);
    }
    refused("{", 400, "invalid_request_error", "JSON");
    refused("{\"model\":\"other\"," ASK "}", 404, "not_found_error", "'other'");
    nmk_buf body = {0};
    nmk_buf_puts(&body, "{\"max_tokens\":9,\"messages\":[{\"role\":\"user\",\"content\":\"");
    for (int i = 0; i < 5000; i++) nmk_buf_puts(&body, "a b ");
    nmk_buf_puts(&body, "\"}]}");
    reply r = post_key(PATH, body.data);
    check(r.status == 400 && !strncmp(text_at(r.json, "error.message"), "prompt is too long: ", 20),
          "a prompt that is too long, in the words that clients look for", "%d %s", r.status, r.body);
    nmk_buf_free(&body), reply_free(&r);
}

static void test_keys(void) {
    static const struct {
        const char *name, *field;
        int status;
    } cases[] = {{"no key", "", 401},
                 {"another key", "X-API-Key: shut\r\n", 401},
                 {"the beginning of the key", "X-API-Key: ope\r\n", 401},
                 {"two fields", "X-API-Key: open\r\nX-API-Key: open\r\n", 400},
                 {"the key as a bearer's", "Authorization: Bearer open\r\n", 200},
                 {"a bearer's is the one that counts", "Authorization: Bearer shut\r\nX-API-Key: open\r\n", 401},
                 {"a field of its own", "X-API-Key: open\r\n", 200}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        reply r = reply_read(request_open(port, "POST", COUNT, cases[i].field, "{" ASK "}"));
        bool shape = cases[i].status != 401 || (!strcmp(text_at(r.json, "type"), "error") &&
                                                !strcmp(text_at(r.json, "error.type"), "authentication_error"));
        check(r.status == cases[i].status && shape, cases[i].name, "%d %s", r.status, r.body);
        reply_free(&r);
    }
    reply r = reply_read(request_open(port, "GET", PATH, KEY, ""));
    check(r.status == 405 && !strcmp(text_at(r.json, "type"), "error"), "another method", "%d %s", r.status, r.body);
    reply_free(&r);
}

/* What its clients ask for beside messages. */
static void test_models(void) {
    static const struct {
        const char *path, *field, *key, *wanted;
        int status;
    } cases[] = {
        {"/v1/models", KEY, "first_id", "toy", 200},
        {"/v1/models/toy", KEY, "type", "model", 200},
        {"/v1/models/toy", KEY, "display_name", "toy", 200},
        {"/v1/models/other", KEY, "error.type", "not_found_error", 404},
        {"/v1/models", "X-API-Key: open\r\n", "object", "list", 200},
        {"/v1/models/toy", "X-API-Key: open\r\n", "object", "model", 200},
        {"/v1/models/other", "X-API-Key: open\r\n", "error.code", "model_not_found", 404},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        reply r = reply_read(request_open(port, "GET", cases[i].path, cases[i].field, ""));
        char name[100];
        snprintf(name, sizeof name, "%s, %s", cases[i].path, cases[i].key);
        check(r.status == cases[i].status && !strcmp(text_at(r.json, cases[i].key), cases[i].wanted), name, "%d %s",
              r.status, r.body);
        reply_free(&r);
    }
}

int main(void) {
    static const char *const keys[] = {"open"};
    nmk_api_options o = {0};
    play(&o, keys, 1);
    test_blocks();
    test_continued();
    test_whole();
    test_stream();
    test_count();
    test_budget();
    test_choices();
    test_refused();
    test_keys();
    test_models();
    play_end(&o);
    return failures != 0;
}
