/* By one thread: the time, in nanoseconds, of block 0. */
static __device__ __forceinline__ void tell_time(unsigned long long *ns)
{
    unsigned long long now;
    if (blockIdx.x != 0) return;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    *(volatile unsigned long long *)ns = now;
}

/* templates/mixed.cu */
static __device__ __forceinline__ void go_on(unsigned char *memory, const void *params, unsigned long long *ns,
                                             bool others);
