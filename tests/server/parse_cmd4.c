/* What the model says, taken apart: well-formed answers, all the malformed ones that have been seen, and that nothing
 * depends on how the text was cut into tokens. */
#include "parse_helper.h"

/* Other tokens for the same text: ordinary text is cut at random places. */
static void random_tokens_of(const char *text, nmk_ids *out) {
    size_t n = strlen(text);
    for (size_t i = 0; i < n;) {
        size_t step = 1;
        if (text[i] == '<') { /* in these tests always a special token */
            step = (size_t)(strchr(text + i, '>') + 1 - (text + i));
        } else {
            size_t most = 1 + chance(6);
            while (step < most && i + step < n && text[i + step] != '<') step++;
        }
        nmk_err e;
        /* A cut within a character has no text of its own: let the tokenizer see whole ones. */
        while (i + step < n && ((unsigned char)text[i + step] & 0xc0) == 0x80) step++;
        if (nmk_tokenizer_encode(tokenizer, text + i, step, NMK_PARSE_SPECIAL, out, &e)) die(e.text);
        i += step;
    }
}

enum { THINKING, ANSWERING }; /* how the prompt ends */

static const char *const prompts[] = {
    "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>",
    "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
};

static nmk_parser *parser(int start, nmk_parser_options options, told *t) {
    nmk_ids prompt = {0};
    *t = (told){.last = NMK_SAID_CALL_END};
    tokens_of(prompts[start], strlen(prompts[start]), &prompt);
    nmk_parser *p = nmk_parser_new(tokenizer, &markers, prompt.id, prompt.count, options, listen, t);
    nmk_ids_free(&prompt);
    return p;
}

static nmk_ended feed(int start, nmk_parser_options options, const nmk_ids *ids, bool cut, told *t) {
    nmk_parser *p = parser(start, options, t);
    for (size_t i = 0; i < ids->count; i++) nmk_parser_add(p, ids->id[i]);
    nmk_parser_end(p);
    close_text(t);
    nmk_ended ended = nmk_parser_ended(p, cut);
    nmk_parser_free(p);
    return ended;
}

static void says_with(nmk_parser_options options, int start, const char *name, const char *text, const char *wanted,
                      nmk_ended ended) {
    bool good = true, repeated = false;
    told t = {0};
    for (int round = 0; round < 50 && good; round++) {
        nmk_ids ids = {0};
        round ? random_tokens_of(text, &ids) : tokens_of(text, strlen(text), &ids);
        nmk_buf_free(&t.text);
        nmk_ended got = feed(start, options, &ids, false, &t);
        for (int i = 0; i < t.ids; i++)
            for (int k = 0; k < i; k++) repeated |= !strcmp(t.id[i], t.id[k]);
        good = got == ended && !t.empty && !strcmp(t.text.data ? t.text.data : "", wanted) && !repeated;
        nmk_ids_free(&ids);
    }
    check(good, name, "got\n  %s\nwanted\n  %s%s%s", t.text.data ? t.text.data : "", wanted,
          t.empty ? "\nsomething said nothing" : "", repeated ? "\ntwo calls have one id" : "");
    nmk_buf_free(&t.text);
}

static void says(int start, const char *name, const char *text, const char *wanted, nmk_ended ended) {
    says_with((nmk_parser_options){0}, start, name, text, wanted, ended);
}

#define STOP  NMK_ENDED_STOP
#define CALLS NMK_ENDED_TOOL_CALLS
#define ACT   "<|START_ACTION|>"
#define END   "<|END_ACTION|><|END_OF_TURN_TOKEN|>"

static void well_formed(void) {
    says(THINKING, "reasoning and an answer",
         "I add.<|END_THINKING|><|START_TEXT|>It is 4.\n<|END_TEXT|><|END_OF_TURN_TOKEN|>", "R(I add.)A(It is 4.\n)",
         STOP);
    says(ANSWERING, "an answer", "<|START_TEXT|> 4 <|END_TEXT|><|END_OF_TURN_TOKEN|>", "A( 4 )", STOP);
    says(ANSWERING, "characters of several tokens", "<|START_TEXT|>\xf0\x9f\x98\x80 \xe6\xbc\xa2<|END_TEXT|>",
         "A(\xf0\x9f\x98\x80 \xe6\xbc\xa2)", STOP);
    says(
        THINKING, "reasoning and a call",
        "Look.<|END_THINKING|>" ACT
        "[{\"tool_call_id\": \"0\", \"tool_name\": \"read\", \"parameters\": {\"path\": \"a b\", \"n\": [1, {}]}}]" END,
        "R(Look.)C0(read)0({\"path\": \"a b\", \"n\": [1, {}]})E0+", CALLS);
    says(ANSWERING, "several calls, one id",
         ACT "[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"a\": 1}},\n"
             "    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"a\": 2}}\n]" END,
         "C0(f)0({\"a\": 1})E0+C1(f)1({\"a\": 2})E1+", CALLS);
    says(ANSWERING, "an answer and a call",
         "<|START_TEXT|>Wait.<|END_TEXT|>" ACT "[{\"tool_name\":\"f\",\"parameters\":{}}]" END, "A(Wait.)C0(f)0({})E0+",
         CALLS);
    says(ANSWERING, "no calls", ACT "[]" END, "", STOP);
    says(ANSWERING, "an empty answer", "<|START_TEXT|><|END_TEXT|><|END_OF_TURN_TOKEN|>", "", STOP);
}

static void malformed(void) {
    says(THINKING, "blanks around reasoning", " \n Hm. \n\n Yes.\n <|END_THINKING|>\n<|START_TEXT|>Hi",
         "R(Hm. \n\n Yes.)A(Hi)", STOP);
    says(THINKING, "blank reasoning", "\n\n<|END_THINKING|><|START_TEXT|>Hi<|END_TEXT|>", "A(Hi)", STOP);
    says(THINKING, "no end of thinking before text", "Hm<|START_TEXT|>Hi<|END_TEXT|>", "R(Hm)A(Hi)", STOP);
    says(THINKING, "no end of thinking before a call", "Hm" ACT "[{\"tool_name\":\"f\",\"parameters\":{}}]" END,
         "R(Hm)C0(f)0({})E0+", CALLS);
    says(THINKING, "the turn ends in thinking", "Hm<|END_OF_TURN_TOKEN|>", "R(Hm)", STOP);
    says(THINKING, "thinking twice", "a<|END_THINKING|><|START_THINKING|>b<|END_THINKING|><|START_TEXT|>c", "R(ab)A(c)",
         STOP);
    says(ANSWERING, "text without markers", "\n Hi there.<|END_OF_TURN_TOKEN|>", "A(Hi there.)", STOP);
    says(ANSWERING, "text after the end of text", "<|START_TEXT|>a<|END_TEXT|> \n<|END_OF_TURN_TOKEN|>", "A(a)", STOP);
    says(ANSWERING, "more text after the end of text", "<|START_TEXT|>a<|END_TEXT|>\nb", "A(a\nb)", STOP);
    says(ANSWERING, "no end of text before a call",
         "<|START_TEXT|>a" ACT "[{\"tool_name\":\"f\",\"parameters\":{}}]" END, "A(a)C0(f)0({})E0+", CALLS);
    says(ANSWERING, "closers of nothing", "<|END_ACTION|><|END_TEXT|><|START_TEXT|>a<|END_ACTION|>b<|END_THINKING|>c",
         "A(abc)", STOP);
    says(ANSWERING, "turn markers in text", "<|START_TEXT|>a<|CHATBOT_TOKEN|>b", "A(ab)", STOP);

    says(ANSWERING, "one object instead of a list", ACT "{\"tool_name\": \"f\", \"parameters\": {\"a\": 1}}" END,
         "C0(f)0({\"a\": 1})E0+", CALLS);
    says(ANSWERING, "a missing comma between calls",
         ACT "[{\"tool_name\":\"f\",\"parameters\":{}} {\"tool_name\":\"g\",\"parameters\":{}}]" END,
         "C0(f)0({})E0+C1(g)1({})E1+", CALLS);
    says(ANSWERING, "a missing brace between calls",
         ACT "[{\"tool_name\":\"f\",\"parameters\":{}, {\"tool_name\":\"g\",\"parameters\":{}]" END,
         "C0(f)0({})E0+C1(g)1({})E1+", CALLS);
    says(ANSWERING, "a missing end of the list", ACT "[{\"tool_name\":\"f\",\"parameters\":{}}<|END_OF_TURN_TOKEN|>",
         "C0(f)0({})E0+", CALLS);
    says(ANSWERING, "no end of action before text", ACT "[{\"tool_name\":\"f\",\"parameters\":{}}]<|START_TEXT|>Done.",
         "C0(f)0({})E0+A(Done.)", CALLS);
    says(ANSWERING, "keys in another order",
         ACT "[{\"parameters\": {\"a\": \"x\"}, \"tool_name\": \"f\", \"tool_call_id\": \"7\"}]" END,
         "C0(f)0({\"a\": \"x\"})E0+", CALLS);
    says(ANSWERING, "unknown keys",
         ACT "[{\"why\": {\"tool_name\": \"x\", \"s\": \"}]\"}, \"tool_name\": \"f\", \"n\": -1.5e3, \"z\": \"\\\"}\","
             "\"parameters\": {}, \"t\": true}]" END,
         "C0(f)0({})E0+", CALLS);
    says(ANSWERING, "keys given twice",
         ACT "[{\"tool_name\":\"f\",\"tool_name\":\"g\",\"parameters\":{\"a\":1},\"parameters\":{\"b\":2}}]" END,
         "C0(f)0({\"a\":1})E0+", CALLS);
    says(ANSWERING, "OpenAI's names of the keys",
         ACT "[{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": \\\"\\u00e9\\\"}\"}]" END,
         "C0(f)0({\"a\": \"\xc3\xa9\"})E0+", CALLS);
    says(ANSWERING, "no arguments", ACT "[{\"tool_name\":\"f\"},{\"tool_name\":\"g\",\"parameters\":null}]" END,
         "C0(f)0({})E0+C1(g)1({})E1+", CALLS);
    says(ANSWERING, "arguments that are no object",
         ACT "[{\"tool_name\":\"f\",\"parameters\":[1, 2]},{\"tool_name\":\"g\",\"parameters\": 12 },"
             "{\"tool_name\":\"h\",\"parameters\":\"x\"}]" END,
         "C0(f)0([1, 2])E0+C1(g)1(12)E1+C2(h)2(\"x\")E2+", CALLS);
    says(ANSWERING, "no name",
         ACT "[{\"parameters\":{\"a\":1}},{\"tool_name\":7,\"parameters\":{}},{\"tool_name\":\"\"}]" END, "", STOP);
    says(ANSWERING, "a name with escapes", ACT "[{\"tool_name\":\"a\\u00e9\\\"\",\"parameters\":{}}]" END,
         "C0(a\xc3\xa9\")0({})E0+", CALLS);
    says(ANSWERING, "raw control characters in arguments",
         ACT "[{\"tool_name\":\"f\",\"parameters\":{\n\t\"a\": \"x\n\ty\"}}]" END,
         "C0(f)0({\n\t\"a\": \"x\\n\\ty\"})E0+", CALLS);
    says(
        ANSWERING, "markers within a string",
        ACT
        "[{\"tool_name\":\"f\",\"parameters\":{\"a\":\"x<|END_ACTION|><|START_TEXT|>y<|START_OF_TURN_TOKEN|>z\"}}]" END,
        "C0(f)0({\"a\":\"x<|END_ACTION|><|START_TEXT|>y<|START_OF_TURN_TOKEN|>z\"})E0+", CALLS);
    says(ANSWERING, "a string without its quote", ACT "[{\"tool_name\":\"f\",\"parameters\":{\"a\":\"x}}]" END,
         "C0(f)0({\"a\":\"x}}])E0-", CALLS);
    says(ANSWERING, "quotes and brackets within strings",
         ACT "[{\"tool_name\":\"f\",\"parameters\":{\"a\":\"\\\\\\\"}]{\\\\\",\"b\":\"[\"}}]" END,
         "C0(f)0({\"a\":\"\\\\\\\"}]{\\\\\",\"b\":\"[\"})E0+", CALLS);
    says(ANSWERING, "text instead of calls", ACT "I will not call. " END, "", STOP);
    says(ANSWERING, "garbage", ACT "]]}},,:\"[{:}{\"a\"}{\"tool_name\":}{\"tool_name\":\"f\"]" END, "C0(f)0({})E0+",
         CALLS);
    says(ANSWERING, "two actions",
         ACT "[{\"tool_name\":\"f\",\"parameters\":{}}]<|END_ACTION|>" ACT
             "[{\"tool_name\":\"g\",\"parameters\":{}}]" END,
         "C0(f)0({})E0+C1(g)1({})E1+", CALLS);
}

/* Cut at every token by max_tokens. */
static void cut(void) {
    const char *text =
        ACT "[{\"tool_call_id\": \"0\", \"tool_name\": \"read_file\", \"parameters\": {\"path\": \"a\\\"b.txt\"}}]"
            "<|END_ACTION|>";
    const char *whole = "C0(read_file)0({\"path\": \"a\\\"b.txt\"})E0+";
    nmk_ids ids = {0};
    bool good = true;
    int complete = 0, partial = 0;
    random_tokens_of(text, &ids);
    for (size_t n = 0; n <= ids.count && good; n++) {
        nmk_ids some = {ids.id, n, n};
        told t;
        nmk_ended ended = feed(ANSWERING, (nmk_parser_options){0}, &some, true, &t);
        const char *got = t.text.data ? t.text.data : "";
        size_t bytes = t.text.length;
        if (bytes >= 3 && !strcmp(got + bytes - 3, "E0-")) {
            partial++;
            size_t same = bytes - 3 - (got[bytes - 4] == ')');
            good = !strncmp(got, whole, same);
        } else if (bytes) {
            complete++;
            good = !strcmp(got, whole);
        }
        good = good && ended == NMK_ENDED_LENGTH;
        if (!good) printf("# after %zu tokens: %s\n", n, got);
        nmk_buf_free(&t.text);
    }
    check(good && complete && partial, "a call cut anywhere", "%d complete, %d partial", complete, partial);
    nmk_ids_free(&ids);
}

static void citations(void) {
    says(THINKING, "citations in reasoning and answer",
         "<co>So</co: 0:[1]> it is.<|END_THINKING|><|START_TEXT|>It is <co>42</co: 0:[1,2],1:[0]>.<|END_TEXT|>",
         "R(So it is.)A(It is 42.)", STOP);
    says(ANSWERING, "an answer that is one citation", "<|START_TEXT|><co>42</co: 0:[1]><|END_TEXT|>", "A(42)", STOP);
    says(ANSWERING, "one that a marker cuts",
         "<|START_TEXT|>a <co>42<|END_TEXT|><|START_TEXT|></co: 0:[1]>b<|END_TEXT|>", "A(a <co>42b)", STOP);
    says(THINKING, "one that the end cuts", "a <co>42", "R(a <co>42)", STOP);
    says(ANSWERING, "outside of blocks", "<co>42</co: 0:[1]>", "A(42)", STOP);
    says(ANSWERING, "a call's arguments stay as they are",
         ACT "[{\"tool_name\":\"f\",\"parameters\":{\"a\":\"<co>x</co: 0:[1]>\"}}]" END,
         "C0(f)0({\"a\":\"<co>x</co: 0:[1]>\"})E0+", CALLS);
    says_with((nmk_parser_options){.show_special = true}, ANSWERING, "unless special tokens are asked for",
              "<|START_TEXT|><co>42</co: 0:[1]><|END_TEXT|>", "A(<co>42</co: 0:[1]>)", STOP);
}

static void options(void) {
    const char *two =
        ACT "[{\"tool_name\":\"f\",\"parameters\":{\"a\":1}},{\"tool_name\":\"g\",\"parameters\":{}}]" END;
    says_with((nmk_parser_options){.no_calls = true}, ANSWERING, "calls that nobody wants", two, "", STOP);
    says_with((nmk_parser_options){.max_calls = 1}, ANSWERING, "one call at most", two, "C0(f)0({\"a\":1})E0+", CALLS);

    told t = {.last = NMK_SAID_CALL_END};
    nmk_ids ids = {0};
    tokens_of("\n<|START_TEXT|>Hi<|END_TEXT|> ", strlen("\n<|START_TEXT|>Hi<|END_TEXT|> "), &ids);
    nmk_parser *p = nmk_parser_new(tokenizer, NULL, NULL, 0, (nmk_parser_options){0}, listen, &t);
    for (size_t i = 0; i < ids.count; i++) nmk_parser_add(p, ids.id[i]);
    nmk_parser_end(p);
    close_text(&t);
    same("without markers all is answer", &t.text, "A(\nHi )");
    nmk_parser_free(p);
    t = (told){.last = NMK_SAID_CALL_END};
    p = nmk_parser_new(tokenizer, NULL, NULL, 0, (nmk_parser_options){.show_special = true}, listen, &t);
    for (size_t i = 0; i < ids.count; i++) nmk_parser_add(p, ids.id[i]);
    nmk_parser_end(p);
    close_text(&t);
    same("and special tokens, if wanted", &t.text, "A(\n<|START_TEXT|>Hi<|END_TEXT|> )");
    nmk_parser_free(p);
    ids.count = 0;
    tokens_of("a<|END_THINKING|>", strlen("a<|END_THINKING|>"), &ids);
    p = parser(THINKING, (nmk_parser_options){0}, &t);
    bool good = nmk_parser_add(p, ids.id[0]) == NMK_BLOCK_REASONING && nmk_parser_add(p, ids.id[1]) == NMK_BLOCK_NONE &&
                nmk_parser_reasoning_tokens(p) == 1;
    nmk_parser_add(p, markers.start_text);
    good = good && nmk_parser_add(p, ids.id[0]) == NMK_BLOCK_ANSWER;
    nmk_parser_add(p, markers.start_action);
    good = good && nmk_parser_add(p, ids.id[0]) == NMK_BLOCK_ACTION && nmk_parser_reasoning_tokens(p) == 1;
    check(good, "the block of each token", "another");
    nmk_parser_free(p);
    nmk_buf_free(&t.text);

    ids.count = 0;
    const char *open =
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|><|START_TEXT|>The answer";
    tokens_of(open, strlen(open), &ids);
    t = (told){.last = NMK_SAID_CALL_END};
    p = nmk_parser_new(tokenizer, &markers, ids.id, ids.count, (nmk_parser_options){0}, listen, &t);
    ids.count = 0;
    tokens_of(" is 4", 5, &ids);
    for (size_t i = 0; i < ids.count; i++) nmk_parser_add(p, ids.id[i]);
    nmk_parser_end(p);
    close_text(&t);
    same("a prompt that began the answer", &t.text, "A( is 4)");
    nmk_parser_free(p);
    nmk_ids_free(&ids);
}

/* The older family's names of the text markers. */
static void legacy(void) {
    nmk_markers old = markers;
    markers.start_response = nmk_tokenizer_find(tokenizer, "<|START_TOOL_RESULT|>");
    markers.end_response = nmk_tokenizer_find(tokenizer, "<|END_TOOL_RESULT|>");
    says(THINKING, "legacy markers",
         "Hm<|END_THINKING|><|START_TOOL_RESULT|>Hi<|END_TOOL_RESULT|>\n<|END_OF_TURN_TOKEN|>", "R(Hm)A(Hi)", STOP);
    markers = old;
}

/* What the toy itself says. */
static void golden(const char *prompt, const char *wanted, nmk_ended ended) {
    nmk_err e;
    struct json_object *root = nmk_json_read("tests/golden/nmc-toy.json", 64 << 20, &e);
    if (!root) die(e.text);
    struct json_object *list = nmk_json_get(root, "prompts");
    for (size_t i = 0; i < json_object_array_length(list); i++) {
        struct json_object *one = json_object_array_get_idx(list, i), *answer = nmk_json_get(one, "greedy64"), *in;
        if (strcmp(json_object_get_string(nmk_json_get(one, "name")), prompt) != 0) continue;
        in = nmk_json_get(one, "ids");
        nmk_ids ids = {0};
        told t = {.last = NMK_SAID_CALL_END};
        for (size_t k = 0; k < json_object_array_length(in); k++)
            nmk_ids_add(&ids, json_object_get_int(json_object_array_get_idx(in, k)));
        nmk_parser *p = nmk_parser_new(tokenizer, &markers, ids.id, ids.count, (nmk_parser_options){0}, listen, &t);
        bool ends = false;
        for (size_t k = 0; k < json_object_array_length(answer) && !ends; k++) {
            int32_t id = json_object_get_int(json_object_array_get_idx(answer, k));
            nmk_parser_add(p, id);
            ends = id == markers.end_of_turn;
        }
        nmk_parser_end(p);
        close_text(&t);
        check(nmk_parser_ended(p, !ends) == ended, prompt, "ended with %d", nmk_parser_ended(p, !ends));
        same(prompt, &t.text, wanted);
        nmk_parser_free(p);
        nmk_ids_free(&ids);
    }
    json_object_put(root);
}

/* The pieces a model might emit, well-formed or not. */
static const char *const pieces[] = {
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    ACT,
    "<|END_ACTION|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|>",
    "<EOS_TOKEN>",
    " ",
    "\n",
    "word",
    "\xc3\xa9",
    "\xf0\x9f\x98\x80",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "\"",
    "\\",
    "\"tool_name\": \"f\"",
    "\"parameters\": {",
    "\"a\": 1",
    "null",
    "12",
    "{\"tool_name\":\"f\",\"parameters\":{\"a\":\"",
    "\"}}",
    "\"tool_call_id\":\"0\",",
};

/* Any tokens; and any other tokens of the same text tell the same. */
static void anything(void) {
    bool good = true;
    int calls = 0;
    for (int round = 0; round < 6000 && good; round++) {
        nmk_buf text = {0};
        nmk_ids one = {0}, two = {0};
        told a, b;
        for (unsigned n = chance(40); n; n--) nmk_buf_puts(&text, pieces[chance(sizeof pieces / sizeof *pieces)]);
        nmk_buf_puts(&text, "");
        int start = (int)chance(2);
        nmk_parser_options o = {.no_calls = !chance(9), .max_calls = (int)chance(3)};
        tokens_of(text.data, text.length, &one);
        random_tokens_of(text.data, &two);
        nmk_ended x = feed(start, o, &one, false, &a), y = feed(start, o, &two, false, &b);
        good = x == y && !a.empty && !b.empty && a.text.length == b.text.length &&
               (!a.text.length || !memcmp(a.text.data, b.text.data, a.text.length));
        calls += a.ids;
        if (!good)
            printf("# %s\n# %s\n# %s\n", text.data, a.text.data ? a.text.data : "", b.text.data ? b.text.data : "");
        nmk_buf_free(&a.text);
        nmk_buf_free(&b.text);
        nmk_buf_free(&text);
        nmk_ids_free(&one);
        nmk_ids_free(&two);
    }
    check(good && calls > 200, "any text, however cut into tokens, is told the same", "%d calls", calls);

    told t;
    nmk_parser *p = parser(THINKING, (nmk_parser_options){0}, &t);
    for (int i = 0; i < 300000; i++)
        nmk_parser_add(p, (int32_t)chance((unsigned)nmk_tokenizer_size(tokenizer) + 10) - 5);
    nmk_parser_end(p);
    check(!t.empty, "any tokens at all", "something said nothing, or half a character");
    nmk_parser_free(p);
    nmk_buf_free(&t.text);
}

static void long_call(void) {
    const char *head = ACT "[{\"tool_name\":\"write\",\"parameters\":{\"text\":\"";
    nmk_ids ids = {0};
    told t;
    tokens_of(head, strlen(head), &ids);
    nmk_parser *p = parser(ANSWERING, (nmk_parser_options){0}, &t);
    uint64_t start = nmk_now_ns();
    for (size_t i = 0; i < ids.count; i++) nmk_parser_add(p, ids.id[i]);
    ids.count = 0;
    tokens_of("word \\\" [ {", 11, &ids);
    for (int round = 0; round < 200000; round++)
        for (size_t i = 0; i < ids.count; i++) nmk_parser_add(p, ids.id[i]);
    nmk_parser_end(p);
    double seconds = (double)(nmk_now_ns() - start) * 1e-9;
    check(t.text.length > 2200000 && seconds < time_limit(10), "2 MB of arguments take linear time", "%zu bytes, %g s",
          t.text.length, seconds);
    nmk_parser_free(p);
    nmk_buf_free(&t.text);
    nmk_ids_free(&ids);
}

int main(void) {
    tokenizer = toy();
    if (!nmk_markers_find(&markers, tokenizer, NULL)) die("the toy has no markers");
    well_formed();
    malformed();
    cut();
    citations();
    options();
    legacy();
    golden("short",
           "R(The function add adds two numbers. It takes a and b.)A(```python\ndef add(a, b):\n    return a + b\n```)",
           STOP);
    golden("tools", "R(I call get_weather for this.)C0(get_weather)0({\"city\": \"Paris\"})E0+", CALLS);
    golden(
        "long",
        "A(```python\ndef load(self, path, default=None):\n    \"\"\"Keeps records are still best to the same path and "
        "check that a second call. If the last call is not None, it will be True if it's still\n    if "
        "path.endswith(\".\"):\n       )",
        NMK_ENDED_LENGTH);
    anything();
    long_call();
    nmk_tokenizer_free(tokenizer);
    return failures != 0;
}
