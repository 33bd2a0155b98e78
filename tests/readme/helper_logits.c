/* The model's logits at the end of a prompt, one a line: PROGRAM CHECKPOINT|SEED ID...  As the lm_head gives them for
 * log-probabilities, from the CPU machine. */
#include "engine.h"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    nmk_err e = {0};
    nmk_engine *g = NULL;
    const char *from = argc > 1 ? argv[1] : "";
    nmk_options o = {.device = "cpu", .max_len = 256, .kv_bytes = 1u << 26, .cpu_threads = 2};
    char *end;
    o.weights_seed = strtoull(from, &end, 10);
    o.random_weights = *from && !*end;
    if (!o.random_weights) o.checkpoint = from;
    if (argc < 3 || argc - 2 > 64) return fprintf(stderr, "usage: %s CHECKPOINT|SEED ID... (up to 64)\n", argv[0]), 2;
    float *logits = malloc(NMK_VOCAB * sizeof *logits);
    int rc = nmk_engine_open(&g, &o, &e) || nmk_engine_take_row(g, 0, 128, &e);
    for (int i = 2; !rc && i < argc; i++) {
        nmk_column column[NMK_COLUMNS];
        for (int n = 0; n < NMK_COLUMNS; n++) column[n] = nmk_column_idle();
        column[0] = (nmk_column){.token = atoi(argv[i]), .pos = i - 2, .base = i - 2, .remaining = 9};
        if (i + 1 == argc) column[0].flags = NMK_COLUMN_SAMPLES | NMK_COLUMN_LOGPROBS;
        rc = nmk_engine_step(g, column, NULL, &e);
    }
    if (!rc) rc = nmk_engine_read(g, "raw_logits", logits, 0, NMK_VOCAB * sizeof *logits, &e);
    if (rc) fprintf(stderr, "%s: %s\n", argv[0], e.text);
    for (int i = 0; !rc && i < NMK_VOCAB; i++) printf("%.17g\n", (double)logits[i]);
    nmk_engine_close(g);
    free(logits);
    return rc != 0;
}
