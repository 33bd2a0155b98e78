/* server/request*.c, constraint.c, and what they call: bodies of every endpoint.  A refusal has a status and a message.
 * What is taken becomes a prompt by the toy's template, and its masks, if it has any, are walked. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "constraint.h"
#include "request.h"
#include "template.h"
#include "utf8.h"

enum { VOCAB = 4096, STEPS = 40 };

static nmk_tokenizer *tokenizer;
static nmk_markers markers;
static nmk_constraints *constraints;
static nmk_template *template;
static nmk_request_limits limits;

static const nmk_template_limits small = {
    .memory_bytes = 64 << 20, .output_bytes = 4 << 20, .instructions = 3000000, .time_ns = 60000000000};

static void open_all(void) {
    nmk_err e;
    const int32_t end = 0;
    if (nmk_tokenizer_load("examples/nmc-toy", &tokenizer, &e) ||
        nmk_template_load("examples/nmc-toy", &small, &template, &e))
        fuzz_wrong("%s", e.text);
    nmk_markers_find(&markers, tokenizer, nmk_template_source(template));
    constraints = nmk_constraints_new(tokenizer, &markers, VOCAB, &end, 1);
    nmk_request_limits_init(&limits, VOCAB);
    limits.kept = nmk_kept_new(1 << 20);
    nmk_buf input = {0}, body = {0};
    nmk_buf_puts(&input, "[{\"type\":\"message\",\"role\":\"user\",\"content\":\"Hi\"}]");
    nmk_buf_puts(
        &body,
        "{\"id\":\"resp_1\",\"output\":[{\"type\":\"message\",\"id\":\"msg_1\",\"role\":\"assistant\",\"content\":[{\"type\":"
        "\"output_text\",\"text\":\"Hello\"}]}]}");
    nmk_kept_add(limits.kept, 0, "resp_1", NULL, &input, &body);
    nmk_buf_free(&input), nmk_buf_free(&body);
}

/* The first letter says whose body it is. */
static const char kinds[] = "CTRMNKD";
static const nmk_body bodies[] = {NMK_BODY_CHAT,  NMK_BODY_COMPLETION, NMK_BODY_RESPONSE,  NMK_BODY_MESSAGE,
                                  NMK_BODY_COUNT, NMK_BODY_TOKENIZE,   NMK_BODY_DETOKENIZE};

#define TOOL                                                                                                                        \
    "{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"F\",\"parameters\":{\"type\":\"object\",\"properties\":" \
    "{\"x\":{\"enum\":[1,2]}},\"required\":[\"x\"]},\"strict\":true}}"

static void seeds(void) {
    static const char *const texts[] = {
        "C{\"model\":\"toy\",\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"Hi\"}]},"
        "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"a\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"x\\\":1}\"}}]},"
        "{\"role\":\"tool\",\"tool_call_id\":\"a\",\"content\":\"2\"}],\"tools\":[" TOOL
        "],\"tool_choice\":\"required\",\"parallel_tool_calls\":false}",
        "C{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"temperature\":0.5,\"top_p\":0.9,\"top_k\":40,\"min_p\":0.1,\"seed\":-1,\"n\":2,"
        "\"stop\":[\"a\",\"bc\"],\"stop_token_ids\":[1,2],\"logit_bias\":{\"5\":-100,\"7\":1.5},\"logprobs\":true,\"top_logprobs\":5,\"max_tokens\":9,"
        "\"min_tokens\":1,\"stream\":true,\"stream_options\":{\"include_usage\":true},\"presence_penalty\":1,\"repetition_penalty\":1.1}",
        "C{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"n\",\"strict\":true,"
        "\"schema\":{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":[\"a\"],\"additionalProperties\":false}}}}",
        "C{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"structured_outputs\":{\"regex\":\"a+|b{2,4}\"},\"reasoning_effort\":\"low\","
        "\"chat_template_kwargs\":{\"a\":1},\"documents\":[{\"title\":\"t\",\"text\":\"x\"}],\"cache_salt\":\"s\",\"thinking_token_budget\":5}",
        "C{\"messages\":[{\"role\":\"assistant\",\"content\":\"Hi\"}],\"continue_final_message\":true,\"add_generation_prompt\":false,"
        "\"guided_choice\":[\"yes\",\"no\"],\"structured_outputs\":{\"choice\":[\"a\",\"b\"]}}",
        "T{\"prompt\":[[1,2,3],[4]],\"echo\":true,\"logprobs\":3,\"max_tokens\":0,\"best_of\":1,\"prompt_logprobs\":2}",
        "T{\"prompt\":[\"a\",\"b\"],\"structured_outputs\":{\"grammar\":\"root ::= \\\"a\\\" | [0-9]{2}\"},\"skip_special_tokens\":false}",
        "R{\"input\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_text\",\"text\":\"Hi\"}]},{\"type\":\"function_call\",\"call_id\":\"c\",\"name\":\"f\","
        "\"arguments\":\"{}\"},{\"type\":\"function_call_output\",\"call_id\":\"c\",\"output\":\"3\"},{\"type\":\"item_reference\",\"id\":\"msg_1\"},"
        "{\"type\":\"reasoning\",\"id\":\"r\",\"summary\":[],\"content\":[{\"type\":\"reasoning_text\",\"text\":\"Hm\"}]}],\"instructions\":\"I\","
        "\"previous_response_id\":\"resp_1\",\"store\":false,\"tools\":[{\"type\":\"function\",\"name\":\"f\",\"parameters\":{\"type\":\"object\"}}],"
        "\"tool_choice\":{\"type\":\"function\",\"name\":\"f\"},\"text\":{\"format\":{\"type\":\"json_object\"}},\"reasoning\":{\"effort\":\"high\"},"
        "\"include\":[\"reasoning.encrypted_content\"],\"truncation\":\"auto\",\"max_output_tokens\":20}",
        "R{\"input\":\"Hi\",\"stream\":true}",
        "M{\"model\":\"toy\",\"max_tokens\":9,\"system\":[{\"type\":\"text\",\"text\":\"S\"}],\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"},"
        "{\"role\":\"assistant\",\"content\":[{\"type\":\"thinking\",\"thinking\":\"Hm\",\"signature\":\"\"},{\"type\":\"text\",\"text\":\"x\"},"
        "{\"type\":\"tool_use\",\"id\":\"t\",\"name\":\"f\",\"input\":{\"x\":1}}]},{\"role\":\"user\",\"content\":[{\"type\":\"tool_result\",\"tool_use_id\":\"t\","
        "\"content\":[{\"type\":\"text\",\"text\":\"3\"}],\"is_error\":true}]}],\"tools\":[{\"name\":\"f\",\"input_schema\":{\"type\":\"object\"}}],"
        "\"tool_choice\":{\"type\":\"any\"},\"thinking\":{\"type\":\"enabled\",\"budget_tokens\":1024},\"stop_sequences\":[\"z\"]}",
        "N{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}",
        "K{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"return_token_strs\":true,\"add_special_tokens\":true}",
        "K{\"prompt\":\"Hi \\u0000\\ud83d\\ude00\"}",
        "D{\"tokens\":[1,2,4095]}"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) fuzz_seed_text(texts[i]);
    fuzz_words_of("server/request*.c");
    fuzz_words_of("server/schema.c");
    for (const char *const *w =
             (const char *const[]){"null", "true", "false", "[]", "{}", "\"\"", "\"\\u0000\"", "1e999", "-1", TOOL,
                                   "\"resp_1\"", "\"msg_1\"", "{\"role\":\"user\",\"content\":\"Hi\"}", NULL};
         *w; w++)
        fuzz_word(*w);
}

static void walk(nmk_masks *m) {
    uint32_t mask[VOCAB / 32];
    nmk_err e = {""};
    nmk_walker *w = nmk_walker_new(m);
    for (int i = 0; i < STEPS && !nmk_walker_ended(w); i++) {
        int chosen = -1;
        uint32_t count = 0;
        if (!nmk_walker_mask(w, mask, &e)) {
            if (!strstr(e.text, "too many")) fuzz_wrong("a dead end: %s", e.text);
            break;
        }
        for (int id = 0; id < VOCAB; id++)
            if (mask[id / 32] >> id % 32 & 1 && !fuzz_below(++count)) chosen = id;
        if (chosen < 0 || !nmk_walker_take(w, chosen, &e)) fuzz_wrong("token %d: %s", chosen, e.text);
    }
    nmk_walker_free(w);
}

static void check_error(const nmk_api_error *e) {
    if (e->status < 400 || e->status > 499 || !*e->message)
        fuzz_wrong("refused with status %d and <%s>", e->status, e->message);
    if (!nmk_utf8_valid(e->message, strlen(e->message)) || !nmk_utf8_valid(e->param, strlen(e->param)))
        fuzz_wrong("a message that is not UTF-8");
    fuzz_feature(e->message);
}

static void run(const char *data, size_t bytes) {
    const char *kind = bytes && data[0] ? strchr(kinds, data[0]) : NULL;
    if (!kind) return;
    nmk_api_request r;
    nmk_api_error e = {0};
    if (nmk_request_parse(&r, bodies[kind - kinds], data + 1, bytes - 1, &limits, &e)) {
        check_error(&e);
        if (r.root) fuzz_wrong("refused, and not empty");
        return;
    }
    const nmk_sampling *s = &r.sampling;
    if (!(s->temperature >= 0) || !(s->top_p >= 0 && s->top_p <= 1) || s->top_k < 0 || s->n < 1 || s->max_tokens < 0)
        fuzz_wrong("sampling out of range");
    nmk_ids prompt = {0};
    nmk_buf text = {0};
    nmk_err why = {""};
    if (r.messages) {
        nmk_template_input in = {.messages = r.messages,
                                 .tools = r.tools,
                                 .kwargs = r.chat_template_kwargs,
                                 .add_generation_prompt = r.add_generation_prompt,
                                 .bos_token = "<s>",
                                 .now_s = 1700000000};
        if (nmk_template_render(template, &in, &text, &why)) {
            if (!*why.text || text.length) fuzz_wrong("refused without a message");
            fuzz_feature(why.text);
        } else if (nmk_tokenizer_encode(tokenizer, text.data, text.length, NMK_PARSE_SPECIAL, &prompt, &why)) {
            fuzz_feature(why.text);
        }
    }
    for (int i = 0; i < r.prompt_count; i++)
        for (size_t k = 0; k < r.prompt[i].ids.count; k++)
            if (r.prompt[i].ids.id[k] < 0 || r.prompt[i].ids.id[k] >= VOCAB)
                fuzz_wrong("a prompt's token %d", r.prompt[i].ids.id[k]);
    nmk_masks *masks = NULL;
    if (nmk_constraints_find(constraints, &r, nmk_markers_open(&markers, tokenizer, prompt.id, prompt.count), &masks,
                             &e))
        check_error(&e);
    else if (masks)
        walk(masks);
    if (nmk_request_fit(&r, prompt.count, 512, &e) < 0) check_error(&e);
    nmk_masks_unref(masks);
    nmk_ids_free(&prompt), nmk_buf_free(&text);
    nmk_request_free(&r);
}

const fuzz_target fuzz_request = {"request", seeds, open_all, run, 8 << 10, 2000};
