/* The reference machine: runs the encoded task lists of one step on the CPU, with the ops' plain C references.
 *
 * It knows nothing of a model: lists, buffers and op references come from build/<model>/.  What it shares with the GPU
 * is the lists themselves, the arena's layout and the waits; weights and KV pages are in natural row-major order here.
 *
 * An SM is two walks over its list: one does load, compute and store of a task at once, the other does the tasks whose
 * only role is `help`, so that a waiting helper does not hold up the rest.  Which walk goes next is drawn from `seed`
 * (threads <= 1), or left to the threads (threads > 1).  The results never depend on it, unless a wait is missing. */
#ifndef NMK_REFVM_H
#define NMK_REFVM_H

#include <stddef.h>
#include <stdint.h>

#include "abi.h"
#include "variant.h"

enum {
    NMK_COUNTER_WORDS = 32, /* one counter per 128 bytes, as on the GPU */
    NMK_VM_THREADS = 64     /* more are not used */
};

struct nmk_vm_state;
struct nmk_chunk;

struct nmk_vm {
    const nmk_variant *variant; /* NULL: the schedule built in; the same in all steps */
    const int32_t *lists;       /* [sms][max_tasks][32] */
    const uint8_t *weights;     /* a matrix starts where its packed form does, but is plain [rows][columns] */
    uint8_t *arena;
    uint8_t *kv_full, *kv_sliding; /* bf16 [page][layer of the kind][kv head][K|V][64][head_dim] */
    struct nmk_control *control;
    const struct nmk_chunk *chunk;             /* of a launch that takes prompts, which has no control; else NULL */
    const int32_t *table_full, *table_sliding; /* [slot][table_stride] page ids, by position / 64 */
    int table_stride;
    const float *rope;           /* [position][head_dim / 2] pairs cos, sin */
    struct nmk_adjust *adjust;   /* [slot][vocab] */
    const uint32_t *masks;       /* [columns][NMK_MASK_WORDS]; may be given while a step waits for them */
    const uint32_t *masks_until; /* [columns]: the epoch up to which they are given */
    struct nmk_tops *tops;       /* [columns], of those that ask for log-probabilities */
    int32_t *out;                /* [columns]: the token that this step sampled, or -1 */
    uint32_t *counters;          /* [counters][NMK_COUNTER_WORDS], zero before the first step and only growing */
    uint32_t *tickets;           /* [NMK_TICKETS][2][NMK_COUNTER_WORDS] of even and odd epochs, zero before the first */
    int epoch;                   /* 1, 2, ...: one more at every step */
    /* Of a launch that follows another one in the same kernel: what that has as `ended`.  An SM begins when its walks
     * are at their ends there.  NULL: it follows none. */
    const uint8_t *before;
    uint8_t *ended;             /* NULL, or [NMK_SMS]: walks of each SM that are at their end */
    int threads;                /* worker threads; 0 and 1: the caller alone, in the order that seed gives */
    uint64_t seed;              /* any value; the same value walks the same way */
    const uint8_t *forced;      /* NULL, or another machine's arena: its router logits then choose the experts */
    struct nmk_vm_state *state; /* NULL at first; nmk_vm_close frees it */
    uint64_t (*trace)[NMK_TRACE_STAMPS]; /* NULL, or [sms][max_tasks], zeroed: nmk_now_ns at the points where the kernel
                                          * stamps its clock */
    uint64_t filters; /* a bit for each column that is cut, as the step began: at its end columns may have ended */
};

/* Runs one step.  0, or -1 with a message: a deadlock (naming the tasks that wait) or a list that makes no sense; the
 * buffers and counters are then half-way. */
int nmk_vm_step(struct nmk_vm *vm, char *err, size_t err_len);

/* The same on the caller's thread and in pieces, so that the pieces of two launches may take turns: move makes so many
 * draws more. */
enum {
    NMK_VM_MORE = 1, /* it is not over */
    NMK_VM_SHUT = 2  /* neither, and the launch before has to go on first */
};
int nmk_vm_begin(struct nmk_vm *vm, char *err, size_t err_len);
int nmk_vm_move(struct nmk_vm *vm, int draws, char *err, size_t err_len);

/* Frees what the steps kept between them; the buffers stay the caller's. */
void nmk_vm_close(struct nmk_vm *vm);

/* Gumbel noise of one (seed, position, token).  The device takes the logarithms of the same uniform numbers
 * (templates/sampling.h), so the two agree but for rounding. */
float nmk_gumbel(uint32_t seed_lo, uint32_t seed_hi, int32_t pos, int32_t id);

#endif
