/* The toy on the reference machine, for tests that look at every buffer: weights, pages for NMK_COLUMNS sequences, the
 * encoded lists, and its golden values.  Failures of the set-up end the program. */
#ifndef NMK_TEST_REFVM_TOY_H
#define NMK_TEST_REFVM_TOY_H

#include <json-c/json.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bf16.h"
#include "refvm.h"
#include "weights.h"

#define CHECKPOINT "examples/" NMK_MODEL
#define GOLDEN     "tests/golden/" NMK_MODEL ".json"

#ifndef ROW_TOKENS
#define ROW_TOKENS 1024
#endif

enum { ROW_PAGES = ROW_TOKENS / NMK_PAGE_TOKENS };

static int failures;

__attribute__((format(printf, 3, 4), unused)) static void result(int good, const char *name, const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("%s - %s: ", good ? "ok" : "not ok", name);
    vprintf(format, args);
    printf("\n");
    fflush(stdout);
    va_end(args);
    failures += !good;
}

__attribute__((format(printf, 1, 2), noreturn)) static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    printf("not ok - set-up: ");
    vprintf(format, args);
    printf("\n");
    va_end(args);
    exit(1);
}

static void *zeroed(size_t n) {
    void *p = calloc(1, n);
    if (!p) die("out of memory");
    return p;
}

__attribute__((unused)) static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- weights ---- */

static uint8_t *load_weights(void) {
    uint8_t *weights = zeroed((size_t)NMK_WEIGHTS_KIB * 1024);
    const nmk_weight_tables tables = nmk_model_tables();
    nmk_checkpoint *checkpoint;
    nmk_err e;
    if (nmk_checkpoint_open(&checkpoint, CHECKPOINT, &tables, &e)) die("%s", e.text);
    if (nmk_checkpoint_load_host(checkpoint, weights, NULL, NULL, &e)) die("%s", e.text);
    nmk_checkpoint_close(checkpoint);
    return weights;
}

static const uint16_t *array_at(const uint8_t *weights, const char *name, int layer) {
    for (int i = 0; i < nmk_array_count; i++)
        if (!strcmp(nmk_arrays[i].name, name))
            return (const uint16_t *)(weights + nmk_array_at(&nmk_arrays[i], layer, 0));
    die("no array %s", name);
}

/* ---- the machine ---- */

struct toy {
    struct nmk_vm vm;
    int32_t *lists; /* the encoder's, unchanged; vm.lists may be another copy */
    size_t list_bytes, full_bytes, sliding_bytes;
    nmk_control control;
    int32_t table[NMK_COLUMNS * ROW_PAGES], out[NMK_COLUMNS];
    nmk_tops tops[NMK_COLUMNS];
};

enum {
    ADJUST_BYTES = NMK_COLUMNS * NMK_VOCAB * sizeof(nmk_adjust),
    TICKETS_BYTES = NMK_TICKETS * 2 * NMK_COUNTER_WORDS * sizeof(uint32_t)
};

__attribute__((unused)) static struct toy *toy_open(void) {
    static struct toy *t; /* to the end of the process */
    int32_t counts[NMK_SMS];
    t = zeroed(sizeof *t);
    t->list_bytes = sizeof(int32_t) * NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS;
    t->full_bytes = (size_t)NMK_KV_PAGE_BYTES_FULL * NMK_COLUMNS * ROW_PAGES;
    t->sliding_bytes = (size_t)NMK_KV_PAGE_BYTES_SLIDING * NMK_COLUMNS * ROW_PAGES;
    t->lists = zeroed(t->list_bytes);
    if (nmk_encode(t->lists, counts)) die("nmk_encode: not the words that were proved");
    for (int i = 0; i < NMK_COLUMNS * ROW_PAGES; i++) t->table[i] = i;
    float *rope = zeroed(sizeof(float) * ROW_TOKENS * NMK_HEAD_DIM);
    for (int i = 0; i < ROW_TOKENS * NMK_HEAD_DIM / 2; i++) {
        const float frequency = (float)pow(NMK_ROPE_THETA, -2.0 * (i % (NMK_HEAD_DIM / 2)) / NMK_HEAD_DIM);
        const float angle = (float)(i / (NMK_HEAD_DIM / 2)) * frequency;
        rope[2 * i] = cosf(angle), rope[2 * i + 1] = sinf(angle);
    }
    t->vm = (struct nmk_vm){
        .lists = t->lists,
        .weights = load_weights(),
        .arena = zeroed((size_t)NMK_ARENA_BYTES),
        .kv_full = zeroed(t->full_bytes),
        .kv_sliding = zeroed(t->sliding_bytes),
        .control = &t->control,
        .table_full = t->table,
        .table_sliding = t->table,
        .table_stride = ROW_PAGES,
        .rope = rope,
        .out = t->out,
        .tops = t->tops,
        .adjust = zeroed(ADJUST_BYTES),
        .counters = zeroed(sizeof(uint32_t) * NMK_COUNTERS * NMK_COUNTER_WORDS),
        .tickets = zeroed(TICKETS_BYTES),
        .threads = 2,
    };
    for (int n = 0; n < NMK_COLUMNS; n++) t->control.column[n].pos = -1;
    return t;
}

/* Fills everything that a step must write before it reads with NaN. */
static void poison(struct toy *t) { memset(t->vm.arena, 0xff, (size_t)NMK_ARENA_BYTES); }

/* One step on poisoned buffers; -1 with the machine's message. */
__attribute__((unused)) static int step(struct toy *t, char *err, size_t err_len) {
    poison(t);
    t->vm.epoch++;
    return nmk_vm_step(&t->vm, err, err_len);
}

__attribute__((unused)) static void must_step(struct toy *t) {
    char err[1024];
    if (step(t, err, sizeof err)) die("step %d: %s", t->vm.epoch, err);
}

/* Columns 0..n-1 become consecutive positions of one row; the others are off. */
__attribute__((unused)) static void set_columns(struct toy *t, int row, const int32_t *ids, int pos, int n) {
    for (int c = 0; c < NMK_COLUMNS; c++)
        t->control.column[c] = (nmk_column){
            .token = c < n ? ids[c] : 0, .pos = c < n ? pos + c : -1, .base = pos, .slot = row, .remaining = 1 << 30};
}

/* Feeds a prompt into row; its last token only if `last`.  Leaves the columns of the last step. */
__attribute__((unused)) static void feed(struct toy *t, int row, const int32_t *ids, int n) {
    for (int at = 0; at < n; at += NMK_COLUMNS) {
        set_columns(t, row, ids + at, at, n - at < NMK_COLUMNS ? n - at : NMK_COLUMNS);
        must_step(t);
    }
}

__attribute__((unused)) static void *arena_at(struct toy *t, const char *name) {
    for (int i = 0; i < nmk_buffer_count; i++)
        if (!strcmp(nmk_buffers[i].name, name)) return t->vm.arena + (size_t)nmk_buffers[i].offset128 * 128;
    die("no buffer %s", name);
}

/* Every column's residual after `layers` layers, as norms read it; good until the next call. */
__attribute__((unused)) static const float *residual(struct toy *t, int layers) {
    static float x[NMK_COLUMNS * NMK_HIDDEN];
    const uint16_t *xb = arena_at(t, layers % 2 ? "xb1" : "xb0");
    for (int i = 0; i < NMK_COLUMNS * NMK_HIDDEN; i++) x[i] = bf16(xb[i]);
    return x;
}

/* The final norm in f32, without the rounding to bf16 that the LM head's input has. */
__attribute__((unused)) static void final_norm(struct toy *t, const float *x, float *y) {
    const uint16_t *gamma = array_at(t->vm.weights, "norm", NMK_LAYERS);
    double squares = 0;
    for (int i = 0; i < NMK_HIDDEN; i++) squares += (double)x[i] * x[i];
    const double scale = 1 / sqrt(squares / NMK_HIDDEN + NMK_EPS);
    for (int i = 0; i < NMK_HIDDEN; i++) y[i] = (float)(x[i] * scale) * bf16(gamma[i]);
}

/* ---- golden values ---- */

__attribute__((unused)) static json_object *member(json_object *o, const char *key) {
    json_object *value;
    if (!json_object_object_get_ex(o, key, &value)) die(GOLDEN ": no %s", key);
    return value;
}

__attribute__((unused)) static int ints(json_object *o, int32_t *to, int most) {
    const int n = (int)json_object_array_length(o);
    if (n > most) die(GOLDEN ": list too long");
    for (int i = 0; i < n; i++) to[i] = json_object_get_int(json_object_array_get_idx(o, (size_t)i));
    return n;
}

/* |a - golden| / |golden| */
__attribute__((unused)) static double relative_error(const float *a, json_object *golden) {
    double wrong = 0, all = 0;
    const int n = (int)json_object_array_length(golden);
    for (int i = 0; i < n; i++) {
        const double g = json_object_get_double(json_object_array_get_idx(golden, (size_t)i));
        wrong += (a[i] - g) * (a[i] - g), all += g * g;
    }
    return sqrt(wrong / all);
}

#endif
