/* The text of templates/pack.cu compiled as C: the kernels as functions of one thread, run by threads that take turns. */
#ifndef NMK_TESTS_WEIGHTS_KERNELS_H
#define NMK_TESTS_WEIGHTS_KERNELS_H

#pragma GCC optimize("no-strict-aliasing")

typedef struct {
    unsigned x, y, z, w;
} uint4;
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return (uint4){x, y, z, w}; }
static struct { unsigned x; } gridDim, blockDim, blockIdx, threadIdx;

#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#define NMK_KERNEL static __attribute__((unused)) void
#include "../../templates/random.h"
#include "../../templates/packed.h"
#include "../../templates/pack.cu"

#define GRID(blocks, threads, call)                                              \
    do {                                                                         \
        gridDim.x = (blocks), blockDim.x = (threads);                            \
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)               \
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) call; \
    } while (0)

#endif
