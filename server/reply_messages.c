/* What is said at /v1/messages: a message with its content blocks, whole or as events, and errors, as Anthropic's
 * clients read them.
 *
 * An item is a block.  Reasoning is a thinking block, whose signature is empty: nothing here checks one. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "reply_impl.h"

static void write_error(const nmk_api_error *e, nmk_buf *out) {
    const char *type = e->status == 404   ? "not_found_error"
                       : e->status == 413 ? "request_too_large"
                       : e->status == 503 ? "overloaded_error"
                       : e->status >= 500 ? "api_error"
                                          : nmk_reply_error_type(e->status);
    nmk_buf_puts(out, "{\"type\":\"error\",\"error\":{");
    member_string("type", type, out);
    /* there is no field for the parameter */
    char *named = *e->param && !strstr(e->message, e->param) ? xasprintf("%s: %s", e->param, e->message) : NULL;
    member_string("message", named ? named : e->message, out);
    free(named);
    nmk_buf_puts(out, "}}");
}

/* What the cache had is not among the input. */
static void usage_members(int input, int cached, int output, nmk_buf *out) {
    nmk_buf_puts(out, "{");
    member_int("input_tokens", input - cached, out);
    nmk_buf_puts(out, ",\"cache_creation_input_tokens\":0");
    member_int("cache_read_input_tokens", cached, out);
    member_int("output_tokens", output, out);
    nmk_buf_puts(out, "}");
}

static void member_usage(const nmk_usage *u, nmk_buf *out) {
    member("usage", out);
    usage_members(u->prompt_tokens, u->cached_tokens, u->completion_tokens, out);
}

static void stop_members(const nmk_reply_choice *c, nmk_buf *out) {
    static const char *const reasons[] = {NULL, "end_turn", "max_tokens", "tool_use", "refusal"};
    member_string("stop_reason", c->stop && c->ended == NMK_ENDED_STOP ? "stop_sequence" : reasons[c->ended], out);
    member("stop_sequence", out);
    c->stop ? nmk_reply_string(c->stop, c->stop_bytes, out) : nmk_buf_puts(out, "null");
}

/* Input is an object always: arguments that broke off are none. */
static void write_input(const nmk_buf *arguments, nmk_buf *out) {
    struct json_object *v = arguments->length ? nmk_json_parse(arguments->data, arguments->length, NULL) : NULL;
    if (json_object_is_type(v, json_type_object))
        nmk_buf_add(out, arguments->data, arguments->length);
    else
        nmk_buf_puts(out, "{}");
    json_object_put(v);
}

/* empty: as a stream begins it. */
static void block(const nmk_reply_item *item, bool empty, nmk_buf *out) {
    size_t bytes = empty ? 0 : item->text.length;
    switch (item->kind) {
    case NMK_ITEM_REASONING:
        nmk_buf_puts(out, "{\"type\":\"thinking\"");
        member_text("thinking", item->text.data, bytes, out);
        nmk_buf_puts(out, ",\"signature\":\"\"");
        break;
    case NMK_ITEM_TEXT:
        nmk_buf_puts(out, "{\"type\":\"text\"");
        member_text("text", item->text.data, bytes, out);
        break;
    case NMK_ITEM_CALL:
        nmk_buf_puts(out, "{\"type\":\"tool_use\"");
        member_string("id", item->id, out);
        member_string("name", item->name, out);
        member("input", out);
        empty ? nmk_buf_puts(out, "{}") : write_input(&item->text, out);
        break;
    }
    nmk_buf_puts(out, "}");
}

static void head(const nmk_reply *r, nmk_buf *out) {
    nmk_buf_puts(out, "{");
    member_string("id", r->id, out);
    nmk_buf_puts(out, ",\"type\":\"message\",\"role\":\"assistant\"");
    member_string("model", r->model, out);
    nmk_buf_puts(out, ",\"content\":[");
}

static void write_whole(const nmk_reply *r, const nmk_reply_choice *choices, int count, const nmk_usage *usage,
                        nmk_buf *out) {
    (void)count;
    head(r, out);
    for (int i = 0; i < choices->count; i++) {
        comma(out);
        block(&choices->item[i], false, out);
    }
    nmk_buf_puts(out, "]");
    stop_members(choices, out);
    member_usage(usage, out);
    nmk_buf_puts(out, "}");
}

/* ---------------------------------------------------------------- events */

static void event_begin(const char *type, nmk_buf *out) {
    nmk_buf_printf(out, "event: %s\ndata: {\"type\":\"%s\"", type, type);
}

static void event_end(nmk_buf *out) { nmk_buf_puts(out, "}\n\n"); }

static void open_stream(nmk_stream *s, int choice, nmk_buf *out) {
    (void)choice;
    event_begin("message_start", out);
    member("message", out);
    head(&s->reply, out);
    nmk_buf_puts(out, "],\"stop_reason\":null,\"stop_sequence\":null,\"usage\":");
    usage_members(s->reply.prompt_tokens, 0, 0, out);
    nmk_buf_puts(out, "}");
    event_end(out);
}

static void begin(nmk_stream *s, int choice, const nmk_reply_item *item, int index, nmk_buf *out) {
    (void)s, (void)choice;
    event_begin("content_block_start", out);
    member_int("index", index, out);
    member("content_block", out);
    block(item, true, out);
    event_end(out);
}

static void grow(nmk_stream *s, int choice, const nmk_reply_item *item, int index, const char *text, size_t bytes,
                 nmk_buf *out) {
    static const char *const kinds[][2] = {
        {"thinking_delta", "thinking"}, {"text_delta", "text"}, {"input_json_delta", "partial_json"}};
    (void)s, (void)choice;
    event_begin("content_block_delta", out);
    member_int("index", index, out);
    nmk_buf_puts(out, ",\"delta\":{");
    member_string("type", kinds[item->kind][0], out);
    member_text(kinds[item->kind][1], text, bytes, out);
    nmk_buf_puts(out, "}");
    event_end(out);
}

static void end(nmk_stream *s, int choice, const nmk_reply_item *item, int index, nmk_buf *out) {
    (void)s, (void)choice, (void)item;
    event_begin("content_block_stop", out);
    member_int("index", index, out);
    event_end(out);
}

static void close_stream(nmk_stream *s, const nmk_usage *usage, nmk_buf *out) {
    event_begin("message_delta", out);
    nmk_buf_puts(out, ",\"delta\":{");
    stop_members(s->said, out);
    nmk_buf_puts(out, "}");
    member_usage(usage, out);
    event_end(out);
    event_begin("message_stop", out);
    event_end(out);
}

static void fail(nmk_stream *s, const nmk_api_error *e, nmk_buf *out) {
    (void)s;
    nmk_buf_puts(out, "event: error\ndata: ");
    write_error(e, out);
    nmk_buf_puts(out, "\n\n");
}

const nmk_view nmk_view_messages = {.id = "msg_",
                                    .error = write_error,
                                    .whole = write_whole,
                                    .open = open_stream,
                                    .begin = begin,
                                    .grow = grow,
                                    .end = end,
                                    .close = close_stream,
                                    .fail = fail};

/* ---------------------------------------------------------------- models */

void nmk_messages_model(const char *name, int64_t created, int max_model_len, nmk_buf *out) {
    const time_t at = (time_t)created;
    struct tm utc;
    char when[32];
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&at, &utc));
    nmk_buf_puts(out, "{");
    member_string("type", "model", out);
    member_string("id", name, out);
    member_string("display_name", name, out);
    member_string("created_at", when, out);
    member_int("max_model_len", max_model_len, out);
    nmk_buf_puts(out, "}");
}

/* All on one page. */
void nmk_messages_models(const char *const *names, int count, int64_t created, int max_model_len, nmk_buf *out) {
    nmk_buf_puts(out, "{\"data\":[");
    for (int i = 0; i < count; i++) {
        comma(out);
        nmk_messages_model(names[i], created, max_model_len, out);
    }
    nmk_buf_puts(out, "],\"has_more\":false");
    member_string("first_id", names[0], out);
    member_string("last_id", names[count - 1], out);
    nmk_buf_puts(out, "}");
}
