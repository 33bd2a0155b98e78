/* Random numbers that the host and the device must agree on bit for bit: weights without a checkpoint.  One definition,
 * compiled by C (the runtime, the CPU machine) and pasted into the kernel.  Integers up to one multiplication, so no
 * compiler can contract or reorder it. */
#ifndef NMK_RANDOM_H
#define NMK_RANDOM_H

/* A function of this header and of those after it. */
#ifdef __CUDACC__
#define NMK_SHARED static __device__ __forceinline__
#else
#define NMK_SHARED static inline
#endif

/* A value depends only on (key, element of the array, natural row, k), never on the layout, so both machines hold the
 * same numbers. */

/* A bijection of 32 bits in which every input bit reaches every output bit; multipliers found by C. Wellons in a search
 * for low bias (hash-prospector). */
NMK_SHARED unsigned int nmk_mix(unsigned int x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}

/* The stream of one row; element counts matrices in the array: layer * experts + expert, layer that of the model. */
NMK_SHARED unsigned int nmk_random_row(unsigned int key, unsigned int element, unsigned int row) {
    return nmk_mix(nmk_mix(key + element * 0x9e3779b1u) + row * 0x85ebca77u);
}

/* bf16 of (offset + u) * step, u uniform in [-2^23, 2^23), rounded to nearest even. */
NMK_SHARED unsigned short nmk_random_bf16(unsigned int row_key, unsigned int k, int offset, float step) {
    union {
        float f;
        unsigned int u;
    } v;
    v.f = (float)(offset + (int)(nmk_mix(row_key + k * 0xc2b2ae3du) >> 8) - 8388608) * step;
    return (unsigned short)((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}

#endif
