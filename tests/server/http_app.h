/* A server for the tests of server/http.c: it answers a few paths and leaves the rest to the test. */
#ifndef NMK_TESTS_HTTP_APP_H
#define NMK_TESTS_HTTP_APP_H

#include <pthread.h>
#include <stdatomic.h>

#include "http.h"
#include "http_helper.h"

typedef struct {
    nmk_http *http;
    pthread_t thread;
    int port, result;
    nmk_http_options o;
    atomic_int requests, closed, drained, woken, accesses, cuts;
    atomic_int held; /* requests left to the test; last_id is the last one's */
    atomic_ullong last_id, closed_ns;
    atomic_int last_status, last_key;
    /* /flood: events of that size, as many as that; how many were sent; did it ever have to wait */
    int flood_bytes, flood_count;
    atomic_int flooded, waits, dooms;
} app;

enum { MODELS, MODEL, ECHO, HEALTH, STREAM, LATER, FLOOD, EVENTS, QUERY };
static const nmk_http_route app_routes[] = {
    {"/v1/models", NMK_HTTP_GET, false, NULL},
    {"/v1/models/*", NMK_HTTP_GET, false, NULL},
    {"/echo", NMK_HTTP_POST | NMK_HTTP_PUT, false, NULL},
    {"/health", NMK_HTTP_GET, true, NULL},
    {"/stream", NMK_HTTP_GET | NMK_HTTP_POST, false, NULL},
    {"/later", NMK_HTTP_GET | NMK_HTTP_POST, false, NULL},
    {"/flood", NMK_HTTP_GET, false, NULL},
    {"/events", NMK_HTTP_GET, false, NULL},
    {"/query", NMK_HTTP_GET, false, NULL},
};

/* Sends until told to wait. */
static void app_flood(app *a, nmk_http_response *r) {
    char *text = xmalloc((size_t)a->flood_bytes);
    int rc = 0;
    while (!rc && a->flooded < a->flood_count) {
        memset(text, 'a' + a->flooded % 26, (size_t)a->flood_bytes);
        rc = nmk_http_send_event(r, NULL, text, (size_t)a->flood_bytes);
        a->flooded++;
    }
    a->waits += rc == 1;
    a->dooms += rc == -1;
    if (!rc) nmk_http_finish(r);
    free(text);
}

static void app_request(void *ctx, const nmk_http_request *q, nmk_http_response *r) {
    app *a = ctx;
    nmk_buf text = {0};
    a->requests++;
    a->last_key = q->key;
    switch (q->route) {
    case MODELS: nmk_http_respond(r, 200, "application/json", "{\"data\":[]}", 11); return;
    case MODEL:
        if (!strcmp(q->rest, "toy/1"))
            nmk_http_respond(r, 200, "text/plain", "it", 2);
        else
            nmk_http_respond_error(r, 404, NULL, "model", "model_not_found", "no model \"%s\"", q->rest);
        return;
    case ECHO:
        if (q->method == NMK_HTTP_PUT) {
            text = nmk_http_take_body(q);
            nmk_http_respond(r, 200, "text/plain", text.data, text.length);
            nmk_buf_free(&text);
            return;
        }
        nmk_http_respond(r, 200, nmk_http_field(q, "content-type"), q->body, q->body_bytes);
        return;
    case QUERY:
        nmk_buf_printf(&text, "%s|%s|%s", q->method_name, q->path, q->query);
        nmk_http_add_field(r, "X-Request-Id", "a\r\nb");
        nmk_http_respond(r, 200, "text/plain", text.data, text.length);
        nmk_buf_free(&text);
        return;
    case HEALTH: nmk_http_respond(r, 200, NULL, NULL, 0); return;
    case EVENTS:
        nmk_http_begin_stream(r);
        nmk_http_send_event(r, NULL, "{\"a\":1}", 7);
        nmk_http_send_event(r, "tick", "two\nlines\r\n", 11);
        nmk_http_send_event(r, NULL, "[DONE]", 6);
        nmk_http_finish(r);
        return;
    case STREAM: nmk_http_begin_stream(r); break;
    case FLOOD:
        nmk_http_begin_stream(r);
        app_flood(a, r);
        return;
    default: break;
    }
    a->last_id = q->id;
    a->held++;
}

static void app_closed(void *ctx, nmk_http_response *r) {
    app *a = ctx;
    (void)r;
    a->closed_ns = nmk_now_ns();
    a->closed++;
}

static void app_drained(void *ctx, nmk_http_response *r) {
    app *a = ctx;
    a->drained++;
    app_flood(a, r);
}

static void app_wake(void *ctx) { ((app *)ctx)->woken++; }

static void app_access(void *ctx, const nmk_http_access *x) {
    app *a = ctx;
    a->accesses++;
    a->cuts += x->cut;
    a->last_status = x->status;
}

static const nmk_http_callbacks app_callbacks = {app_request, app_closed, app_drained, app_wake, app_access};

static void *app_thread(void *ctx) {
    app *a = ctx;
    nmk_err e = {""};
    a->result = nmk_http_run(a->http, &e);
    if (a->result < 0) printf("not ok - nmk_http_run: %s\n", e.text);
    return NULL;
}

/* With the routes above unless o has others; cb NULL: the callbacks above. */
static app *app_start(const nmk_http_options *o, const nmk_http_callbacks *cb) {
    app *a = xcalloc(1, sizeof *a);
    nmk_err e = {""};
    if (o) a->o = *o;
    if (!a->o.routes) a->o.routes = app_routes, a->o.route_count = sizeof app_routes / sizeof *app_routes;
    if (nmk_http_open(&a->http, &a->o, cb ? cb : &app_callbacks, a, &e)) {
        printf("not ok - nmk_http_open: %s\n", e.text);
        exit(1);
    }
    a->port = nmk_http_port(a->http);
    pthread_create(&a->thread, NULL, app_thread, a);
    return a;
}

/* Drains, with a deadline; how many requests were cut. */
static int app_stop(app *a, int deadline_ms) {
    nmk_http_drain(a->http, deadline_ms);
    pthread_join(a->thread, NULL);
    int result = a->result;
    nmk_http_close(a->http);
    free(a);
    return result;
}

/* Waits for a counter to reach a value, for time_limit(ms). */
__attribute__((unused)) static bool app_wait(atomic_int *counter, int value, int ms) {
    for (int i = 0; i < time_limit(ms) * 5; i++) {
        if (*counter >= value) return true;
        usleep(200);
    }
    return *counter >= value;
}

/* Sends, and reads until the server closes or nothing comes for a while. */
__attribute__((unused)) static void ask(const app *a, const char *request, nmk_buf *answer) {
    int fd = dial(a->port);
    answer->length = 0;
    nmk_buf_puts(answer, "");
    puts_to(fd, request);
    for (int ms = time_limit(2000); get_some(fd, answer, ms) > 0; ms = 150) {}
    close(fd);
}

#endif
