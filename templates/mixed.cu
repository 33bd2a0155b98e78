/* What makes a kernel of a step one that is a step and behind it a chunk of prompts: both are whole kernels, in
 * namespaces (gen/emit/megakernel.lua), and the chunk's is a part that the step's goes on with.  An SM that is done
 * with its part of the step begins with the chunk at once.
 *
 * Always: the two share the weights, which nobody writes, pages of keys and values, which the step has done with on all
 * SMs when one of them begins with the chunk (gen/check/mixed.lua), and p.abort.  Shared memory, barriers and registers
 * are the step's, then the chunk's.  Consumers and the others meet here without ever joining their paths, so that the
 * compiler knows how many registers each has. */

/* When the SM's step is over; ns + 1: when that was, of block 0.  Nothing follows where it is lost: the chunk would be
 * too. */
static __device__ __forceinline__ void go_on(unsigned char *memory, const void *params, unsigned long long *ns,
                                             bool others)
{
    __syncwarp();
    /* what the chunk copies in bulk goes where the step's threads have read and written */
    asm volatile("fence.proxy.async.shared::cta;\n"
                 "bar.sync 0;" ::: "memory");
    const bool lost = of_step::is_lost(memory);
    if (of_chunk::thread_now() == 0) of_step::end_part(memory), tell_time(ns + 1);
    asm volatile("bar.sync 0;" ::: "memory");
    if (!lost) of_chunk::part(*(const of_chunk::nmk_params *)params, memory, others);
}

static_assert(of_step::WARPS_ALL == of_chunk::WARPS_ALL && of_step::WARPS_COMPUTE == of_chunk::WARPS_COMPUTE &&
              sizeof(of_step::nmk_params) == sizeof(of_chunk::nmk_params), "the same warps and parameters");
