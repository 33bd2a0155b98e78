//@slot ops

/* The kernel of a launch that takes prompts: sets up one block, then each warp plays its role through the SM's list.
 *
 * What is different from a step (templates/megakernel.cu): every SM has one task of each node and takes units of what
 * the chunk has; the load role waits for the task's counters, because it copies what this launch has written; compute
 * writes global memory itself, and one thread signals for all. */
#ifdef NMK_MIXED /* what goes on behind a step, see templates/mixed.cu */
DEVICE void part(const nmk_params &p, u8 *memory, const bool others)
{
    const int thread = thread_now();
#else
extern "C" __global__ void __launch_bounds__(WARPS_ALL * 32, 1) nmk_step(const __grid_constant__ nmk_params p)
{
    extern __shared__ __align__(1024) u8 memory[];
    const int thread = threadIdx.x;
#endif
    Shared &s = *(Shared *)(memory + SHARED_REST);
    const int warp = thread / 32, lane = thread % 32;

    Chunked &k = chunked(s);
    if (thread == 2) s.gone = 0;
    if (thread == 0) {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(shared_address(&k.full[i]), LOADERS * 32);
            mbarrier_init(shared_address(&k.empty[i]), WARPS_COMPUTE * ARRIVALS);
        }
        mbarrier_init(shared_address(&k.begun), LOADERS * ARRIVALS);
        mbarrier_init(shared_address(&k.done), WARPS_COMPUTE * ARRIVALS);
#pragma unroll 1
        for (int i = 0; i < DESC_BLOCKS; i++) {
            mbarrier_init(shared_address(&s.desc_full[i]), 1);
            mbarrier_init(shared_address(&s.desc_empty[i]), WARPS_ALL * ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (thread < WARPS_ALL) k.progress[thread] = {0, thread < WARPS_COMPUTE ? 0u : 1u, 0, 0, 0, {}};
    if (thread == 0) k.tokens = __ldcg(&((const nmk_chunk *)p.control)->tokens);
    attention_init(k.attention, p, thread);

#ifndef NMK_MIXED
    const bool others = warp >= WARPS_COMPUTE;
#endif
    if (others) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        const Context context = {p, s, memory, ROLE_LOAD, 0, lane, -1};
        ChunkLoader c = {{context, {0, 1}, {0, 0}, 0, false, evict_first_policy(), nullptr, 0, 0},
                         k,
                         warp - WARPS_COMPUTE};
        if (thread == WARPS_COMPUTE * 32) c.fetch(0), c.fetch(1);
#pragma unroll 1
        for (;;) {
            if (!c.next()) break;
            const int *d = c.desc();
            int op = d[0];
            if (op == 0) break;
            Product product = {};
//@slot dispatch load
            if (product.steps == 0 || !c.begin(product.first, product.experts)) continue;
            load_product(c, product, [&](int n) -> int2 {
//@slot products about
                return make_int2(0, 0);
            });
        load_done:;
        }
        /* no copy may land in a block that has left */
        c.drain();
        if (thread == WARPS_COMPUTE * 32) {
#pragma unroll 1
            for (int b = c.task / DESC_BLOCK; b <= c.task / DESC_BLOCK + 2 && b < NMK_MAX_TASKS / DESC_BLOCK; b++)
                c.wait(&s.desc_full[b % DESC_BLOCKS], b / DESC_BLOCKS & 1);
        }
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    ChunkConsumer c = {{{p, s, memory, ROLE_COMPUTE, 0, lane, -1}, {0, 0}, warp, 0, 0}, k};
#pragma unroll 1
    for (;;) {
        if (!c.next()) break;
        const int *d = c.desc();
        int op = d[0];
        if (c.warp == 0) c.stamp(0);
        if (op == 0) break;
        asm volatile("" : "+r"(c.warp));
        Product product = {};
        Output output = {};
//@slot dispatch compute
        if (product.steps != 0) {
            if (c.begin())
                compute_product(c, product, output, [&](const Unit &u, int n, Part &part, About about) {
//@slot products store
                });
            c.end();
        }
    compute_done:
        fence_async_global(); /* the next may be copied in bulk */
        barrier_compute();
        if (c.warp == 0) c.stamp(2);
        if (thread == 0 && d[6] >= 0) add_release((u32 *)p.counters + d[6] * 32);
    }
}
