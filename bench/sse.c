#include "sse.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "json.h"

enum { CONNECTING, SENDING, READING, ENDED };
enum { SIZE, DATA, AFTER_DATA, TRAILER }; /* where in the chunks */
enum { MOST_HEAD = 64 << 10, READ_BYTES = 64 << 10, MOST_TEXT = 64 << 20, FETCH_MS = 30000 };

/* ---- where to ---- */

/* A name may have several addresses and a server listen on one of them. */
static bool answers(const struct addrinfo *a) {
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool yes = fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) == 0;
    if (fd >= 0) close(fd);
    return yes;
}

int nmk_sse_resolve(nmk_sse_target *t, const char *url, const char *key, nmk_err *e) {
    static const char scheme[] = "http://";
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    char name[256];
    *t = (nmk_sse_target){.key = key};
    if (!strncasecmp(url, "https://", 8))
        return nmk_fail(e, "%s: no TLS here; let a proxy or a tunnel end it, and give its http:// address", url);
    if (strncasecmp(url, scheme, sizeof scheme - 1)) return nmk_fail(e, "%s: expected http://HOST:PORT/v1", url);
    const char *from = url + sizeof scheme - 1, *slash = from + strcspn(from, "/");
    const char *bracket = *from == '[' ? memchr(from, ']', (size_t)(slash - from)) : NULL;
    const char *colon = memchr(bracket ? bracket : from, ':', (size_t)(slash - (bracket ? bracket : from)));
    const char *first = from + (bracket != NULL), *end = bracket ? bracket : colon ? colon : slash;
    size_t prefix = strlen(slash);
    while (prefix && slash[prefix - 1] == '/') prefix--;
    if (end <= first || (size_t)(end - first) >= sizeof name || slash - from >= (ptrdiff_t)sizeof t->host ||
        prefix >= sizeof t->prefix)
        return nmk_fail(e, "%s: expected http://HOST:PORT/v1", url);
    snprintf(name, sizeof name, "%.*s", (int)(end - first), first);
    snprintf(t->host, sizeof t->host, "%.*s", (int)(slash - from), from);
    snprintf(t->prefix, sizeof t->prefix, "%.*s", (int)prefix, slash);
    char *port = colon ? xasprintf("%.*s", (int)(slash - colon - 1), colon + 1) : xstrdup("80");
    int rc = getaddrinfo(name, port, &hints, &list);
    free(port);
    if (rc) return nmk_fail(e, "%s: %s", url, gai_strerror(rc));
    const struct addrinfo *a = list;
    while (a->ai_next && !answers(a)) a = a->ai_next;
    memcpy(&t->address, a->ai_addr, a->ai_addrlen);
    t->address_bytes = a->ai_addrlen;
    freeaddrinfo(list);
    return 0;
}

/* ---- a request ---- */

int nmk_sse_open(nmk_sse *s, const nmk_sse_target *t, const char *path, const char *body, nmk_sse_fn on_event,
                 void *user, nmk_err *e) {
    int one = 1;
    *s = (nmk_sse){.length = -1, .on_event = on_event, .user = user};
    s->fd = socket(t->address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s->fd < 0) return nmk_fail(e, "no socket: %s", strerror(errno));
    setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(s->fd, (const struct sockaddr *)&t->address, t->address_bytes) && errno != EINPROGRESS) {
        nmk_fail(e, "%s: %s", t->host, strerror(errno));
        nmk_sse_close(s);
        return -1;
    }
    nmk_buf_printf(&s->out, "%s %s%s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nAccept: text/event-stream, */*\r\n",
                   body ? "POST" : "GET", t->prefix, path, t->host);
    if (t->key) nmk_buf_printf(&s->out, "Authorization: Bearer %s\r\n", t->key);
    if (body) nmk_buf_printf(&s->out, "Content-Type: application/json\r\nContent-Length: %zu\r\n", strlen(body));
    nmk_buf_puts(&s->out, "\r\n");
    if (body) nmk_buf_puts(&s->out, body);
    nmk_buf_puts(&s->text, "");
    return 0;
}

void nmk_sse_close(nmk_sse *s) {
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
    nmk_buf_free(&s->out), nmk_buf_free(&s->in), nmk_buf_free(&s->text);
}

short nmk_sse_wants(const nmk_sse *s) { return s->sent < s->out.length ? POLLIN | POLLOUT : POLLIN; }

/* ---- the answer ---- */

/* The value of a field of the head, at its first character; NULL: it is not there. */
static const char *field(const char *head, const char *name) {
    size_t n = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line, "\r\n")) {
        line += 2;
        if (!strncasecmp(line, name, n) && line[n] == ':') return line + n + 1 + strspn(line + n + 1, " \t");
    }
    return NULL;
}

/* 0: more has to come. */
static int read_head(nmk_sse *s, nmk_err *e) {
    char *end = s->in.length ? strstr(s->in.data, "\r\n\r\n") : NULL;
    if (!end) return s->in.length > MOST_HEAD ? nmk_fail(e, "the answer has no end of its head") : 0;
    end[2] = 0;
    if (sscanf(s->in.data, "HTTP/1.%*1[01] %3d", &s->status) != 1) return nmk_fail(e, "the answer is no HTTP/1.1");
    const char *type = field(s->in.data, "content-type"), *encoding = field(s->in.data, "transfer-encoding");
    const char *length = field(s->in.data, "content-length");
    s->events = type && !strncasecmp(type, "text/event-stream", 17);
    s->chunked = encoding && !strncasecmp(encoding, "chunked", 7);
    s->length = length && !s->chunked ? strtoll(length, NULL, 10) : -1;
    s->in_done = (size_t)(end - s->in.data) + 4;
    s->headers_done = true, s->state = SIZE;
    return 1;
}

static void add_text(nmk_sse *s, const char *data, size_t bytes) {
    nmk_buf_add(&s->text, data, bytes);
    s->got += bytes;
}

/* Takes what is in `in`.  1: the body has ended. */
static int read_body(nmk_sse *s, nmk_err *e) {
    const char *at = s->in.data + s->in_done, *end = s->in.data + s->in.length;
    int done = 0;
    if (!s->chunked) {
        add_text(s, at, (size_t)(end - at));
        s->in_done = s->in.length;
        return s->length >= 0 && s->got >= (uint64_t)s->length;
    }
    while (!done && at < end) {
        if (s->state == DATA) {
            size_t n = s->chunk_left < (size_t)(end - at) ? s->chunk_left : (size_t)(end - at);
            add_text(s, at, n);
            at += n, s->chunk_left -= n;
            if (!s->chunk_left) s->state = AFTER_DATA;
            continue;
        }
        const char *line = memchr(at, '\n', (size_t)(end - at));
        char *stop;
        if (!line) break;
        if (s->state == SIZE) {
            unsigned long long size = strtoull(at, &stop, 16);
            if (stop == at || size > MOST_TEXT) return nmk_fail(e, "a chunk has no size");
            s->chunk_left = (size_t)size;
            s->state = size ? DATA : TRAILER;
        } else if (s->state == AFTER_DATA) {
            s->state = SIZE;
        } else {
            done = line - at <= 1; /* an empty line ends the trailer */
        }
        at = line + 1;
    }
    s->in_done = (size_t)(at - s->in.data);
    return done;
}

/* One event's lines: its data lines put together.  Comments and other fields count for nothing. */
static int tell(nmk_sse *s, const char *event, size_t bytes, uint64_t now) {
    nmk_buf data = {0};
    bool some = false;
    for (const char *line = event, *end = event + bytes; line < end;) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        if (!stop) stop = end;
        size_t n = (size_t)(stop - line);
        if (n && line[n - 1] == '\r') n--;
        if (n >= 5 && !memcmp(line, "data:", 5)) {
            size_t skip = n > 5 && line[5] == ' ' ? 6 : 5;
            if (some) nmk_buf_puts(&data, "\n");
            nmk_buf_add(&data, line + skip, n - skip);
            some = true;
        }
        line = stop + 1;
    }
    int rc = some ? s->on_event(s->user, data.data ? data.data : "", data.length, now) : 0;
    nmk_buf_free(&data);
    return rc;
}

/* The end of the first whole event from `at` on, behind its empty line; NULL: there is none. */
static const char *event_end(const char *at, const char *end) {
    for (const char *line; (line = memchr(at, '\n', (size_t)(end - at))); at = line + 1) {
        if (line + 1 < end && line[1] == '\n') return line + 2;
        if (line + 2 < end && line[1] == '\r' && line[2] == '\n') return line + 3;
    }
    return NULL;
}

static int take_events(nmk_sse *s, uint64_t now) {
    int rc = 0;
    if (!s->events || s->status != 200 || !s->on_event) return 0;
    const char *at = s->text.data + s->text_done, *end = s->text.data + s->text.length;
    for (const char *next; !rc && (next = event_end(at, end)); at = next) rc = tell(s, at, (size_t)(next - at), now);
    s->text_done = (size_t)(at - s->text.data);
    memmove(s->text.data, at, (size_t)(end - at) + 1);
    s->text.length -= s->text_done, s->text_done = 0;
    return rc;
}

static void drop_read(nmk_buf *b, size_t *done) {
    if (!*done) return;
    memmove(b->data, b->data + *done, b->length - *done + 1);
    b->length -= *done, *done = 0;
}

static int send_some(nmk_sse *s, nmk_err *e) {
    while (s->sent < s->out.length) {
        ssize_t did = send(s->fd, s->out.data + s->sent, s->out.length - s->sent, MSG_NOSIGNAL);
        if (did < 0 && (errno == EAGAIN || errno == EINPROGRESS || errno == ENOTCONN)) {
            int why = 0;
            socklen_t bytes = sizeof why;
            getsockopt(s->fd, SOL_SOCKET, SO_ERROR, &why, &bytes);
            return why ? nmk_fail(e, "cannot connect: %s", strerror(why)) : 0;
        }
        if (did < 0 && errno == EINTR) continue;
        if (did < 0) return nmk_fail(e, "sending: %s", strerror(errno));
        s->sent += (size_t)did;
    }
    return 0;
}

int nmk_sse_step(nmk_sse *s, nmk_err *e) {
    char part[READ_BYTES];
    if (send_some(s, e)) return -1;
    for (;;) {
        ssize_t did = recv(s->fd, part, sizeof part, 0);
        if (did < 0 && errno == EINTR) continue;
        if (did < 0 && (errno == EAGAIN || errno == ENOTCONN)) return 0;
        if (did < 0) return nmk_fail(e, "reading: %s", strerror(errno));
        if (did == 0) {
            if (s->headers_done && !s->chunked && s->length < 0) return 1;
            return nmk_fail(e,
                            s->headers_done ? "the answer broke off" : "the connection was closed without an answer");
        }
        uint64_t now = nmk_now_ns();
        nmk_buf_add(&s->in, part, (size_t)did);
        if (!s->headers_done) {
            int got = read_head(s, e);
            if (got <= 0 && (got < 0 || !s->headers_done)) {
                if (got < 0) return -1;
                continue;
            }
        }
        int ended = read_body(s, e);
        if (ended < 0) return -1;
        drop_read(&s->in, &s->in_done);
        if (s->text.length > MOST_TEXT) return nmk_fail(e, "the answer is too long");
        if (take_events(s, now) || ended) return 1;
    }
}

void nmk_sse_reason(const nmk_sse *s, char *text, size_t bytes) {
    nmk_err ignored;
    struct json_object *o = nmk_json_parse(s->text.data, s->text.length, &ignored);
    struct json_object *error = nmk_json_get(o, "error"), *message = nmk_json_get(error, "message");
    if (!message) message = nmk_json_get(o, "message");
    snprintf(text, bytes, "status %d: %.300s", s->status, message ? json_object_get_string(message) : s->text.data);
    json_object_put(o);
}

int nmk_sse_fetch(const nmk_sse_target *t, const char *path, const char *body, nmk_buf *answer, nmk_err *e) {
    nmk_sse s;
    int rc = 0;
    if (nmk_sse_open(&s, t, path, body, NULL, NULL, e)) return -1;
    for (uint64_t until = nmk_now_ns() + FETCH_MS * 1000000ull; !rc;) {
        struct pollfd p = {.fd = s.fd, .events = nmk_sse_wants(&s)};
        if (nmk_now_ns() > until || poll(&p, 1, FETCH_MS) <= 0)
            rc = nmk_fail(e, "no answer for %d s", FETCH_MS / 1000);
        else
            rc = nmk_sse_step(&s, e);
    }
    if (rc > 0 && s.status != 200) {
        char why[400];
        nmk_sse_reason(&s, why, sizeof why);
        rc = nmk_fail(e, "%s", why);
    }
    if (rc > 0) *answer = s.text, s.text = (nmk_buf){0};
    nmk_sse_close(&s);
    return rc > 0 ? 0 : nmk_fail_in(e, "%s%s", t->host, path);
}
