/* server/http*.c.  http: the parser, whose result may not depend on how the bytes were cut.  connection: the server, with
 * a client that says what the input holds, in pieces. */
#include "fuzz.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "http.h"
#include "http_parse.h"

static void seeds(void) {
    static const char *const requests[] = {
        "GET /v1/models HTTP/1.1\r\nHost: a\r\nAccept: */*\r\nAuthorization: Bearer key\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Type: text/plain\r\nContent-Length: 5\r\nX-Api-Key: key\r\n\r\nhello",
        "POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=\"y\"\r\n world\r\n0\r\nT: 1\r\n\r\n",
        "POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
        "OPTIONS /echo HTTP/1.1\r\nHost: a\r\nOrigin: http://x\r\nAccess-Control-Request-Method: POST\r\n\r\n",
        "HEAD /v1/models/a/b HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        "GET http://a:1/v1/models?x=%20 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        "GET /stream HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        "POST /stream HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
        "\r\nGET /later HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
        "PUT /take HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabcDELETE /abort HTTP/1.1\r\nHost: a\r\n\r\n",
    };
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) fuzz_seed_text(requests[i]);
    fuzz_words_of("server/http*.c");
    for (const char *const *w =
             (const char *const[]){"\r\n", "\n", "\r", "Content-Length: ", "Transfer-Encoding: ", "chunked", "HTTP/1.0",
                                   "HTTP/1.1", "%00", "%2e", "%", "ffffffffffffffff", "\t", "gzip, chunked",
                                   "0\r\n\r\n", "Connection: close\r\n", NULL};
         *w; w++)
        fuzz_word(*w);
}

/* ---------------------------------------------------------------- the parser */

/* What came of the bytes, cut at random or not: a line for each request. */
static void outcome(const char *data, size_t n, bool cut, nmk_buf *out) {
    nmk_http_parser p;
    int rc = NMK_HTTP_MORE;
    size_t left = 0;
    nmk_http_parser_init(&p, (nmk_http_limits){2000, 1000});
    nmk_buf_puts(out, "");
    while (n || rc == NMK_HTTP_HEAD) {
        size_t used;
        if (!left) left = cut ? 1 + fuzz_below(fuzz_below(3) ? 6 : 60) : n;
        if (left > n) left = n;
        char *exact = xmalloc(left ? left : 1);
        memcpy(exact, data, left);
        rc = nmk_http_parse(&p, exact, left, &used);
        free(exact);
        if (used > left) fuzz_wrong("used %zu of %zu bytes", used, left);
        data += used, n -= used, left -= used;
        if (rc == NMK_HTTP_BAD) break;
        if (rc == NMK_HTTP_MORE && left) fuzz_wrong("wants more and leaves some");
        if (rc == NMK_HTTP_HEAD) {
            nmk_buf_printf(out, "%s %s?%s %d %d %d", llhttp_method_name(p.method), p.text.data + p.path,
                           p.text.data + p.query, p.keep_alive, p.expects_continue, p.http10);
            for (unsigned i = 0; i < p.field_count; i++)
                nmk_buf_printf(out, " [%s=%s]", p.text.data + p.fields[i].name, p.text.data + p.fields[i].value);
        }
        if (rc == NMK_HTTP_DONE) {
            if (p.body.length > 1000) fuzz_wrong("a body of %zu bytes", p.body.length);
            nmk_buf_puts(out, " {");
            nmk_buf_add(out, p.body.data, p.body.length);
            nmk_buf_puts(out, "}\n");
            nmk_http_parser_next(&p);
        }
    }
    if (rc == NMK_HTTP_BAD) {
        if (p.status < 400 || p.status > 505 || !p.why || !*p.why) fuzz_wrong("refused with status %d", p.status);
        nmk_buf_printf(out, "%d %s", p.status, p.why);
    }
    nmk_http_parser_free(&p);
}

static void run_parser(const char *data, size_t bytes) {
    nmk_buf whole = {0}, cut = {0};
    outcome(data, bytes, false, &whole);
    for (int i = 0; i < 2; i++) {
        cut.length = 0;
        outcome(data, bytes, true, &cut);
        if (whole.length != cut.length || memcmp(whole.data, cut.data, cut.length))
            fuzz_wrong("cut otherwise: <%s> and <%s>", whole.data, cut.data);
    }
    nmk_buf_free(&whole), nmk_buf_free(&cut);
}

const fuzz_target fuzz_http = {"http", seeds, NULL, run_parser, 0, 0};

/* ---------------------------------------------------------------- the server */

enum { MODELS, MODEL, ECHO, TAKE, STREAM, LATER, ABORT };

static const nmk_http_route routes[] = {
    {"/v1/models", NMK_HTTP_GET, false, NULL},
    {"/v1/models/*", NMK_HTTP_GET, true, NULL},
    {"/echo", NMK_HTTP_POST | NMK_HTTP_PUT, true, NULL},
    {"/take", NMK_HTTP_PUT, true, NULL},
    {"/stream", NMK_HTTP_GET | NMK_HTTP_POST, true, NULL},
    {"/later", NMK_HTTP_GET | NMK_HTTP_POST, true, NULL},
    {"/abort", NMK_HTTP_GET | NMK_HTTP_DELETE, true, NULL},
};

static nmk_http *server;
static const char *const keys[] = {"key"}, *const origins[] = {"http://x"};

static void answer_later(void *ctx, void *arg) {
    uint64_t *id = arg;
    nmk_http_response *r = nmk_http_find(ctx ? server : NULL, *id);
    free(id);
    if (r) nmk_http_respond_error(r, 429, NULL, "a", "b", "later");
}

static void on_request(void *ctx, const nmk_http_request *q, nmk_http_response *r) {
    (void)ctx;
    nmk_buf body;
    uint64_t *id;
    switch (q->route) {
    case MODELS: nmk_http_respond(r, 200, "application/json", "{}", 2); return;
    case MODEL: nmk_http_respond_error(r, 404, NULL, "model", NULL, "no model \"%s\" at %s", q->rest, q->path); return;
    case ECHO:
        nmk_http_add_field(r, "X-Query", q->query);
        nmk_http_respond(r, 200, nmk_http_field(q, "content-type"), q->body, q->body_bytes);
        return;
    case TAKE:
        body = nmk_http_take_body(q);
        nmk_http_respond(r, 201, "text/plain", body.data, body.length);
        nmk_buf_free(&body);
        return;
    case STREAM:
        nmk_http_begin_stream(r);
        nmk_http_send_event(r, "name", q->body_bytes ? q->body : "a\nb", q->body_bytes ? q->body_bytes : 3);
        nmk_http_finish(r);
        return;
    case LATER:
        *(id = xmalloc(sizeof *id)) = q->id;
        if (nmk_http_post(server, answer_later, id)) free(id);
        return;
    case ABORT: nmk_http_abort(r); return;
    default: fuzz_wrong("a request without a route");
    }
}

static void on_closed(void *ctx, nmk_http_response *r) { (void)ctx, (void)r; }

static void *serve(void *arg) {
    nmk_err e = {""};
    (void)arg;
    if (nmk_http_run(server, &e) < 0) fuzz_wrong("the server ended: %s", e.text);
    return NULL;
}

static void open_server(void) {
    static const nmk_http_callbacks callbacks = {.on_request = on_request, .on_closed = on_closed};
    static int context;
    const nmk_http_options o = {.routes = routes,
                                .route_count = sizeof routes / sizeof *routes,
                                .max_header_bytes = 2000,
                                .max_body_bytes = 4000,
                                .max_held_bytes = 8000,
                                .linger_ms = 50,
                                .api_keys = keys,
                                .api_key_count = 1,
                                .cors_origins = origins,
                                .cors_origin_count = 1};
    nmk_err e;
    pthread_t thread;
    if (nmk_http_open(&server, &o, &callbacks, &context, &e)) fuzz_wrong("%s", e.text);
    if (pthread_create(&thread, NULL, serve, NULL)) fuzz_wrong("no thread");
    pthread_detach(thread);
}

static void run_connection(const char *data, size_t bytes) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)nmk_http_port(server))};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    nmk_buf got = {0};
    char some[4096];
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    /* No TIME_WAIT, which would use up all ports. */
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){1, 0}, sizeof(struct linger));
    if (connect(fd, (struct sockaddr *)&a, sizeof a)) fuzz_wrong("the server takes no connection");
    bool cut = fuzz_below(2);
    while (bytes) {
        size_t n = cut ? 1 + fuzz_below(200) : bytes;
        if (n > bytes) n = bytes;
        if (send(fd, data, n, MSG_NOSIGNAL) != (ssize_t)n) break;
        data += n, bytes -= n;
    }
    /* Some clients do not wait for an answer. */
    if (fuzz_below(8)) {
        shutdown(fd, SHUT_WR);
        for (ssize_t n; (n = recv(fd, some, sizeof some, 0)) > 0;) nmk_buf_add(&got, some, (size_t)n);
        if (got.length &&
            (got.length < 12 || memcmp(got.data, "HTTP/1.1 ", 9) || got.data[9] < '1' || got.data[9] > '5'))
            fuzz_wrong("an answer that is none: %s", got.data);
    }
    close(fd);
    nmk_buf_free(&got);
}

const fuzz_target fuzz_connection = {"connection", seeds, open_server, run_connection, 0, 0};
