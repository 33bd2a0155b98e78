#include "kv.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static const char *const kind_name[2] = {"full", "sliding"};

static int pages_for(const nmk_kv_shape *s, int tokens) { return (tokens + s->page_tokens - 1) / s->page_tokens; }

uint64_t nmk_kv_page_bytes(const nmk_kv_shape *s, int sliding) {
    int layers = sliding ? s->sliding_layers : s->full_layers;
    return (uint64_t)layers * (uint64_t)s->kv_heads * 2 * (uint64_t)s->page_tokens * (uint64_t)s->head_dim * 2;
}

int nmk_kv_row_pages(const nmk_kv_shape *s, int sliding, int tokens) {
    if (!(sliding ? s->sliding_layers : s->full_layers)) return 0;
    int all = pages_for(s, tokens);
    if (!sliding) return all;
    /* One step reads tokens base-window+1 and on and writes up to base+columns-1: that many tokens can touch one page
     * more than they fill, at whatever offset they start. */
    int most = (s->window + s->columns - 2) / s->page_tokens + 2;
    return all < most ? all : most;
}

uint64_t nmk_kv_pool_bytes(const nmk_kv *kv, int sliding) {
    return (uint64_t)kv->pages[sliding] * nmk_kv_page_bytes(&kv->shape, sliding);
}

int nmk_kv_init(nmk_kv *kv, const nmk_kv_shape *s, int rows, int max_len, uint64_t budget_bytes, nmk_err *e) {
    assert(rows > 0 && max_len > 0 && s->page_tokens > 0);
    memset(kv, 0, sizeof *kv);
    uint64_t page_bytes[2], want[2];
    for (int k = 0; k < 2; k++) {
        page_bytes[k] = nmk_kv_page_bytes(s, k);
        want[k] = (uint64_t)rows * (uint64_t)nmk_kv_row_pages(s, k, max_len);
    }
    /* Too little for all: rows give way before length, as a long row needs few sliding pages but many full ones. */
    if (want[0] * page_bytes[0] + want[1] * page_bytes[1] > budget_bytes) {
        uint64_t one_row = (uint64_t)nmk_kv_row_pages(s, 1, max_len);
        while (want[1] > one_row && want[1] * page_bytes[1] > budget_bytes / 2) want[1] -= one_row;
        uint64_t left = budget_bytes > want[1] * page_bytes[1] ? budget_bytes - want[1] * page_bytes[1] : 0;
        if (page_bytes[0] && want[0] > left / page_bytes[0]) want[0] = left / page_bytes[0];
        if (want[1] * page_bytes[1] > budget_bytes || (page_bytes[0] && want[0] == 0))
            return nmk_fail(
                e,
                "%.1f MiB for keys and values are too little: a row needs %.1f MiB for the sliding layers and "
                "%.1f MiB for each %d tokens of the full ones",
                (double)budget_bytes / 0x1p20, (double)(one_row * page_bytes[1]) / 0x1p20,
                (double)page_bytes[0] / 0x1p20, s->page_tokens);
    }
    kv->shape = *s, kv->rows = rows, kv->max_len = max_len, kv->stride = pages_for(s, max_len);
    kv->row_tokens = xcalloc((size_t)rows, sizeof *kv->row_tokens);
    for (int k = 0; k < 2; k++) {
        kv->pages[k] = kv->free_count[k] = (int)want[k];
        kv->table[k] = xcalloc((size_t)rows * (size_t)kv->stride, sizeof *kv->table[k]);
        kv->free_list[k] = xcalloc(want[k] ? want[k] : 1, sizeof *kv->free_list[k]);
        for (int i = 0; i < kv->pages[k]; i++) kv->free_list[k][i] = kv->pages[k] - 1 - i; /* page 0 is taken first */
    }
    return 0;
}

void nmk_kv_free(nmk_kv *kv) {
    if (!kv) return;
    for (int k = 0; k < 2; k++) free(kv->table[k]), free(kv->free_list[k]);
    free(kv->row_tokens);
    memset(kv, 0, sizeof *kv);
}

int nmk_kv_take(nmk_kv *kv, int row, int tokens, nmk_err *e) {
    assert(row >= 0 && row < kv->rows && tokens > 0 && kv->row_tokens[row] == 0);
    if (tokens > kv->max_len) return nmk_fail(e, "a row of %d tokens: rows hold at most %d", tokens, kv->max_len);
    int need[2];
    for (int k = 0; k < 2; k++) {
        need[k] = nmk_kv_row_pages(&kv->shape, k, tokens);
        if (need[k] > kv->free_count[k])
            return nmk_fail(
                e, "no room for a row of %d tokens: it needs %d pages of the %s layers' pool, %d of %d are free",
                tokens, need[k], kind_name[k], kv->free_count[k], kv->pages[k]);
    }
    for (int k = 0; k < 2; k++) {
        int32_t *entry = kv->table[k] + (size_t)row * (size_t)kv->stride;
        int entries = need[k] ? pages_for(&kv->shape, tokens) : 0;
        for (int p = 0; p < entries; p++)
            entry[p] = p < need[k] ? kv->free_list[k][--kv->free_count[k]] : entry[p - need[k]];
    }
    kv->row_tokens[row] = tokens;
    return 0;
}

void nmk_kv_drop(nmk_kv *kv, int row) {
    assert(row >= 0 && row < kv->rows);
    if (!kv->row_tokens[row]) return;
    for (int k = 0; k < 2; k++) {
        int32_t *entry = kv->table[k] + (size_t)row * (size_t)kv->stride;
        for (int p = nmk_kv_row_pages(&kv->shape, k, kv->row_tokens[row]); p-- > 0;)
            kv->free_list[k][kv->free_count[k]++] = entry[p];
        memset(entry, 0, (size_t)kv->stride * sizeof *entry);
    }
    kv->row_tokens[row] = 0;
}
