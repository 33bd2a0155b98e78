/* Where a step's time goes: for every kind of node, how long the consumers of an SM spend in a task and how much of that
 * they wait for other SMs, and how far behind the storers and the helper are.  Mean over SMs, layers and steps, in us.
 *
 * Then the helper's tasks after the layers, one after the other: the sampling.
 *
 * bench-trace [--batch N] [--context N] [--top-p P] [--kernel FILE.cu]     random weights, keys and values */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "util.h"

enum { STEPS = 24, WARM_UP = 16, STAMPS = NMK_TRACE_STAMPS };

typedef struct {
    double total, waited, store, help;
    long tasks, waits, stores, helps;
} op_time;

/* The helper's tasks after the last layer, of an SM without one of `sample`: the time since the one before. */
typedef struct {
    double clocks;
    long count;
    int kind;
} tail_time;

static tail_time tail[NMK_MAX_TASKS];

/* Nodes that differ in nothing but their layer are one kind, called as the first of them without its layer. */
static int kind_of[NMK_NODES];
static const char *kind_names[NMK_NODES];
static int kinds;

static void find_kinds(void) {
    for (int n = 0; n < NMK_NODES; n++) {
        const char *name = nmk_nodes[n].name, *dot = strchr(name, '.');
        if (nmk_nodes[n].layer >= 0 && dot) name = dot + 1;
        int k = 0;
        while (k < kinds && strcmp(kind_names[k], name)) k++;
        if (k == kinds) kind_names[kinds++] = name;
        kind_of[n] = k;
    }
}

static uint64_t trace[NMK_SMS][NMK_MAX_TASKS][STAMPS];

static double ratio(double sum, long count) { return count ? sum / (double)count : 0; }

/* Adds one step's stamps, in SM clocks. */
static void add(const int32_t *lists, op_time *op, double *clocks) {
    for (int sm = 0; sm < NMK_SMS; sm++)
        for (int t = 0; t + 1 < NMK_MAX_TASKS; t++) {
            const int32_t *d = lists + ((size_t)sm * NMK_MAX_TASKS + (size_t)t) * NMK_DESC_WORDS;
            const uint64_t *s = trace[sm][t];
            if (d[0] == 0) {
                *clocks += (double)(s[0] - trace[sm][0][0]) / NMK_SMS;
                break;
            }
            op_time *o = &op[kind_of[d[NMK_WORD_NODE]]];
            o->tasks++, o->total += (double)(trace[sm][t + 1][0] - s[0]);
            if (s[1] > s[0]) o->waits++, o->waited += (double)(s[1] - s[0]);
            if (s[2] > s[0]) o->stores++, o->store += (double)(s[2] - s[0]);
            if (s[3]) o->helps++, o->help += (double)(int64_t)(s[3] - s[0]);
        }
}

static void add_tail(const int32_t *lists) {
    for (int sm = NMK_COLUMNS; sm < NMK_SMS; sm++) {
        const int32_t *d = lists + (size_t)sm * NMK_MAX_TASKS * NMK_DESC_WORDS;
        uint64_t last = 0;
        for (int t = 0, n = 0; d[0]; t++, d += NMK_DESC_WORDS) {
            const uint64_t *s = trace[sm][t];
            if (d[NMK_WORD_OPCODE] == NMK_OP_LM_HEAD) last = s[2]; /* a storer has stored its last candidate */
            if (!last || !s[3]) continue;
            tail[n].clocks += (double)(int64_t)(s[3] - last), tail[n].count++,
                tail[n++].kind = kind_of[d[NMK_WORD_NODE]];
            last = s[3];
        }
    }
}

int main(int argc, char **argv) {
    nmk_options o = {.random_weights = true, .weights_seed = 1, .device = "cuda:0"};
    int batch = 1, context = 8192;
    nmk_sampler sampler = {.temperature = 0};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--batch"))
            batch = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--context"))
            context = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--top-p"))
            sampler.temperature = 1, sampler.top_p = (float)atof(argv[i + 1]);
        else if (!strcmp(argv[i], "--kernel"))
            o.kernel = argv[i + 1];
        else
            return fprintf(stderr, "bench-trace: unknown flag %s\n", argv[i]), 2;
    }
    if (batch < 1 || batch > NMK_COLUMNS) return fprintf(stderr, "bench-trace: --batch: 1 to %d\n", NMK_COLUMNS), 2;
    nmk_err e = {0};
    nmk_engine *g = NULL;
    static op_time op[NMK_NODES];
    nmk_column column[NMK_COLUMNS];
    uint64_t address;
    double clocks = 0, ms[WARM_UP], step_ms = 0;
    find_kinds();
    o.max_len = context + STEPS + 2 * WARM_UP + 8;
    if (nmk_engine_open(&g, &o, &e) || nmk_engine_random_kv(g, 1, &e)) goto out;
    for (int n = 0; n < NMK_COLUMNS; n++) column[n] = nmk_column_idle();
    for (int r = 0; r < batch; r++) {
        if (nmk_engine_take_row(g, r, context + STEPS + 2 * WARM_UP + 1, &e)) goto out;
        sampler.seed = (uint64_t)r;
        column[r] = nmk_column_decode(&sampler, r, r, 1000 + 17 * r, context, 1 << 30);
    }
    if (nmk_engine_set_columns(g, column, &e) || nmk_engine_run(g, WARM_UP, batch, NULL, NULL, &e)) goto out;
    if (g->machine->calls->alloc(g->machine, &address, sizeof trace, "the trace", &e)) goto out;
    g->params.trace = address;
    if (nmk_engine_run(g, WARM_UP, batch, ms, NULL, &e)) goto out;
    for (int i = 4; i < WARM_UP; i++) step_ms += ms[i] / (WARM_UP - 4);
    for (int s = 0; s < STEPS; s++) {
        uint64_t number;
        const int32_t *out;
        if (g->machine->calls->fill(g->machine, address, 0, sizeof trace, &e) ||
            nmk_engine_queue_step(g, batch, &number, &e) || nmk_engine_wait_step(g, number, &out, &e) ||
            g->machine->calls->read(g->machine, trace, address, sizeof trace, &e))
            goto out;
        add(g->lists, op, &clocks);
        add_tail(g->lists);
    }
    const double us =
        step_ms * 1e3 * STEPS / clocks; /* of one SM clock; the gap between steps counts as part of them */
    printf("batch %d, context %d: %.3f ms a step while traced\n", batch, context, step_ms);
    printf(
        "| op | tasks/step/SM | in task | of that waiting | storers done after | helper done after | us/step/SM |\n|--|--|--|--|--|--|--|\n");
    for (int i = 0; i < kinds; i++) {
        if (!op[i].tasks) continue;
        printf("| %s | %.2f | %.2f | %.2f | %.2f | %.2f | %.1f |\n", kind_names[i],
               (double)op[i].tasks / STEPS / NMK_SMS, us * ratio(op[i].total, op[i].tasks),
               us * ratio(op[i].waited, op[i].waits), us * ratio(op[i].store, op[i].stores),
               us * ratio(op[i].help, op[i].helps), us * op[i].total / STEPS / NMK_SMS);
    }
    printf("\n| helper after the lm_head | us since the one before |\n|--|--|\n");
    for (int i = 0; tail[i].count; i++)
        printf("| %s | %.2f |\n", kind_names[tail[i].kind], us * ratio(tail[i].clocks, tail[i].count));
out:
    if (e.text[0]) fprintf(stderr, "bench-trace: %s\n", e.text);
    nmk_engine_close(g);
    return e.text[0] != 0;
}
