/* A client of one streamed answer: it sends a request, reads server-sent events, and says when each came.
 *
 * It never blocks: the caller polls the descriptor for what nmk_sse_wants() and calls nmk_sse_step().  Any HTTP/1.1
 * server will do, with or without chunks; no TLS. */
#ifndef NMK_BENCH_SSE_H
#define NMK_BENCH_SSE_H

#include <netdb.h>
#include <stdbool.h>

#include "util.h"

/* Where requests go. */
typedef struct {
    struct sockaddr_storage address;
    socklen_t address_bytes;
    char host[300];   /* of the field Host */
    char prefix[300]; /* of every path, such as "/v1" */
    const char *key;  /* NULL: none */
} nmk_sse_target;

/* Takes http://HOST[:PORT][/PREFIX] apart and looks the host up. */
int nmk_sse_resolve(nmk_sse_target *target, const char *url, const char *key, nmk_err *e);

/* An event's data, and when it came; nonzero ends the stream as if it had ended there. */
typedef int (*nmk_sse_fn)(void *user, const char *data, size_t bytes, uint64_t now_ns);

typedef struct {
    int fd;                             /* -1: closed */
    int status;                         /* 0: not known yet */
    bool events, chunked, headers_done; /* events: the answer is a stream of them */
    nmk_buf out, in, text;              /* to be sent; as it came; without chunks, not looked at yet */
    size_t sent, in_done, text_done;
    size_t chunk_left;
    int64_t length; /* of the body; -1: to the end */
    uint64_t got;   /* bytes of the body */
    int state;
    nmk_sse_fn on_event;
    void *user;
} nmk_sse;

/* Begins to connect.  body NULL: GET. */
int nmk_sse_open(nmk_sse *s, const nmk_sse_target *target, const char *path, const char *body, nmk_sse_fn on_event,
                 void *user, nmk_err *e);
short nmk_sse_wants(const nmk_sse *s); /* POLLIN or POLLOUT */

/* After poll.  0: it goes on; 1: the answer is complete (status may be any; text holds the body of one that is no
 * stream); -1: it broke off. */
int nmk_sse_step(nmk_sse *s, nmk_err *e);
void nmk_sse_close(nmk_sse *s);

/* A whole answer, waited for; the body is the caller's.  -1 also for a status but 200, with the server's words. */
int nmk_sse_fetch(const nmk_sse_target *target, const char *path, const char *body, nmk_buf *answer, nmk_err *e);

/* What a failed answer says of itself: error.message, else its first characters. */
void nmk_sse_reason(const nmk_sse *s, char *text, size_t bytes);

#endif
