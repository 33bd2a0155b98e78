/* Weights: from a checkpoint's safetensors files, or random, into the weight arena of either machine.
 *
 * Nothing is believed: a file may be truncated, hostile, or of another model.  Opening validates every header against
 * the files and against the generated tables; after that, loading can fail only if a file changes or a device does.
 *
 * The arena of both machines has every matrix at the same place (abi.h: kib, layer_kib, expert_kib).  On the CPU it
 * holds plain [rows][cols] there, on the GPU the packed form (templates/packed.h), which is never smaller.
 *
 * Files are read with pread, not mapped: a file that shrinks is then an error and not a signal, several threads read,
 * and what was read does not count as this process's memory. */
#ifndef NMK_WEIGHTS_H
#define NMK_WEIGHTS_H

#include <stdint.h>

#include "abi.h"
#include "cuda.h"
#include "util.h"

typedef struct {
    const nmk_array *arrays;
    int array_count;
    const nmk_tensor *tensors;
    int tensor_count;
} nmk_weight_tables;

/* Those that were emitted with this program. */
static inline nmk_weight_tables nmk_model_tables(void) {
    return (nmk_weight_tables){nmk_arrays, nmk_array_count, nmk_tensors, nmk_tensor_count};
}

/* Where a matrix (or vector) starts in the arena, in bytes; layer counts in the model. */
static inline uint64_t nmk_array_at(const nmk_array *a, int layer, int expert) {
    return ((uint64_t)a->kib + (uint64_t)(layer - a->layer0) * (uint64_t)a->layer_kib +
            (uint64_t)expert * (uint64_t)a->expert_kib) *
           1024;
}

typedef struct nmk_checkpoint nmk_checkpoint;

/* Opens `dir`: model.safetensors, else the shards that model.safetensors.index.json lists.  Reads headers only, and
 * twins: tensors that repeat another one, as some exporters write a tied head.  The tables must outlive the
 * checkpoint.  0, or -1 with up to ten mistakes, a line each. */
int nmk_checkpoint_open(nmk_checkpoint **checkpoint, const char *dir, const nmk_weight_tables *tables, nmk_err *e);
void nmk_checkpoint_close(nmk_checkpoint *c);

/* Bytes that loading reads. */
uint64_t nmk_checkpoint_bytes(const nmk_checkpoint *c);

/* Told now and then, on the thread that loads.  NULL is fine. */
typedef void nmk_progress(void *user, uint64_t done, uint64_t total);

/* Into the CPU machine's arena. */
int nmk_checkpoint_load_host(const nmk_checkpoint *c, void *arena, nmk_progress *progress, void *user, nmk_err *e);

/* Into the GPU's arena, through pinned buffers and the kernel nmk_pack of `module`; reading, copying and packing
 * overlap.  The GPU's context is current on the calling thread.  Returns when all of it is there; after -1 the arena is
 * half-way. */
int nmk_checkpoint_load_device(const nmk_checkpoint *c, CUmodule module, CUdeviceptr arena, nmk_progress *progress,
                               void *user, nmk_err *e);

/* Weights of a model that nobody trained, the same on both machines for the same seed: matrices of variance 1/cols (a
 * quarter of that where they write the residual), vectors 1 +- 0.1, biases of deviation 0.5. */
void nmk_random_load_host(const nmk_weight_tables *tables, void *arena, uint64_t seed);
int nmk_random_load_device(const nmk_weight_tables *tables, CUmodule module, CUdeviceptr arena, uint64_t seed,
                           nmk_err *e);

/* Finite values of variance 1/4 for KV pages that no prompt wrote. bytes: a multiple of 16. */
int nmk_random_fill_kv(CUmodule module, CUdeviceptr pool, uint64_t bytes, uint64_t seed, nmk_err *e);

/* The arguments of nmk_random_bf16 for an array; exposed for tests of the kernels. */
typedef struct {
    unsigned key;
    int offset;
    float step;
} nmk_random_spec;

nmk_random_spec nmk_random_spec_of(const nmk_array *a, uint64_t seed);

#endif
