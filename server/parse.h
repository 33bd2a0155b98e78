/* What the model says, token by token, taken apart: reasoning, answer, tool calls.
 *
 * There are three formats; the tokenizer and the chat template say which one a model has.  Cohere's "cmd4": after a
 * prompt that opened the thinking block,
 *
 *     reasoning <|END_THINKING|> <|START_TEXT|> answer <|END_TEXT|> <|START_ACTION|> [calls] <|END_ACTION|>
 *     call = {"tool_call_id": "0", "tool_name": "f", "parameters": {...}}
 *
 * That of Hermes and Qwen:
 *
 *     <think> reasoning </think> answer <tool_call> call </tool_call> <tool_call> call </tool_call>
 *     call = {"name": "f", "arguments": {...}}
 *
 * That of Llama 3: calls after <|python_tag|>, or as all that is said; several are parted by ";".  Without the tag JSON
 * is a call only if it begins with the name of a tool that was given, as an answer may be JSON too.
 *
 *     call = {"name": "f", "parameters": {...}}, perhaps with "type": "function" before it
 *
 * Markers are told by token id; by text only those that the template has and the tokenizer does not.  A model without
 * any only answers.
 *
 * Whatever arrives, nothing is refused, and what comes out does not depend on how it was cut into calls:
 *   - A marker that opens a block closes the one before; closers of what is not open mean nothing.
 *   - Text outside of blocks is answer, unless it is blank.  Reasoning is trimmed at both ends.
 *   - Within a JSON string every special token but <|END_OF_TURN_TOKEN|> is text, and it is dropped if the turn ends
 *     right after it: then it was the closer and the string lacked its quote.
 *   - Citations ("<co>...</co: 0:[1]>", see cite.h) are taken out of reasoning and answer; what they say stays.
 *   - Calls: one object or a list, commas or none, keys in any order, unknown keys skipped, of two equal keys the
 *     first counts; "name" and "arguments" are understood too.  The model's own call ids, which repeat, are replaced.
 *   - Arguments are the model's own bytes, except that a raw control character in a string is escaped.  None at all,
 *     and null, are {}; a string that holds an object is that object.
 *   - A call without a name is dropped.  One that breaks off ends with complete = false, and its arguments are what had
 *     come by then (nothing, if they were no object). */
#ifndef NMK_PARSE_H
#define NMK_PARSE_H

#include "reply.h"
#include "tokenizer.h"

typedef enum { NMK_FORMAT_PLAIN, NMK_FORMAT_COHERE, NMK_FORMAT_HERMES, NMK_FORMAT_LLAMA3 } nmk_format;

/* Token ids; -1: the tokenizer has none. */
typedef struct {
    nmk_format format;                  /* of calls */
    bool thinks_in_text, calls_in_text; /* these tags are no tokens */
    int32_t start_thinking, end_thinking, start_text, end_text, start_response, end_response, start_action, end_action,
        start_of_turn, end_of_turn;
} nmk_markers;

/* chat_template: its text; NULL: none.  False: none of those that a parser needs is there. */
bool nmk_markers_find(nmk_markers *m, const nmk_tokenizer *t, const char *chat_template);

/* Whether a prompt ends within reasoning. */
bool nmk_markers_thinking(const nmk_markers *m, const nmk_tokenizer *t, const int32_t *prompt, size_t prompt_tokens);

/* Adds the tokens that end reasoning whatever comes before them; none if no token does. */
void nmk_markers_end_thinking(const nmk_markers *m, const nmk_tokenizer *t, nmk_ids *ids);

typedef enum {
    NMK_SAID_REASONING, /* text */
    NMK_SAID_ANSWER,    /* text */
    NMK_SAID_CALL,      /* call, id, name */
    NMK_SAID_ARGUMENTS, /* call, text */
    NMK_SAID_CALL_END   /* call, complete */
} nmk_said_kind;

/* Strings last as long as the function that is told. */
typedef struct {
    nmk_said_kind kind;
    const char *text; /* valid UTF-8, never empty */
    size_t bytes;
    int call; /* from 0 */
    const char *id, *name;
    bool complete;
} nmk_said;

typedef void (*nmk_said_fn)(void *user, const nmk_said *said);

typedef struct {
    bool no_calls; /* calls are dropped: tool_choice "none", or no tools */
    int max_calls; /* further ones are dropped; 0: any number */
    struct json_object
        *tools;        /* those that were given, as chat completions have them; stays the caller's; NULL: none */
    bool verbatim;     /* no citations are taken out: the answer has a form of its own */
    bool show_special; /* special tokens that are no markers are text, and so are citations' tags */
} nmk_parser_options;

typedef struct nmk_parser nmk_parser;

/* markers NULL: all is answer.  The end of the prompt says which block is open.  Keeps t and user. */
nmk_parser *nmk_parser_new(const nmk_tokenizer *t, const nmk_markers *markers, const int32_t *prompt,
                           size_t prompt_tokens, nmk_parser_options options, nmk_said_fn fn, void *user);
void nmk_parser_free(nmk_parser *p); /* NULL is fine */

/* The block that a token belonged to. */
typedef enum { NMK_BLOCK_NONE, NMK_BLOCK_REASONING, NMK_BLOCK_ANSWER, NMK_BLOCK_ACTION } nmk_block;

nmk_block nmk_parser_add(nmk_parser *p, int32_t token);

/* The block that a prompt leaves open. */
nmk_block nmk_markers_open(const nmk_markers *m, const nmk_tokenizer *t, const int32_t *prompt, size_t prompt_tokens);

/* No more tokens: ends what is open. */
void nmk_parser_end(nmk_parser *p);

/* Why the answer ended: cut (max_tokens, the context) is length; else tool_calls if there were any; else stop. */
nmk_ended nmk_parser_ended(const nmk_parser *p, bool cut);

int nmk_parser_reasoning_tokens(const nmk_parser *p);

#endif
