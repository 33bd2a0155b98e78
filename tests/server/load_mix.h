/* What clients of a load ask for: a table of good requests, each known by its number, and one of bad ones, each with
 * the status it must get. */
#ifndef NMK_TESTS_LOAD_MIX_H
#define NMK_TESTS_LOAD_MIX_H

#include "load_answer.h"

/* ---------------------------------------------------------------- good requests */

typedef struct {
    bool chat;
    bool timed;         /* one answer, and no text before its first token */
    nmk_buf open;       /* the prompt or the messages, without what closes them */
    const char *close;  /* that */
    int follows;        /* the prompt goes on after the answer to that request; -1: it stands alone */
    char *fields;       /* the body, without its closing brace */
    char *text, *usage; /* the answer it gets alone */
    nmk_buf content;    /* of its first choice */
} load_request;

/* Some share a long beginning, as conversations with one system prompt do. */
#define SHARED \
    "You are a careful assistant for programmers. Answer shortly, show code, and name the file it belongs to. "
static const char *const load_prompts[] = {
    "def is_prime",
    "What is 17 + 25?",
    "class Queue:\\n    def __init__(self):",
    "Gr\\u00fc\\u00dfe \\ud83d\\ude00 na\\u00efve",
    "The",
    SHARED "Write a function that sorts a list.",
    SHARED SHARED SHARED "What is the weather in Paris?",
    "for i in range(10):\\n\\tprint(i)\\nfor j in range(20):\\n\\tprint(j)\\nwhile True:",
};
enum { LOAD_PROMPTS = sizeof load_prompts / sizeof *load_prompts };

/* A prompt of token ids, without what closes it; every second one begins as all the others do. */
static void load_ids(nmk_buf *b, int number, int vocab) {
    int shared = number % 2 ? 80 : 0, own = 1 + (int)random_below(number % 5 == 4 ? 150 : 30);
    uint64_t saved = random_state;
    random_state = 77;
    nmk_buf_puts(b, "[");
    for (int i = 0; i < shared; i++) nmk_buf_printf(b, "%zu,", random_below((size_t)vocab));
    random_state = saved;
    for (int i = 0; i < own; i++) nmk_buf_printf(b, "%s%zu", i ? "," : "", random_below((size_t)vocab));
}

static void load_sampling(nmk_buf *b, bool chat, int i, bool ids) {
    if (i % 3 == 0)
        nmk_buf_puts(b, ",\"temperature\":0");
    else
        nmk_buf_printf(b, ",\"temperature\":%s,\"seed\":%zu", i % 3 == 1 ? "0.8" : "1.2", random_below(1000));
    static const char *const more[] = {
        ",\"top_p\":0.9",
        ",\"top_k\":20",
        NULL, /* logprobs */
        ",\"min_p\":0.05,\"top_p\":0.95",
        ",\"presence_penalty\":0.7,\"frequency_penalty\":0.3",
        ",\"repetition_penalty\":1.2,\"top_k\":50",
        ",\"logit_bias\":{\"20\":4,\"21\":-100}",
        ",\"top_p\":0.8,\"top_k\":10,\"min_p\":0.02,\"presence_penalty\":-0.5,\"repetition_penalty\":0.9",
    };
    if (i % 4 != 3) return;
    const char *part = more[i / 4 % 8];
    if (part)
        nmk_buf_puts(b, part);
    else if (!ids) /* they name tokens by their texts */
        nmk_buf_puts(b, chat ? ",\"logprobs\":true,\"top_logprobs\":3" : ",\"logprobs\":3");
}

static void load_limits(nmk_buf *b, int i, bool ids) {
    nmk_buf_printf(b, ",\"max_tokens\":%zu", 4 + random_below(i % 12 == 0 ? 120 : 44));
    if (ids || i % 5 == 2) nmk_buf_puts(b, ",\"ignore_eos\":true");
    if (i % 9 == 4) nmk_buf_puts(b, ",\"min_tokens\":6");
    if (i % 5 == 1) nmk_buf_puts(b, ids ? ",\"stop\":[\"77 \",\"9 1\"]" : ",\"stop\":[\"ion\",\"\\n\\n\",\"zz\"]");
    if (i % 10 == 6) nmk_buf_puts(b, ",\"include_stop_str_in_output\":true");
    if (i % 7 == 3) nmk_buf_puts(b, ",\"n\":2");
}

static void load_messages(nmk_buf *b, int i) {
    nmk_buf_puts(b, "[");
    if (i % 3 == 1) nmk_buf_puts(b, "{\"role\":\"system\",\"content\":\"" SHARED "\"},");
    if (i % 5 == 3)
        nmk_buf_puts(b, "{\"role\":\"user\",\"content\":\"Hello\"},"
                        "{\"role\":\"assistant\",\"content\":\"Hello. What is it?\"},");
    nmk_buf_printf(b, "{\"role\":\"user\",\"content\":\"%s\"}", load_prompts[random_below(LOAD_PROMPTS)]);
}

static void load_prompt(load_request *r, int i, bool ids, int vocab) {
    if (r->chat) {
        load_messages(&r->open, i);
        r->close = "]";
    } else if (ids || i % 10 == 7) {
        load_ids(&r->open, i, vocab);
        r->close = "]";
    } else {
        nmk_buf_printf(&r->open, "\"%s", load_prompts[random_below(LOAD_PROMPTS)]);
        r->close = "\"";
    }
}

/* What the request before it was asked and said, and more: as the next turn of a conversation. */
static void load_next_turn(load_request *r, const load_request *before, bool ids) {
    const char *answer = before->content.data ? before->content.data : "";
    struct json_object *said = json_object_new_string(answer);
    const char *text = json_object_to_json_string_ext(said, JSON_C_TO_STRING_PLAIN);
    nmk_buf_add(&r->open, before->open.data, before->open.length);
    r->close = before->close;
    if (r->chat) {
        nmk_buf_printf(&r->open, ",{\"role\":\"assistant\",\"content\":%s},", text);
        nmk_buf_puts(&r->open, "{\"role\":\"user\",\"content\":\"And now in C?\"}");
    } else if (r->close[0] == '"') {
        nmk_buf_add(&r->open, text + 1, strlen(text) - 2);
    } else if (ids) { /* the text is numbers with a space behind each, the last perhaps cut by a stop string */
        for (const char *p = answer, *end; (end = strchr(p, ' ')); p = end + 1)
            if (end > p) nmk_buf_printf(&r->open, ",%.*s", (int)(end - p), p);
    }
    json_object_put(said);
}

static void load_fields(load_request *r, int i, bool ids) {
    nmk_buf b = {0};
    bool list = !r->chat && i / 2 % 11 == 6;
    nmk_buf_printf(&b, "{\"%s\":%s%s%s", r->chat ? "messages" : "prompt", list ? "[" : "", r->open.data, r->close);
    if (list) nmk_buf_printf(&b, ",%s%s]", r->open.data, r->close);
    if (r->chat) {
        if (i / 2 % 8 == 6) nmk_buf_puts(&b, ",\"include_reasoning\":false");
        if (i / 2 % 4 == 2) nmk_buf_puts(&b, ",\"reasoning_effort\":\"none\"");
        if (i / 2 % 6 == 4)
            nmk_buf_puts(&b,
                         ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"description\":"
                         "\"Weather of a city\",\"parameters\":{\"type\":\"object\",\"properties\":{\"city\":{\"type\":"
                         "\"string\"}}}}}]");
    }
    bool echo = !r->chat && i / 2 % 11 == 5;
    if (echo) nmk_buf_puts(&b, ",\"echo\":true");
    load_limits(&b, i, ids);
    load_sampling(&b, r->chat, i, ids);
    r->timed = !echo && !list && i % 7 != 3;
    r->fields = b.data;
}

/* ids: there is no tokenizer, so prompts are token ids and there are no chats.  The last quarter follows answers of the
 * others: their fields are made when those are known. */
static void load_table(load_request *table, int count, bool ids, int vocab) {
    for (int i = 0; i < count; i++) {
        load_request *r = &table[i];
        *r = (load_request){.chat = !ids && i % 2, .follows = -1};
        if (i >= count / 4 * 3) {
            r->follows = (i - count / 4 * 3) * 2 + i % 2; /* of the same kind */
            continue;
        }
        load_prompt(r, i / 2, ids, vocab);
        load_fields(r, i, ids);
    }
}

/* Too long to be waited for: whoever asks for it leaves. */
static char *load_long(bool ids, bool chat) {
    if (ids) return xstrdup("{\"prompt\":[5,6,7],\"temperature\":0,\"ignore_eos\":true,\"max_tokens\":3000");
    if (chat)
        return xstrdup("{\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}],\"ignore_eos\":true,"
                       "\"max_tokens\":3000");
    return xstrdup("{\"prompt\":\"def is_prime\",\"temperature\":0,\"ignore_eos\":true,\"max_tokens\":3000");
}

/* ---------------------------------------------------------------- bad requests, and small ones */

typedef struct {
    const char *name;
    const char *method, *path, *body; /* method NULL: the body is all that is sent */
    int status;
    bool closes;
} load_small;

#define DEEP16 "[[[[[[[[[[[[[[[["
static const load_small load_smalls[] = {
    {"models", "GET", "/v1/models", "", 200, false},
    {"health", "GET", "/health", "", 200, false},
    {"metrics", "GET", "/metrics", "", 200, false},
    {"version", "GET", "/version", "", 200, false},
    {"no such model", "GET", "/v1/models/none", "", 404, false},
    {"no such path", "POST", "/v1/nothing", "{}", 404, false},
    {"wrong method", "GET", "/v1/completions", "", 405, false},
    {"no body", "POST", "/v1/completions", "", 400, false},
    {"half a body of JSON", "POST", "/v1/completions", "{\"prompt\":[1,2", 400, false},
    {"no JSON", "POST", "/v1/chat/completions", "hello", 400, false},
    {"not an object", "POST", "/v1/completions", "[1,2,3]", 400, false},
    {"broken UTF-8", "POST", "/v1/completions", "{\"prompt\":\"\xc3(\xff\"}", 400, false},
    {"half a surrogate", "POST", "/v1/completions", "{\"prompt\":[\"\\ud83d\"],\"temperature\":\"x\"}", 400, false},
    {"deep nesting", "POST", "/v1/completions", "{\"prompt\":" DEEP16 DEEP16 DEEP16 DEEP16 DEEP16 DEEP16 DEEP16 DEEP16,
     400, false},
    {"a wrong type", "POST", "/v1/completions", "{\"prompt\":[5],\"temperature\":\"hot\"}", 400, false},
    {"a value out of range", "POST", "/v1/completions", "{\"prompt\":[5],\"temperature\":-1}", 400, false},
    {"no tokens at all", "POST", "/v1/completions", "{\"prompt\":[5],\"max_tokens\":-3}", 400, false},
    {"too many choices", "POST", "/v1/completions", "{\"prompt\":[5],\"n\":100000}", 400, false},
    {"a token that is none", "POST", "/v1/completions", "{\"prompt\":[-7]}", 400, false},
    {"no messages", "POST", "/v1/chat/completions", "{}", 400, false},
    {"an unknown model", "POST", "/v1/completions", "{\"model\":\"gpt\",\"prompt\":[5]}", 404, false},
    {"no HTTP", NULL, "", "hello there\r\n\r\n", 400, true},
    {"HTTP/2", NULL, "", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, true},
    {"two lengths", NULL, "",
     "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n{}", 400, true},
    {"a length and chunks", NULL, "",
     "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n{}", 400,
     true},
    {"a broken chunk", NULL, "",
     "POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400, true},
    {"an oversized body", NULL, "",
     "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 99000000\r\n\r\n{\"prompt\":", 413, true},
    /* made long when the load begins */
    {"an oversized header", NULL, "oversized header", "", 431, true},
    {"a prompt that does not fit", "POST", "/v1/completions", "oversized prompt", 400, false},
};
enum { LOAD_SMALLS = sizeof load_smalls / sizeof *load_smalls };

/* context: tokens that the server's sequences may have. */
static void load_small_text(nmk_buf *out, const load_small *s, int minor, int context) {
    nmk_buf body = {0};
    if (!strcmp(s->body, "oversized prompt")) {
        nmk_buf_puts(&body, "{\"prompt\":[1");
        for (int i = 0; i < context; i++) nmk_buf_puts(&body, ",20");
        nmk_buf_puts(&body, "]}");
    } else {
        nmk_buf_puts(&body, s->body);
    }
    if (s->method)
        nmk_buf_printf(out, "%s %s HTTP/1.%d\r\nHost: h\r\nContent-Length: %zu\r\n\r\n", s->method, s->path, minor,
                       body.length);
    if (!strcmp(s->path, "oversized header")) {
        nmk_buf_puts(out, "GET /health HTTP/1.1\r\nHost: h\r\nX: ");
        for (int i = 0; i < 40000; i++) nmk_buf_puts(out, "x");
        nmk_buf_puts(out, "\r\n\r\n");
    }
    nmk_buf_add(out, body.data, body.length);
    nmk_buf_free(&body);
}

#endif
