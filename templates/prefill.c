/* What the references of prefill ops reach: the chunk, what its spans see, and how rows lie that a product takes.
 *
 * A reference has the SM's share of a node's units.  Which units those are changes no bit: every sum goes over its
 * terms in one order, so a token's numbers depend neither on how its prompt was cut into chunks nor on neighbours. */

/* Tokens that a reference takes at a time, rows of weights likewise: what a core's caches hold. */
enum { CHUNK_TOKENS = NMK_PREFILL_TOKENS, BLOCK = 64, SLAB = 128, KEY_TILE = 128 };

/* A span as a layer's attention sees it.  Its keys in the scratch begin at `base`, with that of position `low`; both
 * are multiples of KEY_TILE, so that tiles are cut alike wherever a chunk begins. */
struct seen {
    int first, count, pos, slot;
    int lo;   /* first position that any of its tokens sees */
    int end;  /* behind the last one */
    int low, base, tiles;
};

static struct seen seen_by(const struct nmk_chunk *chunk, int span, int sliding, int window)
{
    struct seen s = {0};
    for (int i = 0, base = 0; i <= span; i++, base += s.tiles * KEY_TILE) {
        const struct nmk_span *of = &chunk->span[i];
        s = (struct seen){.first = of->first, .count = of->count, .pos = of->pos, .slot = of->slot, .base = base};
        if (sliding && s.pos + 1 > window) s.lo = s.pos + 1 - window;
        s.end = s.pos + s.count, s.low = s.lo / KEY_TILE * KEY_TILE;
        s.tiles = (s.end - s.low + KEY_TILE - 1) / KEY_TILE;
    }
    return s;
}

/* Tokens that SM `sm` routes: first .. *end - 1. */
static int routed(int tokens, int sm, int *end)
{
    const int each = (tokens + NMK_SMS - 1) / NMK_SMS, first = sm * each < tokens ? sm * each : tokens;
    *end = first + each < tokens ? first + each : tokens;
    return first;
}

/* K or V of position `pos`, as kv_page: [64][head_dim]. */
static uint16_t *page_row(const struct nmk_vm *vm, int slot, int pos, int sliding, int layers, int layer, int kv_heads,
                          int kv_head, int is_v)
{
    const struct nmk_column column = {.slot = slot};
    uint16_t *page = kv_page(vm, &column, pos, sliding, layers, layer, kv_heads, kv_head);
    return page + (is_v * PAGE + pos % PAGE) * HEAD_DIM;
}

/* ---- rows that a product takes ---- */

/* Where each of `width` columns is among the places of a row (templates/packed.h). */
static void find_places(uint16_t *place, int width)
{
    for (int k = 0; k < width; k++) place[k] = (uint16_t)nmk_packed_at(nmk_packed_cols(width), k);
}

/* Element of a row's place, in blocks of 64 rows x 64 places, in those of 8 x 8. */
static inline size_t operand_at(int width, size_t row, int place)
{
    const size_t block = row / 64 * (size_t)(nmk_packed_cols(width) / 64) + (size_t)place / 64;
    return block * 4096 + (row % 64 / 8 * 8 + (size_t)place % 64 / 8) * 64 + row % 8 * 8 + (size_t)place % 8;
}

/* A row's columns in their own order. */
static void operand_row(uint16_t *to, const uint16_t *from, size_t row, int width, const uint16_t *place)
{
    for (int k = 0; k < width; k += 2) memcpy(to + k, from + operand_at(width, row, place[k]), 4);
}

/* Element of the scratch of keys, and of values, of one kv head. */
static inline size_t key_at(int kv_head, int key, int dim)
{
    return (((size_t)kv_head * (NMK_KEY_TOKENS / 8) + (size_t)key / 8) * (HEAD_DIM / 8) + (size_t)dim / 8) * 64 +
           (size_t)(key % 8 * 8 + dim % 8);
}

static inline size_t value_at(int kv_head, int key, int dim)
{
    const size_t tile = (size_t)kv_head * (NMK_KEY_TOKENS / KEY_TILE) + (size_t)key / KEY_TILE;
    return ((tile * (HEAD_DIM / 8) + (size_t)dim / 8) * (KEY_TILE / 8) + (size_t)key % KEY_TILE / 8) * 64 +
           (size_t)(dim % 8 * 8 + key % 8);
}
