/* Pages of keys and values: which row owns which page of the two pools.
 *
 * Owns: the free lists and the page tables on the host.  Does not own the pools' memory and knows no device: the engine
 * allocates nmk_kv_pool_bytes of each pool, zeroed (a masked token's value is multiplied by 0, and 0 times a stray NaN
 * is NaN), and copies changed table rows.
 *
 * A page holds `page_tokens` tokens of all layers of one kind.  A row's table entry p is the page of its tokens
 * p*page_tokens and on.  Full layers: one page for every entry.  Sliding layers: a row owns just enough pages for the
 * window and the tokens of one step, and entry p is its page p modulo that number, so pages recycle by themselves
 * and the tables never change while a row lives. */
#ifndef NMK_KV_H
#define NMK_KV_H

#include <stdint.h>

#include "util.h"

typedef struct {
    int full_layers, sliding_layers, kv_heads, head_dim;
    int window;      /* keys a sliding layer's query sees, itself included */
    int columns;     /* consecutive tokens of one row in one step, at most */
    int page_tokens; /* a power of two */
} nmk_kv_shape;

typedef struct {
    nmk_kv_shape shape;
    int rows, max_len;
    int stride;                  /* table entries a row */
    int pages[2], free_count[2]; /* [0] full, [1] sliding */
    int32_t *table[2];           /* [rows][stride]; entries without a page are 0 and never read for a live token */
    int32_t *free_list[2];
    int *row_tokens; /* tokens the row was taken for; 0: free */
} nmk_kv;

/* Bytes of one page of the full (0) or sliding (1) pool; 0 if the model has no such layers. */
uint64_t nmk_kv_page_bytes(const nmk_kv_shape *shape, int sliding);

/* Pages of each pool that a row of `tokens` tokens takes. */
int nmk_kv_row_pages(const nmk_kv_shape *shape, int sliding, int tokens);

/* Empty tables for `rows` rows of at most max_len tokens, with pools as large as all rows at max_len need or, if that
 * is more than budget_bytes, as large as the budget allows.  -1 if the budget does not hold one short row. */
int nmk_kv_init(nmk_kv *kv, const nmk_kv_shape *shape, int rows, int max_len, uint64_t budget_bytes, nmk_err *e);
void nmk_kv_free(nmk_kv *kv);
uint64_t nmk_kv_pool_bytes(const nmk_kv *kv, int sliding);

/* Takes all pages of a row for `tokens` tokens and fills its table entries; the row must be free.  -1: not enough free
 * pages (the message says how many), nothing taken. */
int nmk_kv_take(nmk_kv *kv, int row, int tokens, nmk_err *e);
void nmk_kv_drop(nmk_kv *kv, int row); /* of a free row: nothing */

#endif
