/* What a GPU draws with every way of cutting a distribution: tests/sampling.h. */
#include "sampling.h"
#include "helper.h"

static void say(bool good, const char *text) { check(good, "sampling (" NMK_MODEL "), %s", text); }

/* The host owes a mask: the step gives up and says so, and the engine goes on. */
static void no_mask(nmk_engine *g) {
    nmk_err e = {0}, hang = {0};
    nmk_column column[NMK_COLUMNS];
    const nmk_sampler s = {.masked = true};
    const uint32_t patience_ms = g->params.patience_ms;
    for (int c = 0; c < NMK_COLUMNS; c++) column[c] = nmk_column_decode(&s, c, c, 5, SAMPLING_PROMPT - 1, 2);
    g->params.patience_ms = 50;
    const int rc = nmk_engine_step(g, column, NULL, &hang);
    g->params.patience_ms = patience_ms;
    check(rc == -1 && strstr(hang.text, "a mask, which the host did not give"), "no mask: %s", hang.text);
    const sampling_case k = {.name = "after it", .s = {.temperature = 0}, .mask = 3};
    int32_t prompt[SAMPLING_PROMPT] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    for (int r = 0; r < NMK_COLUMNS; r++)
        if (sampling_feed(g, r, prompt, &e)) check(false, "after it: %s", e.text);
    sampling_run(g, &k, 8, prompt, say);
}

int main(int argc, char **argv) {
    nmk_engine *g = open_gpu("sampling (" NMK_MODEL ")", 64, 0);
    /* the reference sorts the vocabulary on one core */
    sampling_all(g, NMK_VOCAB > 65536 ? 160 : 1 << 20, argc > 1 ? argv[1] : NULL, say);
    no_mask(g);
    nmk_engine_close(g);
    return failures != 0;
}
