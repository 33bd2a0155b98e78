/* The formats of Hermes and Qwen, and of Llama 3: with markers that are tokens and with markers that are text, and that
 * nothing depends on how the text was cut into tokens. */
#include "parse_helper.h"

/* What a test has: tokens that are never cut, and the prompt. */
static const char *const *whole;
static const char *prompt_text;
static struct json_object *tools;

/* How many bytes of text are one special token; 0: none are. */
static size_t special_at(const char *text) {
    for (const char *const *w = whole; *w; w++)
        if (!strncmp(text, *w, strlen(*w))) return strlen(*w);
    return 0;
}

/* most: bytes of a piece of ordinary text; 0: any. */
static void cut_tokens_of(const char *text, size_t most, nmk_ids *out) {
    size_t n = strlen(text);
    for (size_t i = 0; i < n;) {
        size_t step = special_at(text + i), wanted = most ? most : 1 + chance(9);
        bool special = step;
        while (!special && step < wanted && i + step < n && (!step || !special_at(text + i + step))) step++;
        while (!special && i + step < n && ((unsigned char)text[i + step] & 0xc0) == 0x80) step++;
        nmk_err e;
        if (nmk_tokenizer_encode(tokenizer, text + i, step, special ? NMK_PARSE_SPECIAL : 0, out, &e)) die(e.text);
        i += step;
    }
}

static nmk_ended feed(nmk_parser_options options, const nmk_ids *ids, told *t) {
    nmk_ids prompt = {0};
    *t = (told){.last = NMK_SAID_CALL_END};
    tokens_of(prompt_text, strlen(prompt_text), &prompt);
    nmk_parser *p = nmk_parser_new(tokenizer, &markers, prompt.id, prompt.count, options, listen, t);
    for (size_t i = 0; i < ids->count; i++) nmk_parser_add(p, ids->id[i]);
    nmk_parser_end(p);
    close_text(t);
    nmk_ended ended = nmk_parser_ended(p, false);
    nmk_parser_free(p), nmk_ids_free(&prompt);
    return ended;
}

static void says(const char *name, const char *text, const char *wanted) {
    nmk_parser_options options = {.tools = tools, .no_calls = !tools};
    nmk_ended ended = strchr(wanted, 'C') ? NMK_ENDED_TOOL_CALLS : NMK_ENDED_STOP;
    bool good = true;
    told t = {0};
    for (int round = 0; round < 60 && good; round++) {
        nmk_ids ids = {0};
        if (round)
            cut_tokens_of(text, round < 12 ? (size_t)round : 0, &ids);
        else
            tokens_of(text, strlen(text), &ids);
        nmk_buf_free(&t.text);
        nmk_ended got = feed(options, &ids, &t);
        good = got == ended && !t.empty && !strcmp(t.text.data ? t.text.data : "", wanted);
        nmk_ids_free(&ids);
    }
    check(good, name, "got\n  %s\nwanted\n  %s%s", t.text.data ? t.text.data : "", wanted,
          t.empty ? "\nsomething said nothing" : "");
    nmk_buf_free(&t.text);
}

static void hermes(const char *opened, const char *not_opened) {
    prompt_text = not_opened;
    says("an answer", "It is 4.", "A(It is 4.)");
    says("reasoning and an answer", "<think>\nI add.\n</think>\n\nIt is 4.\n", "R(I add.)A(It is 4.\n)");
    says("no reasoning", "<think>\n\n</think>\n\nIt is 4.", "A(It is 4.)");
    says("reasoning that does not end", "<think>\nI ad", "R(I ad)");
    says("a call", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, {}]}}\n</tool_call>",
         "C0(f)0({\"a\": [1, {}]})E0+");
    says(
        "reasoning, an answer and two calls",
        "<think>\nHm\n</think>\n\nWait.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n"
        "{\"name\": \"g\", \"arguments\": {\"x\": \"\xe6\xbc\xa2\"}}\n</tool_call><|im_end|>",
        "R(Hm)A(Wait.\n)C0(f)0({})E0+C1(g)1({\"x\": \"\xe6\xbc\xa2\"})E1+");
    says("an answer after a call", "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\nDone.",
         "C0(f)0({})E0+A(Done.)");
    says("a call that breaks off", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b", "C0(f)0({\"a\": \"b)E0-");
    says("a call without its end", "<tool_call>{\"name\": \"f\", \"arguments\": {}}", "C0(f)0({})E0+");
    says("arguments that are a string", "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
         "C0(f)0({\"a\": 1})E0+");
    says("its end within a string is text",
         "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x</tool_call>y\"}}</tool_call>z",
         "C0(f)0({\"a\": \"x</tool_call>y\"})E0+A(z)");
    says("what looks like a marker is text", "1 < 2, <b>, <too, </thinks <tool_cal",
         "A(1 < 2, <b>, <too, </thinks <tool_cal)");
    says("JSON is an answer", "{\"name\": \"f\", \"arguments\": {}}", "A({\"name\": \"f\", \"arguments\": {}})");
    prompt_text = opened;
    says("a prompt that opened reasoning", "I add.\n</think>\n\nIt is 4.", "R(I add.)A(It is 4.)");
    says("and a call out of it", "Hm<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", "R(Hm)C0(f)0({})E0+");
}

static void test_hermes_tokens(void) {
    static const char *const names[][2] = {{"<|START_OF_TURN_TOKEN|>", "<|im_start|>"},
                                           {"<|END_OF_TURN_TOKEN|>", "<|im_end|>"},
                                           {"<|START_THINKING|>", "<think>"},
                                           {"<|END_THINKING|>", "</think>"},
                                           {"<|START_ACTION|>", "<tool_call>"},
                                           {"<|END_ACTION|>", "</tool_call>"},
                                           {"<|START_TEXT|>", "<|other|>"},
                                           {NULL, NULL}};
    static const char *const never[] = {"<|im_start|>", "<|im_end|>",   "<think>", "</think>",
                                        "<tool_call>",  "</tool_call>", NULL};
    nmk_ids end = {0}, prompt = {0};
    nmk_buf text = {0};
    tokenizer = renamed(names), whole = never;
    check(nmk_markers_find(&markers, tokenizer, "<tool_call>") && markers.format == NMK_FORMAT_HERMES &&
              markers.start_thinking >= 0 && !markers.thinks_in_text && !markers.calls_in_text,
          "markers that are tokens", "format %d", markers.format);
    hermes("<|im_start|>assistant\n<think>\n", "<|im_start|>user\n<think>x</think><|im_end|>\n<|im_start|>assistant\n");
    nmk_markers_end_thinking(&markers, tokenizer, &end);
    nmk_tokenizer_decode(tokenizer, end.id, end.count, false, &text);
    same("what ends reasoning", &text, "\n</think>\n\n");
    tokens_of("<|im_start|>assistant\n<think>\n", 30, &prompt);
    check(nmk_markers_thinking(&markers, tokenizer, prompt.id, prompt.count), "a prompt within reasoning", "it is not");
    for (size_t i = 0; i < end.count; i++) nmk_ids_add(&prompt, end.id[i]);
    check(!nmk_markers_thinking(&markers, tokenizer, prompt.id, prompt.count), "a prompt behind it", "it is not");
    nmk_ids_free(&end), nmk_ids_free(&prompt);
    nmk_tokenizer_free(tokenizer);
}

static void test_hermes_text(void) {
    static const char *const names[][2] = {{"<|START_OF_TURN_TOKEN|>", "<|im_start|>"},
                                           {"<|END_OF_TURN_TOKEN|>", "<|im_end|>"},
                                           {"<|START_THINKING|>", "<|other|>"},
                                           {"<|START_TEXT|>", "<|another|>"},
                                           {NULL, NULL}};
    static const char *const never[] = {"<|im_start|>", "<|im_end|>", NULL};
    nmk_ids end = {0};
    tokenizer = renamed(names), whole = never;
    check(nmk_markers_find(&markers, tokenizer, "</think> <tool_call>") && markers.format == NMK_FORMAT_HERMES &&
              markers.thinks_in_text && markers.calls_in_text,
          "markers that are text", "format %d", markers.format);
    hermes("<|im_start|>assistant\n<think>\n", "<|im_start|>user\n<think>x<|im_end|>\n<|im_start|>assistant\n");
    nmk_markers_end_thinking(&markers, tokenizer, &end);
    check(!end.count, "no token ends that reasoning", "%zu do", end.count);
    check(!nmk_markers_find(&markers, tokenizer, "{{ messages }}"), "a template without any", "format %d",
          markers.format);
    check(nmk_markers_find(&markers, tokenizer, "a</think>b") && markers.format == NMK_FORMAT_PLAIN,
          "a template that thinks alone", "format %d", markers.format);
    says("then a call's tag is text", "Hm</think><tool_call>x", "R(Hm)A(<tool_call>x)");
    nmk_tokenizer_free(tokenizer);
}

static void test_llama(void) {
    static const char *const names[][2] = {{"<|START_OF_TURN_TOKEN|>", "<|start_header_id|>"},
                                           {"<|END_OF_TURN_TOKEN|>", "<|eot_id|>"},
                                           {"<|START_ACTION|>", "<|python_tag|>"},
                                           {"<|START_THINKING|>", "<|other|>"},
                                           {"<|START_TEXT|>", "<|another|>"},
                                           {NULL, NULL}};
    static const char *const never[] = {"<|start_header_id|>", "<|eot_id|>", "<|python_tag|>", NULL};
    tokenizer = renamed(names), whole = never;
    prompt_text = "<|start_header_id|>assistant\n\n";
    check(nmk_markers_find(&markers, tokenizer,
                           "Respond in the format {\"name\": function name, \"parameters\": "
                           "dictionary of argument name and its value}.") &&
              markers.format == NMK_FORMAT_LLAMA3 && markers.start_action >= 0 && !markers.thinks_in_text,
          "Llama's markers", "format %d", markers.format);
    says("an answer", "It is 4.", "A(It is 4.)");
    says("a call alone", "{\"name\": \"f\", \"parameters\": {\"a\": 1}}<|eot_id|>", "C0(f)0({\"a\": 1})E0+");
    says("a call with its type", "\n{ \"type\" : \"function\", \"name\": \"get_it\", \"parameters\": {}}",
         "C0(get_it)0({})E0+");
    says("two calls", "{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"get_it\", \"parameters\": {\"a\": \"}\"}}",
         "C0(f)0({})E0+C1(get_it)1({\"a\": \"}\"})E1+");
    says("a call behind its tag", "<|python_tag|>{\"name\": \"other\", \"parameters\": {}}", "C0(other)0({})E0+");
    says("an answer, and a call behind its tag", "Wait.<|python_tag|>{\"name\": \"f\", \"parameters\": {}}",
         "A(Wait.)C0(f)0({})E0+");
    says("code behind the tag", "<|python_tag|>search.call(query=\"x\")", "A(search.call(query=\"x\"))");
    says("a call that breaks off", "{\"name\": \"f\", \"parameters\": {\"a\": ", "C0(f)0({\"a\": )E0-");
    says("JSON with another name", "{\"name\": \"Bob\", \"age\": 3}", "A({\"name\": \"Bob\", \"age\": 3})");
    says("JSON with the beginning of a name", "{\"name\": \"get\"}", "A({\"name\": \"get\"})");
    says("JSON of another kind", "{\"a\": {\"name\": \"f\"}}", "A({\"a\": {\"name\": \"f\"}})");
    says("another type", "{\"type\": \"object\", \"name\": \"f\"}", "A({\"type\": \"object\", \"name\": \"f\"})");
    says("what breaks off before it is clear", "{\"name\": \"ge", "A({\"name\": \"ge)");
    says("a brace", "{", "A({)");
    says("JSON behind an answer", "It: {\"name\": \"f\"}", "A(It: {\"name\": \"f\"})");
    struct json_object *had = tools;
    tools = NULL;
    says("without tools all is an answer", "{\"name\": \"f\", \"parameters\": {}}",
         "A({\"name\": \"f\", \"parameters\": {}})");
    tools = had;
    nmk_tokenizer_free(tokenizer);
}

/* Whatever comes, nothing breaks, nothing empty is told, and two ways to cut say the same. */
static void test_noise(const char *name, nmk_format format, const char *chat_template, const char *const names[][2]) {
    static const char *const parts[] = {"<think>",
                                        "</think>",
                                        "<tool_call>",
                                        "</tool_call>",
                                        "{\"name\": \"f\"",
                                        ",",
                                        "}",
                                        "\"arguments\": {",
                                        "\"",
                                        "\\",
                                        "<",
                                        "</",
                                        "a b",
                                        "\n",
                                        "{",
                                        "[",
                                        "\xe6\xbc\xa2"};
    bool good = true;
    tokenizer = renamed(names);
    if (!nmk_markers_find(&markers, tokenizer, chat_template) || markers.format != format) die(name);
    for (int round = 0; round < 1500 && good; round++) {
        nmk_buf text = {0};
        nmk_ids a = {0}, b = {0};
        told ta, tb;
        for (unsigned n = chance(14) + 1; n; n--) nmk_buf_puts(&text, parts[chance(sizeof parts / sizeof *parts)]);
        nmk_parser_options options = {.tools = tools};
        cut_tokens_of(text.data, 1, &a), cut_tokens_of(text.data, 0, &b);
        nmk_ended ea = feed(options, &a, &ta), eb = feed(options, &b, &tb);
        good = ea == eb && !ta.empty && !tb.empty &&
               !strcmp(ta.text.data ? ta.text.data : "", tb.text.data ? tb.text.data : "");
        if (!good) printf("# %s\n# %s\n# %s\n", text.data, ta.text.data, tb.text.data);
        nmk_buf_free(&text), nmk_buf_free(&ta.text), nmk_buf_free(&tb.text), nmk_ids_free(&a), nmk_ids_free(&b);
    }
    check(good, name, "two ways to cut differ");
    nmk_tokenizer_free(tokenizer);
}

int main(void) {
    static const char *const in_text[][2] = {
        {"<|START_THINKING|>", "<|x|>"}, {"<|START_TEXT|>", "<|y|>"}, {NULL, NULL}};
    static const char *const nothing[] = {NULL};
    nmk_err e;
    static const char given[] = "[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},"
                                "{\"type\":\"function\",\"function\":{\"name\":\"get_it\"}}]";
    tools = nmk_json_parse(given, sizeof given - 1, &e);
    if (!tools) die(e.text);
    test_hermes_tokens();
    test_hermes_text();
    test_llama();
    whole = nothing, prompt_text = "hi\n";
    test_noise("noise in Hermes's format", NMK_FORMAT_HERMES, "</think><tool_call>", in_text);
    test_noise("noise in Llama's", NMK_FORMAT_LLAMA3, "<|python_tag|>", in_text);
    json_object_put(tools);
    return failures != 0;
}
