/* The family of README's "Add a model family", once more and plainly, in double: every position at once, no cache, no tiles,
 * no rounding.  Prints how far the model's own logits are off: PROGRAM SEED ID...  (Compiled for the toy too, where it
 * means nothing.) */
#include "engine.h"
#include "weights.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bf16.h"

enum {
    HIDDEN = NMK_HIDDEN,
    HEADS = NMK_HEADS,
    KV = NMK_KV_HEADS,
    DIM = NMK_HEAD_DIM,
    FF = NMK_DENSE_FF,
    ROWS = (HEADS + 2 * KV) * DIM,
    MOST = 16
};

static uint16_t *arena; /* the CPU machine's weights: row after row */

static const uint16_t *weights(const char *name, int layer) {
    for (int i = 0; i < nmk_array_count; i++)
        if (!strcmp(nmk_arrays[i].name, name)) return arena + nmk_array_at(&nmk_arrays[i], layer, 0) / 2;
    fprintf(stderr, "no array %s\n", name);
    exit(1);
}

static void matrix(double *y, const uint16_t *w, const double *x, int rows, int cols) {
    for (int r = 0; r < rows; r++) {
        y[r] = 0;
        for (int c = 0; c < cols; c++) y[r] += (double)bf16(w[r * cols + c]) * x[c];
    }
}

static void norm(double *y, const double *x, const uint16_t *gamma) {
    double squares = 0;
    for (int i = 0; i < HIDDEN; i++) squares += x[i] * x[i];
    for (int i = 0; i < HIDDEN; i++) y[i] = x[i] / sqrt(squares / HIDDEN + 1e-6) * (double)bf16(gamma[i]);
}

static void rotate(double *head, int pos) {
    for (int j = 0; j < DIM / 2; j++) {
        const double angle = pos * pow(10000, -2.0 * j / DIM), a = head[2 * j], b = head[2 * j + 1];
        head[2 * j] = a * cos(angle) - b * sin(angle), head[2 * j + 1] = a * sin(angle) + b * cos(angle);
    }
}

static void attend(double *o, double qkv[][ROWS], int pos, int head) {
    double p[MOST], sum = 0;
    const int k = (HEADS + head / (HEADS / KV)) * DIM, v = k + KV * DIM;
    for (int i = 0; i <= pos; i++) {
        double score = 0;
        for (int d = 0; d < DIM; d++) score += qkv[pos][head * DIM + d] * qkv[i][k + d];
        sum += p[i] = exp(score / sqrt(DIM));
    }
    for (int d = 0; d < DIM; d++) {
        o[d] = 0;
        for (int i = 0; i <= pos; i++) o[d] += p[i] / sum * qkv[i][v + d];
    }
}

static void plain(double *logits, const int *id, int n) {
    static double x[MOST][HIDDEN], in[MOST][HIDDEN], qkv[MOST][ROWS], heads[HEADS * DIM], out[HIDDEN];
    static double both[2 * FF], h[FF];
    for (int t = 0; t < n; t++)
        for (int i = 0; i < HIDDEN; i++) x[t][i] = (double)bf16(weights("embed", 0)[id[t] * HIDDEN + i]);
    for (int layer = 0; layer < NMK_LAYERS; layer++) {
        for (int t = 0; t < n; t++) {
            norm(in[t], x[t], weights("norm", layer));
            matrix(qkv[t], weights("qkv", layer), in[t], ROWS, HIDDEN);
            for (int i = 0; i < HEADS + KV; i++) rotate(qkv[t] + i * DIM, t);
        }
        for (int t = 0; t < n; t++) {
            for (int i = 0; i < HEADS; i++) attend(heads + i * DIM, qkv, t, i);
            matrix(out, weights("o", layer), heads, HIDDEN, HEADS * DIM);
            for (int i = 0; i < HIDDEN; i++) x[t][i] += out[i];
            matrix(both, weights("dense_up", layer), in[t], 2 * FF, HIDDEN);
            for (int i = 0; i < FF; i++) h[i] = both[i] / (1 + exp(-both[i])) * both[FF + i];
            matrix(out, weights("dense_down", layer), h, HIDDEN, FF);
            for (int i = 0; i < HIDDEN; i++) x[t][i] += out[i];
        }
    }
    norm(out, x[n - 1], weights("norm", NMK_LAYERS));
    matrix(logits, weights("head", 0), out, NMK_VOCAB, HIDDEN);
}

int main(int argc, char **argv) {
    static double want[NMK_VOCAB];
    static float got[NMK_VOCAB];
    int id[MOST], n = argc - 2;
    nmk_err e = {0};
    nmk_engine *g = NULL;
    nmk_options o = {.device = "cpu", .max_len = 256, .kv_bytes = 1u << 26, .cpu_threads = 2, .random_weights = true};
    if (n < 1 || n > MOST) return fprintf(stderr, "usage: %s SEED ID... (up to %d)\n", argv[0], MOST), 2;
    o.weights_seed = strtoull(argv[1], NULL, 10);
    arena = xmalloc((size_t)NMK_WEIGHTS_KIB * 1024);
    int rc = nmk_engine_open(&g, &o, &e) || nmk_engine_take_row(g, 0, 128, &e);
    for (int i = 0; !rc && i < n; i++) {
        nmk_column column[NMK_COLUMNS];
        for (int c = 0; c < NMK_COLUMNS; c++) column[c] = nmk_column_idle();
        id[i] = atoi(argv[i + 2]);
        column[0] = (nmk_column){.token = id[i], .pos = i, .base = i, .remaining = 9};
        if (i + 1 == n) column[0].flags = NMK_COLUMN_SAMPLES | NMK_COLUMN_LOGPROBS;
        rc = nmk_engine_step(g, column, NULL, &e);
    }
    if (!rc) rc = nmk_engine_read(g, "raw_logits", got, 0, sizeof got, &e);
    if (!rc) rc = g->machine->calls->read(g->machine, arena, g->params.weights, (uint64_t)NMK_WEIGHTS_KIB * 1024, &e);
    if (rc) return fprintf(stderr, "%s: %s\n", argv[0], e.text), 1;
    plain(want, id, n);
    double off = 0, size = 0;
    for (int i = 0; i < NMK_VOCAB; i++) off += (got[i] - want[i]) * (got[i] - want[i]), size += want[i] * want[i];
    printf("%d logits of size %.3g, relative error %.3g\n", NMK_VOCAB, sqrt(size / NMK_VOCAB), sqrt(off / size));
    nmk_engine_close(g);
    free(arena);
    return !(size > 0 && sqrt(off / size) < 1e-2);
}
