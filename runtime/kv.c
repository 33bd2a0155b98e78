#include "kv.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { FULL, SLIDING, GROWS = -1, NONE = -1, KEPT_WINDOWS = 4 };

static const char *const kind_name[2] = {"full", "sliding"};

/* ---- sizes ---- */

static int pages_for(const nmk_kv_shape *s, int tokens) { return (tokens + s->page_tokens - 1) / s->page_tokens; }

uint64_t nmk_kv_page_bytes(const nmk_kv_shape *s, int sliding) {
    int layers = sliding ? s->sliding_layers : s->full_layers;
    return (uint64_t)layers * (uint64_t)s->kv_heads * 2 * (uint64_t)s->page_tokens * (uint64_t)s->head_dim * 2;
}

/* One launch reads tokens base-window+1 and on and writes up to base+launch-1: that many tokens can touch one page more
 * than they fill, at whatever offset they start. */
static int row_pages(const nmk_kv_shape *s, int sliding, int tokens, int launch) {
    int all = pages_for(s, tokens);
    if (!sliding) return all;
    if (!s->sliding_layers) return 0;
    int most = (s->window + launch - 2) / s->page_tokens + 2;
    return all < most ? all : most;
}

int nmk_kv_row_pages(const nmk_kv_shape *s, int sliding, int tokens) {
    return row_pages(s, sliding, tokens, s->columns);
}

uint64_t nmk_kv_pool_bytes(const nmk_kv *kv, int sliding) {
    return (uint64_t)kv->pages[sliding] * nmk_kv_page_bytes(&kv->shape, sliding);
}

/* The entry of the first token that a sliding layer sees from `pos`. */
static int first_seen(const nmk_kv *kv, int pos) {
    return pos + 1 > kv->shape.window ? (pos + 1 - kv->shape.window) / kv->shape.page_tokens : 0;
}

static uint64_t bytes_of(const uint64_t want[2], const uint64_t page_bytes[2]) {
    return want[FULL] * page_bytes[FULL] + want[SLIDING] * page_bytes[SLIDING];
}

/* Pages of each pool: want[] for all rows, then as much less as the budget asks for. */
static int fit(uint64_t want[2], const nmk_kv_shape *s, int rows, int max_len, uint64_t budget_bytes, nmk_err *e) {
    uint64_t page_bytes[2], one_row = (uint64_t)nmk_kv_row_pages(s, SLIDING, max_len);
    for (int k = 0; k < 2; k++) {
        page_bytes[k] = nmk_kv_page_bytes(s, k);
        want[k] = (uint64_t)rows * (uint64_t)nmk_kv_row_pages(s, k, max_len);
    }
    if (bytes_of(want, page_bytes) <= budget_bytes) {
        uint64_t most = want[FULL] < KEPT_WINDOWS * want[SLIDING] ? want[FULL] : KEPT_WINDOWS * want[SLIDING];
        uint64_t more = page_bytes[SLIDING] ? (budget_bytes - bytes_of(want, page_bytes)) / page_bytes[SLIDING] : 0;
        if (most > want[SLIDING]) want[SLIDING] += most - want[SLIDING] < more ? most - want[SLIDING] : more;
        return 0;
    }
    /* Rows give way before length, as a long row needs few sliding pages but many full ones. */
    while (want[SLIDING] > one_row && want[SLIDING] * page_bytes[SLIDING] > budget_bytes / 2) want[SLIDING] -= one_row;
    uint64_t sliding_bytes = want[SLIDING] * page_bytes[SLIDING];
    uint64_t left = budget_bytes > sliding_bytes ? budget_bytes - sliding_bytes : 0;
    if (page_bytes[FULL] && want[FULL] > left / page_bytes[FULL]) want[FULL] = left / page_bytes[FULL];
    if (sliding_bytes > budget_bytes || want[FULL] == 0)
        return nmk_fail(e,
                        "%.1f MiB for keys and values are too little: a row needs %.1f MiB for the sliding layers and "
                        "%.1f MiB for each %d tokens of the full ones",
                        (double)budget_bytes / 0x1p20, (double)(one_row * page_bytes[SLIDING]) / 0x1p20,
                        (double)page_bytes[FULL] / 0x1p20, s->page_tokens);
    return 0;
}

int nmk_kv_init(nmk_kv *kv, const nmk_kv_shape *s, int rows, int max_len, uint64_t budget_bytes, nmk_err *e) {
    assert(rows > 0 && max_len > 0 && s->page_tokens > 0 && s->page_tokens < NMK_KV_ANY);
    memset(kv, 0, sizeof *kv);
    uint64_t want[2];
    if (fit(want, s, rows, max_len, budget_bytes, e)) return -1;
    kv->shape = *s, kv->rows = rows, kv->max_len = max_len, kv->stride = pages_for(s, max_len);
    kv->row = xcalloc((size_t)rows, sizeof *kv->row);
    for (int k = 0; k < 2; k++) {
        size_t count = want[k] ? want[k] : 1;
        kv->pages[k] = kv->free_count[k] = (int)want[k];
        kv->oldest[k] = kv->newest[k] = NONE;
        kv->table[k] = xcalloc((size_t)rows * (size_t)kv->stride, sizeof *kv->table[k]);
        kv->free_list[k] = xcalloc(count, sizeof *kv->free_list[k]);
        kv->page[k] = xcalloc(count, sizeof *kv->page[k]);
        for (int i = 0; i < kv->pages[k]; i++) kv->free_list[k][i] = kv->pages[k] - 1 - i; /* page 0 is taken first */
    }
    kv->content = xcalloc(want[FULL], sizeof *kv->content);
    kv->tokens = xcalloc(want[FULL] * (size_t)s->page_tokens, sizeof *kv->tokens);
    while (kv->bucket_mask < 2 * want[FULL]) kv->bucket_mask = 2 * kv->bucket_mask + 1;
    kv->bucket = xmalloc((kv->bucket_mask + 1) * sizeof *kv->bucket);
    for (uint64_t i = 0; i <= kv->bucket_mask; i++) kv->bucket[i] = NONE;
    return 0;
}

void nmk_kv_free(nmk_kv *kv) {
    if (!kv) return;
    for (int k = 0; k < 2; k++) free(kv->table[k]), free(kv->free_list[k]), free(kv->page[k]);
    free(kv->content), free(kv->tokens), free(kv->bucket), free(kv->row);
    memset(kv, 0, sizeof *kv);
}

int nmk_kv_available(const nmk_kv *kv, int sliding) { return kv->free_count[sliding] + kv->idle_count[sliding]; }

double nmk_kv_used(const nmk_kv *kv) {
    double used = 0, all = 0;
    for (int k = 0; k < 2; k++) {
        double bytes = (double)nmk_kv_page_bytes(&kv->shape, k);
        used += bytes * (kv->pages[k] - nmk_kv_available(kv, k)), all += bytes * kv->pages[k];
    }
    return all > 0 ? used / all : 0;
}

/* ---- pages ---- */

static int32_t *entries(const nmk_kv *kv, int kind, int row) {
    assert(row >= 0 && row < kv->rows);
    return kv->table[kind] + (size_t)row * (size_t)kv->stride;
}

static void set_entry(nmk_kv *kv, int kind, int row, int p, int page) {
    nmk_kv_row *r = &kv->row[row];
    entries(kv, kind, row)[p] = page;
    if (r->changed == r->changed_end) r->changed = r->changed_end = p;
    if (p < r->changed) r->changed = p;
    if (p >= r->changed_end) r->changed_end = p + 1;
}

static void set_idle(nmk_kv *kv, int kind, int p) {
    nmk_kv_page *page = &kv->page[kind][p];
    page->older = kv->newest[kind], page->newer = NONE;
    *(page->older == NONE ? &kv->oldest[kind] : &kv->page[kind][page->older].newer) = p;
    kv->newest[kind] = p, kv->idle_count[kind]++;
}

static void unset_idle(nmk_kv *kv, int kind, int p) {
    nmk_kv_page *page = &kv->page[kind][p];
    *(page->older == NONE ? &kv->oldest[kind] : &kv->page[kind][page->older].newer) = page->newer;
    *(page->newer == NONE ? &kv->newest[kind] : &kv->page[kind][page->newer].older) = page->older;
    kv->idle_count[kind]--;
}

static void hold(nmk_kv *kv, int kind, int p) {
    if (kv->page[kind][p].refs++ == 0) unset_idle(kv, kind, p); /* nobody holds a page that is not kept but its row */
}

static void give_back(nmk_kv *kv, int kind, int p) {
    nmk_kv_page *page = &kv->page[kind][p];
    assert(page->refs > 0);
    if (--page->refs) return;
    if (page->kept)
        set_idle(kv, kind, p);
    else
        kv->free_list[kind][kv->free_count[kind]++] = p;
}

/* A kept page is one no more: free if no row holds it.  A full one takes its sliding one with it. */
static void discard(nmk_kv *kv, int kind, int p) {
    nmk_kv_page *page = &kv->page[kind][p];
    assert(page->kept);
    if (kind == FULL) {
        nmk_kv_content *c = &kv->content[p];
        int *at = &kv->bucket[c->hash & kv->bucket_mask];
        while (*at != p) at = &kv->content[*at].next;
        *at = c->next;
        if (c->sliding != NONE) discard(kv, SLIDING, c->sliding);
    } else {
        kv->content[page->full].sliding = NONE;
    }
    page->kept = false;
    if (page->refs) return;
    unset_idle(kv, kind, p);
    kv->free_list[kind][kv->free_count[kind]++] = p;
}

static int new_page(nmk_kv *kv, int kind) {
    if (kv->free_count[kind] == 0) discard(kv, kind, kv->oldest[kind]);
    int p = kv->free_list[kind][--kv->free_count[kind]];
    kv->page[kind][p] = (nmk_kv_page){.refs = 1};
    return p;
}

/* ---- rows that are taken ---- */

int nmk_kv_take(nmk_kv *kv, int row, int tokens, int launch, nmk_err *e) {
    assert(tokens > 0 && kv->row[row].tokens == 0);
    if (launch < kv->shape.columns) launch = kv->shape.columns;
    if (tokens > kv->max_len) return nmk_fail(e, "a row of %d tokens: rows hold at most %d", tokens, kv->max_len);
    int need[2];
    for (int k = 0; k < 2; k++) {
        need[k] = row_pages(&kv->shape, k, tokens, launch);
        if (need[k] > nmk_kv_available(kv, k))
            return nmk_fail(
                e, "no room for a row of %d tokens: it needs %d pages of the %s layers' pool, %d of %d are free",
                tokens, need[k], kind_name[k], nmk_kv_available(kv, k), kv->pages[k]);
    }
    for (int k = 0; k < 2; k++)
        for (int p = 0; need[k] && p < pages_for(&kv->shape, tokens); p++)
            set_entry(kv, k, row, p, p < need[k] ? new_page(kv, k) : entries(kv, k, row)[p - need[k]]);
    kv->row[row].tokens = tokens, kv->row[row].ring = need[SLIDING];
    return 0;
}

int nmk_kv_entries(const nmk_kv *kv, int row, int sliding, int *first) {
    const nmk_kv_row *r = &kv->row[row];
    *first = r->tokens == GROWS && sliding ? r->first : 0;
    if (r->tokens == 0 || !nmk_kv_row_pages(&kv->shape, sliding, 1)) return *first;
    if (r->tokens == GROWS) return r->held;
    return sliding ? r->ring : nmk_kv_row_pages(&kv->shape, sliding, r->tokens);
}

/* From the end, so that the first pages of a sequence stay longest. */
void nmk_kv_drop(nmk_kv *kv, int row) {
    nmk_kv_row *r = &kv->row[row];
    if (r->tokens == 0) return;
    for (int k = 0; k < 2; k++) {
        int first, end = nmk_kv_entries(kv, row, k, &first);
        while (end > first) give_back(kv, k, entries(kv, k, row)[--end]);
        memset(entries(kv, k, row), 0, (size_t)kv->stride * sizeof(int32_t));
    }
    *r = (nmk_kv_row){0};
}

/* ---- rows that grow ---- */

void nmk_kv_begin(nmk_kv *kv, int row, uint64_t salt) {
    assert(kv->row[row].tokens == 0);
    kv->row[row] = (nmk_kv_row){.tokens = GROWS, .salt = salt};
}

static uint64_t hash_of(const nmk_kv *kv, int parent, uint64_t salt, const int32_t *tokens) {
    uint64_t before = parent == NONE ? salt : kv->content[parent].hash;
    return XXH3_64bits_withSeed(tokens, sizeof *tokens * (size_t)kv->shape.page_tokens, before);
}

/* The kept page with this content, the most fed one if there are several, or NONE. */
static int look_up(const nmk_kv *kv, uint64_t hash, int parent, uint64_t salt, const int32_t *tokens, uint8_t fed) {
    size_t page_tokens = (size_t)kv->shape.page_tokens;
    int found = NONE;
    for (int p = kv->bucket[hash & kv->bucket_mask]; p != NONE; p = kv->content[p].next) {
        const nmk_kv_content *c = &kv->content[p];
        if (c->hash == hash && c->parent == parent && c->salt == salt && (fed == NMK_KV_ANY || c->fed == fed) &&
            !memcmp(kv->tokens + (size_t)p * page_tokens, tokens, page_tokens * sizeof *tokens) &&
            (found == NONE || c->fed > kv->content[found].fed))
            found = p;
    }
    return found;
}

/* Of the row's next page: the last known one. */
static int parent_of(const nmk_kv *kv, int row) {
    int known = kv->row[row].known;
    return known ? entries(kv, FULL, row)[known - 1] : NONE;
}

int nmk_kv_find(nmk_kv *kv, int row, const int32_t *tokens, int count, const uint8_t *fed) {
    nmk_kv_row *r = &kv->row[row];
    const int size = kv->shape.page_tokens, start = r->known;
    assert(r->tokens == GROWS);
    if (r->private) return start * size;
    int parent = parent_of(kv, row), end = start, whole = 0; /* from entry `whole` on all sliding pages are there */
    bool slides = kv->shape.sliding_layers > 0;
    /* the chain, and how much of it has the sliding pages that going on behind it needs; below `start` the row has
     * them */
    int32_t *chain = xmalloc(sizeof *chain * (size_t)(kv->stride + 1));
    for (int p = start; p < kv->stride && (p + 1) * size <= count; p++) {
        const int32_t *t = tokens + (size_t)p * (size_t)size;
        parent = chain[p] = look_up(kv, hash_of(kv, parent, r->salt, t), parent, r->salt, t, fed[p]);
        if (parent == NONE) break;
        if (slides && kv->content[parent].sliding == NONE) whole = p + 1;
        if (!slides || whole <= first_seen(kv, (p + 1) * size)) end = p + 1;
    }
    if (end > start) {
        /* hold first, so that giving back does not let go of what is needed */
        int first = slides ? first_seen(kv, end * size) : 0;
        for (int p = start; p < end; p++) hold(kv, FULL, chain[p]);
        for (int p = first > start ? first : start; slides && p < end; p++)
            hold(kv, SLIDING, kv->content[chain[p]].sliding);
        /* entries that were there for tokens to come */
        while (r->held > start) {
            give_back(kv, FULL, entries(kv, FULL, row)[--r->held]);
            if (slides && r->held >= r->first) give_back(kv, SLIDING, entries(kv, SLIDING, row)[r->held]);
        }
        for (; slides && r->first < first && r->first < start; r->first++)
            give_back(kv, SLIDING, entries(kv, SLIDING, row)[r->first]);
        if (slides) r->first = first;
        for (int p = start; p < end; p++) {
            set_entry(kv, FULL, row, p, chain[p]);
            if (slides && p >= first) set_entry(kv, SLIDING, row, p, kv->content[chain[p]].sliding);
        }
        r->held = r->known = end;
    }
    free(chain);
    return end * size;
}

int nmk_kv_fed(const nmk_kv *kv, int row, int p) {
    assert(p < kv->row[row].known);
    return kv->content[entries(kv, FULL, row)[p]].fed;
}

void nmk_kv_pass(nmk_kv *kv, int row, int pos) {
    nmk_kv_row *r = &kv->row[row];
    if (!kv->shape.sliding_layers) return;
    for (int first = first_seen(kv, pos); r->first < first && r->first < r->held; r->first++)
        give_back(kv, SLIDING, entries(kv, SLIDING, row)[r->first]);
}

int nmk_kv_grow(nmk_kv *kv, int row, int tokens) {
    nmk_kv_row *r = &kv->row[row];
    int end = pages_for(&kv->shape, tokens), kinds = kv->shape.sliding_layers ? 2 : 1;
    assert(r->tokens == GROWS && end <= kv->stride);
    for (int k = 0; k < kinds; k++)
        if (end - r->held > nmk_kv_available(kv, k)) return -1;
    for (; r->held < end; r->held++)
        for (int k = 0; k < kinds; k++) set_entry(kv, k, row, r->held, new_page(kv, k));
    return 0;
}

static void keep_sliding(nmk_kv *kv, int full, int sliding) {
    kv->content[full].sliding = sliding;
    kv->page[SLIDING][sliding].kept = true, kv->page[SLIDING][sliding].full = full;
}

/* Entry p goes over from the row's own page to the one with the same content; its sliding page too, unless that one has
 * none: then it gets the row's. */
static void change_over(nmk_kv *kv, int row, int p, int to) {
    int own = entries(kv, FULL, row)[p];
    hold(kv, FULL, to);
    set_entry(kv, FULL, row, p, to);
    give_back(kv, FULL, own);
    if (!kv->shape.sliding_layers || p < kv->row[row].first) return;
    int sliding = kv->content[to].sliding;
    own = entries(kv, SLIDING, row)[p];
    if (sliding == NONE) {
        keep_sliding(kv, to, own);
    } else {
        hold(kv, SLIDING, sliding);
        set_entry(kv, SLIDING, row, p, sliding);
        give_back(kv, SLIDING, own);
    }
}

void nmk_kv_keep(nmk_kv *kv, int row, const int32_t *tokens, int count, const uint8_t *fed) {
    nmk_kv_row *r = &kv->row[row];
    const size_t size = (size_t)kv->shape.page_tokens;
    assert(r->tokens == GROWS);
    for (; !r->private && (r->known + 1) * (int)size <= count; r->known++) {
        int p = r->known, parent = parent_of(kv, row), own = entries(kv, FULL, row)[p];
        const int32_t *t = tokens + (size_t)p * size;
        uint64_t hash = hash_of(kv, parent, r->salt, t);
        assert(p < r->held && fed[p] <= size);
        int same = look_up(kv, hash, parent, r->salt, t, fed[p]);
        if (same != NONE) {
            change_over(kv, row, p, same);
            continue;
        }
        int *bucket = &kv->bucket[hash & kv->bucket_mask];
        kv->content[own] = (nmk_kv_content){
            .hash = hash, .salt = r->salt, .parent = parent, .sliding = NONE, .next = *bucket, .fed = fed[p]};
        *bucket = own;
        memcpy(kv->tokens + (size_t)own * size, t, size * sizeof *t);
        kv->page[FULL][own].kept = true;
        if (kv->shape.sliding_layers && p >= r->first) keep_sliding(kv, own, entries(kv, SLIDING, row)[p]);
    }
}

void nmk_kv_forget(nmk_kv *kv) {
    for (int p = 0; p < kv->pages[FULL]; p++)
        if (kv->page[FULL][p].kept) discard(kv, FULL, p);
    /* what they compute from now on would hang on pages that nobody finds */
    for (int i = 0; i < kv->rows; i++) kv->row[i].private = true;
}
