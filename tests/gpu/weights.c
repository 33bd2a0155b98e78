/* Weights on the GPU: packed and random arrays against the layout's plain description; how fast they get there.  Without
 * a GPU the pack kernels are compiled if there is NVRTC, and the rest is skipped. */
#include "weights.h"

#include "jit.h"
#include "runtime/weights_helper.h"
#include "runtime/weights_plain.h"

static CUmodule module;

/* The pack kernels alone: what is emitted at the end of megakernel.cu. */
static int compile(nmk_jit_result *r, nmk_err *e) {
    int rc = -1;
    static const char *const files[] = {"templates/random.h", "templates/packed.h", "templates/pack.cu"};
    nmk_buf source = {0};
    for (int i = 0; i < 3; i++) {
        char *text;
        size_t bytes;
        if (nmk_file_read(&text, &bytes, files[i], 1 << 20, e)) goto out;
        nmk_buf_add(&source, text, bytes);
        free(text);
    }
    nmk_jit_request q = {.name = "pack.cu", .source = source.data, .source_bytes = source.length, .arch = "sm_90a"};
    if (nmk_jit_compile(r, &q, e)) goto out;
    printf("# pack kernels: %d registers, %zu bytes of code\n", r->registers, r->text_bytes);
    rc = 0;
out:
    nmk_buf_free(&source);
    return rc;
}

/* Compares the arena in GPU memory with a natural one: e names the first matrix that differs, if any. */
static void compare(const nmk_weight_tables *t, CUdeviceptr arena, const char *natural, nmk_err *e) {
    for (int i = 0; i < t->array_count && !e->text[0]; i++) {
        const nmk_array *a = &t->arrays[i];
        size_t bytes = (size_t)a->expert_kib * 1024;
        u16 *got = xmalloc(bytes), *expected = xmalloc(bytes);
        for (int layer = a->layer0; layer < a->layer0 + a->layers; layer++)
            for (int x = 0; x < (a->experts ? a->experts : 1); x++) {
                uint64_t at = nmk_array_at(a, layer, x);
                plain_element(expected, a, (const u16 *)(const void *)(natural + at));
                CU(e, cuMemcpyDtoH(got, arena + at, bytes));
                if (memcmp(got, expected, bytes) == 0) continue;
                nmk_fail(e, "array %s, layer %d, expert %d differs", a->name, layer, x);
                goto out;
            }
    out:
        free(got), free(expected);
    }
}

static void test_toy(void) {
    nmk_err e = {""};
    nmk_weight_tables t = nmk_model_tables();
    nmk_checkpoint *c = NULL;
    CUdeviceptr arena = 0;
    size_t bytes = (size_t)NMK_WEIGHTS_KIB * 1024;
    char *natural = xcalloc(bytes, 1);
    if (nmk_checkpoint_open(&c, "examples/nmc-toy", &t, &e)) goto out;
    CU(&e, cuMemAlloc(&arena, bytes));
    CU(&e, cuMemsetD8Async(arena, 0xee, bytes, NULL));
    CU(&e, cuCtxSynchronize());
    if (nmk_checkpoint_load_host(c, natural, NULL, NULL, &e)) goto out;
    if (nmk_checkpoint_load_device(c, module, arena, NULL, NULL, &e)) goto out;
    compare(&t, arena, natural, &e);
out:
    check(e.text[0] == 0, "the toy's checkpoint, packed", "%s", e.text);
    nmk_checkpoint_close(c);
    if (arena) nmk_cuda.cuMemFree(arena);
    free(natural);
}

/* Random weights of the whole model; the first and the last layer of every array are compared. */
static void test_random(void) {
    nmk_err e = {""};
    nmk_weight_tables t = nmk_model_tables();
    CUdeviceptr arena = 0;
    size_t bytes = (size_t)NMK_WEIGHTS_KIB * 1024;
    CU(&e, cuMemAlloc(&arena, bytes));
    CU(&e, cuMemsetD8Async(arena, 0xee, bytes, NULL));
    CU(&e, cuCtxSynchronize());
    if (nmk_random_load_device(&t, module, arena, 42, &e)) goto out;
    uint64_t start = nmk_now_ns();
    if (nmk_random_load_device(&t, module, arena, 42, &e)) goto out;
    double s = (double)(nmk_now_ns() - start) / 1e9;
    printf("# random weights: %.2f GB in %.1f ms, %.0f GB/s\n", (double)bytes / 1e9, s * 1e3, (double)bytes / s / 1e9);
    for (int i = 0; i < t.array_count && !e.text[0]; i++) {
        for (int last = 0; last < 2; last++) {
            /* The same array cut down to one layer, at the start of an arena of its own. */
            nmk_array a = t.arrays[i];
            int layer = last ? a.layer0 + a.layers - 1 : a.layer0;
            uint64_t at = nmk_array_at(&a, layer, 0);
            a.layer0 = layer, a.layers = 1, a.kib = 0;
            nmk_weight_tables one = {&a, 1, NULL, 0};
            char *natural = xcalloc((size_t)a.layer_kib, 1024);
            nmk_random_load_host(&one, natural, 42);
            compare(&one, arena + at, natural, &e);
            free(natural);
        }
    }
out:
    check(e.text[0] == 0, "random weights are those of the CPU", "%s", e.text);
    if (arena) nmk_cuda.cuMemFree(arena);
}

/* A checkpoint of NMC's shapes, large enough to time. */
static const nmk_array big_arrays[] = {
    {"embed", NMK_LAYOUT_ROWS, 0, 1, 0, 131072, 2048, 0, 524288, 524288},
    {"up", NMK_LAYOUT_GATE_UP, 0, 1, 64, 1536, 2048, 524288, 64 * 6144, 6144},
    {"down", NMK_LAYOUT_ROWS, 0, 1, 64, 2048, 768, 917504, 64 * 3072, 3072},
};
static const nmk_tensor big_tensors[] = {
    {"embed", 2, 0, 1, 0, 131072, 2048, 0, 0, 0},
    {"%d.%d.gate", 2, 0, 1, 64, 768, 2048, 1, 0, 0},
    {"%d.%d.up", 2, 0, 1, 64, 768, 2048, 1, 768, 0},
    {"%d.%d.down", 2, 0, 1, 64, 2048, 768, 2, 0, 0},
};
enum { BIG_KIB = 1114112 };

static void write_big(void) {
    nmk_buf head = {0};
    char *path = xasprintf("%s/model.safetensors", test_dir);
    FILE *f = fopen(path, "wb");
    if (!f) perror(path), exit(2);
    uint64_t at = 0;
    for (int i = 0; i < 4; i++)
        for (int x = 0; x < (i ? 64 : 1); x++) {
            const nmk_tensor *t = &big_tensors[i];
            uint64_t bytes = (uint64_t)t->rows * (uint64_t)t->cols * 2;
            char name[32];
            snprintf(name, sizeof name, i ? "0.%d.%s" : "embed", x, i ? t->name + 6 : "");
            nmk_buf_printf(&head, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[%d,%d],\"data_offsets\":[%llu,%llu]}",
                           head.length ? "," : "{", name, t->rows, t->cols, (unsigned long long)at,
                           (unsigned long long)(at + bytes));
            at += bytes;
        }
    nmk_buf_puts(&head, "}");
    uint64_t length = head.length, x = 1;
    fwrite(&length, 8, 1, f);
    fwrite(head.data, 1, head.length, f);
    uint64_t *block = xmalloc(1 << 20);
    for (uint64_t n = 0; n < at; n += 1 << 20) {
        for (int i = 0; i < 1 << 17; i++) block[i] = x = x * 6364136223846793005u + 1442695040888963407u;
        fwrite(block, 1, at - n < 1 << 20 ? (size_t)(at - n) : 1 << 20, f);
    }
    if (fclose(f)) perror(path), exit(2);
    free(block), free(path);
    nmk_buf_free(&head);
}

static void test_big(void) {
    nmk_err e = {""};
    nmk_weight_tables t = {big_arrays, 3, big_tensors, 4};
    nmk_checkpoint *c = NULL;
    CUdeviceptr arena = 0;
    CUfunction pack;
    CUevent start = NULL, end = NULL;
    char *natural = xcalloc(BIG_KIB, 1024);
    write_big();
    CU(&e, cuMemAlloc(&arena, (size_t)BIG_KIB * 1024));
    for (int round = 0; round < 2; round++) {
        uint64_t before = nmk_now_ns();
        if (nmk_checkpoint_open(&c, test_dir, &t, &e)) goto out;
        if (nmk_checkpoint_load_device(c, module, arena, NULL, NULL, &e)) goto out;
        double s = (double)(nmk_now_ns() - before) / 1e9;
        printf("# checkpoint to GPU: %.2f GB in %.2f s, %.1f GB/s\n", (double)nmk_checkpoint_bytes(c) / 1e9, s,
               (double)nmk_checkpoint_bytes(c) / s / 1e9);
        if (round == 0) nmk_checkpoint_close(c), c = NULL;
    }
    if (nmk_checkpoint_load_host(c, natural, NULL, NULL, &e)) goto out;
    compare(&t, arena, natural, &e);

    /* The kernel alone, from GPU memory: gate rows and plain rows. */
    CU(&e, cuModuleGetFunction(&pack, module, "nmk_pack"));
    CU(&e, cuEventCreate(&start, CU_EVENT_DEFAULT));
    CU(&e, cuEventCreate(&end, CU_EVENT_DEFAULT));
    for (int i = 0; i < 4; i++) {
        int layout = i / 2 ? NMK_LAYOUT_GATE_UP : NMK_LAYOUT_ROWS, rows = i / 2 ? 131072 : 65536, cols = 2048,
            first = 0;
        int count = 65536;
        CUdeviceptr src = arena + ((CUdeviceptr)768 << 20), dst = arena;
        void *args[] = {&dst, &src, &rows, &cols, &first, &count, &layout};
        float ms;
        CU(&e, cuEventRecord(start, NULL));
        CU(&e, cuLaunchKernel(pack, 65536, 1, 1, 256, 1, 1, 0, NULL, args, NULL));
        CU(&e, cuEventRecord(end, NULL));
        CU(&e, cuEventSynchronize(end));
        CU(&e, cuEventElapsedTime(&ms, start, end));
        printf("# nmk_pack %s: %.0f GB/s of weights\n", layout ? "gate_up half" : "rows",
               65536.0 * 2048 * 2 / ms / 1e6);
    }
out:
    check(e.text[0] == 0, "a large checkpoint, cut into many buffers", "%s", e.text);
    nmk_checkpoint_close(c);
    if (start) nmk_cuda.cuEventDestroy(start);
    if (end) nmk_cuda.cuEventDestroy(end);
    if (arena) nmk_cuda.cuMemFree(arena);
    free(natural);
}

int main(void) {
    nmk_err e = {""};
    nmk_gpu gpu = {0};
    nmk_gpu_needs needs = {"sm_90a", 9, 0, 1, 0};
    nmk_jit_result kernels = {0};
    if (compile(&kernels, &e)) {
        if (strstr(e.text, "libnvrtc"))
            printf("skip - compile the pack kernels: %s\n", e.text);
        else
            check(0, "compile the pack kernels", "%s", e.text);
        return failures != 0;
    }
    check(1, "compile the pack kernels", "none");
    nmk_err no_gpu = {""};
    if (nmk_gpu_open(&gpu, 0, &needs, &no_gpu)) {
        printf("skip - weights on a GPU: %s\n", no_gpu.text);
        nmk_jit_result_free(&kernels);
        return failures != 0;
    }
    CUresult rc = nmk_cuda.cuModuleLoadData(&module, kernels.cubin);
    nmk_jit_result_free(&kernels);
    if (rc) {
        nmk_cuda_check(rc, "cuModuleLoadData", &e);
        check(0, "load the pack kernels", "%s", e.text);
    } else {
        make_dir();
        if (strcmp(NMK_MODEL, "nmc-toy") == 0) test_toy();
        test_random();
        if (strcmp(NMK_MODEL, "nmc-toy") == 0) test_big();
        clear_dir();
        rmdir(test_dir);
        nmk_cuda.cuModuleUnload(module);
    }
    nmk_gpu_close(&gpu);
    return failures != 0;
}
