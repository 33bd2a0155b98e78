/* What the server says: JSON bodies, server-sent events, error bodies, in the shapes that clients accept.
 *
 * An answer is a list of items (reasoning, text, calls), which an nmk_reply_choice holds and an nmk_stream tells as it
 * grows.  The APIs are views of it, see reply_impl.h: chat and text completions in reply.c, the others in files of
 * their own.
 *
 * A stream of chat completions keeps the order that every client measured needs: a role chunk first, then what the
 * model says, one finish chunk per choice, a usage chunk with `choices: []` if asked for, [DONE]; or an error event
 * instead of what would follow.  No stream has an event that says nothing.  Every addition to `out` is whole events.
 *
 * Text given here may hold any bytes; what is not UTF-8 goes out as U+FFFD.  No number goes out as inf or nan. */
#ifndef NMK_REPLY_H
#define NMK_REPLY_H

#include "json.h"
#include "nmk.h"
#include "tokenizer.h"
#include "util.h"

/* ---------------------------------------------------------------- errors */

/* A refusal, as {"error": {message, type, param, code}} says it.  `type` follows from the status. */
typedef struct {
    int status;
    char message[512];
    char param[128];  /* the field at fault; "": null */
    const char *code; /* for programs; NULL: null */
} nmk_api_error;

/* Fills *e (cut to fit; e may be NULL) and returns -1.  param and code may be NULL. */
int nmk_api_fail(nmk_api_error *e, int status, const char *param, const char *code, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

/* Whose words an answer is in: those of /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages. */
typedef enum { NMK_REPLY_CHAT, NMK_REPLY_TEXT, NMK_REPLY_RESPONSE, NMK_REPLY_MESSAGE } nmk_reply_kind;

void nmk_reply_error(nmk_reply_kind kind, const nmk_api_error *e, nmk_buf *out);

/* ---------------------------------------------------------------- parts */

/* A quoted JSON string. */
void nmk_reply_string(const char *text, size_t bytes, nmk_buf *out);

/* `prefix` and 24 random letters and digits, such as call_...; `id` has room for both and a NUL. */
enum { NMK_ID_CHARS = 24, NMK_ID_BYTES = 48 };
void nmk_reply_id(char id[NMK_ID_BYTES], const char *prefix);

/* The only words that clients know; with any other OpenCode repeats the request without end. */
typedef enum {
    NMK_ENDED_NOT,
    NMK_ENDED_STOP,
    NMK_ENDED_LENGTH,
    NMK_ENDED_TOOL_CALLS,
    NMK_ENDED_CONTENT_FILTER
} nmk_ended;

typedef struct {
    int prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens;
} nmk_usage;

/* One generated token and how likely it was, with the most likely ones.
 *
 * As with vLLM every generated token counts, once and in order: those of reasoning and of calls, markers, those that a
 * stop string is made of, and the stop id at the end.  So there are as many as usage.completion_tokens; only
 * include_reasoning = false takes those of the reasoning out, and a response tells those of its text alone.  A token
 * whose text is held back (a character in parts, what may begin a stop string, a citation) goes with the chunk that
 * ends its text, or with the finish chunk. */
typedef struct {
    int32_t token;
    bool first;          /* of a prompt: nothing came before it, so it has no likelihood */
    size_t text_offset;  /* characters of text before it; only /v1/completions tells it */
    nmk_logprobs likely; /* what the request asked for: `count` is 0 for the chosen one alone */
} nmk_logprob;

/* What all chunks of an answer have in common. */
typedef struct {
    nmk_reply_kind kind;
    char id[NMK_ID_BYTES];
    int64_t created;                /* Unix seconds */
    const char *model;              /* stays the caller's */
    const nmk_tokenizer *tokenizer; /* of logprobs: the text of tokens; NULL: they go by their ids */
    bool tokens_as_ids;             /* tokens of logprobs are called token_id:N */
    bool special_tokens;            /* the text has those of special tokens too */
    struct json_object *asked;      /* the request, of which a response says much again; the caller's; NULL: nothing */
    int prompt_tokens;              /* which a message says before usage is known */
} nmk_reply;

/* Mints the id, such as chatcmpl-..., and takes the time; the rest may be set afterwards. */
void nmk_reply_init(nmk_reply *r, nmk_reply_kind kind, const char *model);

/* ---------------------------------------------------------------- whole answers */

typedef enum { NMK_ITEM_REASONING, NMK_ITEM_TEXT, NMK_ITEM_CALL } nmk_item_kind;

typedef struct {
    nmk_item_kind kind;
    char id[NMK_ID_BYTES]; /* of a call: as minted */
    char *name;            /* of a call */
    int call;              /* which of the calls it is */
    nmk_buf text;          /* of a call: its arguments */
    nmk_buf logprobs;      /* of a text, where an API tells them by item: JSON objects with commas between them */
    size_t told_logprobs;  /* bytes of them that were there before the newest came */
} nmk_reply_item;

/* One choice as it grows.  Zeroed is empty. */
typedef struct {
    nmk_reply_item *item;
    int count, calls;
    nmk_ended ended;
    const char *stop; /* the stop string that ended it; the caller's; NULL: none did */
    size_t stop_bytes;
    const nmk_logprob *logprob; /* the caller's; NULL: not asked for */
    int logprob_count;
    const nmk_logprob *prompt; /* the same of the prompt's tokens */
    int prompt_count;
} nmk_reply_choice;

/* Reasoning or text; what follows of the same kind is the same item. */
void nmk_reply_choice_text(nmk_reply_choice *c, nmk_item_kind kind, const char *text, size_t bytes);
/* id: as minted; every call gets its arguments before the next item begins. */
void nmk_reply_choice_call(nmk_reply_choice *c, const char *id, const char *name);
void nmk_reply_choice_arguments(nmk_reply_choice *c, const char *text, size_t bytes);
/* Of a response: tokens whose text ends in what is the last item now.  An item of text keeps them, but for markers. */
void nmk_reply_choice_logprobs(const nmk_reply *r, nmk_reply_choice *c, const nmk_logprob *list, int count);
void nmk_reply_choice_free(nmk_reply_choice *c); /* leaves it empty */

/* Every choice has ended; of a response or message there is one. */
void nmk_reply_whole(const nmk_reply *r, const nmk_reply_choice *choices, int count, const nmk_usage *usage,
                     nmk_buf *out);

/* ---------------------------------------------------------------- streams */

typedef struct {
    nmk_reply reply;
    int count;                  /* choices */
    unsigned char *state;       /* of each choice: how far it is */
    nmk_reply_choice *said;     /* of each choice; without the texts, unless the view says them again */
    int events;                 /* so far, where they are numbered */
    const nmk_logprob *logprob; /* for the next chunk */
    int logprob_count;
    bool closed;
} nmk_stream;

void nmk_stream_init(nmk_stream *s, nmk_reply_kind kind, const char *model, int choices);
void nmk_stream_free(nmk_stream *s);

/* The role chunk of every choice (chat only): to be sent when the request was admitted. */
void nmk_stream_open(nmk_stream *s, nmk_buf *out);

/* These go out with the next chunk of this choice, whatever it is.  They have to last until then. */
void nmk_stream_logprobs(nmk_stream *s, const nmk_logprob *list, int count);

/* Content or text of a choice.  Without bytes there is nothing to say, and no chunk. */
void nmk_stream_content(nmk_stream *s, int choice, const char *text, size_t bytes, nmk_buf *out);
void nmk_stream_reasoning(nmk_stream *s, int choice, const char *text, size_t bytes, nmk_buf *out);

/* A tool call begins: id, type and name once; then its arguments as text. */
void nmk_stream_call(nmk_stream *s, int choice, const char *id, const char *name, nmk_buf *out);
void nmk_stream_arguments(nmk_stream *s, int choice, const char *text, size_t bytes, nmk_buf *out);

/* stop: the stop string that ended it, or NULL. */
void nmk_stream_finish(nmk_stream *s, int choice, nmk_ended ended, const char *stop, size_t stop_bytes, nmk_buf *out);

/* Usage (NULL: not asked for; a response and a message always have it) and the end.  Every choice has ended. */
void nmk_stream_close(nmk_stream *s, const nmk_usage *usage, nmk_buf *out);

/* The stream breaks off: an error event and the end.  Nothing may follow. */
void nmk_stream_fail(nmk_stream *s, const nmk_api_error *e, nmk_buf *out);

/* ---------------------------------------------------------------- other endpoints */

void nmk_reply_model(const char *name, int64_t created, int max_model_len, nmk_buf *out);
void nmk_reply_models(const char *const *names, int count, int64_t created, int max_model_len, nmk_buf *out);

/* The same for Anthropic's clients. */
void nmk_messages_model(const char *name, int64_t created, int max_model_len, nmk_buf *out);
void nmk_messages_models(const char *const *names, int count, int64_t created, int max_model_len, nmk_buf *out);

/* strings: also the text of each token. */
void nmk_reply_tokenize(const nmk_tokenizer *t, const nmk_ids *ids, bool strings, int max_model_len, nmk_buf *out);
void nmk_reply_detokenize(const char *text, size_t bytes, nmk_buf *out);

#endif
