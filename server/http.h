/* The HTTP side of the server: one thread, one epoll loop, HTTP/1.1 and 1.0.  It knows nothing of models.
 *
 * A request is handed over whole, with a response handle.  The handle is answered at once or at any later time;
 * requests of one connection are answered one after the other, so those that were sent ahead wait.
 *
 * Threads: everything runs on the thread inside nmk_http_run(), except nmk_http_post, nmk_http_wake and nmk_http_drain.
 * No call into this file calls back, except to on_access: what follows from it happens at the end of the loop's turn.
 *
 * A client that goes away is noticed at once, also while nothing is written to it.  A FIN counts as that: close() and
 * shutdown(SHUT_WR) look alike from here, and the clients people use cancel with the first and never send the second.
 * What has already been answered is still delivered, so `printf 'GET /health ...' | nc -N` works.
 *
 * A handle is valid until it is answered (respond, finish, abort) or on_closed returns.  Other threads keep its id. */
#ifndef NMK_HTTP_H
#define NMK_HTTP_H

#include <stdbool.h>

#include "util.h"

typedef struct nmk_http nmk_http;
typedef struct nmk_http_response nmk_http_response;

enum {
    NMK_HTTP_GET = 1, /* HEAD too: the answer is cut here */
    NMK_HTTP_POST = 2,
    NMK_HTTP_PUT = 4,
    NMK_HTTP_DELETE = 8,
    NMK_HTTP_PATCH = 16,
    NMK_HTTP_OTHER = 32, /* reaches on_request only without routes */
};

typedef struct {
    const char *path; /* "/v1/models"; "/v1/models/" and a star: everything below */
    unsigned methods;
    bool open; /* needs no key */
    /* Adds the body of an error; NULL: as nmk_http_error_json has it. */
    void (*error)(nmk_buf *b, int status, const char *param, const char *code, const char *message);
} nmk_http_route;

/* Zero is the default for each; a time of -1 is none.  What it points to has to stay until nmk_http_close. */
typedef struct {
    const char *host; /* an IPv4 or IPv6 address, or localhost; default 127.0.0.1.  :: takes IPv4 too */
    int port;         /* 0: any free one, see nmk_http_port */
    int listen_fd;    /* above 0: a socket that listens already, taken over; host and port then say nothing */
    int backlog;
    int max_connections;     /* 1000.  One more gets 503, after the longest idle one was closed in vain */
    size_t max_header_bytes; /* 32 KiB, else 431 (414 when it is the request line) */
    size_t max_body_bytes;   /* 32 MiB, else 413 */
    size_t max_held_bytes;   /* 512 MiB: all bodies not yet handed over, together; else 503 */

    size_t high_water;       /* 256 KiB: with more queued, nmk_http_send says so */
    size_t low_water;        /* a quarter of that: on_drained */
    size_t max_queued_bytes; /* 16 MiB: a stream with more queued is cut */
    int send_buffer_bytes;   /* SO_SNDBUF; 0 leaves it to the kernel */

    int header_ms;    /* 20 s from the first byte to the end of the header, else 408 */
    int body_ms;      /* 30 s for the body, and 1 ms more for every byte that came, else 408 */
    int idle_ms;      /* 75 s between requests */
    int write_ms;     /* 60 s in which the client takes nothing of what is queued */
    int keepalive_ms; /* 10 s of silence in a stream, then a comment */
    int linger_ms;    /* 2 s to read what the client still sends after the last answer */

    const char *const *api_keys; /* any of these, as Authorization: Bearer or X-API-Key; none: no guard */
    unsigned api_key_count;
    const char *const *cors_origins; /* "*" or exact origins; none: no CORS fields */
    unsigned cors_origin_count;
    const nmk_http_route *routes; /* none: every path is handed over, and guarded by the key */
    unsigned route_count;
} nmk_http_options;

/* Valid until on_request returns. */
typedef struct {
    int route;       /* which of the options', or -1 */
    unsigned method; /* HEAD comes as GET */
    const char *method_name;
    const char *path, *query; /* the path decoded; the query not, "" if none */
    const char *rest;         /* what the star of the route stands for, else "" */
    const char *body;         /* NUL behind it */
    size_t body_bytes;
    const char *peer;    /* "127.0.0.1:40000" */
    int key;             /* which of the options' keys, or -1 */
    uint64_t id;         /* of the response */
    uint64_t arrived_ns; /* its first byte */
    const void *parser;  /* for nmk_http_field */
} nmk_http_request;

/* One answered, or lost, request. */
typedef struct {
    const char *method, *path, *peer;
    int status;  /* 0: none was sent */
    bool cut;    /* the client went away, or the server gave up, before the end */
    bool handed; /* on_request had it; else it was refused here */
    uint64_t bytes, id, arrived_ns, done_ns;
} nmk_http_access;

typedef struct {
    void (*on_request)(void *ctx, const nmk_http_request *q, nmk_http_response *r);
    void (*on_closed)(void *ctx, nmk_http_response *r);     /* the client is gone, r was not answered */
    void (*on_drained)(void *ctx, nmk_http_response *r);    /* may be NULL; after a send that said "wait" */
    void (*on_wake)(void *ctx);                             /* may be NULL; after nmk_http_wake, once or more */
    void (*on_access)(void *ctx, const nmk_http_access *a); /* may be NULL */
} nmk_http_callbacks;

/* Listens; -1 with the reason when it cannot. */
int nmk_http_open(nmk_http **result, const nmk_http_options *o, const nmk_http_callbacks *c, void *ctx, nmk_err *e);
void nmk_http_close(nmk_http *h); /* NULL is fine; not while it runs.  on_closed for what is left */
int nmk_http_port(const nmk_http *h);
const char *nmk_http_address(const nmk_http *h); /* "127.0.0.1:8000", "[::1]:8000" */

/* Serves until drained.  Returns how many requests were cut by the deadline, or -1. */
int nmk_http_run(nmk_http *h, nmk_err *e);

/* From any thread: run f(ctx, arg) on the loop, in order.  -1 when the loop has ended, and f is not called. */
int nmk_http_post(nmk_http *h, void (*f)(void *ctx, void *arg), void *arg);
/* From any thread, and from a signal handler. */
void nmk_http_wake(nmk_http *h);
/* The same.  Takes no new connection, closes idle ones, lets requests end and cuts what is left after deadline_ms (-1:
 * never).  Again with another deadline: that one counts. */
void nmk_http_drain(nmk_http *h, int deadline_ms);

/* From any thread: as nmk_http_drain, but the socket goes on to listen, and who connects waits for another program. */
void nmk_http_leave(nmk_http *h, int deadline_ms);
/* Not while it runs: the socket that listens, the caller's from now on; -1: it was drained. */
int nmk_http_take_listener(nmk_http *h);

/* ---------------------------------------------------------------- requests */

/* A header field by its lower-case name, or NULL. */
const char *nmk_http_field(const nmk_http_request *q, const char *name);
/* Takes the body over, so that it outlives on_request. */
nmk_buf nmk_http_take_body(const nmk_http_request *q);

/* ---------------------------------------------------------------- responses */

uint64_t nmk_http_id(const nmk_http_response *r);
nmk_http_response *nmk_http_find(nmk_http *h, uint64_t id); /* NULL: answered, or the client is gone */
void nmk_http_set_user(nmk_http_response *r, void *user);
void *nmk_http_user(const nmk_http_response *r);

/* A field of the answer; before respond or begin_stream.  Control characters in the value become spaces. */
void nmk_http_add_field(nmk_http_response *r, const char *name, const char *value);

/* The whole answer. */
void nmk_http_respond(nmk_http_response *r, int status, const char *type, const void *body, size_t bytes);

/* {"error":{"message","type","param","code"}}, or as the route has it.  type NULL is what goes with the status; param
 * and code may be NULL. */
void nmk_http_respond_error(nmk_http_response *r, int status, const char *type, const char *param, const char *code,
                            const char *fmt, ...) __attribute__((format(printf, 6, 7)));
void nmk_http_error_json(nmk_buf *b, int status, const char *type, const char *param, const char *code,
                         const char *message);

/* Server-sent events: the header goes out now; then events; finish.  A comment goes out whenever the stream was silent
 * for keepalive_ms. */
void nmk_http_begin_stream(nmk_http_response *r);
/* One event: "data: " and the text, a line each; "event: " before it when name is given.
 *   0   go on
 *   1   the client is slow: better wait for on_drained (nothing is lost)
 *   -1  the stream is beyond saving (max_queued_bytes); on_closed follows */
int nmk_http_send_event(nmk_http_response *r, const char *name, const char *data, size_t bytes);
/* Bytes as they are: whole events. */
int nmk_http_send(nmk_http_response *r, const void *data, size_t bytes);
bool nmk_http_streaming(const nmk_http_response *r);
void nmk_http_finish(nmk_http_response *r);
/* Closes the connection, so that the client sees that the answer is not complete. */
void nmk_http_abort(nmk_http_response *r);

#endif
