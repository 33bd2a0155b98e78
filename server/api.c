/* Ownership: a job is counted (refs).  The worker's turn holds one, and so does each of its choices from when it is
 * queued until the batch has ended it.  `r` is there until the job was answered or its client left; it is only touched
 * on the loop. */
#include "api.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <xxhash.h>

#include "constraint.h"
#include "log.h"
#include "metrics.h"
#include "page.h"
#include "parse.h"
#include "stop.h"
#include "tasks.h"
#include "trace.h"

/* The kernel gives a hang up after 2 s. */
enum { STALL_MS = 20000 };
/* More than that is told to come again: sequences that wait for a row, bytes of bodies that wait for the worker.  Rows
 * that lose their pages wait too, so the batch has room for all that is let in. */
enum { MOST_WAITING = NMK_BATCH_WAITING - NMK_ROWS, MOST_TODO_BYTES = 256 << 20 };

typedef struct choice choice;
typedef struct job job;

/* One answer to one prompt. */
struct choice {
    job *job;
    choice *next; /* in the queue */
    int index, prompt;
    bool queued, done, met; /* met: a stop string */
    uint64_t id;            /* of the batch; 0: not there */
    nmk_parser *parser;
    nmk_walker *walker; /* of its masks; NULL: it may say anything */
    nmk_stop *stop;
    int32_t held; /* a stop id that may be the last token; -1: none */
    int tokens, cached;
    uint64_t queued_ns, started_ns, first_ns, last_ns; /* of waiting, the row, the first and the newest token */
    nmk_reply_choice *said;

    /* Bytes of the answer that went into the stop strings' sieve and came out of it; characters that went in. */
    uint64_t in, out;
    size_t characters;
    /* Tokens with their log-probabilities, if asked for: those from `sent` on have not gone out.  One may go when `out`
     * has reached its end, which lies beyond `in` for one that ends within a character. */
    nmk_logprob *likely;
    uint64_t *end;
    int likely_count, likely_capacity, sent;
    nmk_logprob *asked; /* the same of all tokens of the prompt; NULL: not asked for */
    bool echoes;        /* the prompt is to be said before what comes next */
    nmk_utf8 tail;      /* of the newest token */
};

struct job {
    nmk_api *api;
    int refs;
    nmk_body body;
    nmk_buf text; /* the request's body */
    int key;      /* which of the keys it came with, or -1 */
    uint64_t id;  /* of the response */
    uint64_t arrived_ns;
    nmk_http_response *r; /* NULL: answered, or nobody is there */
    job *next;            /* for the worker */

    /* the worker's results */
    bool failed;
    nmk_api_error error;
    nmk_api_request q;
    nmk_ids *prompt;
    int *max_tokens;
    int prompt_count;
    nmk_masks *masks;  /* of its answers; NULL: any */
    nmk_batch_cap cap; /* on reasoning */
    nmk_buf answer;    /* of endpoints that do not generate */
    nmk_buf input;     /* of a response that is kept */

    choice *choice;
    nmk_reply_choice *said;
    int choice_count, open; /* open: not ended */
    nmk_stream stream;
    nmk_reply reply;
    nmk_buf out;
    int reasoning_tokens;
};

typedef enum { START, PROMPT, TOKEN, END } event_kind;
typedef struct {
    choice *choice;
    event_kind kind;
    int cached, index; /* index: of a token of the prompt */
    int32_t token;
    nmk_logprobs *logprobs; /* owned; NULL: none */
    nmk_batch_end end;
    char *message; /* owned; NULL: none */
    uint64_t ns;
} event;

struct nmk_api {
    nmk_api_options o;
    nmk_http *http;
    nmk_markers markers;
    bool has_markers;
    nmk_ids end_thinking;         /* the tokens that do; none: the model does not think, or not with tokens */
    nmk_constraints *constraints; /* the worker's; NULL: there is no tokenizer */
    int64_t created;
    nmk_metrics metrics;
    nmk_buf scratch;
    nmk_kept *kept; /* NULL: no response is */

    choice *queue, **queue_tail; /* not given to the batch yet */
    int queued, submitted;
    uint64_t *turn, turns; /* of each key, from -1: the turn it had last; how many there were */
    int turn_count;
    uint64_t secret;        /* so that nobody can make two salts alike */
    uint64_t salts;         /* made so far of requests that share nothing */
    uint64_t busy_since_ms; /* when the first of those that run now was submitted */
    bool stalled;           /* as /health saw it last */

    pthread_t worker;
    bool has_worker;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t work;
    job *todo, **todo_tail;
    size_t todo_bytes; /* of bodies that wait for the worker */
    bool stopping;
    event *events;
    size_t event_count, event_capacity;
    volatile sig_atomic_t wants_tasks; /* a signal came */
};

enum {
    MODELS,
    MODEL,
    CHAT,
    COMPLETIONS,
    RESPONSES,
    RESPONSE,
    MESSAGES,
    COUNT_TOKENS,
    TOKENIZE,
    DETOKENIZE,
    HEALTH,
    METRICS,
    VERSION,
    TRACE,
    PAGE
};

/* Of each kind of body: its endpoint, and whose words the answer is in. */
static const struct {
    int route;
    nmk_reply_kind kind;
} bodies[] = {
    [NMK_BODY_CHAT] = {CHAT, NMK_REPLY_CHAT},
    [NMK_BODY_COMPLETION] = {COMPLETIONS, NMK_REPLY_TEXT},
    [NMK_BODY_RESPONSE] = {RESPONSES, NMK_REPLY_RESPONSE},
    [NMK_BODY_MESSAGE] = {MESSAGES, NMK_REPLY_MESSAGE},
    [NMK_BODY_COUNT] = {COUNT_TOKENS, NMK_REPLY_MESSAGE},
    [NMK_BODY_TOKENIZE] = {TOKENIZE, NMK_REPLY_CHAT},
    [NMK_BODY_DETOKENIZE] = {DETOKENIZE, NMK_REPLY_CHAT},
};

static void write_message_error(nmk_buf *b, int status, const char *param, const char *code, const char *message) {
    nmk_api_error e;
    nmk_api_fail(&e, status, param, code, "%s", message);
    nmk_reply_error(NMK_REPLY_MESSAGE, &e, b);
}

const nmk_http_route nmk_api_routes[] = {
    [MODELS] = {"/v1/models", NMK_HTTP_GET, false},
    [MODEL] = {"/v1/models/*", NMK_HTTP_GET, false},
    [CHAT] = {"/v1/chat/completions", NMK_HTTP_POST, false},
    [COMPLETIONS] = {"/v1/completions", NMK_HTTP_POST, false},
    [RESPONSES] = {"/v1/responses", NMK_HTTP_POST, false},
    [RESPONSE] = {"/v1/responses/*", NMK_HTTP_GET | NMK_HTTP_DELETE, false},
    [MESSAGES] = {"/v1/messages", NMK_HTTP_POST, false, write_message_error},
    [COUNT_TOKENS] = {"/v1/messages/count_tokens", NMK_HTTP_POST, false, write_message_error},
    [TOKENIZE] = {"/tokenize", NMK_HTTP_POST, false},
    [DETOKENIZE] = {"/detokenize", NMK_HTTP_POST, false},
    [HEALTH] = {"/health", NMK_HTTP_GET, true},
    [METRICS] = {"/metrics", NMK_HTTP_GET, true},
    [VERSION] = {"/version", NMK_HTTP_GET, false},
    [TRACE] = {"/debug/trace", NMK_HTTP_POST, false},
    [PAGE] = {"/", NMK_HTTP_GET, true},
};
const unsigned nmk_api_route_count = sizeof nmk_api_routes / sizeof *nmk_api_routes;

static uint64_t now_ms(void) { return nmk_now_ns() / 1000000; }

/* ---------------------------------------------------------------- jobs */

static void unref(job *j) {
    if (--j->refs) return;
    for (int i = 0; i < j->choice_count; i++) {
        nmk_parser_free(j->choice[i].parser);
        nmk_walker_free(j->choice[i].walker);
        nmk_stop_free(j->choice[i].stop);
        nmk_reply_choice_free(&j->said[i]);
        free(j->choice[i].likely), free(j->choice[i].end), free(j->choice[i].asked);
    }
    for (int i = 0; i < j->prompt_count; i++) nmk_ids_free(&j->prompt[i]);
    free(j->prompt), free(j->max_tokens), free(j->choice), free(j->said);
    nmk_masks_unref(j->masks);
    nmk_stream_free(&j->stream);
    nmk_request_free(&j->q);
    nmk_buf_free(&j->text), nmk_buf_free(&j->answer), nmk_buf_free(&j->input), nmk_buf_free(&j->out);
    free(j);
}

/* Takes the handle off the job, for its last use. */
static nmk_http_response *take_response(job *j) {
    nmk_http_response *r = j->r;
    j->r = NULL;
    return r;
}

static void respond(job *j, const nmk_buf *body) {
    nmk_http_response *r = take_response(j);
    if (r) nmk_http_respond(r, 200, "application/json", body->data, body->length);
}

/* ---------------------------------------------------------------- the log */

static double ms_since(uint64_t from_ns, uint64_t to_ns) {
    return to_ns > from_ns ? 1e-6 * (double)(to_ns - from_ns) : 0;
}

/* Messages stay out: they may quote what the client sent. */
static void log_error(uint64_t id, const nmk_api_error *e) {
    nmk_log_line l;
    nmk_log_begin(&l, e->status < 500 ? NMK_LOG_WARNING : NMK_LOG_ERROR,
                  e->status < 500 ? "request refused" : "request failed");
    nmk_log_int(&l, "id", (int64_t)id);
    nmk_log_int(&l, "status", e->status);
    nmk_log_text(&l, "code", e->code);
    nmk_log_text(&l, "param", *e->param ? e->param : NULL);
    nmk_log_end(&l);
}

/* The engine's own words: they name tasks and tensors, never texts. */
static void log_engine(const char *message) {
    nmk_log_line l;
    nmk_log_begin(&l, NMK_LOG_ERROR, "engine failed");
    nmk_log_text(&l, "reason", message ? message : "no reason given");
    nmk_log_end(&l);
}

static void log_stall(bool stalled, const nmk_batch_stats *s, int queued, uint64_t still_ms) {
    nmk_log_line l;
    nmk_log_begin(&l, stalled ? NMK_LOG_ERROR : NMK_LOG_WARNING, stalled ? "no progress" : "steps end again");
    nmk_log_int(&l, "running", s->running);
    nmk_log_int(&l, "waiting", s->waiting + queued);
    nmk_log_int(&l, "last_step_ms_ago", (int64_t)still_ms);
    nmk_log_end(&l);
}

/* A request that generated, and ended well or by its client. */
static void log_job(const job *j, const nmk_usage *usage, const char *message, int status, const char *finish) {
    nmk_log_line l;
    uint64_t first_ns = 0, now_ns = nmk_now_ns();
    for (int i = 0; i < j->choice_count; i++) {
        uint64_t ns = j->choice[i].first_ns;
        if (ns && (!first_ns || ns < first_ns)) first_ns = ns;
    }
    nmk_log_begin(&l, j->api->o.quiet ? NMK_LOG_DEBUG : NMK_LOG_INFO, message);
    nmk_log_int(&l, "id", (int64_t)nmk_http_id(j->r));
    nmk_log_text(&l, "endpoint", nmk_api_routes[bodies[j->body].route].path);
    nmk_log_int(&l, "status", status);
    nmk_log_text(&l, "finish", finish);
    nmk_log_int(&l, "prompt_tokens", usage->prompt_tokens);
    nmk_log_int(&l, "cached_tokens", usage->cached_tokens);
    nmk_log_int(&l, "tokens", usage->completion_tokens);
    if (first_ns) nmk_log_number(&l, "ttft_ms", ms_since(j->arrived_ns, first_ns));
    nmk_log_number(&l, "duration_ms", ms_since(j->arrived_ns, now_ns));
    nmk_log_end(&l);
}

/* One answer that has ended. */
static void trace_choice(const choice *c, const char *end) {
    const job *j = c->job;
    if (!j->api->o.trace) return;
    nmk_trace_request r = {.id = j->id,
                           .index = c->index,
                           .endpoint = nmk_api_routes[bodies[j->body].route].path,
                           .end = end,
                           .prompt_tokens = (int)j->prompt[c->prompt].count,
                           .cached_tokens = c->cached,
                           .tokens = c->tokens,
                           .arrived_ns = j->arrived_ns,
                           .queued_ns = c->queued_ns,
                           .started_ns = c->started_ns,
                           .first_ns = c->first_ns,
                           .last_ns = c->last_ns,
                           .ended_ns = nmk_now_ns()};
    nmk_trace_add_request(j->api->o.trace, &r);
}

static void respond_error(nmk_http_response *r, nmk_body asked, const nmk_api_error *e) {
    nmk_buf body = {0};
    log_error(nmk_http_id(r), e);
    if (e->status == 503) nmk_http_add_field(r, "Retry-After", "1");
    nmk_reply_error(bodies[asked].kind, e, &body);
    nmk_http_respond(r, e->status, "application/json", body.data, body.length);
    nmk_buf_free(&body);
}

/* No fault of the request: the next process takes it. */
static int fail_lost(nmk_api_error *e) {
    return nmk_api_fail(e, 503, NULL, "engine_restarting",
                        "The engine is lost and the server starts again: send the request again.");
}

static void send_out(job *j) {
    if (j->r && j->out.length) nmk_http_send(j->r, j->out.data, j->out.length);
    j->out.length = 0;
}

/* ---------------------------------------------------------------- the worker: from bytes to tokens */

static int check_model(const nmk_api *api, const nmk_api_request *q, nmk_api_error *e) {
    if (!q->model) return 0;
    for (int i = 0; i < api->o.name_count; i++)
        if (!strcmp(q->model, api->o.names[i])) return 0;
    return nmk_request_no_model(q, e);
}

/* The prompt ends with the last message's text: what the template puts behind it is not there yet.  A template may trim
 * the text. */
static int cut_behind_final(job *j, nmk_buf *text) {
    enum { BEHIND = 256 }; /* bytes that a template may put there, so that a search takes no time */
    struct json_object *messages = j->q.messages;
    struct json_object *last = json_object_array_get_idx(messages, json_object_array_length(messages) - 1);
    struct json_object *content = nmk_json_get(last, "content");
    const char *said = json_object_get_string(content);
    size_t bytes = (size_t)json_object_get_string_len(content);
    for (int trimmed = 0; trimmed < 2; trimmed++) {
        for (size_t behind = 0; bytes && behind < BEHIND && bytes + behind <= text->length; behind++) {
            size_t end = text->length - behind;
            if (memcmp(text->data + end - bytes, said, bytes) != 0) continue;
            text->length = end, text->data[end] = 0;
            return 0;
        }
        while (bytes && strchr(" \t\r\n", said[bytes - 1])) bytes--;
        while (bytes && strchr(" \t\r\n", *said)) said++, bytes--;
    }
    return nmk_api_fail(&j->error, 400, "messages", "chat_template_error",
                        "The chat template does not end with the last message's text, so nothing can go on with it.");
}

static int render(job *j, nmk_buf *text) {
    const nmk_api *api = j->api;
    nmk_err why = {""};
    nmk_template_input input = {.messages = j->q.messages,
                                .tools = j->q.tools,
                                .add_generation_prompt = j->q.add_generation_prompt,
                                .kwargs = j->q.chat_template_kwargs,
                                .bos_token = api->o.bos_token,
                                .eos_token = api->o.eos_token};
    if (!api->o.chat_template)
        return nmk_api_fail(&j->error, 400, "messages", "unsupported_parameter",
                            "This model came without a chat template: use /v1/completions.");
    if (nmk_template_render(api->o.chat_template, &input, text, &why))
        return nmk_api_fail(&j->error, 400, "messages", "chat_template_error", "%s", why.text);
    return j->q.continue_final ? cut_behind_final(j, text) : 0;
}

/* A text that begins with BOS keeps its one. */
static int encode(job *j, const char *param, const char *text, size_t bytes, nmk_ids *ids) {
    const nmk_api *api = j->api;
    unsigned flags = NMK_PARSE_SPECIAL | (j->q.add_special_tokens ? NMK_ADD_BOS : 0);
    nmk_err why = {""};
    if (!api->o.tokenizer)
        return nmk_api_fail(&j->error, 400, param, "unsupported_parameter",
                            "This server runs without a tokenizer: give token ids.");
    if (nmk_tokenizer_encode(api->o.tokenizer, text, bytes, flags, ids, &why))
        return nmk_api_fail(&j->error, 400, param, "invalid_value", "Invalid value for '%s': %s", param, why.text);
    int32_t bos = api->o.bos_token ? nmk_tokenizer_find(api->o.tokenizer, api->o.bos_token) : -1;
    if (j->q.add_special_tokens && ids->count > 1 && bos >= 0 && ids->id[0] == bos && ids->id[1] == bos)
        memmove(ids->id, ids->id + 1, --ids->count * sizeof *ids->id);
    return 0;
}

static int encode_prompts(job *j) {
    const nmk_api_request *q = &j->q;
    j->prompt_count = q->messages ? 1 : q->prompt_count;
    j->prompt = xcalloc((size_t)j->prompt_count, sizeof *j->prompt);
    if (q->messages) {
        nmk_buf text = {0};
        int rc = render(j, &text);
        if (!rc) rc = encode(j, "messages", text.data ? text.data : "", text.length, &j->prompt[0]);
        nmk_buf_free(&text);
        return rc;
    }
    for (int i = 0; i < j->prompt_count; i++) {
        nmk_prompt *p = &j->q.prompt[i];
        if (!p->text.data)
            j->prompt[i] = p->ids, p->ids = (nmk_ids){0};
        else if (encode(j, "prompt", p->text.data, p->text.bytes, &j->prompt[i]))
            return -1;
    }
    return 0;
}

/* Reasoning that is off or capped, whatever the template makes of it. */
static int cap_thinking(job *j) {
    const nmk_api *api = j->api;
    const nmk_api_request *q = &j->q;
    const nmk_markers *m = &api->markers;
    nmk_ids *prompt = &j->prompt[0];
    if (!q->messages || !api->has_markers || (q->thinking_tokens < 0 && q->thinking != NMK_THINKING_OFF)) return 0;
    bool open = nmk_markers_thinking(m, api->o.tokenizer, prompt->id, prompt->count);
    if (!api->end_thinking.count) {
        if (q->thinking_tokens < 0 || !m->thinks_in_text) return 0;
        return nmk_api_fail(&j->error, 400, "thinking_token_budget", "unsupported_parameter",
                            "Reasoning cannot be capped: this model has no token that ends it.");
    }
    if (open && (q->thinking == NMK_THINKING_OFF || !q->thinking_tokens)) {
        for (size_t i = 0; i < api->end_thinking.count; i++) nmk_ids_add(prompt, api->end_thinking.id[i]);
    } else if (q->thinking_tokens >= 0 && q->thinking != NMK_THINKING_OFF) {
        /* one that opens it itself says the marker first */
        j->cap = (nmk_batch_cap){.after = open ? q->thinking_tokens : q->thinking_tokens + 1,
                                 .opens = open ? -1 : m->start_thinking,
                                 .closes = m->end_thinking,
                                 .then = api->end_thinking.id,
                                 .then_count = (int)api->end_thinking.count};
    }
    return 0;
}

/* What the answers may be. */
static int constrain(job *j) {
    const nmk_api *api = j->api;
    const nmk_api_request *q = &j->q;
    nmk_block block = NMK_BLOCK_ANSWER;
    if (q->messages && api->has_markers)
        block = nmk_markers_open(&api->markers, api->o.tokenizer, j->prompt[0].id, j->prompt[0].count);
    if (api->constraints) return nmk_constraints_find(api->constraints, q, block, &j->masks, &j->error);
    return q->form ? nmk_api_fail(&j->error, 400, q->form_param, "unsupported_parameter",
                                  "This server runs without a tokenizer.")
                   : 0;
}

static int prepare(job *j) {
    const nmk_api *api = j->api;
    nmk_api_request *q = &j->q;
    nmk_request_limits limits = api->o.limits;
    limits.kept = api->kept, limits.key = j->key;
    if (nmk_request_parse(q, j->body, j->text.data ? j->text.data : "", j->text.length, &limits, &j->error)) return -1;
    nmk_buf_free(&j->text);
    if (check_model(api, q, &j->error)) return -1;
    if (j->body == NMK_BODY_DETOKENIZE) {
        nmk_buf text = {0};
        if (!api->o.tokenizer)
            return nmk_api_fail(&j->error, 400, NULL, "unsupported_parameter", "This server runs without a tokenizer.");
        nmk_tokenizer_decode(api->o.tokenizer, q->tokens.id, q->tokens.count, false, &text);
        nmk_reply_detokenize(text.data, text.length, &j->answer);
        nmk_buf_free(&text);
        return 0;
    }
    if (j->body == NMK_BODY_TOKENIZE) {
        if (encode_prompts(j)) return -1;
        if (q->token_strings && !api->o.tokenizer)
            return nmk_api_fail(&j->error, 400, "return_token_strs", "unsupported_parameter",
                                "This server runs without a tokenizer.");
        nmk_reply_tokenize(api->o.tokenizer, &j->prompt[0], q->token_strings, api->o.max_len, &j->answer);
        return 0;
    }
    if (encode_prompts(j) || cap_thinking(j)) return -1;
    if (j->body == NMK_BODY_COUNT) {
        nmk_buf_printf(&j->answer, "{\"input_tokens\":%zu}", j->prompt[0].count);
        return 0;
    }
    if (j->body == NMK_BODY_RESPONSE && q->store && api->kept)
        nmk_buf_puts(&j->input, json_object_to_json_string_ext(q->input, JSON_C_TO_STRING_PLAIN));
    j->max_tokens = xcalloc((size_t)j->prompt_count, sizeof *j->max_tokens);
    for (int i = 0; i < j->prompt_count; i++) {
        j->max_tokens[i] = nmk_request_fit(q, j->prompt[i].count, api->o.max_len, &j->error);
        if (j->max_tokens[i] < 0) return -1;
    }
    return constrain(j);
}

static void prepared(void *ctx, void *arg);

static void *work(void *ctx) {
    nmk_api *api = ctx;
    for (;;) {
        pthread_mutex_lock(&api->lock);
        while (!api->todo && !api->stopping) pthread_cond_wait(&api->work, &api->lock);
        job *j = api->todo;
        if (j) {
            api->todo = j->next;
            if (!api->todo) api->todo_tail = &api->todo;
            api->todo_bytes -= j->text.length;
        }
        bool stopping = api->stopping;
        pthread_mutex_unlock(&api->lock);
        if (!j) return NULL;
        if (!stopping) j->failed = prepare(j) != 0;
        if (stopping || nmk_http_post(api->http, prepared, j)) unref(j); /* the loop has ended: nobody waits */
    }
}

/* ---------------------------------------------------------------- what the model says */

/* The tokens that may go out, all or those whose text has, go with the chunk that comes next; of a whole response, with
 * the item that is the last one.  Other whole answers tell of all their tokens at once. */
static void attach(choice *c, bool all) {
    job *j = c->job;
    int n = 0;
    if (!j->q.stream && j->q.body != NMK_BODY_RESPONSE) return;
    while (c->sent + n < c->likely_count && (all || c->end[c->sent + n] <= c->out)) n++;
    if (n && j->q.stream)
        nmk_stream_logprobs(&j->stream, c->likely + c->sent, n);
    else if (n)
        nmk_reply_choice_logprobs(&j->reply, c->said, c->likely + c->sent, n);
    c->sent += n;
}

/* The newest token's text is in. */
static void set_end(choice *c) {
    if (c->sent < c->likely_count) c->end[c->likely_count - 1] = c->in + (c->tail.count > 0);
}

/* Before a chunk that is no answer: tokens before the newest one have all their text by now. */
static void attach_rest(choice *c) {
    for (int i = c->sent; i < c->likely_count - 1; i++)
        if (c->end[i] > c->in) c->end[i] = c->in;
    attach(c, false);
}

static void say_text(choice *c, const char *text, size_t bytes) {
    job *j = c->job;
    if (!bytes) return;
    if (!j->q.stream) nmk_reply_choice_text(c->said, NMK_ITEM_TEXT, text, bytes);
    attach(c, false);
    if (j->q.stream) nmk_stream_content(&j->stream, c->index, text, bytes, &j->out);
}

static size_t characters(const char *text, size_t bytes) {
    size_t n = 0;
    for (size_t i = 0; i < bytes; i++) n += ((unsigned char)text[i] & 0xc0) != 0x80;
    return n;
}

/* Text of the answer: stop strings act on it, and on nothing else. */
static void answer(choice *c, const char *text, size_t bytes) {
    nmk_buf *scratch = &c->job->api->scratch;
    scratch->length = 0;
    c->in += bytes, c->characters += characters(text, bytes);
    set_end(c);
    c->met = nmk_stop_add(c->stop, text, bytes, c->tokens >= c->job->q.sampling.min_tokens, scratch);
    c->out += scratch->length;
    say_text(c, scratch->data, scratch->length);
}

/* The text ended without a stop string. */
static void answer_ends(choice *c) {
    nmk_buf *scratch = &c->job->api->scratch;
    scratch->length = 0;
    nmk_stop_end(c->stop, scratch);
    c->out += scratch->length;
    say_text(c, scratch->data, scratch->length);
}

static void on_said(void *user, const nmk_said *said) {
    choice *c = user;
    job *j = c->job;
    bool stream = j->q.stream;
    if (c->met) return;
    switch (said->kind) {
    case NMK_SAID_ANSWER: answer(c, said->text, said->bytes); return;
    case NMK_SAID_REASONING:
        if (!j->q.include_reasoning) return;
        if (!stream) nmk_reply_choice_text(c->said, NMK_ITEM_REASONING, said->text, said->bytes);
        attach_rest(c);
        if (stream) nmk_stream_reasoning(&j->stream, c->index, said->text, said->bytes, &j->out);
        return;
    case NMK_SAID_CALL:
        answer_ends(c); /* no stop string goes on behind a call */
        if (!stream) nmk_reply_choice_call(c->said, said->id, said->name);
        attach_rest(c);
        if (stream) nmk_stream_call(&j->stream, c->index, said->id, said->name, &j->out);
        return;
    case NMK_SAID_ARGUMENTS:
        if (!stream) nmk_reply_choice_arguments(c->said, said->text, said->bytes);
        attach_rest(c);
        if (stream) nmk_stream_arguments(&j->stream, c->index, said->text, said->bytes, &j->out);
        return;
    case NMK_SAID_CALL_END: return;
    }
}

/* The newest token's text, and its log-probabilities away again if they would tell what is hidden. */
static void feed(choice *c, int32_t token) {
    const nmk_api_request *q = &c->job->q;
    const nmk_tokenizer *t = c->job->api->o.tokenizer;
    if (q->sampling.logprobs >= 0 && t && !nmk_tokenizer_is_special(t, token)) {
        nmk_buf *scratch = &c->job->api->scratch;
        size_t bytes = 0;
        const char *raw = nmk_tokenizer_token(t, token, &bytes);
        scratch->length = 0;
        nmk_utf8_add(&c->tail, raw ? raw : "", bytes, scratch);
    }
    set_end(c);
    if (c->parser) {
        nmk_block block = nmk_parser_add(c->parser, token);
        if (block == NMK_BLOCK_REASONING && !q->include_reasoning && c->sent < c->likely_count) c->likely_count--;
        return;
    }
    char text[16];
    int n = snprintf(text, sizeof text, "%d ", token);
    answer(c, text, (size_t)n);
}

/* Keeps a token's log-probabilities until its text goes out. */
static void keep_likely(choice *c, int32_t token, const nmk_logprobs *likely) {
    const int most = c->job->q.sampling.logprobs;
    if (!likely || most < 0) return;
    if (c->job->q.stream && c->sent == c->likely_count) c->sent = c->likely_count = 0;
    if (c->likely_count == c->likely_capacity) {
        c->likely_capacity = c->likely_capacity ? c->likely_capacity * 2 : 16;
        c->likely = xrealloc(c->likely, (size_t)c->likely_capacity * sizeof *c->likely);
        c->end = xrealloc(c->end, (size_t)c->likely_capacity * sizeof *c->end);
    }
    nmk_logprob *l = &c->likely[c->likely_count];
    *l = (nmk_logprob){.token = token, .text_offset = c->characters, .likely = *likely};
    if (l->likely.count > most) l->likely.count = most;
    c->end[c->likely_count++] = UINT64_MAX;
}

/* ---------------------------------------------------------------- the end of an answer */

static void cancel(choice *c) {
    if (c->id) nmk_batch_cancel(c->job->api->o.batch, c->id);
}

static void unqueue(choice *c) {
    nmk_api *api = c->job->api;
    choice **at = &api->queue;
    while (*at != c) at = &(*at)->next;
    *at = c->next;
    if (!*at) api->queue_tail = at;
    api->queued--;
    c->queued = false;
}

/* No more of this job's choices: rows are freed, nothing more is said. */
static void drop_choices(job *j, nmk_end_kind kind) {
    j->refs++;
    for (int i = 0; i < j->choice_count; i++) {
        choice *c = &j->choice[i];
        if (!c->done) {
            static const char *const end[] = {[NMK_END_STOP] = "stop",
                                              [NMK_END_LENGTH] = "length",
                                              [NMK_END_ABORT] = "abort",
                                              [NMK_END_ERROR] = "error"};
            j->api->metrics.ended[kind]++;
            trace_choice(c, end[kind]);
        }
        c->done = true;
        if (c->queued)
            unqueue(c), unref(j);
        else
            cancel(c);
    }
    unref(j);
}

static void fail_job(job *j, nmk_end_kind kind, const nmk_api_error *e) {
    nmk_http_response *r = take_response(j);
    if (r && nmk_http_streaming(r)) {
        log_error(nmk_http_id(r), e);
        nmk_stream_fail(&j->stream, e, &j->out);
        nmk_http_send(r, j->out.data, j->out.length);
        nmk_http_finish(r);
    } else if (r) {
        respond_error(r, j->body, e);
    }
    drop_choices(j, kind);
}

static nmk_usage usage_of(const job *j) {
    nmk_usage usage = {.reasoning_tokens = j->reasoning_tokens};
    for (int i = 0; i < j->prompt_count; i++) {
        usage.prompt_tokens += (int)j->prompt[i].count;
        usage.cached_tokens += j->choice[i * j->q.sampling.n].cached; /* further answers find what the first one left */
    }
    for (int i = 0; i < j->choice_count; i++) usage.completion_tokens += j->choice[i].tokens;
    return usage;
}

/* A response that the request wants to find again. */
static void keep(const job *j, const nmk_reply *reply, const nmk_reply_choice *said, const nmk_usage *usage) {
    nmk_buf body = {0};
    if (!j->input.length) return;
    nmk_reply_whole(reply, said, 1, usage, &body);
    nmk_kept_add(j->api->kept, j->key, reply->id, j->q.previous, &j->input, &body);
    nmk_buf_free(&body);
}

static void finish_job(job *j) {
    static const char *const finish[] = {NULL, "stop", "length", "tool_calls", "content_filter"};
    nmk_usage usage = usage_of(j);
    if (!j->r) return;
    log_job(j, &usage, "request finished", 200, finish[j->said[0].ended]);
    if (j->q.stream) {
        nmk_stream_close(&j->stream, j->q.include_usage ? &usage : NULL, &j->out);
        keep(j, &j->stream.reply, j->stream.said, &usage);
        send_out(j);
        nmk_http_finish(take_response(j));
        return;
    }
    nmk_reply_whole(&j->reply, j->said, j->choice_count, &usage, &j->out);
    keep(j, &j->reply, j->said, &usage);
    respond(j, &j->out);
}

static double seconds(uint64_t from_ns, uint64_t to_ns) {
    return to_ns > from_ns ? 1e-9 * (double)(to_ns - from_ns) : 0;
}

/* A choice that ended well. */
static void measure(const choice *c) {
    nmk_metrics *m = &c->job->api->metrics;
    nmk_metric_add(&m->tokens, NMK_METRIC_TOKENS, c->tokens);
    nmk_metric_add(&m->whole, NMK_METRIC_LATENCY, seconds(c->job->arrived_ns, nmk_now_ns()));
    if (!c->started_ns || !c->tokens) return;
    double decode = seconds(c->first_ns, c->last_ns);
    nmk_metric_add(&m->prefill, NMK_METRIC_LATENCY, seconds(c->started_ns, c->first_ns));
    nmk_metric_add(&m->decode, NMK_METRIC_LATENCY, decode);
    nmk_metric_add(&m->inference, NMK_METRIC_LATENCY, seconds(c->started_ns, c->last_ns));
    if (c->tokens > 1) nmk_metric_add(&m->token_mean, NMK_METRIC_TOKEN_TIME, decode / (c->tokens - 1));
}

/* cut: by max_tokens. */
static void complete(choice *c, bool cut) {
    job *j = c->job;
    nmk_api *api = j->api;
    nmk_metrics *m = &api->metrics;
    if (c->parser) nmk_parser_end(c->parser); /* says what it held back, unless a stop string is met */
    if (!c->met) answer_ends(c);
    cut = cut && !c->met;
    nmk_ended ended = c->parser ? nmk_parser_ended(c->parser, cut) : cut ? NMK_ENDED_LENGTH : NMK_ENDED_STOP;
    if (c->parser) j->reasoning_tokens += nmk_parser_reasoning_tokens(c->parser);
    c->said->ended = ended;
    if (c->met) {
        const nmk_text *met = &j->q.sampling.stop[nmk_stop_met(c->stop)];
        c->said->stop = met->data, c->said->stop_bytes = met->bytes;
    }
    if (c->asked && j->q.sampling.prompt_logprobs >= 0)
        c->said->prompt = c->asked, c->said->prompt_count = (int)j->prompt[c->prompt].count;
    if (j->q.stream) {
        attach(c, true);
        nmk_stream_finish(&j->stream, c->index, ended, c->said->stop, c->said->stop_bytes, &j->out);
    } else if (j->q.sampling.logprobs >= 0) {
        static const nmk_logprob none;
        c->said->logprob = c->likely ? c->likely : &none, c->said->logprob_count = c->likely_count;
    }
    c->done = true;
    m->ended[cut ? NMK_END_LENGTH : NMK_END_STOP]++;
    trace_choice(c, cut ? "length" : "stop");
    measure(c);
    if (--j->open == 0)
        finish_job(j);
    else
        send_out(j);
}

/* ---------------------------------------------------------------- the batch's thread */

static void post_event(choice *c, event e) {
    nmk_api *api = c->job->api;
    e.choice = c, e.ns = nmk_now_ns();
    pthread_mutex_lock(&api->lock);
    if (api->event_count == api->event_capacity) {
        api->event_capacity = api->event_capacity ? api->event_capacity * 2 : 64;
        api->events = xrealloc(api->events, api->event_capacity * sizeof *api->events);
    }
    api->events[api->event_count++] = e;
    pthread_mutex_unlock(&api->lock);
    nmk_http_wake(api->http);
}

static void on_start(void *user, int cached_tokens) {
    post_event(user, (event){.kind = START, .cached = cached_tokens});
}

static void on_prompt(void *user, int index, const nmk_logprobs *logprobs) {
    event e = {.kind = PROMPT, .index = index};
    e.logprobs = memcpy(xmalloc(sizeof *logprobs), logprobs, sizeof *logprobs);
    post_event(user, e);
}

static void on_token(void *user, int32_t token, const nmk_logprobs *logprobs) {
    event e = {.kind = TOKEN, .token = token};
    if (logprobs) e.logprobs = memcpy(xmalloc(sizeof *logprobs), logprobs, sizeof *logprobs);
    post_event(user, e);
}

static void on_end(void *user, nmk_batch_end end, const char *message) {
    post_event(user, (event){.kind = END, .end = end, .message = message ? xstrdup(message) : NULL});
}

/* ---------------------------------------------------------------- the loop: from tokens to bytes */

static bool is_stop(const choice *c, int32_t token) {
    const nmk_api_options *o = &c->job->api->o;
    const nmk_sampling *s = &c->job->q.sampling;
    for (int i = 0; i < o->stop_count && !s->ignore_eos; i++)
        if (o->stop_ids[i] == token) return true;
    for (int i = 0; i < s->stop_id_count; i++)
        if (s->stop_id[i] == token) return true;
    return false;
}

static void take_start(choice *c, int cached, uint64_t ns) {
    if (c->done) return;
    c->cached = cached, c->started_ns = ns;
    nmk_metric_add(&c->job->api->metrics.queue, NMK_METRIC_LATENCY, seconds(c->queued_ns, ns));
}

static void take_prompt(choice *c, int index, const nmk_logprobs *logprobs) {
    if (c->asked) c->asked[index].likely = *logprobs;
}

/* How many characters of text are before each token of the prompt, as echo() tells it. */
static void place_prompt(choice *c, bool given) {
    const job *j = c->job;
    const nmk_tokenizer *t = j->api->o.tokenizer;
    const nmk_ids *ids = &j->prompt[c->prompt];
    const nmk_prompt *prompt = &j->q.prompt[c->prompt];
    nmk_detokenizer d = {.skip_special = !given && j->q.skip_special_tokens};
    nmk_buf text = {0};
    for (size_t i = 0; i < ids->count && t; i++) {
        size_t bytes = 0;
        const char *raw = nmk_tokenizer_token(t, ids->id[i], &bytes);
        c->asked[i].text_offset = characters(text.data, text.length);
        /* BOS, which the text did not have */
        if (given && !i && raw && nmk_tokenizer_is_special(t, ids->id[i]) &&
            (prompt->text.bytes < bytes || memcmp(prompt->text.data, raw, bytes) != 0))
            continue;
        nmk_detokenizer_add(&d, t, ids->id[i], &text);
    }
    nmk_buf_free(&text);
}

/* The prompt before the text, as it was given, with its tokens' likelihood where that is asked for. */
static void echo(choice *c) {
    job *j = c->job;
    const nmk_prompt *given = &j->q.prompt[c->prompt];
    const nmk_ids *ids = &j->prompt[c->prompt];
    nmk_buf text = {0};
    c->echoes = false;
    if (given->text.data)
        nmk_buf_add(&text, given->text.data, given->text.bytes);
    else if (j->api->o.tokenizer)
        nmk_tokenizer_decode(j->api->o.tokenizer, ids->id, ids->count, j->q.skip_special_tokens, &text);
    else
        for (size_t i = 0; i < ids->count; i++) nmk_buf_printf(&text, "%d ", ids->id[i]);
    if (c->asked && j->q.sampling.logprobs >= 0) {
        place_prompt(c, given->text.data);
        for (size_t i = 0; i < ids->count; i++) {
            keep_likely(c, ids->id[i], &c->asked[i].likely);
            c->likely[c->likely_count - 1].first = c->asked[i].first;
            c->likely[c->likely_count - 1].text_offset = c->asked[i].text_offset;
            c->end[c->likely_count - 1] = 0; /* they go with the prompt */
        }
    }
    c->characters += characters(text.data, text.length);
    say_text(c, text.data, text.length);
    nmk_buf_free(&text);
}

static void take_token(choice *c, int32_t token, const nmk_logprobs *logprobs, uint64_t ns) {
    nmk_metrics *m = &c->job->api->metrics;
    if (c->done) return;
    if (c->tokens) {
        nmk_metric_add(&m->between_tokens, NMK_METRIC_TOKEN_TIME, seconds(c->last_ns, ns));
    } else {
        nmk_metric_add(&m->first_token, NMK_METRIC_LATENCY, seconds(c->job->arrived_ns, ns));
        c->first_ns = ns;
    }
    c->last_ns = ns;
    if (c->echoes) echo(c);
    if (c->job->q.echo_alone) return;
    if (c->held >= 0) feed(c, c->held);
    c->held = -1;
    c->tokens++;
    keep_likely(c, token, logprobs);
    if (!c->met && is_stop(c, token))
        c->held = token; /* text only if something follows: then it came before min_tokens */
    else if (!c->met)
        feed(c, token);
    if (c->met) {
        cancel(c);
        complete(c, false);
    } else {
        send_out(c->job);
    }
}

static void admit(nmk_api *api);

static void take_end(choice *c, nmk_batch_end end, const char *message) {
    job *j = c->job;
    nmk_api *api = j->api;
    nmk_api_error e;
    api->submitted--;
    c->id = 0;
    if (!c->done) switch (end) {
        case NMK_BATCH_STOP: complete(c, j->q.echo_alone); break; /* a token that was not asked for ends nothing */
        case NMK_BATCH_LENGTH:
            if (c->held >= 0) feed(c, c->held);
            complete(c, true);
            break;
        case NMK_BATCH_CANCEL:
            nmk_api_fail(&e, 503, NULL, "shutting_down", "The server is shutting down.");
            fail_job(j, NMK_END_ABORT, &e);
            break;
        case NMK_BATCH_FAILED:
            nmk_api_fail(&e, 500, NULL, "engine_failed", "The engine failed: %s",
                         message ? message : "no reason given");
            log_engine(message);
            fail_job(j, NMK_END_ERROR, &e);
            break;
        case NMK_BATCH_ASTRAY: /* the same would happen again */
            nmk_api_fail(&e, 400, NULL, "constraint_failed", "The answer cannot be continued in its form: %s",
                         message ? message : "no reason given");
            fail_job(j, NMK_END_ERROR, &e);
            break;
        case NMK_BATCH_LOST:
            fail_lost(&e);
            fail_job(j, NMK_END_ERROR, &e);
            break;
        }
    unref(j);
    admit(api);
}

static void trace_to_file(nmk_api *api);

static void on_wake(void *ctx) {
    nmk_api *api = ctx;
    if (api->wants_tasks) trace_to_file(api);
    pthread_mutex_lock(&api->lock);
    event *events = api->events;
    size_t count = api->event_count;
    api->events = NULL, api->event_count = api->event_capacity = 0;
    pthread_mutex_unlock(&api->lock);
    for (size_t i = 0; i < count; i++) {
        const event *e = &events[i];
        switch (e->kind) {
        case START: take_start(e->choice, e->cached, e->ns); break;
        case PROMPT: take_prompt(e->choice, e->index, e->logprobs); break;
        case TOKEN: take_token(e->choice, e->token, e->logprobs, e->ns); break;
        case END: take_end(e->choice, e->end, e->message); break;
        }
        free(e->message), free(e->logprobs);
    }
    free(events);
}

/* ---------------------------------------------------------------- starting */

/* What keys have cached is theirs alone, and what a request salts is for those who know the salt. */
static uint64_t salt_of(const job *j) {
    const char *said = j->q.cache_salt ? j->q.cache_salt : "";
    uint64_t key = XXH3_64bits_withSeed(&j->key, sizeof j->key, j->api->secret);
    if (j->api->o.no_cache || j->choice->asked) { /* a salt that no other request has */
        uint64_t number = ++j->api->salts;
        return XXH3_64bits_withSeed(&number, sizeof number, ~key);
    }
    return XXH3_64bits_withSeed(said, strlen(said), key);
}

static nmk_sampler sampler_of(const nmk_sampling *s, uint64_t seed) {
    nmk_sampler r = {.temperature = (float)s->temperature,
                     .seed = seed,
                     .top_k = s->top_k,
                     .top_p = (float)s->top_p,
                     .min_p = (float)s->min_p,
                     .presence_penalty = (float)s->presence_penalty,
                     .frequency_penalty = (float)s->frequency_penalty,
                     .repetition_penalty = (float)s->repetition_penalty,
                     .bias = s->bias,
                     .bias_count = s->bias_count,
                     .logprobs = s->logprobs + 1};
    if (!(r.top_p > 0)) r.top_k = 1; /* there 0 is all, here it is the most likely token */
    return r;
}

/* Alternatives to each token of the prompt; -1: it is not asked how likely they are. */
static int prompt_logprobs(const nmk_sampling *s, bool echoed) {
    int most = echoed ? s->logprobs : -1;
    return s->prompt_logprobs > most ? s->prompt_logprobs : most;
}

static bool guide_mask(void *of, uint32_t *mask, nmk_err *e) { return nmk_walker_mask(of, mask, e); }
static bool guide_take(void *of, int32_t token, nmk_err *e) { return nmk_walker_take(of, token, e); }

static int submit(choice *c, nmk_err *e) {
    const job *j = c->job;
    const nmk_api_options *o = &j->api->o;
    const nmk_sampling *s = &j->q.sampling;
    const nmk_ids *prompt = &j->prompt[c->prompt];
    int own = s->ignore_eos ? 0 : o->stop_count, count = own + s->stop_id_count;
    int32_t *stop = xcalloc((size_t)count + 1, sizeof *stop);
    uint64_t seed = (uint64_t)s->seed + (uint64_t)(c->index - c->prompt * s->n);
    if (!s->seeded && getrandom(&seed, sizeof seed, 0) != sizeof seed) abort(); /* so few bytes are always given */
    for (int i = 0; i < own; i++) stop[i] = o->stop_ids[i];
    for (int i = 0; i < s->stop_id_count; i++) stop[own + i] = s->stop_id[i];
    nmk_batch_request request = {.prompt = prompt->id,
                                 .prompt_tokens = (int)prompt->count,
                                 .max_tokens = j->max_tokens[c->prompt],
                                 .min_tokens = s->min_tokens,
                                 .sampler = sampler_of(s, seed),
                                 .stop_ids = stop,
                                 .stop_count = count,
                                 .cap = j->cap,
                                 .prompt_logprobs = c->asked ? prompt_logprobs(s, j->q.echo) + 1 : 0,
                                 .on_prompt = on_prompt,
                                 .salt = salt_of(j),
                                 .client = (uint64_t)(j->key + 1),
                                 .exact = s->seeded, /* the same seed, the same text, whatever is cached */
                                 .guide = {c->walker, guide_mask, guide_take},
                                 .user = c,
                                 .on_start = on_start,
                                 .on_token = on_token,
                                 .on_end = on_end};
    int rc = nmk_batch_submit(o->batch, &request, &c->id, e);
    free(stop);
    return rc;
}

/* Of those that wait, the first one whose key has waited longest for a turn. */
static choice *next_choice(nmk_api *api) {
    choice *next = api->queue;
    for (choice *c = api->queue; c; c = c->next)
        if (api->turn[c->job->key + 1] < api->turn[next->job->key + 1]) next = c;
    api->turn[next->job->key + 1] = ++api->turns;
    return next;
}

/* Gives the batch what it may have. */
static void admit(nmk_api *api) {
    while (api->queue && (!api->o.max_rows || api->submitted < api->o.max_rows)) {
        choice *c = next_choice(api);
        nmk_err why = {""};
        nmk_api_error e;
        nmk_batch_stats stats;
        unqueue(c);
        if (!submit(c, &why)) {
            if (!api->submitted++) api->busy_since_ms = now_ms();
            continue;
        }
        nmk_batch_read_stats(api->o.batch, &stats);
        if (stats.lost)
            fail_lost(&e);
        else /* it will never fit: no reason to try again */
            nmk_api_fail(&e, 400, NULL, "invalid_value", "The request cannot be taken: %s", why.text);
        fail_job(c->job, NMK_END_ERROR, &e);
        unref(c->job);
    }
}

static void make_choices(job *j) {
    nmk_api *api = j->api;
    const nmk_sampling *s = &j->q.sampling;
    bool chat = j->q.messages != NULL;
    nmk_parser_options options = {.no_calls = !j->q.tools || j->q.tool_choice_none,
                                  .max_calls = j->q.parallel_tool_calls ? 0 : 1,
                                  .tools = j->q.tools,
                                  .verbatim = j->q.form != NMK_FORM_FREE,
                                  .show_special = !j->q.skip_special_tokens};
    while (api->turn_count < j->key + 2) {
        api->turn = xrealloc(api->turn, (size_t)(api->turn_count + 1) * sizeof *api->turn);
        api->turn[api->turn_count++] = 0;
    }
    j->choice_count = j->open = j->prompt_count * s->n;
    j->choice = xcalloc((size_t)j->choice_count, sizeof *j->choice);
    j->said = xcalloc((size_t)j->choice_count, sizeof *j->said);
    for (int i = 0; i < j->choice_count; i++) {
        choice *c = &j->choice[i];
        *c = (choice){.job = j,
                      .index = i,
                      .prompt = i / s->n,
                      .held = -1,
                      .queued = true,
                      .queued_ns = nmk_now_ns(),
                      .said = &j->said[i]};
        const nmk_ids *prompt = &j->prompt[c->prompt];
        c->walker = j->masks ? nmk_walker_new(j->masks) : NULL;
        if (prompt_logprobs(s, j->q.echo) >= 0) {
            c->asked = xcalloc(prompt->count, sizeof *c->asked);
            for (size_t k = 0; k < prompt->count; k++) c->asked[k].token = prompt->id[k];
            c->asked[0].first = true;
        }
        c->echoes = j->q.echo;
        c->stop = nmk_stop_new(s->stop, s->stop_count, s->keep_stop);
        if (api->o.tokenizer)
            c->parser = nmk_parser_new(api->o.tokenizer, chat && api->has_markers ? &api->markers : NULL, prompt->id,
                                       prompt->count, options, on_said, c);
        nmk_metric_add(&api->metrics.prompt_tokens, NMK_METRIC_TOKENS, (double)prompt->count);
        nmk_metric_add(&api->metrics.max_tokens, NMK_METRIC_TOKENS,
                       s->max_tokens ? s->max_tokens : j->max_tokens[c->prompt]);
        nmk_metric_add(&api->metrics.most_tokens, NMK_METRIC_TOKENS, j->max_tokens[c->prompt]);
        *api->queue_tail = c, api->queue_tail = &c->next;
        api->queued++, j->refs++;
    }
    nmk_metric_add(&api->metrics.n, NMK_METRIC_N, s->n);
}

static void start(job *j) {
    nmk_api *api = j->api;
    nmk_api_error e;
    nmk_batch_stats stats;
    nmk_batch_read_stats(api->o.batch, &stats);
    /* all of its answers or none */
    if (stats.lost || stats.waiting + api->queued + j->prompt_count * j->q.sampling.n > MOST_WAITING) {
        if (stats.lost)
            fail_lost(&e);
        else
            nmk_api_fail(&e, 503, NULL, "overloaded", "Too many requests are waiting.");
        respond_error(take_response(j), j->body, &e);
        return;
    }
    nmk_reply_kind kind = bodies[j->body].kind;
    const char *model = j->q.model ? j->q.model : api->o.names[0];
    make_choices(j);
    if (j->q.stream)
        nmk_stream_init(&j->stream, kind, model, j->choice_count);
    else
        nmk_reply_init(&j->reply, kind, model);
    nmk_reply *reply = j->q.stream ? &j->stream.reply : &j->reply;
    reply->tokenizer = api->o.tokenizer, reply->tokens_as_ids = j->q.sampling.tokens_as_ids;
    reply->special_tokens = !j->q.skip_special_tokens;
    reply->asked = j->q.root, reply->prompt_tokens = (int)j->prompt[0].count;
    admit(api); /* a refusal is still a plain answer */
    if (!j->r) return;
    if (j->q.stream) {
        nmk_http_begin_stream(j->r);
        nmk_stream_open(&j->stream, &j->out);
    }
    for (int i = 0; i < j->choice_count; i++)
        if (j->choice[i].echoes && !j->choice[i].asked) echo(&j->choice[i]);
    send_out(j);
}

static void prepared(void *ctx, void *arg) {
    (void)ctx;
    job *j = arg;
    if (j->r && j->failed)
        respond_error(take_response(j), j->body, &j->error);
    else if (j->r && j->answer.length)
        respond(j, &j->answer);
    else if (j->r)
        start(j);
    unref(j);
}

/* ---------------------------------------------------------------- endpoints */

static void give_to_worker(nmk_api *api, const nmk_http_request *h, nmk_http_response *r, nmk_body body) {
    pthread_mutex_lock(&api->lock);
    bool full = api->todo && api->todo_bytes + h->body_bytes > MOST_TODO_BYTES;
    pthread_mutex_unlock(&api->lock);
    if (full) {
        nmk_api_error e;
        nmk_api_fail(&e, 503, NULL, "overloaded", "Too many large requests are waiting.");
        respond_error(r, body, &e);
        return;
    }
    job *j = xcalloc(1, sizeof *j);
    *j = (job){.api = api, .refs = 1, .body = body, .r = r, .key = h->key, .id = h->id, .arrived_ns = h->arrived_ns};
    j->text = nmk_http_take_body(h);
    nmk_http_set_user(r, j);
    pthread_mutex_lock(&api->lock);
    *api->todo_tail = j, api->todo_tail = &j->next;
    api->todo_bytes += j->text.length;
    pthread_cond_signal(&api->work);
    pthread_mutex_unlock(&api->lock);
}

static void reply_health(nmk_api *api, nmk_http_response *r) {
    nmk_batch_stats s;
    nmk_batch_read_stats(api->o.batch, &s);
    uint64_t since = s.last_step_ms > api->busy_since_ms ? s.last_step_ms : api->busy_since_ms, now = now_ms();
    uint64_t still_ms = api->submitted && now > since ? now - since : 0;
    bool stalled = still_ms > (uint64_t)api->o.stall_ms;
    if (stalled != api->stalled) log_stall(stalled, &s, api->queued, still_ms);
    api->stalled = stalled;
    if (s.lost)
        nmk_http_respond_error(r, 503, NULL, NULL, "engine_lost", "The engine is lost.");
    else if (stalled)
        nmk_http_respond_error(r, 503, NULL, NULL, "engine_stalled", "No step for %llu s while %d sequences run.",
                               (unsigned long long)still_ms / 1000, s.running);
    else
        nmk_http_respond(r, 200, "application/json", "{\"status\":\"ok\"}", 15);
}

static void reply_metrics(nmk_api *api, nmk_http_response *r) {
    nmk_batch_stats s;
    nmk_buf text = {0};
    nmk_batch_read_stats(api->o.batch, &s);
    nmk_metrics_write(&api->metrics, &s, api->queued, api->o.names[0], &text);
    nmk_http_respond(r, 200, "text/plain; version=0.0.4; charset=utf-8", text.data, text.length);
    nmk_buf_free(&text);
}

static void reply_page(nmk_http_response *r) {
    nmk_http_add_field(r, "Content-Security-Policy", nmk_page_policy);
    nmk_http_add_field(r, "X-Content-Type-Options", "nosniff");
    nmk_http_add_field(r, "Referrer-Policy", "no-referrer");
    nmk_http_respond(r, 200, "text/html; charset=utf-8", nmk_page, (size_t)(nmk_page_end - nmk_page));
}

/* Two APIs have models at the same place; Anthropic's clients say which version of theirs they mean. */
static bool for_anthropic(const nmk_http_request *h) { return nmk_http_field(h, "anthropic-version") != NULL; }

static void reply_models(nmk_api *api, const nmk_http_request *h, nmk_buf *text) {
    (for_anthropic(h) ? nmk_messages_models : nmk_reply_models)(api->o.names, api->o.name_count, api->created,
                                                                api->o.max_len, text);
}

static void reply_model(nmk_api *api, const nmk_http_request *h, nmk_http_response *r) {
    nmk_buf text = {0};
    int status = 200;
    for (int i = 0; i < api->o.name_count && !text.length; i++)
        if (!strcmp(h->rest, api->o.names[i]))
            (for_anthropic(h) ? nmk_messages_model : nmk_reply_model)(api->o.names[i], api->created, api->o.max_len,
                                                                      &text);
    if (!text.length) {
        nmk_api_error e;
        status = 404;
        nmk_api_fail(&e, status, "model", "model_not_found", "The model '%.200s' does not exist.", h->rest);
        nmk_reply_error(for_anthropic(h) ? NMK_REPLY_MESSAGE : NMK_REPLY_CHAT, &e, &text);
    }
    nmk_http_respond(r, status, "application/json", text.data, text.length);
    nmk_buf_free(&text);
}

/* ---------------------------------------------------------------- traces of tasks */

enum { TRACE_STEPS = 2 }; /* unless said otherwise */

/* From the batch to the trace's thread, which makes text of it, and for a client back to the loop. */
typedef struct {
    nmk_api *api;
    uint64_t id; /* of the response; 0: to the file */
    nmk_tasks *tasks;
    nmk_buf text;
    char *why; /* NULL: it is there */
} tasks_order;

static void free_order(tasks_order *o) {
    nmk_tasks_free(o->tasks);
    nmk_buf_free(&o->text);
    free(o->why), free(o);
}

static void log_tasks(const tasks_order *o, const char *why) {
    nmk_log_line l;
    nmk_log_begin(&l, why ? NMK_LOG_WARNING : NMK_LOG_INFO, why ? "tasks not traced" : "tasks traced");
    if (why) nmk_log_text(&l, "reason", why);
    if (!why && !o->id) nmk_log_text(&l, "file", nmk_trace_tasks_path(o->api->o.trace));
    if (!why) nmk_log_int(&l, "bytes", (int64_t)o->text.length);
    nmk_log_end(&l);
}

static void answer_tasks(void *ctx, void *arg) {
    nmk_api *api = ctx;
    tasks_order *o = arg;
    nmk_http_response *r = nmk_http_find(api->http, o->id);
    if (r && o->why)
        nmk_http_respond_error(r, 503, NULL, NULL, "not_traced", "No trace: %s.", o->why);
    else if (r)
        nmk_http_respond(r, 200, "application/json", o->text.data, o->text.length);
    free_order(o);
}

static void write_tasks(void *arg) {
    tasks_order *o = arg;
    nmk_err e;
    if (o->tasks) nmk_tasks_text(o->tasks, &o->text);
    const char *why = o->why;
    if (!why && !o->id && nmk_trace_write_tasks(o->api->o.trace, &o->text, &e)) why = e.text;
    log_tasks(o, why);
    if (!o->id || nmk_http_post(o->api->http, answer_tasks, o)) free_order(o);
}

static void on_tasks(void *user, nmk_tasks *tasks, const char *why) {
    tasks_order *o = user;
    o->tasks = tasks, o->why = why ? xstrdup(why) : NULL;
    nmk_trace_run(o->api->o.trace, write_tasks, o);
}

static int order_tasks(nmk_api *api, uint64_t id, int steps, nmk_err *e) {
    tasks_order *o = xcalloc(1, sizeof *o);
    o->api = api, o->id = id;
    if (nmk_batch_trace(api->o.batch, steps, !id, on_tasks, o, e) == 0) return 0;
    free_order(o);
    return -1;
}

static void trace_to_file(nmk_api *api) {
    nmk_err e;
    nmk_log_line l;
    api->wants_tasks = 0;
    if (order_tasks(api, 0, TRACE_STEPS, &e) == 0) return;
    nmk_log_begin(&l, NMK_LOG_WARNING, "tasks not traced");
    nmk_log_text(&l, "reason", e.text);
    nmk_log_end(&l);
}

/* The number of the query's only field; -1: it is not one. */
static int steps_of(const char *query) {
    char *end;
    if (!*query) return TRACE_STEPS;
    if (strncmp(query, "steps=", 6) || query[6] < '0' || query[6] > '9') return -1;
    long n = strtol(query + 6, &end, 10);
    return *end || n < 1 || n > NMK_TASKS_STEPS ? -1 : (int)n;
}

static void reply_trace(nmk_api *api, const nmk_http_request *h, nmk_http_response *r) {
    nmk_err e;
    int steps = steps_of(h->query);
    if (!api->o.trace)
        nmk_http_respond_error(r, 404, NULL, NULL, "not_enabled", "Traces are off: start nmk-serve with --trace FILE.");
    else if (steps < 0)
        nmk_http_respond_error(r, 400, NULL, "steps", "invalid_value", "Expected ?steps=N, with N from 1 to %d.",
                               NMK_TASKS_STEPS);
    else if (order_tasks(api, h->id, steps, &e))
        nmk_http_respond_error(r, 409, NULL, NULL, "not_traced", "No trace: %s.", e.text);
}

static void reply_kept(nmk_api *api, const nmk_http_request *h, nmk_http_response *r) {
    nmk_buf text = {0};
    bool found = api->kept && (h->method == NMK_HTTP_DELETE ? nmk_kept_remove(api->kept, h->key, h->rest)
                                                            : nmk_kept_body(api->kept, h->key, h->rest, &text));
    if (found && h->method == NMK_HTTP_DELETE) {
        nmk_buf_puts(&text, "{\"id\":");
        nmk_reply_string(h->rest, strlen(h->rest), &text);
        nmk_buf_puts(&text, ",\"object\":\"response\",\"deleted\":true}");
    }
    if (found)
        nmk_http_respond(r, 200, "application/json", text.data, text.length);
    else
        nmk_http_respond_error(r, 404, NULL, NULL, "not_found",
                               "Response with id '%.100s' not found: it was not kept, or is not any more.", h->rest);
    nmk_buf_free(&text);
}

static void on_request(void *ctx, const nmk_http_request *h, nmk_http_response *r) {
    nmk_api *api = ctx;
    nmk_buf text = {0};
    switch (h->route) {
    case MODEL: reply_model(api, h, r); return;
    case CHAT: give_to_worker(api, h, r, NMK_BODY_CHAT); return;
    case COMPLETIONS: give_to_worker(api, h, r, NMK_BODY_COMPLETION); return;
    case RESPONSES: give_to_worker(api, h, r, NMK_BODY_RESPONSE); return;
    case RESPONSE: reply_kept(api, h, r); return;
    case MESSAGES: give_to_worker(api, h, r, NMK_BODY_MESSAGE); return;
    case COUNT_TOKENS: give_to_worker(api, h, r, NMK_BODY_COUNT); return;
    case TOKENIZE: give_to_worker(api, h, r, NMK_BODY_TOKENIZE); return;
    case DETOKENIZE: give_to_worker(api, h, r, NMK_BODY_DETOKENIZE); return;
    case HEALTH: reply_health(api, r); return;
    case METRICS: reply_metrics(api, r); return;
    case TRACE: reply_trace(api, h, r); return;
    case PAGE: reply_page(r); return;
    case MODELS: reply_models(api, h, &text); break;
    case VERSION:
        nmk_buf_puts(&text, "{\"version\":");
        nmk_reply_string(api->o.version, strlen(api->o.version), &text);
        nmk_buf_puts(&text, "}");
        break;
    }
    nmk_http_respond(r, 200, "application/json", text.data, text.length);
    nmk_buf_free(&text);
}

/* The client is gone. */
static void on_closed(void *ctx, nmk_http_response *r) {
    (void)ctx;
    job *j = nmk_http_user(r);
    if (!j) return; /* one that waits for a trace */
    if (j->choice) {
        nmk_usage usage = usage_of(j);
        log_job(j, &usage, "request cancelled", 499, "cancelled");
    }
    j->r = NULL;
    drop_choices(j, NMK_END_ABORT);
}

/* What the HTTP side refused by itself, and what does not generate; the rest has its own lines. */
static void on_access(void *ctx, const nmk_http_access *a) {
    nmk_api *api = ctx;
    nmk_log_line l;
    bool post = a->method && !strcmp(a->method, "POST");
    bool often = a->path && (!strcmp(a->path, "/health") || !strcmp(a->path, "/metrics"));
    nmk_log_level level = NMK_LOG_INFO;
    if (!a->status || post || often || api->o.quiet) level = NMK_LOG_DEBUG;
    if (!a->handed && a->status) level = NMK_LOG_WARNING;
    nmk_log_begin(&l, level, a->handed ? "http" : "http refused");
    nmk_log_int(&l, "id", (int64_t)a->id);
    nmk_log_text(&l, "peer", a->peer);
    nmk_log_text(&l, "method", a->method);
    nmk_log_text(&l, "path", a->path);
    nmk_log_int(&l, "status", a->status);
    if (a->cut) nmk_log_text(&l, "cut", "yes");
    nmk_log_int(&l, "bytes", (int64_t)a->bytes);
    nmk_log_number(&l, "duration_ms", ms_since(a->arrived_ns, a->done_ns));
    nmk_log_end(&l);
}

const nmk_http_callbacks nmk_api_callbacks = {
    .on_request = on_request, .on_closed = on_closed, .on_wake = on_wake, .on_access = on_access};

/* ---------------------------------------------------------------- open, close */

nmk_api *nmk_api_new(void) {
    nmk_api *api = xcalloc(1, sizeof *api);
    api->created = (int64_t)time(NULL);
    api->queue_tail = &api->queue, api->todo_tail = &api->todo;
    if (getrandom(&api->secret, sizeof api->secret, 0) != sizeof api->secret)
        abort(); /* so few bytes are always given */
    pthread_mutex_init(&api->lock, NULL);
    pthread_cond_init(&api->work, NULL);
    return api;
}

void nmk_api_start(nmk_api *api, nmk_http *http, const nmk_api_options *o) {
    api->http = http, api->o = *o;
    if (!api->o.stall_ms) api->o.stall_ms = STALL_MS;
    if (o->kept_bytes) api->kept = nmk_kept_new(o->kept_bytes);
    api->has_markers =
        o->tokenizer &&
        nmk_markers_find(&api->markers, o->tokenizer, o->chat_template ? nmk_template_source(o->chat_template) : NULL);
    if (api->has_markers) nmk_markers_end_thinking(&api->markers, o->tokenizer, &api->end_thinking);
    if (o->tokenizer)
        api->constraints = nmk_constraints_new(o->tokenizer, api->has_markers ? &api->markers : NULL, o->limits.vocab,
                                               o->stop_ids, o->stop_count);
    if (pthread_create(&api->worker, NULL, work, api)) abort(); /* a process that may have no second thread */
    api->has_worker = true;
}

void nmk_api_trace_tasks(nmk_api *api) {
    api->wants_tasks = 1;
    nmk_http_wake(api->http);
}

void nmk_api_stop(nmk_api *api) {
    pthread_mutex_lock(&api->lock);
    api->stopping = true;
    pthread_cond_signal(&api->work);
    pthread_mutex_unlock(&api->lock);
    if (api->has_worker) pthread_join(api->worker, NULL);
    api->has_worker = false;
}

void nmk_api_close(nmk_api *api) {
    if (!api) return;
    for (size_t i = 0; i < api->event_count; i++) {
        if (api->events[i].kind == END) unref(api->events[i].choice->job);
        free(api->events[i].message), free(api->events[i].logprobs);
    }
    free(api->events), free(api->turn);
    nmk_kept_free(api->kept);
    nmk_ids_free(&api->end_thinking);
    nmk_constraints_free(api->constraints);
    nmk_buf_free(&api->scratch);
    pthread_cond_destroy(&api->work);
    pthread_mutex_destroy(&api->lock);
    free(api);
}
