#include "hang.h"

#include <stdbool.h>
#include <stdio.h>

_Static_assert(NMK_ROLES > NMK_HANG_ROLE_MASK, "any word names a role");

/* The low bits of the epoch. */
static uint32_t step_of(const volatile nmk_hang *h) { return h->expected ? h->word >> NMK_HANG_STEP_SHIFT : h->got; }

/* By how many steps a is later than b.  No more than a few are on their way at once. */
static int32_t later_by(const volatile nmk_hang *a, const volatile nmk_hang *b) {
    const int32_t d = (int32_t)(step_of(a) - step_of(b)) & NMK_HANG_STEP_MASK;
    return d > NMK_HANG_STEP_MASK / 2 ? d - NMK_HANG_STEP_MASK - 1 : d;
}

const volatile nmk_hang *nmk_hang_root(const volatile nmk_hang hangs[NMK_HANGS], int *count) {
    const volatile nmk_hang *root = NULL;
    *count = 0;
    for (int i = 0; i < NMK_HANGS; i++) {
        if (!hangs[i].word) continue;
        ++*count;
        const int32_t later = root ? later_by(&hangs[i], root) : -1;
        if (later < 0 || (later == 0 && hangs[i].counter < root->counter)) root = &hangs[i];
    }
    return root;
}

void nmk_hang_text(const volatile nmk_hang *h, const nmk_variant *v, const int32_t *lists, char *text, size_t size) {
    const uint32_t word = h->word, task = word & NMK_HANG_TASK_MASK, sm = word >> NMK_HANG_SM_SHIFT & NMK_HANG_SM_MASK;
    const uint32_t role = word >> NMK_HANG_ROLE_SHIFT & NMK_HANG_ROLE_MASK;
    char place[160] = "", wait[200] = "another SM";
    if (sm < NMK_SMS && task < (uint32_t)v->max_tasks) {
        const int32_t *d = lists + ((size_t)sm * (size_t)v->max_tasks + task) * NMK_DESC_WORDS;
        const int32_t node = d[NMK_WORD_NODE];
        const bool known = d[NMK_WORD_OPCODE] && node >= 0 && node < v->node_count;
        snprintf(place, sizeof place, " (%s)", known ? v->nodes[node].name : "unknown");
    }
    if (h->counter == NMK_HANG_HOST)
        snprintf(wait, sizeof wait, "a mask, which the host did not give");
    else if (h->expected)
        snprintf(wait, sizeof wait, "counter %d (%s) to reach %u, it was at %u", h->counter,
                 h->counter >= 0 && h->counter < v->counters ? v->counter_names[h->counter] : "unknown", h->expected,
                 h->got);
    snprintf(text, size, "the kernel hung: SM %u, role %s, task %u%s waited for %s", sm, nmk_role_names[role], task,
             place, wait);
}
