/* What a step has to read, whoever computes it: weights by their tables, keys and values by the model's shape. */
#include "nmk.h"

#include <assert.h>

#include "generation.h"

uint64_t nmk_step_bytes(int rows, int context) {
    const nmk_generation *n = nmk_generation_for(rows);
    assert(rows >= 1 && n && context >= 0);
    int windowed = context < NMK_WINDOW ? context : NMK_WINDOW;
    uint64_t tokens = (uint64_t)NMK_FULL_LAYERS * (uint64_t)context + (uint64_t)NMK_SLIDING_LAYERS * (uint64_t)windowed;
    uint64_t row_bytes = tokens * NMK_KV_HEADS * NMK_HEAD_DIM * 2 * 2;
    return (uint64_t)n->step_weight_bytes[rows - 1] + (uint64_t)rows * row_bytes;
}
