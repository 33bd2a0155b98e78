#include "http_parse.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* What a body may cost in chunk lines and trailers: chunks of one byte are legal, and cost five more each. */
enum { FRAME_BYTES_EACH = 16 };

static int bad(nmk_http_parser *p, int status, const char *why) {
    if (!p->status) p->status = status, p->why = why;
    return NMK_HTTP_BAD;
}

/* ---------------------------------------------------------------- what llhttp calls */

static int on_url(llhttp_t *l, const char *data, size_t n) {
    nmk_http_parser *p = l->data;
    nmk_buf_add(&p->text, data, n);
    return 0;
}

static void end_part(nmk_http_parser *p) { nmk_buf_add(&p->text, "", 1); }

static int on_url_complete(llhttp_t *l) {
    end_part(l->data);
    return 0;
}

static int on_field(llhttp_t *l, const char *data, size_t n) {
    nmk_http_parser *p = l->data;
    if (p->in_body) return 0; /* a trailer */
    if (!p->in_name) {
        if (p->field_count == NMK_HTTP_MAX_FIELDS) return bad(p, 431, "too many header fields");
        p->fields[p->field_count].name = p->text.length;
        p->in_name = true;
    }
    size_t at = p->text.length;
    nmk_buf_add(&p->text, data, n);
    for (; at < p->text.length; at++) p->text.data[at] = (char)tolower((unsigned char)p->text.data[at]);
    return 0;
}

static int on_field_complete(llhttp_t *l) {
    nmk_http_parser *p = l->data;
    if (p->in_body) return 0;
    end_part(p);
    p->fields[p->field_count].value = p->text.length;
    p->in_name = false;
    return 0;
}

static int on_value(llhttp_t *l, const char *data, size_t n) {
    nmk_http_parser *p = l->data;
    if (!p->in_body) nmk_buf_add(&p->text, data, n);
    return 0;
}

static int on_value_complete(llhttp_t *l) {
    nmk_http_parser *p = l->data;
    if (p->in_body) return 0;
    size_t start = p->fields[p->field_count++].value;
    while (p->text.length > start && strchr(" \t", p->text.data[p->text.length - 1])) p->text.length--;
    end_part(p);
    return 0;
}

/* Stops there, so that the owner can look at the head before any of the body is kept. */
static int on_head(llhttp_t *l) {
    nmk_http_parser *p = l->data;
    p->in_body = true;
    p->keep_alive = llhttp_should_keep_alive(l);
    l->upgrade = 0; /* offers to speak something else are not taken up */
    return HPE_PAUSED;
}

static int on_body(llhttp_t *l, const char *data, size_t n) {
    nmk_http_parser *p = l->data;
    p->body_bytes += n;
    if (p->body_bytes > p->limits.max_body_bytes) return bad(p, 413, "the request body is too large");
    if (!p->discard) nmk_buf_add(&p->body, data, n);
    return 0;
}

static int on_done(llhttp_t *l) {
    nmk_http_parser *p = l->data;
    p->done = true;
    return HPE_PAUSED;
}

static const llhttp_settings_t settings = {
    .on_url = on_url,
    .on_url_complete = on_url_complete,
    .on_header_field = on_field,
    .on_header_field_complete = on_field_complete,
    .on_header_value = on_value,
    .on_header_value_complete = on_value_complete,
    .on_headers_complete = on_head,
    .on_body = on_body,
    .on_message_complete = on_done,
};

/* ---------------------------------------------------------------- what it leaves to us */

/* Lines end in CR LF and nowhere else has either; no NUL; no line is a continuation of the one before.  llhttp takes
 * folded lines and, by version and build, lone CRs: what stands in front of us may read those otherwise. */
static int check_raw(nmk_http_parser *p, const char *data, size_t n) {
    for (size_t i = 0; i < n; i++) {
        char c = data[i];
        if (p->raw_cr != (c == '\n') || !c) return bad(p, 400, "a line of the header does not end in CR LF");
        if (p->raw_lf && (c == ' ' || c == '\t')) return bad(p, 400, "a header field is continued on a second line");
        p->raw_lf = c == '\n';
        p->raw_cr = c == '\r';
    }
    return 0;
}

/* Path and query of the target.  Both are copied behind the fields: text.data may move while they come in. */
static int split_target(nmk_http_parser *p) {
    char *target = xstrdup(p->text.data + p->target);
    int rc = -1;
    char *at = target;
    if (!strncasecmp(at, "http://", 7) || !strncasecmp(at, "https://", 8)) {
        at = strchr(at, ':') + 3;
        at += strcspn(at, "/?");
    }
    char *query = strchr(at, '?');
    if (query) *query++ = 0;
    p->path = p->text.length;
    if (!*at) nmk_buf_puts(&p->text, at == target ? "" : "/"); /* "http://host" */
    for (; *at; at++) {
        char c = *at;
        if (c == '%') {
            if (nmk_hex_digit(at[1]) < 0 || nmk_hex_digit(at[2]) < 0) goto out;
            c = (char)(nmk_hex_digit(at[1]) << 4 | nmk_hex_digit(at[2]));
            at += 2;
            if (!c) goto out;
        } else if (c == '#') {
            goto out;
        }
        nmk_buf_add(&p->text, &c, 1);
    }
    end_part(p);
    p->query = p->text.length;
    nmk_buf_puts(&p->text, query ? query : "");
    end_part(p);
    const char *path = p->text.data + p->path;
    if (*path != '/' && !(p->method == HTTP_OPTIONS && !strcmp(path, "*"))) goto out;
    rc = 0;
out:
    free(target);
    return rc ? bad(p, 400, "the request target is not a path") : 0;
}

static unsigned count(const nmk_http_parser *p, const char *name) {
    unsigned n = 0;
    for (unsigned i = 0; i < p->field_count; i++) n += !strcmp(p->text.data + p->fields[i].name, name);
    return n;
}

static int check_head(nmk_http_parser *p) {
    const llhttp_t *l = &p->llhttp;
    p->method = (llhttp_method_t)l->method;
    p->http10 = l->http_minor == 0;
    if (l->http_major != 1 || l->http_minor > 1) return bad(p, 400, "only HTTP/1.1 and HTTP/1.0 are spoken here");
    if (split_target(p)) return NMK_HTTP_BAD;
    if (count(p, "")) return bad(p, 400, "a header field without a name");
    if (count(p, "host") > 1) return bad(p, 400, "more than one Host field");
    if (!p->http10 && !count(p, "host")) return bad(p, 400, "no Host field");
    if (count(p, "authorization") > 1) return bad(p, 400, "more than one Authorization field");
    if (count(p, "x-api-key") > 1) return bad(p, 400, "more than one X-API-Key field");
    if (count(p, "content-length") > 1) return bad(p, 400, "more than one Content-Length field");

    const char *length = nmk_http_parser_field(p, "content-length");
    const char *coding = nmk_http_parser_field(p, "transfer-encoding");
    if (coding && length) return bad(p, 400, "both Content-Length and Transfer-Encoding");
    if (coding && p->http10) return bad(p, 400, "Transfer-Encoding in HTTP/1.0");
    if (coding && count(p, "transfer-encoding") > 1) return bad(p, 400, "more than one Transfer-Encoding field");
    if (coding && strcasecmp(coding, "chunked")) return bad(p, 400, "a Transfer-Encoding other than chunked");
    if (length) {
        if (!*length || length[strspn(length, "0123456789")]) return bad(p, 400, "Content-Length is not a number");
        p->has_length = true;
        p->length = l->content_length;
        if (p->length > p->limits.max_body_bytes) return bad(p, 413, "the request body is too large");
    }
    const char *expect = nmk_http_parser_field(p, "expect");
    if (expect && !p->http10) {
        if (strcasecmp(expect, "100-continue")) return bad(p, 417, "an Expect other than 100-continue");
        p->expects_continue = coding || p->length;
    }
    return 0;
}

static int check_first_bytes(nmk_http_parser *p, const char *data) {
    if (p->text.length || p->head_bytes) return 0;
    if (*data == 0x16) return bad(p, 400, "this port speaks plain HTTP, and the client began with TLS (https)");
    return 0;
}

/* llhttp's reason for an error.  Always 400, where RFC 9110 also has 501 and 505: clients retry what is 5xx. */
static int refused(nmk_http_parser *p) {
    switch (p->llhttp.error) {
    case HPE_INVALID_METHOD: return bad(p, 400, "not a known HTTP method");
    case HPE_INVALID_VERSION: return bad(p, 400, "only HTTP/1.1 and HTTP/1.0 are spoken here");
    case HPE_UNEXPECTED_CONTENT_LENGTH: return bad(p, 400, "conflicting or repeated Content-Length");
    case HPE_INVALID_CONTENT_LENGTH: return bad(p, 400, "Content-Length is not a number");
    case HPE_INVALID_TRANSFER_ENCODING: return bad(p, 400, "Transfer-Encoding is not chunked");
    case HPE_INVALID_CHUNK_SIZE: return bad(p, 400, "a chunk size is not a number");
    case HPE_INVALID_URL: return bad(p, 400, "the request target is not a path");
    default: return bad(p, 400, "the request is not valid HTTP/1.1");
    }
}

/* ---------------------------------------------------------------- what others call */

void nmk_http_parser_init(nmk_http_parser *p, nmk_http_limits limits) {
    memset(p, 0, sizeof *p);
    p->limits = limits;
    nmk_http_parser_next(p);
}

void nmk_http_parser_next(nmk_http_parser *p) {
    nmk_buf text = p->text, body = p->body;
    nmk_http_limits limits = p->limits;
    size_t fields = offsetof(nmk_http_parser, fields);
    memset(p, 0, fields);
    size_t after = offsetof(nmk_http_parser, field_count);
    memset((char *)p + after, 0, sizeof *p - after);
    text.length = body.length = 0;
    p->text = text, p->body = body, p->limits = limits;
    llhttp_init(&p->llhttp, HTTP_REQUEST, &settings);
    p->llhttp.data = p;
}

void nmk_http_parser_free(nmk_http_parser *p) {
    nmk_buf_free(&p->text);
    nmk_buf_free(&p->body);
}

int nmk_http_parse(nmk_http_parser *p, const char *data, size_t n, size_t *used) {
    *used = 0;
    if (p->status) return NMK_HTTP_BAD;
    if (p->done) return NMK_HTTP_DONE;
    if (!n && !p->in_body) return NMK_HTTP_MORE;
    if (!p->started) {
        /* Empty lines before a request are skipped (RFC 9112, 2.2), but not for ever. */
        size_t skip = 0;
        while (skip < n && (data[skip] == '\r' || data[skip] == '\n')) skip++;
        p->head_bytes += skip, *used = skip;
        if (p->head_bytes > 64) return bad(p, 400, "nothing but empty lines");
        if (skip == n) return NMK_HTTP_MORE;
        data += skip, n -= skip;
        p->head_bytes = 0;
        if (check_first_bytes(p, data)) return NMK_HTTP_BAD;
        p->started = true;
    }

    bool head = !p->in_body;
    uint64_t body_bytes = p->body_bytes;
    /* Over the limit is over the limit, however much came at once; that the rest is looked at first does no harm. */
    size_t room = n;
    if (head && room > p->limits.max_header_bytes + 1 - p->head_bytes)
        room = p->limits.max_header_bytes + 1 - p->head_bytes;
    llhttp_errno_t error = llhttp_execute(&p->llhttp, data, room);
    size_t took = error == HPE_OK ? room : (size_t)(llhttp_get_error_pos(&p->llhttp) - data);
    *used += took;
    if (head) {
        /* What is wrong first is the reason, however the bytes were cut: nothing that was found is behind `took`. */
        const int status = p->status;
        const char *why = p->why;
        p->status = 0;
        if (check_raw(p, data, took)) return NMK_HTTP_BAD;
        p->status = status, p->why = why;
    }
    if (p->status) return NMK_HTTP_BAD;
    if (head) {
        p->head_bytes += took;
        if (p->head_bytes > p->limits.max_header_bytes)
            return p->field_count || p->in_name ? bad(p, 431, "the request header is too large")
                                                : bad(p, 414, "the request target is too long");
    } else {
        p->frame_bytes += took - (size_t)(p->body_bytes - body_bytes);
        if (p->frame_bytes > p->limits.max_header_bytes + FRAME_BYTES_EACH * p->body_bytes && !p->has_length)
            return bad(p, 413, "chunk lines or trailers are too large");
    }
    if (error != HPE_OK && error != HPE_PAUSED) return refused(p);
    if (error == HPE_OK) return NMK_HTTP_MORE;
    llhttp_resume(&p->llhttp);
    if (p->done) return NMK_HTTP_DONE;
    return check_head(p) ? NMK_HTTP_BAD : NMK_HTTP_HEAD;
}

const char *nmk_http_parser_field(const nmk_http_parser *p, const char *name) {
    for (unsigned i = 0; i < p->field_count; i++)
        if (!strcmp(p->text.data + p->fields[i].name, name)) return p->text.data + p->fields[i].value;
    return NULL;
}
