/* server/http.c over loopback: the bytes of the answers, and what becomes of clients that are slow, hasty, rude, gone. */
#define _GNU_SOURCE /* memmem */
#include "http.h"

#include <fcntl.h>
#include <sys/resource.h>

#include "http_app.h"

#define GET(path) "GET " path " HTTP/1.1\r\nHost: h\r\n\r\n"

/* The Date field is cut out. */
static void undate(nmk_buf *b) {
    for (char *at; (at = strstr(b->data, "Date: "));) {
        size_t n = strcspn(at, "\n") + 1;
        memmove(at, at + n, b->length - (size_t)(at - b->data) - n + 1);
        b->length -= n;
    }
}

static void expect(const app *a, const char *name, const char *request, const char *expected) {
    nmk_buf b = {0};
    ask(a, request, &b);
    undate(&b);
    check(!strcmp(b.data, expected), name, "expected \"%s\", got \"%s\"", shown(expected), shown(b.data));
    nmk_buf_free(&b);
}

static void expect_part(const app *a, const char *name, const char *request, const char *part) {
    nmk_buf b = {0};
    ask(a, request, &b);
    check(strstr(b.data, part) != NULL, name, "expected \"%s\" in \"%s\"", shown(part), shown(b.data));
    nmk_buf_free(&b);
}

static bool is_closed(int fd, int ms) {
    nmk_buf b = {0};
    bool closed = get_all(fd, &b, ms);
    nmk_buf_free(&b);
    return closed;
}

/* ---------------------------------------------------------------- answers */

/* The fields of a body of n bytes. */
#define JSON(n) "Content-Type: application/json\r\nContent-Length: " n "\r\n"

static void answers(void) {
    app *a = app_start(NULL, NULL);
    nmk_buf b = {0};
    expect(a, "GET", GET("/v1/models"), "HTTP/1.1 200 OK\r\n" JSON("11") "\r\n{\"data\":[]}");
    expect(a, "HEAD", "HEAD /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", "HTTP/1.1 200 OK\r\n" JSON("11") "\r\n");
    expect(a, "no content type when none is given", GET("/health"), "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    expect(a, "404", GET("/nothing"),
           "HTTP/1.1 404 Not Found\r\n" JSON(
               "117") "\r\n"
                      "{\"error\":{\"message\":\"no such endpoint: GET /nothing\",\"type\":\"invalid_request_error\","
                      "\"param\":null,\"code\":\"not_found\"}}");
    expect(a, "405", "DELETE /v1/models HTTP/1.1\r\nHost: h\r\n\r\n",
           "HTTP/1.1 405 Method Not Allowed\r\n" JSON(
               "124") "Allow: GET, HEAD, OPTIONS\r\n\r\n"
                      "{\"error\":{\"message\":\"/v1/models is not for DELETE\",\"type\":\"invalid_request_error\","
                      "\"param\":null,\"code\":\"method_not_allowed\"}}");
    expect(
        a, "a 404 of the application, with quotes in the message", GET("/v1/models/a%22%0a%ff%5c"),
        "HTTP/1.1 404 Not Found\r\n" JSON(
            "119") "\r\n"
                   "{\"error\":{\"message\":\"no model \\\"a\\\"\\n\xef\xbf\xbd\\\\\\\"\",\"type\":\"invalid_request_error\","
                   "\"param\":\"model\",\"code\":\"model_not_found\"}}");
    expect_part(a, "the star of a route", GET("/v1/models/toy%2F1"), "\r\n\r\nit");
    expect_part(a, "the star stands for something", GET("/v1/models/"), " 404 ");
    expect_part(a, "query", GET("/query?a=b%20c&d"), "\r\n\r\nGET|/query|a=b%20c&d");
    expect_part(a, "no field smuggled into an answer", GET("/query"), "X-Request-Id: a  b\r\n");
    expect(
        a, "a bad request closes", "GET / HTTP/1.1\r\n\r\n" GET("/v1/models"),
        "HTTP/1.1 400 Bad Request\r\n" JSON(
            "93") "Connection: close\r\n\r\n"
                  "{\"error\":{\"message\":\"no Host field\",\"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}");
    expect_part(a, "smuggling is refused",
                "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n"
                "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
                "HTTP/1.1 400 Bad Request\r\n");
    expect_part(a, "TLS on this port is told so", "\x16\x03\x01\x02\x01\x01", "plain HTTP");
    expect(a, "HTTP/1.0", "GET /v1/models HTTP/1.0\r\n\r\n",
           "HTTP/1.1 200 OK\r\n" JSON("11") "Connection: close\r\n\r\n{\"data\":[]}");
    expect(a, "HTTP/1.0, kept alive", "GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
           "HTTP/1.1 200 OK\r\n" JSON("11") "Connection: keep-alive\r\n\r\n{\"data\":[]}");
    expect(a, "Connection: close", "GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" GET("/health"),
           "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    expect(a, "OPTIONS without CORS", "OPTIONS /echo HTTP/1.1\r\nHost: h\r\n\r\n",
           "HTTP/1.1 204 No Content\r\nAllow: POST, PUT, OPTIONS\r\n\r\n");
    expect_part(a, "OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: h\r\n\r\n", " 204 ");
    ask(a, GET("/health"), &b);
    check(strstr(b.data, "\r\nDate: ") && strstr(b.data, " GMT\r\n"), "Date", "%s", shown(b.data));
    check(a->accesses > 15 && a->last_status == 200, "access log", "%d lines", a->accesses);
    nmk_buf_free(&b);
    check(app_stop(a, 1000) == 0, "stops", "-");
}

static void cors(void) {
    static const char *const any[] = {"*"}, *const two[] = {"http://a", "http://b"}, *const keys[] = {"k"};
    nmk_http_options o = {.cors_origins = any, .cors_origin_count = 1, .api_keys = keys, .api_key_count = 1};
    app *a = app_start(&o, NULL);
    expect(a, "preflight needs no key",
           "OPTIONS /echo HTTP/1.1\r\nHost: h\r\nOrigin: http://x\r\nAccess-Control-Request-Method: POST\r\n"
           "Access-Control-Request-Headers: authorization, x-stainless-os\r\n\r\n",
           "HTTP/1.1 204 No Content\r\nAccess-Control-Allow-Origin: *\r\nAccess-Control-Expose-Headers: *\r\n"
           "Allow: POST, PUT, OPTIONS\r\nAccess-Control-Allow-Methods: POST, PUT, OPTIONS\r\n"
           "Access-Control-Allow-Headers: authorization, x-stainless-os\r\nAccess-Control-Max-Age: 86400\r\n\r\n");
    expect_part(a, "401 carries CORS fields", "GET /v1/models HTTP/1.1\r\nHost: h\r\nOrigin: http://x\r\n\r\n",
                "Access-Control-Allow-Origin: *\r\n");
    expect_part(a, "413 carries CORS fields",
                "POST /echo HTTP/1.1\r\nHost: h\r\nOrigin: http://x\r\nContent-Length: 99999999999\r\n\r\n",
                "Access-Control-Allow-Origin: *\r\n");
    app_stop(a, 1000);
    o = (nmk_http_options){.cors_origins = two, .cors_origin_count = 2};
    a = app_start(&o, NULL);
    expect(a, "an origin of the list", "GET /health HTTP/1.1\r\nHost: h\r\nOrigin: http://b\r\n\r\n",
           "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nAccess-Control-Allow-Origin: http://b\r\n"
           "Access-Control-Expose-Headers: *\r\nVary: Origin\r\n\r\n");
    expect(a, "an origin that is not", "GET /health HTTP/1.1\r\nHost: h\r\nOrigin: http://bb\r\n\r\n",
           "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nVary: Origin\r\n\r\n");
    app_stop(a, 1000);
}

static void keys(void) {
    static const char *const list[] = {"secret-one", "sk-two"};
    nmk_http_options o = {.api_keys = list, .api_key_count = 2};
    app *a = app_start(&o, NULL);
#define KEY(value) "GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: " value "\r\n\r\n"
    expect(a, "no key", GET("/v1/models"),
           "HTTP/1.1 401 Unauthorized\r\n" JSON(
               "147") "WWW-Authenticate: Bearer\r\n\r\n"
                      "{\"error\":{\"message\":\"an API key is needed, as \\\"Authorization: Bearer KEY\\\"\","
                      "\"type\":\"invalid_request_error\",\"param\":null,\"code\":\"invalid_api_key\"}}");
    static const char *const wrong[] = {
        KEY("Bearer secret-on"), KEY("Bearer secret-one2"), KEY("Bearer "),           KEY("Bearer"),
        KEY("Basic secret-one"), KEY("secret-one"),         KEY("Bearer SECRET-ONE"), KEY("Bearer sk-twosk-two")};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) expect_part(a, shown(wrong[i]), wrong[i], " 401 ");
    expect_part(a, "the first key", KEY("Bearer secret-one"), " 200 ");
    check(a->last_key == 0, "which key it was", "%d", a->last_key);
    expect_part(a, "the second key, bearer in lower case", KEY("bearer  sk-two"), " 200 ");
    check(a->last_key == 1, "which key that was", "%d", a->last_key);
    expect_part(a, "an open route needs none", GET("/health"), " 200 ");
    expect_part(a, "an unknown path needs one", GET("/unknown"), " 401 ");
    expect_part(a, "a refused body is skipped and the connection lives on",
                "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello" KEY("Bearer sk-two"), " 200 ");
    app_stop(a, 1000);
}

/* ---------------------------------------------------------------- how requests come in */

static struct {
    int fd;
    nmk_buf data;
} many_request;
static void *put_many(void *arg) {
    put(many_request.fd, many_request.data.data, many_request.data.length);
    return arg;
}

static void answer_later(void *ctx, void *arg) {
    nmk_http_response *r = nmk_http_find(((app *)ctx)->http, *(uint64_t *)arg);
    if (r) nmk_http_respond(r, 200, "text/plain", "late", 4);
}

static void delivery(void) {
    const int wait_ms = time_limit(300), idle_ms = time_limit(400);
    nmk_http_options o = {
        .max_body_bytes = 4 << 20, .header_ms = wait_ms, .body_ms = wait_ms, .idle_ms = idle_ms, .linger_ms = 300};
    app *a = app_start(&o, NULL);
    nmk_buf b = {0};
    const char *chunked = "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Type: a/b\r\nTransfer-Encoding: chunked\r\n\r\n"
                          "5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n";
    int fd = dial(a->port);
    for (const char *at = chunked; *at; at++) {
        put(fd, at, 1);
        if ((at - chunked) % 20 == 0) usleep(1000);
    }
    check(get_until(fd, &b, "hello world", 2000), "a request byte by byte", "%s", b.data ? shown(b.data) : "");
    b.length = 0;
    puts_to(fd, GET("/v1/models"));
    check(get_until(fd, &b, "{\"data\":[]}", 2000), "the next one on the same connection", "-");
    close(fd);

    /* 50 sent ahead, the first of them answered late. */
    fd = dial(a->port);
    b.length = 0;
    puts_to(fd, GET("/later"));
    for (int i = 0; i < 49; i++) {
        char text[100];
        snprintf(text, sizeof text, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n<%02d>", i);
        puts_to(fd, text);
    }
    app_wait(&a->held, 1, 1000), usleep(100000);
    check(get_some(fd, &b, 0) == 0, "requests sent ahead wait for the first", "%s", b.data ? b.data : "");
    static uint64_t id;
    id = a->last_id;
    nmk_http_post(a->http, answer_later, &id);
    bool good = get_until(fd, &b, "<48>", 2000) && strstr(b.data, "late");
    for (int i = 0, at = 0; i < 49 && good; i++) {
        char text[16];
        snprintf(text, sizeof text, "<%02d>", i);
        char *found = strstr(b.data + at, text);
        good = found && found > strstr(b.data, "late");
        if (good) at = (int)(found - b.data);
    }
    check(good, "and are answered in order", "%s", b.data ? shown(b.data) : "");
    close(fd);

    /* More than is read at once, and more answers than the socket takes. */
    fd = dial(a->port);
    nmk_buf many = {0};
    for (int i = 0; i < 20000; i++) nmk_buf_puts(&many, GET("/v1/models"));
    many_request.fd = fd, many_request.data = many;
    pthread_t writer;
    pthread_create(&writer, NULL, put_many, NULL);
    b.length = 0;
    int answers_seen = 0;
    while (answers_seen < 20000 && get_some(fd, &b, time_limit(3000)) > 0) {
        char *last = b.data;
        for (char *at = b.data; (at = memmem(at, b.length - (size_t)(at - b.data), "{\"data\":[]}", 11)); last = at)
            at += 11, answers_seen++;
        b.length -= (size_t)(last - b.data);
        memmove(b.data, last, b.length + 1);
    }
    pthread_join(writer, NULL);
    check(answers_seen == 20000, "20000 requests sent ahead", "%d answers", answers_seen);
    nmk_buf_free(&many);
    close(fd);

    fd = dial(a->port);
    b.length = 0;
    puts_to(fd, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n");
    check(get_until(fd, &b, "HTTP/1.1 100 Continue\r\n\r\n", 1000), "100-continue", "%s", b.data ? b.data : "");
    puts_to(fd, "hello");
    check(get_until(fd, &b, "\r\n\r\nhello", 1000), "then the body", "%s", shown(b.data));
    close(fd);
    fd = dial(a->port);
    b.length = 0;
    puts_to(fd, "POST /no HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n");
    check(get_all(fd, &b, 1000) && strstr(b.data, "404 ") && !strstr(b.data, "100 C"), "a refusal instead of 100", "%s",
          b.data ? shown(b.data) : "");
    close(fd);

    size_t mb = 3 << 20;
    char *big = xmalloc(mb), head[100];
    memset(big, 'x', mb);
    big[0] = '<', big[mb - 1] = '>';
    snprintf(head, sizeof head, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: %zu\r\n\r\n", mb);
    fd = dial(a->port);
    b.length = 0;
    puts_to(fd, head);
    put(fd, big, mb);
    good = get_until(fd, &b, ">", 5000);
    const char *body = good ? strstr(b.data, "\r\n\r\n") + 4 : NULL;
    check(good && b.length - (size_t)(body - b.data) == mb && !memcmp(body, big, mb), "a body of 3 MiB and back", "-");
    close(fd);
    /* Too much: the answer is seen although the client goes on sending. */
    fd = dial(a->port);
    b.length = 0;
    puts_to(fd, "POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n300000\r\n");
    put(fd, big, mb);
    puts_to(fd, "\r\n300000\r\n");
    put(fd, big, mb);
    check(get_all(fd, &b, 3000) && b.data && strstr(b.data, "413 Content Too Large"), "413 for too much in chunks",
          "%s", b.data ? shown(b.data) : "");
    close(fd);
    expect_part(a, "a body taken over", "PUT /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc", "\r\n\r\nabc");
    expect_part(a, "413 by length", "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5000000\r\n\r\n",
                "413 Content Too Large");
    free(big);

    /* Slow ones. */
    uint64_t start = nmk_now_ns();
    fd = dial(a->port);
    b.length = 0;
    puts_to(fd, "GET / HTT");
    good = get_all(fd, &b, 2000) && b.data && strstr(b.data, "408 Request Timeout");
    uint64_t ms = (nmk_now_ns() - start) / 1000000;
    check(good && ms >= (uint64_t)wait_ms && ms < 3 * (uint64_t)wait_ms, "a header that does not end: 408",
          "%llu ms, %s", (unsigned long long)ms, b.data ? shown(b.data) : "");
    close(fd);
    fd = dial(a->port);
    b.length = 0;
    start = nmk_now_ns();
    puts_to(fd, "GET / HTTP/1.1\r\n");
    for (int i = 0; i < 40 && get_some(fd, &b, time_limit(25)) == 0; i++)
        if (!puts_to(fd, "a: b\r\n")) break;
    ms = (nmk_now_ns() - start) / 1000000;
    check(b.data && strstr(b.data, "408 ") && ms < 3 * (uint64_t)wait_ms, "a header that drips: 408", "%llu ms",
          (unsigned long long)ms);
    close(fd);
    fd = dial(a->port);
    b.length = 0;
    start = nmk_now_ns();
    puts_to(fd, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n");
    for (int i = 0; i < 60 && get_some(fd, &b, time_limit(25)) == 0; i++)
        if (!puts_to(fd, "a")) break;
    ms = (nmk_now_ns() - start) / 1000000;
    check(b.data && strstr(b.data, "408 ") && ms < 3 * (uint64_t)wait_ms, "a body that drips: 408", "%llu ms",
          (unsigned long long)ms);
    close(fd);
    fd = dial(a->port);
    start = nmk_now_ns();
    good = is_closed(fd, 2000);
    ms = (nmk_now_ns() - start) / 1000000;
    check(good && ms >= (uint64_t)idle_ms - 20 && ms < 3 * (uint64_t)idle_ms, "an idle connection is closed", "%llu ms",
          (unsigned long long)ms);
    close(fd);
    nmk_buf_free(&b);
    app_stop(a, 1000);
}

/* ---------------------------------------------------------------- clients that leave */

static double slowest;

/* how: 0 close, 1 reset, 2 half-close. */
static void leave(app *a, const char *name, const char *request, const char *wait_for, int how) {
    nmk_buf b = {0};
    int fd = dial(a->port), before = a->closed, requests = a->requests;
    puts_to(fd, request);
    app_wait(&a->requests, requests + 1, 1000);
    if (wait_for) get_until(fd, &b, wait_for, 1000);
    usleep(20000);
    uint64_t start = nmk_now_ns();
    if (how == 1) {
        struct linger l = {1, 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof l);
    }
    if (how == 2)
        shutdown(fd, SHUT_WR);
    else
        close(fd);
    bool seen = app_wait(&a->closed, before + 1, 1000);
    double ms = seen ? (double)(a->closed_ns - start) / 1e6 : -1;
    char text[160];
    snprintf(text, sizeof text, "%s: noticed", name);
    check(seen && ms < time_limit(250), text, "%.2f ms", ms);
    if (ms > slowest) slowest = ms;
    if (how == 2) close(fd);
    nmk_buf_free(&b);
}

static void leaving(void) {
    app *a = app_start(NULL, NULL);
    leave(a, "close before the answer", GET("/later"), NULL, 0);
    leave(a, "reset before the answer", GET("/later"), NULL, 1);
    leave(a, "half-close before the answer", GET("/later"), NULL, 2);
    leave(a, "close in a silent stream", GET("/stream"), "\r\n\r\n", 0);
    leave(a, "reset in a silent stream", GET("/stream"), "\r\n\r\n", 1);
    leave(a, "close with a request sent ahead", GET("/later") GET("/later"), NULL, 0);
    leave(a, "close after a body", "POST /later HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc", NULL, 0);
    char name[80];
    snprintf(name, sizeof name, "the slowest was noticed after %.2f ms", slowest);
    check(slowest < time_limit(250), name, "-");
    check(a->cuts == a->closed, "the access log has them as cut", "%d of %d", a->cuts, a->closed);

    nmk_buf b = {0};
    int fd = dial(a->port);
    puts_to(fd, GET("/v1/models") GET("/events"));
    shutdown(fd, SHUT_WR);
    check(get_all(fd, &b, 1000) && count_of(&b, "{\"data\":[]}") == 1 && strstr(b.data, "[DONE]"),
          "half-close after requests that are answered at once: all answers come, then the end", "%s",
          b.data ? shown(b.data) : "");
    close(fd);
    int before = a->closed;
    fd = dial(a->port);
    puts_to(fd, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\na");
    close(fd);
    fd = dial(a->port);
    close(fd);
    usleep(50000);
    check(a->closed == before, "leaving in the middle of a request concerns nobody", "-");

    /* Answers to ids that are gone. */
    static uint64_t gone[2] = {0, 12345}; /* read later, by the loop */
    gone[0] = a->last_id;
    nmk_http_post(a->http, answer_later, &gone[0]);
    nmk_http_post(a->http, answer_later, &gone[1]);
    expect_part(a, "an id of a request that is gone finds nothing", GET("/health"), " 200 ");
    nmk_buf_free(&b);
    check(app_stop(a, 1000) == 0, "nothing is left", "-");
}

/* ---------------------------------------------------------------- streams */

static void finish_stream(void *ctx, void *arg) {
    nmk_http_response *r = nmk_http_find(((app *)ctx)->http, *(uint64_t *)arg);
    if (!r) return;
    nmk_http_send_event(r, NULL, "end", 3);
    nmk_http_finish(r);
}
static void abort_stream(void *ctx, void *arg) {
    nmk_http_response *r = nmk_http_find(((app *)ctx)->http, *(uint64_t *)arg);
    if (r) nmk_http_abort(r);
}

static void streams(void) {
    nmk_http_options o = {.keepalive_ms = 150};
    app *a = app_start(&o, NULL);
    nmk_buf b = {0};
    expect(a, "events", GET("/events") GET("/health"),
           "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
           "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n\r\n"
           "f\r\ndata: {\"a\":1}\n\n\r\n"
           "2a\r\nevent: tick\ndata: two\ndata: lines\ndata: \n\n\r\n"
           "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
           "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
    expect(a, "events in HTTP/1.0", "GET /events HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
           "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
           "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\nConnection: close\r\n\r\n"
           "data: {\"a\":1}\n\nevent: tick\ndata: two\ndata: lines\ndata: \n\ndata: [DONE]\n\n");
    expect(a, "HEAD of a stream", "HEAD /events HTTP/1.1\r\nHost: h\r\n\r\n",
           "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
           "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n\r\n");

    int fd = dial(a->port);
    puts_to(fd, GET("/events"));
    get_some(fd, &b, 1000);
    check(strstr(b.data, "[DONE]") != NULL, "what is sent in one turn goes out in one write", "%s", shown(b.data));
    b.length = 0;
    int held = a->held;
    uint64_t start = nmk_now_ns();
    puts_to(fd, GET("/stream"));
    bool good = get_until(fd, &b, "\r\n\r\n", 1000);
    double ms = (double)(nmk_now_ns() - start) / 1e6;
    check(good && ms < time_limit(250), "the header goes out before the first event", "%.1f ms", ms);
    app_wait(&a->held, held + 1, 1000);
    start = nmk_now_ns();
#define COMMENT "e\r\n: keep-alive\n\n\r\n"
    get_until(fd, &b, COMMENT COMMENT COMMENT, 3000);
    ms = (double)(nmk_now_ns() - start) / 1e6;
    int comments = count_of(&b, COMMENT);
    check(comments == 3 && ms > 400 && ms < time_limit(1000), "comments while it is silent", "%d in %.0f ms at 150 ms",
          comments, ms);
    static uint64_t id;
    id = a->last_id;
    nmk_http_post(a->http, finish_stream, &id);
    check(get_until(fd, &b, "data: end\n\n\r\n0\r\n\r\n", 1000), "then the events", "%s", shown(b.data));
    b.length = 0;
    puts_to(fd, GET("/v1/models"));
    check(get_until(fd, &b, "{\"data\":[]}", 1000), "and the connection goes on", "-");
    held = a->held;
    puts_to(fd, GET("/stream"));
    app_wait(&a->held, held + 1, 1000);
    id = a->last_id;
    b.length = 0;
    nmk_http_post(a->http, abort_stream, &id);
    check(get_all(fd, &b, 3000) && !strstr(b.data, "\r\n0\r\n"), "an aborted stream has no end", "%s",
          b.data ? shown(b.data) : "");
    close(fd);
    nmk_buf_free(&b);
    app_stop(a, 1000);
}

static void back_pressure(void) {
    const int write_ms = time_limit(400);
    nmk_http_options o = {.high_water = 64 << 10, .send_buffer_bytes = 16 << 10, .write_ms = write_ms};
    app *a = app_start(&o, NULL);
    nmk_buf b = {0};
    a->flood_bytes = 1000, a->flood_count = 20000; /* 20 MB */
    int fd = dial_with(a->port, 16 << 10);
    puts_to(fd, GET("/flood"));
    app_wait(&a->waits, 1, 2000);
    usleep(100000); /* until what the sockets hold is full */
    int stalled = a->flooded;
    usleep(100000);
    check(a->waits >= 1 && stalled < 1000 && a->flooded == stalled, "a client that does not read stops the producer",
          "%d events, %d waits", stalled, a->waits);
    uint64_t end = nmk_now_ns() + time_limit_ns(20000);
    while (nmk_now_ns() < end && get_some(fd, &b, time_limit(1000)) > 0)
        if (b.length > 8 && !memcmp(b.data + b.length - 7, "\r\n0\r\n\r\n", 7)) break;
    bool good = count_of(&b, "3e8") == 0 && count_of(&b, "data: ") == 20000;
    const char *at = strstr(b.data, "\r\n\r\n") + 4;
    for (int i = 0; i < 20000 && good; i++, at += 5 + 1008 + 2)
        good = !strncmp(at, "3f0\r\ndata: ", 11) && at[11] == 'a' + i % 26 && at[1010] == 'a' + i % 26;
    check(good && a->drained > 10, "one that reads again gets everything", "%d events, %d times drained",
          count_of(&b, "data: "), a->drained);
    close(fd);

    a->flooded = a->waits = 0;
    int before = a->closed;
    fd = dial_with(a->port, 16 << 10);
    uint64_t start = nmk_now_ns();
    puts_to(fd, GET("/flood"));
    good = app_wait(&a->closed, before + 1, 3000);
    double ms = (double)(nmk_now_ns() - start) / 1e6;
    check(good && ms > 0.9 * write_ms && ms < 4 * write_ms, "one that never reads is dropped after write_ms", "%.0f ms",
          ms);
    close(fd);

    a->flooded = a->waits = 0;
    before = a->closed;
    fd = dial_with(a->port, 16 << 10);
    puts_to(fd, GET("/flood"));
    app_wait(&a->waits, 1, 1000);
    usleep(20000);
    start = nmk_now_ns();
    close(fd);
    good = app_wait(&a->closed, before + 1, 1000);
    ms = (double)(a->closed_ns - start) / 1e6;
    check(good && ms < time_limit(250), "one that leaves with data queued is noticed", "%.1f ms", ms);
    app_stop(a, 1000);

    o = (nmk_http_options){.high_water = 1 << 30, .max_queued_bytes = 1 << 20, .send_buffer_bytes = 16 << 10};
    a = app_start(&o, NULL);
    a->flood_bytes = 1000, a->flood_count = 1 << 20;
    fd = dial_with(a->port, 16 << 10);
    puts_to(fd, GET("/flood"));
    check(app_wait(&a->closed, 1, 2000) && a->dooms == 1 && a->flooded < 2000,
          "a stream beyond max_queued_bytes is cut", "%d events", a->flooded);
    close(fd);
    nmk_buf_free(&b);
    app_stop(a, 1000);
}

/* ---------------------------------------------------------------- other threads, draining, limits */

static atomic_int posted, out_of_order;
static void count_post(void *ctx, void *arg) {
    static intptr_t last[4];
    intptr_t value = (intptr_t)arg, from = value & 3;
    (void)ctx;
    if (value >> 2 != last[from] + 1) out_of_order++;
    last[from] = value >> 2;
    posted++;
}
static app *post_app;
static void *post_thread(void *arg) {
    for (intptr_t i = 1; i <= 20000; i++) {
        nmk_http_post(post_app->http, count_post, (void *)(i << 2 | (intptr_t)arg));
        if (i % 100 == 0) nmk_http_wake(post_app->http);
    }
    return NULL;
}

static void threads(void) {
    app *a = post_app = app_start(NULL, NULL);
    pthread_t t[4];
    for (intptr_t i = 0; i < 4; i++) pthread_create(&t[i], NULL, post_thread, (void *)i);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    check(app_wait(&posted, 80000, 5000) && !out_of_order, "posts of four threads, each in order",
          "%d, %d out of order", posted, out_of_order);
    check(app_wait(&a->woken, 1, 1000), "wake", "-");
    int woken = a->woken;
    uint64_t start = nmk_now_ns();
    nmk_http_wake(a->http);
    bool good = app_wait(&a->woken, woken + 1, 1000);
    check(good && nmk_now_ns() - start < time_limit_ns(50), "a wake is quick", "-");
    nmk_http *h = a->http;
    nmk_http_drain(h, 1000);
    pthread_join(a->thread, NULL);
    check(nmk_http_post(h, count_post, NULL) == -1, "a post after the end is refused", "-");
    nmk_http_close(h);
    free(a);
}

static bool refused(int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    bool no = connect(fd, (struct sockaddr *)&to, sizeof to) != 0;
    close(fd);
    return no;
}

static void draining(void) {
    app *a = app_start(NULL, NULL);
    nmk_buf b = {0}, c = {0};
    int idle = dial(a->port), stream = dial(a->port), half = dial(a->port);
    puts_to(idle, GET("/health"));
    get_until(idle, &b, "\r\n\r\n", 1000);
    puts_to(half, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nab");
    puts_to(stream, GET("/stream"));
    app_wait(&a->held, 1, 1000);
    static uint64_t id;
    id = a->last_id;
    nmk_http_drain(a->http, time_limit(5000));
    check(is_closed(idle, 1000), "draining closes what is idle", "-");
    check(refused(a->port), "and refuses new connections", "-");
    b.length = 0;
    puts_to(half, "cde");
    check(get_all(half, &b, 1000) && strstr(b.data, "Connection: close\r\n") && strstr(b.data, "abcde"),
          "a request that had begun is answered, and then closed", "%s", b.data ? shown(b.data) : "");
    close(half);
    nmk_http_post(a->http, finish_stream, &id);
    check(get_all(stream, &c, 1000) && strstr(c.data, "data: end\n\n\r\n0\r\n\r\n"), "a stream ends", "%s",
          c.data ? shown(c.data) : "");
    close(stream), close(idle);
    uint64_t start = nmk_now_ns();
    check(app_stop(a, time_limit(5000)) == 0 && nmk_now_ns() - start < time_limit_ns(1000),
          "then it is over, nothing was cut", "-");

    a = app_start(NULL, NULL);
    stream = dial(a->port);
    puts_to(stream, GET("/stream"));
    app_wait(&a->requests, 1, 1000);
    start = nmk_now_ns();
    int cut = app_stop(a, 200);
    double ms = (double)(nmk_now_ns() - start) / 1e6;
    check(cut == 1 && ms > 190 && ms < time_limit(600), "what does not end is cut at the deadline", "%d cut, %.0f ms",
          cut, ms);
    close(stream);

    /* Connections in the backlog when draining starts. */
    a = app_start(NULL, NULL);
    int fds[20], good = 0;
    for (int i = 0; i < 20; i++) fds[i] = dial(a->port), puts_to(fds[i], GET("/v1/models"));
    nmk_http_drain(a->http, time_limit(2000));
    for (int i = 0; i < 20; i++) {
        b.length = 0;
        if (get_all(fds[i], &b, 1000) && b.length && strstr(b.data, "{\"data\":[]}")) good++;
        close(fds[i]);
    }
    check(good == 20, "those already connected are answered", "%d of 20", good);
    app_stop(a, 1000);
    nmk_buf_free(&b);
    nmk_buf_free(&c);
}

/* Who connects while nobody accepts is answered by the next server, at the same address. */
static void handing_over(void) {
    nmk_http_options o = {.send_buffer_bytes = 4096, .linger_ms = 200};
    app *a = app_start(&o, NULL);
    nmk_buf b = {0};
    nmk_err e;
    int stream = dial(a->port), slow = dial_with(a->port, 4096), port = a->port, fds[20], good = 0;
    char *address = xstrdup(nmk_http_address(a->http));
    a->flood_bytes = 1 << 16, a->flood_count = 1000;
    puts_to(slow, GET("/flood")), puts_to(stream, GET("/stream"));
    app_wait(&a->held, 1, 1000), app_wait(&a->requests, 2, 1000);
    static uint64_t id;
    id = a->last_id;
    uint64_t start = nmk_now_ns();
    nmk_http_leave(a->http, time_limit(500));
    nmk_http_post(a->http, finish_stream, &id);
    check(get_all(stream, &b, 400) && strstr(b.data, "data: end\n\n\r\n0\r\n\r\n"), "leaving lets a stream end", "%s",
          b.data ? shown(b.data) : "");
    for (int i = 0; i < 20; i++) fds[i] = dial(port), puts_to(fds[i], GET("/v1/models"));
    pthread_join(a->thread, NULL);
    double ms = (double)(nmk_now_ns() - start) / 1e6;
    check(a->result == 1 && ms > time_limit(490) && ms < time_limit(1500), "and cuts who is slow at the deadline",
          "%d cut, %.0f ms", a->result, ms);
    check(a->requests == 2, "it takes no new connection", "%d requests", a->requests);
    int listener = nmk_http_take_listener(a->http);
    nmk_http_close(a->http);
    check(listener >= 0, "the socket is left", "-");
    fcntl(listener, F_SETFL, 0), fcntl(listener, F_SETFD, 0);
    free(a);
    app *next = app_start(&(nmk_http_options){.listen_fd = listener, .host = "::1"}, NULL);
    for (int i = 0; i < 20; i++) {
        b.length = 0;
        good += get_until(fds[i], &b, "{\"data\":[]}", 1000);
        close(fds[i]);
    }
    check(good == 20, "those who connected meanwhile are answered", "%d of 20", good);
    check(next->port == port && !strcmp(nmk_http_address(next->http), address), "at the same address", "%s, not %s",
          nmk_http_address(next->http), address);
    check(fcntl(listener, F_GETFD) == FD_CLOEXEC && fcntl(listener, F_GETFL) & O_NONBLOCK,
          "a socket that is taken over is closed on exec and never blocks", "-");
    nmk_http_drain(next->http, 1000);
    pthread_join(next->thread, NULL);
    check(refused(port) && nmk_http_take_listener(next->http) == -1, "drained, nothing is left", "-");
    nmk_http_close(next->http), free(next);

    int unheard = socket(AF_INET, SOCK_STREAM, 0);
    nmk_http_options none = {.listen_fd = unheard};
    check_message(nmk_http_open(&(nmk_http *){NULL}, &none, &app_callbacks, NULL, &e), &e, "is no socket that listens",
                  "a socket that does not listen");
    check(close(unheard) == 0, "stays with who gave it", "it is closed");
    close(stream), close(slow), free(address);
    nmk_buf_free(&b);
}

static int open_descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Waits until so many are open, both ends of each connection counted: the server has closed what it was to close. */
static void descriptors_become(int count) {
    for (int i = 0; i < time_limit(2000) && open_descriptors() != count; i++) usleep(1000);
}

static double cpu_seconds(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

/* A socket, after which this process gets no further descriptor, until *before is set again. */
static int last_descriptor(struct rlimit *before) {
    int fd = socket(AF_INET, SOCK_STREAM, 0), top = dup(fd);
    close(top);
    getrlimit(RLIMIT_NOFILE, before);
    struct rlimit low = *before;
    low.rlim_cur = (rlim_t)top;
    setrlimit(RLIMIT_NOFILE, &low);
    return fd;
}

static bool ask_last(const app *a, int fd) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)a->port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return !connect(fd, (struct sockaddr *)&to, sizeof to) && puts_to(fd, GET("/v1/models"));
}

static void limits(void) {
    nmk_http_options o = {.max_connections = 4, .max_body_bytes = 1 << 20, .max_held_bytes = 1 << 20, .linger_ms = 200};
    app *a = app_start(&o, NULL);
    nmk_buf b = {0};
    int fds[5], files = open_descriptors();
    for (int i = 0; i < 4; i++) fds[i] = dial(a->port), puts_to(fds[i], GET("/later"));
    app_wait(&a->requests, 4, 1000);
    ask(a, GET("/v1/models"), &b);
    check(strstr(b.data, "503 Service Unavailable") && strstr(b.data, "Retry-After: 1\r\n") &&
              strstr(b.data, "Connection: close"),
          "one connection too many: 503", "%s", shown(b.data));
    close(fds[0]);
    descriptors_become(files + 2 * 3);
    fds[0] = dial(a->port);
    puts_to(fds[0], GET("/health"));
    b.length = 0;
    check(get_until(fds[0], &b, "200 OK", 1000), "room again after one left", "-");
    ask(a, GET("/v1/models"), &b);
    check(strstr(b.data, "200 OK") && is_closed(fds[0], 500), "an idle connection makes room", "%s", shown(b.data));
    for (int i = 0; i < 4; i++) close(fds[i]);
    descriptors_become(files);

    for (int i = 0; i < 4; i++) fds[i] = dial(a->port);
    ask(a, GET("/v1/models"), &b);
    bool full = strstr(b.data, "503 Service") != NULL;
    b.length = 0;
    for (int i = 0; i < 4; i++) puts_to(fds[i], GET("/v1/models"));
    for (int i = 0; i < 4; i++) get_some(fds[i], &b, time_limit(300)), close(fds[i]);
    check(full && count_of(&b, "200 OK") == 4, "connections that have just come are not idle", "%s", shown(b.data));
    descriptors_become(files);

    char *half = xmalloc(400000);
    memset(half, 'x', 400000);
    for (int i = 0; i < 3; i++) {
        fds[i] = dial(a->port);
        puts_to(fds[i], "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 900000\r\n\r\n");
        put(fds[i], half, 400000);
    }
    b.length = 0;
    full = false;
    for (int i = 0; i < 3; i++) full |= get_until(fds[i], &b, "503 Service", 300);
    check(full, "bodies that together take too much memory: 503", "%s", b.data ? shown(b.data) : "");
    for (int i = 0; i < 3; i++) close(fds[i]);
    free(half);
    descriptors_become(files);
    ask(a, "POST /echo HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi", &b);
    check(strstr(b.data, "\r\n\r\nhi") != NULL, "and it is given back", "%s", shown(b.data));

    /* No descriptors left: the client waits, nothing spins or dies. */
    descriptors_become(files);
    struct rlimit before;
    b.length = 0;
    int fd = last_descriptor(&before);
    double start = cpu_seconds();
    bool connected = ask_last(a, fd), early = get_some(fd, &b, 300) > 0;
    double cpu = cpu_seconds() - start;
    setrlimit(RLIMIT_NOFILE, &before);
    bool good = get_until(fd, &b, "{\"data\":[]}", 1000);
    check(connected && !early && good && cpu < 0.1, "no descriptors left: it waits, and goes on afterwards",
          "connected %d, early %d, answered %d, %.2f s of CPU", connected, early, good, cpu);
    close(fd);

    int requests = a->requests, later = dial(a->port);
    puts_to(later, GET("/later"));
    app_wait(&a->requests, requests + 1, 1000);
    fd = last_descriptor(&before);
    connected = ask_last(a, fd);
    usleep(20000);
    start = cpu_seconds();
    nmk_http_drain(a->http, 400);
    usleep(300000);
    cpu = cpu_seconds() - start;
    setrlimit(RLIMIT_NOFILE, &before);
    check(connected && cpu < 0.1, "nor does it spin when it drains then", "connected %d, %.2f s of CPU", connected,
          cpu);
    close(fd), close(later);
    nmk_buf_free(&b);
    app_stop(a, 1000);
}

static void binding(void) {
    app *a = app_start(NULL, NULL);
    nmk_err e = {""};
    nmk_http *h = NULL;
    static const struct {
        const char *host, *error;
        int port;
    } bad[] = {{"127.0.0.1", "the port is in use", 0},
               {"example.com", "give an IPv4 or IPv6 address", 1},
               {"1.2.3", "give an IPv4", 1},
               {"[::1", "give an IPv4", 1},
               {"203.0.113.7", "no such address", 1000},
               {"127.0.0.1", "must be 0 to 65535", 65536}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        nmk_http_options o = {.host = bad[i].host, .port = i ? bad[i].port : a->port};
        int rc = nmk_http_open(&h, &o, &app_callbacks, a, &e);
        check(rc == -1 && strstr(e.text, bad[i].error), bad[i].error, "rc %d, \"%s\"", rc, e.text);
    }
    static const char *const hosts[] = {"127.0.0.1", "0.0.0.0", "localhost", "::", "::1", "[::1]"};
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        nmk_http_options o = {.host = hosts[i]};
        int rc = nmk_http_open(&h, &o, &app_callbacks, a, &e);
        char name[100];
        snprintf(name, sizeof name, "listens on %s", hosts[i]);
        if (rc && strstr(e.text, "IPv6")) {
            printf("skip - %s: no IPv6\n", name);
            continue;
        }
        if (rc && strchr(hosts[i], ':') && strstr(e.text, "no such address")) {
            printf("skip - %s: no IPv6 on loopback\n", name);
            continue;
        }
        check(!rc, name, "%s", e.text);
        if (rc) continue;
        char port[16];
        snprintf(port, sizeof port, ":%d", nmk_http_port(h));
        check(strstr(nmk_http_address(h), port) &&
                  strchr(nmk_http_address(h), '[') == (strchr(hosts[i], ':') ? nmk_http_address(h) : NULL),
              nmk_http_address(h), "port %s", port);
        nmk_http_close(h);
    }
    app_stop(a, 1000);
}

/* ---------------------------------------------------------------- whatever comes */

static void fuzz(void) {
    nmk_http_options o = {.header_ms = time_limit(200), .body_ms = time_limit(200), .linger_ms = 20};
    app *a = app_start(&o, NULL);
    nmk_buf request = {0}, b = {0};
    const char *cases = getenv("NMK_FUZZ");
    long n = cases ? atol(cases) : 1500;
    for (long i = 0; i < n; i++) {
        int fd = dial(a->port);
        mutate(&request);
        for (size_t at = 0, len; at < request.length; at += len) {
            len = random_below(3) ? request.length - at : 1 + random_below(request.length - at);
            if (!put(fd, request.data + at, len)) break;
        }
        b.length = 0;
        switch (random_below(4)) {
        case 0: shutdown(fd, SHUT_WR); /* fall through */
        case 1: get_some(fd, &b, 5); break;
        case 2: {
            struct linger l = {1, 0};
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof l);
        }
        }
        close(fd);
    }
    ask(a, GET("/v1/models"), &b);
    check(strstr(b.data, "200 OK") != NULL, "mutated requests over the socket: it still answers", "%s", shown(b.data));
    nmk_buf_free(&request);
    nmk_buf_free(&b);
    int cut = app_stop(a, time_limit(500));
    check(cut == 0, "and nothing of them is left", "%d", cut);
}

int main(void) {
    int before = open_descriptors();
    answers();
    cors();
    keys();
    delivery();
    leaving();
    streams();
    back_pressure();
    threads();
    draining();
    handing_over();
    limits();
    binding();
    fuzz();
    int now = open_descriptors();
    check(now == before, "no descriptor is left open", "%d before, %d after", before, now);
    return failures != 0;
}
