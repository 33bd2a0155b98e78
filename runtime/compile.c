/* nmk-compile: compiles a kernel this program was built with, or the .cu files named, and prints what it costs.
 *
 * Needs NVRTC but no GPU.  Exit 0: compiled without spills.  1: spills, serialized wgmma or errors.  2: wrong flags. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "generation.h"
#include "jit.h"

typedef struct {
    const char *arch, *output;
    bool no_cache, allow_spills, verbose;
} settings;

static int usage(FILE *f, int code) {
    char all[128];
    nmk_generation_list(all, sizeof all);
    fprintf(
        f,
        "usage: nmk-compile [--arch sm_90a] [--no-cache] [--allow-spills] [--verbose] [-o CUBIN]\n"
        "                   [--max-batch N] [--launch step|prefill|mixed] | FILE.cu ...\n"
        "Compiles the built-in kernel for N rows (or each FILE) with NVRTC and prints registers, spills and sizes:\n"
        "that of steps, of chunks of prompts, or the one that is both.\n"
        "Kernels are built in for %s rows.\n",
        all);
    return code;
}

static int compile_one(const settings *s, const char *name, const char *source, size_t bytes) {
    nmk_err e = {0};
    nmk_jit_result r;
    nmk_jit_request rq = {.name = name,
                          .source = source,
                          .source_bytes = bytes,
                          .arch = s->arch,
                          .allow_spills = true,
                          .no_cache = s->no_cache};
    if (nmk_jit_compile(&r, &rq, &e)) return fprintf(stderr, "nmk-compile: %s\n", e.text), 1;
    printf("%s: %s, NVRTC %d.%d: %d registers, spills %d bytes stored %d loaded, stack %d bytes, code %zu bytes, "
           "static shared %zu bytes, cubin %zu bytes, source %zu bytes, %.2f s%s\n",
           name, s->arch, nmk_nvrtc.major, nmk_nvrtc.minor, r.registers, r.spill_store_bytes, r.spill_load_bytes,
           r.stack_bytes, r.text_bytes, r.smem_bytes, r.cubin_bytes, bytes, r.seconds, r.cached ? " (cached)" : "");
    if (r.cache[0]) fprintf(stderr, "nmk-compile: cache: %s\n", r.cache);
    int rc = 0;
    if (*r.log && (s->verbose || strstr(r.log, "warning"))) fprintf(stderr, "%s\n", r.log);
    if (s->output) {
        FILE *f = fopen(s->output, "wb");
        bool good = f && fwrite(r.cubin, 1, r.cubin_bytes, f) == r.cubin_bytes;
        if (f && fclose(f)) good = false;
        if (!good) fprintf(stderr, "nmk-compile: cannot write %s\n", s->output), rc = 1;
    }
    if (!s->allow_spills && (r.spill_store_bytes || r.spill_load_bytes))
        fprintf(stderr, "nmk-compile: %s spills registers\n", name), rc = 1;
    if (r.serialized) fprintf(stderr, "nmk-compile: %s: ptxas serialized wgmma\n", name), rc |= !s->allow_spills;
    nmk_jit_result_free(&r);
    return rc;
}

/* A kernel of this program. */
static int compile_own(const settings *s, const nmk_generation *n, const char *launch) {
    const bool mixed = !strcmp(launch, "mixed");
    if (strcmp(launch, "step") && !nmk_prefill)
        return fprintf(stderr, "nmk-compile: this model has no launches that take prompts\n"), 1;
    if (!strcmp(launch, "prefill")) n = nmk_prefill;
    char *both = mixed ? nmk_mixed_source(n->kernel, nmk_prefill->kernel) : NULL;
    const int rc = mixed ? compile_one(s, "mixed.cu", both, strlen(both))
                         : compile_one(s, n->prefill_tokens ? "prefill/megakernel.cu" : "megakernel.cu", n->kernel,
                                       (size_t)(n->kernel_end - n->kernel));
    free(both);
    return rc;
}

int main(int argc, char **argv) {
    settings s = {.arch = "sm_90a"};
    const nmk_generation *n = nmk_generations[0];
    const char *launch = "step";
    int rc = 0, files = 0;
    for (int i = 1; i < argc; i++) {
        const char *a = argv[i];
        if (!strcmp(a, "--help")) return usage(stdout, 0);
        if (!strcmp(a, "--no-cache"))
            s.no_cache = true;
        else if (!strcmp(a, "--allow-spills"))
            s.allow_spills = true;
        else if (!strcmp(a, "--verbose"))
            s.verbose = true;
        else if (!strcmp(a, "--arch") && i + 1 < argc)
            s.arch = argv[++i];
        else if (!strcmp(a, "-o") && i + 1 < argc)
            s.output = argv[++i];
        else if (!strcmp(a, "--max-batch") && i + 1 < argc) {
            const int rows = atoi(argv[++i]);
            if (rows < 1 || !(n = nmk_generation_for(rows)))
                return fprintf(stderr, "nmk-compile: --max-batch %s\n", argv[i]), usage(stderr, 2);
        } else if (!strcmp(a, "--launch") && i + 1 < argc) {
            launch = argv[++i];
            if (strcmp(launch, "step") && strcmp(launch, "prefill") && strcmp(launch, "mixed"))
                return fprintf(stderr, "nmk-compile: --launch %s\n", launch), usage(stderr, 2);
        } else if (*a == '-')
            return fprintf(stderr, "nmk-compile: unknown or unfinished flag %s\n", a), usage(stderr, 2);
        else {
            char *text;
            size_t bytes;
            nmk_err e = {0};
            files++;
            if (nmk_file_read(&text, &bytes, a, 64 << 20, &e)) {
                fprintf(stderr, "nmk-compile: %s\n", e.text);
                rc = 1;
                continue;
            }
            if (compile_one(&s, a, text, bytes)) rc = 1;
            free(text);
        }
    }
    if (!files) rc = compile_own(&s, n, launch);
    return rc;
}
