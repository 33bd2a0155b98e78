/* A schedule: everything about a step that one model's generations can do differently.
 *
 * Each of a program's generations (generation.h) has the one that it was built with.  `nmkgen variant` writes others
 * into a folder (a kernel and its lists, gen/emit/lists.lua), which take the place of the built-in one of their
 * generation without a build.  What such a folder may not change, weights and descriptors, constants and structs, is
 * compared by nmk_abi_hash. */
#ifndef NMK_VARIANT_H
#define NMK_VARIANT_H

#include "abi.h"
#include "err.h"

struct nmk_generation;

typedef struct nmk_variant {
    uint64_t hash; /* of its generation, as its kernel has it */
    int max_tasks; /* of an SM's list, its end included */
    int counters;  /* each has a name in counter_names */
    int ring_stages;
    int part_slots; /* places for what attention's chunks leave to combine */
    int chunks_min, chunks_max, pages_per_chunk, pages_per_long_chunk, own_pages; /* how attention cuts a row's pages */
    const int *in_flight;                                                         /* [columns] by live columns - 1 */
    uint64_t arena_bytes;
    uint64_t exchange_at, exchange_bytes; /* of data that tells that it is there: of its first copy, two to the end */
    int buffer_count;                     /* of a folder's */
    const nmk_buffer *buffers;
    int node_count;
    const nmk_node *nodes;
    const char *const *counter_names;
    char *kernel;   /* text of its megakernel.cu, NULL: the one built in */
    int32_t *lists; /* [NMK_SMS][max_tasks][NMK_DESC_WORDS], NULL: nmk_encode makes them */
} nmk_variant;

extern const nmk_variant nmk_built_in; /* of the generation whose abi.h this is */

/* Reads a folder.  0, *variant is the caller's to free and *generation the one that it is for; or -1 with the file, the
 * line and what was expected. */
int nmk_variant_open(nmk_variant **variant, const struct nmk_generation **generation, const char *folder, nmk_err *e);
void nmk_variant_free(nmk_variant *variant); /* NULL is fine */

/* A variant's lists, for the caller to free; NULL, with a message, where the encoder does not give what was proved. */
int32_t *nmk_variant_lists(const nmk_variant *variant, const struct nmk_generation *generation, nmk_err *e);

/* The number after #define NMK_HASH in a kernel's text; 0: there is none. */
uint64_t nmk_kernel_hash(const char *text);

#endif
