#include "cuda.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct nmk_cuda nmk_cuda;
struct nmk_nvrtc nmk_nvrtc;

enum { OLDEST_DRIVER = 12000 }; /* sm_90a code and 64-bit bulk copies need a CUDA 12 driver */

static void *symbol(void *lib, const char *name) {
    dlerror();
    return dlsym(lib, name);
}

/* ISO C has no conversion from object to function pointers; POSIX promises that their bytes agree. */
static void set_function(void *field, void *address) { memcpy(field, &address, sizeof address); }

int nmk_cuda_load(nmk_err *e) {
    if (nmk_cuda.driver_version) return 0;
    const char *path = getenv("NMK_LIBCUDA");
    if (!path || !*path) path = "libcuda.so.1";
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        const char *why = dlerror();
        return nmk_fail(e, "no CUDA driver: cannot open %s (%s); without a GPU use --device cpu", path, why);
    }
    struct nmk_cuda api = {0};
    const char *missing = NULL;
    void *address;
#define RESOLVE(field, name, parameters)      \
    address = symbol(lib, name);              \
    if (!address && !missing) missing = name; \
    set_function(&api.field, address);
    NMK_CUDA_FUNCTIONS(RESOLVE)
#undef RESOLVE
    int version = 0;
    if (api.cuDriverGetVersion) api.cuDriverGetVersion(&version);
    if (version && version < OLDEST_DRIVER) {
        nmk_fail(e, "CUDA driver too old: %s supports CUDA %d.%d, CUDA %d.0 or newer is needed", path, version / 1000,
                 version % 1000 / 10, OLDEST_DRIVER / 1000);
    } else if (missing) {
        nmk_fail(e, "%s is not a usable CUDA driver: it lacks %s", path, missing);
    } else {
        CUresult r = api.cuInit(0);
        if (r == 0) {
            api.driver_version = version;
            nmk_cuda = api;
            return 0;
        }
        const char *name = NULL, *text = NULL;
        api.cuGetErrorName(r, &name), api.cuGetErrorString(r, &text);
        nmk_fail(e, "the CUDA driver does not start: cuInit gives %s (%d): %s", name ? name : "an error", r,
                 text ? text : "no description");
    }
    dlclose(lib);
    return -1;
}

int nmk_cuda_check(CUresult r, const char *what, nmk_err *e) {
    if (r == 0) return 0;
    const char *name = NULL, *text = NULL;
    if (nmk_cuda.cuGetErrorName) nmk_cuda.cuGetErrorName(r, &name), nmk_cuda.cuGetErrorString(r, &text);
    return nmk_fail(e, "%.*s: %s (%d): %s", (int)strcspn(what, "("), what, name ? name : "unknown CUDA error", r,
                    text ? text : "no description");
}

/* 0, or -1 with the reason why the kernel cannot run on this GPU. */
static int suits(const nmk_gpu *g, const nmk_gpu_needs *needs, nmk_err *e) {
    if (g->major != needs->major || g->minor != needs->minor)
        return nmk_fail(e, "cuda:%d (%s) has compute capability %d.%d; this kernel was generated for target %s, %d.%d",
                        g->index, g->name, g->major, g->minor, needs->name, needs->major, needs->minor);
    if (g->sms < needs->sms)
        return nmk_fail(e, "cuda:%d (%s) has %d SMs; this kernel was generated for target %s with %d", g->index,
                        g->name, g->sms, needs->name, needs->sms);
    if (g->smem_bytes < needs->smem_bytes)
        return nmk_fail(e, "cuda:%d (%s) gives a block %d bytes of shared memory; this kernel needs %d", g->index,
                        g->name, g->smem_bytes, needs->smem_bytes);
    return 0;
}

int nmk_gpu_open(nmk_gpu *gpu, int index, const nmk_gpu_needs *needs, nmk_err *e) {
    *gpu = (nmk_gpu){.index = index};
    if (nmk_cuda_load(e)) return -1;
    nmk_gpu g = {.index = index};
    int count = 0;
    CU(e, cuDeviceGetCount(&count));
    if (count == 0) return nmk_fail(e, "the CUDA driver sees no GPU; use --device cpu");
    if (index < 0 || index >= count)
        return nmk_fail(e, "no GPU cuda:%d: this machine has %d (cuda:0%s%d)", index, count,
                        count > 1 ? " to cuda:" : "", count - 1);
    CU(e, cuDeviceGet(&g.device, index));
    CU(e, cuDeviceGetName(g.name, sizeof g.name, g.device));
    CU(e, cuDeviceGetAttribute(&g.major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, g.device));
    CU(e, cuDeviceGetAttribute(&g.minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, g.device));
    CU(e, cuDeviceGetAttribute(&g.sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, g.device));
    CU(e, cuDeviceGetAttribute(&g.smem_bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, g.device));
    /* for the start's figures only */
    nmk_cuda.cuDeviceGetAttribute(&g.memory_khz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, g.device);
    nmk_cuda.cuDeviceGetAttribute(&g.bus_bits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, g.device);
    if (suits(&g, needs, e)) goto out;
    CU(e, cuDevicePrimaryCtxRetain(&g.context, g.device));
    *gpu = g;
    if (nmk_cuda_check(nmk_cuda.cuCtxSetCurrent(g.context), "cuCtxSetCurrent", e)) {
        nmk_gpu_close(gpu);
        goto out;
    }
    return 0;
out:
    return -1;
}

void nmk_gpu_close(nmk_gpu *gpu) {
    if (!gpu || !gpu->context) return;
    nmk_cuda.cuDevicePrimaryCtxRelease(gpu->device);
    gpu->context = NULL;
}

/* ---- NVRTC ---- */

/* Opens one candidate; NULL when there is none or a function is missing, then `why` says so (the last reason stays). */
static void *open_nvrtc(const char *path, struct nmk_nvrtc *api, char *why, size_t size) {
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        const char *text = dlerror();
        snprintf(why, size, "%s", text ? text : path);
        return NULL;
    }
    const char *missing = NULL;
    void *address;
#define RESOLVE(field, result, parameters)      \
    address = symbol(lib, #field);              \
    if (!address && !missing) missing = #field; \
    set_function(&api->field, address);
    NMK_NVRTC_FUNCTIONS(RESOLVE)
#undef RESOLVE
    if (!missing && api->nvrtcVersion(&api->major, &api->minor) == 0 && api->major >= 12) return lib;
    if (missing)
        snprintf(why, size, "%s: it lacks %s", path, missing);
    else
        snprintf(why, size, "%s: it is version %d.%d, 12.0 or newer is needed", path, api->major, api->minor);
    dlclose(lib);
    return NULL;
}

static void *glob_nvrtc(const char *root, struct nmk_nvrtc *api, char *why, size_t size) {
    static const char *const below[] = {"lib64", "lib", "targets/*/lib"};
    void *lib = NULL;
    for (size_t i = 0; i < sizeof below / sizeof *below && !lib; i++) {
        char pattern[1024];
        glob_t found = {0};
        snprintf(pattern, sizeof pattern, "%s/%s/libnvrtc.so*", root, below[i]);
        if (glob(pattern, 0, NULL, &found) == 0)
            for (size_t k = found.gl_pathc; k-- > 0 && !lib;) lib = open_nvrtc(found.gl_pathv[k], api, why, size);
        globfree(&found);
    }
    return lib;
}

int nmk_nvrtc_load(nmk_err *e) {
    if (nmk_nvrtc.major) return 0;
    static const char *const names[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};
    struct nmk_nvrtc api = {0};
    char why[512] = "not found", other[512];
    const char *chosen = getenv("NMK_NVRTC");
    void *lib = NULL;
    if (chosen && *chosen) {
        lib = open_nvrtc(chosen, &api, why, sizeof why);
        if (!lib) return nmk_fail(e, "NMK_NVRTC does not name a usable NVRTC: %s", why);
    }
    for (size_t i = 0; i < sizeof names / sizeof *names && !lib; i++)
        lib = open_nvrtc(names[i], &api, i ? other : why, sizeof why);
    const char *roots[] = {getenv("CUDA_HOME"), getenv("CUDA_PATH"), "/usr/local/cuda*"};
    for (size_t i = 0; i < sizeof roots / sizeof *roots && !lib; i++)
        if (roots[i] && *roots[i]) lib = glob_nvrtc(roots[i], &api, why, sizeof why);
    if (!lib)
        return nmk_fail(
            e,
            "no NVRTC, which compiles the kernel (%s); install the CUDA Toolkit's libnvrtc, or set CUDA_HOME "
            "or NMK_NVRTC=/path/to/libnvrtc.so",
            why);
    nmk_nvrtc = api;
    return 0;
}
