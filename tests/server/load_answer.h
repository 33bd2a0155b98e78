/* Answers as a load generator reads them: HTTP taken apart as the bytes come, and what the model said in one form,
 * whether it came whole or as a stream.
 *
 * Two answers to one request differ in their ids, their time and cached_tokens, and in nothing else: everything else
 * is in an account's text, so that answers are compared with strcmp. */
#ifndef NMK_TESTS_LOAD_ANSWER_H
#define NMK_TESTS_LOAD_ANSWER_H

#include "serve_helper.h"

/* ---------------------------------------------------------------- HTTP */

typedef struct {
    enum { LOAD_HEAD, LOAD_LENGTH, LOAD_CHUNK_SIZE, LOAD_CHUNK, LOAD_TO_END } state;
    int status;
    bool stream, closes;
    size_t left;  /* of the body or the chunk */
    nmk_buf body; /* of a stream: events not yet taken */
} load_answer;

__attribute__((unused)) static void load_answer_reset(load_answer *a) {
    nmk_buf body = a->body;
    *a = (load_answer){.body = body};
    a->body.length = 0;
    nmk_buf_add(&a->body, "", 0);
}

/* The bytes up to and with `end`, or 0. */
static size_t load_until(const char *data, size_t n, const char *end) {
    const char *at = memmem(data, n, end, strlen(end));
    return at ? (size_t)(at - data) + strlen(end) : 0;
}

static int load_head(load_answer *a, const char *data, size_t n) {
    char *head = xasprintf("%.*s", (int)n, data), *at;
    int rc = sscanf(head, "HTTP/1.%*d %d", &a->status) == 1 ? 0 : -1;
    a->state = LOAD_TO_END;
    a->closes = strcasestr(head, "\r\nconnection: close") || !strncmp(head, "HTTP/1.0", 8);
    a->stream = strcasestr(head, "\r\ncontent-type: text/event-stream");
    if ((at = strcasestr(head, "\r\ncontent-length:")))
        a->state = LOAD_LENGTH, a->left = strtoul(at + strlen("\r\ncontent-length:"), NULL, 10);
    else if (strcasestr(head, "\r\ntransfer-encoding: chunked"))
        a->state = LOAD_CHUNK_SIZE;
    if (a->status == 204 || a->status == 304) a->state = LOAD_LENGTH, a->left = 0;
    if (a->status == 100) a->state = LOAD_HEAD;
    free(head);
    return rc;
}

/* Takes what it can from data and says how much that was.  1: the answer is whole; 0: more has to come (with
 * LOAD_TO_END: or the connection's end); -1: it is no HTTP. */
__attribute__((unused)) static int load_answer_feed(load_answer *a, const char *data, size_t n, size_t *used) {
    size_t at = 0, more;
    int rc = 0;
    while (!rc) {
        const char *p = data + at;
        size_t rest = n - at;
        if (a->state == LOAD_HEAD) {
            if (!(more = load_until(p, rest, "\r\n\r\n"))) break;
            rc = load_head(a, p, more), at += more;
            if (!rc && a->state == LOAD_LENGTH && !a->left) rc = 1;
        } else if (a->state == LOAD_CHUNK_SIZE) {
            char *end;
            if (!(more = load_until(p, rest, "\r\n"))) break;
            a->left = strtoul(p, &end, 16) + 2; /* with the line's end behind it */
            if (end == p) {
                rc = -1;
            } else if (a->left == 2) {
                if (rest < more + 2) break;
                at += more + 2, rc = 1;
            } else {
                at += more, a->state = LOAD_CHUNK;
            }
        } else {
            size_t take = a->state == LOAD_TO_END || rest < a->left ? rest : a->left;
            size_t text = take;
            if (!take) break;
            if (a->state == LOAD_CHUNK && a->left - take < 2) text = a->left > 2 ? a->left - 2 : 0;
            if (text > take) text = take;
            nmk_buf_add(&a->body, p, text);
            at += take;
            if (a->state == LOAD_TO_END) continue;
            a->left -= take;
            if (a->left) continue;
            if (a->state == LOAD_LENGTH)
                rc = 1;
            else
                a->state = LOAD_CHUNK_SIZE;
        }
    }
    *used = at;
    return rc;
}

/* ---------------------------------------------------------------- what was said */

enum { LOAD_CHOICES = 8 };

typedef struct {
    struct {
        nmk_buf content, reasoning, calls, logprobs;
        char ended[24];
        bool begun;
    } choice[LOAD_CHOICES];
    int choices;
    char id[64], usage[128], wrong[300];
    bool done;  /* [DONE] */
    bool spoke; /* the newest event brought text */
} load_account;

__attribute__((unused)) static void load_account_free(load_account *a) {
    for (int i = 0; i < LOAD_CHOICES; i++) {
        nmk_buf_free(&a->choice[i].content), nmk_buf_free(&a->choice[i].reasoning);
        nmk_buf_free(&a->choice[i].calls), nmk_buf_free(&a->choice[i].logprobs);
    }
    *a = (load_account){0};
}

__attribute__((format(printf, 2, 3))) static void load_wrong(load_account *a, const char *fmt, ...) {
    va_list args;
    if (a->wrong[0]) return;
    va_start(args, fmt);
    vsnprintf(a->wrong, sizeof a->wrong, fmt, args);
    va_end(args);
}

static size_t load_count(struct json_object *v) {
    return json_object_is_type(v, json_type_array) ? json_object_array_length(v) : 0;
}

static void load_put_json(nmk_buf *out, struct json_object *v) {
    nmk_buf_printf(out, "%s ", v ? json_object_to_json_string_ext(v, JSON_C_TO_STRING_PLAIN) : "null");
}

/* One list of tokens in chats, four lists of the same length in completions: here one line a token. */
static void load_logprobs(nmk_buf *out, struct json_object *v) {
    static const char *const lists[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    struct json_object *content = nmk_json_get(v, "content"), *tokens = nmk_json_get(v, "tokens");
    for (size_t i = 0; i < load_count(content); i++) {
        load_put_json(out, json_object_array_get_idx(content, i));
        nmk_buf_puts(out, "\n");
    }
    for (size_t i = 0; i < load_count(tokens); i++) {
        for (size_t l = 0; l < sizeof lists / sizeof *lists; l++) {
            struct json_object *list = nmk_json_get(v, lists[l]);
            load_put_json(out, i < load_count(list) ? json_object_array_get_idx(list, i) : NULL);
        }
        nmk_buf_puts(out, "\n");
    }
}

static void load_usage(load_account *a, struct json_object *v) {
    struct json_object *u = nmk_json_get(v, "usage");
    if (!u) return;
    snprintf(a->usage, sizeof a->usage, "prompt %d, completion %d, total %d, reasoning %d", int_at(u, "prompt_tokens"),
             int_at(u, "completion_tokens"), int_at(u, "total_tokens"),
             int_at(u, "completion_tokens_details.reasoning_tokens"));
}

static void load_choice(load_account *a, struct json_object *v, bool chat, bool stream) {
    int i = int_at(v, "index");
    struct json_object *m = chat ? nmk_json_get(v, stream ? "delta" : "message") : v;
    if (i < 0 || i >= LOAD_CHOICES) {
        load_wrong(a, "choice %d", i);
        return;
    }
    const char *content = text_at(m, chat ? "content" : "text"), *reasoning = text_at(m, "reasoning_content");
    const char *ended = text_at(v, "finish_reason"), *role = text_at(m, "role");
    if (i >= a->choices) a->choices = i + 1;
    if (a->choice[i].ended[0]) load_wrong(a, "choice %d goes on after its end", i);
    if (chat && !*role == !a->choice[i].begun) load_wrong(a, "choice %d: a role at the wrong place", i);
    a->choice[i].begun = true;
    nmk_buf_puts(&a->choice[i].content, content);
    nmk_buf_puts(&a->choice[i].reasoning, reasoning);
    if (*content || *reasoning) a->spoke = true;
    struct json_object *calls = nmk_json_get(m, "tool_calls");
    for (size_t c = 0; c < load_count(calls); c++) {
        struct json_object *call = json_object_array_get_idx(calls, c);
        const char *name = text_at(call, "function.name");
        if (*name) nmk_buf_printf(&a->choice[i].calls, "\n  calls %s ", name);
        nmk_buf_puts(&a->choice[i].calls, text_at(call, "function.arguments"));
        a->spoke = true;
    }
    load_logprobs(&a->choice[i].logprobs, nmk_json_get(v, "logprobs"));
    snprintf(a->choice[i].ended, sizeof a->choice[i].ended, "%s", ended);
}

/* One chunk of a stream, or a whole body. */
static void load_object(load_account *a, const char *data, size_t bytes, bool chat, bool stream) {
    nmk_err e;
    struct json_object *v = nmk_json_parse(data, bytes, &e), *choices = nmk_json_get(v, "choices");
    const char *id = text_at(v, "id");
    a->spoke = false;
    if (!v || !json_object_is_type(choices, json_type_array) || !*id) {
        load_wrong(a, "not an answer: %.200s", data);
    } else {
        if (!a->id[0]) snprintf(a->id, sizeof a->id, "%s", id);
        if (strcmp(a->id, id)) load_wrong(a, "the id changes");
        if (a->usage[0]) load_wrong(a, "more after the usage");
        for (size_t i = 0; i < load_count(choices); i++)
            load_choice(a, json_object_array_get_idx(choices, i), chat, stream);
        load_usage(a, v);
    }
    json_object_put(v);
}

__attribute__((unused)) static void load_account_whole(load_account *a, const nmk_buf *body, bool chat) {
    load_object(a, body->data, body->length, chat, false);
    if (!a->usage[0]) load_wrong(a, "no usage");
}

/* Takes one event off the body.  false: there is no whole one. */
__attribute__((unused)) static bool load_account_event(load_account *a, const char *data, size_t bytes, size_t *used,
                                                       bool chat) {
    size_t n = load_until(data, bytes, "\n\n");
    if (!n) return false;
    *used = n;
    a->spoke = false;
    if (data[0] == ':') return true;
    if (a->done) {
        load_wrong(a, "an event after [DONE]");
    } else if (n < 8 || memcmp(data, "data: ", 6) != 0) {
        load_wrong(a, "an event without data: %.*s", (int)n, data);
    } else if (n == 14 && !memcmp(data + 6, "[DONE]", 6)) {
        a->done = true;
    } else {
        char *text = xasprintf("%.*s", (int)(n - 8), data + 6);
        load_object(a, text, n - 8, chat, true);
        free(text);
    }
    return true;
}

/* Everything but the usage. */
__attribute__((unused)) static nmk_buf load_account_text(const load_account *a) {
    nmk_buf out = {0};
    nmk_buf_puts(&out, a->choices ? "" : "no choices");
    for (int i = 0; i < a->choices; i++) {
        const nmk_buf *parts[] = {&a->choice[i].reasoning, &a->choice[i].content, &a->choice[i].calls,
                                  &a->choice[i].logprobs};
        static const char *const names[] = {"reasoning", "content", "calls", "logprobs"};
        nmk_buf_printf(&out, "choice %d, %s\n", i, a->choice[i].ended);
        for (int p = 0; p < 4; p++) nmk_buf_printf(&out, " %s: %s\n", names[p], parts[p]->data ? parts[p]->data : "");
    }
    return out;
}

#endif
