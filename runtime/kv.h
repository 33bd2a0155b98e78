/* Pages of keys and values: which row holds which page of the two pools, and what full pages are worth keeping.
 *
 * Owns: the free lists, the cache and the page tables on the host.  Does not own the pools' memory and knows no device:
 * the engine allocates nmk_kv_pool_bytes of each pool, zeroed (a masked token's value is multiplied by 0, and 0 times a
 * stray NaN is NaN), and copies changed table entries in writes queued between the steps.
 *
 * A page holds `page_tokens` tokens of all layers of one kind.  A row's table entry p is the page of its tokens
 * p*page_tokens and on.  There are two ways for a row to have pages:
 *
 * Taken (nmk_kv_take): everything at once, nothing cached.  Sliding layers get just enough pages for the window and the
 * tokens of one launch, and entry p is page p modulo that number.
 *
 * Grown (nmk_kv_begin): page by page, of both kinds, as the row advances.  A ring would overwrite what a later request
 * could use, so a sliding page lies at one entry for good, and is given back when the window has passed it: a row holds
 * as many as in a ring.  A page whose tokens all are known and computed can be kept (nmk_kv_keep) for whoever begins
 * with the same tokens.
 *
 * The cache.  A kept full page knows its parent, the page before it, so a chain of pages stands for a whole prefix; a
 * kept sliding page belongs to the full page of the same tokens.  A row may go on at a position if the full pages of
 * all tokens before it and the sliding pages of its window are there; the sliding pages further back may be gone.  A
 * page is found by a hash, but only equal tokens, an equal parent and, of a first page, an equal salt count.  Pages are
 * compared by how they were computed too: `fed` says how many of its first tokens came in chunks of a prompt, the
 * others having been decoded one by one.  Those two ways round differently, so parent, tokens and fed together fix a
 * page's bits.
 *
 * Pages that no row holds go by age when others are needed.  A row holds all full pages of its prefix and gives them
 * back from its end, so a chain goes from its end too; sliding pages are given back as the window passes them, so those
 * of the last window of a sequence, which its continuation needs, are the youngest.
 *
 * A model without full layers has full pages of no bytes: they carry the chains. */
#ifndef NMK_KV_H
#define NMK_KV_H

#include <stdbool.h>
#include <stdint.h>

#include "util.h"

enum { NMK_KV_ANY = 255 }; /* as `fed`: however the page was computed */

typedef struct {
    int full_layers, sliding_layers, kv_heads, head_dim;
    int window;      /* keys a sliding layer's query sees, itself included */
    int columns;     /* consecutive tokens of one row in one step, at most */
    int page_tokens; /* a power of two, below NMK_KV_ANY */
} nmk_kv_shape;

typedef struct {
    int refs; /* rows that hold it */
    bool kept;
    int older, newer; /* of the kept ones that no row holds; -1: none */
    int full;         /* of a kept sliding page: that of the same tokens */
} nmk_kv_page;

/* Of a kept full page. */
typedef struct {
    uint64_t hash, salt;
    int parent;  /* -1: none */
    int sliding; /* -1: gone */
    int next;    /* with the same bucket */
    uint8_t fed;
} nmk_kv_content;

typedef struct {
    int tokens;   /* it was taken for; -1: it grows; 0: free */
    int ring;     /* sliding pages of a taken one */
    int held;     /* entries that have a page */
    int first;    /* the first of them whose sliding page is still held */
    int known;    /* the first entries, which are kept pages */
    bool private; /* keeps nothing */
    uint64_t salt;
    int changed, changed_end; /* entries that the machine has not got yet */
} nmk_kv_row;

typedef struct {
    nmk_kv_shape shape;
    int rows, max_len;
    int stride;                  /* table entries a row */
    int pages[2], free_count[2]; /* [0] full, [1] sliding */
    int idle_count[2];           /* kept, and held by no row */
    int oldest[2], newest[2];    /* of those */
    int32_t *table[2];           /* [rows][stride]; entries without a page are never read for a live token */
    int32_t *free_list[2];
    nmk_kv_page *page[2];
    nmk_kv_content *content; /* [pages[0]] */
    int32_t *tokens;         /* [pages[0]][page_tokens] */
    int *bucket;             /* [bucket_mask + 1] */
    uint64_t bucket_mask;
    nmk_kv_row *row;
} nmk_kv;

/* Bytes of one page of the full (0) or sliding (1) pool; 0 if the model has no such layers. */
uint64_t nmk_kv_page_bytes(const nmk_kv_shape *shape, int sliding);

/* Pages of each pool that a row of `tokens` tokens holds at most. */
int nmk_kv_row_pages(const nmk_kv_shape *shape, int sliding, int tokens);

/* Empty tables for `rows` rows of at most max_len tokens, with pools as large as all rows at max_len need, and sliding
 * pages for some more windows to keep.  If that is more than budget_bytes: as large as the budget allows.  -1 if the
 * budget does not hold one short row. */
int nmk_kv_init(nmk_kv *kv, const nmk_kv_shape *shape, int rows, int max_len, uint64_t budget_bytes, nmk_err *e);
void nmk_kv_free(nmk_kv *kv);
uint64_t nmk_kv_pool_bytes(const nmk_kv *kv, int sliding);

/* Pages that rows could get: free ones and those that are kept for nobody in particular. */
int nmk_kv_available(const nmk_kv *kv, int sliding);
/* How much of the pools rows hold, by bytes: 0 to 1. */
double nmk_kv_used(const nmk_kv *kv);

/* Takes all pages of a row for `tokens` tokens and fills its table entries; the row must be free.  One launch computes
 * at most `launch` tokens of it, or shape.columns if that is more.  -1: not enough pages (the message says how many),
 * nothing taken. */
int nmk_kv_take(nmk_kv *kv, int row, int tokens, int launch, nmk_err *e);

/* The table entries of the row that have a page of that kind: from *first to before what is returned. */
int nmk_kv_entries(const nmk_kv *kv, int row, int sliding, int *first);

/* ---- rows that grow ---- */

/* The free row `row` holds nothing yet and finds only pages of its salt. */
void nmk_kv_begin(nmk_kv *kv, int row, uint64_t salt);

/* The row, which has computed exactly its known pages, goes on with kept ones of its next tokens, as far as it may:
 * `tokens` are the sequence's, and pages past `count` of them are not looked for.  fed[p] is the way that entry p must
 * have been computed, or NMK_KV_ANY.  Returns the tokens that the row need not compute. */
int nmk_kv_find(nmk_kv *kv, int row, const int32_t *tokens, int count, const uint8_t *fed);

/* The way that entry p of the row, a known one, was computed. */
int nmk_kv_fed(const nmk_kv *kv, int row, int p);

/* The row computes nothing before `pos` any more: gives back sliding pages before its window. */
void nmk_kv_pass(nmk_kv *kv, int row, int pos);

/* Pages for the row's first `tokens` tokens.  Others' kept pages give way.  -1: too few, nothing taken. */
int nmk_kv_grow(nmk_kv *kv, int row, int tokens);

/* The first `count` tokens are computed, by steps that are queued at least: keeps the full pages among them.  Where the
 * same content is kept already, the row changes over to that. */
void nmk_kv_keep(nmk_kv *kv, int row, const int32_t *tokens, int count, const uint8_t *fed);

/* Nothing that was computed so far is found any more; rows go on with what they hold. */
void nmk_kv_forget(nmk_kv *kv);

void nmk_kv_drop(nmk_kv *kv, int row); /* gives back what the row holds; of a free row: nothing */

#endif
