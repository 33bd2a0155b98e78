/* Many at once: 200 streams fed from another thread while clients come and go, and how many requests a second fit. */
#define _GNU_SOURCE /* memmem */
#include "http.h"

#include <sys/epoll.h>

#include "http_app.h"

enum { CLIENTS = 200, STEPS = 300, STEP_US = 2000 };

/* What the engine's thread does: one post a step, in which every stream gets an event. */
static uint64_t streams[CLIENTS * 8];
static int stream_count;
static atomic_int steps_done, live;

static void on_request(void *ctx, const nmk_http_request *q, nmk_http_response *r) {
    (void)ctx;
    if (q->route == STREAM) {
        nmk_http_begin_stream(r);
        nmk_http_set_user(r, xcalloc(1, sizeof(int)));
        streams[stream_count++] = q->id;
        live++;
    } else {
        nmk_http_respond(r, 200, "application/json", "{\"data\":[]}", 11);
    }
}

static void on_closed(void *ctx, nmk_http_response *r) {
    (void)ctx;
    free(nmk_http_user(r));
    live--;
}

static void step(void *ctx, void *arg) {
    app *a = ctx;
    (void)arg;
    for (int i = 0; i < stream_count; i++) {
        nmk_http_response *r = nmk_http_find(a->http, streams[i]);
        if (!r) {
            streams[i--] = streams[--stream_count];
            continue;
        }
        int *n = nmk_http_user(r);
        char text[200];
        int bytes = snprintf(text, sizeof text, "{\"choices\":[{\"delta\":{\"content\":\"%d\"}}]}", *n);
        ++*n;
        nmk_http_send_event(r, NULL, text, (size_t)bytes);
        if (*n == STEPS) {
            nmk_http_send_event(r, NULL, "[DONE]", 6);
            free(n);
            nmk_http_finish(r);
            live--;
        }
    }
    steps_done++;
}

static atomic_bool stop_engine;
static void *engine(void *ctx) {
    app *a = ctx;
    while (!stop_engine) {
        if (nmk_http_post(a->http, step, NULL)) break;
        usleep(STEP_US);
    }
    return NULL;
}

static const nmk_http_callbacks callbacks = {.on_request = on_request, .on_closed = on_closed};

/* Every stream complete and in order, some clients leaving on the way and others coming. */
static void many_streams(void) {
    app *a = app_start(NULL, &callbacks);
    pthread_t t;
    static int fds[CLIENTS];
    static nmk_buf got[CLIENTS];
    static bool done[CLIENTS], leaves[CLIENTS];
    int left = 0, came = 0;
    const char *request = "POST /stream HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}";
    pthread_create(&t, NULL, engine, a);
    for (int i = 0; i < CLIENTS; i++) {
        fds[i] = dial(a->port);
        puts_to(fds[i], request);
        leaves[i] = i % 5 == 4;
    }
    uint64_t end = nmk_now_ns() + time_limit_ns(60000);
    int finished = 0, wrong = 0;
    while (finished < CLIENTS && nmk_now_ns() < end) {
        struct pollfd p[CLIENTS];
        for (int i = 0; i < CLIENTS; i++) p[i] = (struct pollfd){.fd = done[i] ? -1 : fds[i], .events = POLLIN};
        poll(p, CLIENTS, 100);
        for (int i = 0; i < CLIENTS; i++) {
            if (done[i] || !p[i].revents) continue;
            int rc = get_some(fds[i], &got[i], 0);
            if (leaves[i] && got[i].length > 2000 + (size_t)i * 30) {
                /* It goes, and another comes and stays. */
                close(fds[i]);
                got[i].length = 0;
                fds[i] = dial(a->port);
                puts_to(fds[i], request);
                leaves[i] = false, left++, came++;
            } else if (rc < 0 || (got[i].length > 7 && !strcmp(got[i].data + got[i].length - 7, "\r\n0\r\n\r\n"))) {
                done[i] = true, finished++;
            }
        }
    }
    for (int i = 0; i < CLIENTS; i++) {
        const char *at = got[i].data;
        for (int n = 0; n < STEPS && at; n++) {
            at = strstr(at, "data: {");
            if (at) {
                int seen = -1;
                sscanf(at, "data: {\"choices\":[{\"delta\":{\"content\":\"%d\"", &seen);
                if (seen != n) at = NULL;
            }
            if (at) at += 7;
        }
        if (!at || !strstr(at, "data: [DONE]\n\n\r\n0\r\n\r\n")) wrong++;
        close(fds[i]);
        nmk_buf_free(&got[i]);
    }
    check(finished == CLIENTS && !wrong && left == CLIENTS / 5, "200 streams, 40 clients leave and 40 come",
          "%d finished, %d wrong, %d left", finished, wrong, left);
    for (int i = 0; i < time_limit(1000) && live; i++) usleep(1000);
    check(live == 0, "no stream is left over", "%d", live);
    stop_engine = true;
    pthread_join(t, NULL);
    app_stop(a, 1000);
}

/* Requests a second over some connections, each with so many requests under way. */
static double rate(const app *a, const char *request, const char *answer_end, int connections, int depth,
                   double seconds) {
    int ep = epoll_create1(0), fds[256];
    long count = 0;
    size_t end_bytes = strlen(answer_end);
    nmk_buf batch = {0};
    for (int i = 0; i < depth; i++) nmk_buf_puts(&batch, request);
    static int seen[256];
    for (int i = 0; i < connections; i++) {
        fds[i] = dial(a->port);
        seen[i] = 0;
        struct epoll_event ev = {.events = EPOLLIN, .data.u32 = (uint32_t)i};
        epoll_ctl(ep, EPOLL_CTL_ADD, fds[i], &ev);
        put(fds[i], batch.data, batch.length);
    }
    uint64_t start = nmk_now_ns(), end = start + (uint64_t)(seconds * 1e9);
    while (nmk_now_ns() < end) {
        struct epoll_event ev[256];
        static char data[1 << 16];
        int n = epoll_wait(ep, ev, 256, 1000);
        for (int i = 0; i < n; i++) {
            uint32_t c = ev[i].data.u32;
            ssize_t bytes = recv(fds[c], data, sizeof data, 0);
            for (char *at = data; bytes > 0 && (at = memmem(at, (size_t)(data + bytes - at), answer_end, end_bytes));
                 at += end_bytes)
                seen[c]++, count++;
            if (seen[c] >= depth) seen[c] = 0, put(fds[c], batch.data, batch.length);
        }
        if (n <= 0) break;
    }
    double took = (double)(nmk_now_ns() - start) / 1e9;
    for (int i = 0; i < connections; i++) close(fds[i]);
    close(ep);
    nmk_buf_free(&batch);
    return (double)count / took;
}

static void throughput(void) {
    app *a = app_start(NULL, &callbacks);
    const char *get = "GET /v1/models HTTP/1.1\r\nHost: h\r\nAccept: application/json\r\nUser-Agent: t\r\n\r\n";
    static const struct {
        const char *name;
        int connections, depth;
    } cases[] = {{"1 connection", 1, 1},
                 {"32 connections", 32, 1},
                 {"200 connections", 200, 1},
                 {"32 connections, 16 sent ahead", 32, 16}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[120];
        double r = rate(a, get, "{\"data\":[]}", cases[i].connections, cases[i].depth, 0.7);
        snprintf(name, sizeof name, "%s: %.0f requests/s", cases[i].name, r);
        check(r > 1000.0 / time_limit(1), name, "too few");
    }
    app_stop(a, 1000);
}

int main(void) {
    many_streams();
    throughput();
    return failures != 0;
}
