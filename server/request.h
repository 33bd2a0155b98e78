/* What clients ask for: request bodies, checked, as plain structs.
 *
 * One table in request.c lists every field: its name, endpoints, type, range, default, and where it goes.  null means
 * the default; fields that nobody knows are tolerated; a wrong type or value is refused with status 400 and the
 * field's name.  A field that would change the answer and cannot be obeyed is refused, not ignored.
 *
 * It does not know the model, the template or the tokenizer: the caller checks the model's name, the number of tokens
 * (nmk_request_fit) and what the template makes of the messages. */
#ifndef NMK_REQUEST_H
#define NMK_REQUEST_H

#include "json.h"
#include "kept.h"
#include "nmk.h"
#include "reply.h"
#include "stop.h"
#include "tokenizer.h"

/* How tokens are chosen and when that ends. */
typedef struct {
    double temperature;                         /* 0: greedy */
    double top_p;                               /* 1: all; 0: the most likely alone */
    double min_p;                               /* 0: off */
    double presence_penalty, frequency_penalty; /* 0: off */
    double repetition_penalty;                  /* 1: off */
    int top_k;                                  /* 0: all */
    int n;                                      /* answers to each prompt */
    bool seeded;
    int64_t seed;
    nmk_bias *bias; /* by token, each once */
    int bias_count;
    int logprobs;        /* alternatives to each token; 0: the chosen token's alone; -1: none asked for */
    int prompt_logprobs; /* the same of the prompt's tokens, in a list of their own */
    bool tokens_as_ids;  /* logprobs name tokens by their ids */

    nmk_text *stop; /* within the request's JSON */
    int stop_count;
    int32_t *stop_id; /* besides the model's own */
    int stop_id_count;
    bool keep_stop; /* the stop string stays in the text */
    bool ignore_eos;
    int min_tokens;
    int max_tokens; /* 0: as many as fit */
} nmk_sampling;

/* What an answer has to be. */
typedef enum {
    NMK_FORM_FREE,
    NMK_FORM_OBJECT,  /* any JSON object */
    NMK_FORM_SCHEMA,  /* JSON of a schema */
    NMK_FORM_REGEX,   /* a text that matches */
    NMK_FORM_CHOICE,  /* one of the strings */
    NMK_FORM_GRAMMAR, /* in the grammar */
} nmk_form;

typedef enum {
    NMK_BODY_CHAT,
    NMK_BODY_COMPLETION,
    NMK_BODY_RESPONSE, /* /v1/responses */
    NMK_BODY_MESSAGE,  /* /v1/messages */
    NMK_BODY_COUNT,    /* /v1/messages/count_tokens */
    NMK_BODY_TOKENIZE,
    NMK_BODY_DETOKENIZE
} nmk_body;

/* Whether the template is to let the model think. */
typedef enum { NMK_THINKING_AS_IS, NMK_THINKING_OFF, NMK_THINKING_ON } nmk_thinking;

/* A prompt of /v1/completions or /tokenize: a text, or token ids. */
typedef struct {
    nmk_text text; /* within the request's JSON; data NULL: ids */
    nmk_ids ids;
} nmk_prompt;

/* All pointers are into `root` or owned by the struct. */
typedef struct {
    nmk_body body;
    struct json_object *root, *made; /* made: what its fields became */
    const char *model;               /* NULL: not said */
    nmk_sampling sampling;
    bool stream, include_usage;

    /* Chat, and /tokenize with messages.  Responses and messages are read as chats.  Of each message: role is a known
     * one; content is a string, "" for null or none, the parts of a list joined; tool_calls is a list with something in
     * it or absent; arguments are an object if the string was one, else the string as it came.  Reasoning is passed on
     * as it came. */
    struct json_object *messages;
    struct json_object *tools;    /* NULL: none; each {"type": "function", "function": {"name": ..., ...}} */
    bool tool_choice_none;        /* no calls, whatever the model says */
    bool tool_choice_required;    /* nothing but calls */
    const char *tool_choice_name; /* of that tool; NULL: of any */
    bool parallel_tool_calls;     /* false: the first call only */
    bool include_reasoning;       /* false: reasoning is not sent */
    const char *reasoning_effort; /* NULL: not said */
    nmk_thinking thinking;
    int thinking_tokens;                      /* a cap on reasoning; -1: none */
    struct json_object *chat_template_kwargs; /* with reasoning_effort in it; NULL: none */
    bool add_generation_prompt;
    bool continue_final; /* the last message is the assistant's, and the answer goes on with it */

    /* Completions, and /tokenize without messages. */
    nmk_prompt *prompt;
    int prompt_count;
    bool echo;       /* the prompt comes before the text, with its tokens' likelihood if logprobs are asked for */
    bool echo_alone; /* and there is no text: max_tokens is 0 */
    bool add_special_tokens; /* BOS before a text; false by default when there are messages */
    bool skip_special_tokens;

    bool token_strings; /* /tokenize: return_token_strs */
    nmk_ids tokens;     /* /detokenize */

    /* Responses. */
    const char *instructions;
    const char *previous;      /* the response that this one follows; NULL: none */
    bool store;                /* the response is kept */
    struct json_object *input; /* its own items, as they came */
    nmk_form form;
    struct json_object *form_value; /* the schema, expression, choices or grammar */
    const char *form_param;         /* the field that it came with */
    struct json_object *form_made;  /* a schema that came as text */

    const char *cache_salt; /* NULL: none; requests with different salts share no cached prefix */
} nmk_api_request;

/* What the server allows, and what a request that says nothing gets. */
typedef struct {
    nmk_sampling defaults; /* scalars only */
    int vocab;             /* token ids are below it */
    int max_logprobs;      /* alternatives */
    int max_choices;       /* prompts times n */
    nmk_kept *kept;        /* earlier responses; NULL: none */
    int key;               /* whose they are */
} nmk_request_limits;

/* The table's defaults, NMK_TOP_LOGPROBS alternatives, and as many choices as `n` may ask for. */
void nmk_request_limits_init(nmk_request_limits *l, int vocab);

/* Takes the defaults that a generation_config.json gives (temperature, top_p, top_k, min_p, repetition_penalty,
 * max_new_tokens; "do_sample": false is temperature 0).  0, or -1 with the field at fault. */
int nmk_request_defaults(nmk_request_limits *l, struct json_object *generation_config, nmk_err *e);

/* Needs text[bytes] == 0.  0 and *r, to be freed; or -1 with *e and *r empty. */
int nmk_request_parse(nmk_api_request *r, nmk_body body, const char *text, size_t bytes, const nmk_request_limits *l,
                      nmk_api_error *e);
void nmk_request_free(nmk_api_request *r); /* leaves it empty */

/* Whether a prompt fits a context, and how many tokens the answer may have: max_tokens is a cap, so it is cut to what
 * is left (0: all that is left).  That number, at least 1; or -1 with the error that agents know. */
int nmk_request_fit(const nmk_api_request *r, size_t prompt_tokens, int context, nmk_api_error *e);

/* The model's name is none of ours: 404. */
int nmk_request_no_model(const nmk_api_request *r, nmk_api_error *e);

#endif
