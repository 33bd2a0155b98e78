/* A connection is in one of these states:
 *
 *   READING   takes bytes of the next request, or waits for them
 *   BUSY      a request was handed over and its response is not complete.  Nothing more is read: what the client sends
 *             ahead stays in the kernel, so memory is bounded, and its FIN shows all the same
 *   LINGER    the last answer is out, our side is shut; reads to the end, lest a reset overtake the answer
 *   DEAD      closed; freed at the end of the turn, when no event or list can point at it any more
 *
 * Whatever happens to a connection marks it; at the end of each turn of the loop every marked connection is settled:
 * requests that wait are taken up, all that was queued goes out in one write, the events and the deadline are set.  So
 * the functions that answer never call back, and many small writes of one turn become one. */
#define _GNU_SOURCE /* accept4 */
#include "http.h"

#include "http_impl.h"
#include "http_parse.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    SCRATCH_BYTES = 1 << 16,
    EVENTS = 256,
    ACCEPTS_EACH_TURN = 128,
    REQUESTS_EACH_TURN = 32, /* of one connection that sends ahead */
    SURPLUS = 64,            /* connections beyond the maximum, kept for as long as it takes to say 503 */
    SLOT_BITS = 20,
    KEEP_BYTES = 1 << 14, /* larger buffers are given back when empty */
    ACCEPT_PAUSE_MS = 100,
    YOUNG_MS = 1000,
};

#define NEVER UINT64_MAX
#define MS    UINT64_C(1000000)

typedef enum { READING, BUSY, LINGER, DEAD } state;

typedef struct conn {
    int fd;
    uint32_t slot;
    state state;
    uint32_t events; /* what epoll watches */
    bool peer_fin;   /* the client has sent its last byte */
    bool eof;        /* and we have read it */
    bool closing;    /* when all is written */
    bool surplus;
    bool served; /* has had an answer */
    bool dirty;
    nmk_http_parser parser;
    size_t held;     /* of h->held */
    nmk_buf pending; /* read, but not parsed: requests sent ahead */
    nmk_buf out;
    size_t out_used;
    nmk_http_response *response;
    uint64_t started_ns, body_ns, idle_ns, written_ns, linger_ns;
    uint64_t deadline;
    struct conn *next_dirty, *next_dead;
    /* Why the request is refused when it is complete; 0: it is not. */
    int refuse_status, route, key;
    const char *refuse_code;
    char refuse_why[256];
    char peer[64];
} conn;

struct nmk_http_response {
    nmk_http *h;
    conn *c;
    uint64_t id;
    void *user;
    nmk_buf fields;
    const char *cors;
    int status;
    const nmk_http_route *route; /* NULL: none */
    bool head, http10, keep_alive;
    bool streaming, over, doomed, handed;
    uint64_t bytes, arrived_ns, sent_ns;
    char *method, *path;
};

typedef struct post {
    struct post *next;
    void (*f)(void *ctx, void *arg);
    void *arg;
} post;

struct nmk_http {
    nmk_http_options o;
    nmk_http_callbacks cb;
    void *ctx;
    int epoll, listener, wake;
    int port;
    char address[80];
    bool listening; /* the listener is watched */
    uint64_t listen_again_ns;

    conn **slots;
    uint32_t slot_count, *free_slots, free_count;
    unsigned count; /* connections that are not DEAD */
    conn *dirty, **dirty_tail, *dead;
    uint64_t next; /* no deadline is earlier */
    uint64_t serial;
    size_t held;
    nmk_http_date date;
    char *scratch;

    bool draining;
    uint64_t cut_ns;
    int cut;
    atomic_bool woken, drain_asked, leaves;
    atomic_int drain_ms;

    pthread_mutex_t lock; /* of what follows */
    post *posts, **posts_tail;
    bool ended;
};

/* ---------------------------------------------------------------- small things */

static uint64_t after(uint64_t ns, int ms) { return ms < 0 ? NEVER : ns + (uint64_t)ms * MS; }
static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }
static size_t queued(const conn *c) { return c->out.length - c->out_used; }
static bool is_idle(const conn *c) { return c->state == READING && !c->parser.started && !c->pending.length; }

static void mark(nmk_http *h, conn *c) {
    if (c->dirty) return;
    c->dirty = true;
    c->next_dirty = NULL;
    *h->dirty_tail = c;
    h->dirty_tail = &c->next_dirty;
}

/* Adds to what goes out at the end of the turn. */
static void emit(conn *c, const void *data, size_t n) {
    if (!queued(c)) c->written_ns = nmk_now_ns();
    nmk_buf_add(&c->out, data, n);
}
static void emits(conn *c, const char *s) { emit(c, s, strlen(s)); }

static void count_held(nmk_http *h, conn *c) {
    h->held += c->parser.body.capacity - c->held;
    c->held = c->parser.body.capacity;
}

/* ---------------------------------------------------------------- the end of things */

static void access_log(nmk_http_response *r, bool cut) {
    nmk_http *h = r->h;
    if (!h->cb.on_access) return;
    nmk_http_access a = {.method = r->method,
                         .path = r->path,
                         .peer = r->c->peer,
                         .status = r->status,
                         .cut = cut,
                         .handed = r->handed,
                         .bytes = r->bytes,
                         .id = r->id,
                         .arrived_ns = r->arrived_ns,
                         .done_ns = nmk_now_ns()};
    h->cb.on_access(h->ctx, &a);
}

static void response_free(nmk_http_response *r) {
    nmk_buf_free(&r->fields);
    free(r->method);
    free(r->path);
    free(r);
}

static void listen_on(nmk_http *h, bool on) {
    h->listen_again_ns = NEVER;
    if (h->draining || h->listening == on) return;
    struct epoll_event ev = {.events = on ? EPOLLIN : 0, .data.ptr = &h->listener};
    epoll_ctl(h->epoll, EPOLL_CTL_MOD, h->listener, &ev);
    h->listening = on;
}

/* Closes now, whatever is not written.  The response that was under way hears of it. */
static void drop(nmk_http *h, conn *c) {
    if (c->state == DEAD) return;
    nmk_http_response *r = c->response;
    c->state = DEAD;
    close(c->fd);
    c->fd = -1;
    h->count--;
    c->response = NULL;
    if (r) {
        h->cb.on_closed(h->ctx, r);
        access_log(r, true);
        response_free(r);
    }
    h->held -= c->held;
    c->held = 0;
    nmk_http_parser_free(&c->parser);
    nmk_buf_free(&c->pending);
    nmk_buf_free(&c->out);
    c->out_used = 0;
    c->next_dead = h->dead;
    h->dead = c;
    listen_on(h, true);
}

/* The last answer is out. */
static void hang_up(nmk_http *h, conn *c) {
    if (c->eof || shutdown(c->fd, SHUT_WR)) {
        drop(h, c);
        return;
    }
    c->state = LINGER;
    c->linger_ns = after(nmk_now_ns(), h->o.linger_ms);
    nmk_http_parser_free(&c->parser);
    nmk_buf_free(&c->pending);
    h->held -= c->held;
    c->held = 0;
}

static void bury(nmk_http *h) {
    conn **at = &h->dead;
    while (*at) {
        conn *c = *at;
        if (c->dirty) { /* still on that list */
            at = &c->next_dead;
            continue;
        }
        *at = c->next_dead;
        h->slots[c->slot] = NULL;
        h->free_slots[h->free_count++] = c->slot;
        free(c);
    }
}

/* The response is complete; c may go on with the next request. */
static void end(nmk_http_response *r, bool cut) {
    conn *c = r->c;
    access_log(r, cut);
    c->response = NULL;
    c->state = READING;
    c->idle_ns = nmk_now_ns();
    c->served = true;
    if (!r->keep_alive || cut || r->h->draining) c->closing = true;
    mark(r->h, c);
    response_free(r);
}

/* ---------------------------------------------------------------- responses */

static nmk_http_response *begin(nmk_http *h, conn *c) {
    nmk_http_parser *p = &c->parser;
    nmk_http_response *r = xcalloc(1, sizeof *r);
    r->h = h, r->c = c;
    r->id = ++h->serial << SLOT_BITS | c->slot;
    r->head = p->in_body && p->method == HTTP_HEAD;
    r->http10 = p->http10;
    r->keep_alive = p->keep_alive && !h->draining;
    if (p->in_body && c->route >= 0) r->route = &h->o.routes[c->route];
    r->arrived_ns = c->started_ns;
    if (h->cb.on_access) {
        r->method = xstrdup(p->in_body ? llhttp_method_name(p->method) : "-");
        r->path = xstrdup(p->in_body && p->path ? p->text.data + p->path : "-");
    }
    const char *origin = nmk_http_parser_field(p, "origin");
    for (unsigned i = 0; i < h->o.cors_origin_count && !r->cors; i++) {
        const char *allowed = h->o.cors_origins[i];
        if (!strcmp(allowed, "*") || (origin && !strcmp(allowed, origin))) r->cors = allowed;
    }
    c->response = r;
    c->state = BUSY;
    return r;
}

/* The head of the answer.  bytes < 0: a stream. */
static void emit_head(nmk_http_response *r, int status, const char *type, int64_t bytes) {
    conn *c = r->c;
    nmk_http *h = r->h;
    char line[160];
    bool chunked = bytes < 0 && !r->http10;
    if (bytes < 0 && r->http10) r->keep_alive = false; /* the end of the connection is the end of the stream */
    r->status = status;
    snprintf(line, sizeof line, "HTTP/1.1 %d %s\r\n", status, nmk_http_reason(status));
    emits(c, line);
    emits(c, nmk_http_date_field(&h->date));
    if (status != 204) {
        if (type) emits(c, "Content-Type: "), emits(c, type), emits(c, "\r\n");
        if (chunked) emits(c, "Transfer-Encoding: chunked\r\n");
        if (bytes >= 0) {
            snprintf(line, sizeof line, "Content-Length: %lld\r\n", (long long)bytes);
            emits(c, line);
        }
    }
    if (bytes < 0) emits(c, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
    if (!r->keep_alive)
        emits(c, "Connection: close\r\n");
    else if (r->http10)
        emits(c, "Connection: keep-alive\r\n");
    if (r->cors) {
        emits(c, "Access-Control-Allow-Origin: "), emits(c, r->cors), emits(c, "\r\n");
        emits(c, "Access-Control-Expose-Headers: *\r\n");
    }
    if (h->o.cors_origin_count && !(r->cors && !strcmp(r->cors, "*"))) emits(c, "Vary: Origin\r\n");
    emit(c, r->fields.data, r->fields.length);
    emits(c, "\r\n");
}

uint64_t nmk_http_id(const nmk_http_response *r) { return r->id; }

nmk_http_response *nmk_http_find(nmk_http *h, uint64_t id) {
    uint32_t slot = (uint32_t)(id & ((1u << SLOT_BITS) - 1));
    conn *c = slot < h->slot_count ? h->slots[slot] : NULL;
    return c && c->response && c->response->id == id ? c->response : NULL;
}

void nmk_http_set_user(nmk_http_response *r, void *user) { r->user = user; }
void *nmk_http_user(const nmk_http_response *r) { return r->user; }
bool nmk_http_streaming(const nmk_http_response *r) { return r->streaming; }

void nmk_http_add_field(nmk_http_response *r, const char *name, const char *value) {
    nmk_buf_puts(&r->fields, name);
    nmk_buf_puts(&r->fields, ": ");
    size_t at = r->fields.length;
    nmk_buf_puts(&r->fields, value);
    for (; at < r->fields.length; at++) {
        unsigned char *b = (unsigned char *)r->fields.data + at;
        if (*b < 0x20 || *b == 0x7f) *b = ' ';
    }
    nmk_buf_puts(&r->fields, "\r\n");
}

void nmk_http_respond(nmk_http_response *r, int status, const char *type, const void *body, size_t bytes) {
    emit_head(r, status, type, (int64_t)bytes);
    if (!r->head && status != 204) emit(r->c, body, bytes), r->bytes += bytes;
    end(r, false);
}

void nmk_http_respond_error(nmk_http_response *r, int status, const char *type, const char *param, const char *code,
                            const char *fmt, ...) {
    char message[2048];
    nmk_buf body = {0};
    va_list args;
    va_start(args, fmt);
    vsnprintf(message, sizeof message, fmt, args);
    va_end(args);
    if (r->route && r->route->error)
        r->route->error(&body, status, param, code, message);
    else
        nmk_http_error_json(&body, status, type, param, code, message);
    nmk_http_respond(r, status, "application/json", body.data, body.length);
    nmk_buf_free(&body);
}

void nmk_http_begin_stream(nmk_http_response *r) {
    r->streaming = true;
    emit_head(r, 200, "text/event-stream; charset=utf-8", -1);
    r->sent_ns = nmk_now_ns();
    mark(r->h, r->c);
}

int nmk_http_send(nmk_http_response *r, const void *data, size_t bytes) {
    conn *c = r->c;
    char line[32];
    if (r->doomed) return -1;
    r->sent_ns = nmk_now_ns();
    if (r->head || !bytes) return 0;
    if (!r->http10) {
        snprintf(line, sizeof line, "%zx\r\n", bytes);
        emits(c, line);
    }
    emit(c, data, bytes);
    if (!r->http10) emits(c, "\r\n");
    r->bytes += bytes;
    mark(r->h, c);
    if (queued(c) > r->h->o.max_queued_bytes) {
        r->doomed = true;
        return -1;
    }
    if (queued(c) > r->h->o.high_water) r->over = true;
    return r->over;
}

int nmk_http_send_event(nmk_http_response *r, const char *name, const char *data, size_t bytes) {
    nmk_buf event = {0};
    nmk_buf_reserve(&event, bytes + 16);
    if (name) nmk_buf_printf(&event, "event: %s\n", name);
    do {
        size_t n = 0;
        while (n < bytes && data[n] != '\n' && data[n] != '\r') n++;
        nmk_buf_puts(&event, "data: ");
        nmk_buf_add(&event, data, n);
        nmk_buf_puts(&event, "\n");
        if (n == bytes) break;
        n += data[n] == '\r' && n + 1 < bytes && data[n + 1] == '\n' ? 2 : 1;
        data += n, bytes -= n;
    } while (true);
    nmk_buf_puts(&event, "\n");
    int rc = nmk_http_send(r, event.data, event.length);
    nmk_buf_free(&event);
    return rc;
}

void nmk_http_finish(nmk_http_response *r) {
    if (!r->head && !r->http10) emits(r->c, "0\r\n\r\n");
    end(r, false);
}

void nmk_http_abort(nmk_http_response *r) { end(r, true); }

/* ---------------------------------------------------------------- requests */

static unsigned method_bit(llhttp_method_t method) {
    switch (method) {
    case HTTP_HEAD:
    case HTTP_GET: return NMK_HTTP_GET;
    case HTTP_POST: return NMK_HTTP_POST;
    case HTTP_PUT: return NMK_HTTP_PUT;
    case HTTP_DELETE: return NMK_HTTP_DELETE;
    case HTTP_PATCH: return NMK_HTTP_PATCH;
    default: return NMK_HTTP_OTHER;
    }
}

static void methods_text(unsigned methods, nmk_buf *b) {
    static const struct {
        unsigned bit;
        const char *text;
    } all[] = {{NMK_HTTP_GET, "GET, HEAD, "},
               {NMK_HTTP_POST, "POST, "},
               {NMK_HTTP_PUT, "PUT, "},
               {NMK_HTTP_DELETE, "DELETE, "},
               {NMK_HTTP_PATCH, "PATCH, "}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (methods & all[i].bit) nmk_buf_puts(b, all[i].text);
    nmk_buf_puts(b, "OPTIONS");
}

static int find_route(const nmk_http *h, const char *path, const char **rest) {
    *rest = "";
    for (unsigned i = 0; i < h->o.route_count; i++) {
        const char *pattern = h->o.routes[i].path;
        size_t n = strlen(pattern);
        if (n && pattern[n - 1] == '*') {
            if (!strncmp(path, pattern, n - 1) && path[n - 1]) {
                *rest = path + n - 1;
                return (int)i;
            }
        } else if (!strcmp(path, pattern)) {
            return (int)i;
        }
    }
    return -1;
}

__attribute__((format(printf, 4, 5))) static void refuse_later(conn *c, int status, const char *code, const char *fmt,
                                                               ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->refuse_why, sizeof c->refuse_why, fmt, args);
    va_end(args);
    c->refuse_status = status;
    c->refuse_code = code;
    c->parser.discard = true;
}

/* What the head alone decides.  The body of a refused request is read and thrown away, so that the connection lives
 * on. */
static void check_head(nmk_http *h, conn *c) {
    nmk_http_parser *p = &c->parser;
    const char *path = p->text.data + p->path, *rest;
    c->refuse_status = 0;
    c->route = find_route(h, path, &rest);
    c->key = nmk_http_key(nmk_http_parser_field(p, "authorization"), nmk_http_parser_field(p, "x-api-key"),
                          h->o.api_keys, h->o.api_key_count);
    const nmk_http_route *route = c->route >= 0 ? &h->o.routes[c->route] : NULL;

    if (c->surplus) {
        refuse_later(c, 503, NULL, "the server has as many connections open as it may (%d)", h->o.max_connections);
    } else if (p->method == HTTP_OPTIONS) {
        p->discard = true;
    } else if (h->o.api_key_count && c->key < 0 && !(route && route->open)) {
        if (nmk_http_parser_field(p, "authorization") || nmk_http_parser_field(p, "x-api-key"))
            refuse_later(c, 401, "invalid_api_key", "the API key is not valid");
        else
            refuse_later(c, 401, "invalid_api_key", "an API key is needed, as \"Authorization: Bearer KEY\"");
    } else if (h->o.route_count && !route) {
        refuse_later(c, 404, "not_found", "no such endpoint: %s %.160s", llhttp_method_name(p->method), path);
    } else if (route && !(route->methods & method_bit(p->method))) {
        refuse_later(c, 405, "method_not_allowed", "%s is not for %s", route->path, llhttp_method_name(p->method));
    }
}

static void answer_options(nmk_http *h, conn *c, nmk_http_response *r) {
    nmk_http_parser *p = &c->parser;
    nmk_buf methods = {0};
    methods_text(c->route >= 0 ? h->o.routes[c->route].methods : (unsigned)NMK_HTTP_GET | NMK_HTTP_POST, &methods);
    nmk_http_add_field(r, "Allow", methods.data);
    if (r->cors && nmk_http_parser_field(p, "access-control-request-method")) {
        const char *wanted = nmk_http_parser_field(p, "access-control-request-headers");
        nmk_http_add_field(r, "Access-Control-Allow-Methods", methods.data);
        nmk_http_add_field(r, "Access-Control-Allow-Headers",
                           wanted ? wanted
                                  : "Authorization, Content-Type, X-API-Key, Anthropic-Version, Anthropic-Beta");
        nmk_http_add_field(r, "Access-Control-Max-Age", "86400");
    }
    nmk_buf_free(&methods);
    nmk_http_respond(r, 204, NULL, NULL, 0);
}

static void answer_refused(nmk_http *h, conn *c, nmk_http_response *r) {
    int status = c->refuse_status;
    if (status == 401) nmk_http_add_field(r, "WWW-Authenticate", "Bearer");
    if (status == 503) nmk_http_add_field(r, "Retry-After", "1");
    if (status == 405) {
        nmk_buf methods = {0};
        methods_text(h->o.routes[c->route].methods, &methods);
        nmk_http_add_field(r, "Allow", methods.data);
        nmk_buf_free(&methods);
    }
    if (c->surplus) r->keep_alive = false;
    nmk_http_respond_error(r, status, NULL, NULL, c->refuse_code, "%s", c->refuse_why);
}

/* The request is complete, or refused before that. */
static void dispatch(nmk_http *h, conn *c) {
    nmk_http_parser *p = &c->parser;
    nmk_http_response *r = begin(h, c);
    if (!p->done) r->keep_alive = false;
    if (c->refuse_status) {
        answer_refused(h, c, r);
    } else if (p->method == HTTP_OPTIONS) {
        answer_options(h, c, r);
    } else {
        nmk_http_request q = {.route = c->route,
                              .method = method_bit(p->method),
                              .method_name = llhttp_method_name(p->method),
                              .path = p->text.data + p->path,
                              .query = p->text.data + p->query,
                              .body = p->body.data ? p->body.data : "",
                              .body_bytes = p->body.length,
                              .peer = c->peer,
                              .key = c->key,
                              .id = r->id,
                              .arrived_ns = c->started_ns,
                              .parser = p};
        find_route(h, q.path, &q.rest);
        r->handed = true;
        h->cb.on_request(h->ctx, &q, r);
    }
    nmk_buf_free(&p->body);
    if (p->text.capacity > KEEP_BYTES) nmk_buf_free(&p->text);
    nmk_http_parser_next(p);
}

/* Answers what is no request (or not any more), and closes. */
static void refuse_now(nmk_http *h, conn *c, int status, const char *why) {
    nmk_http_response *r = begin(h, c);
    r->keep_alive = false;
    if (status == 503) nmk_http_add_field(r, "Retry-After", "1");
    nmk_http_respond_error(r, status, NULL, NULL, NULL, "%s", why);
}

static void feed(nmk_http *h, conn *c, const char *data, size_t n) {
    nmk_http_parser *p = &c->parser;
    int rc = NMK_HTTP_MORE, budget = REQUESTS_EACH_TURN;
    while (c->state == READING && !c->closing && (n || rc == NMK_HTTP_HEAD)) {
        bool started = p->started;
        if (!started && (queued(c) >= h->o.high_water || !budget--)) break;
        size_t used;
        rc = nmk_http_parse(p, data, n, &used);
        data += used, n -= used;
        if (!started && (p->started || rc == NMK_HTTP_BAD)) c->started_ns = nmk_now_ns();
        count_held(h, c);
        if (rc == NMK_HTTP_BAD) {
            refuse_now(h, c, p->status, p->why);
        } else if (h->held > h->o.max_held_bytes) {
            refuse_now(h, c, 503, "the requests that are just coming in take all the memory there is for them");
        } else if (rc == NMK_HTTP_HEAD) {
            c->body_ns = nmk_now_ns();
            check_head(h, c);
            if (p->expects_continue && c->refuse_status)
                dispatch(h, c); /* the body was not sent yet */
            else if (p->expects_continue && !n)
                emits(c, "HTTP/1.1 100 Continue\r\n\r\n");
        } else if (rc == NMK_HTTP_DONE) {
            dispatch(h, c);
        }
        count_held(h, c);
    }
    if (n && !c->closing) nmk_buf_add(&c->pending, data, n);
}

static void feed_pending(nmk_http *h, conn *c) {
    nmk_buf data = c->pending;
    c->pending = (nmk_buf){0};
    feed(h, c, data.data, data.length);
    nmk_buf_free(&data);
}

nmk_buf nmk_http_take_body(const nmk_http_request *q) {
    nmk_http_parser *p = (nmk_http_parser *)(uintptr_t)q->parser;
    nmk_buf body = p->body;
    p->body = (nmk_buf){0};
    return body;
}

const char *nmk_http_field(const nmk_http_request *q, const char *name) {
    return nmk_http_parser_field(q->parser, name);
}

/* ---------------------------------------------------------------- sockets */

/* false: the connection is gone. */
static bool flush(nmk_http *h, conn *c) {
    while (queued(c)) {
        ssize_t n = send(c->fd, c->out.data + c->out_used, queued(c), MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (n < 0) {
            drop(h, c);
            return false;
        }
        c->out_used += (size_t)n;
        c->written_ns = nmk_now_ns();
    }
    if (!queued(c)) {
        c->out.length = c->out_used = 0;
        if (c->out.capacity > KEEP_BYTES) nmk_buf_free(&c->out);
    } else if (c->out_used > c->out.length / 2) {
        memmove(c->out.data, c->out.data + c->out_used, queued(c));
        c->out.length = queued(c), c->out_used = 0;
    }
    return true;
}

static void readable(nmk_http *h, conn *c) {
    ssize_t n = recv(c->fd, h->scratch, SCRATCH_BYTES, 0);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (n < 0 || (n == 0 && c->state == LINGER)) {
        drop(h, c);
    } else if (n == 0) {
        c->eof = c->peer_fin = true;
    } else if (c->state == READING && c->pending.length) {
        nmk_buf_add(&c->pending, h->scratch, (size_t)n);
    } else if (c->state == READING) {
        feed(h, c, h->scratch, (size_t)n);
    }
}

/* Bytes have come that were not read. */
static bool has_input(const conn *c) {
    char byte;
    return recv(c->fd, &byte, 1, MSG_PEEK) > 0;
}

/* Makes room by closing the connection that has been idle for longest; not one that has just come. */
static bool close_idle(nmk_http *h) {
    conn *oldest = NULL;
    uint64_t young = nmk_now_ns() - YOUNG_MS * MS;
    for (uint32_t i = 0; i < h->slot_count; i++) {
        conn *c = h->slots[i];
        if (!c || !is_idle(c) || queued(c) || (!c->served && c->idle_ns > young)) continue;
        if ((!oldest || c->idle_ns < oldest->idle_ns) && !has_input(c)) oldest = c;
    }
    if (oldest) drop(h, oldest);
    return oldest;
}

static void add_conn(nmk_http *h, int fd, const struct sockaddr_storage *peer, bool surplus) {
    int one = 1, idle = 60, interval = 10, probes = 3;
    conn *c = xcalloc(1, sizeof *c);
    c->fd = fd;
    c->surplus = surplus;
    c->idle_ns = nmk_now_ns();
    c->deadline = NEVER;
    nmk_http_address_text(peer, c->peer, sizeof c->peer);
    nmk_http_parser_init(&c->parser, (nmk_http_limits){h->o.max_header_bytes, h->o.max_body_bytes});
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    /* A machine that vanished sends no FIN. */
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    if (h->o.send_buffer_bytes)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &h->o.send_buffer_bytes, sizeof h->o.send_buffer_bytes);

    if (!h->free_count) {
        uint32_t more = h->slot_count ? h->slot_count : 64;
        h->slots = xrealloc(h->slots, (h->slot_count + more) * sizeof *h->slots);
        h->free_slots = xrealloc(h->free_slots, (h->slot_count + more) * sizeof *h->free_slots);
        for (uint32_t i = more; i-- > 0;) {
            h->slots[h->slot_count + i] = NULL;
            h->free_slots[h->free_count++] = h->slot_count + i;
        }
        h->slot_count += more;
    }
    c->slot = h->free_slots[--h->free_count];
    h->slots[c->slot] = c;
    h->count++;
    c->events = EPOLLIN | EPOLLRDHUP;
    struct epoll_event ev = {.events = c->events, .data.ptr = c};
    if (epoll_ctl(h->epoll, EPOLL_CTL_ADD, fd, &ev)) {
        drop(h, c);
        return;
    }
    mark(h, c);
}

static void accept_all(nmk_http *h) {
    for (int i = 0; i < ACCEPTS_EACH_TURN; i++) {
        if (h->count >= (unsigned)h->o.max_connections + SURPLUS) {
            listen_on(h, false); /* until one is closed */
            return;
        }
        struct sockaddr_storage peer = {0};
        socklen_t size = sizeof peer;
        int fd = accept4(h->listener, (struct sockaddr *)&peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            bool full = h->count >= (unsigned)h->o.max_connections && !close_idle(h);
            add_conn(h, fd, &peer, full);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            /* No descriptors or no memory: the listener would be reported again and again. */
            listen_on(h, false);
            h->listen_again_ns = after(nmk_now_ns(), ACCEPT_PAUSE_MS);
            h->next = earlier(h->next, h->listen_again_ns);
            return;
        }
    }
}

/* ---------------------------------------------------------------- time */

static uint64_t deadline_of(const nmk_http *h, const conn *c) {
    const nmk_http_parser *p = &c->parser;
    const nmk_http_response *r = c->response;
    uint64_t d = NEVER;
    if (c->state == DEAD) return NEVER;
    if (c->state == LINGER) return c->linger_ns;
    if (queued(c)) d = after(c->written_ns, h->o.write_ms);
    if (c->state == READING && !c->closing && p->started) {
        if (!p->in_body)
            d = earlier(d, after(c->started_ns, h->o.header_ms));
        else if (h->o.body_ms >= 0)
            d = earlier(d, after(c->body_ns, h->o.body_ms) + p->body_bytes * MS);
    }
    if (is_idle(c) && !queued(c)) d = earlier(d, after(c->idle_ns, c->surplus ? h->o.header_ms : h->o.idle_ms));
    if (r && r->streaming && !r->head && !queued(c)) d = earlier(d, after(r->sent_ns, h->o.keepalive_ms));
    return d;
}

/* Its deadline has come. */
static void expire(nmk_http *h, conn *c, uint64_t now) {
    nmk_http_response *r = c->response;
    if (c->state == LINGER || (queued(c) && now >= after(c->written_ns, h->o.write_ms))) {
        drop(h, c);
    } else if (c->state == READING && c->parser.started) {
        refuse_now(h, c, 408,
                   c->parser.in_body ? "the request body did not come in time" : "the request did not come in time");
    } else if (c->state == READING) {
        drop(h, c);
    } else if (r && r->streaming) {
        uint64_t bytes = r->bytes;
        nmk_http_send(r, ": keep-alive\n\n", 14);
        r->bytes = bytes;
    }
    mark(h, c);
}

static void expire_all(nmk_http *h, uint64_t now) {
    if (now < h->next) return;
    if (now >= h->listen_again_ns) listen_on(h, true);
    h->next = h->listen_again_ns;
    for (uint32_t i = 0; i < h->slot_count; i++) {
        conn *c = h->slots[i];
        if (!c || c->state == DEAD) continue;
        if (c->dirty) c->deadline = deadline_of(h, c); /* what came in this turn may have put it off */
        if (c->deadline <= now)
            expire(h, c, now);
        else
            h->next = earlier(h->next, c->deadline);
    }
}

/* ---------------------------------------------------------------- the loop */

static void watch(nmk_http *h, conn *c) {
    uint32_t events = c->peer_fin ? 0 : EPOLLRDHUP;
    if (c->state == LINGER) events = EPOLLIN;
    /* Not while requests wait that were sent ahead, and not after the end. */
    if (c->state == READING && !c->pending.length && !c->eof && !c->closing) events |= EPOLLIN;
    if (queued(c)) events |= EPOLLOUT;
    if (events != c->events) {
        struct epoll_event ev = {.events = events, .data.ptr = c};
        if (epoll_ctl(h->epoll, EPOLL_CTL_MOD, c->fd, &ev)) {
            drop(h, c);
            return;
        }
        c->events = events;
    }
    c->deadline = deadline_of(h, c);
    h->next = earlier(h->next, c->deadline);
}

/* Brings everything about a marked connection up to date. */
static void settle(nmk_http *h, conn *c) {
    c->dirty = false;
    if (c->state == DEAD) return;
    if (c->state == READING && c->pending.length && !c->closing && queued(c) < h->o.high_water) {
        feed_pending(h, c);
    }
    if (!flush(h, c)) return;
    if (c->state == READING && c->pending.length && !c->closing && queued(c) < h->o.high_water) mark(h, c);
    if ((c->response && c->response->doomed) || (c->state == BUSY && c->peer_fin)) {
        drop(h, c);
        return;
    }
    if (!queued(c) && c->state == READING && (c->closing || (c->eof && !c->pending.length))) {
        hang_up(h, c);
        if (c->state == DEAD) return;
    }
    nmk_http_response *r = c->response;
    if (r && r->over && queued(c) <= h->o.low_water) {
        r->over = false;
        if (h->cb.on_drained) h->cb.on_drained(h->ctx, r);
    }
    watch(h, c);
}

static void settle_all(nmk_http *h) {
    conn *c = h->dirty;
    h->dirty = NULL;
    h->dirty_tail = &h->dirty;
    while (c) {
        conn *next = c->next_dirty;
        settle(h, c); /* may mark it again, for the next turn */
        c = next;
    }
    bury(h);
}

static void run_posts(nmk_http *h) {
    pthread_mutex_lock(&h->lock);
    post *p = h->posts;
    h->posts = NULL;
    h->posts_tail = &h->posts;
    pthread_mutex_unlock(&h->lock);
    while (p) {
        post *next = p->next;
        p->f(h->ctx, p->arg);
        free(p);
        p = next;
    }
}

static void start_drain(nmk_http *h) {
    int ms = atomic_load(&h->drain_ms);
    h->cut_ns = after(nmk_now_ns(), ms);
    if (h->draining) return;
    if (atomic_load(&h->leaves)) {
        epoll_ctl(h->epoll, EPOLL_CTL_DEL, h->listener, NULL);
    } else {
        /* Those that are through the handshake have been promised an answer. */
        accept_all(h);
        close(h->listener);
        h->listener = -1;
    }
    h->draining = true;
    for (uint32_t i = 0; i < h->slot_count; i++) {
        conn *c = h->slots[i];
        if (!c || !is_idle(c)) continue;
        if (!c->eof && !c->closing) readable(h, c); /* a request may be there already */
        if (is_idle(c)) c->closing = true;
        if (c->state != DEAD) mark(h, c);
    }
}

static void cut_all(nmk_http *h) {
    for (uint32_t i = 0; i < h->slot_count; i++) {
        conn *c = h->slots[i];
        if (!c || c->state == DEAD) continue;
        if (c->response || queued(c)) h->cut++;
        drop(h, c);
    }
}

static int wait_ms(const nmk_http *h, uint64_t now) {
    if (h->dirty) return 0;
    uint64_t until = h->draining ? earlier(h->next, h->cut_ns) : h->next;
    if (until == NEVER) return -1;
    if (until <= now) return 0;
    uint64_t ms = (until - now + MS - 1) / MS;
    return ms > 60000 ? 60000 : (int)ms;
}

static void turn(nmk_http *h, struct epoll_event *events, int n) {
    bool accepting = false;
    for (int i = 0; i < n; i++) {
        void *p = events[i].data.ptr;
        uint32_t ev = events[i].events;
        if (p == &h->listener) {
            accepting = true;
        } else if (p == &h->wake) {
            uint64_t value;
            while (read(h->wake, &value, sizeof value) < 0 && errno == EINTR) {}
        } else {
            conn *c = p;
            if (c->state == DEAD) continue;
            if (ev & (EPOLLERR | EPOLLHUP)) {
                drop(h, c);
                continue;
            }
            if (ev & EPOLLRDHUP) c->peer_fin = true;
            if (ev & EPOLLIN) readable(h, c);
            if (c->state != DEAD) mark(h, c);
        }
    }
    if (accepting && !h->draining) accept_all(h);
    run_posts(h);
    if (atomic_exchange(&h->woken, false) && h->cb.on_wake) h->cb.on_wake(h->ctx);
    if (atomic_exchange(&h->drain_asked, false)) start_drain(h);
    uint64_t now = nmk_now_ns();
    expire_all(h, now);
    if (h->draining && now >= h->cut_ns) cut_all(h);
    settle_all(h);
}

int nmk_http_run(nmk_http *h, nmk_err *e) {
    struct epoll_event events[EVENTS];
    int rc = 0;
    while (!(h->draining && !h->count)) {
        int n = epoll_wait(h->epoll, events, EVENTS, wait_ms(h, nmk_now_ns()));
        if (n < 0 && errno != EINTR) {
            rc = nmk_fail(e, "epoll_wait: %s", strerror(errno));
            cut_all(h);
            break;
        }
        turn(h, events, n < 0 ? 0 : n);
    }
    settle_all(h);
    pthread_mutex_lock(&h->lock);
    h->ended = true;
    pthread_mutex_unlock(&h->lock);
    run_posts(h);
    return rc ? rc : h->cut;
}

/* ---------------------------------------------------------------- other threads */

/* Also in a signal handler. */
static void kick(nmk_http *h) {
    int saved = errno;
    uint64_t one = 1;
    while (write(h->wake, &one, sizeof one) < 0 && errno == EINTR) {}
    errno = saved;
}

int nmk_http_post(nmk_http *h, void (*f)(void *ctx, void *arg), void *arg) {
    post *p = xcalloc(1, sizeof *p);
    p->f = f, p->arg = arg;
    pthread_mutex_lock(&h->lock);
    bool ended = h->ended, first = !h->posts;
    if (!ended) {
        *h->posts_tail = p;
        h->posts_tail = &p->next;
    }
    pthread_mutex_unlock(&h->lock);
    if (ended) {
        free(p);
        return -1;
    }
    if (first) kick(h);
    return 0;
}

void nmk_http_wake(nmk_http *h) {
    if (!atomic_exchange(&h->woken, true)) kick(h);
}

void nmk_http_drain(nmk_http *h, int deadline_ms) {
    atomic_store(&h->drain_ms, deadline_ms);
    atomic_store(&h->drain_asked, true);
    kick(h);
}

void nmk_http_leave(nmk_http *h, int deadline_ms) {
    atomic_store(&h->leaves, true);
    nmk_http_drain(h, deadline_ms);
}

int nmk_http_take_listener(nmk_http *h) {
    int fd = h->listener;
    h->listener = -1;
    return fd;
}

/* ---------------------------------------------------------------- open, close */

static void defaults(nmk_http_options *o) {
#define DEFAULT(field, value) \
    if (!o->field) o->field = (value)
    DEFAULT(host, "127.0.0.1");
    DEFAULT(backlog, 1024);
    DEFAULT(max_connections, 1000);
    DEFAULT(max_header_bytes, 32 << 10);
    DEFAULT(max_body_bytes, 32 << 20);
    DEFAULT(max_held_bytes, (size_t)512 << 20);
    DEFAULT(high_water, 256 << 10);
    DEFAULT(low_water, o->high_water / 4);
    DEFAULT(max_queued_bytes, 16 << 20);
    DEFAULT(header_ms, 20000);
    DEFAULT(body_ms, 30000);
    DEFAULT(idle_ms, 75000);
    DEFAULT(write_ms, 60000);
    DEFAULT(keepalive_ms, 10000);
    DEFAULT(linger_ms, 2000);
#undef DEFAULT
    int most =
        (1 << SLOT_BITS) - SURPLUS - EVENTS - ACCEPTS_EACH_TURN; /* the dead keep their slots to the end of a turn */
    if (o->max_connections > most) o->max_connections = most;
}

static int watch_fd(nmk_http *h, int *fd, nmk_err *e) {
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = fd};
    if (epoll_ctl(h->epoll, EPOLL_CTL_ADD, *fd, &ev)) return nmk_fail(e, "epoll_ctl: %s", strerror(errno));
    return 0;
}

int nmk_http_open(nmk_http **result, const nmk_http_options *o, const nmk_http_callbacks *c, void *ctx, nmk_err *e) {
    int rc = -1;
    nmk_http *h = xcalloc(1, sizeof *h);
    h->o = *o, h->cb = *c, h->ctx = ctx;
    defaults(&h->o);
    h->epoll = h->listener = h->wake = -1;
    h->next = h->listen_again_ns = h->cut_ns = NEVER;
    h->dirty_tail = &h->dirty;
    h->posts_tail = &h->posts;
    h->date.second = -1;
    h->scratch = xmalloc(SCRATCH_BYTES);
    pthread_mutex_init(&h->lock, NULL);
    for (unsigned i = 0; i < h->o.api_key_count; i++) {
        if (!*h->o.api_keys[i]) {
            nmk_fail(e, "an API key is empty");
            goto out;
        }
    }
    h->listener = h->o.listen_fd > 0
                      ? nmk_http_adopt(h->o.listen_fd, h->address, sizeof h->address, &h->port, e)
                      : nmk_http_listen(h->o.host, h->o.port, h->o.backlog, h->address, sizeof h->address, &h->port, e);
    if (h->listener < 0) goto out;
    h->epoll = epoll_create1(EPOLL_CLOEXEC);
    h->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (h->epoll < 0 || h->wake < 0) {
        nmk_fail(e, "%s: %s", h->epoll < 0 ? "epoll_create1" : "eventfd", strerror(errno));
        goto out;
    }
    if (watch_fd(h, &h->listener, e) || watch_fd(h, &h->wake, e)) goto out;
    h->listening = true;
    *result = h, h = NULL, rc = 0;
out:
    nmk_http_close(h);
    return rc;
}

void nmk_http_close(nmk_http *h) {
    if (!h) return;
    cut_all(h);
    settle_all(h);
    if (h->listener >= 0) close(h->listener);
    if (h->wake >= 0) close(h->wake);
    if (h->epoll >= 0) close(h->epoll);
    for (post *p = h->posts, *next; p; p = next) next = p->next, free(p);
    pthread_mutex_destroy(&h->lock);
    free(h->slots);
    free(h->free_slots);
    free(h->scratch);
    free(h);
}

int nmk_http_port(const nmk_http *h) { return h->port; }
const char *nmk_http_address(const nmk_http *h) { return h->address; }
