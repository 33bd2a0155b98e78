/* A model's prefill launches on the CPU machine, for a test that has an engine for its steps: weights, pages and tables
 * are the engine's, the arena is this one's own. */
#ifndef NMK_TESTS_MODELS_HELPER_PREFILL_H
#define NMK_TESTS_MODELS_HELPER_PREFILL_H

#include <stddef.h>
#include <stdint.h>

typedef struct prefill prefill;

typedef struct {
    const void *weights, *rope;
    void *kv_full, *kv_sliding;
    const int32_t *table_full, *table_sliding;
    int table_stride;
} prefill_memory;

/* Some consecutive tokens of a row; pages hold what is before pos. */
typedef struct {
    const int32_t *token;
    int count, pos, slot;
} prefill_span;

prefill *prefill_open(const prefill_memory *memory); /* never NULL */
void prefill_close(prefill *p);
int prefill_tokens(void); /* most of a chunk */

/* Runs one chunk on buffers of NaN.  seed: the order of the SMs' tasks, by one thread; 0: two threads in any order.
 * 0, or -1 with the machine's message. */
int prefill_run(prefill *p, const prefill_span *span, int spans, uint64_t seed, char *why, size_t why_len);

#endif
