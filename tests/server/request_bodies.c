/* Request bodies: what is accepted and what becomes of it, what is refused and with which words, and that nothing
 * crashes. */
#include "request.h"

#include <time.h>

#include "server/helper.h"

enum { VOCAB = 4096 };

static nmk_request_limits limits;

/* Parses, or dies with the server's words. */
static nmk_api_request parse(nmk_body body, const char *text) {
    nmk_api_request r;
    nmk_api_error e;
    if (nmk_request_parse(&r, body, text, strlen(text), &limits, &e)) die(e.message);
    return r;
}

static nmk_api_request chat(const char *more) {
    char *text = xasprintf("{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]%s%s}", *more ? "," : "", more);
    nmk_api_request r = parse(NMK_BODY_CHAT, text);
    free(text); /* nothing points into the text */
    return r;
}

static nmk_api_request completion(const char *more) {
    char *text = xasprintf("{\"prompt\":\"Hi\"%s%s}", *more ? "," : "", more);
    nmk_api_request r = parse(NMK_BODY_COMPLETION, text);
    free(text);
    return r;
}

static void refused(nmk_body body, const char *text, const char *param, const char *code, const char *message) {
    nmk_api_request r;
    nmk_api_error e = {0};
    int rc = nmk_request_parse(&r, body, text, strlen(text), &limits, &e);
    char name[128];
    snprintf(name, sizeof name, "refused: %.100s", text);
    check(rc == -1 && e.status == 400 && !strcmp(e.param, param) && e.code && !strcmp(e.code, code) &&
              !strcmp(e.message, message) && !r.root,
          name, "%d %d, param \"%s\", code %s, \"%s\"", rc, e.status, e.param, e.code ? e.code : "null", e.message);
    if (!rc) nmk_request_free(&r);
}

/* A chat with one more field. */
static void field_refused(const char *more, const char *param, const char *code, const char *message) {
    char *text = xasprintf("{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],%s}", more);
    refused(NMK_BODY_CHAT, text, param, code, message);
    free(text);
}

static void message_refused(const char *message, const char *param, const char *code, const char *words) {
    char *text = xasprintf("{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"},%s]}", message);
    refused(NMK_BODY_CHAT, text, param, code, words);
    free(text);
}

static bool json_is(struct json_object *o, const char *wanted) {
    return !strcmp(json_object_to_json_string_ext(o, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE), wanted);
}

/* ---------------------------------------------------------------- accepted */

static void defaults(void) {
    nmk_api_request r = chat("");
    const nmk_sampling *s = &r.sampling;
    check(s->temperature == 1 && s->top_p == 1 && s->min_p == 0 && s->top_k == 0 && s->presence_penalty == 0 &&
              s->frequency_penalty == 0 && s->repetition_penalty == 1 && s->n == 1 && !s->seeded && s->logprobs == -1 &&
              !s->stop_count && !s->stop_id_count && !s->bias_count && !s->keep_stop && !s->ignore_eos &&
              s->min_tokens == 0 && s->max_tokens == 0,
          "defaults of the sampling", "they differ");
    check(!r.model && !r.stream && !r.include_usage && !r.tools && !r.tool_choice_none && r.parallel_tool_calls &&
              r.include_reasoning && !r.reasoning_effort && !r.chat_template_kwargs && r.add_generation_prompt &&
              !r.add_special_tokens && r.skip_special_tokens && !r.echo && !r.cache_salt && r.messages,
          "defaults of a chat", "they differ");
    nmk_request_free(&r);

    r = completion("");
    check(r.sampling.max_tokens == 16 && r.add_special_tokens && r.prompt_count == 1 && r.prompt[0].text.bytes == 2,
          "defaults of a completion", "they differ");
    nmk_request_free(&r);

    r = chat("\"model\":null,\"temperature\":null,\"top_p\":null,\"n\":null,\"stream\":null,\"stream_options\":null,"
             "\"stop\":null,\"seed\":null,\"tools\":null,\"tool_choice\":null,\"logit_bias\":null,\"logprobs\":null,"
             "\"top_logprobs\":null,\"max_tokens\":null,\"max_completion_tokens\":null,\"response_format\":null,"
             "\"reasoning_effort\":null,\"chat_template_kwargs\":null,\"parallel_tool_calls\":null,\"user\":null,"
             "\"stop_token_ids\":null,\"guided_json\":null,\"presence_penalty\":null");
    check(r.sampling.temperature == 1 && r.sampling.n == 1 && r.sampling.max_tokens == 0 && r.parallel_tool_calls,
          "null means the default", "it does not");
    nmk_request_free(&r);

    r = chat("\"user\":\"u\",\"metadata\":{\"a\":\"b\"},\"store\":true,\"service_tier\":\"auto\",\"verbosity\":\"low\","
             "\"functions\":[],\"function_call\":\"auto\",\"modalities\":[\"text\"],\"prediction\":{},\"xyzzy\":[[{}]],"
             "\"prompt_cache_key\":\"k\",\"safety_identifier\":\"s\",\"web_search_options\":{}");
    check(r.messages != NULL, "what nobody knows is tolerated", "it is not");
    nmk_request_free(&r);
}

static void sampling(void) {
    nmk_api_request r =
        chat("\"model\":\"m\",\"temperature\":0,\"top_p\":0.95,\"top_k\":-1,\"min_p\":0.05,\"presence_penalty\":-2,"
             "\"frequency_penalty\":2.0,\"repetition_penalty\":1.1,\"n\":3.0,\"seed\":-7,"
             "\"stop\":[\"a\",\"\\u00e9\\u0000\"],"
             "\"stop_token_ids\":[4,2],\"include_stop_str_in_output\":true,\"ignore_eos\":true,\"min_tokens\":2,"
             "\"max_tokens\":5,\"logit_bias\":{\"50\":-100,\"7\":1.5},\"logprobs\":true,\"top_logprobs\":5,"
             "\"stream\":true,\"stream_options\":{\"include_usage\":true,\"x\":1},\"reasoning_effort\":\"none\","
             "\"chat_template_kwargs\":{\"reasoning\":false},\"parallel_tool_calls\":false,\"cache_salt\":\"s\"");
    const nmk_sampling *s = &r.sampling;
    check(s->temperature == 0 && s->top_p == 0.95 && s->top_k == 0 && s->min_p == 0.05 && s->presence_penalty == -2 &&
              s->frequency_penalty == 2 && s->repetition_penalty == 1.1 && s->n == 3 && s->seeded && s->seed == -7,
          "numbers", "they differ");
    check(s->stop_count == 2 && s->stop[0].bytes == 1 && s->stop[1].bytes == 3 &&
              !memcmp(s->stop[1].data, "\xc3\xa9\0", 3) && s->keep_stop && s->stop_id_count == 2 &&
              s->stop_id[0] == 4 && s->stop_id[1] == 2 && s->ignore_eos && s->min_tokens == 2 && s->max_tokens == 5,
          "stops", "they differ");
    check(s->bias_count == 2 && s->bias[0].token == 7 && s->bias[0].bias == 1.5f && s->bias[1].token == 50 &&
              s->bias[1].bias == -100 && s->logprobs == 5,
          "bias and logprobs", "they differ");
    check(!strcmp(r.model, "m") && r.stream && r.include_usage && !strcmp(r.reasoning_effort, "none") &&
              json_is(r.chat_template_kwargs,
                      "{\"reasoning\":false,\"reasoning_effort\":\"none\",\"enable_thinking\":false}") &&
              !r.parallel_tool_calls && !strcmp(r.cache_salt, "s"),
          "the rest of a chat", "it differs");
    nmk_request_free(&r);

    r = chat("\"reasoning_effort\":\"high\"");
    check(json_is(r.chat_template_kwargs, "{\"reasoning_effort\":\"high\"}"), "reasoning_effort goes to the template",
          "it does not");
    nmk_request_free(&r);
    r = chat("\"reasoning_effort\":\"high\",\"chat_template_kwargs\":{\"reasoning_effort\":\"none\"}");
    check(json_is(r.chat_template_kwargs, "{\"reasoning_effort\":\"none\"}"), "unless the template was given one",
          "another");
    nmk_request_free(&r);

    r = chat("\"max_tokens\":5,\"max_completion_tokens\":7,\"stop\":\"END\",\"logprobs\":true,\"top_k\":40");
    check(r.sampling.max_tokens == 7 && r.sampling.stop_count == 1 && r.sampling.logprobs == 0 &&
              r.sampling.top_k == 40,
          "max_completion_tokens, one stop string", "they differ");
    nmk_request_free(&r);
    r = chat(
        "\"seed\":-1,\"temperature\":1e-7,\"logprobs\":true,\"top_logprobs\":0,\"return_tokens_as_token_ids\":true");
    check(!r.sampling.seeded && r.sampling.temperature == 0 && r.sampling.logprobs == 0 && r.sampling.tokens_as_ids,
          "seed -1 is none, next to no temperature is greedy", "they are not");
    nmk_request_free(&r);
    r = chat("\"temperature\":1e-4,\"top_p\":0,\"min_p\":1,\"top_k\":0,\"repetition_penalty\":0.001");
    check(r.sampling.temperature == 0.01 && r.sampling.top_p == 0 && r.sampling.min_p == 1 &&
              r.sampling.repetition_penalty == 0.001,
          "the least of each", "they differ");
    nmk_request_free(&r);
    r = chat("\"logprobs\":false,\"top_logprobs\":0,\"stop\":[],\"tools\":[],\"guided_regex\":\"\","
             "\"response_format\":{\"type\":\"text\"},\"continue_final_message\":false,\"tool_choice\":\"none\"");
    check(r.sampling.logprobs == -1 && !r.sampling.stop_count && !r.tools && r.tool_choice_none,
          "what asks for nothing", "it is not nothing");
    nmk_request_free(&r);
    r = completion(
        "\"logprobs\":2,\"echo\":false,\"max_tokens\":1,\"best_of\":1,\"suffix\":\"\",\"add_special_tokens\":false");
    check(r.sampling.logprobs == 2 && r.sampling.max_tokens == 1 && !r.add_special_tokens, "a completion's fields",
          "they differ");
    nmk_request_free(&r);
}

static void configured(void) {
    nmk_err e;
    nmk_request_limits old = limits;
    const char *text = "{\"do_sample\":true,\"temperature\":0.6,\"top_p\":0.95,\"top_k\":20,\"min_p\":null,"
                       "\"repetition_penalty\":1.05,\"max_new_tokens\":100,\"eos_token_id\":[4,2]}";
    struct json_object *config = nmk_json_parse(text, strlen(text), &e);
    if (nmk_request_defaults(&limits, config, &e)) die(e.text);
    json_object_put(config);
    nmk_api_request r = chat("\"top_k\":null,\"top_p\":1");
    check(r.sampling.temperature == 0.6 && r.sampling.top_p == 1 && r.sampling.top_k == 20 && r.sampling.min_p == 0 &&
              r.sampling.repetition_penalty == 1.05 && r.sampling.max_tokens == 100,
          "generation_config.json gives the defaults", "temperature %g, top_k %d, max_tokens %d",
          r.sampling.temperature, r.sampling.top_k, r.sampling.max_tokens);
    nmk_request_free(&r);
    limits = old;
    text = "{\"do_sample\":false}";
    config = nmk_json_parse(text, strlen(text), &e);
    nmk_request_defaults(&limits, config, &e);
    check(limits.defaults.temperature == 0, "do_sample false is greedy", "%g", limits.defaults.temperature);
    json_object_put(config);
    limits = old;
    text = "{\"top_p\":7}";
    config = nmk_json_parse(text, strlen(text), &e);
    bool bad = nmk_request_defaults(&limits, config, &e) == -1;
    check(bad && !strcmp(e.text, "top_p: Invalid value for 'top_p': expected at least 0 and at most 1, but got 7."),
          "a bad generation_config.json is refused", "%s", e.text);
    json_object_put(config);
    limits = old;
    nmk_request_defaults(&limits, NULL, &e);
    check(limits.defaults.top_p == 1, "no generation_config.json is fine", "%g", limits.defaults.top_p);
}

static void messages_are(const char *name, const char *messages, const char *wanted) {
    char *text = xasprintf("{\"messages\":%s}", messages);
    nmk_api_request r = parse(NMK_BODY_CHAT, text);
    check(json_is(r.messages, wanted), name, "got %s",
          json_object_to_json_string_ext(r.messages, JSON_C_TO_STRING_PLAIN));
    nmk_request_free(&r);
    free(text);
}

static void messages(void) {
    messages_are("roles", "[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"developer\",\"content\":\"d\"}]",
                 "[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"developer\",\"content\":\"d\"}]");
    messages_are("content that is null, absent, empty",
                 "[{\"content\":null,\"role\":\"user\"},{\"role\":\"user\"},{\"role\":\"user\",\"content\":\"\"},"
                 "{\"role\":\"user\",\"content\":[]}]",
                 "[{\"content\":\"\",\"role\":\"user\"},{\"role\":\"user\",\"content\":\"\"},"
                 "{\"role\":\"user\",\"content\":\"\"},{\"role\":\"user\",\"content\":\"\"}]");
    messages_are(
        "parts are joined",
        "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\\u0000\"},{\"type\":\"text\",\"text\":"
        "\"\\u00e9\",\"cache_control\":{}},\"c\",{\"type\":\"refusal\",\"refusal\":\"d\"},{\"type\":"
        "\"output_text\",\"text\":\"\"}]}]",
        "[{\"role\":\"user\",\"content\":\"a\\u0000\xc3\xa9"
        "cd\"}]");
    messages_are(
        "calls in the history",
        "[{\"role\":\"assistant\",\"content\":null,\"reasoning_content\":\"r\",\"tool_calls\":[{\"id\":\"x\","
        "\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"b\\\":1.0,\\\"a\\\":1e3}\"}}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"x\",\"content\":\"42\"}]",
        "[{\"role\":\"assistant\",\"content\":\"\",\"reasoning_content\":\"r\",\"tool_calls\":[{\"id\":\"x\","
        "\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":{\"b\":1.0,\"a\":1e3}}}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"x\",\"content\":\"42\"}]");
    messages_are(
        "odd arguments in the history",
        "[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":null,\"function\":{\"name\":\"f\",\"arguments\":\" \"}},"
        "{\"function\":{\"name\":\"f\"}},{\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"cut\"}},"
        "{\"function\":{\"name\":\"f\",\"arguments\":{\"o\":1}}},{\"function\":{\"name\":\"f\",\"arguments\":"
        "\"[1]\"}}]}]",
        "[{\"role\":\"assistant\",\"tool_calls\":[{\"id\":null,\"function\":{\"name\":\"f\",\"arguments\":{}}},"
        "{\"function\":{\"name\":\"f\",\"arguments\":{}}},{\"function\":{\"name\":\"f\",\"arguments\":"
        "\"{\\\"cut\"}},{\"function\":{\"name\":\"f\",\"arguments\":{\"o\":1}}},{\"function\":{\"name\":\"f\","
        "\"arguments\":\"[1]\"}}],\"content\":\"\"}]");
    messages_are(
        "empty lists of calls",
        "[{\"role\":\"assistant\",\"content\":\"a\",\"tool_calls\":[]},{\"role\":\"assistant\",\"content\":\"b\","
        "\"tool_calls\":null}]",
        "[{\"role\":\"assistant\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]");

    nmk_api_request r = chat(
        "\"tool_choice\":\"auto\",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":null,"
        "\"strict\":true,\"parameters\":{\"$schema\":\"s\",\"type\":\"object\",\"maximum\":9007199254740991}}},"
        "{\"type\":\"function\",\"function\":{\"name\":\"g\"}}]");
    check(r.tools && json_object_array_length(r.tools) == 2 && !r.tool_choice_none, "tools", "they are not there");
    nmk_request_free(&r);
}

static void prompts(void) {
    nmk_api_request r = parse(NMK_BODY_COMPLETION, "{\"prompt\":[\"a\",\"\",\"b\\u0000c\"]}");
    check(r.prompt_count == 3 && r.prompt[1].text.data && r.prompt[2].text.bytes == 3, "several prompts", "%d",
          r.prompt_count);
    nmk_request_free(&r);
    r = parse(NMK_BODY_COMPLETION, "{\"prompt\":[1,2,3]}");
    check(r.prompt_count == 1 && !r.prompt[0].text.data && r.prompt[0].ids.count == 3 && r.prompt[0].ids.id[2] == 3,
          "token ids", "%d", r.prompt_count);
    nmk_request_free(&r);
    r = parse(NMK_BODY_COMPLETION, "{\"prompt\":[[1],[2,4095],\"mixed\"]}");
    check(r.prompt_count == 3 && r.prompt[1].ids.count == 2 && r.prompt[2].text.bytes == 5, "lists of token ids", "%d",
          r.prompt_count);
    nmk_request_free(&r);

    r = parse(NMK_BODY_TOKENIZE, "{\"model\":\"m\",\"prompt\":\"Hi\",\"return_token_strs\":true}");
    check(r.prompt_count == 1 && r.add_special_tokens && r.token_strings, "/tokenize with a prompt", "other fields");
    nmk_request_free(&r);
    r = parse(NMK_BODY_TOKENIZE,
              "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"Hi\"}]}],"
              "\"add_generation_prompt\":false}");
    check(json_is(r.messages, "[{\"role\":\"user\",\"content\":\"Hi\"}]") && !r.add_special_tokens &&
              !r.add_generation_prompt,
          "/tokenize with messages", "other fields");
    nmk_request_free(&r);
    r = parse(NMK_BODY_DETOKENIZE, "{\"tokens\":[1,2]}");
    check(r.tokens.count == 2 && r.tokens.id[1] == 2, "/detokenize", "other tokens");
    nmk_request_free(&r);
    r = parse(NMK_BODY_DETOKENIZE, "{\"tokens\":[]}");
    check(!r.tokens.count, "/detokenize of nothing", "tokens");
    nmk_request_free(&r);
}

/* ---------------------------------------------------------------- refused */

#define T "invalid_type"
#define V "invalid_value"
#define M "missing_required_parameter"
#define P "unsupported_parameter"
#define U "unsupported_value"

static void refusals(void) {
    refused(NMK_BODY_CHAT, "", "", "invalid_json",
            "The request's body is not valid JSON: line 1, column 1: the text ends where a value was expected");
    refused(NMK_BODY_CHAT, "[1]", "", "invalid_json", "The request's body is an array, not an object.");
    refused(NMK_BODY_CHAT, "null", "", "invalid_json",
            "The request's body is not valid JSON: null is not accepted here");
    refused(NMK_BODY_CHAT, "{}", "messages", M, "Missing required parameter: 'messages'.");
    refused(NMK_BODY_COMPLETION, "{\"prompt\":null}", "prompt", M, "Missing required parameter: 'prompt'.");
    refused(NMK_BODY_TOKENIZE, "{}", "prompt", M, "Missing required parameter: 'prompt'.");
    refused(NMK_BODY_DETOKENIZE, "{}", "tokens", M, "Missing required parameter: 'tokens'.");
    refused(NMK_BODY_CHAT, "{\"messages\":[]}", "messages", V,
            "Invalid value for 'messages': expected at least one message.");
    refused(NMK_BODY_CHAT, "{\"messages\":\"Hi\"}", "messages", T,
            "Invalid type for 'messages': expected an array, but got a string instead.");

    field_refused("\"temperature\":\"hot\"", "temperature", T,
                  "Invalid type for 'temperature': expected a number, but got a string instead.");
    field_refused("\"temperature\":true", "temperature", T,
                  "Invalid type for 'temperature': expected a number, but got a boolean instead.");
    field_refused("\"temperature\":2.5", "temperature", V,
                  "Invalid value for 'temperature': expected at least 0 and at most 2, but got 2.5.");
    field_refused("\"top_p\":-0.1", "top_p", V,
                  "Invalid value for 'top_p': expected at least 0 and at most 1, but got -0.1.");
    field_refused("\"top_k\":1.5", "top_k", T,
                  "Invalid type for 'top_k': expected an integer, but got a number instead.");
    field_refused("\"top_k\":-2", "top_k", V, "Invalid value for 'top_k': expected at least -1, but got -2.");
    field_refused("\"repetition_penalty\":0", "repetition_penalty", V,
                  "Invalid value for 'repetition_penalty': expected at least 0.001 and at most 100, but got 0.");
    field_refused("\"n\":0", "n", V, "Invalid value for 'n': expected at least 1 and at most 128, but got 0.");
    field_refused("\"max_tokens\":0", "max_tokens", V,
                  "Invalid value for 'max_tokens': expected at least 1, but got 0.");
    field_refused("\"max_tokens\":99999999999", "max_tokens", V,
                  "Invalid value for 'max_tokens': expected at least 1, but got 1e+11.");
    field_refused("\"min_tokens\":9,\"max_tokens\":8", "min_tokens", V,
                  "Invalid value for 'min_tokens': more than max_tokens.");
    field_refused("\"seed\":\"x\"", "seed", T,
                  "Invalid type for 'seed': expected an integer, but got a string instead.");
    field_refused("\"stream\":\"true\"", "stream", T,
                  "Invalid type for 'stream': expected a boolean, but got a string instead.");
    field_refused("\"stream\":1", "stream", T,
                  "Invalid type for 'stream': expected a boolean, but got an integer instead.");
    field_refused("\"stream_options\":{\"include_usage\":true}", "stream_options", V,
                  "Invalid value for 'stream_options': only allowed when 'stream' is true.");
    field_refused("\"stream\":true,\"stream_options\":{\"include_usage\":1}", "stream_options.include_usage", T,
                  "Invalid type for 'stream_options.include_usage': expected a boolean, but got an integer instead.");
    field_refused("\"model\":7", "model", T,
                  "Invalid type for 'model': expected a string without NUL, but got an integer instead.");
    field_refused("\"model\":\"a\\u0000b\"", "model", T,
                  "Invalid type for 'model': expected a string without NUL, but got a string instead.");
    field_refused("\"top_logprobs\":3", "top_logprobs", V,
                  "Invalid value for 'top_logprobs': 'logprobs' must be true when 'top_logprobs' is given.");
    field_refused("\"logprobs\":true,\"top_logprobs\":21", "top_logprobs", V,
                  "Invalid value for 'top_logprobs': expected at most 20, but got 21.");
    field_refused("\"top_logprobs\":-1,\"logprobs\":true", "top_logprobs", V,
                  "Invalid value for 'top_logprobs': expected at least 0, but got -1.");
    field_refused("\"presence_penalty\":2.01", "presence_penalty", V,
                  "Invalid value for 'presence_penalty': expected at least -2 and at most 2, but got 2.01.");
    field_refused("\"frequency_penalty\":-3", "frequency_penalty", V,
                  "Invalid value for 'frequency_penalty': expected at least -2 and at most 2, but got -3.");
    field_refused("\"min_p\":1.5", "min_p", V,
                  "Invalid value for 'min_p': expected at least 0 and at most 1, but got 1.5.");
    field_refused("\"top_k\":2147483648", "top_k", V,
                  "Invalid value for 'top_k': expected at least -1, but got 2.14748365e+09.");
    field_refused("\"repetition_penalty\":-1", "repetition_penalty", V,
                  "Invalid value for 'repetition_penalty': expected at least 0.001 and at most 100, but got -1.");
    field_refused("\"n\":2000000000", "n", V,
                  "Invalid value for 'n': expected at least 1 and at most 128, but got 2e+09.");
    field_refused("\"logprobs\":3", "logprobs", T,
                  "Invalid type for 'logprobs': expected a boolean, but got an integer instead.");
    field_refused("\"logit_bias\":{\"4096\":1}", "logit_bias", V,
                  "Invalid value for 'logit_bias': \"4096\" is not a token id between 0 and 4095.");
    field_refused("\"logit_bias\":{\"-1\":1}", "logit_bias", V,
                  "Invalid value for 'logit_bias': \"-1\" is not a token id between 0 and 4095.");
    field_refused("\"logit_bias\":{\"99999999999999999999\":1}", "logit_bias", V,
                  "Invalid value for 'logit_bias': \"99999999999999999999\" is not a token id between 0 and 4095.");
    field_refused("\"logit_bias\":{\"1\":\"1\"}", "logit_bias", T,
                  "Invalid type for 'logit_bias': expected numbers, but got a string instead.");
    field_refused("\"logit_bias\":[1]", "logit_bias", T,
                  "Invalid type for 'logit_bias': expected an object from token ids to numbers, but got an array "
                  "instead.");
    field_refused("\"return_tokens_as_token_ids\":1", "return_tokens_as_token_ids", T,
                  "Invalid type for 'return_tokens_as_token_ids': expected a boolean, but got an integer instead.");
    field_refused("\"stop\":[\"a\",\"\"]", "stop", V, "Invalid value for 'stop': a stop string must not be empty.");
    field_refused("\"stop\":[1]", "stop", T,
                  "Invalid type for 'stop': expected a string or an array of strings, but got an integer instead.");
    field_refused("\"stop_token_ids\":[1,4096]", "stop_token_ids[1]", V,
                  "Invalid value for 'stop_token_ids[1]': token id 4096 is not between 0 and 4095.");
    field_refused("\"logit_bias\":{\"x\":1}", "logit_bias", V,
                  "Invalid value for 'logit_bias': \"x\" is not a token id between 0 and 4095.");
    field_refused("\"logit_bias\":{\"1\":101}", "logit_bias", V,
                  "Invalid value for 'logit_bias': a bias lies between -100 and 100.");
    field_refused("\"logit_bias\":{\"1\":1,\"01\":2}", "logit_bias", V,
                  "Invalid value for 'logit_bias': a token is there twice.");
    field_refused("\"response_format\":{\"type\":\"json\"}", "response_format.type", U,
                  "response_format of type 'json' is not supported by this server; expected 'text', 'json_object' or "
                  "'json_schema'.");
    field_refused("\"response_format\":{\"type\":\"json_schema\"}", "response_format.json_schema", M,
                  "Missing required parameter: 'response_format.json_schema'.");
    field_refused("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"x\"}}",
                  "response_format.json_schema.schema", M,
                  "Missing required parameter: 'response_format.json_schema.schema'.");
    field_refused(
        "\"structured_outputs\":{\"structural_tag\":\"{}\"}", "structured_outputs", U,
        "'structural_tag' of structured_outputs is not supported by this server; expected json, regex, choice, "
        "grammar or json_object.");
    field_refused("\"structured_outputs\":{\"json\":\"{\"}", "structured_outputs.json", V,
                  "Invalid value for 'structured_outputs.json': line 1, column 2: expected a key in double quotes");
    field_refused("\"guided_json\":[]", "guided_json", T,
                  "Invalid type for 'guided_json': expected a JSON schema, but got an array instead.");
    field_refused("\"guided_json\":{},\"regex\":\"a\"", "regex", V,
                  "Invalid value for 'regex': 'guided_json' says already what the answer has to be.");
    field_refused("\"guided_choice\":[\"a\",\"\"]", "guided_choice", V,
                  "Invalid value for 'guided_choice': a choice must not be empty.");
    field_refused("\"guided_json\":{},\"ignore_eos\":true", "ignore_eos", V,
                  "Invalid value for 'ignore_eos': not together with an answer of a given form, which has its end.");
    field_refused("\"regex\":\"a\",\"min_tokens\":3", "min_tokens", V,
                  "Invalid value for 'min_tokens': not together with an answer of a given form, which has its end.");
    field_refused(
        "\"reasoning_effort\":\"lots\"", "reasoning_effort", V,
        "Invalid value for 'reasoning_effort': expected one of none, minimal, low, medium, high, xhigh, max.");
    field_refused("\"chat_template_kwargs\":[]", "chat_template_kwargs", T,
                  "Invalid type for 'chat_template_kwargs': expected an object, but got an array instead.");
    field_refused("\"tool_choice\":\"required\"", "tool_choice", V,
                  "Invalid value for 'tool_choice': only allowed when 'tools' are given.");
    field_refused("\"tool_choice\":\"sometimes\"", "tool_choice", V,
                  "Invalid value for 'tool_choice': expected 'auto', 'none', 'required' or a function.");
    field_refused(
        "\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}},\"tools\":[{\"type\":\"function\","
        "\"function\":{\"name\":\"f\"}}]",
        "tool_choice", V, "Invalid value for 'tool_choice': there is no tool 'g'.");
    field_refused("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":1}}]",
                  "tools[0].function.strict", T,
                  "Invalid type for 'tools[0].function.strict': expected a boolean, but got an integer instead.");
    field_refused("\"tools\":{}", "tools", T,
                  "Invalid type for 'tools': expected an array, but got an object instead.");
    field_refused("\"tools\":[{\"type\":\"web_search\"}]", "tools[0].type", V,
                  "Invalid value for 'tools[0].type': only 'function' tools are supported.");
    field_refused("\"tools\":[{\"type\":\"function\"}]", "tools[0].function", M,
                  "Missing required parameter: 'tools[0].function'.");
    field_refused("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"\"}}]", "tools[0].function.name", V,
                  "Invalid value for 'tools[0].function.name': expected the function's name as a string.");
    field_refused(
        "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},{\"type\":\"function\",\"function\":"
        "{\"name\":\"f\"}}]",
        "tools[1].function.name", V, "Invalid value for 'tools[1].function.name': two tools have the same name.");
    field_refused("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":[]}}]",
                  "tools[0].function.parameters", T,
                  "Invalid type for 'tools[0].function.parameters': expected an object, but got an array instead.");

    message_refused("7", "messages[1]", T,
                    "Invalid type for 'messages[1]': expected an object, but got an integer instead.");
    message_refused("{\"content\":\"x\"}", "messages[1].role", M, "Missing required parameter: 'messages[1].role'.");
    message_refused(
        "{\"role\":\"robot\"}", "messages[1].role", V,
        "Invalid value for 'messages[1].role': 'robot' is not one of system, developer, user, assistant, tool.");
    message_refused("{\"role\":\"user\",\"content\":{}}", "messages[1].content", T,
                    "Invalid type for 'messages[1].content': expected a string or an array of parts, but got an object "
                    "instead.");
    message_refused("{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"x\"}}]}",
                    "messages[1].content[0].type", U,
                    "Content of type 'image_url' is not supported: this model reads text only.");
    message_refused("{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}", "messages[1].content[0].text", M,
                    "Missing required parameter: 'messages[1].content[0].text'.");
    message_refused("{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"a\"}]}", "messages[1].tool_calls[0].function", M,
                    "Missing required parameter: 'messages[1].tool_calls[0].function'.");
    message_refused(
        "{\"role\":\"assistant\",\"tool_calls\":[{\"id\":\"a\",\"function\":{\"name\":\"f\",\"arguments\":3}}]}",
        "messages[1].tool_calls[0].function.arguments", T,
        "Invalid type for 'messages[1].tool_calls[0].function.arguments': expected a string, but got an "
        "integer instead.");
    message_refused("{\"role\":\"assistant\",\"reasoning\":[]}", "messages[1].reasoning", T,
                    "Invalid type for 'messages[1].reasoning': expected a string, but got an array instead.");

    refused(NMK_BODY_COMPLETION, "{\"prompt\":[]}", "prompt", V,
            "Invalid value for 'prompt': expected at least one prompt.");
    refused(NMK_BODY_COMPLETION, "{\"prompt\":[1,\"a\"]}", "prompt[1]", T,
            "Invalid type for 'prompt[1]': expected a token id, but got a string instead.");
    refused(NMK_BODY_COMPLETION, "{\"prompt\":[[1],[-1]]}", "prompt[1][0]", V,
            "Invalid value for 'prompt[1][0]': token id -1 is not between 0 and 4095.");
    refused(NMK_BODY_COMPLETION, "{\"prompt\":[[1],[]]}", "prompt[1]", V,
            "Invalid value for 'prompt[1]': a prompt of no tokens.");
    refused(NMK_BODY_COMPLETION, "{\"prompt\":[\"a\",\"b\"],\"n\":65}", "n", V,
            "Invalid value for 'n': at most 128 answers to one request, prompts times n.");
    refused(NMK_BODY_COMPLETION, "{\"prompt\":\"a\",\"best_of\":2}", "best_of", P,
            "Unsupported parameter: 'best_of': only as much as 'n'.");
    refused(NMK_BODY_COMPLETION, "{\"prompt\":\"a\",\"suffix\":\"b\"}", "suffix", P,
            "Unsupported parameter: 'suffix': this server does not have it.");
    refused(NMK_BODY_COMPLETION, "{\"prompt\":\"a\",\"logprobs\":21}", "logprobs", V,
            "Invalid value for 'logprobs': expected at most 20, but got 21.");
    refused(NMK_BODY_TOKENIZE, "{\"prompt\":\"a\",\"messages\":[{\"role\":\"user\"}]}", "prompt", V,
            "Invalid value for 'prompt': give 'prompt' or 'messages', not both.");
    refused(NMK_BODY_DETOKENIZE, "{\"tokens\":[4096]}", "tokens[0]", V,
            "Invalid value for 'tokens[0]': token id 4096 is not between 0 and 4095.");
}

static void context(void) {
    nmk_api_request r = chat("\"max_tokens\":32000");
    nmk_api_error e;
    check(nmk_request_fit(&r, 4000, 4096, &e) == 96, "max_tokens is a cap", "it is not");
    check(nmk_request_fit(&r, 4095, 4096, &e) == 1, "one token is left", "it is not");
    check(nmk_request_fit(&r, 10, 100000, &e) == 32000, "max_tokens", "something else");
    int rc = nmk_request_fit(&r, 4096, 4096, &e);
    check(rc == -1 && e.status == 400 && !strcmp(e.param, "messages") && !strcmp(e.code, "context_length_exceeded") &&
              !strcmp(e.message,
                      "This model's maximum context length is 4096 tokens. However, your messages resulted in "
                      "4096 tokens, which leaves no room for an answer. Please reduce the length of the "
                      "messages."),
          "a prompt that does not fit", "%s", e.message);
    check(nmk_request_fit(&r, 0, 4096, &e) == -1 && e.status == 400, "a prompt of no tokens", "%s", e.message);
    nmk_request_free(&r);
    r = chat("\"model\":\"gpt-4\"");
    check(nmk_request_fit(&r, 10, 100, &e) == 90, "all that is left", "it is not");
    rc = nmk_request_no_model(&r, &e);
    check(rc == -1 && e.status == 404 && !strcmp(e.code, "model_not_found") &&
              !strcmp(e.message, "The model 'gpt-4' does not exist."),
          "another model", "%s", e.message);
    nmk_request_free(&r);
}

/* ---------------------------------------------------------------- anything at all */

static const char *const words[] = {
    "model",
    "messages",
    "prompt",
    "tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "stop",
    "stop_token_ids",
    "seed",
    "ignore_eos",
    "min_tokens",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "include_usage",
    "echo",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "chat_template_kwargs",
    "response_format",
    "suffix",
    "role",
    "content",
    "type",
    "text",
    "function",
    "name",
    "arguments",
    "tool_calls",
    "id",
    "description",
    "parameters",
    "user",
    "assistant",
    "tool",
    "system",
    "auto",
    "none",
    "required",
    "reasoning",
    "input",
    "instructions",
    "output",
    "call_id",
    "summary",
    "store",
    "include",
    "effort",
    "thinking",
    "budget_tokens",
    "enabled",
    "max_output_tokens",
    "previous_response_id",
    "stop_sequences",
    "input_schema",
    "tool_choice",
    "output_config",
    "format",
    "documents",
    "prompt_logprobs",
    "continue_final_message",
    "{}",
    "{\\\"a\\\":1}",
    "1",
    "\\u0000",
};

static void random_value(nmk_buf *b, int depth);

static void random_word(nmk_buf *b) { nmk_buf_printf(b, "\"%s\"", words[chance(sizeof words / sizeof *words)]); }

static void random_object(nmk_buf *b, int depth) {
    nmk_buf_puts(b, "{");
    for (unsigned i = 0, n = chance(5); i < n; i++) {
        if (i) nmk_buf_puts(b, ",");
        random_word(b);
        nmk_buf_puts(b, ":");
        random_value(b, depth + 1);
    }
    nmk_buf_puts(b, "}");
}

static void random_value(nmk_buf *b, int depth) {
    static const char *const scalars[] = {
        "0",    "1",     "-1",   "2",    "0.5",  "1e300", "-0.0",         "9223372036854775807",
        "true", "false", "null", "4095", "4096", "\"\"",  "\"\xc3\xa9\"", "16"};
    unsigned kind = chance(depth > 5 ? 6 : 10);
    if (kind < 4) nmk_buf_puts(b, scalars[chance(sizeof scalars / sizeof *scalars)]);
    if (kind == 4 || kind == 5) random_word(b);
    if (kind == 6 || kind == 7) random_object(b, depth);
    if (kind > 7) {
        nmk_buf_puts(b, "[");
        for (unsigned i = 0, n = chance(5); i < n; i++) {
            if (i) nmk_buf_puts(b, ",");
            random_value(b, depth + 1);
        }
        nmk_buf_puts(b, "]");
    }
}

/* A list of items or blocks of these types, with what they may have. */
static void random_list(nmk_buf *b, const char *const *types, unsigned count) {
    static const char *const members[] = {"text",   "content", "role", "call_id", "name",     "arguments",
                                          "output", "summary", "id",   "input",   "thinking", "tool_use_id"};
    nmk_buf_puts(b, "[");
    for (unsigned i = 0, n = 1 + chance(3); i < n; i++) {
        nmk_buf_printf(b, "%s{\"type\":\"%s\"", i ? "," : "", types[chance(count)]);
        for (unsigned k = 0; k < sizeof members / sizeof *members; k++) {
            if (chance(2)) continue;
            nmk_buf_printf(b, ",\"%s\":", members[k]);
            if (!strcmp(members[k], "role"))
                nmk_buf_puts(b, chance(2) ? "\"user\"" : "\"assistant\"");
            else if (!strcmp(members[k], "input"))
                nmk_buf_puts(b, "{\"a\":1}");
            else if (chance(6))
                random_word(b);
            else
                random_value(b, 3);
        }
        nmk_buf_puts(b, "}");
    }
    nmk_buf_puts(b, "]");
}

/* A body that is likely to get far. */
static void likely(nmk_buf *b, nmk_body body) {
    static const char *const roles[] = {"user", "assistant", "tool", "system"};
    static const char *const items[] = {"message",   "function_call",  "function_call_output",
                                        "reasoning", "item_reference", "other"};
    static const char *const blocks[] = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"};
    nmk_buf_puts(b, "{");
    if (body == NMK_BODY_RESPONSE) {
        nmk_buf_puts(b, "\"input\":");
        chance(6) ? random_list(b, items, 6) : random_word(b);
    } else if (body == NMK_BODY_MESSAGE || body == NMK_BODY_COUNT) {
        nmk_buf_puts(b, "\"max_tokens\":9,\"messages\":[");
        for (unsigned i = 0, n = 1 + chance(3); i < n; i++) {
            nmk_buf_printf(b, "%s{\"role\":\"%s\",\"content\":", i ? "," : "", roles[chance(2)]);
            chance(3) ? random_list(b, blocks, 6) : random_word(b);
            nmk_buf_puts(b, "}");
        }
        nmk_buf_puts(b, "]");
    } else if (body == NMK_BODY_CHAT || (body == NMK_BODY_TOKENIZE && chance(2))) {
        nmk_buf_puts(b, "\"messages\":[");
        for (unsigned i = 0, n = 1 + chance(3); i < n; i++) {
            nmk_buf_printf(b, "%s{\"role\":\"%s\",\"content\":", i ? "," : "", roles[chance(4)]);
            switch (chance(4)) {
            case 0: random_value(b, 3); break;
            case 1: nmk_buf_puts(b, "[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]"); break;
            default: random_word(b);
            }
            if (!chance(3)) {
                nmk_buf_puts(b, ",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":");
                random_word(b);
                nmk_buf_puts(b, "}}]");
            }
            nmk_buf_puts(b, "}");
        }
        nmk_buf_puts(b, "]");
    } else {
        nmk_buf_puts(b, body == NMK_BODY_DETOKENIZE ? "\"tokens\":" : "\"prompt\":");
        chance(3) ? nmk_buf_puts(b, "[1,2]") : random_value(b, 2);
    }
    for (unsigned n = chance(4); n; n--) {
        nmk_buf_puts(b, ",");
        random_word(b);
        nmk_buf_puts(b, ":");
        random_value(b, chance(5));
    }
    nmk_buf_puts(b, "}");
}

static void anything(void) {
    enum { BODIES = NMK_BODY_DETOKENIZE + 1 };
    int taken = 0, rounds = 90000, of[BODIES] = {0};
    bool good = true;
    for (int round = 0; round < rounds; round++) {
        nmk_buf b = {0};
        nmk_body body = (nmk_body)chance(BODIES);
        chance(4) ? likely(&b, body) : random_object(&b, 0);
        if (!chance(4)) /* and broken somewhere */
            for (unsigned n = 1 + chance(3); n; n--) b.data[chance((unsigned)b.length)] = (char)chance(256);
        nmk_api_request r;
        nmk_api_error e = {0};
        if (!nmk_request_parse(&r, body, b.data, b.length, &limits, &e)) {
            taken++, of[body]++;
            nmk_request_fit(&r, chance(5000), 4096, &e);
            nmk_request_free(&r);
        } else {
            nmk_buf out = {0};
            nmk_reply_error(NMK_REPLY_CHAT, &e, &out);
            struct json_object *o = nmk_json_parse(out.data, out.length, NULL);
            bool lost = e.status == 404 && body == NMK_BODY_RESPONSE; /* an item that was not kept */
            if ((e.status != 400 && !lost) || !e.message[0] || !o) good = false;
            json_object_put(o);
            nmk_buf_free(&out);
        }
        nmk_buf_free(&b);
    }
    for (int i = 0; i < BODIES; i++) good &= of[i] > 100;
    check(good && taken > rounds / 20, "random bodies are taken or refused, never more", "%d of %d taken", taken,
          rounds);
}

/* Processor time that a message of so many parts takes. */
static double parts(int count) {
    nmk_buf b = {0};
    nmk_buf_puts(&b, "{\"messages\":[{\"role\":\"user\",\"content\":[");
    for (int i = 0; i < count; i++) nmk_buf_printf(&b, "%s{\"type\":\"text\",\"text\":\"x\"}", i ? "," : "");
    nmk_buf_puts(&b, "]}]}");
    clock_t start = clock();
    nmk_api_request r = parse(NMK_BODY_CHAT, b.data);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    struct json_object *content = nmk_json_get(json_object_array_get_idx(r.messages, 0), "content");
    check(json_object_get_string_len(content) == count, "many parts are one text", "%d bytes",
          json_object_get_string_len(content));
    nmk_request_free(&r);
    nmk_buf_free(&b);
    return seconds;
}

static void large(void) {
    double few = parts(50000), many = parts(200000);
    check(many < 9 * few + 0.05, "four times the parts take four times as long", "%g s and %g s", few, many);
}

int main(void) {
    nmk_request_limits_init(&limits, VOCAB);
    defaults();
    sampling();
    configured();
    messages();
    prompts();
    refusals();
    context();
    anything();
    large();
    return failures != 0;
}
