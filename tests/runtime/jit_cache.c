/* The compiler's report, and a cache that is believed only when it is whole. */
#include "jit.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda.h"
#include "check.h"

static char dir[] = "/tmp/nmk-jit-XXXXXX";

static const char plain[] = "extern \"C\" __global__ void k(float *p) { p[threadIdx.x] *= 2; }";
static const char broken[] = "extern \"C\" __global__ void k(float *p) { p[0] = nothing; }";
static const char spilling[] =
    "extern \"C\" __global__ void __launch_bounds__(1024, 2) k(float *p) {\n"
    "  float a[96];\n"
    "  for (int i = 0; i < 96; i++) a[i] = p[threadIdx.x + i * 1024];\n"
    "  __syncthreads();\n"
    "#pragma unroll\n"
    "  for (int i = 0; i < 96; i++) p[threadIdx.x + i * 1024] = a[i] * a[95 - i] + a[i / 2];\n"
    "}";

/* Sums that are touched between two products. */
static const char serialized[] =
    "extern \"C\" __global__ void __launch_bounds__(128) k(float *p, unsigned long long a) {\n"
    "  float d[4];\n"
    "  for (int i = 0; i < 4; i++) d[i] = p[threadIdx.x + i];\n"
    "  asm volatile(\"wgmma.fence.sync.aligned;\" ::: \"memory\");\n"
    "  for (int i = 0; i < 4; i++) {\n"
    "    asm volatile(\"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;\"\n"
    "                 : \"+f\"(d[0]), \"+f\"(d[1]), \"+f\"(d[2]), \"+f\"(d[3]) : \"l\"(a + i));\n"
    "    d[0] += 1;\n"
    "  }\n"
    "  asm volatile(\"wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;\" ::: \"memory\");\n"
    "  for (int i = 0; i < 4; i++) p[threadIdx.x + i] = d[i];\n"
    "}";

static int compile(nmk_jit_result *r, const char *source, const char *arch, bool allow_spills, nmk_err *e) {
    nmk_jit_request request = {.name = "test.cu",
                               .source = source,
                               .source_bytes = strlen(source),
                               .arch = arch,
                               .allow_spills = allow_spills};
    e->text[0] = 0;
    return nmk_jit_compile(r, &request, e);
}

/* The one file of the cache, "" if there is none or several. */
static char *entry(void) {
    static char path[512];
    int count = 0;
    DIR *d = opendir(dir);
    for (struct dirent *f; d && (f = readdir(d));)
        if (f->d_name[0] != '.') snprintf(path, sizeof path, "%s/%s", dir, f->d_name), count++;
    if (d) closedir(d);
    if (count != 1) path[0] = 0;
    return path;
}

static void clear(void) {
    DIR *d = opendir(dir);
    for (struct dirent *f; d && (f = readdir(d));) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", dir, f->d_name);
        if (f->d_name[0] != '.') unlink(path);
    }
    if (d) closedir(d);
}

static void flip(const char *path, long at) {
    FILE *f = fopen(path, "r+b");
    if (!f) return;
    fseek(f, at, at < 0 ? SEEK_END : SEEK_SET);
    int c = fgetc(f);
    fseek(f, -1, SEEK_CUR);
    fputc(c ^ 1, f);
    fclose(f);
}

/* After `what` was done to the entry, it is compiled anew, not used, and good again. */
static void replaced(const char *name, const nmk_jit_result *first) {
    nmk_err e = {0};
    nmk_jit_result r = {0}, again = {0};
    int rc = compile(&r, plain, "sm_90a", false, &e);
    check(rc == 0 && !r.cached && r.cubin_bytes == first->cubin_bytes && strstr(r.cache, "replaced"), name,
          "rc %d, cached %d, \"%s\", %s", rc, r.cached, r.cache, e.text);
    rc = compile(&again, plain, "sm_90a", false, &e);
    check(rc == 0 && again.cached, "and used the next time", "rc %d: %s", rc, e.text);
    nmk_jit_result_free(&r), nmk_jit_result_free(&again);
}

static void parsing(void) {
    nmk_jit_result r = {0};
    check(nmk_ptxas_parse("ptxas info    : Function properties for f\n"
                          "ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
                          "ptxas info    : Used 168 registers, used 5 barriers\n"
                          "    16 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads\n"
                          "ptxas info    : Used 40 registers\n",
                          &r) &&
              r.registers == 168 && r.spill_store_bytes == 5 && r.spill_load_bytes == 14 && r.stack_bytes == 24,
          "registers and spills of all functions", "%d registers, %d, %d, %d", r.registers, r.spill_store_bytes,
          r.spill_load_bytes, r.stack_bytes);
    check(nmk_ptxas_parse("ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
                          "serialized due to insufficient register resources for the function in the function 'f'\n"
                          "ptxas info    : Used 168 registers, used 7 barriers\n",
                          &r) &&
              r.serialized == 1 && r.registers == 168,
          "products one by one", "%d, %d registers", r.serialized, r.registers);
    check(!nmk_ptxas_parse("nothing here\n", &r), "a log without resources", "was believed");
    size_t text, smem;
    check(!nmk_cubin_sizes("\177ELF", 4, &text, &smem) && !nmk_cubin_sizes(plain, sizeof plain, &text, &smem),
          "what is no ELF file", "was believed");
}

int main(void) {
    nmk_err e = {0};
    parsing();
    if (nmk_nvrtc_load(&e)) {
        printf("skip - jit cache: %s\n", e.text);
        return failures != 0;
    }
    if (!mkdtemp(dir)) return perror(dir), 2;
    setenv("NMK_CACHE_DIR", dir, 1);

    nmk_jit_result first, r;
    if (!check(compile(&first, plain, "sm_90a", false, &e) == 0, "compiles", "%s", e.text)) return 1;
    check(!first.cached && first.registers > 0 && first.text_bytes > 0 && first.spill_store_bytes == 0,
          "and says its cost", "cached %d, %d registers, %zu bytes", first.cached, first.registers, first.text_bytes);
    int rc = compile(&r, plain, "sm_90a", false, &e);
    check(rc == 0 && r.cached && r.cubin_bytes == first.cubin_bytes && !memcmp(r.cubin, first.cubin, r.cubin_bytes) &&
              r.registers == first.registers && r.text_bytes == first.text_bytes,
          "the second time comes from the cache, the same", "rc %d, cached %d: %s", rc, r.cached, e.text);
    nmk_jit_result_free(&r);

    flip(entry(), 20), replaced("a flipped bit in the header", &first);
    flip(entry(), -5), replaced("a flipped bit in the cubin", &first);
    if (truncate(entry(), 100)) perror("truncate");
    replaced("a truncated entry", &first);
    if (truncate(entry(), 0)) perror("truncate");
    replaced("an empty entry", &first);

    rc = compile(&r, plain, "sm_90", false, &e);
    check(rc == 0 && !r.cached, "another architecture is another entry", "rc %d: %s", rc, e.text);
    nmk_jit_result_free(&r);
    clear();
    setenv("NMK_CACHE_DIR", "/proc/nmk/none", 1);
    rc = compile(&r, plain, "sm_90a", false, &e);
    check(rc == 0 && !r.cached && strstr(r.cache, "cannot write"), "an unwritable folder costs the cache only",
          "rc %d, \"%s\": %s", rc, r.cache, e.text);
    nmk_jit_result_free(&r);
    setenv("NMK_CACHE_DIR", dir, 1);

    rc = compile(&r, broken, "sm_90a", false, &e);
    check_message(rc, &e, "identifier \"nothing\" is undefined", "the compiler's error is passed on");
    check(strstr(e.text, "test.cu(1)") && !*entry(), "with its place, and nothing cached", "%s", e.text);
    rc = compile(&r, plain, "sm_1", false, &e);
    check_message(rc, &e, "test.cu does not compile for sm_1", "an architecture that there is not");
    rc = compile(&r, spilling, "sm_90a", false, &e);
    check_message(rc, &e, "loaded): refused without --allow-spills", "spills are refused");
    rc = compile(&r, spilling, "sm_90a", false, &e);
    check_message(rc, &e, "spills registers", "also from the cache");
    rc = compile(&r, spilling, "sm_90a", true, &e);
    check(rc == 0 && r.cached && r.spill_store_bytes > 0, "unless they are allowed", "rc %d: %s", rc, e.text);
    nmk_jit_result_free(&r);
    rc = compile(&r, serialized, "sm_90a", false, &e);
    check_message(rc, &e, "ptxas serialized wgmma", "products one by one are refused");
    rc = compile(&r, serialized, "sm_90a", false, &e);
    check_message(rc, &e, "ptxas serialized wgmma", "also from the cache");
    rc = compile(&r, serialized, "sm_90a", true, &e);
    check(rc == 0 && r.cached && r.serialized == 1, "unless they are allowed", "rc %d: %s", rc, e.text);
    nmk_jit_result_free(&r), nmk_jit_result_free(&first), nmk_jit_result_free(NULL);
    clear(), rmdir(dir);
    return failures != 0;
}
