/* A generation: what one run of nmkgen emitted.  A program holds several of one model: steps, which differ in their
 * number of columns, and launches that take chunks of prompts and no more.
 *
 * All of them have the same weights, packed alike, the same pages of keys and values and page tables, and descriptors
 * and structs of the same shape, so an engine can run any of them on what it has loaded.  What differs is a field here:
 * the runtime, compiled once, takes none of it from abi.h, which is that of the generation the spec itself asks for
 * (nmk_generations[0]).  encoder.c, refvm.c, built_in.c, kernel_source.c and generation.c are compiled with each
 * generation's own abi.h, and of each but the first only nmk_generation is seen by the others (Makefile). */
#ifndef NMK_GENERATION_H
#define NMK_GENERATION_H

#include "refvm.h"
#include "variant.h"

typedef struct nmk_generation {
    int prefill_tokens;     /* of prompts that a launch takes; 0: it is a step */
    int spans, key_tokens;  /* of such a launch: most sequences, and most tokens that they see together */
    int columns;            /* of a step: NMK_COLUMNS */
    int positions;          /* of one sequence that a step may compute */
    int tickets;            /* each has two words, of even and odd epochs */
    int threads;            /* of a block, */
    int smem_bytes;         /* and its shared memory */
    uint64_t control_bytes; /* the control block: columns first, then the stop ids; of prefill struct nmk_chunk, */
    uint64_t chunk_spans_at, chunk_tokens_at; /* and where in that its spans and tokens are */
    const uint64_t *hash, *abi_hash, *weights_hash;
    const nmk_variant *built_in; /* its schedule, */
    const nmk_buffer *buffers;   /* and where buffers are in it */
    const int *buffer_count;
    const char *kernel, *kernel_end;
    const int64_t *step_weight_bytes; /* [columns] by live columns - 1 */
    int (*encode)(int32_t *lists, int32_t counts[NMK_SMS]);
    int (*vm_step)(struct nmk_vm *vm, char *err, size_t err_len);
    int (*vm_begin)(struct nmk_vm *vm, char *err, size_t err_len);
    int (*vm_move)(struct nmk_vm *vm, int draws, char *err, size_t err_len);
    void (*vm_close)(struct nmk_vm *vm);
} nmk_generation;

/* The spec's own first, then the others by their columns. */
extern const nmk_generation *const nmk_generations[];
extern const int nmk_generation_count;

/* The one that takes prompts; NULL: they go through steps. */
extern const nmk_generation *const nmk_prefill;

/* For `rows` sequences together: the first one if it holds them (0: whatever it holds), else that with the fewest
 * columns that does.  NULL: none does. */
const nmk_generation *nmk_generation_for(int rows);

/* "8, 16 and 64", of their columns: rows that programs of this model can be opened for. */
void nmk_generation_list(char *text, size_t size);

#endif
