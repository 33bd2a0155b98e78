/* What the masks let a model say in each format, read by the parser: random walks in the toy's tokenizer, its markers
 * renamed. */
#include "constraint.h"

#include "parse_helper.h"
#include "request.h"

enum { VOCAB = 4096, MOST = 1200 };

#define TOOLS                                                                                                                    \
    "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"type\":\"object\",\"properties\":{\"x\":{" \
    "\"enum\":[1,2]}},\"required\":[\"x\"]},\"strict\":true}},{\"type\":\"function\",\"function\":{\"name\":\"get_it\","         \
    "\"parameters\":{\"type\":\"object\",\"properties\":{\"s\":{\"type\":\"string\",\"maxLength\":9}},\"required\":[\"s\"]},"    \
    "\"strict\":true}}]"

static nmk_constraints *constraints;
static nmk_ids prompt;

static bool bit(const uint32_t *mask, int id) { return mask[id / 32] >> id % 32 & 1; }

/* Free text ends sooner or later. */
static int choose(const uint32_t *mask, int at) {
    int chosen = -1, closer = -1;
    unsigned seen = 0, closers = 0;
    for (int id = 0; id < VOCAB; id++) {
        size_t bytes = 0;
        const char *s = nmk_tokenizer_token(tokenizer, id, &bytes);
        if (!bit(mask, id)) continue;
        bool closes = nmk_tokenizer_is_special(tokenizer, id) || (bytes == 1 && strchr("\"}]</tool_chink>", *s)) ||
                      (at > 60 && bytes && *s == '<');
        if (!chance(++seen)) chosen = id;
        if (closes && !chance(++closers)) closer = id;
    }
    return closer >= 0 && chance(100) < (at < 30 ? 30u : 90u) ? closer : chosen;
}

/* One answer to a request, as told; false: it did not end. */
static bool answer(const nmk_api_request *q, told *t) {
    uint32_t mask[VOCAB / 32];
    nmk_masks *masks = NULL;
    nmk_api_error e = {0};
    nmk_err why = {""};
    nmk_block block = nmk_markers_open(&markers, tokenizer, prompt.id, prompt.count);
    if (nmk_constraints_find(constraints, q, block, &masks, &e) || !masks) die(e.message);
    nmk_walker *w = nmk_walker_new(masks);
    nmk_parser_options options = {.tools = q->tools, .verbatim = q->form != NMK_FORM_FREE};
    nmk_parser *p = nmk_parser_new(tokenizer, &markers, prompt.id, prompt.count, options, listen, t);
    for (int i = 0; i < MOST && !nmk_walker_ended(w); i++) {
        if (!nmk_walker_mask(w, mask, &why)) die(why.text);
        int token = choose(mask, i);
        if (!nmk_walker_take(w, token, &why)) die(why.text);
        if (!nmk_walker_ended(w)) nmk_parser_add(p, token);
    }
    bool ended = nmk_walker_ended(w);
    nmk_parser_end(p);
    close_text(t);
    nmk_buf_puts(&t->text, "");
    nmk_parser_free(p);
    nmk_walker_free(w);
    nmk_masks_unref(masks);
    return ended;
}

/* "C0(f)0({"x": 1})E0+" of `calls` calls, -1: of none but good ones. */
static int good_calls(const char *told_text) {
    int n = 0;
    while (*told_text == 'C') {
        int number, x, end = 0;
        char name[16], s[64] = "";
        if (sscanf(told_text, "C%d(%15[^)])%n", &number, name, &end) != 2 || number != n) return -1;
        told_text += end, end = 0;
        bool f = !strcmp(name, "f");
        char head[16];
        snprintf(head, sizeof head, "%d({", n);
        if (strncmp(told_text, head, strlen(head)) != 0) return -1;
        told_text += strlen(head);
        if (f && (sscanf(told_text, " \"x\": %d }%n", &x, &end) != 1 || !end || (x != 1 && x != 2))) return -1;
        if (!f) {
            while (*told_text == ' ' || *told_text == '\n' || *told_text == '\t') told_text++;
            if (strncmp(told_text, "\"s\":", 4) != 0) return -1;
            const char *close = strstr(told_text, ")E");
            if (!close) return -1;
            end = (int)(close - told_text), (void)s;
        }
        told_text += end;
        snprintf(head, sizeof head, ")E%d+", n);
        if (strncmp(told_text, head, strlen(head)) != 0) return -1;
        told_text += strlen(head), n++;
    }
    return *told_text ? -1 : n;
}

/* What is told, without the reasoning. */
static const char *after_reasoning(const told *t) {
    const char *at = t->text.data;
    if (strncmp(at, "R(", 2) != 0) return at;
    const char *end = strstr(at, ")A("), *call = strstr(at, ")C0(");
    return end && (!call || end < call) ? end + 1 : call ? call + 1 : "";
}

static void ask(const char *name, const char *fields, int rounds, bool (*good)(const char *)) {
    nmk_request_limits limits;
    nmk_api_request q;
    nmk_api_error e = {0};
    int ended = 0, wrong = 0;
    nmk_request_limits_init(&limits, VOCAB);
    char *body = xasprintf("{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],%s}", fields), *title;
    if (nmk_request_parse(&q, NMK_BODY_CHAT, body, strlen(body), &limits, &e)) die(e.message);
    for (int i = 0; i < rounds; i++) {
        told t = {.last = NMK_SAID_CALL_END};
        if (answer(&q, &t)) {
            ended++;
            if (!good(after_reasoning(&t)) && !wrong++) printf("# %s\n", t.text.data);
        }
        nmk_buf_free(&t.text);
    }
    title = xasprintf("%s (format %d)", name, markers.format);
    check(!wrong && ended * 4 > rounds, title, "%d of %d ended, %d are wrong", ended, rounds, wrong);
    nmk_request_free(&q);
    free(body), free(title);
}

static bool is_calls(const char *text) { return good_calls(text) > 0; }
static bool is_one_call(const char *text) { return good_calls(text) == 1; }
static bool is_f(const char *text) { return good_calls(text) > 0 && !strstr(text, "get_it"); }
static bool is_anything(const char *text) {
    const char *call = strstr(text, "C0(");
    while (call && strncmp(call, "C0(f)0(", 7) != 0 && strncmp(call, "C0(get_it)0(", 12) != 0)
        call = strstr(call + 1, "C0(");
    return !call || (call > text && call[-1] != ')') || good_calls(call) > 0;
}
static bool is_number(const char *text) {
    return !strncmp(text, "A(", 2) && strspn(text + 2, "0123456789") == 3 && !strcmp(text + 5, ")");
}

static void formats(const char *const names[][2], const char *chat_template, nmk_format format, const char *end,
                    const char *before) {
    tokenizer = renamed(names);
    if (!nmk_markers_find(&markers, tokenizer, chat_template) || markers.format != format) die("markers");
    const int32_t ends[] = {nmk_tokenizer_find(tokenizer, end)};
    constraints = nmk_constraints_new(tokenizer, &markers, VOCAB, ends, 1);
    tokens_of(before, strlen(before), &prompt);
    ask("calls are required", TOOLS ",\"tool_choice\":\"required\"", 12, is_calls);
    ask("one call", TOOLS ",\"tool_choice\":\"required\",\"parallel_tool_calls\":false", 12, is_one_call);
    ask("calls of a function", TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}", 12,
        is_f);
    ask("strict tools", TOOLS, 12, is_anything);
    ask("an answer of a given form", "\"guided_regex\":\"[0-9]{3}\"", 12, is_number);
    nmk_constraints_free(constraints);
    nmk_tokenizer_free(tokenizer);
    nmk_ids_free(&prompt);
}

int main(void) {
    static const char *const cohere[][2] = {{NULL, NULL}};
    static const char *const qwen[][2] = {
        {"<|END_OF_TURN_TOKEN|>", "<|im_end|>"}, {"<|START_OF_TURN_TOKEN|>", "<|im_start|>"},
        {"<|START_THINKING|>", "<think>"},       {"<|END_THINKING|>", "</think>"},
        {"<|START_ACTION|>", "<tool_call>"},     {"<|END_ACTION|>", "</tool_call>"},
        {"<|START_TEXT|>", "<|other|>"},         {NULL, NULL}};
    static const char *const text[][2] = {{"<|END_OF_TURN_TOKEN|>", "<|im_end|>"},
                                          {"<|START_OF_TURN_TOKEN|>", "<|im_start|>"},
                                          {"<|START_THINKING|>", "<|a|>"},
                                          {"<|START_TEXT|>", "<|b|>"},
                                          {NULL, NULL}};
    static const char *const llama[][2] = {{"<|START_OF_TURN_TOKEN|>", "<|start_header_id|>"},
                                           {"<|END_OF_TURN_TOKEN|>", "<|eot_id|>"},
                                           {"<|START_ACTION|>", "<|python_tag|>"},
                                           {"<|START_THINKING|>", "<|a|>"},
                                           {"<|START_TEXT|>", "<|b|>"},
                                           {NULL, NULL}};
    formats(cohere, NULL, NMK_FORMAT_COHERE, "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>");
    formats(cohere, NULL, NMK_FORMAT_COHERE, "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>");
    formats(qwen, "<tool_call>", NMK_FORMAT_HERMES, "<|im_end|>", "<|im_start|>assistant\n");
    formats(qwen, "<tool_call>", NMK_FORMAT_HERMES, "<|im_end|>", "<|im_start|>assistant\n<think>\n");
    formats(text, "<tool_call> <think> </think>", NMK_FORMAT_HERMES, "<|im_end|>", "<|im_start|>assistant\n");
    formats(llama, "<|python_tag|>", NMK_FORMAT_LLAMA3, "<|eot_id|>", "<|start_header_id|>assistant\n\n");
    return failures > 0;
}
