/* The CUDA driver and NVRTC, opened at run time.
 *
 * Owns: the function tables, finding the two libraries, the one sentence a user sees when one is missing.  The types
 * below are the little of CUDA's ABI that the runtime uses, so building needs no CUDA headers and one binary runs with
 * and without a GPU.  Both tables are filled once and never unloaded. */
#ifndef NMK_CUDA_H
#define NMK_CUDA_H

#include <stddef.h>
#include <stdint.h>

#include "util.h"

typedef int CUresult; /* 0 is success */
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

enum {
    CUDA_ERROR_NOT_READY = 600,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36,
    CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
    CU_MEMHOSTALLOC_PORTABLE = 1,
    CU_MEMHOSTALLOC_DEVICEMAP = 2,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DEFAULT = 0,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
};

typedef struct {
    int id, pad;
    union {
        char bytes[64];
        int allowed;
    } value;
} CUlaunchAttribute;

typedef struct {
    unsigned grid[3], block[3], dynamic_smem_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned attribute_count;
} CUlaunchConfig;

/* X(field, symbol in libcuda.so.1, parameters).  The field is CUDA's documented name; the symbol carries the version
 * that has these parameters. */
#define NMK_CUDA_FUNCTIONS(X)                                                                                     \
    X(cuInit, "cuInit", (unsigned flags))                                                                         \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                                                   \
    X(cuGetErrorName, "cuGetErrorName", (CUresult r, const char **name))                                          \
    X(cuGetErrorString, "cuGetErrorString", (CUresult r, const char **text))                                      \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                                         \
    X(cuDeviceGet, "cuDeviceGet", (CUdevice * dev, int index))                                                    \
    X(cuDeviceGetName, "cuDeviceGetName", (char *name, int size, CUdevice dev))                                   \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, CUdevice dev))                    \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * ctx, CUdevice dev))                      \
    X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice dev))                                  \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", (CUcontext ctx))                                                        \
    X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                               \
    X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t * free_bytes, size_t * total_bytes))                               \
    X(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr * p, size_t bytes))                                               \
    X(cuMemFree, "cuMemFree_v2", (CUdeviceptr p))                                                                 \
    X(cuMemHostAlloc, "cuMemHostAlloc", (void **p, size_t bytes, unsigned flags))                                 \
    X(cuMemFreeHost, "cuMemFreeHost", (void *p))                                                                  \
    X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (CUdeviceptr * dev, void *host, unsigned flags)) \
    X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void *dst, CUdeviceptr src, size_t bytes))                                \
    X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr dst, const void *src, size_t bytes, CUstream s))    \
    X(cuMemsetD8Async, "cuMemsetD8Async", (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream s))       \
    X(cuStreamCreate, "cuStreamCreate", (CUstream * s, unsigned flags))                                           \
    X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream s))                                                        \
    X(cuStreamQuery, "cuStreamQuery", (CUstream s))                                                               \
    X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream s))                                                   \
    X(cuEventCreate, "cuEventCreate", (CUevent * e, unsigned flags))                                              \
    X(cuEventDestroy, "cuEventDestroy_v2", (CUevent e))                                                           \
    X(cuEventRecord, "cuEventRecord", (CUevent e, CUstream s))                                                    \
    X(cuEventQuery, "cuEventQuery", (CUevent e))                                                                  \
    X(cuEventSynchronize, "cuEventSynchronize", (CUevent e))                                                      \
    X(cuEventElapsedTime, "cuEventElapsedTime", (float *ms, CUevent start, CUevent end))                          \
    X(cuModuleLoadData, "cuModuleLoadData", (CUmodule * m, const void *image))                                    \
    X(cuModuleUnload, "cuModuleUnload", (CUmodule m))                                                             \
    X(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction * f, CUmodule m, const char *name))                 \
    X(cuFuncSetAttribute, "cuFuncSetAttribute", (CUfunction f, int attribute, int value))                         \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, "cuOccupancyMaxActiveBlocksPerMultiprocessor",                 \
      (int *blocks, CUfunction f, int threads, size_t dynamic_smem_bytes))                                        \
    X(cuLaunchKernel, "cuLaunchKernel",                                                                           \
      (CUfunction f, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,       \
       unsigned block_z, unsigned dynamic_smem_bytes, CUstream s, void **params, void **extra))                   \
    X(cuLaunchKernelEx, "cuLaunchKernelEx", (const CUlaunchConfig *config, CUfunction f, void **params, void **extra))

struct nmk_cuda {
#define NMK_CUDA_FIELD(field, symbol, parameters) CUresult(*field) parameters;
    NMK_CUDA_FUNCTIONS(NMK_CUDA_FIELD)
#undef NMK_CUDA_FIELD
    int driver_version; /* 13000 is CUDA 13.0; 0 before nmk_cuda_load succeeded */
};

extern struct nmk_cuda nmk_cuda;

/* Opens libcuda ($NMK_LIBCUDA, else libcuda.so.1), resolves every function and initialises the driver.  0, or -1 with
 * the reason.  Repeating it is free after success. */
int nmk_cuda_load(nmk_err *e);

/* 0 if r is success; else -1 with "what: NAME: text" in e.  `what` may be a call's text: only its name is printed. */
int nmk_cuda_check(CUresult r, const char *what, nmk_err *e);

/* CU(e, cuMemAlloc(&p, n)): calls through the table; on an error fills e and goes to the function's `out`. */
#define CU(e, call)                                            \
    do {                                                       \
        if (nmk_cuda_check(nmk_cuda.call, #call, e)) goto out; \
    } while (0)

typedef struct {
    CUdevice device;
    CUcontext context; /* the primary one, retained; current on the thread that opened it */
    int index, sms, major, minor, smem_bytes /* a block may ask for */;
    int memory_khz, bus_bits; /* of its memory; 0: the driver does not say */
    char name[96];
} nmk_gpu;

/* What a kernel was generated for. */
typedef struct {
    const char *name; /* for messages: "sm_90a" */
    int major, minor; /* exact compute capability (sm_90a code runs on 9.0 only) */
    int sms;          /* at least that many */
    int smem_bytes;   /* dynamic shared memory of a block */
} nmk_gpu_needs;

/* Takes the primary context of GPU `index` (nmk_cuda_load included) and refuses a GPU the kernel cannot run on.
 * 0, or -1 with the reason and nothing held.  Release with nmk_gpu_close (NULL or zeroed is fine). */
int nmk_gpu_open(nmk_gpu *gpu, int index, const nmk_gpu_needs *needs, nmk_err *e);
void nmk_gpu_close(nmk_gpu *gpu);

/* ---- NVRTC ---- */

typedef struct _nvrtcProgram *nvrtcProgram;
typedef int nvrtcResult;

#define NMK_NVRTC_FUNCTIONS(X)                                                                        \
    X(nvrtcVersion, nvrtcResult, (int *major, int *minor))                                            \
    X(nvrtcGetErrorString, const char *, (nvrtcResult r))                                             \
    X(nvrtcCreateProgram, nvrtcResult,                                                                \
      (nvrtcProgram * p, const char *source, const char *name, int headers, const char *const *texts, \
       const char *const *names))                                                                     \
    X(nvrtcDestroyProgram, nvrtcResult, (nvrtcProgram * p))                                           \
    X(nvrtcCompileProgram, nvrtcResult, (nvrtcProgram p, int count, const char *const *options))      \
    X(nvrtcGetCUBINSize, nvrtcResult, (nvrtcProgram p, size_t * bytes))                               \
    X(nvrtcGetCUBIN, nvrtcResult, (nvrtcProgram p, char *cubin))                                      \
    X(nvrtcGetProgramLogSize, nvrtcResult, (nvrtcProgram p, size_t * bytes))                          \
    X(nvrtcGetProgramLog, nvrtcResult, (nvrtcProgram p, char *log))

struct nmk_nvrtc {
#define NMK_NVRTC_FIELD(field, result, parameters) result(*field) parameters;
    NMK_NVRTC_FUNCTIONS(NMK_NVRTC_FIELD)
#undef NMK_NVRTC_FIELD
    int major, minor; /* 0 before nmk_nvrtc_load succeeded */
};

extern struct nmk_nvrtc nmk_nvrtc;

/* Opens NVRTC: $NMK_NVRTC if set (and nothing else then), else libnvrtc.so.13, .12 and .so from the loader's path, from
 * $CUDA_HOME, $CUDA_PATH and from /usr/local/cuda*.  0, or -1 with the reason. */
int nmk_nvrtc_load(nmk_err *e);

#endif
