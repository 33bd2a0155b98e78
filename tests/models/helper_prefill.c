/* Compiled with the headers of the prefill generation, which has the same names for its own machine and encoder as the
 * steps have: here they are called otherwise. */
#define nmk_vm_step  prefill_vm_step
#define nmk_vm_close prefill_vm_close
#define nmk_gumbel   prefill_gumbel
#include "helper_prefill.h"

#include "refvm.c"

extern int prefill_encode(int32_t *lists, int32_t counts[NMK_SMS]);
extern const nmk_node prefill_nodes[];
extern const char *const prefill_counter_names[];

struct prefill {
    struct nmk_vm vm;
    nmk_variant variant;
    struct nmk_chunk chunk;
};

static void *zeroed(size_t bytes) {
    void *p = calloc(1, bytes);
    if (!p) abort();
    return p;
}

prefill *prefill_open(const prefill_memory *m) {
    prefill *p = zeroed(sizeof *p);
    int32_t counts[NMK_SMS], *lists = zeroed(sizeof(int32_t) * NMK_SMS * NMK_MAX_TASKS * NMK_DESC_WORDS);
    if (prefill_encode(lists, counts)) abort();
    p->variant = (nmk_variant){
        .max_tasks = NMK_MAX_TASKS,
        .counters = NMK_COUNTERS,
        .node_count = NMK_NODES,
        .nodes = prefill_nodes,
        .counter_names = prefill_counter_names,
    };
    p->vm = (struct nmk_vm){
        .variant = &p->variant,
        .lists = lists,
        .weights = m->weights,
        .arena = zeroed((size_t)NMK_ARENA_BYTES),
        .kv_full = m->kv_full,
        .kv_sliding = m->kv_sliding,
        .chunk = &p->chunk,
        .table_full = m->table_full,
        .table_sliding = m->table_sliding,
        .table_stride = m->table_stride,
        .rope = m->rope,
        .counters = zeroed(sizeof(uint32_t) * NMK_COUNTERS * NMK_COUNTER_WORDS),
        .tickets = zeroed(sizeof(uint32_t) * NMK_TICKETS * 2 * NMK_COUNTER_WORDS),
    };
    return p;
}

void prefill_close(prefill *p) {
    prefill_vm_close(&p->vm);
    free((void *)(uintptr_t)p->vm.lists), free(p->vm.arena), free(p->vm.counters), free(p->vm.tickets);
    free(p);
}

int prefill_tokens(void) { return NMK_PREFILL_TOKENS; }

int prefill_run(prefill *p, const prefill_span *span, int spans, uint64_t seed, char *why, size_t why_len) {
    struct nmk_chunk *c = &p->chunk;
    memset(c, 0xff, sizeof *c);
    c->tokens = 0, c->spans = spans;
    for (int i = 0; i < spans; i++) {
        if (spans > NMK_SPANS || c->tokens + span[i].count > NMK_PREFILL_TOKENS) abort();
        c->span[i] =
            (nmk_span){.first = c->tokens, .count = span[i].count, .pos = span[i].pos, .slot = span[i].slot};
        memcpy(c->token + c->tokens, span[i].token, sizeof(int32_t) * (size_t)span[i].count);
        c->tokens += span[i].count;
    }
    memset(p->vm.arena, 0xff, (size_t)NMK_ARENA_BYTES);
    p->vm.epoch++, p->vm.seed = seed, p->vm.threads = seed ? 1 : 2;
    return prefill_vm_step(&p->vm, why, why_len);
}
