/* What tests and benchmarks may do with an engine beyond nmk.h: single steps, every buffer, every knob. */
#ifndef NMK_ENGINE_H
#define NMK_ENGINE_H

#include <pthread.h>

#include "abi.h"
#include "generation.h"
#include "kv.h"
#include "machine.h"
#include "nmk.h"
#include "variant.h"

struct nmk_engine {
    nmk_machine *machine;
    const nmk_generation *generation; /* what runs, */
    int columns, rows;                /* its columns; sequences at once, no more than those */
    const nmk_variant *variant;       /* and its schedule */
    nmk_variant *opened;              /* the same if it came from a folder */
    nmk_params params;                /* of the next step, apart from what queue_step sets */
    struct {
        const nmk_generation *generation; /* of launches that take chunks of prompts; NULL: steps feed them */
        nmk_params params;                /* what these have of their own: arena, lists, counters, chunk block ... */
        int32_t *lists;
        uint8_t *block; /* host copy of the chunk */
    } prefill;
    bool mixed; /* a step and a chunk go in one launch */
    struct {
        int slot, remaining; /* slot -1: it is idle; remaining: of its tokens, as of the steps queued so far */
        uint64_t since;      /* the step before which it was set */
    } on[NMK_ROWS];          /* what the host knows of the columns */
    int32_t control_stop[NMK_STOP_IDS];
    int control_stops; /* what ends columns */
    nmk_kv kv;
    int32_t *lists; /* host copy */
    int stop_ids[NMK_STOP_IDS], stop_count;
    int max_len, vocab;
    int steps_ahead, in_flight;      /* in_flight 0: by the number of live columns */
    uint64_t steps;                  /* queued on the machine so far */
    pthread_mutex_t mask_lock;       /* of the machine's masks and of first_step */
    uint32_t step_epoch;             /* by mask_lock: of the last step, */
    uint32_t epoch_of[NMK_OUT_RING]; /* and of the last one among each launch and those before it */
    uint64_t first_step;             /* the one of epoch 1 */
    nmk_stats stats;
};

/* ---- rows and columns ---- */

/* Pages for `tokens` tokens of row `row`, fed by steps, and its table on the machine for the steps queued after it. */
int nmk_engine_take_row(nmk_engine *engine, int row, int tokens, nmk_err *e);
int nmk_engine_drop_row(nmk_engine *engine, int row, nmk_err *e);

/* What changed in the row's table, for the steps queued after it. */
int nmk_engine_send_row(nmk_engine *engine, int row, nmk_err *e);

/* Zeroes the pages that this row alone holds, after a lost step: what that left there may be no numbers, and a masked
 * token's value is multiplied by 0, which is none either.  Queued. */
int nmk_engine_wipe_row(nmk_engine *engine, int row, nmk_err *e);

nmk_column nmk_column_idle(void); /* pos -1 */

/* Column `c` goes on with `token` at `pos` of the row in `slot`, samples as asked, `remaining` times. */
nmk_column nmk_column_decode(const nmk_sampler *sampler, int c, int slot, int32_t token, int pos, int remaining);

/* What of a sampler the columns do not carry: the adjustments of a row's logits, where it asks for any, with the tokens
 * that the row begins with.  Queued; for a column of that row that comes after. */
int nmk_engine_set_adjust(nmk_engine *engine, int row, const nmk_sampler *sampler, const int32_t *prompt,
                          int prompt_tokens, const int32_t *generated, int generated_tokens, nmk_err *e);

/* The adjustments of a row that draws `token` next, whatever its logits: for greedy columns without penalties, one for
 * each token.  before: the token of the call before, of which nothing stays; -1: this is the first one. */
int nmk_engine_set_drawn(nmk_engine *engine, int row, int32_t before, int32_t token, nmk_err *e);

/* Queued: the columns, for the steps queued after it; or those from `first` on; or the whole control block, with idle
 * columns. */
int nmk_engine_set_columns(nmk_engine *engine, const nmk_column *column, nmk_err *e);
int nmk_engine_set_some_columns(nmk_engine *engine, int first, int count, const nmk_column *column, nmk_err *e);
int nmk_engine_set_control(nmk_engine *engine, const int32_t *stop_ids, int stop_count, nmk_err *e);
int nmk_engine_get_columns(nmk_engine *engine, nmk_column *column, nmk_err *e);

/* ---- steps ---- */

/* Queues one step; `live` columns choose the in-flight cap. */
int nmk_engine_queue_step(nmk_engine *engine, int live, uint64_t *number, nmk_err *e);

/* The tokens that a column may sample in a step: bit id % 32 of word id / 32, as many words as the vocabulary has.
 * A step with a column whose sampler is masked waits for this before it samples, so it is due within the time that an
 * SM has for another one.  NULL: nobody wants the token, any will do.  For any thread; a column's masks in the order of
 * steps, each after the token before was read. */
void nmk_engine_give_mask(nmk_engine *engine, int column, uint64_t number, const uint32_t *mask);
/* Tokens that a chunk takes at most; 0: there are no chunks, prompts go through steps. */
int nmk_engine_chunk_tokens(const nmk_engine *engine);

/* Most tokens of a span from `pos` on in a chunk whose other spans take `keys` keys, as nmk_engine_span_keys counts. */
int nmk_engine_span_room(const nmk_engine *engine, int pos, int64_t keys);
int64_t nmk_engine_span_keys(int pos, int count);

/* Queues a launch that computes keys and values of the spans' tokens, which stand one after the other in `tokens`, in
 * the order of the spans: from distinct rows, with pages for all of them and for what they see.  It counts as a step,
 * and its tokens are all -1; where it fails, the step behind it says so. */
int nmk_engine_queue_chunk(nmk_engine *engine, const nmk_span *span, int spans, const int32_t *tokens, uint64_t *number,
                           nmk_err *e);

/* Queues a step and a chunk behind it, with two numbers: in one launch where the engine is opened for that
 * (NMK_PREFILL_MIXED), else by the two calls above.  In one launch no row of the chunk may have a live column: that is
 * refused.  The step's tokens are there, and waiting for it is over, before the chunk is. */
int nmk_engine_queue_both(nmk_engine *engine, int live, const nmk_span *span, int spans, const int32_t *tokens,
                          uint64_t *step, uint64_t *chunk, nmk_err *e);

/* Waits for a step and points *out at its columns' tokens (-1: not sampled), good for NMK_OUT_RING steps.  A hang
 * (the kernel's record, or an output that is not written or below -1) is described and cleared: counters, tickets and
 * epoch start again, queued steps are gone. */
int nmk_engine_wait_step(nmk_engine *engine, uint64_t number, const int32_t **out, nmk_err *e);

/* Of a step waited for, as long as its tokens are good: *logprobs, filled, or NULL where the sampler asks for none. */
const nmk_logprobs *nmk_engine_logprobs(const nmk_engine *engine, uint64_t number, int column,
                                        const nmk_sampler *sampler, nmk_logprobs *logprobs);

/* Sets columns (NULL: leaves them), runs one step, copies its tokens (out may be NULL). */
int nmk_engine_step(nmk_engine *engine, const nmk_column *column, int32_t *out, nmk_err *e);

/* For after a step that did not run to its end: counters, tickets, epoch and the record of a hang start again from
 * zero.  Waits for what is queued. */
int nmk_engine_restart(nmk_engine *engine, nmk_err *e);

/* `count` steps queued back to back; ms[count] (or NULL) gets each step's time from the end of the one before,
 * out[count][columns] (or NULL) the tokens. */
int nmk_engine_run(nmk_engine *engine, int count, int live, double *ms, int32_t *out, nmk_err *e);

/* ---- memory ---- */

const nmk_buffer *nmk_engine_buffer(const nmk_engine *engine, const char *name); /* NULL: none of that name */
int nmk_engine_read(nmk_engine *engine, const char *buffer, void *dst, uint64_t offset, uint64_t bytes, nmk_err *e);
int nmk_engine_write(nmk_engine *engine, const char *buffer, const void *src, uint64_t offset, uint64_t bytes,
                     nmk_err *e);
int nmk_engine_read_arena(
    nmk_engine *engine, void *dst,
    nmk_err *e); /* variant->arena_bytes; with the last step's copy of what has two in the first's place */
int nmk_engine_poison(nmk_engine *engine, int byte,
                      nmk_err *e); /* the arena, but what tells that it is there; 0xff: NaN as f32 and bf16 */
int nmk_engine_random_kv(nmk_engine *engine, uint64_t seed, nmk_err *e);

/* ---- knobs ---- */

void nmk_engine_set_ring(nmk_engine *engine, int ring_stages, int in_flight); /* 0: as generated */
/* CPU only: experts are chosen by another machine's router logits (an arena copy), NULL: by its own. */
void nmk_engine_force_experts(nmk_engine *engine, const void *arena);

#endif
