/* A machine runs the model's steps: a GPU (gpu.c) or the CPU reference machine (cpu.c).
 *
 * Addresses are 64-bit numbers in the machine's own memory; memory starts zeroed.  Steps and queued writes take effect
 * in the order they were queued.  Everything else waits for what is queued first. */
#ifndef NMK_MACHINE_H
#define NMK_MACHINE_H

#include "abi.h"
#include "generation.h"
#include "jit.h"
#include "nmk.h"
#include "util.h"
#include "variant.h"
#include "weights.h"

typedef struct nmk_machine nmk_machine;

/* Generations that a machine launches: that of steps, with which it is opened, and that of chunks of prompts.  And a
 * kernel that is both, a step and behind it a chunk. */
enum { NMK_STEPS, NMK_CHUNKS, NMK_LAUNCHES, NMK_MIXED = NMK_LAUNCHES, NMK_KERNELS };

enum { NMK_NOT_WRITTEN = INT32_MIN }; /* a token's word in `out` before its step */

/* Of one queued write, at most: a whole table of adjustments. */
enum { NMK_MASK_RING = 4 }; /* masks of a column that are there at once */
enum { NMK_QUEUED_BYTES = NMK_VOCAB * (int)sizeof(nmk_adjust) };

struct nmk_machine {
    const struct nmk_machine_calls *calls;
    char name[128]; /* for users */
    bool on_gpu;
    bool lost;                          /* nothing works any more in this process: not even giving memory back */
    int most_ahead;                     /* steps worth queueing */
    uint64_t memory_bytes, taken_bytes; /* in all; given out by alloc so far */
    int sms;                            /* of the GPU */
    double nominal_bytes_per_s;         /* likewise; 0: not known */
    int32_t *out;                       /* [NMK_OUT_RING][columns], readable by the host while steps run */
    nmk_tops *tops;                     /* [NMK_OUT_RING][columns], likewise */
    volatile nmk_hang *hang;            /* [NMK_LAUNCHES][NMK_HANGS], likewise */
    uint32_t *masks,
        *masks_until; /* [NMK_MASK_RING][columns][NMK_MASK_WORDS]; [NMK_MASK_RING][NMK_SMS][NMK_MASK_FLAGS] */
    /* for nmk_params */
    uint64_t out_address, times_address, tops_address, hang_address, masks_address, masks_until_address;
    nmk_jit_result kernel[NMK_KERNELS]; /* of the GPU: resources; log and cubin already freed */
    double kernel_seconds;
};

struct nmk_machine_calls {
    void (*close)(nmk_machine *);
    int (*enter)(nmk_machine *, nmk_err *); /* before other calls on this thread */
    /* Zeroed.  Launches that take prompts count on it: what pads the rows of an operand is never written, and
     * multiplied by zeros, so it has to be a number. */
    int (*alloc)(nmk_machine *, uint64_t *address, uint64_t bytes, const char *what, nmk_err *);
    void (*release)(nmk_machine *, uint64_t address); /* 0 is fine */
    uint64_t (*free_bytes)(nmk_machine *);
    int (*read)(nmk_machine *, void *dst, uint64_t src, uint64_t bytes, nmk_err *);
    int (*write)(nmk_machine *, uint64_t dst, const void *src, uint64_t bytes, nmk_err *); /* src is free afterwards */
    int (*fill)(nmk_machine *, uint64_t dst, int byte, uint64_t bytes, nmk_err *);         /* queued */
    /* At most NMK_QUEUED_BYTES; src is free afterwards. */
    int (*queue_write)(nmk_machine *, uint64_t dst, const void *src, uint64_t bytes, nmk_err *);
    /* The generation that NMK_CHUNKS launches; it must outlive the machine. */
    int (*load_chunks)(nmk_machine *, const nmk_generation *, const nmk_options *, nmk_err *);
    /* After it, the kernel that runs steps of this variant and chunks in one launch. */
    int (*load_mixed)(nmk_machine *, const nmk_variant *, const nmk_options *, nmk_err *);
    /* Queues a launch of NMK_STEPS or NMK_CHUNKS; its number is the count of launches queued before it.  Both count as
     * steps below. */
    int (*queue_step)(nmk_machine *, int launch, const nmk_params *, nmk_err *);
    /* Both in one launch, which counts as two.  Each SM begins with the chunk when it is done with the step. */
    int (*queue_mixed)(nmk_machine *, const nmk_params *step, const nmk_params *chunk, nmk_err *);
    /* Returns when launch `number` has ended, or with words, which a step writes, when none of them is NMK_NOT_WRITTEN
     * any more: it may still be about to end, and a chunk behind it may run.  -1: it failed and the machine is lost. */
    int (*wait_step)(nmk_machine *, uint64_t number, const volatile int32_t *words, int count, nmk_err *);
    int (*wait_all)(nmk_machine *, nmk_err *);
    /* Milliseconds from the end of the step before, or of what was queued between them, to the end of this one; of the
     * last 64 steps, waited for.  0: not known. */
    double (*step_ms)(nmk_machine *, uint64_t number);
    /* Weights into the arena at `address`. */
    int (*load_weights)(nmk_machine *, const nmk_checkpoint *, uint64_t address, const nmk_options *, nmk_err *);
    int (*random_kv)(nmk_machine *, uint64_t address, uint64_t bytes, uint64_t seed, nmk_err *);
};

/* An nmk_progress of a machine's load_weights: user is the nmk_options. */
void nmk_machine_progress(void *options, uint64_t done, uint64_t total);

/* The variant is the schedule of the generation whose lists it will be given; it must outlive the machine. */
int nmk_gpu_machine_open(nmk_machine **machine, int index, const nmk_generation *generation, const nmk_variant *variant,
                         const nmk_options *options, nmk_err *e);
int nmk_cpu_machine_open(nmk_machine **machine, const nmk_generation *generation, const nmk_variant *variant,
                         const nmk_options *options, nmk_err *e);

/* CPU only: the experts of later steps are chosen by the router logits of this arena (NMK_ARENA_BYTES, kept by the
 * caller), NULL: by its own. */
void nmk_cpu_machine_force(nmk_machine *machine, const void *arena);
void nmk_cpu_machine_force_chunks(nmk_machine *machine, const void *arena); /* the same of NMK_CHUNKS */

#endif
