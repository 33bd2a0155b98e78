#include "load.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

typedef struct {
    nmk_load *load;
    nmk_load_request *request;
    nmk_sse sse;
} stream;

static bool has_text(struct json_object *v) {
    return json_object_is_type(v, json_type_string) && json_object_get_string_len(v) > 0;
}

/* Whether a chunk brings something that a reader would see. */
static bool says_something(struct json_object *choice) {
    struct json_object *delta = nmk_json_get(choice, "delta");
    return has_text(nmk_json_get(choice, "text")) || has_text(nmk_json_get(delta, "content")) ||
           has_text(nmk_json_get(delta, "reasoning_content")) || has_text(nmk_json_get(delta, "reasoning")) ||
           nmk_json_get(delta, "tool_calls");
}

static void add_gap(nmk_load *l, uint64_t ns) {
    if (l->gap_count == l->gap_capacity) {
        l->gap_capacity = l->gap_capacity ? 2 * l->gap_capacity : 4096;
        l->gap_ms = xrealloc(l->gap_ms, l->gap_capacity * sizeof *l->gap_ms);
    }
    l->gap_ms[l->gap_count++] = 1e-6 * (double)ns;
}

static void note_usage(nmk_load_request *r, struct json_object *usage) {
    struct json_object *prompt = nmk_json_get(usage, "prompt_tokens"),
                       *output = nmk_json_get(usage, "completion_tokens");
    if (prompt) r->prompt_tokens = json_object_get_int(prompt);
    if (output) r->output_tokens = json_object_get_int(output);
}

static int on_event(void *user, const char *data, size_t bytes, uint64_t now) {
    stream *s = user;
    nmk_load_request *r = s->request;
    nmk_err e;
    if (bytes == 6 && !memcmp(data, "[DONE]", 6)) return r->done = true;
    struct json_object *o = nmk_json_parse(data, bytes, &e), *choices = nmk_json_get(o, "choices");
    struct json_object *error = nmk_json_get(o, "error"), *message = nmk_json_get(error, "message");
    if (!o)
        snprintf(r->why, sizeof r->why, "an event is no JSON: %.300s", e.text);
    else if (error)
        snprintf(r->why, sizeof r->why, "%.390s", message ? json_object_get_string(message) : "an error event");
    note_usage(r, nmk_json_get(o, "usage"));
    if (json_object_is_type(choices, json_type_array) && says_something(json_object_array_get_idx(choices, 0))) {
        if (r->first_ns)
            add_gap(s->load, now - r->last_ns);
        else
            r->first_ns = now;
        r->last_ns = now, r->chunks++;
    }
    json_object_put(o);
    return r->why[0] != 0;
}

static int begin(stream *s, nmk_load *l, nmk_load_request *r) {
    nmk_err e;
    *s = (stream){.load = l, .request = r};
    r->sent_ns = nmk_now_ns(), r->prompt_tokens = r->output_tokens = -1;
    if (nmk_sse_open(&s->sse, l->target, l->path, r->body, on_event, s, &e) == 0) return 0;
    snprintf(r->why, sizeof r->why, "%.390s", e.text);
    return -1;
}

/* Its stream has ended, as `got` of nmk_sse_step says. */
static void end(stream *s, int got, const nmk_err *e) {
    nmk_load_request *r = s->request;
    if (got < 0 && !r->why[0]) snprintf(r->why, sizeof r->why, "%.390s", e->text);
    if (!r->why[0] && s->sse.status != 200) nmk_sse_reason(&s->sse, r->why, sizeof r->why);
    if (!r->why[0] && !s->sse.events) snprintf(r->why, sizeof r->why, "the answer is no event stream");
    if (!r->why[0] && !r->chunks) snprintf(r->why, sizeof r->why, "the answer has no text");
    nmk_sse_close(&s->sse);
    free(s);
}

/* Takes what came; true: the request has ended. */
static bool advance(stream *s, bool ready, int timeout_s, uint64_t now) {
    nmk_err e = {0};
    int got = ready ? nmk_sse_step(&s->sse, &e) : 0;
    if (!got && now - s->request->sent_ns > (uint64_t)timeout_s * 1000000000u)
        got = nmk_fail(&e, "not answered in %d s", timeout_s);
    if (got) end(s, got, &e);
    return got != 0;
}

void nmk_load_run(nmk_load *l) {
    stream **open = xcalloc((size_t)l->most_open, sizeof *open);
    struct pollfd *p = xcalloc((size_t)l->most_open, sizeof *p);
    int next = 0, running = 0, ended = 0;
    uint64_t start = nmk_now_ns(), told = start;
    while (ended < l->count) {
        uint64_t now = nmk_now_ns();
        for (; next < l->count && running < l->most_open && l->request[next].at_s <= 1e-9 * (double)(now - start);
             next++) {
            stream *s = xcalloc(1, sizeof *s);
            if (begin(s, l, &l->request[next]))
                free(s), ended++;
            else
                open[running++] = s;
        }
        if (running > l->peak) l->peak = running;
        double wait_ms = 1000;
        if (next < l->count && running < l->most_open)
            wait_ms = 1e3 * l->request[next].at_s - 1e-6 * (double)(nmk_now_ns() - start);
        for (int i = 0; i < running; i++)
            p[i] = (struct pollfd){.fd = open[i]->sse.fd, .events = nmk_sse_wants(&open[i]->sse)};
        /* the next one is due within the millisecond that poll would round up to: look again at once */
        poll(p, (nfds_t)running, wait_ms >= 1000 ? 1000 : wait_ms > 0 ? (int)wait_ms : 0);
        now = nmk_now_ns();
        for (int i = running - 1; i >= 0; i--)
            if (advance(open[i], p[i].revents != 0, l->timeout_s, now)) open[i] = open[--running], ended++;
        if (l->progress && now - told > 1000000000u) {
            fprintf(stderr, "\r%d of %d, %d open ", ended, l->count, running);
            told = now;
        }
    }
    if (l->progress) fprintf(stderr, "\r%*s\r", 40, "");
    l->seconds = 1e-9 * (double)(nmk_now_ns() - start);
    free(open), free(p);
}

int nmk_load_try(const nmk_load *load, nmk_load_request *r, nmk_err *e) {
    nmk_load one = {.target = load->target, .path = load->path, .most_open = 1, .timeout_s = load->timeout_s};
    one.count = 1, one.request = r, r->at_s = 0;
    nmk_load_run(&one);
    free(one.gap_ms);
    return r->why[0] ? nmk_fail(e, "%s%s%s: %.900s", load->target->host, load->target->prefix, load->path, r->why) : 0;
}
