#include "vocab.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint32_t at, length; /* in vocab.text */
    nmk_token_kind kind;
} token;

/* A merge, found by its pair.  key is NO_PAIR where the slot is free. */
typedef struct {
    uint64_t key;
    uint32_t rank;
    int32_t result;
} merge;

static const uint64_t NO_PAIR = UINT64_MAX;
static const uint32_t NO_RANK = UINT32_MAX;

/* Whether merging a token's bytes gives just the token: asked for at each piece, found out when first asked. */
enum { WHOLE_UNKNOWN, WHOLE_YES, WHOLE_NO };

struct nmk_vocab {
    int32_t size;
    nmk_buf text;
    token *tokens;
    int32_t *by_bytes; /* open addressing; -1 is free */
    uint32_t bytes_mask;
    size_t longest;
    merge *merges;
    uint32_t merges_mask, rank;
    int32_t byte[256];
    _Atomic unsigned char *whole;
    bool ignore_merges;
};

static uint32_t table_size(size_t entries) {
    uint32_t size = 16;
    while (size < 2 * entries) size *= 2;
    return size;
}

nmk_vocab *nmk_vocab_new(int32_t size, size_t merges) {
    nmk_vocab *v = xcalloc(1, sizeof *v);
    v->size = size;
    v->tokens = xcalloc((size_t)size, sizeof *v->tokens);
    v->bytes_mask = table_size((size_t)size) - 1;
    v->by_bytes = xmalloc((v->bytes_mask + (size_t)1) * sizeof *v->by_bytes);
    memset(v->by_bytes, -1, (v->bytes_mask + (size_t)1) * sizeof *v->by_bytes);
    v->merges_mask = table_size(merges) - 1;
    v->merges = xmalloc((v->merges_mask + (size_t)1) * sizeof *v->merges);
    for (size_t i = 0; i <= v->merges_mask; i++) v->merges[i].key = NO_PAIR;
    v->whole = xcalloc((size_t)size, sizeof *v->whole);
    return v;
}

void nmk_vocab_free(nmk_vocab *v) {
    if (!v) return;
    nmk_buf_free(&v->text);
    free(v->tokens);
    free(v->by_bytes);
    free(v->merges);
    free(v->whole);
    free(v);
}

int32_t nmk_vocab_size(const nmk_vocab *v) { return v->size; }

/* ------------------------------------------------------------------------------------------------- ids by bytes */

static uint32_t hash(const char *bytes, size_t length) {
    uint64_t h = length * 0x9e3779b97f4a7c15u;
    for (; length >= 8; bytes += 8, length -= 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        h = (h ^ word) * 0xff51afd7ed558ccdu;
        h ^= h >> 32;
    }
    uint64_t rest = 0;
    memcpy(&rest, bytes, length);
    h = (h ^ rest) * 0xff51afd7ed558ccdu;
    return (uint32_t)(h >> 32) ^ (uint32_t)(h >> 8);
}

/* The slot that holds these bytes, or the free one where they belong. */
static uint32_t slot_of(const nmk_vocab *v, const char *bytes, size_t length) {
    uint32_t slot = hash(bytes, length) & v->bytes_mask;
    while (v->by_bytes[slot] >= 0) {
        const token *t = &v->tokens[v->by_bytes[slot]];
        if (t->length == length && !memcmp(v->text.data + t->at, bytes, length)) break;
        slot = (slot + 1) & v->bytes_mask;
    }
    return slot;
}

int32_t nmk_vocab_find(const nmk_vocab *v, const char *bytes, size_t length) {
    return length > v->longest ? -1 : v->by_bytes[slot_of(v, bytes, length)];
}

void nmk_vocab_set(nmk_vocab *v, int32_t id, const char *bytes, size_t length, nmk_token_kind kind) {
    token *t = &v->tokens[id];
    if (t->kind == NMK_TOKEN_NONE) {
        t->at = (uint32_t)v->text.length, t->length = (uint32_t)length;
        nmk_buf_add(&v->text, bytes, length);
        if (kind == NMK_TOKEN_PIECE) v->by_bytes[slot_of(v, bytes, length)] = id;
        if (kind == NMK_TOKEN_PIECE && length > v->longest) v->longest = length;
    }
    t->kind = kind;
}

nmk_token_kind nmk_vocab_kind(const nmk_vocab *v, int32_t id) {
    return id < 0 || id >= v->size ? NMK_TOKEN_NONE : v->tokens[id].kind;
}

const char *nmk_vocab_bytes(const nmk_vocab *v, int32_t id, size_t *length) {
    *length = 0;
    if (nmk_vocab_kind(v, id) == NMK_TOKEN_NONE) return NULL;
    *length = v->tokens[id].length;
    return v->text.data + v->tokens[id].at;
}

/* ------------------------------------------------------------------------------------------------------- merges */

static merge *merge_of(const nmk_vocab *v, int32_t left, int32_t right) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint32_t slot = (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32) & v->merges_mask;
    while (v->merges[slot].key != NO_PAIR && v->merges[slot].key != key) slot = (slot + 1) & v->merges_mask;
    return &v->merges[slot];
}

static uint32_t rank_of(const nmk_vocab *v, int32_t left, int32_t right) {
    const merge *m = merge_of(v, left, right);
    return m->key == NO_PAIR ? NO_RANK : m->rank;
}

void nmk_vocab_merge(nmk_vocab *v, int32_t left, int32_t right, int32_t result) {
    *merge_of(v, left, right) = (merge){(uint64_t)(uint32_t)left << 32 | (uint32_t)right, v->rank++, result};
}

int nmk_vocab_finish(nmk_vocab *v, bool ignore_merges) {
    int missing = -1;
    v->ignore_merges = ignore_merges;
    for (int b = 255; b >= 0; b--) {
        char c = (char)b;
        v->byte[b] = nmk_vocab_find(v, &c, 1);
        if (v->byte[b] < 0 && b != 0xc0 && b != 0xc1 && b < 0xf5) missing = b;
    }
    return missing;
}

/* A short piece: looks through all ranks for each merge. */
enum { SHORT_BYTES = 40 };

static void encode_short(const nmk_vocab *v, const char *piece, size_t bytes, nmk_ids *ids) {
    int32_t id[SHORT_BYTES];
    uint32_t rank[SHORT_BYTES]; /* of the pair that begins here */
    size_t count = bytes;
    for (size_t i = 0; i < count; i++) id[i] = v->byte[(unsigned char)piece[i]];
    for (size_t i = 0; i + 1 < count; i++) rank[i] = rank_of(v, id[i], id[i + 1]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++)
            if (rank[i] < rank[best]) best = i;
        if (rank[best] == NO_RANK) break;
        id[best] = merge_of(v, id[best], id[best + 1])->result;
        count--;
        memmove(id + best + 1, id + best + 2, (count - best - 1) * sizeof *id);
        memmove(rank + best, rank + best + 1, (count - best - 1) * sizeof *rank);
        if (best + 1 < count) rank[best] = rank_of(v, id[best], id[best + 1]);
        if (best > 0) rank[best - 1] = rank_of(v, id[best - 1], id[best]);
    }
    for (size_t i = 0; i < count; i++) nmk_ids_add(ids, id[i]);
}

/* A long piece: a heap of (rank, position).  Entries are not taken out when a merge makes them stale: one counts only
 * if its rank is still the rank of the pair at its position. */
typedef struct {
    uint64_t *entry;
    size_t count, capacity;
} heap;

static void heap_push(heap *h, uint32_t rank, uint32_t at) {
    if (rank == NO_RANK) return;
    if (h->count == h->capacity) {
        h->capacity = h->capacity ? 2 * h->capacity : 256;
        h->entry = xrealloc(h->entry, h->capacity * sizeof *h->entry);
    }
    uint64_t added = (uint64_t)rank << 32 | at;
    size_t i = h->count++;
    for (; i && h->entry[(i - 1) / 2] > added; i = (i - 1) / 2) h->entry[i] = h->entry[(i - 1) / 2];
    h->entry[i] = added;
}

static uint64_t heap_pop(heap *h) {
    uint64_t top = h->entry[0], last = h->entry[--h->count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < h->count; i = child) {
        if (child + 1 < h->count && h->entry[child + 1] < h->entry[child]) child++;
        if (last <= h->entry[child]) break;
        h->entry[i] = h->entry[child];
    }
    h->entry[i] = last;
    return top;
}

typedef struct {
    int32_t id; /* -1: merged into the one before */
    uint32_t before, after;
} symbol;

static void encode_long(const nmk_vocab *v, const char *piece, size_t bytes, nmk_ids *ids) {
    heap h = {0};
    uint32_t count = (uint32_t)bytes; /* as position: no symbol */
    symbol *s = xmalloc(bytes * sizeof *s);
    for (uint32_t i = 0; i < count; i++) s[i] = (symbol){v->byte[(unsigned char)piece[i]], i ? i - 1 : count, i + 1};
    for (uint32_t i = 0; i + 1 < count; i++) heap_push(&h, rank_of(v, s[i].id, s[i + 1].id), i);
    while (h.count) {
        uint64_t top = heap_pop(&h);
        uint32_t at = (uint32_t)top, after = s[at].after;
        if (s[at].id < 0 || after == count) continue;
        const merge *m = merge_of(v, s[at].id, s[after].id);
        if (m->key == NO_PAIR || m->rank != (uint32_t)(top >> 32)) continue;
        s[at].id = m->result;
        s[after].id = -1;
        s[at].after = s[after].after;
        if (s[at].after < count) {
            s[s[at].after].before = at;
            heap_push(&h, rank_of(v, s[at].id, s[s[at].after].id), at);
        }
        if (s[at].before < count) heap_push(&h, rank_of(v, s[s[at].before].id, s[at].id), s[at].before);
    }
    for (uint32_t i = 0; i < count; i = s[i].after) nmk_ids_add(ids, s[i].id);
    free(s);
    free(h.entry);
}

static void encode_merges(const nmk_vocab *v, const char *piece, size_t bytes, nmk_ids *ids) {
    if (bytes <= SHORT_BYTES)
        encode_short(v, piece, bytes, ids);
    else
        encode_long(v, piece, bytes, ids);
}

void nmk_vocab_encode(const nmk_vocab *v, const char *piece, size_t bytes, nmk_ids *ids) {
    int32_t id = nmk_vocab_find(v, piece, bytes);
    if (id < 0 || v->tokens[id].kind == NMK_TOKEN_SPECIAL) { /* text alone never makes a special token */
        encode_merges(v, piece, bytes, ids);
        return;
    }
    if (!v->ignore_merges) {
        unsigned char whole = atomic_load_explicit(&v->whole[id], memory_order_relaxed);
        if (whole != WHOLE_YES) {
            size_t before = ids->count;
            encode_merges(v, piece, bytes, ids);
            whole = ids->count == before + 1 && ids->id[before] == id ? WHOLE_YES : WHOLE_NO;
            atomic_store_explicit(&v->whole[id], whole, memory_order_relaxed);
            return;
        }
    }
    nmk_ids_add(ids, id);
}
