/* server/{parse,cite,stop}.c: whatever a model says, in every format, comes out the same however it is cut into tokens, as
 * whole events whose texts are UTF-8. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "parse.h"
#include "stop.h"
#include "utf8.h"

enum { FORMATS = 4 };

static nmk_tokenizer *tokenizer[FORMATS];
static nmk_markers markers[FORMATS];
static int32_t byte_token[FORMATS][256];
static bool *is_added[FORMATS], marked[FORMATS];
static struct json_object *tools;

/* The toy's tokenizer under other names of its markers. */
static const char *const renamed[FORMATS][6][2] = {{{NULL, NULL}},
                                                   {{"<|START_THINKING|>", "<think>"},
                                                    {"<|END_THINKING|>", "</think>"},
                                                    {"<|START_ACTION|>", "<tool_call>"},
                                                    {"<|END_ACTION|>", "</tool_call>"},
                                                    {NULL, NULL}},
                                                   {{"<|START_ACTION|>", "<|python_tag|>"}, {NULL, NULL}},
                                                   {{NULL, NULL}}};
static const char *const templates[FORMATS] = {NULL, "<tool_call>", "<|python_tag|>",
                                               "<think></think><tool_call></tool_call>"};

static void open_all(void) {
    nmk_err e;
    for (int f = 0; f < FORMATS; f++) {
        char *text, *path = xasprintf("%s/tokenizer.json", fuzz_folder());
        size_t bytes;
        if (nmk_file_read(&text, &bytes, "examples/nmc-toy/tokenizer.json", 64 << 20, &e)) fuzz_wrong("%s", e.text);
        for (int i = 0; renamed[f][i][0]; i++) {
            nmk_buf to = {0};
            char *from = xasprintf("\"%s\"", renamed[f][i][0]), *at = text;
            for (char *found; (found = strstr(at, from)); at = found + strlen(from)) {
                nmk_buf_add(&to, at, (size_t)(found - at));
                nmk_buf_printf(&to, "\"%s\"", renamed[f][i][1]);
            }
            nmk_buf_puts(&to, at);
            free(from), free(text);
            text = to.data;
        }
        fuzz_write("tokenizer.json", text, strlen(text));
        if (nmk_tokenizer_load(path, &tokenizer[f], &e)) fuzz_wrong("%s", e.text);
        free(text), free(path);
        marked[f] = nmk_markers_find(&markers[f], tokenizer[f], templates[f]);
        is_added[f] = xcalloc((size_t)nmk_tokenizer_size(tokenizer[f]), 1);
        for (int32_t id = nmk_tokenizer_size(tokenizer[f]) - 1; id >= 0; id--) {
            size_t n = 0;
            const char *t = nmk_tokenizer_token(tokenizer[f], id, &n);
            char *copy = xasprintf("%.*s", (int)n, t ? t : "");
            is_added[f][id] = n && nmk_tokenizer_find(tokenizer[f], copy) == id;
            free(copy);
            if (t && n == 1 && !nmk_tokenizer_is_special(tokenizer[f], id)) byte_token[f][(unsigned char)*t] = id;
        }
    }
    const char list[] =
        "[{\"type\":\"function\",\"function\":{\"name\":\"f\"}},{\"type\":\"function\",\"function\":{\"name\":\"get\"}}]";
    tools = nmk_json_parse(list, sizeof list - 1, &e);
}

/* ---------------------------------------------------------------- what was told */

typedef struct {
    nmk_buf text; /* of everything, without the ids */
    nmk_said_kind kind;
    int call;
    nmk_buf arguments;
    bool open;
} told;

static void listen(void *user, const nmk_said *s) {
    told *t = user;
    bool text = s->kind == NMK_SAID_REASONING || s->kind == NMK_SAID_ANSWER || s->kind == NMK_SAID_ARGUMENTS;
    if (text && (!s->bytes || !nmk_utf8_valid(s->text, s->bytes))) fuzz_wrong("a text that is empty or not UTF-8");
    if (!text || s->kind != t->kind) nmk_buf_printf(&t->text, "\n%d: ", s->kind);
    t->kind = s->kind;
    if (text) nmk_buf_add(&t->text, s->text, s->bytes);
    switch (s->kind) {
    case NMK_SAID_CALL:
        if (t->open || s->call != t->call || !s->name || !*s->name || !s->id || !*s->id)
            fuzz_wrong("call %d begins", s->call);
        nmk_buf_puts(&t->text, s->name);
        t->open = true, t->arguments.length = 0;
        break;
    case NMK_SAID_ARGUMENTS:
        if (!t->open || s->call != t->call) fuzz_wrong("arguments of call %d", s->call);
        nmk_buf_add(&t->arguments, s->text, s->bytes);
        break;
    case NMK_SAID_CALL_END:
        if (!t->open || s->call != t->call) fuzz_wrong("call %d ends", s->call);
        if (s->complete && !t->arguments.length) fuzz_wrong("a whole call without arguments");
        nmk_buf_puts(&t->text, s->complete ? "+" : "-");
        t->open = false, t->call++;
        break;
    default:
        if (t->open) fuzz_wrong("a text within a call");
    }
}

static nmk_ended tell(int f, nmk_parser_options options, const nmk_ids *prompt, const nmk_ids *said, told *t) {
    *t = (told){.kind = NMK_SAID_CALL_END};
    nmk_buf_puts(&t->text, "");
    nmk_parser *p =
        nmk_parser_new(tokenizer[f], marked[f] ? &markers[f] : NULL, prompt->id, prompt->count, options, listen, t);
    for (size_t i = 0; i < said->count; i++) nmk_parser_add(p, said->id[i]);
    nmk_parser_end(p);
    if (t->open) fuzz_wrong("a call stays open");
    nmk_ended ended = nmk_parser_ended(p, false);
    nmk_parser_free(p);
    nmk_buf_free(&t->arguments);
    return ended;
}

/* ---------------------------------------------------------------- inputs: a format, options, a prompt, '\n', what is said */

static void seeds(void) {
    static const char *const texts[] = {
        "00<|START_THINKING|>\nI add.<|END_THINKING|><|START_TEXT|>It is 4.<co>so</co: 0:[1,2]>\n<|END_TEXT|><|END_OF_TURN_TOKEN|>",
        "01\n<|START_ACTION|>[\n  {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"a\": [1, \"<|END_ACTION|>\"]}},"
        " {\"tool_name\": \"get\", \"parameters\": null}]<|END_ACTION|><|END_OF_TURN_TOKEN|>",
        "12<think>\nHm\n</think>\n\nWait.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"\xe6\xbc\xa2\"}}\n</tool_call>\n"
        "<tool_call>{\"name\": \"get\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call><|im_end|>",
        "23\n<|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"type\": \"function\", \"name\": \"get\", \"parameters\": {}}",
        "24\n{\"name\": \"f\", \"parameters\": {\"a\": {\"b\": \"\\u00e9\\n\"}}}",
        "35<think>\nreason</think>answer<tool_call>{\"arguments\": {}, \"name\": \"f\"}</tool_call> text </think> <tool",
        "06\n<|START_ACTION|>{\"tool_name\": \"f\", \"parameters\": {\"a\": \"line\nbreak\t\"",
        "07\n<|START_RESPONSE|>a<|END_RESPONSE|>b<|START_TEXT|><co>x<co>y</co: 1:[0]>"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) fuzz_seed_text(texts[i]);
    for (const char *const *w = (const char *const[]){"<|START_THINKING|>",
                                                      "<|END_THINKING|>",
                                                      "<|START_TEXT|>",
                                                      "<|END_TEXT|>",
                                                      "<|START_RESPONSE|>",
                                                      "<|END_RESPONSE|>",
                                                      "<|START_ACTION|>",
                                                      "<|END_ACTION|>",
                                                      "<|END_OF_TURN_TOKEN|>",
                                                      "<|START_OF_TURN_TOKEN|>",
                                                      "<think>",
                                                      "</think>",
                                                      "<tool_call>",
                                                      "</tool_call>",
                                                      "<|python_tag|>",
                                                      "<co>",
                                                      "</co: 0:[1]>",
                                                      "\"name\": ",
                                                      "\"tool_name\": ",
                                                      "\"arguments\": ",
                                                      "\"parameters\": ",
                                                      "{\"name\": \"f\", \"arguments\": {",
                                                      "null",
                                                      "\\\"",
                                                      "\\u0000",
                                                      "\\ud83d",
                                                      "\"tool_call_id\": \"0\"",
                                                      "; ",
                                                      "},",
                                                      "]",
                                                      "\xff",
                                                      NULL};
         *w; w++)
        fuzz_word(*w);
}

static void encode(int f, const char *text, size_t bytes, nmk_ids *ids) {
    nmk_err e;
    if (nmk_tokenizer_encode(tokenizer[f], text, bytes, NMK_PARSE_SPECIAL, ids, &e)) fuzz_wrong("%s", e.text);
}

static void run(const char *data, size_t bytes) {
    if (bytes < 2) return;
    int f = data[0] & 3, flags = data[1];
    const char *prompt = data + 2, *line = memchr(prompt, '\n', bytes - 2), *said = line ? line + 1 : prompt;
    size_t said_bytes = (size_t)(data + bytes - said);
    nmk_parser_options options = {.no_calls = flags & 8,
                                  .max_calls = flags & 16 ? 1 : 0,
                                  .tools = flags & 1 ? NULL : tools,
                                  .verbatim = flags & 2,
                                  .show_special = flags & 4};
    nmk_ids before = {0}, whole = {0}, cut = {0};
    told a, b;
    if (line) encode(f, prompt, (size_t)(line - prompt), &before);
    encode(f, said, said_bytes, &whole);
    for (size_t i = 0; i < whole.count; i++) {
        size_t n;
        const char *t = nmk_tokenizer_token(tokenizer[f], whole.id[i], &n);
        if (is_added[f][whole.id[i]])
            nmk_ids_add(&cut, whole.id[i]);
        else
            for (size_t k = 0; k < n; k++) nmk_ids_add(&cut, byte_token[f][(unsigned char)t[k]]);
    }
    nmk_ended x = tell(f, options, &before, &whole, &a), y = tell(f, options, &before, &cut, &b);
    if (x != y || a.text.length != b.text.length || memcmp(a.text.data, b.text.data, a.text.length))
        fuzz_wrong("cut otherwise (%d, %d): <%s> and <%s>", x, y, a.text.data, b.text.data);
    nmk_buf_free(&a.text), nmk_buf_free(&b.text);

    /* Stop strings: the prompt is three of them. */
    size_t third = line ? (size_t)(line - prompt) / 3 : 0;
    if (third && nmk_utf8_valid(said, said_bytes)) {
        const nmk_text strings[3] = {{prompt, third}, {prompt + third, third}, {prompt + 2 * third, third}};
        nmk_buf out[2] = {{0}};
        int met[2];
        for (int i = 0; i < 2; i++) {
            nmk_stop *s = nmk_stop_new(strings, 3, flags & 1);
            nmk_buf_puts(&out[i], "");
            for (size_t at = 0, n; at < said_bytes; at += n) {
                n = i ? (size_t)nmk_utf8_scan(said + at, said_bytes - at) : said_bytes;
                if (nmk_stop_add(s, said + at, n, true, &out[i])) break;
            }
            met[i] = nmk_stop_met(s);
            if (met[i] < 0) nmk_stop_end(s, &out[i]);
            nmk_stop_free(s);
        }
        if (met[0] != met[1] || out[0].length != out[1].length || memcmp(out[0].data, out[1].data, out[0].length))
            fuzz_wrong("stopped otherwise (%d, %d): <%s> and <%s>", met[0], met[1], out[0].data, out[1].data);
        nmk_buf_free(&out[0]), nmk_buf_free(&out[1]);
    }
    nmk_ids_free(&before), nmk_ids_free(&whole), nmk_ids_free(&cut);
}

const fuzz_target fuzz_parse = {"parse", seeds, open_all, run, 16 << 10, 0};
