/* The packed form of a weight matrix: the one definition of where an element lies, compiled by C (tests, size
 * computations) and pasted into the kernel, after random.h, which says what NMK_SHARED is.
 *
 * A matrix [rows][K], rows a multiple of 16, K padded with zeros to a multiple of 256, is cut into row tiles of 16
 * rows; a row tile is contiguous: [stage][warp 0..7][tile 0..ts-1][lane 0..31][8 bf16].  One (tile, lane) is what one
 * lane of mma.m16n8k16 takes as its A operand in one 16-byte load.  A row tile gives each warp 2G tiles, G = K / 256.
 * Tiles 2p and 2p+1 of a warp hold the same 32 columns: a lane's 8 columns are contiguous over the two. */
#ifndef NMK_PACKED_H
#define NMK_PACKED_H

/* Which two rows a lane holds, g = lane / 4, c = row tile. */
#define NMK_PACKED_ROWS    0 /* 16c+g and 16c+g+8 */
#define NMK_PACKED_PAIRS   1 /* 16c+2g and 16c+2g+1: what is rotated together */
#define NMK_PACKED_GATE_UP 2 /* gate row 8c+g and up row 8c+g; naturally all gate rows come before all up rows */
#define NMK_PACKED_VECTOR  3 /* not a matrix: one natural row, padded to 1 KiB */
#define NMK_PACKED_HALVES64  4 /* of every 64 rows (a head) i and i+32, i = 8 * (c % 4) + g: so Llama and Qwen rotate */
#define NMK_PACKED_HALVES128 5 /* the same of 128: i and i+64, i = 8 * (c % 8) + g */

NMK_SHARED int nmk_packed_cols(int cols) { return (cols + 255) / 256 * 256; }

/* Bytes of one element (a matrix, or a vector) of an array. */
NMK_SHARED long long nmk_packed_bytes(int rows, int cols, int layout) {
    if (layout == NMK_PACKED_VECTOR) return (cols * 2LL + 1023) / 1024 * 1024;
    return (long long)rows * nmk_packed_cols(cols) * 2;
}

/* Tiles per warp and stage: the largest of 4, 3, 2 that divides the warp's tiles of a row tile, which are even. */
NMK_SHARED int nmk_packed_stage_tiles(int padded_cols) {
    int tiles = padded_cols / 128;
    return tiles % 4 == 0 ? 4 : tiles % 3 == 0 ? 3 : 2;
}

/* First of the 32 columns of the tile pair p (tiles 2p, 2p+1) of a warp. */
NMK_SHARED int nmk_packed_pair_col(int padded_cols, int warp, int p) {
    int ts = nmk_packed_stage_tiles(padded_cols);
    if (ts & 1) return warp * (padded_cols / 8) + p * 32;
    int stage = 2 * p / ts;
    return stage * ts * 128 + warp * ts * 16 + (2 * p % ts) / 2 * 32;
}

/* Index of the 16 bytes of (warp, tile, lane) in a row tile; tile counts over the stages. */
NMK_SHARED int nmk_packed_slot(int padded_cols, int warp, int tile, int lane) {
    int ts = nmk_packed_stage_tiles(padded_cols);
    return ((tile / ts * 8 + warp) * ts + tile % ts) * 32 + lane;
}

/* Where column k of an operand has to be for its products with the packed rows: the tiles in the order of memory, 16
 * places each, and in a tile the two pairs of a lane where an MMA takes them. */
NMK_SHARED int nmk_packed_at(int padded_cols, int k) {
    int ts = nmk_packed_stage_tiles(padded_cols), warp, tile, c = k % 32;
    if (ts & 1) {
        warp = k / (padded_cols / 8), tile = k % (padded_cols / 8) / 32 * 2;
    } else {
        warp = k % (ts * 128) / (ts * 16), tile = k / (ts * 128) * ts + k % (ts * 16) / 32 * 2;
    }
    return nmk_packed_slot(padded_cols, warp, tile + c / 4 % 2, 0) / 2 + c / 2 % 2 * 8 + c / 8 * 2 + c % 2;
}

/* Rows of a head whose halves are rotated together; 0 in other layouts. */
NMK_SHARED int nmk_packed_head(int layout) {
    return layout == NMK_PACKED_HALVES64 ? 64 : layout == NMK_PACKED_HALVES128 ? 128 : 0;
}

/* Natural rows that can be packed by themselves: those of a head, or of half a gate_up tile, else of a row tile. */
NMK_SHARED int nmk_packed_unit(int layout) {
    int head = nmk_packed_head(layout);
    return head ? head : layout == NMK_PACKED_GATE_UP ? 8 : 16;
}

/* Natural row of a lane's first (second = 0) or second row. */
NMK_SHARED int nmk_packed_row(int rows, int layout, int row_tile, int lane, int second) {
    int g = lane >> 2, head = nmk_packed_head(layout), c16 = row_tile * 16;
    if (head) return c16 - c16 % head + c16 % head / 2 + g + second * (head / 2);
    if (layout == NMK_PACKED_PAIRS) return row_tile * 16 + 2 * g + second;
    if (layout == NMK_PACKED_GATE_UP) return row_tile * 8 + g + (second ? rows / 2 : 0);
    return row_tile * 16 + g + 8 * second;
}

#endif
