/* Page tables: every page has one owner, sliding rows recycle theirs, refusals take nothing. */
#include "kv.h"

#include "check.h"

static const nmk_kv_shape shape = {.full_layers = 2,
                                   .sliding_layers = 3,
                                   .kv_heads = 1,
                                   .head_dim = 128,
                                   .window = 128,
                                   .columns = 8,
                                   .page_tokens = 64};

/* Pages of a kind that rows hold, each counted once, plus the free ones are all of them. */
static bool sound(const nmk_kv *kv, int kind) {
    int *owner = xcalloc((size_t)kv->pages[kind] + 1, sizeof *owner), held = 0;
    bool good = true;
    for (int r = 0; r < kv->rows; r++) {
        int pages = kv->row[r].tokens ? nmk_kv_row_pages(&kv->shape, kind, kv->row[r].tokens) : 0;
        for (int p = 0; p < pages; p++, held++) {
            int page = kv->table[kind][(size_t)r * (size_t)kv->stride + (size_t)p];
            good &= page >= 0 && page < kv->pages[kind] && !owner[page]++;
        }
    }
    for (int i = 0; i < kv->free_count[kind]; i++) good &= !owner[kv->free_list[kind][i]]++;
    free(owner);
    return good && held + kv->free_count[kind] == kv->pages[kind];
}

/* Whatever step is computed, the tokens it reads and writes lie on pages of their own. */
static bool window_is_whole(int window, int columns) {
    nmk_kv_shape s = shape;
    s.window = window, s.columns = columns;
    int pages = nmk_kv_row_pages(&s, 1, 1 << 20);
    for (int base = 0; base < 4 * s.page_tokens + 2 * window; base++) {
        int low = base - window + 1 < 0 ? 0 : base - window + 1, high = base + columns - 1;
        if (high / s.page_tokens - low / s.page_tokens + 1 > pages) return false;
    }
    return true;
}

int main(void) {
    nmk_err e = {0};
    nmk_kv kv;

    check(nmk_kv_page_bytes(&shape, 0) == 2 * 32768 && nmk_kv_page_bytes(&shape, 1) == 3 * 32768,
          "a page holds 64 tokens of all layers of its kind", "%llu and %llu bytes",
          (unsigned long long)nmk_kv_page_bytes(&shape, 0), (unsigned long long)nmk_kv_page_bytes(&shape, 1));
    bool whole = true;
    static const int windows[] = {1, 2, 63, 64, 65, 127, 128, 200, 4096};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++)
        for (int columns = 1; columns <= 8; columns++) whole &= window_is_whole(windows[i], columns);
    check(whole, "a sliding row's pages cover the window of every step", "some step touches more pages");
    nmk_kv_shape nmc = {13, 36, 4, 128, 4096, 8, 64};
    check(nmk_kv_row_pages(&nmc, 1, 262144) == 66 && nmk_kv_row_pages(&nmc, 0, 262144) == 4096,
          "256 Ki tokens take 4096 full and 66 sliding pages", "%d and %d", nmk_kv_row_pages(&nmc, 0, 262144),
          nmk_kv_row_pages(&nmc, 1, 262144));

    if (!check(nmk_kv_init(&kv, &shape, 8, 4096, (uint64_t)1 << 40, &e) == 0, "ample memory", "%s", e.text)) return 1;
    check(kv.pages[0] == 8 * 64 && kv.pages[1] == 4 * 8 * 4,
          "pools hold all rows at full length, and more windows to keep", "%d and %d pages", kv.pages[0], kv.pages[1]);
    check(nmk_kv_take(&kv, 3, 4096, 0, &e) == 0 && nmk_kv_take(&kv, 0, 65, 0, &e) == 0 &&
              nmk_kv_take(&kv, 7, 1, 0, &e) == 0,
          "rows of 4096, 65 and 1 tokens", "%s", e.text);
    check(sound(&kv, 0) && sound(&kv, 1), "no page has two owners", "a page has two owners or none");
    const int32_t *sliding = kv.table[1] + 3 * kv.stride;
    bool recycles = true;
    for (int p = 4; p < 64; p++) recycles &= sliding[p] == sliding[p - 4];
    check(recycles, "a sliding row's pages come round", "entry 4 is not entry 0");
    check_message(nmk_kv_take(&kv, 1, 5000, 0, &e), &e, "5000 tokens: rows hold at most 4096",
                  "a row longer than the tables");
    nmk_kv_drop(&kv, 3), nmk_kv_drop(&kv, 3);
    check(sound(&kv, 0) && sound(&kv, 1) && sliding[0] == 0, "a row is given back once", "pages are lost");
    uint32_t seed = 1;
    bool good = true;
    for (int i = 0; i < 20000; i++) {
        seed = seed * 1664525u + 1013904223u;
        int row = (int)(seed >> 16) % 8;
        if (kv.row[row].tokens)
            nmk_kv_drop(&kv, row);
        else
            good &= nmk_kv_take(&kv, row, 1 + (int)(seed >> 8) % 4096, 0, &e) == 0;
        if (i % 1000 == 0) good &= sound(&kv, 0) && sound(&kv, 1);
    }
    check(good && sound(&kv, 0) && sound(&kv, 1), "20,000 random takes and drops", "%s", e.text);
    nmk_kv_free(&kv);

    /* 4 MiB: 8 sliding rows of 4 pages are 3 MiB, so half of the memory keeps 5 of them */
    if (!check(nmk_kv_init(&kv, &shape, 8, 4096, 4 << 20, &e) == 0, "little memory", "%s", e.text)) return 1;
    check(nmk_kv_pool_bytes(&kv, 0) + nmk_kv_pool_bytes(&kv, 1) <= 4 << 20, "pools stay within the budget", "%llu",
          (unsigned long long)(nmk_kv_pool_bytes(&kv, 0) + nmk_kv_pool_bytes(&kv, 1)));
    int before[2] = {kv.free_count[0], kv.free_count[1]};
    check_message(nmk_kv_take(&kv, 0, 4096, 0, &e), &e,
                  "no room for a row of 4096 tokens: it needs 64 pages of the full layers",
                  "a row larger than the pool");
    check(kv.free_count[0] == before[0] && kv.free_count[1] == before[1] && kv.row[0].tokens == 0,
          "a refused row takes nothing", "%d and %d pages free", kv.free_count[0], kv.free_count[1]);
    nmk_kv_free(&kv);
    check_message(nmk_kv_init(&kv, &shape, 8, 4096, 300000, &e), &e, "too little: a row needs",
                  "memory for less than one row");
    nmk_kv_free(NULL);
    return failures != 0;
}
