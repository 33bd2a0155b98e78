/* The CPU reference machine as a machine: addresses are pointers, a queued step has ended when the call returns. */
#include "machine.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hang.h"
#include "refvm.h"

enum { BLOCKS = 32, TIMES = 64 };

typedef struct {
    nmk_machine base;
    struct {
        const nmk_generation *generation; /* NULL: not loaded */
        struct nmk_vm vm;
    } launch[NMK_LAUNCHES];
    struct {
        void *p;
        uint64_t bytes;
    } block[BLOCKS];
    uint64_t steps;
    double ms[TIMES];
} cpu_machine;

static cpu_machine *of(nmk_machine *m) { return (cpu_machine *)m; }

static void *at(uint64_t address) { return (void *)(uintptr_t)address; }

static void cpu_close(nmk_machine *m) {
    cpu_machine *c = of(m);
    if (!c) return;
    for (int i = 0; i < NMK_LAUNCHES; i++)
        if (c->launch[i].generation) c->launch[i].generation->vm_close(&c->launch[i].vm);
    for (int i = 0; i < BLOCKS; i++)
        if (c->block[i].p) munmap(c->block[i].p, c->block[i].bytes);
    free(m->out), free(m->tops), free((void *)(uintptr_t)m->hang), free(m->masks), free(m->masks_until);
    free(c);
}

/* Mapped, not malloc'd: pages of a large pool cost nothing before their first use. */
static int cpu_alloc(nmk_machine *m, uint64_t *address, uint64_t bytes, const char *what, nmk_err *e) {
    cpu_machine *c = of(m);
    int i = 0;
    while (i < BLOCKS && c->block[i].p) i++;
    assert(i < BLOCKS);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return nmk_fail(e, "no %.1f MiB of memory for %s", (double)bytes / 0x1p20, what);
    c->block[i].p = p, c->block[i].bytes = bytes;
    m->taken_bytes += bytes;
    *address = (uint64_t)(uintptr_t)p;
    return 0;
}

static void cpu_release(nmk_machine *m, uint64_t address) {
    cpu_machine *c = of(m);
    for (int i = 0; i < BLOCKS; i++)
        if (address && c->block[i].p == at(address)) munmap(c->block[i].p, c->block[i].bytes), c->block[i].p = NULL;
}

static uint64_t cpu_free_bytes(nmk_machine *m) {
    (void)m;
    long pages = sysconf(_SC_AVPHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
    return pages > 0 && bytes > 0 ? (uint64_t)pages * (uint64_t)bytes : (uint64_t)1 << 30;
}

static int cpu_read(nmk_machine *m, void *dst, uint64_t src, uint64_t bytes, nmk_err *e) {
    (void)m, (void)e;
    memcpy(dst, at(src), bytes);
    return 0;
}

static int cpu_write(nmk_machine *m, uint64_t dst, const void *src, uint64_t bytes, nmk_err *e) {
    (void)m, (void)e;
    memcpy(at(dst), src, bytes);
    return 0;
}

static int cpu_fill(nmk_machine *m, uint64_t dst, int byte, uint64_t bytes, nmk_err *e) {
    (void)m, (void)e;
    memset(at(dst), byte, bytes);
    return 0;
}

static int cpu_load_chunks(nmk_machine *m, const nmk_generation *n, const nmk_options *o, nmk_err *e) {
    (void)o, (void)e;
    cpu_machine *c = of(m);
    c->launch[NMK_CHUNKS].generation = n;
    c->launch[NMK_CHUNKS].vm = (struct nmk_vm){.threads = c->launch[NMK_STEPS].vm.threads, .variant = n->built_in};
    return 0;
}

static int cpu_load_mixed(nmk_machine *m, const nmk_variant *v, const nmk_options *o, nmk_err *e) {
    (void)m, (void)v, (void)o, (void)e;
    return 0;
}

static struct nmk_vm *prepare(cpu_machine *c, int launch, const nmk_params *p) {
    struct nmk_vm *vm = &c->launch[launch].vm;
    vm->lists = at(p->lists), vm->weights = at(p->weights), vm->arena = at(p->arena);
    vm->kv_full = at(p->kv_full), vm->kv_sliding = at(p->kv_sliding);
    vm->control = launch == NMK_STEPS ? at(p->control) : NULL;
    vm->chunk = launch == NMK_CHUNKS ? at(p->control) : NULL;
    vm->table_full = at(p->table_full), vm->table_sliding = at(p->table_sliding), vm->table_stride = p->table_stride;
    const size_t first = (size_t)p->out_row * (size_t)c->launch[NMK_STEPS].generation->columns;
    vm->adjust = at(p->adjust), vm->tops = (nmk_tops *)at(p->tops) + first;
    vm->masks = at(p->masks), vm->masks_until = at(p->masks_until);
    vm->rope = at(p->rope), vm->out = (int32_t *)at(p->out) + first;
    vm->counters = at(p->counters), vm->tickets = at(p->tickets), vm->epoch = p->epoch;
    vm->trace = at(p->trace), vm->before = NULL, vm->ended = NULL;
    return vm;
}

static int ended(cpu_machine *c, int rc, uint64_t start_ns, const char *why, nmk_err *e) {
    c->ms[c->steps++ % TIMES] = 1e-6 * (double)(nmk_now_ns() - start_ns);
    return rc ? nmk_fail(e, "the CPU machine: %.900s", why) : 0;
}

static int cpu_queue_step(nmk_machine *m, int launch, const nmk_params *p, nmk_err *e) {
    cpu_machine *c = of(m);
    struct nmk_vm *vm = prepare(c, launch, p);
    char why[sizeof e->text];
    uint64_t start_ns = nmk_now_ns();
    return ended(c, c->launch[launch].generation->vm_step(vm, why, sizeof why), start_ns, why, e);
}

/* An SM begins with the chunk when it is done with the step, as on a GPU; how far the others are then is drawn, another
 * way in each launch.  Threads would begin with the chunk when all are done: that is one of those ways. */
static int move_both(cpu_machine *c, struct nmk_vm *step, struct nmk_vm *chunk, int *failed, char *why, size_t size) {
    const nmk_generation *n[2] = {c->launch[NMK_STEPS].generation, c->launch[NMK_CHUNKS].generation};
    struct nmk_vm *vm[2] = {step, chunk};
    uint8_t done[NMK_SMS];
    uint64_t random = c->steps * 2 + 1;
    int got[2] = {NMK_VM_MORE, NMK_VM_MORE};
    step->ended = done, chunk->before = done, chunk->seed = step->seed = c->steps;
    for (int i = 0; i < 2; i++)
        if (n[ *failed = i]->vm_begin(vm[i], why, size)) return -1;
    while (got[0] || got[1]) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        int i = (int)(random >> 63);
        if (!got[i] || got[i] == NMK_VM_SHUT) i = !i; /* only the chunk is ever shut, and the step then opens it */
        got[i] = n[i]->vm_move(vm[i], 1 + (int)(random >> 33 & 63), why, size);
        if (got[i] < 0) return *failed = i, -1;
        if (got[1] == NMK_VM_SHUT && i == 0) got[1] = NMK_VM_MORE;
    }
    return 0;
}

static int cpu_queue_mixed(nmk_machine *m, const nmk_params *step, const nmk_params *chunk, nmk_err *e) {
    cpu_machine *c = of(m);
    struct nmk_vm *first = prepare(c, NMK_STEPS, step), *second = prepare(c, NMK_CHUNKS, chunk);
    const uint64_t seed = first->seed;
    char why[sizeof e->text] = "";
    int failed = 0, rc;
    uint64_t start_ns = nmk_now_ns();
    if (first->threads <= 1) {
        rc = move_both(c, first, second, &failed, why, sizeof why);
        first->seed = second->seed = seed;
        c->ms[c->steps++ % TIMES] = 0;
        return ended(c, rc, start_ns, why, e) ? nmk_fail_in(e, failed ? "the chunk" : "the step") : 0;
    }
    rc = c->launch[NMK_STEPS].generation->vm_step(first, why, sizeof why);
    if (ended(c, rc, start_ns, why, e)) return nmk_fail_in(e, "the step");
    start_ns = nmk_now_ns();
    rc = c->launch[NMK_CHUNKS].generation->vm_step(second, why, sizeof why);
    return ended(c, rc, start_ns, why, e) ? nmk_fail_in(e, "the chunk") : 0;
}

static int cpu_wait_step(nmk_machine *m, uint64_t number, const volatile int32_t *words, int count, nmk_err *e) {
    (void)m, (void)number, (void)words, (void)count, (void)e;
    return 0;
}

static int cpu_wait_all(nmk_machine *m, nmk_err *e) {
    (void)m, (void)e;
    return 0;
}

static double cpu_step_ms(nmk_machine *m, uint64_t number) { return of(m)->ms[number % TIMES]; }

static int cpu_load_weights(nmk_machine *m, const nmk_checkpoint *checkpoint, uint64_t address, const nmk_options *o,
                            nmk_err *e) {
    (void)m;
    nmk_weight_tables tables = nmk_model_tables();
    if (!o->random_weights)
        return nmk_checkpoint_load_host(checkpoint, at(address), nmk_machine_progress, (void *)(uintptr_t)o, e);
    nmk_random_load_host(&tables, at(address), o->weights_seed);
    return 0;
}

/* Any finite bf16 will do: 2^-7 .. 2^0 of either sign. */
static int cpu_random_kv(nmk_machine *m, uint64_t address, uint64_t bytes, uint64_t seed, nmk_err *e) {
    (void)m, (void)e;
    uint16_t *v = at(address);
    uint64_t s = seed * 2 + 1;
    for (uint64_t i = 0; i < bytes / 2; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        v[i] = (uint16_t)((s >> 63) << 15 | (120 + (s >> 40) % 7) << 7 | (s >> 50 & 127));
    }
    return 0;
}

static const struct nmk_machine_calls calls = {
    .close = cpu_close,
    .enter = cpu_wait_all,
    .alloc = cpu_alloc,
    .release = cpu_release,
    .free_bytes = cpu_free_bytes,
    .read = cpu_read,
    .write = cpu_write,
    .fill = cpu_fill,
    .queue_write = cpu_write,
    .load_chunks = cpu_load_chunks,
    .load_mixed = cpu_load_mixed,
    .queue_step = cpu_queue_step,
    .queue_mixed = cpu_queue_mixed,
    .wait_step = cpu_wait_step,
    .wait_all = cpu_wait_all,
    .step_ms = cpu_step_ms,
    .load_weights = cpu_load_weights,
    .random_kv = cpu_random_kv,
};

int nmk_cpu_machine_open(nmk_machine **machine, const nmk_generation *n, const nmk_variant *v, const nmk_options *o,
                         nmk_err *e) {
    /* the references count with their own number of places */
    if (v->part_slots != n->built_in->part_slots)
        return nmk_fail(
            e, "the CPU machine has %d places for attention's chunks, the variant %d: it can run on a GPU only",
            n->built_in->part_slots, v->part_slots);
    const size_t tokens = (size_t)NMK_OUT_RING * (size_t)n->columns, masks = NMK_MASK_RING * (size_t)n->columns;
    cpu_machine *c = xcalloc(1, sizeof *c);
    nmk_machine *m = &c->base;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    struct nmk_vm *vm = &c->launch[NMK_STEPS].vm;
    vm->threads = o->cpu_threads > 0 ? o->cpu_threads : cores > 16 ? 16 : cores > 0 ? (int)cores : 1;
    if (vm->threads > NMK_VM_THREADS) vm->threads = NMK_VM_THREADS;
    m->calls = &calls, m->most_ahead = 1, vm->variant = v, c->launch[NMK_STEPS].generation = n;
    m->memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    m->out = xcalloc(tokens, sizeof *m->out);
    m->tops = xcalloc(tokens, sizeof *m->tops);
    m->tops_address = (uint64_t)(uintptr_t)m->tops;
    m->hang = xcalloc(NMK_LAUNCHES * NMK_HANGS, sizeof *m->hang);
    m->masks = xcalloc(masks * NMK_MASK_WORDS, sizeof *m->masks);
    m->masks_until = xcalloc(NMK_MASK_RING * NMK_SMS, sizeof *m->masks_until * NMK_MASK_FLAGS);
    m->masks_address = (uint64_t)(uintptr_t)m->masks, m->masks_until_address = (uint64_t)(uintptr_t)m->masks_until;
    m->out_address = (uint64_t)(uintptr_t)m->out, m->hang_address = (uint64_t)(uintptr_t)m->hang;
    snprintf(m->name, sizeof m->name, "cpu (%d thread%s)", vm->threads, vm->threads == 1 ? "" : "s");
    *machine = m;
    return 0;
}

void nmk_cpu_machine_force(nmk_machine *m, const void *arena) {
    assert(m->calls == &calls);
    of(m)->launch[NMK_STEPS].vm.forced = arena;
}

void nmk_cpu_machine_force_chunks(nmk_machine *m, const void *arena) {
    assert(m->calls == &calls);
    of(m)->launch[NMK_CHUNKS].vm.forced = arena;
}
