/* Task lists in which a launch can never end, for tests of what is then said. */
#ifndef NMK_TESTS_BROKEN_LISTS_H
#define NMK_TESTS_BROKEN_LISTS_H

#include <string.h>

#include "engine.h"

typedef struct {
    const int32_t *lists; /* the engine's, to be put back */
    int32_t *broken;      /* the caller's: the first wait on SM 77 is for one arrival too many */
    uint64_t at, bytes;   /* where the machine has them */
} broken_lists;

/* Of chunks, or of steps. */
static broken_lists break_lists(const nmk_engine *g, bool chunks) {
    const nmk_variant *v = chunks ? g->prefill.generation->built_in : g->variant;
    broken_lists b = {.lists = chunks ? g->prefill.lists : g->lists,
                      .at = chunks ? g->prefill.params.lists : g->params.lists,
                      .bytes = sizeof *b.lists * NMK_SMS * (size_t)v->max_tasks * NMK_DESC_WORDS};
    b.broken = xmalloc(b.bytes);
    memcpy(b.broken, b.lists, b.bytes);
    int32_t *d = b.broken + 77 * v->max_tasks * NMK_DESC_WORDS;
    while (d[NMK_WORD_WAIT_A] < 0) d += NMK_DESC_WORDS;
    d[NMK_WORD_ARRIVALS_A]++;
    return b;
}

#endif
