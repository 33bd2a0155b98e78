/* Whether the books of the pages agree with each other. */
#ifndef NMK_TESTS_KV_SOUND_H
#define NMK_TESTS_KV_SOUND_H

#include "kv.h"

#include <stdio.h>
#include <stdlib.h>

/* References of rows to each page, those of rows that keep nothing also in `hidden`; and whether entries lie in the
 * pool. */
static const char *kv_count_refs(const nmk_kv *kv, int kind, int *refs, int *hidden) {
    for (int r = 0; r < kv->rows; r++) {
        const nmk_kv_row *row = &kv->row[r];
        const int32_t *entry = kv->table[kind] + (size_t)r * (size_t)kv->stride;
        int first = 0, end = row->held;
        if (row->tokens > 0) end = nmk_kv_row_pages(&kv->shape, kind, row->tokens);
        if (row->tokens < 0 && kind) first = row->first;
        if (row->first > row->held || row->known > row->held) return "a row knows more pages than it holds";
        for (int p = first; kv->pages[kind] && p < end; p++) {
            if (entry[p] < 0 || entry[p] >= kv->pages[kind]) return "an entry is no page";
            refs[entry[p]]++, hidden[entry[p]] += row->private;
        }
    }
    return NULL;
}

/* Every page is held, or idle, or free, and only that; idle ones are kept. */
static const char *kv_check_pool(const nmk_kv *kv, int kind) {
    int *refs = xcalloc((size_t)kv->pages[kind] + 1, sizeof *refs);
    int *hidden = xcalloc((size_t)kv->pages[kind] + 1, sizeof *hidden);
    char *listed = xcalloc((size_t)kv->pages[kind] + 1, 1);
    const char *why = kv_count_refs(kv, kind, refs, hidden);
    int idle = 0, held = 0, before = -1;
    for (int p = kv->oldest[kind]; !why && p != -1; before = p, p = kv->page[kind][p].newer, idle++) {
        const nmk_kv_page *page = &kv->page[kind][p];
        if (listed[p]++) why = "an idle page is listed twice";
        if (!page->kept || page->refs || refs[p] || page->older != before) why = "an idle page is not";
        /* the end of a chain goes first */
        int parent = kind ? -1 : kv->content[p].parent;
        if (parent >= 0 && (!kv->page[0][parent].kept || listed[parent])) why = "a page goes before its child";
    }
    if (!why && (idle != kv->idle_count[kind] || before != kv->newest[kind])) why = "idle pages are miscounted";
    for (int i = 0; !why && i < kv->free_count[kind]; i++) {
        int p = kv->free_list[kind][i];
        if (listed[p]++ || refs[p] || kv->page[kind][p].kept || kv->page[kind][p].refs) why = "a free page is not";
    }
    for (int p = 0; !why && p < kv->pages[kind]; p++) {
        held += refs[p] > 0;
        if (refs[p] != kv->page[kind][p].refs) why = "references are miscounted";
        if (refs[p] > 1 && !kv->page[kind][p].kept && hidden[p] < refs[p]) why = "a page that is not kept is shared";
    }
    if (!why && held + idle + kv->free_count[kind] != kv->pages[kind]) why = "pages are lost";
    free(refs), free(hidden), free(listed);
    return why;
}

static const char *kv_check_contents(const nmk_kv *kv) {
    for (int p = 0; p < kv->pages[0]; p++) {
        const nmk_kv_content *c = &kv->content[p];
        if (!kv->page[0][p].kept) continue;
        int found = kv->bucket[c->hash & kv->bucket_mask];
        while (found != -1 && found != p) found = kv->content[found].next;
        if (found != p) return "a kept page is in no bucket";
        if (c->parent >= 0 && kv->page[0][p].refs > kv->page[0][c->parent].refs)
            return "a page is held without its parent";
        if (c->sliding >= 0 && (!kv->page[1][c->sliding].kept || kv->page[1][c->sliding].full != p))
            return "a sliding page belongs to another";
    }
    for (int p = 0; p < kv->pages[1]; p++)
        if (kv->page[1][p].kept && kv->content[kv->page[1][p].full].sliding != p)
            return "a kept sliding page belongs to none";
    return NULL;
}

/* NULL, or what is wrong. */
static const char *kv_sound(const nmk_kv *kv) {
    const char *why = kv_check_pool(kv, 0);
    if (!why) why = kv_check_pool(kv, 1);
    return why ? why : kv_check_contents(kv);
}

/* Nothing is held. */
__attribute__((unused)) static bool kv_is_given_back(const nmk_kv *kv) {
    return !kv_sound(kv) && nmk_kv_available(kv, 0) == kv->pages[0] && nmk_kv_available(kv, 1) == kv->pages[1];
}

#endif
