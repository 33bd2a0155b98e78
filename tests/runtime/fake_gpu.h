/* A GPU made up of host memory, for tests of what talks to one: fake_install() before the engine is opened on cuda:0.
 *
 * The stand-in for the driver queues what a stream would and does one thing of it at each look at an event, so that a
 * staging buffer reused too early or a write out of order shows.  Its step samples token + 1.  Time passes by fake_ms of
 * each launch. */
#ifndef NMK_TESTS_FAKE_GPU_H
#define NMK_TESTS_FAKE_GPU_H

#include "engine.h"

#include <assert.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda.h"
#include "check.h"

/* ---- a stream ---- */

typedef struct {
    enum { COPY, SET, STEP, EVENT } kind;
    CUdeviceptr dst;
    const void *src;
    size_t bytes;
    int value;
    nmk_params params;
    bool chunk;       /* the STEP is one */
    uint64_t between; /* of a mixed launch: where its times go */
    struct fake_event *event;
} work;

struct fake_event {
    bool done;
    double ms;
};

enum { MOST_WORK = 4096, MOST_SEEN = 4096, MOST_CHUNKS = 512 };

static work queue[MOST_WORK];
static int queue_head, queue_tail, queued_steps, most_queued_steps;
static struct {
    int device_count, major, minor, sms, smem_bytes;
    int hang_at;     /* the step (counted from 1) that hangs; 0: none */
    bool silent;     /* without a record */
    bool fail;       /* the next event reports an error */
    int load_result; /* of cuModuleLoadData */
    int memory_khz, bus_bits;
    size_t free_bytes, total_bytes; /* free: whatever is allocated */
    int contexts;                   /* retained */
} fake = {.device_count = 1,
          .major = 9,
          .minor = 0,
          .sms = 132,
          .smem_bytes = 232448,
          .memory_khz = 3201000,
          .bus_bits = 6144,
          .free_bytes = 256 << 20,
          .total_bytes = 1 << 30};

/* Blocks of this size stand for a GPU's memory without costing as much of the host's: they begin as zeros, and what a
 * stream copies there is read and dropped. */
enum { LARGE_BYTES = 64 << 20, MOST_LARGE = 64 };
static struct {
    char *p;
    size_t bytes;
} large[MOST_LARGE + 1];

static int large_of(CUdeviceptr p) {
    for (int i = 0; i < MOST_LARGE; i++)
        if (large[i].p && p - (CUdeviceptr)(uintptr_t)large[i].p < large[i].bytes) return i;
    return -1;
}

static void drop(const char *src, size_t bytes) {
    volatile char seen;
    for (size_t i = 0; i < bytes; i += 4096) seen = src[i];
    (void)seen;
}
static int steps_run, mixed_launches;
/* In place of token + 1: called for every live column of a step, in their order; what it says counts for those that
 * sample. */
static int32_t (*fake_model)(const nmk_params *p, const nmk_column *column);
static nmk_column seen[MOST_SEEN]; /* live columns of the steps that ran, */
static struct { int step, column; /* and where each was: steps count from 1 */ } seen_at[MOST_SEEN];
static int seen_count, in_flight_seen;
static struct {
    int step, tokens, spans;
    double ms;
    nmk_span span[NMK_ROWS];
} seen_chunk[MOST_CHUNKS];
static _Atomic int seen_chunks; /* counted when all of it is there */
/* How long a launch takes: a chunk of these spans, or a step (none). */
static double fake_launch_ms(const nmk_span *span, int spans) {
    double ms = spans ? 10 : 1.5;
    for (int i = 0; i < spans; i++) ms += 0.02 * span[i].count;
    return ms;
}
static double (*fake_ms)(const nmk_span *span, int spans) = fake_launch_ms;
static double fake_now_ms;
static bool in_chunk; /* fake_model is asked for a chunk's position: nothing counts but what it leaves in the pages */

/* What a wait that is given up in the launch of that epoch leaves. */
static uint32_t hang_word(uint32_t epoch, uint32_t role, uint32_t sm, uint32_t task) {
    return 1u << 31 | (epoch & NMK_HANG_STEP_MASK) << NMK_HANG_STEP_SHIFT | role << NMK_HANG_ROLE_SHIFT |
           sm << NMK_HANG_SM_SHIFT | task;
}

static void run_chunk(const nmk_params *p) {
    const uint32_t epoch = (uint32_t)p->epoch;
    const int32_t *chunk = (const int32_t *)(uintptr_t)p->control, tokens = chunk[0], spans = chunk[1];
    const nmk_span *span = (const nmk_span *)(uintptr_t)(p->control + nmk_prefill->chunk_spans_at);
    const int32_t *token = (const int32_t *)(uintptr_t)(p->control + nmk_prefill->chunk_tokens_at);
    uint32_t *abort_flag = (uint32_t *)(uintptr_t)p->abort, *counters = (uint32_t *)(uintptr_t)p->counters;
    steps_run++, queued_steps--;
    if (*abort_flag) return;
    if (steps_run == fake.hang_at || counters[0] != epoch - 1) {
        nmk_hang *h = (nmk_hang *)(uintptr_t)p->hang;
        *abort_flag = hang_word(epoch, 1, 17, !fake.silent);
        if (!fake.silent)
            h[9] = (nmk_hang){.word = hang_word(epoch, 1, 17, 1), .counter = 0, .expected = 132, .got = 131};
        return;
    }
    counters[0] = epoch;
    const double ms = fake_ms(span, spans);
    fake_now_ms += ms;
    const int n = seen_chunks;
    if (n < MOST_CHUNKS) {
        seen_chunk[n].ms = ms;
        seen_chunk[n].step = steps_run;
        seen_chunk[n].tokens = tokens, seen_chunk[n].spans = spans;
        memcpy(seen_chunk[n].span, span, sizeof *span * (size_t)spans);
        seen_chunks++;
    }
    in_chunk = true;
    for (int i = 0; fake_model && i < spans; i++)
        for (int j = 0; j < span[i].count; j++) {
            const nmk_span *s = &span[i];
            const nmk_column column = {.token = token[s->first + j],
                                       .pos = s->pos + j,
                                       .base = s->pos,
                                       .group = i,
                                       .slot = s->slot,
                                       .remaining = 1};
            fake_model(p, &column);
        }
    in_chunk = false;
}
static int traced_steps; /* steps that had a place for stamps, each one of its own */
static uint64_t traced_last;

/* The first token of the mask, for which a step waits; -1: it does not come. */
static int32_t masked_token(const nmk_params *p, int c) {
    const uint32_t *until = (const uint32_t *)(uintptr_t)p->masks_until;
    const uint32_t *mask = (const uint32_t *)(uintptr_t)p->masks + c * NMK_MASK_WORDS;
    for (int i = 0; (int32_t)(__atomic_load_n(&until[c], __ATOMIC_ACQUIRE) - (uint32_t)p->epoch) < 0; i++) {
        if (i == 20000) return -1;
        usleep(100);
    }
    for (int token = 0; token < NMK_VOCAB; token++)
        if (mask[token / 32] >> token % 32 & 1) return token;
    return 0;
}

static void run_step(const nmk_params *p) {
    const uint32_t epoch = (uint32_t)p->epoch;
    uint32_t *abort_flag = (uint32_t *)(uintptr_t)p->abort, *counters = (uint32_t *)(uintptr_t)p->counters;
    nmk_control *control = (nmk_control *)(uintptr_t)p->control;
    int32_t *out = (int32_t *)(uintptr_t)p->out + p->out_row * NMK_COLUMNS;
    uint64_t *times = (uint64_t *)(uintptr_t)p->times + 2 * p->out_row;
    steps_run++, queued_steps--, in_flight_seen = p->in_flight;
    if (p->trace && p->trace != traced_last) traced_steps++;
    if (p->trace) traced_last = p->trace;
    nmk_hang *h = (nmk_hang *)(uintptr_t)p->hang;
    if (*abort_flag) { /* who waits long sees it, and leaves a record too, here for an earlier counter */
        if (!fake.silent && !h[6].word)
            h[6] = (nmk_hang){.word = hang_word(epoch, 2, 1, 4), .counter = 1, .expected = 792, .got = 528};
        return;
    }
    if (steps_run == fake.hang_at || counters[0] != epoch - 1) {
        *abort_flag = fake.silent ? hang_word(epoch, 3, 17, 0) : hang_word(epoch, 1, 16, 5);
        for (int c = 0; c < NMK_COLUMNS; c++) out[c] = -2;
        if (fake.silent) return;
        /* a victim of the wait, then the wait */
        h[3] = (nmk_hang){.word = hang_word(epoch, 1, 16, 5), .counter = 4, .expected = 128, .got = 127};
        h[9] = (nmk_hang){.word = hang_word(epoch, 1, 17, 3), .counter = 2, .expected = 264, .got = counters[0]};
        return;
    }
    counters[0] = epoch;
    times[0] = (uint64_t)(1e6 * fake_now_ms) + 1;
    fake_now_ms += fake_ms(NULL, 0);
    times[1] = (uint64_t)(1e6 * fake_now_ms) + 1;
    for (int c = 0; c < NMK_COLUMNS; c++) {
        nmk_column *column = &control->column[c];
        out[c] = -1;
        if (column->pos < 0) continue;
        if (seen_count < MOST_SEEN) {
            seen_at[seen_count].step = steps_run, seen_at[seen_count].column = c;
            seen[seen_count++] = *column;
        }
        int32_t token = fake_model ? fake_model(p, column) : (column->token + 1) % NMK_VOCAB;
        if (!(column->flags & 1)) continue;
        if (column->flags & NMK_COLUMN_MASKED) token = masked_token(p, c);
        bool stop = false;
        for (int i = 0; i < control->stop_count; i++) stop |= control->stop_ids[i] == token;
        out[c] = column->token = token;
        column->pos++, column->base = column->pos, column->remaining--;
        if (stop || column->remaining == 0) column->pos = -1;
    }
}

static void run_one(void) {
    if (queue_head == queue_tail) return;
    work *w = &queue[queue_head++ % MOST_WORK];
    bool is_large = (w->kind == COPY || w->kind == SET) && w->bytes >= 4096 && large_of(w->dst) >= 0;
    if (w->kind == COPY && is_large) drop(w->src, w->bytes);
    if (w->kind == COPY && !is_large) memcpy((void *)(uintptr_t)w->dst, w->src, w->bytes);
    if (w->kind == SET && !is_large) memset((void *)(uintptr_t)w->dst, w->value, w->bytes);
    if (w->kind == STEP) {
        uint64_t *times = (uint64_t *)(uintptr_t)w->between;
        if (times && !w->chunk) times[0] = (uint64_t)(1e6 * fake_now_ms) + 1;
        (w->chunk ? run_chunk : run_step)(&w->params);
        if (times && !w->chunk) times[1] = (uint64_t)(1e6 * fake_now_ms) + 1;
    }
    if (w->kind == EVENT) *w->event = (struct fake_event){true, fake_now_ms};
}

static void run_all(void) {
    while (queue_head != queue_tail) run_one();
}

static const work *last_added; /* NULL: none */
static work *add_work(int kind) {
    assert(queue_tail - queue_head < MOST_WORK);
    work *w = &queue[queue_tail++ % MOST_WORK];
    memset(w, 0, sizeof *w);
    w->kind = kind;
    last_added = w;
    return w;
}

/* ---- the driver ---- */

static CUresult ok_name(CUresult r, const char **name) {
    return *name = r == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER", 0;
}
static CUresult ok_text(CUresult r, const char **text) {
    return *text = r == 700 ? "an illegal memory access was encountered" : "something else", 0;
}
static CUresult device_count(int *count) { return *count = fake.device_count, 0; }
static CUresult device_get(CUdevice *d, int index) { return *d = index, 0; }
static CUresult device_name(char *name, int size, CUdevice d) {
    (void)d;
    return snprintf(name, (size_t)size, "Paper GPU"), 0;
}
static CUresult device_attribute(int *value, int attribute, CUdevice d) {
    (void)d;
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? fake.major
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? fake.minor
             : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT     ? fake.sms
             : attribute == CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE        ? fake.memory_khz
             : attribute == CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH  ? fake.bus_bits
                                                                         : fake.smem_bytes;
    return 0;
}
static CUresult retain(CUcontext *c, CUdevice d) {
    (void)d;
    return fake.contexts++, *c = (CUcontext)&fake, 0;
}
static CUresult release(CUdevice d) {
    (void)d;
    return fake.contexts--, 0;
}
static CUresult set_current(CUcontext c) {
    (void)c;
    return 0;
}
static CUresult synchronize(void) { return run_all(), 0; }
static CUresult mem_info(size_t *free_bytes, size_t *total) {
    return *free_bytes = fake.free_bytes, *total = fake.total_bytes, 0;
}
static CUresult mem_alloc(CUdeviceptr *p, size_t bytes) {
    if (bytes > fake.total_bytes) return 2;
    if (bytes >= LARGE_BYTES) {
        int i = 0, flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        while (large[i].p) i++;
        assert(i < MOST_LARGE);
        void *block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (block == MAP_FAILED) return 2;
        large[i].p = block, large[i].bytes = bytes;
        return *p = (CUdeviceptr)(uintptr_t)block, 0;
    }
    void *memory = xmalloc(bytes);
    memset(memory, 0xab, bytes);
    return *p = (CUdeviceptr)(uintptr_t)memory, 0;
}
static CUresult mem_free(CUdeviceptr p) {
    run_all();
    int i = large_of(p);
    if (i >= 0) return munmap(large[i].p, large[i].bytes), large[i].p = NULL, 0;
    return free((void *)(uintptr_t)p), 0;
}
/* What the driver owns.  A lost GPU gets nothing back: it is the driver's to the end, and no leak. */
static void *owned[1024];
static void *own(void *p) {
    size_t i = 0;
    while (i < sizeof owned / sizeof *owned && owned[i]) i++;
    if (i < sizeof owned / sizeof *owned) owned[i] = p;
    return p;
}
static CUresult disown(void *p) {
    run_all();
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        if (owned[i] == p) owned[i] = NULL;
    return free(p), 0;
}
static CUresult host_alloc(void **p, size_t bytes, unsigned flags) {
    (void)flags;
    return *p = own(xmalloc(bytes)), 0;
}
static CUresult host_free(void *p) { return disown(p); }
static CUresult host_pointer(CUdeviceptr *d, void *host, unsigned flags) {
    (void)flags;
    return *d = (CUdeviceptr)(uintptr_t)host, 0;
}
static CUresult to_host(void *dst, CUdeviceptr src, size_t bytes) {
    return run_all(), memcpy(dst, (void *)(uintptr_t)src, bytes), 0;
}
static CUresult to_device_async(CUdeviceptr dst, const void *src, size_t bytes, CUstream s) {
    (void)s;
    work *w = add_work(COPY);
    w->dst = dst, w->src = src, w->bytes = bytes;
    return 0;
}
static CUresult set_async(CUdeviceptr dst, unsigned char value, size_t bytes, CUstream s) {
    (void)s;
    work *w = add_work(SET);
    w->dst = dst, w->value = value, w->bytes = bytes;
    return 0;
}
static CUresult stream_create(CUstream *s, unsigned flags) {
    (void)flags;
    return *s = (CUstream)queue, 0;
}
static CUresult stream_any(CUstream s) {
    (void)s;
    return run_all(), 0;
}
static CUresult event_create(CUevent *event, unsigned flags) {
    (void)flags;
    return *event = own(xcalloc(1, sizeof(struct fake_event))), 0;
}
static CUresult event_destroy(CUevent event) { return disown(event); }
static CUresult event_record(CUevent event, CUstream s) {
    (void)s;
    work *w = add_work(EVENT);
    w->event = (struct fake_event *)event;
    return w->event->done = false, 0;
}
static CUresult event_query(CUevent event) {
    if (fake.fail) return 700;
    const struct fake_event *f = (const struct fake_event *)event;
    run_one(); /* a GPU goes on by itself, whatever it is asked */
    return f->done ? 0 : CUDA_ERROR_NOT_READY;
}
static CUresult event_wait(CUevent event) {
    (void)event;
    return run_all(), 0;
}
static CUresult event_elapsed(float *ms, CUevent a, CUevent b) {
    const struct fake_event *from = (const struct fake_event *)a, *to = (const struct fake_event *)b;
    return *ms = (float)(to->ms - from->ms), 0;
}
/* All cubins are the same file, so a module is of what was compiled last. */
static const char *compiled;
static bool compiled_mixed;
static CUresult module_load(CUmodule *m, const void *image) {
    (void)image;
    const bool chunks = nmk_prefill && compiled == nmk_prefill->kernel;
    *m = compiled_mixed ? (CUmodule)&compiled_mixed : chunks ? (CUmodule)&seen_chunks : (CUmodule)&fake;
    return fake.load_result;
}
static CUresult module_unload(CUmodule m) {
    (void)m;
    return 0;
}
static char step_function, chunk_function, mixed_function, other_function;
static CUresult module_function(CUfunction *f, CUmodule m, const char *name) {
    if (strcmp(name, "nmk_step")) return *f = (CUfunction)&other_function, 0;
    if (m == (CUmodule)&compiled_mixed) return *f = (CUfunction)&mixed_function, 0;
    return *f = (CUfunction)(m == (CUmodule)&fake ? &step_function : &chunk_function), 0;
}
static CUresult function_set(CUfunction f, int attribute, int value) {
    (void)f;
    assert(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value == NMK_SMEM_BYTES);
    return 0;
}
static CUresult occupancy(int *blocks, CUfunction f, int threads, size_t bytes) {
    (void)f, (void)threads, (void)bytes;
    return *blocks = 1, 0;
}
static CUresult stream_query(CUstream s) {
    (void)s;
    if (fake.fail) return 700;
    run_one();
    return queue_head == queue_tail ? 0 : CUDA_ERROR_NOT_READY;
}
static CUresult launch(CUfunction f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                       unsigned smem_bytes, CUstream s, void **params, void **extra) {
    (void)y, (void)z, (void)by, (void)bz, (void)s, (void)extra;
    if (f == (CUfunction)&other_function) return 0;
    assert(x == NMK_SMS && bx == NMK_THREADS && smem_bytes == NMK_SMEM_BYTES);
    /* what is mixed happens one after the other, so that the step's tokens are there before the chunk is over */
    const bool mixed = f == (CUfunction)&mixed_function;
    mixed_launches += mixed;
    for (int i = 0; i < 1 + mixed; i++) {
        work *w = add_work(STEP);
        w->chunk = mixed ? i : f == (CUfunction)&chunk_function;
        w->between = mixed ? *(uint64_t *)params[2] : 0;
        memcpy(&w->params, params[i], sizeof(nmk_params));
        if (++queued_steps > most_queued_steps) most_queued_steps = queued_steps;
    }
    return 0;
}

/* A launch that may begin while the one before ends follows a step, with nothing between them. */
static int early_launches;
static CUresult launch_ex(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
    if (c->attribute_count) {
        assert(c->attribute_count == 1 && c->attributes->value.allowed == 1);
        assert(c->attributes->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
        assert(f == (CUfunction)&step_function && last_added && last_added->kind == STEP && !last_added->chunk);
        early_launches++;
    }
    return launch(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->dynamic_smem_bytes,
                  c->stream, params, extra);
}

/* ---- the compiler ---- */

static char *self;
static size_t self_bytes;

static int rtc_zero(void) { return 0; }
static nvrtcResult rtc_create(nvrtcProgram *p, const char *source, const char *name, int n, const char *const *texts,
                              const char *const *names) {
    (void)name, (void)n, (void)texts, (void)names;
    compiled = source, compiled_mixed = !strncmp(source, "#define NMK_MIXED", 17);
    return *p = (nvrtcProgram)&fake, 0;
}
static nvrtcResult rtc_compile(nvrtcProgram p, int count, const char *const *options) {
    (void)p, (void)count, (void)options;
    return 0;
}
static const char rtc_text[] = "ptxas info    : Used 168 registers, used 5 barriers\n";
static nvrtcResult rtc_log_size(nvrtcProgram p, size_t *bytes) {
    (void)p;
    return *bytes = sizeof rtc_text, 0;
}
static nvrtcResult rtc_log(nvrtcProgram p, char *log) {
    (void)p;
    return memcpy(log, rtc_text, sizeof rtc_text), 0;
}
static nvrtcResult rtc_size(nvrtcProgram p, size_t *bytes) {
    (void)p;
    return *bytes = self_bytes, 0;
}
static nvrtcResult rtc_cubin(nvrtcProgram p, char *cubin) {
    (void)p;
    return memcpy(cubin, self, self_bytes), 0;
}
static nvrtcResult rtc_destroy(nvrtcProgram *p) {
    (void)p;
    return rtc_zero();
}

static int fake_install(nmk_err *e) {
    setenv("NMK_CACHE_DIR", "/proc/nmk/none", 1);
    if (nmk_file_read(&self, &self_bytes, "/proc/self/exe", (size_t)1 << 30, e)) return -1;
    nmk_cuda = (struct nmk_cuda){
        .cuGetErrorName = ok_name,
        .cuGetErrorString = ok_text,
        .cuDeviceGetCount = device_count,
        .cuDeviceGet = device_get,
        .cuDeviceGetName = device_name,
        .cuDeviceGetAttribute = device_attribute,
        .cuDevicePrimaryCtxRetain = retain,
        .cuDevicePrimaryCtxRelease = release,
        .cuCtxSetCurrent = set_current,
        .cuCtxSynchronize = synchronize,
        .cuMemGetInfo = mem_info,
        .cuMemAlloc = mem_alloc,
        .cuMemFree = mem_free,
        .cuMemHostAlloc = host_alloc,
        .cuMemFreeHost = host_free,
        .cuMemHostGetDevicePointer = host_pointer,
        .cuMemcpyDtoH = to_host,
        .cuMemcpyHtoDAsync = to_device_async,
        .cuMemsetD8Async = set_async,
        .cuStreamCreate = stream_create,
        .cuStreamDestroy = stream_any,
        .cuStreamSynchronize = stream_any,
        .cuEventCreate = event_create,
        .cuEventDestroy = event_destroy,
        .cuEventRecord = event_record,
        .cuEventQuery = event_query,
        .cuEventSynchronize = event_wait,
        .cuEventElapsedTime = event_elapsed,
        .cuModuleLoadData = module_load,
        .cuModuleUnload = module_unload,
        .cuModuleGetFunction = module_function,
        .cuFuncSetAttribute = function_set,
        .cuOccupancyMaxActiveBlocksPerMultiprocessor = occupancy,
        .cuLaunchKernel = launch,
        .cuLaunchKernelEx = launch_ex,
        .cuStreamQuery = stream_query,
        .driver_version = 12040,
    };
    nmk_nvrtc = (struct nmk_nvrtc){
        .nvrtcCreateProgram = rtc_create,
        .nvrtcDestroyProgram = rtc_destroy,
        .nvrtcCompileProgram = rtc_compile,
        .nvrtcGetCUBINSize = rtc_size,
        .nvrtcGetCUBIN = rtc_cubin,
        .nvrtcGetProgramLogSize = rtc_log_size,
        .nvrtcGetProgramLog = rtc_log,
        .major = 13,
    };
    return 0;
}

#endif
