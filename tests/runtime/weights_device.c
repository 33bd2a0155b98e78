/* Loading to the GPU without one: the driver's functions are played by this program, the kernels by their own text.  What
 * is tested is the walk over the files: batches, cut tensors, offsets, and that nothing is left behind. */
#include "weights.h"

#include "weights_helper.h"
#include "weights_kernels.h"
#include "weights_plain.h"

static int allocated, launches, fail_alloc_at, allocs;

static CUresult host_alloc(void **p, size_t bytes, unsigned flags) {
    (void)flags;
    if (++allocs == fail_alloc_at) return 2;
    allocated++;
    *p = xmalloc(bytes);
    return 0;
}
static CUresult host_free(void *p) { return free(p), allocated--, 0; }
static CUresult dev_alloc(CUdeviceptr *p, size_t bytes) { return host_alloc((void **)p, bytes, 0); }
static CUresult dev_free(CUdeviceptr p) { return host_free((void *)(uintptr_t)p); }
static CUresult copy(CUdeviceptr dst, const void *src, size_t bytes, CUstream s) {
    (void)s;
    return memcpy((void *)(uintptr_t)dst, src, bytes), 0;
}
static CUresult stream_create(CUstream *s, unsigned flags) {
    return (void)flags, *s = (CUstream)&allocated, allocated++, 0;
}
static CUresult stream_destroy(CUstream s) { return (void)s, allocated--, 0; }
static CUresult stream_wait(CUstream s) { return (void)s, 0; }
static CUresult event_create(CUevent *e, unsigned flags) {
    return (void)flags, *e = (CUevent)&allocated, allocated++, 0;
}
static CUresult event_destroy(CUevent e) { return (void)e, allocated--, 0; }
static CUresult event_record(CUevent e, CUstream s) { return (void)e, (void)s, 0; }
static CUresult event_wait(CUevent e) { return (void)e, 0; }
static CUresult error_text(CUresult r, const char **text) { return (void)r, *text = "out of memory", 0; }
static CUresult get_function(CUfunction *f, CUmodule m, const char *name) {
    (void)m;
    *f = (CUfunction)(uintptr_t)name;
    return 0;
}
static CUresult launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned smem, CUstream s, void **a, void **extra) {
    (void)gx, (void)gy, (void)gz, (void)by, (void)bz, (void)smem, (void)s, (void)extra;
    const char *name = (const char *)f;
    u16 *dst = *(u16 **)a[0];
    launches++;
    if (strcmp(name, "nmk_pack") == 0)
        GRID(1, bx, nmk_pack(dst, *(u16 **)a[1], *(int *)a[2], *(int *)a[3], *(int *)a[4], *(int *)a[5], *(int *)a[6]));
    else if (strcmp(name, "nmk_random_fill") == 0)
        GRID(1, bx,
             nmk_random_fill(dst, *(int *)a[1], *(int *)a[2], *(int *)a[3], *(int *)a[4], *(int *)a[5],
                             *(unsigned *)a[6], *(int *)a[7], *(float *)a[8]));
    else
        return 500;
    return 0;
}

static void play_driver(void) {
    nmk_cuda.cuMemHostAlloc = host_alloc, nmk_cuda.cuMemFreeHost = host_free;
    nmk_cuda.cuMemAlloc = dev_alloc, nmk_cuda.cuMemFree = dev_free;
    nmk_cuda.cuMemcpyHtoDAsync = copy, nmk_cuda.cuLaunchKernel = launch;
    nmk_cuda.cuStreamCreate = stream_create, nmk_cuda.cuStreamDestroy = stream_destroy;
    nmk_cuda.cuStreamSynchronize = stream_wait, nmk_cuda.cuModuleGetFunction = get_function;
    nmk_cuda.cuEventCreate = event_create, nmk_cuda.cuEventDestroy = event_destroy;
    nmk_cuda.cuEventRecord = event_record, nmk_cuda.cuEventSynchronize = event_wait;
    nmk_cuda.cuGetErrorName = error_text, nmk_cuda.cuGetErrorString = error_text;
}

/* Where the two machines' arenas do not mean the same: a description of the first place, or NULL. */
static const char *differ(const nmk_weight_tables *t, const char *packed, const char *natural) {
    static char text[128];
    for (int i = 0; i < t->array_count; i++) {
        const nmk_array *a = &t->arrays[i];
        size_t bytes = (size_t)a->expert_kib * 1024;
        for (int layer = a->layer0; layer < a->layer0 + a->layers; layer++)
            for (int x = 0; x < (a->experts ? a->experts : 1); x++) {
                uint64_t at = nmk_array_at(a, layer, x);
                char *expected = xmalloc(bytes);
                const u16 *from = (const u16 *)(const void *)(natural + at);
                plain_element((u16 *)(void *)expected, a, from);
                int same = memcmp(expected, packed + at, bytes) == 0;
                free(expected);
                if (same) continue;
                snprintf(text, sizeof text, "array %s, layer %d, expert %d", a->name, layer, x);
                return text;
            }
    }
    return NULL;
}

static uint64_t reported;
static void progress(void *user, uint64_t done, uint64_t total) {
    (void)user;
    reported = done <= total && done > reported ? done : 0;
}

static void compare(const char *what, const char *dir, const nmk_weight_tables *t, size_t kib) {
    nmk_err e = {""};
    nmk_checkpoint *c = NULL;
    char *natural = xmalloc(kib * 1024), *packed = xmalloc(kib * 1024);
    memset(natural, 0xee, kib * 1024), memset(packed, 0xee, kib * 1024);
    reported = 0, launches = 0;
    int rc = nmk_checkpoint_open(&c, dir, t, &e);
    if (rc == 0) rc = nmk_checkpoint_load_host(c, natural, NULL, NULL, &e);
    if (rc == 0) rc = nmk_checkpoint_load_device(c, NULL, (CUdeviceptr)(uintptr_t)packed, progress, NULL, &e);
    const char *where = rc ? e.text : differ(t, packed, natural);
    check(!where, what, "%s", where ? where : "");
    check(!rc && reported == nmk_checkpoint_bytes(c), "all bytes were reported", "%llu", (unsigned long long)reported);
    check(allocated == 0, "nothing is left allocated", "%d", allocated);
    printf("# %d launches\n", launches);
    nmk_checkpoint_close(c);
    free(natural), free(packed);
}

/* Tensors that a staging buffer does not hold whole, rows that no tensor has, a vector of two tensors. */
static const nmk_array arrays[] = {
    {"embed", NMK_LAYOUT_ROWS, 0, 1, 0, 49168, 768, 0, 73752, 73752},
    {"up", NMK_LAYOUT_GATE_UP, 0, 1, 0, 2 * 32808, 512, 73752, 65616, 65616},
    {"norm", NMK_LAYOUT_VECTOR, 0, 1, 0, 1, 24, 139368, 1, 1},
};
static const nmk_tensor tensors[] = {
    {"a", 2, 0, 1, 0, 49163, 768, 0, 0, 0}, {"b", 1, 0, 1, 0, 1, 17, 2, 7, 0},
    {"b0", 1, 0, 1, 0, 1, 7, 2, 0, 0},      {"c", 2, 0, 1, 0, 32808, 512, 1, 32808, 0},
    {"d", 2, 0, 1, 0, 32808, 512, 1, 0, 0},
};
static const nmk_weight_tables cut_tables = {arrays, 3, tensors, 5};
enum { CUT_KIB = 139369 };

static void write_cut(void) {
    static const char head[] =
        "{\"a\":{\"dtype\":\"BF16\",\"shape\":[49163,768],\"data_offsets\":[0,75514368]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[17],\"data_offsets\":[75514368,75514402]},"
        "\"b0\":{\"dtype\":\"BF16\",\"shape\":[7],\"data_offsets\":[75514402,75514416]},"
        "\"c\":{\"dtype\":\"BF16\",\"shape\":[32808,512],\"data_offsets\":[75514416,109109808]},"
        "\"d\":{\"dtype\":\"BF16\",\"shape\":[32808,512],\"data_offsets\":[109109808,142705200]}}";
    uint64_t length = sizeof head - 1;
    size_t bytes = 8 + length + 142705200;
    char *all = xmalloc(bytes + 8);
    memcpy(all, &length, 8);
    memcpy(all + 8, head, length);
    uint64_t x = 1;
    for (size_t at = 8 + length; at < bytes; at += 8)
        x = x * 6364136223846793005u + 1442695040888963407u, memcpy(all + at, &x, 8);
    write_file("model.safetensors", all, bytes);
    free(all);
}

static void test_failures(void) {
    nmk_err e = {""};
    nmk_checkpoint *c = NULL;
    char *packed = xmalloc((size_t)CUT_KIB * 1024), *path = xasprintf("%s/model.safetensors", test_dir);
    CUdeviceptr arena = (CUdeviceptr)(uintptr_t)packed;
    if (nmk_checkpoint_open(&c, test_dir, &cut_tables, &e)) check(0, "open", "%s", e.text);
    for (fail_alloc_at = 1; fail_alloc_at <= 6; fail_alloc_at++) {
        allocs = 0;
        if (nmk_checkpoint_load_device(c, NULL, arena, NULL, NULL, &e) == 0) check(0, "no memory", "accepted");
    }
    fail_alloc_at = 0;
    check(allocated == 0, "no memory on the GPU: refused, nothing left", "%d", allocated);
    if (truncate(path, 100000000)) perror(path);
    check_refused("a file that shrinks while it is read", nmk_checkpoint_load_device(c, NULL, arena, NULL, NULL, &e),
                  &e, "DIR/model.safetensors: became shorter while it was read");
    check_refused("and on the CPU", nmk_checkpoint_load_host(c, packed, NULL, NULL, &e), &e,
                  "DIR/model.safetensors: became shorter while it was read");
    check(allocated == 0, "nothing is left allocated then", "%d", allocated);
    nmk_checkpoint_close(c);
    free(packed), free(path);
}

static void test_random(void) {
    nmk_err e = {""};
    nmk_weight_tables t = nmk_model_tables();
    size_t bytes = (size_t)NMK_WEIGHTS_KIB * 1024;
    char *natural = xcalloc(bytes, 1), *packed = xmalloc(bytes);
    memset(packed, 0xee, bytes);
    nmk_random_load_host(&t, natural, 3);
    int rc = nmk_random_load_device(&t, NULL, (CUdeviceptr)(uintptr_t)packed, 3, &e);
    const char *where = rc ? e.text : differ(&t, packed, natural);
    check(!where, "random weights of the toy", "%s", where ? where : "");
    check(allocated == 0, "nothing is left allocated after them", "%d", allocated);
    free(natural), free(packed);
}

int main(void) {
    nmk_weight_tables toy = nmk_model_tables();
    play_driver();
    make_dir();
    compare("the toy's checkpoint", "examples/nmc-toy", &toy, NMK_WEIGHTS_KIB);
    write_cut();
    compare("tensors larger than a staging buffer", test_dir, &cut_tables, CUT_KIB);
    test_failures();
    test_random();
    clear_dir();
    rmdir(test_dir);
    return failures != 0;
}
