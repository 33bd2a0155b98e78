/* A CUDA error: the engine says that it is lost, and another one opened in the same process gives the same tokens.  Skips
 * itself without a GPU. */
#include "helper.h"

#define NAME "a lost engine (" NMK_MODEL ")"

static int first_tokens(nmk_engine *g, int32_t token[NMK_COLUMNS], nmk_err *e) {
    nmk_column column[NMK_COLUMNS];
    for (int r = 0; r < NMK_COLUMNS; r++) {
        nmk_sampler sampler = {.temperature = 1, .top_p = 0.9f, .seed = (uint64_t)r};
        if (nmk_engine_take_row(g, r, 80, e)) return -1;
        column[r] = nmk_column_decode(&sampler, r, r, 100 + 7 * r, 70, 4);
    }
    return nmk_engine_step(g, column, token, e);
}

int main(void) {
    nmk_err e = {0}, lost = {0};
    int32_t before[NMK_COLUMNS], after[NMK_COLUMNS];
    nmk_engine *g = open_gpu(NAME, 512, 1u << 30);
    check(first_tokens(g, before, &e) == 0, "%s: a step %s", NAME, e.text);
    g->params.lists = 4096; /* nobody's memory */
    check(nmk_engine_step(g, NULL, after, &lost) && strstr(lost.text, "lost"), "%s: an address that is nobody's: %s",
          NAME, lost.text);
    check(nmk_engine_step(g, NULL, after, &e) != 0, "%s: it stays lost: %s", NAME, e.text);
    nmk_engine_close(g);
    e.text[0] = 0;
    g = open_gpu(NAME, 512, 1u << 30);
    check(first_tokens(g, after, &e) == 0 && !memcmp(before, after, sizeof after),
          "%s: another one gives the same tokens %s", NAME, e.text);
    nmk_engine_close(g);
    return failures != 0;
}
