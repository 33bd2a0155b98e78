/* What a GPU draws with every way of cutting a distribution: tests/sampling.h. */
#include "sampling.h"
#include "helper.h"

static void say(bool good, const char *text) { check(good, "sampling (" NMK_MODEL "), %s", text); }

int main(void) {
    nmk_engine *g = open_gpu("sampling (" NMK_MODEL ")", 64, 0);
    /* the reference sorts the vocabulary on one core */
    sampling_all(g, NMK_VOCAB > 65536 ? 160 : 1 << 20, say);
    nmk_engine_close(g);
    return failures != 0;
}
