/* One generation, as the runtime sees it: compiled with its own abi.h.  NMK_GENERATION: the name of what it defines,
 * where that is not the spec's own. */
#include "generation.h"

#include "jit.h"

#ifndef NMK_GENERATION
#define NMK_GENERATION nmk_generation_own
#endif

extern const nmk_generation NMK_GENERATION;

const nmk_generation NMK_GENERATION = {
#ifdef NMK_PREFILL_TOKENS
    .prefill_tokens = NMK_PREFILL_TOKENS,
    .spans = NMK_SPANS,
    .key_tokens = NMK_KEY_TOKENS,
    .control_bytes = sizeof(nmk_chunk),
    .chunk_spans_at = offsetof(nmk_chunk, span),
    .chunk_tokens_at = offsetof(nmk_chunk, token),
#else
    .control_bytes = sizeof(nmk_control),
#endif
    .columns = NMK_COLUMNS,
    .positions = NMK_POSITIONS,
    .tickets = NMK_TICKETS,
    .threads = NMK_THREADS,
    .smem_bytes = NMK_SMEM_BYTES,
    .hash = &nmk_hash,
    .abi_hash = &nmk_abi_hash,
    .weights_hash = &nmk_weights_hash,
    .built_in = &nmk_built_in,
    .buffers = nmk_buffers,
    .buffer_count = &nmk_buffer_count,
    .kernel = nmk_kernel_source,
    .kernel_end = nmk_kernel_source_end,
    .step_weight_bytes = nmk_step_weight_bytes,
    .encode = nmk_encode,
    .vm_step = nmk_vm_step,
    .vm_begin = nmk_vm_begin,
    .vm_move = nmk_vm_move,
    .vm_close = nmk_vm_close,
};

#ifdef NMK_PREFILL_TOKENS
_Static_assert(offsetof(nmk_chunk, tokens) == 0 && offsetof(nmk_chunk, spans) == 4, "a chunk begins with its counts");
#endif

_Static_assert(offsetof(nmk_control, stop_ids) == sizeof(nmk_column) * NMK_COLUMNS, "stop ids follow the columns");
