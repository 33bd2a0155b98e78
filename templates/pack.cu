// Kernels that fill the weight arena, run at load time only.  Pasted after random.h and packed.h, which define what
// they write.  Blocks of at most 256 threads, as many as you like: every kernel strides over its work, which is
// less than 2^31 items (64 GiB of weights) a launch.

#ifndef NMK_MIXED // that module takes steps, and loads nothing
#ifndef NMK_KERNEL // tests compile this text as C, with threads that take turns
#define NMK_KERNEL extern "C" __global__ void __launch_bounds__(256)
#endif

// Item = one lane's share of one tile pair of one row tile: 8 columns of its two rows, 16 bytes in each of two tiles.
// Lanes are fastest, so a warp writes 512 contiguous bytes twice and reads whole 32-byte sectors.
typedef struct {
    int lane, warp, pair, row_tile;
} nmk_pack_item;

NMK_SHARED nmk_pack_item nmk_pack_item_of(unsigned int index, int padded_cols) {
    nmk_pack_item it;
    it.lane = (int)(index & 31);
    it.warp = (int)(index >> 5) & 7;
    unsigned int granules = padded_cols / 256;
    it.pair = (int)((index >> 8) % granules);
    it.row_tile = (int)((index >> 8) / granules);
    return it;
}

// 8 columns from k on of a row of src, zeros past the end of either.
NMK_SHARED uint4 nmk_pack_read(const unsigned short *src, int row, int count, int k, int cols) {
    return k < cols && row < count ? *(const uint4 *)(src + (long long)row * cols + k) : make_uint4(0, 0, 0, 0);
}

// Rows first..first+count-1 (natural order) of a matrix [rows][cols] go to their places in its packed form dst.
// src: those rows, contiguous, 16-byte aligned.  cols is a multiple of 8 (of a vector: anything).  first and count are
// multiples of nmk_packed_unit, and of gate_up within one half; but where first+count comes short of rows by less than
// that, the rest is zero.  Launches for the two halves write disjoint bytes.  Of a vector first and count are elements,
// and what reaches the end zeroes what pads it.
NMK_KERNEL nmk_pack(unsigned short *dst, const unsigned short *src, int rows, int cols, int first, int count,
                    int layout) {
    unsigned int stride = gridDim.x * blockDim.x, index = blockIdx.x * blockDim.x + threadIdx.x;
    if (layout == NMK_PACKED_VECTOR) {
        unsigned int n = first + count == cols ? nmk_packed_bytes(rows, cols, layout) / 2 - first : count;
#pragma unroll 1
        for (; index < n; index += stride)
            dst[first + index] = index < (unsigned int)count ? src[index] : (unsigned short)0;
        return;
    }
    int padded = nmk_packed_cols(cols), tile_rows = layout == NMK_PACKED_GATE_UP ? 8 : 16;
    int up = layout == NMK_PACKED_GATE_UP && first >= rows / 2;
    int first_tile = (up ? first - rows / 2 : first) / tile_rows;
    unsigned int items = (unsigned int)((count + tile_rows - 1) / tile_rows) * padded;
#pragma unroll 1 // code size counts, these run once
    for (; index < items; index += stride) {
        nmk_pack_item it = nmk_pack_item_of(index, padded);
        int k = nmk_packed_pair_col(padded, it.warp, it.pair) + 8 * (it.lane & 3);
        int row_tile = first_tile + it.row_tile;
        unsigned int *tile = (unsigned int *)dst + (long long)row_tile * 16 * (padded / 2);
        unsigned int *even = tile + nmk_packed_slot(padded, it.warp, 2 * it.pair, it.lane) * 4;
        unsigned int *odd = tile + nmk_packed_slot(padded, it.warp, 2 * it.pair + 1, it.lane) * 4;
        if (layout == NMK_PACKED_GATE_UP) {
            int row = nmk_packed_row(rows, layout, row_tile, it.lane, up) - first;
            uint4 v = nmk_pack_read(src, row, count, k, cols);
            even[up] = v.x, even[2 + up] = v.y, odd[up] = v.z, odd[2 + up] = v.w;
        } else {
            int row_a = nmk_packed_row(rows, layout, row_tile, it.lane, 0) - first;
            int row_b = nmk_packed_row(rows, layout, row_tile, it.lane, 1) - first;
            uint4 a = nmk_pack_read(src, row_a, count, k, cols);
            uint4 b = nmk_pack_read(src, row_b, count, k, cols);
            *(uint4 *)even = make_uint4(a.x, b.x, a.y, b.y);
            *(uint4 *)odd = make_uint4(a.z, b.z, a.w, b.w);
        }
    }
}

NMK_SHARED unsigned int nmk_random_two(unsigned int row_key, int k, int offset, float step) {
    unsigned int low = nmk_random_bf16(row_key, k, offset, step), high = nmk_random_bf16(row_key, k + 1, offset, step);
    return low | high << 16;
}

// A run of `elements` matrices (or vectors), the first of which is number element0 of the random stream.
NMK_KERNEL nmk_random_fill(unsigned short *dst, int elements, int element0, int rows, int cols, int layout,
                           unsigned int key, int offset, float step) {
    unsigned int stride = gridDim.x * blockDim.x, index = blockIdx.x * blockDim.x + threadIdx.x;
    if (layout == NMK_PACKED_VECTOR) {
        unsigned int width = nmk_packed_bytes(rows, cols, layout) / 2;
#pragma unroll 1
        for (; index < width * elements; index += stride) {
            int k = (int)(index % width);
            unsigned int row_key = nmk_random_row(key, element0 + index / width, 0);
            dst[index] = k < cols ? nmk_random_bf16(row_key, k, offset, step) : (unsigned short)0;
        }
        return;
    }
    int padded = nmk_packed_cols(cols), row_tiles = rows / 16;
    unsigned int items = (unsigned int)(elements * row_tiles) * padded;
#pragma unroll 1
    for (; index < items; index += stride) {
        nmk_pack_item it = nmk_pack_item_of(index, padded);
        int k = nmk_packed_pair_col(padded, it.warp, it.pair) + 8 * (it.lane & 3);
        int element = element0 + it.row_tile / row_tiles, row_tile = it.row_tile % row_tiles;
        unsigned int row_a = nmk_random_row(key, element, nmk_packed_row(rows, layout, row_tile, it.lane, 0));
        unsigned int row_b = nmk_random_row(key, element, nmk_packed_row(rows, layout, row_tile, it.lane, 1));
        uint4 *tile = (uint4 *)dst + (long long)it.row_tile * 16 * (padded / 8);
#pragma unroll 1
        for (int odd = 0; odd < 2; odd++, k += 4) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (k < cols) {
                v.x = nmk_random_two(row_a, k, offset, step), v.z = nmk_random_two(row_a, k + 2, offset, step);
                v.y = nmk_random_two(row_b, k, offset, step), v.w = nmk_random_two(row_b, k + 2, offset, step);
            }
            tile[nmk_packed_slot(padded, it.warp, 2 * it.pair + odd, it.lane)] = v;
        }
    }
}

// Finite values for KV pages in benchmarks: n bf16 (a multiple of 8), whatever they mean.
NMK_KERNEL nmk_fill_kv(unsigned short *dst, long long n, unsigned int key, float step) {
    long long stride = (long long)gridDim.x * blockDim.x, index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
#pragma unroll 1
    for (; index < n / 8; index += stride) {
        unsigned int row_key = nmk_random_row(key, (unsigned int)(index >> 32), (unsigned int)index);
        ((uint4 *)dst)[index] = make_uint4(nmk_random_two(row_key, 0, 0, step), nmk_random_two(row_key, 2, 0, step),
                                           nmk_random_two(row_key, 4, 0, step), nmk_random_two(row_key, 6, 0, step));
    }
}
#endif
