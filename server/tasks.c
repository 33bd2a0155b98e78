#include "tasks.h"

#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum { BEGUN, WAITED, STORED, HELPED, STAMPS = NMK_TRACE_STAMPS }; /* as templates/prelude.cuh stamps them */
_Static_assert(HELPED + 1 == STAMPS, "all stamps are known");

typedef uint64_t stamps[STAMPS];

typedef struct {
    uint64_t number, ended_ns;
    double ms;
} step;

struct nmk_tasks {
    nmk_engine *engine;
    const nmk_variant *variant;
    const int32_t *lists;
    int steps, queued, ended;
    uint64_t address, step_bytes;
    stamps *stamp; /* [steps][NMK_SMS][max_tasks] */
    step step[NMK_TASKS_STEPS];
};

int nmk_tasks_open(nmk_tasks **tasks, nmk_engine *g, int steps, nmk_err *e) {
    nmk_tasks *t = xcalloc(1, sizeof *t);
    t->engine = g, t->variant = g->variant, t->lists = g->lists;
    t->steps = steps;
    t->step_bytes = sizeof(stamps) * NMK_SMS * (uint64_t)t->variant->max_tasks;
    if (g->machine->calls->alloc(g->machine, &t->address, t->step_bytes * (uint64_t)steps, "a trace", e)) {
        free(t);
        return -1;
    }
    *tasks = t;
    return 0;
}

void nmk_tasks_free(nmk_tasks *t) {
    if (!t) return;
    if (t->address && !t->engine->machine->lost) t->engine->machine->calls->release(t->engine->machine, t->address);
    free(t->stamp);
    free(t);
}

void nmk_tasks_queue(nmk_tasks *t) {
    if (t->queued < t->steps) t->engine->params.trace = t->address + t->step_bytes * (uint64_t)t->queued;
}

void nmk_tasks_queued(nmk_tasks *t, uint64_t number) {
    if (!t->engine->params.trace) return;
    t->engine->params.trace = 0;
    t->step[t->queued++] = (step){.number = number};
}

void nmk_tasks_ended(nmk_tasks *t, uint64_t number) {
    if (t->ended == t->queued || t->step[t->ended].number != number) return;
    step *s = &t->step[t->ended++];
    s->ended_ns = nmk_now_ns(), s->ms = t->engine->machine->calls->step_ms(t->engine->machine, number);
}

bool nmk_tasks_full(const nmk_tasks *t) { return t->ended == t->steps; }
bool nmk_tasks_some(const nmk_tasks *t) { return t->ended > 0 && t->ended == t->queued; }

int nmk_tasks_read(nmk_tasks *t, nmk_err *e) {
    nmk_machine *m = t->engine->machine;
    const uint64_t bytes = t->step_bytes * (uint64_t)t->ended;
    t->stamp = xmalloc(bytes);
    if (m->calls->read(m, t->stamp, t->address, bytes, e)) return -1;
    m->calls->release(m, t->address);
    t->address = 0;
    return 0;
}

/* ---- text ---- */

static const stamps *list_of(const nmk_tasks *t, int n, int sm) {
    return (const stamps *)t->stamp + ((size_t)n * NMK_SMS + (size_t)sm) * (size_t)t->variant->max_tasks;
}

static const int32_t *task_of(const nmk_tasks *t, int sm, int i) {
    return t->lists + ((size_t)sm * (size_t)t->variant->max_tasks + (size_t)i) * NMK_DESC_WORDS;
}

static int tasks_on(const nmk_tasks *t, int sm) {
    int n = 0;
    while (task_of(t, sm, n)[NMK_WORD_OPCODE]) n++;
    return n;
}

/* The longest of the SMs' times from the first task to the end of the list. */
static uint64_t clocks_of(const nmk_tasks *t, int n) {
    uint64_t most = 1;
    for (int sm = 0; sm < NMK_SMS; sm++) {
        const stamps *s = list_of(t, n, sm);
        uint64_t clocks = s[tasks_on(t, sm)][BEGUN] - s[0][BEGUN];
        if (clocks > most) most = clocks;
    }
    return most;
}

/* Of an SM's clock.  The machine's time of a step begins with the end of the one before, so of several steps the one
 * that waited least is believed. */
static double ns_a_clock(const nmk_tasks *t) {
    double least = 0;
    for (int n = 0; n < t->ended; n++) {
        double ns = 1e6 * t->step[n].ms / (double)clocks_of(t, n);
        if (ns > 0 && (least == 0 || ns < least)) least = ns;
    }
    return least > 0 ? least : 1;
}

typedef struct {
    const nmk_tasks *tasks;
    nmk_buf *text;
    double scale, zero_us; /* ns a clock; when the clock was at `zero` */
    uint64_t zero;
    int sm;
} sheet;

static double at(const sheet *s, uint64_t stamp) {
    return s->zero_us + 1e-3 * s->scale * (double)(int64_t)(stamp - s->zero);
}

static void add_bar(const sheet *s, int track, uint64_t from, uint64_t to, const char *name, int layer) {
    if (to <= from) return;
    nmk_buf_printf(s->text, ",\n{\"ph\":\"X\",\"pid\":2,\"tid\":%d,\"ts\":%.2f,\"dur\":%.2f,\"name\":\"%s\"", track,
                   at(s, from), 1e-3 * s->scale * (double)(to - from), name);
    if (layer >= 0) nmk_buf_printf(s->text, ",\"args\":{\"layer\":%d}", layer);
    nmk_buf_puts(s->text, "}");
}

enum { TRACKS = 3 }; /* of an SM: consumers, storers, helper */

/* A task of the helper alone is one that consumers walk past.  When storers and helper begin with a task is not
 * stamped: they are shown from the end of the one before, or from when the consumers came to the task. */
static void add_sm(const sheet *s, const stamps *stamp) {
    uint64_t stored = 0, helped = 0;
    const int count = tasks_on(s->tasks, s->sm), first = 1 + s->sm * TRACKS;
    for (int i = 0; i < count; i++) {
        const uint64_t *m = stamp[i];
        const int32_t node = task_of(s->tasks, s->sm, i)[NMK_WORD_NODE];
        const nmk_node *n = &s->tasks->variant->nodes[node];
        const char *dot = n->layer >= 0 ? strchr(n->name, '.') : NULL, *name = dot ? dot + 1 : n->name;
        if (m[STORED] || m[WAITED] || !m[HELPED]) {
            add_bar(s, first, m[BEGUN], stamp[i + 1][BEGUN], name, n->layer);
            add_bar(s, first, m[BEGUN], m[WAITED], "wait", -1);
        }
        if (m[STORED]) {
            add_bar(s, first + 1, stored > m[BEGUN] ? stored : m[BEGUN], m[STORED], name, n->layer);
            stored = m[STORED];
        }
        if (m[HELPED]) {
            uint64_t from = helped > m[BEGUN] || m[BEGUN] > m[HELPED] ? helped : m[BEGUN];
            if (from) add_bar(s, first + 2, from, m[HELPED], name, n->layer);
            helped = m[HELPED];
        }
    }
}

static void add_names(nmk_buf *b) {
    static const char *const role[TRACKS] = {"", " storers", " helper"};
    for (int sm = 0; sm < NMK_SMS; sm++)
        for (int i = 0; i < TRACKS; i++) {
            int track = 1 + sm * TRACKS + i;
            nmk_buf_printf(b,
                           ",\n{\"ph\":\"M\",\"pid\":2,\"tid\":%d,\"name\":\"thread_name\",\"args\":{\"name\":\"SM "
                           "%d%s\"}},\n{\"ph\":\"M\",\"pid\":2,\"tid\":%d,\"name\":\"thread_sort_index\",\"args\":{"
                           "\"sort_index\":%d}}",
                           track, sm, role[i], track, track);
        }
}

void nmk_tasks_text(const nmk_tasks *t, nmk_buf *b) {
    const bool clocks = t->engine->machine->on_gpu; /* the CPU machine stamps nanoseconds of nmk_now_ns */
    sheet s = {.tasks = t, .text = b, .scale = clocks ? ns_a_clock(t) : 1};
    nmk_buf_printf(b,
                   "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\","
                   "\"args\":{\"name\":\"%s\"}},\n{\"ph\":\"M\",\"pid\":2,\"name\":\"process_name\",\"args\":{\"name\":"
                   "\"SMs\"}}",
                   nmk_model_name);
    add_names(b);
    for (int n = 0; n < t->ended; n++) {
        double span_us = clocks ? 1e-3 * s.scale * (double)clocks_of(t, n) : 1e3 * t->step[n].ms;
        double begin_us = 1e-3 * (double)t->step[n].ended_ns - span_us;
        nmk_buf_printf(
            b,
            ",\n{\"ph\":\"X\",\"cat\":\"step\",\"pid\":1,\"tid\":1,\"ts\":%.2f,\"dur\":%.2f,\"name\":\"step\","
            "\"args\":{\"step\":%llu,\"machine_ms\":%.4f}}",
            begin_us, span_us, (unsigned long long)t->step[n].number, t->step[n].ms);
        if (clocks) s.zero_us = begin_us;
        for (s.sm = 0; s.sm < NMK_SMS; s.sm++) {
            /* clocks of SMs do not agree: all begin together; within a step that is right to a microsecond or so */
            if (clocks) s.zero = list_of(t, n, s.sm)[0][BEGUN];
            add_sm(&s, list_of(t, n, s.sm));
        }
    }
    nmk_buf_puts(b, "\n]}\n");
}
