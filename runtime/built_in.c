/* The schedule that a generation was built with: compiled with its own abi.h. */
#include "variant.h"

const nmk_variant nmk_built_in = {
    .max_tasks = NMK_MAX_TASKS,
    .counters = NMK_COUNTERS,
    .ring_stages = NMK_RING_STAGES,
    .part_slots = NMK_PART_SLOTS,
    .chunks_min = NMK_CHUNKS_MIN,
    .chunks_max = NMK_CHUNKS_MAX,
    .pages_per_chunk = NMK_PAGES_PER_CHUNK,
    .pages_per_long_chunk = NMK_PAGES_PER_LONG_CHUNK,
    .own_pages = NMK_OWN_PAGES,
    .in_flight = nmk_in_flight,
    .arena_bytes = NMK_ARENA_BYTES,
    .exchange_at = NMK_EXCHANGE_AT,
    .exchange_bytes = NMK_EXCHANGE_BYTES,
    .node_count = NMK_NODES,
    .nodes = nmk_nodes,
    .counter_names = nmk_counter_names,
};
