#include "reply_impl.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

/* ---------------------------------------------------------------- parts */

static void escaped(const char *text, size_t bytes, nmk_buf *out) {
    size_t plain = 0, i = 0;
    if (!bytes) return;
    nmk_buf_reserve(out, bytes);
    while (i < bytes) {
        unsigned char c = (unsigned char)text[i];
        int length = c < 0x80 ? 1 : nmk_utf8_scan(text + i, bytes - i);
        if (length > 0 && c >= 0x20 && c != '"' && c != '\\' && c != 0x7f) {
            i += (size_t)length;
            continue;
        }
        nmk_buf_add(out, text + plain, i - plain);
        const char *from = "\"\\\b\f\n\r\t", *known = c ? strchr(from, c) : NULL;
        if (known)
            nmk_buf_add(out, (char[]){'\\', "\"\\bfnrt"[known - from]}, 2);
        else if (length > 0)
            nmk_buf_printf(out, "\\u%04x", c);
        else
            nmk_buf_puts(out, "\xef\xbf\xbd");
        i = length ? i + (size_t)(length < 0 ? -length : length) : bytes;
        plain = i;
    }
    nmk_buf_add(out, text + plain, i - plain);
}

void nmk_reply_string(const char *text, size_t bytes, nmk_buf *out) {
    nmk_buf_puts(out, "\"");
    escaped(text, bytes, out);
    nmk_buf_puts(out, "\"");
}

void nmk_reply_id(char id[NMK_ID_BYTES], const char *prefix) {
    static const char letters[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    unsigned char random[NMK_ID_CHARS];
    /* At most 256 bytes are never given in part, and the pool is ready long before a server runs. */
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) abort();
    size_t n = strlen(prefix);
    assert(n + NMK_ID_CHARS < NMK_ID_BYTES);
    memcpy(id, prefix, n);
    for (int i = 0; i < NMK_ID_CHARS; i++) id[n++] = letters[random[i] % 62];
    id[n] = 0;
}

static const nmk_view *view_of(nmk_reply_kind kind);

void nmk_reply_init(nmk_reply *r, nmk_reply_kind kind, const char *model) {
    *r = (nmk_reply){.kind = kind, .created = (int64_t)time(NULL), .model = model};
    nmk_reply_id(r->id, view_of(kind)->id);
}

/* ---------------------------------------------------------------- errors */

int nmk_api_fail(nmk_api_error *e, int status, const char *param, const char *code, const char *fmt, ...) {
    if (e) {
        *e = (nmk_api_error){.status = status, .code = code};
        snprintf(e->param, sizeof e->param, "%s", param ? param : "");
        va_list args;
        va_start(args, fmt);
        vsnprintf(e->message, sizeof e->message, fmt, args);
        va_end(args);
    }
    return -1;
}

const char *nmk_reply_error_type(int status) {
    return status == 401   ? "authentication_error"
           : status == 403 ? "permission_error"
           : status == 429 ? "rate_limit_error"
           : status >= 500 ? "server_error"
                           : "invalid_request_error";
}

static void write_error(const nmk_api_error *e, nmk_buf *out) {
    nmk_buf_puts(out, "{\"error\":{");
    member_string("message", e->message, out);
    member_string("type", nmk_reply_error_type(e->status), out);
    member("param", out);
    e->param[0] ? quoted(e->param, out) : nmk_buf_puts(out, "null");
    member("code", out);
    e->code ? quoted(e->code, out) : nmk_buf_puts(out, "null");
    nmk_buf_puts(out, "}}");
}

void nmk_reply_error(nmk_reply_kind kind, const nmk_api_error *e, nmk_buf *out) { view_of(kind)->error(e, out); }

/* ---------------------------------------------------------------- log-probabilities */

/* OpenAI prints -9999.0 where a token was impossible, and so do others. */
static void logprob(double value, nmk_buf *out) {
    if (!(value > -9999)) /* -inf and nan */
        nmk_buf_puts(out, "-9999.0");
    else
        nmk_buf_printf(out, "%.9g", value < 0 ? value : 0.0);
}

typedef struct {
    const char *bytes;
    size_t count;
} token_text;

/* An id without a token has no text. */
static token_text text_of(const nmk_reply *r, int32_t id) {
    token_text t = {NULL, 0};
    if (r->tokenizer) t.bytes = nmk_tokenizer_token(r->tokenizer, id, &t.count);
    return t.bytes ? t : (token_text){"", 0};
}

static bool by_id(const nmk_reply *r) { return r->tokens_as_ids || !r->tokenizer; }

/* token, logprob, bytes: the bytes are the token's own, perhaps a part of a character. */
static void chat_token(const nmk_reply *r, int32_t id, double value, nmk_buf *out) {
    token_text t = text_of(r, id);
    member("token", out);
    if (by_id(r))
        nmk_buf_printf(out, "\"token_id:%d\"", id);
    else
        nmk_reply_string(t.bytes, t.count, out);
    member("logprob", out);
    logprob(value, out);
    member("bytes", out);
    if (!r->tokenizer) {
        nmk_buf_puts(out, "null");
        return;
    }
    nmk_buf_puts(out, "[");
    for (size_t i = 0; i < t.count; i++) nmk_buf_printf(out, i ? ",%u" : "%u", (unsigned char)t.bytes[i]);
    nmk_buf_puts(out, "]");
}

/* Tokens with the most likely ones, as chat completions and responses have them: objects with commas between them.
 * text: those alone that the answer's text has. */
static void token_logprobs(const nmk_reply *r, const nmk_logprob *list, int count, bool text, nmk_buf *out) {
    for (int i = 0; i < count; i++) {
        const nmk_logprobs *l = &list[i].likely;
        if (text && r->tokenizer && !r->special_tokens && nmk_tokenizer_is_special(r->tokenizer, list[i].token))
            continue;
        comma(out);
        nmk_buf_puts(out, "{");
        chat_token(r, list[i].token, l->chosen, out);
        member("top_logprobs", out);
        nmk_buf_puts(out, "[");
        for (int k = 0; k < l->count; k++) {
            comma(out);
            nmk_buf_puts(out, "{");
            chat_token(r, l->id[k], l->logprob[k], out);
            nmk_buf_puts(out, "}");
        }
        nmk_buf_puts(out, "]}");
    }
}

static void chat_logprobs(const nmk_reply *r, const nmk_logprob *list, int count, nmk_buf *out) {
    nmk_buf_puts(out, "{\"content\":[");
    token_logprobs(r, list, count, false, out);
    nmk_buf_puts(out, "],\"refusal\":null}");
}

/* The legacy form has no `bytes`: a part of a character is spelt bytes:\xNN, as OpenAI does, so keys stay distinct. */
static void text_token(const nmk_reply *r, int32_t id, nmk_buf *out) {
    token_text t = text_of(r, id);
    if (by_id(r)) {
        nmk_buf_printf(out, "\"token_id:%d\"", id);
    } else if (nmk_utf8_valid(t.bytes, t.count)) {
        nmk_reply_string(t.bytes, t.count, out);
    } else {
        nmk_buf_puts(out, "\"bytes:");
        for (size_t i = 0; i < t.count; i++) nmk_buf_printf(out, "\\\\x%02x", (unsigned char)t.bytes[i]);
        nmk_buf_puts(out, "\"");
    }
}

/* Whether both become the same key. */
static bool same_token(const nmk_reply *r, int32_t a, int32_t b) {
    if (a == b || by_id(r)) return a == b;
    token_text x = text_of(r, a), y = text_of(r, b);
    return x.count == y.count && (!x.count || !memcmp(x.bytes, y.bytes, x.count));
}

static void text_member(const nmk_reply *r, int32_t id, double value, nmk_buf *out) {
    comma(out);
    text_token(r, id, out);
    nmk_buf_puts(out, ":");
    logprob(value, out);
}

/* The chosen token and the most likely ones; of two with one text the first, so that no key is there twice. */
static void text_top(const nmk_reply *r, const nmk_logprob *l, nmk_buf *out) {
    nmk_buf_puts(out, "{");
    text_member(r, l->token, l->likely.chosen, out);
    for (int k = 0; k < l->likely.count; k++) {
        bool seen = same_token(r, l->likely.id[k], l->token);
        for (int i = 0; i < k && !seen; i++) seen = same_token(r, l->likely.id[i], l->likely.id[k]);
        if (!seen) text_member(r, l->likely.id[k], l->likely.logprob[k], out);
    }
    nmk_buf_puts(out, "}");
}

static void text_logprobs(const nmk_reply *r, const nmk_logprob *list, int count, nmk_buf *out) {
    nmk_buf_puts(out, "{\"tokens\":[");
    for (int i = 0; i < count; i++) {
        comma(out);
        text_token(r, list[i].token, out);
    }
    nmk_buf_puts(out, "],\"token_logprobs\":[");
    for (int i = 0; i < count; i++) {
        comma(out);
        list[i].first ? nmk_buf_puts(out, "null") : logprob(list[i].likely.chosen, out);
    }
    nmk_buf_puts(out, "],\"top_logprobs\":[");
    for (int i = 0; i < count; i++) {
        comma(out);
        list[i].first ? nmk_buf_puts(out, "null") : text_top(r, &list[i], out);
    }
    nmk_buf_puts(out, "],\"text_offset\":[");
    for (int i = 0; i < count; i++) nmk_buf_printf(out, i ? ",%zu" : "%zu", list[i].text_offset);
    nmk_buf_puts(out, "]}");
}

/* As vLLM has it: by ids, with the place of each among the most likely ones where that is known. */
static void prompt_member(const nmk_reply *r, int32_t id, double value, int rank, nmk_buf *out) {
    token_text t = text_of(r, id);
    comma(out);
    nmk_buf_printf(out, "\"%d\":{\"logprob\":", id);
    logprob(value, out);
    nmk_buf_puts(out, ",\"rank\":");
    rank ? nmk_buf_printf(out, "%d", rank) : nmk_buf_puts(out, "null");
    member_text("decoded_token", t.bytes, t.count, out);
    nmk_buf_puts(out, "}");
}

static void member_prompt_logprobs(const nmk_reply *r, const nmk_reply_choice *c, nmk_buf *out) {
    if (!c->prompt) return;
    member("prompt_logprobs", out);
    nmk_buf_puts(out, "[");
    for (int i = 0; i < c->prompt_count; i++) {
        const nmk_logprobs *l = &c->prompt[i].likely;
        int rank = 0;
        comma(out);
        if (c->prompt[i].first) {
            nmk_buf_puts(out, "null");
            continue;
        }
        for (int k = 0; k < l->count && !rank; k++) rank = l->id[k] == c->prompt[i].token ? k + 1 : 0;
        nmk_buf_puts(out, "{");
        prompt_member(r, c->prompt[i].token, l->chosen, rank, out);
        for (int k = 0; k < l->count; k++)
            if (l->id[k] != c->prompt[i].token) prompt_member(r, l->id[k], l->logprob[k], k + 1, out);
        nmk_buf_puts(out, "}");
    }
    nmk_buf_puts(out, "]");
}

static void member_logprobs(const nmk_reply *r, const nmk_logprob *list, int count, nmk_buf *out) {
    member("logprobs", out);
    if (!list)
        nmk_buf_puts(out, "null");
    else if (r->kind == NMK_REPLY_CHAT)
        chat_logprobs(r, list, count, out);
    else
        text_logprobs(r, list, count, out);
}

/* ---------------------------------------------------------------- what answers and chunks share */

static void head(const nmk_reply *r, bool chunk, nmk_buf *out) {
    nmk_buf_puts(out, "{");
    member_string("id", r->id, out);
    member_string("object",
                  r->kind == NMK_REPLY_TEXT ? "text_completion"
                  : chunk                   ? "chat.completion.chunk"
                                            : "chat.completion",
                  out);
    member_int("created", r->created, out);
    member_string("model", r->model, out);
    member("choices", out);
    nmk_buf_puts(out, "[");
}

static void member_ended(nmk_ended ended, nmk_buf *out) {
    static const char *const words[] = {"null", "\"stop\"", "\"length\"", "\"tool_calls\"", "\"content_filter\""};
    member("finish_reason", out);
    nmk_buf_puts(out, words[ended]);
}

static void member_usage(const nmk_usage *u, nmk_buf *out) {
    member("usage", out);
    nmk_buf_puts(out, "{");
    member_int("prompt_tokens", u->prompt_tokens, out);
    member_int("completion_tokens", u->completion_tokens, out);
    member_int("total_tokens", (int64_t)u->prompt_tokens + u->completion_tokens, out);
    member("prompt_tokens_details", out);
    nmk_buf_printf(out, "{\"cached_tokens\":%d}", u->cached_tokens);
    member("completion_tokens_details", out);
    nmk_buf_printf(out, "{\"reasoning_tokens\":%d}}", u->reasoning_tokens);
}

/* Under both names: some clients read one, some the other, and those that read both take the first. */
static void member_reasoning(const char *text, size_t bytes, nmk_buf *out) {
    member_text("reasoning_content", text, bytes, out);
    member_text("reasoning", text, bytes, out);
}

/* ---------------------------------------------------------------- whole answers */

static nmk_reply_item *new_item(nmk_reply_choice *c, nmk_item_kind kind) {
    c->item = xrealloc(c->item, (size_t)(c->count + 1) * sizeof *c->item);
    nmk_reply_item *item = &c->item[c->count++];
    *item = (nmk_reply_item){.kind = kind, .call = c->calls};
    return item;
}

static nmk_reply_item *last_item(const nmk_reply_choice *c) { return c->count ? &c->item[c->count - 1] : NULL; }

void nmk_reply_choice_text(nmk_reply_choice *c, nmk_item_kind kind, const char *text, size_t bytes) {
    nmk_reply_item *item = last_item(c);
    assert(kind != NMK_ITEM_CALL);
    if (!item || item->kind != kind) item = new_item(c, kind);
    nmk_buf_add(&item->text, text, bytes);
}

void nmk_reply_choice_call(nmk_reply_choice *c, const char *id, const char *name) {
    nmk_reply_item *item = new_item(c, NMK_ITEM_CALL);
    item->name = xstrdup(name), c->calls++;
    snprintf(item->id, sizeof item->id, "%s", id);
}

void nmk_reply_choice_arguments(nmk_reply_choice *c, const char *text, size_t bytes) {
    assert(c->count && last_item(c)->kind == NMK_ITEM_CALL);
    nmk_buf_add(&last_item(c)->text, text, bytes);
}

void nmk_reply_choice_logprobs(const nmk_reply *r, nmk_reply_choice *c, const nmk_logprob *list, int count) {
    nmk_reply_item *item = last_item(c);
    if (!item || item->kind != NMK_ITEM_TEXT) return;
    item->told_logprobs = item->logprobs.length;
    token_logprobs(r, list, count, true, &item->logprobs);
}

void nmk_reply_choice_free(nmk_reply_choice *c) {
    for (int i = 0; i < c->count; i++) {
        free(c->item[i].name);
        nmk_buf_free(&c->item[i].text), nmk_buf_free(&c->item[i].logprobs);
    }
    free(c->item);
    *c = (nmk_reply_choice){0};
}

/* All items of a kind as one text. */
static void add_all(const nmk_reply_choice *c, nmk_item_kind kind, nmk_buf *text) {
    for (int i = 0; i < c->count; i++)
        if (c->item[i].kind == kind) nmk_buf_add(text, c->item[i].text.data, c->item[i].text.length);
}

static void message(const nmk_reply_choice *c, nmk_buf *out) {
    nmk_buf content = {0}, reasoning = {0};
    add_all(c, NMK_ITEM_TEXT, &content), add_all(c, NMK_ITEM_REASONING, &reasoning);
    nmk_buf_puts(out, "{\"role\":\"assistant\"");
    member("content", out);
    if (content.length || !c->calls)
        nmk_reply_string(content.data, content.length, out);
    else
        nmk_buf_puts(out, "null");
    if (reasoning.length) member_reasoning(reasoning.data, reasoning.length, out);
    if (c->calls) {
        member("tool_calls", out);
        nmk_buf_puts(out, "[");
        for (int i = 0; i < c->count; i++) {
            const nmk_reply_item *item = &c->item[i];
            if (item->kind != NMK_ITEM_CALL) continue;
            comma(out);
            nmk_buf_puts(out, "{");
            member_string("id", item->id, out);
            nmk_buf_puts(out, ",\"type\":\"function\",\"function\":{");
            member_string("name", item->name, out);
            member_text("arguments", item->text.data, item->text.length, out);
            nmk_buf_puts(out, "}}");
        }
        nmk_buf_puts(out, "]");
    }
    nmk_buf_puts(out, "}");
    nmk_buf_free(&content), nmk_buf_free(&reasoning);
}

static void text_member_of(const nmk_reply_choice *c, nmk_buf *out) {
    nmk_buf text = {0};
    add_all(c, NMK_ITEM_TEXT, &text);
    member_text("text", text.data, text.length, out);
    nmk_buf_free(&text);
}

static void write_whole(const nmk_reply *r, const nmk_reply_choice *choices, int count, const nmk_usage *usage,
                        nmk_buf *out) {
    head(r, false, out);
    for (int i = 0; i < count; i++) {
        const nmk_reply_choice *c = &choices[i];
        assert(c->ended != NMK_ENDED_NOT);
        comma(out);
        nmk_buf_puts(out, "{");
        member_int("index", i, out);
        if (r->kind == NMK_REPLY_CHAT) {
            member("message", out);
            message(c, out);
        } else {
            text_member_of(c, out);
        }
        member_logprobs(r, c->logprob, c->logprob_count, out);
        member_ended(c->ended, out);
        if (r->kind == NMK_REPLY_TEXT) member_prompt_logprobs(r, c, out);
        nmk_buf_puts(out, "}");
    }
    nmk_buf_puts(out, "]");
    member_usage(usage, out);
    if (r->kind == NMK_REPLY_CHAT) member_prompt_logprobs(r, choices, out); /* one prompt, whatever is said to it */
    nmk_buf_puts(out, "}");
}

void nmk_reply_whole(const nmk_reply *r, const nmk_reply_choice *choices, int count, const nmk_usage *usage,
                     nmk_buf *out) {
    view_of(r->kind)->whole(r, choices, count, usage, out);
}

/* ---------------------------------------------------------------- streams of completions */

static bool is_chat(const nmk_stream *s) { return s->reply.kind == NMK_REPLY_CHAT; }

static void chunk_begin(const nmk_stream *s, int choice, nmk_buf *out) {
    nmk_buf_puts(out, "data: ");
    head(&s->reply, true, out);
    nmk_buf_puts(out, "{");
    member_int("index", choice, out);
}

static void chunk_end(nmk_stream *s, nmk_ended ended, nmk_buf *out) {
    member_logprobs(&s->reply, s->logprob_count ? s->logprob : NULL, s->logprob_count, out);
    member_ended(ended, out);
    nmk_buf_puts(out, "}]}\n\n");
}

/* The role, before anything else. */
static void chat_open(nmk_stream *s, int choice, nmk_buf *out) {
    chunk_begin(s, choice, out);
    nmk_buf_puts(out, ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null");
    member_ended(NMK_ENDED_NOT, out);
    nmk_buf_puts(out, "}]}\n\n");
}

static void chat_begin(nmk_stream *s, int choice, const nmk_reply_item *item, int index, nmk_buf *out) {
    (void)index;
    if (item->kind != NMK_ITEM_CALL) return;
    chunk_begin(s, choice, out);
    nmk_buf_printf(out, ",\"delta\":{\"tool_calls\":[{\"index\":%d", item->call);
    member_string("id", item->id, out);
    nmk_buf_puts(out, ",\"type\":\"function\",\"function\":{");
    member_string("name", item->name, out);
    nmk_buf_puts(out, ",\"arguments\":\"\"}}]}");
    chunk_end(s, NMK_ENDED_NOT, out);
}

static void completion_grow(nmk_stream *s, int choice, const nmk_reply_item *item, int index, const char *text,
                            size_t bytes, nmk_buf *out) {
    (void)index;
    chunk_begin(s, choice, out);
    if (!is_chat(s)) {
        assert(item->kind == NMK_ITEM_TEXT);
        member_text("text", text, bytes, out);
        chunk_end(s, NMK_ENDED_NOT, out);
        return;
    }
    nmk_buf_puts(out, ",\"delta\":{");
    switch (item->kind) {
    case NMK_ITEM_REASONING: member_reasoning(text, bytes, out); break;
    case NMK_ITEM_TEXT: member_text("content", text, bytes, out); break;
    case NMK_ITEM_CALL:
        nmk_buf_printf(out, "\"tool_calls\":[{\"index\":%d,\"function\":{", item->call);
        member_text("arguments", text, bytes, out);
        nmk_buf_puts(out, "}}]");
        break;
    }
    nmk_buf_puts(out, "}");
    chunk_end(s, NMK_ENDED_NOT, out);
}

static void completion_finish(nmk_stream *s, int choice, nmk_ended ended, nmk_buf *out) {
    chunk_begin(s, choice, out);
    nmk_buf_puts(out, is_chat(s) ? ",\"delta\":{}" : ",\"text\":\"\"");
    chunk_end(s, ended, out);
}

static void completion_close(nmk_stream *s, const nmk_usage *usage, nmk_buf *out) {
    if (usage) {
        nmk_buf_puts(out, "data: ");
        head(&s->reply, true, out);
        nmk_buf_puts(out, "]");
        member_usage(usage, out);
        nmk_buf_puts(out, "}\n\n");
    }
    nmk_buf_puts(out, "data: [DONE]\n\n");
}

static void completion_fail(nmk_stream *s, const nmk_api_error *e, nmk_buf *out) {
    (void)s;
    nmk_buf_puts(out, "data: ");
    write_error(e, out);
    nmk_buf_puts(out, "\n\ndata: [DONE]\n\n");
}

static const nmk_view chat_view = {.id = "chatcmpl-",
                                   .error = write_error,
                                   .whole = write_whole,
                                   .open = chat_open,
                                   .begin = chat_begin,
                                   .grow = completion_grow,
                                   .finish = completion_finish,
                                   .close = completion_close,
                                   .fail = completion_fail};
static const nmk_view text_view = {.id = "cmpl-",
                                   .error = write_error,
                                   .whole = write_whole,
                                   .grow = completion_grow,
                                   .finish = completion_finish,
                                   .close = completion_close,
                                   .fail = completion_fail};

static const nmk_view *view_of(nmk_reply_kind kind) {
    static const nmk_view *const views[] = {
        [NMK_REPLY_CHAT] = &chat_view,
        [NMK_REPLY_TEXT] = &text_view,
        [NMK_REPLY_RESPONSE] = &nmk_view_responses,
        [NMK_REPLY_MESSAGE] = &nmk_view_messages,
    };
    return views[kind];
}

/* ---------------------------------------------------------------- streams */

enum { NEW, OPEN, ENDED }; /* state of a choice */

void nmk_stream_init(nmk_stream *s, nmk_reply_kind kind, const char *model, int choices) {
    *s = (nmk_stream){
        .count = choices, .state = xcalloc((size_t)choices, 1), .said = xcalloc((size_t)choices, sizeof *s->said)};
    nmk_reply_init(&s->reply, kind, model);
}

void nmk_stream_free(nmk_stream *s) {
    for (int i = 0; i < s->count; i++) nmk_reply_choice_free(&s->said[i]);
    free(s->state), free(s->said);
    *s = (nmk_stream){0};
}

/* Whatever comes first, the opening has gone out before it. */
static const nmk_view *opened(nmk_stream *s, int choice, nmk_buf *out) {
    const nmk_view *view = view_of(s->reply.kind);
    assert(choice >= 0 && choice < s->count && !s->closed && s->state[choice] != ENDED);
    if (s->state[choice] == NEW && view->open) view->open(s, choice, out);
    s->state[choice] = OPEN;
    return view;
}

void nmk_stream_open(nmk_stream *s, nmk_buf *out) {
    for (int i = 0; i < s->count; i++) opened(s, i, out);
}

void nmk_stream_logprobs(nmk_stream *s, const nmk_logprob *list, int count) {
    s->logprob = list, s->logprob_count = count;
}

/* The item at the end of a choice is complete. */
static void end_item(nmk_stream *s, const nmk_view *view, int choice, nmk_buf *out) {
    const nmk_reply_choice *c = &s->said[choice];
    if (c->count && view->end) view->end(s, choice, last_item(c), c->count - 1, out);
}

static void grow(nmk_stream *s, int choice, nmk_item_kind kind, const char *text, size_t bytes, nmk_buf *out) {
    nmk_reply_choice *c = &s->said[choice];
    if (!bytes) return;
    const nmk_view *view = opened(s, choice, out);
    if (!c->count || last_item(c)->kind != kind) {
        assert(kind != NMK_ITEM_CALL);
        end_item(s, view, choice, out);
        new_item(c, kind);
        if (view->begin) view->begin(s, choice, last_item(c), c->count - 1, out);
    }
    if (view->keeps) nmk_reply_choice_logprobs(&s->reply, c, s->logprob, s->logprob_count);
    view->grow(s, choice, last_item(c), c->count - 1, text, bytes, out);
    if (view->keeps) nmk_buf_add(&last_item(c)->text, text, bytes);
    s->logprob_count = 0;
}

void nmk_stream_content(nmk_stream *s, int choice, const char *text, size_t bytes, nmk_buf *out) {
    grow(s, choice, NMK_ITEM_TEXT, text, bytes, out);
}

void nmk_stream_reasoning(nmk_stream *s, int choice, const char *text, size_t bytes, nmk_buf *out) {
    assert(s->reply.kind != NMK_REPLY_TEXT);
    grow(s, choice, NMK_ITEM_REASONING, text, bytes, out);
}

void nmk_stream_call(nmk_stream *s, int choice, const char *id, const char *name, nmk_buf *out) {
    nmk_reply_choice *c = &s->said[choice];
    assert(s->reply.kind != NMK_REPLY_TEXT);
    const nmk_view *view = opened(s, choice, out);
    end_item(s, view, choice, out);
    nmk_reply_choice_call(c, id, name);
    view->begin(s, choice, last_item(c), c->count - 1, out);
    s->logprob_count = 0;
}

void nmk_stream_arguments(nmk_stream *s, int choice, const char *text, size_t bytes, nmk_buf *out) {
    grow(s, choice, NMK_ITEM_CALL, text, bytes, out);
}

void nmk_stream_finish(nmk_stream *s, int choice, nmk_ended ended, const char *stop, size_t stop_bytes, nmk_buf *out) {
    assert(ended != NMK_ENDED_NOT);
    const nmk_view *view = opened(s, choice, out);
    nmk_reply_choice *c = &s->said[choice];
    c->ended = ended, c->stop = stop, c->stop_bytes = stop_bytes;
    end_item(s, view, choice, out);
    if (view->finish) view->finish(s, choice, ended, out);
    s->logprob_count = 0;
    s->state[choice] = ENDED;
}

void nmk_stream_close(nmk_stream *s, const nmk_usage *usage, nmk_buf *out) {
    for (int i = 0; i < s->count; i++) assert(s->state[i] == ENDED);
    assert(!s->closed);
    view_of(s->reply.kind)->close(s, usage, out);
    s->closed = true;
}

void nmk_stream_fail(nmk_stream *s, const nmk_api_error *e, nmk_buf *out) {
    assert(!s->closed);
    view_of(s->reply.kind)->fail(s, e, out);
    s->closed = true;
}

/* ---------------------------------------------------------------- other endpoints */

void nmk_reply_model(const char *name, int64_t created, int max_model_len, nmk_buf *out) {
    nmk_buf_puts(out, "{");
    member_string("id", name, out);
    member_string("object", "model", out);
    member_int("created", created, out);
    member_string("owned_by", "nmkgen", out);
    member_int("max_model_len", max_model_len, out);
    nmk_buf_puts(out, "}");
}

void nmk_reply_models(const char *const *names, int count, int64_t created, int max_model_len, nmk_buf *out) {
    nmk_buf_puts(out, "{\"object\":\"list\",\"data\":[");
    for (int i = 0; i < count; i++) {
        comma(out);
        nmk_reply_model(names[i], created, max_model_len, out);
    }
    nmk_buf_puts(out, "]}");
}

void nmk_reply_tokenize(const nmk_tokenizer *t, const nmk_ids *ids, bool strings, int max_model_len, nmk_buf *out) {
    nmk_buf_printf(out, "{\"count\":%zu,\"max_model_len\":%d,\"tokens\":[", ids->count, max_model_len);
    for (size_t i = 0; i < ids->count; i++) nmk_buf_printf(out, i ? ",%d" : "%d", ids->id[i]);
    nmk_buf_puts(out, "],\"token_strs\":");
    if (strings) {
        nmk_buf_puts(out, "[");
        for (size_t i = 0; i < ids->count; i++) {
            size_t bytes = 0;
            const char *text = nmk_tokenizer_token(t, ids->id[i], &bytes);
            comma(out);
            nmk_reply_string(text ? text : "", text ? bytes : 0, out);
        }
        nmk_buf_puts(out, "]");
    } else {
        nmk_buf_puts(out, "null");
    }
    nmk_buf_puts(out, "}");
}

void nmk_reply_detokenize(const char *text, size_t bytes, nmk_buf *out) {
    nmk_buf_puts(out, "{");
    member_text("prompt", text, bytes, out);
    nmk_buf_puts(out, "}");
}
