/* The GPU as a machine: one stream, steps queued back to back.
 *
 * Owns: the context, the modules, pinned memory.  A step may begin while the one before ends (programmatic dependent
 * launch), if nothing lies between them in the stream: so an event marks the end of a step only where something else
 * follows it, and a step says by itself when it has its tokens and when that was.  The events of the last launches are
 * a ring.  So are the staging slots of queued writes, many small ones and a few large ones, each with an event that is
 * waited for before the slot's reuse. */
#include "machine.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda.h"
#include "hang.h"

#undef NMK_COLUMNS /* of one generation: n->columns it is */

enum {
    EVENTS = 66, /* the last 64 steps and the two before */
    STAGES = 32,
    STAGE_BYTES = 4096,
    LARGE_STAGES = 2, /* of NMK_QUEUED_BYTES */
    MOST_SOURCE = 64 << 20,
    POLL_NS = 20000,
    ASK_NS = 50000000, /* from one question to the driver whether all is over to the next */
    LOST_S = 60        /* a step that takes longer is given up; the kernel's own bound on waits is seconds */
};

typedef struct {
    uint8_t *memory; /* pinned */
    CUevent done[STAGES];
    int slots;
    size_t slot_bytes;
    uint64_t used; /* ever */
} staging;

typedef struct {
    nmk_machine base;
    nmk_gpu gpu;
    CUstream stream;
    struct {
        const nmk_generation *generation;
        CUmodule module;
        CUfunction function;
    } launch[NMK_KERNELS];
    CUevent step_done[EVENTS];
    uint64_t steps;                /* queued */
    bool open;                     /* the last of them is a step, and its event is not recorded yet */
    bool step[EVENTS];             /* of launches: a step alone */
    bool first[EVENTS];            /* of steps: something else was queued before it */
    volatile uint64_t (*times)[2]; /* [NMK_OUT_RING], see nmk_params; mapped */
    int32_t out_row[EVENTS];       /* of steps */
    /* Of mixed launches, by the step's number: nanoseconds at the beginning and between the two.  Mapped. */
    volatile uint64_t (*between)[2];
    uint64_t between_address;
    char mixed[EVENTS]; /* of launches: 'S' the step of a mixed one, 'C' its chunk, else 0 */
    staging small, large;
} gpu_machine;

static gpu_machine *of(nmk_machine *m) { return (gpu_machine *)m; }

static int open_staging(staging *s, int slots, size_t slot_bytes, nmk_err *e) {
    void *p;
    s->slots = slots, s->slot_bytes = slot_bytes;
    CU(e, cuMemHostAlloc(&p, (size_t)slots * slot_bytes, CU_MEMHOSTALLOC_PORTABLE));
    s->memory = p;
    for (int i = 0; i < slots; i++) CU(e, cuEventCreate(&s->done[i], CU_EVENT_DISABLE_TIMING));
    return 0;
out:
    return -1;
}

static void close_staging(staging *s) {
    for (int i = 0; i < s->slots; i++)
        if (s->done[i]) nmk_cuda.cuEventDestroy(s->done[i]);
    if (s->memory) nmk_cuda.cuMemFreeHost(s->memory);
}

static void gpu_close(nmk_machine *m) {
    gpu_machine *g = of(m);
    if (!g) return;
    /* After an error every call fails, and on a silent GPU it may never return: the rest goes with the process. */
    if (g->gpu.context && !m->lost) {
        if (g->stream) nmk_cuda.cuStreamSynchronize(g->stream);
        for (int i = 0; i < EVENTS; i++)
            if (g->step_done[i]) nmk_cuda.cuEventDestroy(g->step_done[i]);
        close_staging(&g->small), close_staging(&g->large);
        if (m->out) nmk_cuda.cuMemFreeHost(m->out);
        if (g->times) nmk_cuda.cuMemFreeHost((void *)(uintptr_t)g->times);
        if (m->tops) nmk_cuda.cuMemFreeHost(m->tops);
        if (m->hang) nmk_cuda.cuMemFreeHost((void *)(uintptr_t)m->hang);
        if (m->masks) nmk_cuda.cuMemFreeHost(m->masks);
        if (m->masks_until) nmk_cuda.cuMemFreeHost(m->masks_until);
        if (g->between) nmk_cuda.cuMemFreeHost((void *)(uintptr_t)g->between);
        for (int i = 0; i < NMK_KERNELS; i++)
            if (g->launch[i].module) nmk_cuda.cuModuleUnload(g->launch[i].module);
        if (g->stream) nmk_cuda.cuStreamDestroy(g->stream);
        nmk_gpu_close(&g->gpu);
    }
    for (int i = 0; i < NMK_KERNELS; i++) nmk_jit_result_free(&m->kernel[i]);
    free(g);
}

static int gpu_enter(nmk_machine *m, nmk_err *e) {
    if (m->lost) return nmk_fail(e, "%s: the engine is lost", m->name);
    CU(e, cuCtxSetCurrent(of(m)->gpu.context));
    return 0;
out:
    return -1;
}

/* Before anything but a step is queued: the end of the last step gets its event. */
static int end_steps(gpu_machine *g, nmk_err *e) {
    if (g->open) CU(e, cuEventRecord(g->step_done[(g->steps - 1) % EVENTS], g->stream));
    g->open = false;
    return 0;
out:
    return -1;
}

static int gpu_fill(nmk_machine *m, uint64_t dst, int byte, uint64_t bytes, nmk_err *e) {
    if (end_steps(of(m), e)) return -1;
    CU(e, cuMemsetD8Async(dst, (unsigned char)byte, bytes, of(m)->stream));
    return 0;
out:
    return -1;
}

static int gpu_alloc(nmk_machine *m, uint64_t *address, uint64_t bytes, const char *what, nmk_err *e) {
    CUdeviceptr p = 0;
    CUresult r = nmk_cuda.cuMemAlloc(&p, bytes);
    if (r) {
        size_t free_bytes = 0, total = 0;
        nmk_cuda.cuMemGetInfo(&free_bytes, &total);
        nmk_err why = {0};
        nmk_cuda_check(r, "cuMemAlloc", &why);
        return nmk_fail(e, "%s: no %.1f MiB for %s, %.1f of %.1f MiB are free (%.200s)", m->name,
                        (double)bytes / 0x1p20, what, (double)free_bytes / 0x1p20, (double)total / 0x1p20, why.text);
    }
    if (gpu_fill(m, p, 0, bytes, e)) {
        nmk_cuda.cuMemFree(p);
        return -1;
    }
    m->taken_bytes += bytes;
    *address = p;
    return 0;
}

static void gpu_release(nmk_machine *m, uint64_t address) {
    (void)m;
    if (address) nmk_cuda.cuMemFree(address);
}

static uint64_t gpu_free_bytes(nmk_machine *m) {
    (void)m;
    size_t free_bytes = 0, total = 0;
    nmk_cuda.cuMemGetInfo(&free_bytes, &total);
    return free_bytes;
}

static bool all_written(const volatile int32_t *words, int count) {
    for (int i = 0; i < count; i++)
        if (words[i] == NMK_NOT_WRITTEN) return false;
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* what was written before them is there too */
    return count > 0;
}

/* A GPU that has failed, or is silent. */
static int check_alive(nmk_machine *m, CUresult r, uint64_t start_ns, nmk_err *e) {
    if (r != 0 && r != CUDA_ERROR_NOT_READY) {
        m->lost = true;
        nmk_cuda_check(r, "a step", e);
        return nmk_fail_in(e, "%s: the engine is lost", m->name);
    }
    if (nmk_now_ns() - start_ns > (uint64_t)LOST_S * 1000000000u) {
        m->lost = true;
        return nmk_fail(e, "%s: no answer for %d s; the engine is lost", m->name, LOST_S);
    }
    return 0;
}

/* Between looks, so that a waiting host leaves its core to others. */
static void pause_look(void) { nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL); }

/* Until the event, or until the words are written. */
static int wait_written(nmk_machine *m, CUevent event, const volatile int32_t *words, int count, nmk_err *e) {
    const uint64_t start_ns = nmk_now_ns();
    CUresult r;
    while (!all_written(words, count) && (r = nmk_cuda.cuEventQuery(event)) != 0) {
        if (check_alive(m, r, start_ns, e)) return -1;
        pause_look();
    }
    return 0;
}

/* Of a step without an event: until the words are written, or all that is queued is over.  Whether it is the driver is
 * asked but rarely, as it puts something between the steps then; any event tells of a GPU that has failed. */
static int wait_words(gpu_machine *g, const volatile int32_t *words, int count, nmk_err *e) {
    nmk_machine *m = &g->base;
    const uint64_t start_ns = nmk_now_ns();
    for (uint64_t asked_ns = start_ns; !all_written(words, count); pause_look()) {
        CUresult r = nmk_cuda.cuEventQuery(g->step_done[0]);
        if (count == 0 || nmk_now_ns() - asked_ns > ASK_NS) {
            if (r == 0 && (r = nmk_cuda.cuStreamQuery(g->stream)) == 0) break;
            asked_ns = nmk_now_ns();
        }
        if (check_alive(m, r, start_ns, e)) return -1;
    }
    return 0;
}

static int wait_event(nmk_machine *m, CUevent event, nmk_err *e) { return wait_written(m, event, NULL, 0, e); }

static int gpu_wait_all(nmk_machine *m, nmk_err *e) {
    gpu_machine *g = of(m);
    if (end_steps(g, e)) return -1;
    if (g->steps && wait_event(m, g->step_done[(g->steps - 1) % EVENTS], e)) return -1;
    CU(e, cuStreamSynchronize(g->stream));
    return 0;
out:
    return -1;
}

static int gpu_wait_step(nmk_machine *m, uint64_t number, const volatile int32_t *words, int count, nmk_err *e) {
    gpu_machine *g = of(m);
    const int slot = (int)(number % EVENTS);
    assert(number < g->steps && g->steps - number < EVENTS);
    if (g->step[slot]) return wait_words(g, words, count, e);
    if (g->mixed[slot] != 'S') count = 0;
    return wait_written(m, g->step_done[slot], words, count, e);
}

static int gpu_read(nmk_machine *m, void *dst, uint64_t src, uint64_t bytes, nmk_err *e) {
    if (gpu_wait_all(m, e)) return -1;
    CU(e, cuMemcpyDtoH(dst, src, bytes));
    return 0;
out:
    return -1;
}

static int gpu_write(nmk_machine *m, uint64_t dst, const void *src, uint64_t bytes, nmk_err *e) {
    if (gpu_wait_all(m, e)) return -1;
    /* not cuMemcpyHtoD: from pageable memory that returns before the bytes have arrived, and nothing orders it before
     * the steps of this stream */
    CU(e, cuMemcpyHtoDAsync(dst, src, bytes, of(m)->stream));
    CU(e, cuStreamSynchronize(of(m)->stream));
    return 0;
out:
    return -1;
}

static int gpu_queue_write(nmk_machine *m, uint64_t dst, const void *src, uint64_t bytes, nmk_err *e) {
    gpu_machine *g = of(m);
    staging *s = bytes <= STAGE_BYTES ? &g->small : &g->large;
    assert(bytes <= s->slot_bytes);
    int slot = (int)(s->used % (uint64_t)s->slots);
    if (s->used >= (uint64_t)s->slots && wait_event(m, s->done[slot], e)) return -1;
    uint8_t *stage = s->memory + (size_t)slot * s->slot_bytes;
    memcpy(stage, src, bytes);
    if (end_steps(g, e)) return -1;
    CU(e, cuMemcpyHtoDAsync(dst, stage, bytes, g->stream));
    CU(e, cuEventRecord(s->done[slot], g->stream));
    s->used++;
    return 0;
out:
    return -1;
}

/* after_step: it may begin while the step before it ends. */
static int launch_kernel(gpu_machine *g, int launch, bool after_step, void **arguments, nmk_err *e) {
    const nmk_generation *n = g->launch[launch].generation;
    CUlaunchAttribute early = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, .value.allowed = 1};
    const CUlaunchConfig config = {.grid = {NMK_SMS, 1, 1},
                                   .block = {(unsigned)n->threads, 1, 1},
                                   .dynamic_smem_bytes = (unsigned)n->smem_bytes,
                                   .stream = g->stream,
                                   .attributes = &early,
                                   .attribute_count = after_step};
    CU(e, cuLaunchKernelEx(&config, g->launch[launch].function, arguments, NULL));
    return 0;
out:
    return -1;
}

/* A launch with an event behind it. */
static int queued(gpu_machine *g, char mixed, nmk_err *e) {
    CU(e, cuEventRecord(g->step_done[g->steps % EVENTS], g->stream));
    g->step[g->steps % EVENTS] = false;
    g->mixed[g->steps++ % EVENTS] = mixed;
    return 0;
out:
    return -1;
}

static int gpu_queue_step(nmk_machine *m, int launch, const nmk_params *p, nmk_err *e) {
    gpu_machine *g = of(m);
    nmk_params params = *p; /* copied at the launch */
    const int slot = (int)(g->steps % EVENTS);
    if (launch != NMK_STEPS)
        return end_steps(g, e) || launch_kernel(g, launch, false, (void *[]){&params}, e) || queued(g, 0, e) ? -1 : 0;
    g->times[p->out_row][0] = g->times[p->out_row][1] = 0;
    if (launch_kernel(g, launch, g->open, (void *[]){&params}, e)) return -1;
    g->step[slot] = true, g->first[slot] = !g->open, g->mixed[slot] = 0, g->out_row[slot] = p->out_row;
    g->open = true, g->steps++;
    return 0;
}

/* Both numbers have the same end, so that what waits for either waits for an event. */
static int gpu_queue_mixed(nmk_machine *m, const nmk_params *step, const nmk_params *chunk, nmk_err *e) {
    gpu_machine *g = of(m);
    nmk_params first = *step, second = *chunk;
    const uint64_t slot = g->steps % EVENTS;
    uint64_t between = g->between_address + slot * sizeof *g->between;
    g->between[slot][0] = g->between[slot][1] = 0;
    if (end_steps(g, e) || launch_kernel(g, NMK_MIXED, false, (void *[]){&first, &second, &between}, e)) return -1;
    return queued(g, 'S', e) || queued(g, 'C', e) ? -1 : 0;
}

/* What a launch has written of its time, which may come a little later than its tokens; 0: it is lost. */
static uint64_t time_written(gpu_machine *g, const volatile uint64_t *ns) {
    for (uint64_t start_ns = nmk_now_ns(); !*ns && nmk_now_ns() - start_ns < ASK_NS; pause_look())
        if (nmk_cuda.cuEventQuery(g->step_done[0]) != 0) break;
    return *ns;
}

/* Steps, and that of a mixed launch, say themselves when they were over; of chunks events do. */
static double gpu_step_ms(nmk_machine *m, uint64_t number) {
    gpu_machine *g = of(m);
    float ms = 0;
    const int slot = (int)(number % EVENTS);
    const char mixed = g->mixed[slot];
    if (g->step[slot]) {
        const volatile uint64_t *ns = g->times[g->out_row[slot]];
        const uint64_t end = time_written(g, &ns[1]);
        const bool chained = !g->first[slot] && g->steps - number < EVENTS - 1;
        const uint64_t begin = chained ? g->times[g->out_row[(number - 1) % EVENTS]][1] : ns[0];
        return begin && end > begin ? 1e-6 * (double)(end - begin) : 0; /* a step that is lost tells no time */
    }
    const volatile uint64_t *ns = mixed ? g->between[(mixed == 'C' ? number - 1 : number) % EVENTS] : NULL;
    const double step_ms = mixed ? 1e-6 * (double)(time_written(g, &ns[1]) - ns[0]) : 0;
    if (mixed == 'S') return step_ms;
    if (number < (mixed ? 2 : 1) || g->steps - number >= EVENTS - 1) return 0;
    nmk_cuda.cuEventElapsedTime(&ms, g->step_done[(number - (mixed ? 2 : 1)) % EVENTS], g->step_done[slot]);
    return (double)ms > step_ms ? (double)ms - step_ms : 0;
}

static int gpu_load_weights(nmk_machine *m, const nmk_checkpoint *checkpoint, uint64_t address, const nmk_options *o,
                            nmk_err *e) {
    gpu_machine *g = of(m);
    nmk_weight_tables tables = nmk_model_tables();
    if (gpu_wait_all(m, e)) return -1;
    const CUmodule module = g->launch[NMK_STEPS].module;
    if (o->random_weights) return nmk_random_load_device(&tables, module, address, o->weights_seed, e);
    return nmk_checkpoint_load_device(checkpoint, module, address, nmk_machine_progress, (void *)(uintptr_t)o, e);
}

static int gpu_random_kv(nmk_machine *m, uint64_t address, uint64_t bytes, uint64_t seed, nmk_err *e) {
    if (gpu_wait_all(m, e)) return -1;
    return nmk_random_fill_kv(of(m)->launch[NMK_STEPS].module, address, bytes, seed, e);
}

static int mapped(void **host, uint64_t *device, size_t bytes, nmk_err *e) {
    CU(e, cuMemHostAlloc(host, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    memset(*host, 0, bytes);
    CUdeviceptr p;
    CU(e, cuMemHostGetDevicePointer(&p, *host, 0));
    *device = p;
    return 0;
out:
    return -1;
}

static void tell(const nmk_options *o, nmk_phase phase, uint64_t done) {
    if (o->progress) o->progress(o->progress_user, phase, done, 1);
}

static void on_compile(void *options) { tell(options, NMK_PHASE_COMPILE, 0); }

/* Loading refuses a cubin of a toolkit whose major version is newer than the driver's: that gets its own words. */
static int load_kernel(gpu_machine *g, int launch, const nmk_generation *n, const nmk_variant *v, const nmk_options *o,
                       nmk_err *e) {
    nmk_machine *m = &g->base;
    nmk_jit_result *kernel = &m->kernel[launch];
    CUmodule *module = &g->launch[launch].module;
    CUfunction *function = &g->launch[launch].function;
    g->launch[launch].generation = n;
    nmk_jit_request request = {.name = launch == NMK_STEPS ? "megakernel.cu" : "prefill/megakernel.cu",
                               .source = n->kernel,
                               .source_bytes = (size_t)(n->kernel_end - n->kernel),
                               .arch = nmk_target_arch,
                               .allow_spills = o->allow_spills,
                               .on_compile = on_compile,
                               .user = (void *)(uintptr_t)o};
    uint64_t start_ns = nmk_now_ns();
    char *text = NULL;
    if (v->kernel) request.source = v->kernel, request.source_bytes = strlen(v->kernel);
    if (o->kernel && launch != NMK_CHUNKS) {
        if (nmk_file_read(&text, &request.source_bytes, o->kernel, MOST_SOURCE, e)) return -1;
        request.name = o->kernel, request.source = text;
    }
    if (launch == NMK_MIXED) {
        char *both = nmk_mixed_source(request.source, g->launch[NMK_CHUNKS].generation->kernel);
        free(text);
        request.name = "mixed.cu", request.source = text = both, request.source_bytes = strlen(both);
    }
    int rc = nmk_jit_compile(kernel, &request, e);
    free(text);
    if (rc) return -1;
    tell(o, kernel->cached ? NMK_PHASE_CACHED : NMK_PHASE_COMPILE, 1);
    tell(o, NMK_PHASE_LOAD, 0);
    CUresult r = nmk_cuda.cuModuleLoadData(module, kernel->cubin);
    free(kernel->cubin), free(kernel->log);
    kernel->cubin = NULL, kernel->log = NULL;
    if (r) {
        nmk_cuda_check(r, "loading the kernel", e);
        if (nmk_nvrtc.major * 1000 > nmk_cuda.driver_version)
            return nmk_fail(
                e,
                "CUDA driver too old: it supports CUDA %d.%d, the kernel was compiled by NVRTC %d.%d; update the "
                "driver or set NMK_NVRTC to an older libnvrtc",
                nmk_cuda.driver_version / 1000, nmk_cuda.driver_version % 1000 / 10, nmk_nvrtc.major, nmk_nvrtc.minor);
        return -1;
    }
    CU(e, cuModuleGetFunction(function, *module, "nmk_step"));
    CU(e, cuFuncSetAttribute(*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, n->smem_bytes));
    int blocks = 0;
    CU(e, cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, *function, n->threads, (size_t)n->smem_bytes));
    if (blocks < 1)
        return nmk_fail(e, "%s: a block of the kernel does not fit an SM (%d threads, %d bytes of shared memory)",
                        m->name, n->threads, n->smem_bytes);
    m->kernel_seconds += 1e-9 * (double)(nmk_now_ns() - start_ns);
    tell(o, NMK_PHASE_LOAD, 1);
    return 0;
out:
    return -1;
}

static int gpu_load_chunks(nmk_machine *m, const nmk_generation *n, const nmk_options *o, nmk_err *e) {
    return load_kernel(of(m), NMK_CHUNKS, n, n->built_in, o, e);
}

static int gpu_load_mixed(nmk_machine *m, const nmk_variant *v, const nmk_options *o, nmk_err *e) {
    gpu_machine *g = of(m);
    const nmk_generation *n = g->launch[NMK_STEPS].generation, *chunks = g->launch[NMK_CHUNKS].generation;
    void *p;
    assert(chunks && chunks->threads == n->threads && chunks->smem_bytes == n->smem_bytes);
    if (mapped(&p, &g->between_address, sizeof *g->between * EVENTS, e)) return -1;
    g->between = p;
    return load_kernel(g, NMK_MIXED, n, v, o, e);
}

static const struct nmk_machine_calls calls = {
    .close = gpu_close,
    .enter = gpu_enter,
    .alloc = gpu_alloc,
    .release = gpu_release,
    .free_bytes = gpu_free_bytes,
    .read = gpu_read,
    .write = gpu_write,
    .fill = gpu_fill,
    .queue_write = gpu_queue_write,
    .load_chunks = gpu_load_chunks,
    .load_mixed = gpu_load_mixed,
    .queue_step = gpu_queue_step,
    .queue_mixed = gpu_queue_mixed,
    .wait_step = gpu_wait_step,
    .wait_all = gpu_wait_all,
    .step_ms = gpu_step_ms,
    .load_weights = gpu_load_weights,
    .random_kv = gpu_random_kv,
};

int nmk_gpu_machine_open(nmk_machine **machine, int index, const nmk_generation *n, const nmk_variant *v,
                         const nmk_options *o, nmk_err *e) {
    gpu_machine *g = xcalloc(1, sizeof *g);
    nmk_machine *m = &g->base;
    const size_t tokens = (size_t)NMK_OUT_RING * (size_t)n->columns, masks = NMK_MASK_RING * (size_t)n->columns;
    m->calls = &calls, m->on_gpu = true, m->most_ahead = 32;
    nmk_gpu_needs needs = {.name = nmk_target_arch, .sms = NMK_SMS, .smem_bytes = NMK_SMEM_BYTES};
    if (sscanf(nmk_target_arch, "sm_%1d%1d", &needs.major, &needs.minor) != 2) {
        nmk_fail(e, "target architecture %s: expected something like sm_90a", nmk_target_arch);
        goto out;
    }
    if (nmk_gpu_open(&g->gpu, index, &needs, e)) goto out;
    snprintf(m->name, sizeof m->name, "cuda:%d (%s)", index, g->gpu.name);
    size_t free_bytes = 0, total = 0;
    CU(e, cuMemGetInfo(&free_bytes, &total));
    m->memory_bytes = total, m->sms = g->gpu.sms;
    /* two transfers a clock */
    m->nominal_bytes_per_s = 2e3 * g->gpu.memory_khz * (g->gpu.bus_bits / 8);
    CU(e, cuStreamCreate(&g->stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < EVENTS; i++) CU(e, cuEventCreate(&g->step_done[i], CU_EVENT_DEFAULT));
    if (open_staging(&g->small, STAGES, STAGE_BYTES, e) || open_staging(&g->large, LARGE_STAGES, NMK_QUEUED_BYTES, e))
        goto out;
    void *p;
    if (mapped(&p, &m->out_address, sizeof(int32_t) * tokens, e)) goto out;
    m->out = p;
    if (mapped(&p, &m->times_address, sizeof *g->times * NMK_OUT_RING, e)) goto out;
    g->times = p;
    if (mapped(&p, &m->tops_address, sizeof(nmk_tops) * tokens, e)) goto out;
    m->tops = p;
    if (mapped(&p, &m->hang_address, sizeof(nmk_hang) * NMK_LAUNCHES * NMK_HANGS, e)) goto out;
    m->hang = p;
    if (mapped(&p, &m->masks_address, sizeof(uint32_t) * NMK_MASK_WORDS * masks, e)) goto out;
    m->masks = p;
    if (mapped(&p, &m->masks_until_address, sizeof(uint32_t) * NMK_MASK_RING * NMK_SMS * NMK_MASK_FLAGS, e)) goto out;
    m->masks_until = p;
    if (load_kernel(g, NMK_STEPS, n, v, o, e)) goto out;
    *machine = m;
    return 0;
out:
    gpu_close(m);
    return -1;
}
