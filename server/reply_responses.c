/* What is said at /v1/responses: a response with its output items, whole or as events.
 *
 * The events are those that OpenAI's clients put together again: each item is added empty, its part too, then come
 * deltas, then everything once more as done.  Reasoning goes out as it is, as reasoning_text; nobody summarises it.
 * Ids of items follow from the response's, so that the same item has one id in every event and when it is kept. */
#include <stdio.h>

#include "reply_impl.h"

/* ---------------------------------------------------------------- items */

static void item_id(const nmk_reply *r, nmk_item_kind kind, int index, char id[NMK_ID_BYTES + 16]) {
    static const char *const prefix[] = {"rs", "msg", "fc"};
    const char *own = strchr(r->id, '_');
    snprintf(id, NMK_ID_BYTES + 16, "%s_%s%d", prefix[kind], own ? own + 1 : r->id, index);
}

/* Those from a byte on; a comma before them goes. */
static void member_logprobs(const nmk_buf *logprobs, size_t from, nmk_buf *out) {
    if (from > 0 && from < logprobs->length) from++;
    member("logprobs", out);
    nmk_buf_puts(out, "[");
    if (from < logprobs->length) nmk_buf_add(out, logprobs->data + from, logprobs->length - from);
    nmk_buf_puts(out, "]");
}

static void part(nmk_item_kind kind, const nmk_buf *text, const nmk_buf *logprobs, nmk_buf *out) {
    nmk_buf_puts(out, "{");
    member_string("type", kind == NMK_ITEM_TEXT ? "output_text" : "reasoning_text", out);
    member_text("text", text->data, text->length, out);
    if (kind == NMK_ITEM_TEXT) {
        nmk_buf_puts(out, ",\"annotations\":[]");
        member_logprobs(logprobs, 0, out);
    }
    nmk_buf_puts(out, "}");
}

/* status: in_progress is without its text. */
static void write_item(const nmk_reply *r, const nmk_reply_item *item, int index, const char *status, nmk_buf *out) {
    bool empty = !strcmp(status, "in_progress");
    char id[NMK_ID_BYTES + 16];
    item_id(r, item->kind, index, id);
    nmk_buf_puts(out, "{");
    member_string("id", id, out);
    switch (item->kind) {
    case NMK_ITEM_REASONING: nmk_buf_puts(out, ",\"type\":\"reasoning\",\"summary\":[]"); break;
    case NMK_ITEM_TEXT: nmk_buf_puts(out, ",\"type\":\"message\",\"role\":\"assistant\""); break;
    case NMK_ITEM_CALL:
        member_string("type", "function_call", out);
        member_string("call_id", item->id, out);
        member_string("name", item->name, out);
        member_text("arguments", item->text.data, empty ? 0 : item->text.length, out);
        break;
    }
    if (item->kind != NMK_ITEM_CALL) {
        nmk_buf_puts(out, ",\"content\":[");
        if (!empty) part(item->kind, &item->text, &item->logprobs, out);
        nmk_buf_puts(out, "]");
    }
    member_string("status", status, out);
    nmk_buf_puts(out, "}");
}

/* Only the last item may have been cut. */
static const char *item_status(const nmk_reply_choice *c, int index, bool cut) {
    return cut && index == c->count - 1 ? "incomplete" : "completed";
}

/* ---------------------------------------------------------------- the response */

/* A field of the request once more, or what it is when nothing was said. */
static void again(const nmk_reply *r, const char *key, const char *otherwise, nmk_buf *out) {
    struct json_object *v = nmk_json_get(r->asked, key);
    member(key, out);
    nmk_buf_puts(out, v ? json_object_to_json_string_ext(v, JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE)
                        : otherwise);
}

static void member_usage(const nmk_usage *u, nmk_buf *out) {
    member("usage", out);
    if (!u) {
        nmk_buf_puts(out, "null");
        return;
    }
    nmk_buf_puts(out, "{");
    member_int("input_tokens", u->prompt_tokens, out);
    nmk_buf_printf(out, ",\"input_tokens_details\":{\"cached_tokens\":%d}", u->cached_tokens);
    member_int("output_tokens", u->completion_tokens, out);
    nmk_buf_printf(out, ",\"output_tokens_details\":{\"reasoning_tokens\":%d}", u->reasoning_tokens);
    member_int("total_tokens", (int64_t)u->prompt_tokens + u->completion_tokens, out);
    nmk_buf_puts(out, "}");
}

/* c NULL: nothing was said yet.  e: why it failed, or NULL. */
static void response(const nmk_reply *r, const nmk_reply_choice *c, const char *status, const nmk_usage *usage,
                     const nmk_api_error *e, nmk_buf *out) {
    nmk_buf_puts(out, "{");
    member_string("id", r->id, out);
    nmk_buf_puts(out, ",\"object\":\"response\"");
    member_int("created_at", r->created, out);
    member_string("status", status, out);
    nmk_buf_puts(out, ",\"background\":false,\"error\":");
    if (e) {
        nmk_buf_puts(out, "{");
        member_string("code", e->status < 500 ? "invalid_prompt" : "server_error", out);
        member_string("message", e->message, out);
        nmk_buf_puts(out, "}");
    } else {
        nmk_buf_puts(out, "null");
    }
    nmk_buf_puts(out, ",\"incomplete_details\":");
    nmk_buf_puts(out, strcmp(status, "incomplete") != 0 ? "null" : "{\"reason\":\"max_output_tokens\"}");
    again(r, "instructions", "null", out);
    again(r, "max_output_tokens", "null", out);
    member_string("model", r->model, out);
    nmk_buf_puts(out, ",\"output\":[");
    for (int i = 0; c && i < c->count; i++) {
        comma(out);
        write_item(r, &c->item[i], i, item_status(c, i, strcmp(status, "completed") != 0), out);
    }
    nmk_buf_puts(out, "]");
    again(r, "parallel_tool_calls", "true", out);
    again(r, "previous_response_id", "null", out);
    again(r, "reasoning", "{\"effort\":null,\"summary\":null}", out);
    again(r, "store", "true", out);
    again(r, "temperature", "null", out);
    again(r, "text", "{\"format\":{\"type\":\"text\"}}", out);
    again(r, "tool_choice", "\"auto\"", out);
    again(r, "tools", "[]", out);
    again(r, "top_logprobs", "0", out);
    again(r, "top_p", "null", out);
    nmk_buf_puts(out, ",\"truncation\":\"disabled\"");
    member_usage(usage, out);
    again(r, "user", "null", out);
    again(r, "metadata", "{}", out);
    nmk_buf_puts(out, "}");
}

static const char *ended_status(nmk_ended ended) { return ended == NMK_ENDED_LENGTH ? "incomplete" : "completed"; }

static void write_whole(const nmk_reply *r, const nmk_reply_choice *choices, int count, const nmk_usage *usage,
                        nmk_buf *out) {
    (void)count;
    response(r, choices, ended_status(choices->ended), usage, NULL, out);
}

/* ---------------------------------------------------------------- events */

static void event_begin(nmk_stream *s, const char *type, nmk_buf *out) {
    nmk_buf_printf(out, "event: %s\ndata: {\"type\":\"%s\",\"sequence_number\":%d", type, type, s->events++);
}

static void event_end(nmk_buf *out) { nmk_buf_puts(out, "}\n\n"); }

static void response_event(nmk_stream *s, const char *type, const char *status, const nmk_reply_choice *c,
                           const nmk_usage *usage, const nmk_api_error *e, nmk_buf *out) {
    event_begin(s, type, out);
    member("response", out);
    response(&s->reply, c, status, usage, e, out);
    event_end(out);
}

static void item_event(nmk_stream *s, const char *type, const nmk_reply_item *item, int index, const char *status,
                       nmk_buf *out) {
    event_begin(s, type, out);
    member_int("output_index", index, out);
    member("item", out);
    write_item(&s->reply, item, index, status, out);
    event_end(out);
}

/* An event of an item, or of its part; it is open for what the event has of its own. */
static void within_begin(nmk_stream *s, const char *type, const nmk_reply_item *item, int index, nmk_buf *out) {
    char id[NMK_ID_BYTES + 16];
    item_id(&s->reply, item->kind, index, id);
    event_begin(s, type, out);
    member_string("item_id", id, out);
    member_int("output_index", index, out);
    if (item->kind != NMK_ITEM_CALL) member_int("content_index", 0, out);
}

static void open_stream(nmk_stream *s, int choice, nmk_buf *out) {
    (void)choice;
    response_event(s, "response.created", "in_progress", NULL, NULL, NULL, out);
    response_event(s, "response.in_progress", "in_progress", NULL, NULL, NULL, out);
}

static void begin(nmk_stream *s, int choice, const nmk_reply_item *item, int index, nmk_buf *out) {
    static const nmk_buf nothing;
    (void)choice;
    item_event(s, "response.output_item.added", item, index, "in_progress", out);
    if (item->kind == NMK_ITEM_CALL) return;
    within_begin(s, "response.content_part.added", item, index, out);
    member("part", out);
    part(item->kind, &nothing, &nothing, out);
    event_end(out);
}

static void grow(nmk_stream *s, int choice, const nmk_reply_item *item, int index, const char *text, size_t bytes,
                 nmk_buf *out) {
    static const char *const types[] = {"response.reasoning_text.delta", "response.output_text.delta",
                                        "response.function_call_arguments.delta"};
    (void)choice;
    within_begin(s, types[item->kind], item, index, out);
    member_text("delta", text, bytes, out);
    if (item->kind == NMK_ITEM_TEXT) member_logprobs(&item->logprobs, item->told_logprobs, out);
    event_end(out);
}

static void end(nmk_stream *s, int choice, const nmk_reply_item *item, int index, nmk_buf *out) {
    static const char *const types[] = {"response.reasoning_text.done", "response.output_text.done",
                                        "response.function_call_arguments.done"};
    bool call = item->kind == NMK_ITEM_CALL;
    within_begin(s, types[item->kind], item, index, out);
    if (call) member_string("name", item->name, out);
    member_text(call ? "arguments" : "text", item->text.data, item->text.length, out);
    if (item->kind == NMK_ITEM_TEXT) member_logprobs(&item->logprobs, 0, out);
    event_end(out);
    if (!call) {
        within_begin(s, "response.content_part.done", item, index, out);
        member("part", out);
        part(item->kind, &item->text, &item->logprobs, out);
        event_end(out);
    }
    item_event(s, "response.output_item.done", item, index,
               item_status(&s->said[choice], index, s->said[choice].ended == NMK_ENDED_LENGTH), out);
}

static void close_stream(nmk_stream *s, const nmk_usage *usage, nmk_buf *out) {
    const char *status = ended_status(s->said->ended);
    char type[32];
    snprintf(type, sizeof type, "response.%s", status);
    response_event(s, type, status, s->said, usage, NULL, out);
}

static void write_error(const nmk_api_error *e, nmk_buf *out) { nmk_reply_error(NMK_REPLY_CHAT, e, out); }

static void fail(nmk_stream *s, const nmk_api_error *e, nmk_buf *out) {
    event_begin(s, "error", out);
    member_string("code", e->code ? e->code : nmk_reply_error_type(e->status), out);
    member_string("message", e->message, out);
    nmk_buf_puts(out, ",\"param\":null");
    event_end(out);
    response_event(s, "response.failed", "failed", s->said, NULL, e, out);
}

const nmk_view nmk_view_responses = {.id = "resp_",
                                     .error = write_error,
                                     .whole = write_whole,
                                     .keeps = true,
                                     .open = open_stream,
                                     .begin = begin,
                                     .grow = grow,
                                     .end = end,
                                     .close = close_stream,
                                     .fail = fail};
