/* One HTTP/1.1 request at a time out of bytes that come in any pieces.  llhttp does the framing; this adds the limits,
 * and what a server that does not want to be smuggled through must also refuse.
 *
 * It knows no socket.  The result does not depend on how the bytes were cut (tests/server/http_parse.c). */
#ifndef NMK_HTTP_PARSE_H
#define NMK_HTTP_PARSE_H

#include <stdbool.h>

#include "util.h"

#include <llhttp.h>

typedef struct {
    size_t max_header_bytes; /* request line, header fields and trailers, as they came */
    size_t max_body_bytes;   /* after taking the chunks apart */
} nmk_http_limits;

typedef struct {
    size_t name, value; /* where in text */
} nmk_http_place;

enum { NMK_HTTP_MAX_FIELDS = 128 };

typedef struct {
    /* Valid from NMK_HTTP_HEAD on. */
    nmk_buf text;                               /* everything below points into it; parts end in NUL */
    size_t target, path, query;                 /* as it came; decoded; "" or what follows the '?', not decoded */
    nmk_http_place fields[NMK_HTTP_MAX_FIELDS]; /* names in lower case */
    unsigned field_count;
    llhttp_method_t method;
    bool http10, keep_alive, expects_continue;
    bool has_length;
    uint64_t length; /* Content-Length */

    /* Valid from NMK_HTTP_DONE on. */
    nmk_buf body;
    uint64_t body_bytes; /* also counts what discard threw away */

    bool discard; /* set by the owner: do not keep the body */

    /* After NMK_HTTP_BAD: the status to answer with, and why. */
    int status;
    const char *why;

    llhttp_t llhttp;
    nmk_http_limits limits;
    size_t head_bytes, frame_bytes; /* spent so far; the second on chunk lines and trailers */
    bool started, in_body, done, raw_cr, raw_lf, in_name;
} nmk_http_parser;

/* Call once; then nmk_http_parser_next() before each further request. */
void nmk_http_parser_init(nmk_http_parser *p, nmk_http_limits limits);
void nmk_http_parser_next(nmk_http_parser *p);
void nmk_http_parser_free(nmk_http_parser *p);

enum {
    NMK_HTTP_BAD = -1, /* see status; nothing more can be read from this connection */
    NMK_HTTP_MORE,     /* all bytes used, the request is not complete */
    NMK_HTTP_HEAD,     /* the head is complete; go on with the rest */
    NMK_HTTP_DONE,     /* the request is complete; the rest belongs to the next one */
};

/* Uses up to n bytes, *used says how many. */
int nmk_http_parse(nmk_http_parser *p, const char *data, size_t n, size_t *used);

/* The value of the first field of that (lower-case) name, or NULL. */
const char *nmk_http_parser_field(const nmk_http_parser *p, const char *name);

#endif
