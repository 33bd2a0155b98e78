/* The kernel of a launch that is a step and behind it a chunk of prompts: both parts are whole kernels of their own, in
 * namespaces (gen/emit/megakernel.lua).  An SM that is done with its part of the step begins with the chunk at once.
 *
 * Always: the parts share the weights, which nobody writes, pages of keys and values, which the step has done with on
 * all SMs when one of them begins with the chunk (gen/check/mixed.lua), and p.abort.  Shared memory, barriers and
 * registers are the step's, then the chunk's.  Consumers and the others meet here without ever joining their paths, so
 * that the compiler knows how many registers each has. */

static __device__ __forceinline__ void tell_time(unsigned long long *ns)
{
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *(volatile unsigned long long *)ns = now;
}

/* When the SM's step is over.  False: it is lost, and the chunk would be too. */
static __device__ __forceinline__ bool between(unsigned char *memory, unsigned long long *ns)
{
    __syncwarp();
    /* what the chunk copies in bulk goes where the step's threads have read and written */
    asm volatile("fence.proxy.async.shared::cta;\n"
                 "bar.sync 0;" ::: "memory");
    const bool lost = of_step::is_lost(memory);
    if (threadIdx.x == 0) {
        of_step::end_part(memory);
        if (blockIdx.x == 0) tell_time(ns + 1);
    }
    asm volatile("bar.sync 0;" ::: "memory");
    return !lost;
}

/* ns: of block 0 the time when it begins, and when its step is over. */
extern "C" __global__ void __launch_bounds__(of_step::WARPS_ALL * 32, 1)
    nmk_step(const __grid_constant__ of_step::nmk_params step, const __grid_constant__ of_chunk::nmk_params chunk,
             unsigned long long *ns)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(of_step::WARPS_ALL == of_chunk::WARPS_ALL && of_step::WARPS_COMPUTE == of_chunk::WARPS_COMPUTE,
                  "the same warps");
    if (threadIdx.x >= of_step::WARPS_COMPUTE * 32) {
        of_step::part(step, memory, true);
        if (between(memory, ns)) of_chunk::part(chunk, memory, true);
        return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) tell_time(ns);
    of_step::part(step, memory, false);
    if (between(memory, ns)) of_chunk::part(chunk, memory, false);
}
