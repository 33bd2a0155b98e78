//@slot ops

/* The kernel of a launch that takes prompts: sets up one block, then each warp plays its role through the SM's list.
 *
 * What is different from a step (templates/megakernel.cu): every SM has one task of each node and takes units of what
 * the chunk has; the load role waits for the task's counters, because it copies what this launch has written; compute
 * writes global memory itself, and one thread signals for all. */
extern "C" __global__ void __launch_bounds__(WARPS_ALL * 32, 1) nmk_step(const __grid_constant__ nmk_params p)
{
    extern __shared__ __align__(1024) u8 memory[];
    Shared &s = *(Shared *)(memory + SHARED_REST);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

    if (thread < TAGS) s.job_tag[thread] = -1;
    if (thread < NMK_RING_STAGES) s.stage_tag[thread] = -1;
    if (thread == 2) s.gone = 0;
    if (thread == 0) {
#pragma unroll 1
        for (int i = 0; i < NMK_RING_STAGES; i++) {
            mbarrier_init(shared_address(&s.full[i]), 1);
            mbarrier_init(shared_address(&s.empty[i]), WARPS_COMPUTE * ARRIVALS);
        }
#pragma unroll 1
        for (int i = 0; i < DESC_BLOCKS; i++) {
            mbarrier_init(shared_address(&s.desc_full[i]), 1);
            mbarrier_init(shared_address(&s.desc_empty[i]), WARPS_COMPUTE * ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    if (warp >= WARPS_COMPUTE) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        if (warp != WARPS_COMPUTE || lane != 0) return;
        Loader c = {{p, s, memory, ROLE_LOAD, 0, 0, -1}, {0, 1}, {0, 0}, p.in_flight, false,
                    evict_first_policy(), nullptr, 0, 0};
        c.fetch(0), c.fetch(1);
#pragma unroll 1
        for (;;) {
            if ((++c.task & (DESC_BLOCK - 1)) == 0) {
                const u32 block = (u32)c.task / DESC_BLOCK;
                c.wait(&s.desc_full[block % DESC_BLOCKS], block / DESC_BLOCKS & 1);
                if (c.gone()) break;
                c.fetch(block + 2);
            }
            const int *d = c.desc();
            int op = d[0];
            if (op == 0) break;
//@slot dispatch load
        }
#pragma unroll 1
        for (int b = c.task / DESC_BLOCK; b <= c.task / DESC_BLOCK + 2 && b < NMK_MAX_TASKS / DESC_BLOCK; b++)
            c.wait(&s.desc_full[b % DESC_BLOCKS], b / DESC_BLOCKS & 1);
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    Consumer c = {{p, s, memory, ROLE_COMPUTE, 0, lane, -1}, {0, 0}, warp, 0, 0};
#pragma unroll 1
    for (;;) {
        if (!c.next()) break;
        const int *d = c.desc();
        int op = d[0];
        if (op == 0) break;
//@slot dispatch compute
        barrier_compute();
        if (thread == 0 && d[6] >= 0) add_release((u32 *)p.counters + d[6] * 32);
    }
}
