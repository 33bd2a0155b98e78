/* The endpoints, and the life of a request: HTTP, parsed, prompt tokens, batch, text, reply.
 *
 * Three threads meet here.  The HTTP loop owns every request and all that is sent.  One worker reads bodies, renders
 * templates and tokenises, so that a prompt of a megabyte holds up no stream; it owns a request until it posts it back.
 * The batch's thread only appends to a list of tokens and wakes the loop.
 *
 * Every answer ends exactly once: whole, as an error, or because its client left, which frees its rows at once. */
#ifndef NMK_SERVER_API_H
#define NMK_SERVER_API_H

#include "batch.h"
#include "http.h"
#include "request.h"
#include "template.h"

typedef struct nmk_api nmk_api;

/* Everything stays the caller's, until nmk_api_close. */
typedef struct {
    nmk_batch *batch;
    const nmk_tokenizer *tokenizer; /* NULL: prompts are token ids, and so is the text of answers */
    nmk_template *chat_template;    /* NULL: chats are refused */
    const char *bos_token, *eos_token;
    const char *const *names; /* of the model; the first is the one it is known by */
    int name_count;
    const int32_t *stop_ids; /* the model's own */
    int stop_count;
    int max_len;
    int max_rows;      /* at most this many sequences at once; 0: as many as the batch takes */
    size_t kept_bytes; /* for responses that are kept; 0: none is */
    int stall_ms;      /* /health says 503 when no step ended in this time while sequences run; 0: 20 s */
    nmk_request_limits limits;
    const char *version;
    struct nmk_trace *trace; /* NULL: none, and nothing is traced on demand */
    bool no_cache;           /* no request uses what another one computed */
    bool quiet;              /* requests that end well are logged at debug only */
} nmk_api_options;

nmk_api *nmk_api_new(void);

/* For nmk_http_open, with the api as ctx. */
extern const nmk_http_route nmk_api_routes[];
extern const unsigned nmk_api_route_count;
extern const nmk_http_callbacks nmk_api_callbacks;

/* Before nmk_http_run; copies the options. */
void nmk_api_start(nmk_api *api, nmk_http *http, const nmk_api_options *o);

/* From a signal handler: the tasks of the next steps go to the trace's file of tasks. */
void nmk_api_trace_tasks(nmk_api *api);

/* After nmk_http_run: ends the worker.  Then close the batch, the HTTP side, and this. */
void nmk_api_stop(nmk_api *api);
void nmk_api_close(nmk_api *api); /* NULL is fine */

#endif
