/* What the CPU machine draws with every way of cutting a distribution: tests/sampling.h. */
#include "check.h"
#include "sampling.h"

static void say(bool good, const char *text) { check(good, text, "see above"); }

int main(void) {
    nmk_err e = {0};
    nmk_engine *g = NULL;
    nmk_options o = {.checkpoint = "examples/nmc-toy", .device = "cpu", .max_len = 64};
    if (nmk_engine_open(&g, &o, &e)) return check(false, "the toy on the CPU", "%s", e.text), 1;
    sampling_all(g, 200, NULL, say);
    nmk_engine_close(g);
    return failures != 0;
}
