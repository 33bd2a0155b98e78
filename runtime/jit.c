#include "jit.h"

#include <elf.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "cuda.h"

/* A cache file: this header, then the cubin.  The key covers the header's size, so plain memory layout is enough. */
typedef struct {
    char magic[8];
    uint64_t key[2]; /* of source, options and versions; also the file's name */
    uint64_t cubin_bytes, cubin_hash[2];
    int32_t registers, spill_store_bytes, spill_load_bytes, stack_bytes, serialized, unused;
    uint64_t header_hash; /* of everything above */
} entry_header;

static const char magic[8] = "NMKJIT3";

/* $NMK_CACHE_DIR, $XDG_CACHE_HOME/nmk or ~/.cache/nmk.  -1 if the environment names none. */
static int cache_dir(char *path, size_t size) {
    const char *dir = getenv("NMK_CACHE_DIR"), *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = -1;
    if (dir && *dir)
        n = snprintf(path, size, "%s", dir);
    else if (xdg && *xdg)
        n = snprintf(path, size, "%s/nmk", xdg);
    else if (home && *home)
        n = snprintf(path, size, "%s/.cache/nmk", home);
    return n > 0 && (size_t)n < size ? 0 : -1;
}

static void make_dirs(const char *path) {
    char part[1024];
    snprintf(part, sizeof part, "%s", path);
    for (char *p = part + 1; *p; p++)
        if (*p == '/') *p = 0, mkdir(part, 0777), *p = '/';
    mkdir(part, 0777);
}

/* ---- what the compiler made ---- */

bool nmk_cubin_sizes(const void *cubin, size_t bytes, size_t *text_bytes, size_t *smem_bytes) {
    *text_bytes = *smem_bytes = 0;
    Elf64_Ehdr h;
    if (bytes < sizeof h) return false;
    memcpy(&h, cubin, sizeof h);
    if (memcmp(h.e_ident, ELFMAG, SELFMAG) || h.e_ident[EI_CLASS] != ELFCLASS64) return false;
    if (h.e_shentsize != sizeof(Elf64_Shdr) || h.e_shoff > bytes ||
        h.e_shnum > (bytes - h.e_shoff) / sizeof(Elf64_Shdr) || h.e_shstrndx >= h.e_shnum)
        return false;
    const char *base = cubin;
    Elf64_Shdr names, s;
    memcpy(&names, base + h.e_shoff + h.e_shstrndx * sizeof s, sizeof s);
    if (names.sh_offset > bytes || names.sh_size > bytes - names.sh_offset || names.sh_size == 0 ||
        base[names.sh_offset + names.sh_size - 1])
        return false;
    for (int i = 0; i < h.e_shnum; i++) {
        memcpy(&s, base + h.e_shoff + (size_t)i * sizeof s, sizeof s);
        if (s.sh_name >= names.sh_size) return false;
        const char *name = base + names.sh_offset + s.sh_name;
        if (!strncmp(name, ".text.", 6)) *text_bytes += s.sh_size;
        if (!strncmp(name, ".nv.shared.", 11)) *smem_bytes += s.sh_size;
    }
    return true;
}

bool nmk_ptxas_parse(const char *log, nmk_jit_result *r) {
    bool seen = false;
    r->registers = r->spill_store_bytes = r->spill_load_bytes = r->stack_bytes = r->serialized = 0;
    for (const char *line = log; line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        char text[512];
        snprintf(text, sizeof text, "%.*s", (int)strcspn(line, "\n"), line);
        int stack, stores, loads, registers;
        const char *p = strstr(text, " bytes stack frame");
        if (p) {
            while (p > text && p[-1] >= '0' && p[-1] <= '9') p--;
            if (sscanf(p, "%d bytes stack frame, %d bytes spill stores, %d bytes spill loads", &stack, &stores,
                       &loads) == 3)
                r->stack_bytes += stack, r->spill_store_bytes += stores, r->spill_load_bytes += loads;
        }
        /* C7510 to C7514, by what made it necessary; the number comes and goes with ptxas's version, the words stay */
        if (strstr(text, "wgmma") && strstr(text, "serialized")) r->serialized++;
        p = strstr(text, "Used ");
        if (p && sscanf(p, "Used %d registers", &registers) == 1) {
            seen = true;
            if (registers > r->registers) r->registers = registers;
        }
    }
    return seen;
}

/* ---- the cache ---- */

static uint64_t header_hash(const entry_header *h) { return XXH3_64bits(h, offsetof(entry_header, header_hash)); }

static XXH128_hash_t key_of(const nmk_jit_request *rq, const char *const *options, int count) {
    XXH3_state_t *s = XXH3_createState();
    XXH3_128bits_reset(s);
    /* Lengths and the final 0 of each string go in, so that no two lists of parts read the same. */
    uint64_t facts[] = {sizeof(entry_header),      rq->source_bytes,          (uint64_t)count,
                        (uint64_t)nmk_nvrtc.major, (uint64_t)nmk_nvrtc.minor, (uint64_t)nmk_cuda.driver_version};
    XXH3_128bits_update(s, magic, sizeof magic);
    XXH3_128bits_update(s, facts, sizeof facts);
    for (int i = 0; i < count; i++) XXH3_128bits_update(s, options[i], strlen(options[i]) + 1);
    XXH3_128bits_update(s, rq->name, strlen(rq->name) + 1);
    XXH3_128bits_update(s, rq->source, rq->source_bytes);
    XXH128_hash_t key = XXH3_128bits_digest(s);
    XXH3_freeState(s);
    return key;
}

static bool cache_read(const char *path, XXH128_hash_t key, nmk_jit_result *r) {
    FILE *f = fopen(path, "rb");
    if (!f) return false;
    entry_header h;
    struct stat st;
    bool good = fread(&h, sizeof h, 1, f) == 1 && !memcmp(h.magic, magic, sizeof magic) &&
                h.header_hash == header_hash(&h) && h.key[0] == key.low64 && h.key[1] == key.high64 &&
                fstat(fileno(f), &st) == 0 && (uint64_t)st.st_size == sizeof h + h.cubin_bytes;
    if (good) {
        r->cubin = xmalloc(h.cubin_bytes);
        good = fread(r->cubin, 1, h.cubin_bytes, f) == h.cubin_bytes;
        XXH128_hash_t hash = XXH3_128bits(r->cubin, good ? h.cubin_bytes : 0);
        good = good && hash.low64 == h.cubin_hash[0] && hash.high64 == h.cubin_hash[1];
        if (!good) free(r->cubin), r->cubin = NULL;
    }
    fclose(f);
    if (!good) {
        snprintf(r->cache, sizeof r->cache, "a corrupt entry was replaced");
        return false;
    }
    r->cubin_bytes = h.cubin_bytes;
    r->registers = h.registers, r->spill_store_bytes = h.spill_store_bytes;
    r->spill_load_bytes = h.spill_load_bytes, r->stack_bytes = h.stack_bytes, r->serialized = h.serialized;
    return true;
}

/* Another process sees the whole entry or none: it is renamed into place. */
static void cache_write(const char *path, XXH128_hash_t key, nmk_jit_result *r) {
    XXH128_hash_t hash = XXH3_128bits(r->cubin, r->cubin_bytes);
    entry_header h;
    memset(&h, 0, sizeof h);
    memcpy(h.magic, magic, sizeof magic);
    h.key[0] = key.low64, h.key[1] = key.high64;
    h.cubin_bytes = r->cubin_bytes, h.cubin_hash[0] = hash.low64, h.cubin_hash[1] = hash.high64;
    h.registers = r->registers, h.spill_store_bytes = r->spill_store_bytes;
    h.spill_load_bytes = r->spill_load_bytes, h.stack_bytes = r->stack_bytes, h.serialized = r->serialized;
    h.header_hash = header_hash(&h);
    char part[1200];
    snprintf(part, sizeof part, "%s.%ld.tmp", path, (long)getpid());
    FILE *f = fopen(part, "wb");
    bool good = f && fwrite(&h, sizeof h, 1, f) == 1 && fwrite(r->cubin, 1, r->cubin_bytes, f) == r->cubin_bytes;
    int code = errno;
    if (f && fclose(f)) good = false, code = errno;
    if (good && rename(part, path)) good = false, code = errno;
    if (good) return;
    snprintf(r->cache, sizeof r->cache, "cannot write %.160s: %s", path, strerror(code));
    if (f) unlink(part);
}

/* ---- compiling ---- */

static char *program_log(nvrtcProgram p) {
    size_t n = 0;
    if (nmk_nvrtc.nvrtcGetProgramLogSize(p, &n)) n = 0;
    char *log = xmalloc(n + 1);
    log[0] = log[n] = 0;
    if (n) nmk_nvrtc.nvrtcGetProgramLog(p, log);
    return log;
}

/* The first `most` errors of a log, one a line: the rest of a CUDA error flood helps nobody. */
static void first_errors(const char *log, char *out, size_t size, int most) {
    size_t used = 0;
    out[0] = 0;
    for (const char *line = log; line && *line && most > 0; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        int n = (int)strcspn(line, "\n");
        char text[400];
        snprintf(text, sizeof text, "%.*s", n, line);
        if (!strstr(text, "error")) continue;
        int w = snprintf(out + used, size - used, "\n  %s", text);
        if (w < 0 || (size_t)w >= size - used) break;
        used += (size_t)w, most--;
    }
}

static int compile_once(nmk_jit_result *r, const nmk_jit_request *rq, const char *const *options, int count,
                        nmk_err *e) {
    int rc = -1;
    nvrtcProgram p = NULL;
    nvrtcResult code = nmk_nvrtc.nvrtcCreateProgram(&p, rq->source, rq->name, 0, NULL, NULL);
    if (code) {
        nmk_fail(e, "%s: NVRTC: %s", rq->name, nmk_nvrtc.nvrtcGetErrorString(code));
        goto out;
    }
    code = nmk_nvrtc.nvrtcCompileProgram(p, count, options);
    r->log = program_log(p);
    if (code) {
        char errors[1600];
        first_errors(r->log, errors, sizeof errors, 5);
        nmk_fail(e, "%s does not compile for %s: %s%s", rq->name, rq->arch, nmk_nvrtc.nvrtcGetErrorString(code),
                 errors);
        goto out;
    }
    code = nmk_nvrtc.nvrtcGetCUBINSize(p, &r->cubin_bytes);
    if (code == 0 && r->cubin_bytes) {
        r->cubin = xmalloc(r->cubin_bytes);
        code = nmk_nvrtc.nvrtcGetCUBIN(p, r->cubin);
    }
    if (code || !r->cubin_bytes) {
        nmk_fail(e, "%s: NVRTC gave no cubin for %s: %s", rq->name, rq->arch, nmk_nvrtc.nvrtcGetErrorString(code));
        goto out;
    }
    rc = 0;
out:
    if (p) nmk_nvrtc.nvrtcDestroyProgram(&p);
    return rc;
}

/* Newer NVRTCs have a cache of their own, and what comes from it comes without ptxas's report.  Older ones do not know
 * the option that turns it off, so it is used only where the report is missing.  `options` has room for one more. */
static int compile(nmk_jit_result *r, const nmk_jit_request *rq, const char **options, int count, nmk_err *e) {
    if (compile_once(r, rq, options, count, e)) return -1;
    if (nmk_ptxas_parse(r->log, r)) return 0;
    free(r->cubin), free(r->log);
    r->cubin = NULL, r->log = NULL;
    options[count] = "--no-cache";
    if (compile_once(r, rq, options, count + 1, e)) return -1;
    if (nmk_ptxas_parse(r->log, r)) return 0;
    return nmk_fail(e, "%s: NVRTC %d.%d printed no register count to check for spills", rq->name, nmk_nvrtc.major,
                    nmk_nvrtc.minor);
}

int nmk_jit_compile(nmk_jit_result *result, const nmk_jit_request *rq, nmk_err *e) {
    uint64_t start_ns = nmk_now_ns();
    int rc = -1, count = 0;
    nmk_jit_result r = {0};
    char arch[64], path[1100] = "";
    const char *options[4]; /* compile() may add one to three */
    memset(result, 0, sizeof *result);
    if (nmk_nvrtc_load(e)) return -1;
    snprintf(arch, sizeof arch, "--gpu-architecture=%s", rq->arch);
    options[count++] = arch;
    options[count++] = "--std=c++17";
    options[count++] = "--ptxas-options=-v"; /* resource use, into the log */
    XXH128_hash_t key = key_of(rq, options, count);
    char dir[1024];
    if (!rq->no_cache && cache_dir(dir, sizeof dir) == 0) {
        make_dirs(dir);
        snprintf(path, sizeof path, "%s/%016llx%016llx.cubin", dir, (unsigned long long)key.high64,
                 (unsigned long long)key.low64);
    }
    if (*path && cache_read(path, key, &r)) {
        r.cached = true;
    } else {
        if (rq->on_compile) rq->on_compile(rq->user);
        if (compile(&r, rq, options, count, e)) goto out;
        if (*path) cache_write(path, key, &r);
    }
    if (!nmk_cubin_sizes(r.cubin, r.cubin_bytes, &r.text_bytes, &r.smem_bytes)) {
        nmk_fail(e, "%s: the compiled kernel is not a readable ELF file", rq->name);
        goto out;
    }
    if (!rq->allow_spills && (r.spill_store_bytes || r.spill_load_bytes)) {
        nmk_fail(e, "%s spills registers for %s (%d bytes stored, %d loaded): refused without --allow-spills", rq->name,
                 rq->arch, r.spill_store_bytes, r.spill_load_bytes);
        goto out;
    }
    if (!rq->allow_spills && r.serialized) {
        nmk_fail(e, "%s: ptxas serialized wgmma for %s: refused without --allow-spills", rq->name, rq->arch);
        goto out;
    }
    if (!r.log) r.log = xstrdup("");
    r.seconds = 1e-9 * (double)(nmk_now_ns() - start_ns);
    *result = r, memset(&r, 0, sizeof r), rc = 0;
out:
    nmk_jit_result_free(&r);
    return rc;
}

void nmk_jit_result_free(nmk_jit_result *r) {
    if (!r) return;
    free(r->cubin), free(r->log);
    memset(r, 0, sizeof *r);
}

char *nmk_mixed_source(const char *step, const char *chunk) {
    static const char define[] = "#define NMK_MIXED\n";
    const size_t first = strlen(step), second = strlen(chunk);
    char *text = xmalloc(sizeof define + first + second);
    memcpy(text, define, sizeof define - 1);
    memcpy(text + sizeof define - 1, step, first);
    memcpy(text + sizeof define - 1 + first, chunk, second + 1);
    return text;
}
