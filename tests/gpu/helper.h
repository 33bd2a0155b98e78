/* What the tests on the GPU share: one line of result a case, engines with the model's checkpoint or random weights. */
#ifndef NMK_TESTS_GPU_HELPER_H
#define NMK_TESTS_GPU_HELPER_H

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "engine.h"
#include "rng.h"
#include "util.h"

enum { MOST_TOKENS = 16384 };

static int failures;

__attribute__((format(printf, 2, 3))) static bool check(bool good, const char *why, ...) {
    va_list args;
    va_start(args, why);
    printf("%s - ", good ? "ok" : "not ok");
    vprintf(why, args);
    printf("\n");
    fflush(stdout);
    va_end(args);
    failures += !good;
    return good;
}

/* Ends the program: skipped without a GPU, failed otherwise. */
static void leave(const char *name, const char *why, bool skip) {
    printf("%s - %s: %s\n", skip ? "skip" : "not ok", name, why);
    exit(!skip);
}

/* The toy comes with a checkpoint; other models run on random weights. */
static nmk_options test_options(const char *device, int max_len, uint64_t kv_bytes) {
    nmk_options o = {.device = device, .max_len = max_len, .kv_bytes = kv_bytes, .cpu_threads = 16};
    FILE *f = fopen("examples/" NMK_MODEL "/config.json", "r");
    if (f)
        fclose(f), o.checkpoint = "examples/" NMK_MODEL;
    else
        o.random_weights = true, o.weights_seed = 7;
    return o;
}

__attribute__((unused)) static nmk_engine *open_gpu(const char *name, int max_len, uint64_t kv_bytes) {
    nmk_err e = {0};
    nmk_engine *g = NULL;
    nmk_options o = test_options("cuda:0", max_len, kv_bytes);
    if (nmk_engine_open(&g, &o, &e))
        leave(name, e.text, strstr(e.text, "libcuda") || strstr(e.text, "no CUDA") || strstr(e.text, "no GPU"));
    nmk_stats s;
    nmk_engine_stats(g, &s);
    printf("# %s on %s: kernel %.2f s (%s), weights %.2f s, %d registers, %d bytes of spills, %zu bytes of code\n",
           s.model, s.device, s.kernel_seconds, s.kernel_cached ? "cached" : "compiled", s.weights_seconds, s.registers,
           s.spill_bytes, s.code_bytes);
    fflush(stdout);
    return g;
}

/* A decoding column: row i's token at position pos. */
__attribute__((unused)) static nmk_column column_at(int i, int row, int pos) {
    return (nmk_column){.token = (int)(rng() % NMK_VOCAB),
                        .pos = pos,
                        .base = pos,
                        .group = i,
                        .slot = row,
                        .flags = 1,
                        .remaining = 1 << 30};
}

#endif
