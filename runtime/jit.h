/* CUDA source text to a cubin: NVRTC, with a cache on disk.
 *
 * Owns: the compiler options, reading what the compiler says about resources, the cache.  A cache entry is used only if
 * its length and hashes agree; anything else about the cache (unwritable, corrupt, gone) costs time, never an error. */
#ifndef NMK_JIT_H
#define NMK_JIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "util.h"

typedef struct {
    const char *name;   /* file name in messages where the source has no #line */
    const char *source; /* 0-terminated */
    size_t source_bytes;
    const char *arch; /* "sm_90a" */
    bool allow_spills;
    bool no_cache;                  /* neither read nor write */
    void (*on_compile)(void *user); /* before what takes seconds; NULL is fine */
    void *user;
} nmk_jit_request;

typedef struct {
    void *cubin;
    size_t cubin_bytes;
    int registers;                                        /* most of any function */
    int spill_store_bytes, spill_load_bytes, stack_bytes; /* summed over all functions */
    int serialized;                                       /* functions whose wgmma wait for each other */
    size_t text_bytes;                                    /* machine code, all functions */
    size_t smem_bytes;                                    /* static shared memory, all functions */
    bool cached;
    double seconds;  /* the whole call */
    char *log;       /* the compiler's warnings and resource lines */
    char cache[256]; /* why the cache did not work, or "" */
} nmk_jit_result;

/* Fills *result: from the cache, else by compiling (NVRTC is opened in both cases: its version is part of the key).
 * 0, or -1 with the compiler's first errors in e and nothing to free.  Spills are an error unless allowed, and so is
 * wgmma that ptxas had to serialize: both cost a kernel most of its speed. */
int nmk_jit_compile(nmk_jit_result *result, const nmk_jit_request *request, nmk_err *e);
void nmk_jit_result_free(nmk_jit_result *result); /* zeroed or NULL is fine */

/* The text of the kernel that is a step and behind it a chunk, of the texts of both: each is a part of it when
 * NMK_MIXED is defined.  For the caller to free. */
char *nmk_mixed_source(const char *step, const char *chunk);

/* Section sizes of a cubin; false if it is not a 64-bit ELF file with readable section headers. */
bool nmk_cubin_sizes(const void *cubin, size_t bytes, size_t *text_bytes, size_t *smem_bytes);

/* Reads registers, spills, stack and what was serialized out of ptxas -v lines; false if there are none. */
bool nmk_ptxas_parse(const char *log, nmk_jit_result *result);

/* The emitted megakernel.cu of one generation (kernel_source.c). */
extern const char nmk_kernel_source[], nmk_kernel_source_end[]; /* end: the terminating 0 */

#endif
