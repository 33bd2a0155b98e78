/* For tests that compare the GPU with the CPU machine: the two forms of a page, and how far numbers are apart. */
#ifndef NMK_TESTS_GPU_HELPER_PAGES_H
#define NMK_TESTS_GPU_HELPER_PAGES_H

#include "bf16.h"
#include "gpu/helper.h"

/* bf16 index, in the streamed half page of K (or V), of dim d of token r. */
static int streamed(int v, int token, int d) {
    const int tile = (token >> 4) * (NMK_HEAD_DIM / 16), r = token & 15, m = d & 15;
    if (v)
        return ((tile + d / 16) * 512 + ((m & 7) * 4 + ((r & 7) >> 1)) * 16 + (r >> 3) * 8 + (m >> 3) * 4) / 2 +
               (r & 1);
    return ((tile + d / 32 * 2 + (d >> 2 & 1)) * 512 + ((r & 7) * 4 + (d >> 3 & 3)) * 16 + (d & 2) * 4 + (r >> 3) * 4) /
               2 +
           (d & 1);
}

/* The GPU's pool into the CPU's. */
__attribute__((unused)) static int copy_pool(nmk_engine *gpu, nmk_engine *cpu, int sliding, nmk_err *e) {
    const size_t bytes = nmk_kv_pool_bytes(&gpu->kv, sliding), half = NMK_KV_HEAD_BYTES / 4;
    if (!bytes) return 0;
    uint16_t *from = xmalloc(bytes), *to = xmalloc(bytes);
    const uint64_t source = sliding ? gpu->params.kv_sliding : gpu->params.kv_full;
    const uint64_t target = sliding ? cpu->params.kv_sliding : cpu->params.kv_full;
    int rc = gpu->machine->calls->read(gpu->machine, from, source, bytes, e);
    for (size_t h = 0; h < bytes / 2 / half; h++)
        for (int t = 0; t < NMK_PAGE_TOKENS; t++)
            for (int d = 0; d < NMK_HEAD_DIM; d++)
                to[h * half + (size_t)(t * NMK_HEAD_DIM + d)] = from[h * half + (size_t)streamed(h & 1, t, d)];
    if (!rc) rc = cpu->machine->calls->write(cpu->machine, target, to, bytes, e);
    free(from), free(to);
    return rc;
}

typedef struct {
    double difference, norm, worst;
} distance;

static void add(distance *d, float got, float want) {
    const double x = (double)got - (double)want;
    if (!(fabs(x) < 1e30))
        d->worst = INFINITY, d->difference = INFINITY;
    else
        d->difference += x * x, d->norm += (double)want * (double)want, d->worst = fmax(d->worst, fabs(x));
}

static double relative(const distance *d) { return d->norm > 0 ? sqrt(d->difference / d->norm) : sqrt(d->difference); }

#endif
