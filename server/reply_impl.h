/* Between the files of server/reply*.c: members of JSON objects, and what an API has to say of an answer.
 *
 * An answer is a list of items, and a stream the events of that list growing.  A view says both in an API's words; the
 * rest of the server does not know which it is. */
#ifndef NMK_REPLY_IMPL_H
#define NMK_REPLY_IMPL_H

#include <string.h>

#include "reply.h"

static inline void quoted(const char *s, nmk_buf *out) { nmk_reply_string(s, strlen(s), out); }

/* "," unless something has just been opened. */
static inline void comma(nmk_buf *out) {
    char last = out->length ? out->data[out->length - 1] : '{';
    if (last != '{' && last != '[') nmk_buf_puts(out, ",");
}

static inline void member(const char *key, nmk_buf *out) {
    comma(out);
    nmk_buf_printf(out, "\"%s\":", key);
}

static inline void member_text(const char *key, const char *text, size_t bytes, nmk_buf *out) {
    member(key, out);
    nmk_reply_string(text, bytes, out);
}

static inline void member_string(const char *key, const char *text, nmk_buf *out) {
    member_text(key, text, strlen(text), out);
}

static inline void member_int(const char *key, int64_t value, nmk_buf *out) {
    member(key, out);
    nmk_buf_printf(out, "%lld", (long long)value);
}

typedef struct {
    const char *id; /* what ids begin with */
    void (*error)(const nmk_api_error *e, nmk_buf *out);
    void (*whole)(const nmk_reply *r, const nmk_reply_choice *choices, int count, const nmk_usage *usage, nmk_buf *out);

    /* Of streams.  NULL where there is nothing to say.  Of an item begin comes first, then its text in parts, then end;
     * an item has all text that grow was told before, if the view keeps it. */
    bool keeps;
    void (*open)(nmk_stream *s, int choice, nmk_buf *out);
    void (*begin)(nmk_stream *s, int choice, const nmk_reply_item *item, int index, nmk_buf *out);
    void (*grow)(nmk_stream *s, int choice, const nmk_reply_item *item, int index, const char *text, size_t bytes,
                 nmk_buf *out);
    void (*end)(nmk_stream *s, int choice, const nmk_reply_item *item, int index, nmk_buf *out);
    void (*finish)(nmk_stream *s, int choice, nmk_ended ended, nmk_buf *out);
    void (*close)(nmk_stream *s, const nmk_usage *usage, nmk_buf *out);
    void (*fail)(nmk_stream *s, const nmk_api_error *e, nmk_buf *out);
} nmk_view;

extern const nmk_view nmk_view_responses, nmk_view_messages;

/* What goes with a status when nothing else is said. */
const char *nmk_reply_error_type(int status);

#endif
