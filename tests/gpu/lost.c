/* A CUDA error: the engine says that it is lost, stays so, and closes without waiting for a GPU that does nothing more
 * for this process.  What nmk-serve makes of that: restart.sh.  Skips itself without a GPU. */
#include "helper.h"

#define NAME "a lost engine (" NMK_MODEL ")"

enum { CLOSE_S = 5 };

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
    int32_t token[NMK_COLUMNS];
    nmk_engine *g = open_gpu(NAME, 512, 1u << 30);
    check(first_tokens(g, token, &e) == 0, "%s: a step %s", NAME, e.text);
    g->params.lists = 4096; /* nobody's memory */
    check(nmk_engine_step(g, NULL, token, &lost) && strstr(lost.text, "the engine is lost"),
          "%s: an address that is nobody's: %s", NAME, lost.text);
    check(nmk_engine_step(g, NULL, token, &e) && strstr(e.text, "the engine is lost"), "%s: it stays lost: %s", NAME,
          e.text);
    const uint64_t start_ns = nmk_now_ns();
    nmk_engine_close(g);
    const double seconds = 1e-9 * (double)(nmk_now_ns() - start_ns);
    check(seconds < CLOSE_S, "%s: closed in %.3f s", NAME, seconds);
    return failures != 0;
}
