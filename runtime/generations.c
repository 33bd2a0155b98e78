/* The generations of this program.  NMK_GENERATIONS: X(NAME) for each, the spec's own first, the others by their
 * columns; or that one alone.  NMK_PREFILL: the one that takes prompts, if there is one. */
#include "generation.h"

#include <stdio.h>
#include <string.h>

#include "nmk.h"

#ifndef NMK_GENERATIONS
#define NMK_GENERATIONS X(nmk_generation_own)
#endif

#define X(name) extern const nmk_generation name;
NMK_GENERATIONS
#undef X

#define X(name) &name,
const nmk_generation *const nmk_generations[] = {NMK_GENERATIONS};
#undef X

#ifdef NMK_PREFILL
extern const nmk_generation NMK_PREFILL;
const nmk_generation *const nmk_prefill = &NMK_PREFILL;
#else
const nmk_generation *const nmk_prefill = NULL;
#endif

/* This file knows the abi.h of the first. */
const int nmk_rows = NMK_COLUMNS;

const int nmk_generation_count = sizeof nmk_generations / sizeof *nmk_generations;

const nmk_generation *nmk_generation_for(int rows) {
    const nmk_generation *found = NULL;
    if (rows <= nmk_generations[0]->columns) return nmk_generations[0];
    for (int i = 1; i < nmk_generation_count; i++) {
        const nmk_generation *n = nmk_generations[i];
        if (n->columns >= rows && (!found || n->columns < found->columns)) found = n;
    }
    return found;
}

int nmk_most_rows(void) {
    int most = 0;
    for (int i = 0; i < nmk_generation_count; i++)
        if (nmk_generations[i]->columns > most) most = nmk_generations[i]->columns;
    return most;
}

void nmk_generation_list(char *text, size_t size) {
    int at = snprintf(text, size, "%d", nmk_generations[0]->columns);
    for (int i = 1; i < nmk_generation_count && at < (int)size; i++)
        at += snprintf(text + at, size - (size_t)at, "%s %d", i + 1 < nmk_generation_count ? "," : " and",
                       nmk_generations[i]->columns);
}
