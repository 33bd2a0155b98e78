/* Bodies and events byte by byte. */
#include "reply.h"

#include <math.h>

#include "server/helper.h"

#define HEAD(object) "{\"id\":\"ID\",\"object\":\"" object "\",\"created\":7,\"model\":\"m\",\"choices\":["
#define CHUNK        "data: " HEAD("chat.completion.chunk")
#define TAIL         ",\"logprobs\":null,\"finish_reason\":null}]}\n\n"

static nmk_stream stream(nmk_reply_kind kind, int choices) {
    nmk_stream s;
    nmk_stream_init(&s, kind, "m", choices);
    strcpy(s.reply.id, "ID");
    s.reply.created = 7;
    return s;
}

static void strings(void) {
    nmk_buf b = {0};
    nmk_reply_string("a\"\\/\b\f\n\r\t\x01\x7f\0z", 13, &b);
    same("escapes", &b, "\"a\\\"\\\\/\\b\\f\\n\\r\\t\\u0001\\u007f\\u0000z\"");
    nmk_reply_string("caf\xc3\xa9 \xf0\x9f\x98\x80", 10, &b);
    same("UTF-8 stays", &b, "\"caf\xc3\xa9 \xf0\x9f\x98\x80\"");
    nmk_reply_string("a\xff\xc3(\xed\xa0\x80z\xf0\x9f", 10, &b);
    same("what is not UTF-8 becomes U+FFFD", &b,
         "\"a\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbdz\xef\xbf\xbd\"");
    nmk_reply_string(NULL, 0, &b);
    same("no text", &b, "\"\"");
}

static void random_strings(void) {
    bool good = true;
    for (int round = 0; round < 20000; round++) {
        char text[40];
        size_t n = chance(sizeof text);
        for (size_t i = 0; i < n; i++) text[i] = (char)(chance(2) ? chance(256) : chance(128));
        nmk_buf b = {0};
        nmk_reply_string(text, n, &b);
        struct json_object *o = nmk_json_parse(b.data, b.length, NULL);
        if (!json_object_is_type(o, json_type_string)) good = false;
        if (o && nmk_utf8_valid(text, n) &&
            ((size_t)json_object_get_string_len(o) != n || memcmp(json_object_get_string(o), text, n) != 0))
            good = false;
        json_object_put(o);
        nmk_buf_free(&b);
    }
    check(good, "random bytes become valid JSON strings that say the same", "one does not");
}

static void errors(void) {
    nmk_api_error e;
    nmk_buf b = {0};
    nmk_api_fail(&e, 400, "temperature", "invalid_value", "Too \"hot\": %d", 3);
    nmk_reply_error(NMK_REPLY_CHAT, &e, &b);
    same("error", &b,
         "{\"error\":{\"message\":\"Too \\\"hot\\\": 3\",\"type\":\"invalid_request_error\",\"param\":\"temperature\","
         "\"code\":\"invalid_value\"}}");
    nmk_api_fail(&e, 401, NULL, "invalid_api_key", "Who are you?");
    nmk_reply_error(NMK_REPLY_CHAT, &e, &b);
    same("error without param", &b,
         "{\"error\":{\"message\":\"Who are you?\",\"type\":\"authentication_error\",\"param\":null,\"code\":"
         "\"invalid_api_key\"}}");
    nmk_api_fail(&e, 500, NULL, NULL, "Broken");
    nmk_reply_error(NMK_REPLY_CHAT, &e, &b);
    same("error without code", &b,
         "{\"error\":{\"message\":\"Broken\",\"type\":\"server_error\",\"param\":null,\"code\":null}}");
}

static void ids(void) {
    char id[64][NMK_ID_BYTES];
    bool good = true;
    for (int i = 0; i < 64; i++) {
        nmk_reply_id(id[i], "call_");
        if (strlen(id[i]) != 29 || strncmp(id[i], "call_", 5) != 0) good = false;
        for (int k = 0; k < i; k++)
            if (!strcmp(id[i], id[k])) good = false;
    }
    check(good, "ids differ", "%s", id[0]);
    nmk_reply r;
    nmk_reply_init(&r, NMK_REPLY_CHAT, "m");
    check(!strncmp(r.id, "chatcmpl-", 9) && r.created > 1700000000, "a chat's id and time", "%s %lld", r.id,
          (long long)r.created);
    nmk_reply_init(&r, NMK_REPLY_TEXT, "m");
    check(!strncmp(r.id, "cmpl-", 5), "a completion's id", "%s", r.id);
}

static void chat_stream(void) {
    nmk_stream s = stream(NMK_REPLY_CHAT, 1);
    nmk_buf b = {0};
    nmk_stream_open(&s, &b);
    same("role chunk", &b, CHUNK "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}" TAIL);
    nmk_stream_open(&s, &b);
    nmk_stream_content(&s, 0, "", 0, &b);
    nmk_stream_reasoning(&s, 0, "", 0, &b);
    nmk_stream_arguments(&s, 0, "", 0, &b);
    same("nothing to say, no chunk", &b, "");
    nmk_stream_reasoning(&s, 0, "Hm", 2, &b);
    same("reasoning", &b, CHUNK "{\"index\":0,\"delta\":{\"reasoning_content\":\"Hm\",\"reasoning\":\"Hm\"}" TAIL);
    nmk_stream_content(&s, 0, "Hi\n", 3, &b);
    same("content", &b, CHUNK "{\"index\":0,\"delta\":{\"content\":\"Hi\\n\"}" TAIL);
    nmk_stream_call(&s, 0, "call_1", "f", &b);
    same("call", &b,
         CHUNK "{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"call_1\",\"type\":\"function\","
               "\"function\":{\"name\":\"f\",\"arguments\":\"\"}}]}" TAIL);
    nmk_stream_arguments(&s, 0, "{\"a\":", 5, &b);
    same("arguments", &b,
         CHUNK
         "{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\\\"a\\\":\"}}]}" TAIL);
    nmk_stream_finish(&s, 0, NMK_ENDED_TOOL_CALLS, NULL, 0, &b);
    same("finish", &b, CHUNK "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"tool_calls\"}]}\n\n");
    nmk_usage u = {10, 5, 4, 2};
    nmk_stream_close(&s, &u, &b);
    same("usage and the end", &b,
         CHUNK
         "],\"usage\":{\"prompt_tokens\":10,\"completion_tokens\":5,\"total_tokens\":15,\"prompt_tokens_details\":"
         "{\"cached_tokens\":4},\"completion_tokens_details\":{\"reasoning_tokens\":2}}}\n\ndata: [DONE]\n\n");
    nmk_stream_free(&s);
}

static void other_streams(void) {
    nmk_stream s = stream(NMK_REPLY_CHAT, 2);
    nmk_buf b = {0};
    nmk_stream_content(&s, 1, "x", 1, &b);
    same("the role comes first by itself", &b,
         CHUNK "{\"index\":1,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}" TAIL CHUNK
               "{\"index\":1,\"delta\":{\"content\":\"x\"}" TAIL);
    nmk_stream_finish(&s, 0, NMK_ENDED_LENGTH, NULL, 0, &b);
    same("even before a finish", &b,
         CHUNK "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}" TAIL CHUNK
               "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"length\"}]}\n\n");
    nmk_stream_finish(&s, 1, NMK_ENDED_STOP, NULL, 0, &b);
    nmk_buf_free(&b);
    nmk_stream_close(&s, NULL, &b);
    same("no usage unless asked for", &b, "data: [DONE]\n\n");
    nmk_stream_free(&s);

    s = stream(NMK_REPLY_CHAT, 1);
    nmk_api_error e;
    nmk_api_fail(&e, 500, NULL, "engine_failed", "The GPU is gone");
    nmk_stream_fail(&s, &e, &b);
    same("an error in the middle", &b,
         "data: {\"error\":{\"message\":\"The GPU is gone\",\"type\":\"server_error\",\"param\":null,\"code\":"
         "\"engine_failed\"}}\n\ndata: [DONE]\n\n");
    nmk_stream_free(&s);

    s = stream(NMK_REPLY_TEXT, 1);
    nmk_stream_open(&s, &b);
    nmk_stream_content(&s, 0, "x", 1, &b);
    nmk_stream_finish(&s, 0, NMK_ENDED_STOP, NULL, 0, &b);
    same("a completion's stream", &b,
         "data: " HEAD("text_completion") "{\"index\":0,\"text\":\"x\"" TAIL "data: " HEAD(
             "text_completion") "{\"index\":0,\"text\":\"\",\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n");
    nmk_stream_free(&s);
}

static void whole(void) {
    nmk_reply r = {.kind = NMK_REPLY_CHAT, .id = "ID", .created = 7, .model = "m"};
    nmk_usage u = {3, 2, 0, 0};
#define USAGE                                                                                              \
    "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5,\"prompt_tokens_details\":" \
    "{\"cached_tokens\":0},\"completion_tokens_details\":{\"reasoning_tokens\":0}}}"
    nmk_reply_choice c[2] = {{.ended = NMK_ENDED_STOP}, {.ended = NMK_ENDED_TOOL_CALLS}};
    nmk_buf b = {0};
    nmk_reply_choice_text(&c[0], NMK_ITEM_REASONING, "why", 3);
    nmk_reply_choice_call(&c[1], "call_1", "f");
    nmk_reply_choice_arguments(&c[1], "{}", 2);
    nmk_reply_choice_call(&c[1], "call_2", "g");
    nmk_reply_choice_arguments(&c[1], "{\"a\"", 4);
    nmk_reply_choice_arguments(&c[1], ":1}", 3);
    nmk_reply_whole(&r, c, 2, &u, &b);
    same("a chat's answer", &b,
         HEAD("chat.completion") "{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"\","
                                 "\"reasoning_content\":\"why\","
                                 "\"reasoning\":\"why\"},\"logprobs\":null,\"finish_reason\":\"stop\"},"
                                 "{\"index\":1,\"message\":{\"role\":\"assistant\",\"content\":null,\"tool_calls\":["
                                 "{\"id\":\"call_1\",\"type\":\"function\","
                                 "\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}},"
                                 "{\"id\":\"call_2\",\"type\":\"function\","
                                 "\"function\":{\"name\":\"g\",\"arguments\":\"{\\\"a\\\":1}\"}}]},"
                                 "\"logprobs\":null,\"finish_reason\":\"tool_calls\"}]," USAGE);
    nmk_reply_choice_free(&c[0]);
    nmk_reply_choice_free(&c[1]);
    r.kind = NMK_REPLY_TEXT;
    c[0].ended = NMK_ENDED_LENGTH;
    nmk_reply_choice_text(&c[0], NMK_ITEM_TEXT, "x [", 3);
    nmk_reply_whole(&r, c, 1, &u, &b);
    same(
        "a completion", &b,
        HEAD(
            "text_completion") "{\"index\":0,\"text\":\"x [\",\"logprobs\":null,\"finish_reason\":\"length\"}]," USAGE);
    nmk_reply_choice_free(&c[0]);
}

/* The id of the token that has just these bytes. */
static int32_t token_of(const nmk_tokenizer *t, const char *bytes) {
    for (int32_t id = 0; id < nmk_tokenizer_size(t); id++) {
        size_t n = 0;
        const char *is = nmk_tokenizer_token(t, id, &n);
        if (is && n == strlen(bytes) && !memcmp(is, bytes, n)) return id;
    }
    die("the toy lacks a token");
}

static void logprobs(void) {
    nmk_tokenizer *t = toy();
    const int32_t a = token_of(t, " a"), c3 = token_of(t, "\xc3"), a9 = token_of(t, "\xa9");
    const nmk_logprob list[] = {
        {.token = a, .likely = {.chosen = -0.25f, .count = 2, .id = {a, c3}, .logprob = {-0.25f, -INFINITY}}},
        {.token = a9, .text_offset = 2, .likely = {.chosen = NAN}},
        {.token = a, .text_offset = 2, .likely = {.chosen = 1e-9f, .count = 2, .id = {c3, c3}, .logprob = {-1, -2}}}};
    nmk_stream s = stream(NMK_REPLY_CHAT, 1);
    nmk_buf b = {0};
    s.reply.tokenizer = t;
    nmk_stream_logprobs(&s, list, 1);
    nmk_stream_open(&s, &b);
    same("the role has no logprobs", &b, CHUNK "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}" TAIL);
    nmk_stream_content(&s, 0, " a", 2, &b);
    same("a chat's logprobs", &b,
         CHUNK
         "{\"index\":0,\"delta\":{\"content\":\" a\"},\"logprobs\":{\"content\":[{\"token\":\" a\",\"logprob\":-0.25,"
         "\"bytes\":[32,97],\"top_logprobs\":[{\"token\":\" a\",\"logprob\":-0.25,\"bytes\":[32,97]},"
         "{\"token\":\"\xef\xbf\xbd\",\"logprob\":-9999.0,\"bytes\":[195]}]}],\"refusal\":null},"
         "\"finish_reason\":null}]}\n\n");
    nmk_stream_content(&s, 0, "b", 1, &b);
    same("they go out once", &b, CHUNK "{\"index\":0,\"delta\":{\"content\":\"b\"}" TAIL);
    nmk_stream_logprobs(&s, list + 1, 1);
    nmk_stream_finish(&s, 0, NMK_ENDED_STOP, NULL, 0, &b);
    same("what is left goes with the finish", &b,
         CHUNK "{\"index\":0,\"delta\":{},\"logprobs\":{\"content\":[{\"token\":\"\xef\xbf\xbd\",\"logprob\":-9999.0,"
               "\"bytes\":[169],\"top_logprobs\":[]}],\"refusal\":null},\"finish_reason\":\"stop\"}]}\n\n");
    nmk_stream_free(&s);

    nmk_reply r = {.kind = NMK_REPLY_TEXT, .id = "ID", .created = 7, .model = "m", .tokenizer = t};
    nmk_reply_choice c = {.ended = NMK_ENDED_STOP, .logprob = list, .logprob_count = 3};
    nmk_usage u = {3, 2, 0, 0};
    nmk_reply_whole(&r, &c, 1, &u, &b);
    same(
        "a completion's logprobs, no key twice", &b,
        HEAD("text_completion") "{\"index\":0,\"text\":\"\",\"logprobs\":{\"tokens\":[\" a\",\"bytes:\\\\xa9\",\" a\"],"
                                "\"token_logprobs\":[-0.25,-9999.0,0],"
                                "\"top_logprobs\":[{\" a\":-0.25,\"bytes:\\\\xc3\":-9999.0},"
                                "{\"bytes:\\\\xa9\":-9999.0},{\" a\":0,\"bytes:\\\\xc3\":-1}],"
                                "\"text_offset\":[0,2,2]},\"finish_reason\":\"stop\"}]," USAGE);

    c.logprob_count = 1;
    r.tokens_as_ids = true;
    nmk_reply_whole(&r, &c, 1, &u, &b);
    char *wanted =
        xasprintf(HEAD("text_completion") "{\"index\":0,\"text\":\"\",\"logprobs\":{\"tokens\":[\"token_id:%d\"],"
                                          "\"token_logprobs\":[-0.25],\"top_logprobs\":[{\"token_id:%d\":"
                                          "-0.25,\"token_id:%d\":-9999.0}],\"text_offset\":[0]},"
                                          "\"finish_reason\":\"stop\"}]," USAGE,
                  a, a, c3);
    same("tokens by their ids", &b, wanted);
    free(wanted);
    c.logprob_count = 0;
    nmk_reply_whole(&r, &c, 1, &u, &b);
    same("asked for, but no token", &b,
         HEAD("text_completion") "{\"index\":0,\"text\":\"\",\"logprobs\":{\"tokens\":[],\"token_logprobs\":[],"
                                 "\"top_logprobs\":[],\"text_offset\":[]},\"finish_reason\":\"stop\"}]," USAGE);

    s = stream(NMK_REPLY_CHAT, 1);
    nmk_stream_open(&s, &b);
    nmk_buf_free(&b);
    nmk_stream_logprobs(&s, list + 1, 1);
    nmk_stream_content(&s, 0, "9 ", 2, &b);
    wanted = xasprintf(CHUNK "{\"index\":0,\"delta\":{\"content\":\"9 \"},\"logprobs\":{\"content\":[{\"token\":"
                             "\"token_id:%d\",\"logprob\":-9999.0,\"bytes\":null,\"top_logprobs\":[]}],"
                             "\"refusal\":null},\"finish_reason\":null}]}\n\n",
                       a9);
    same("without a tokenizer", &b, wanted);
    free(wanted);
    nmk_stream_free(&s);
    nmk_tokenizer_free(t);
}

static void lists(void) {
    nmk_buf b = {0};
#define MODEL(name) \
    "{\"id\":\"" name "\",\"object\":\"model\",\"created\":7,\"owned_by\":\"nmkgen\",\"max_model_len\":4096}"
    nmk_reply_models((const char *const[]){"a", "b"}, 2, 7, 4096, &b);
    same("models", &b, "{\"object\":\"list\",\"data\":[" MODEL("a") "," MODEL("b") "]}");
    nmk_reply_model("a", 7, 4096, &b);
    same("model", &b, MODEL("a"));

    nmk_tokenizer *t = toy();
    nmk_ids list = {0};
    nmk_ids_add(&list, 4);
    nmk_ids_add(&list, 10);
    nmk_reply_tokenize(t, &list, false, 4096, &b);
    same("tokenize", &b, "{\"count\":2,\"max_model_len\":4096,\"tokens\":[4,10],\"token_strs\":null}");
    nmk_reply_tokenize(t, &list, true, 4096, &b);
    same("tokenize with strings", &b,
         "{\"count\":2,\"max_model_len\":4096,\"tokens\":[4,10],\"token_strs\":[\"<|END_OF_TURN_TOKEN|>\","
         "\"<|START_TEXT|>\"]}");
    nmk_reply_detokenize("a\"", 2, &b);
    same("detokenize", &b, "{\"prompt\":\"a\\\"\"}");
    nmk_ids_free(&list);
    nmk_tokenizer_free(t);
}

int main(void) {
    strings();
    random_strings();
    errors();
    ids();
    chat_stream();
    other_streams();
    whole();
    logprobs();
    lists();
    return failures != 0;
}
