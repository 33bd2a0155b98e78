//@slot ops
/* The step kernel: sets up one block, then each warp plays its role through the SM's task list. */

/* The cut of every live column's pages into chunks, and which of them are this SM's: chunk j of a kind belongs to SM
 * j mod NMK_SMS, so who computes a chunk depends on the batch and what a chunk is does not. */
DEVICE void deal_attention(Shared &s, const nmk_params &p, int thread)
{
    const nmk_control *control = (const nmk_control *)p.control;
    if (thread < NMK_COLUMNS) {
        const nmk_column *c = &control->column[thread];
        s.pos[thread] = __ldcg(&c->pos);
        s.base[thread] = __ldcg(&c->base);
        s.group[thread] = __ldcg(&c->group);
        s.table_row[thread] = __ldcg(&c->slot);
        s.flags[thread] = __ldcg(&c->flags);
#ifdef NMK_WIDE
        s.offers.heat[thread] = __ldcg(&c->temperature);
        s.offers.key[thread] = nmk_noise_key(__ldcg(&c->seed_lo), __ldcg(&c->seed_hi), s.pos[thread]);
#endif
    } else if (thread < PLACES) { /* idle for good */
        s.pos[thread] = -1, s.base[thread] = s.group[thread] = s.table_row[thread] = s.flags[thread] = 0;
    }
    __syncthreads();
    if (thread < 2) {
        const int kind = thread;
        int first = 0;
#pragma unroll 1
        for (int n = 0; n < PLACES; n++) {
            const int pos = s.pos[n], base = s.base[n];
            const int low = kind ? max(0, pos + 1 - NMK_WINDOW) : 0;
            const int page0 = low / NMK_PAGE_TOKENS;
            /* at least one page, all masked when nothing is stored yet: every column has a last chunk */
            const int page1 = base > low ? (base - 1) / NMK_PAGE_TOKENS : page0;
            const int pages = page1 - page0 + 1, chunks = pos >= 0 ? chunk_count(pages) : 0;
            s.low[kind][n] = low, s.pages[kind][n] = pages, s.first_page[kind][n] = page0;
            s.chunks[kind][n] = chunks, s.chunk0[kind][n] = first;
            first += chunks * NMK_KV_HEADS;
        }
        s.chunk0[kind][PLACES] = first;
        s.segments[kind] = (first - (int)blockIdx.x + NMK_SMS - 1) / NMK_SMS;
    }
    __syncthreads();
    if (thread < 2 * NMK_MAX_SEGMENTS) {
        const int kind = thread / NMK_MAX_SEGMENTS, i = thread % NMK_MAX_SEGMENTS, j = blockIdx.x + i * NMK_SMS;
        if (j < s.chunk0[kind][PLACES]) {
            const Segment seg = segment_of(s, kind, j);
            s.segment[kind][i] = seg;
        }
    }
    __syncthreads();
}

//@slot sets

#ifdef NMK_MIXED /* it goes on with a chunk, see templates/mixed.cu */
#define LEAVE goto others_done
extern "C" __global__ void __launch_bounds__(WARPS_ALL * 32, 1)
    nmk_step(const __grid_constant__ nmk_params p, const __grid_constant__ nmk_params next, u64 *ns)
{
    if (threadIdx.x == 0) tell_time(ns);
#else
#define LEAVE return
extern "C" __global__ void __launch_bounds__(WARPS_ALL * 32, 1) nmk_step(const __grid_constant__ nmk_params p)
{
#endif
    extern __shared__ __align__(1024) u8 memory[];
    Shared &s = *(Shared *)(memory + SHARED_REST);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

    /* A step that is lost falls through its waits: what it reads instead must name nothing out of bounds. */
    if (thread < TAGS) s.job_tag[thread] = -1;
    if (thread < NMK_RING_STAGES) s.stage_tag[thread] = -1;
    if (thread < 2) s.active[thread] = 0;
    if (thread == 2) s.gone = 0;
    if (thread == 0) {
#pragma unroll 1
        for (int i = 0; i < NMK_RING_STAGES; i++) {
            mbarrier_init(shared_address(&s.full[i]), 1);
            mbarrier_init(shared_address(&s.empty[i]), WARPS_COMPUTE * ARRIVALS);
        }
#pragma unroll 1
        for (int i = 0; i < JOBS; i++) {
            mbarrier_init(shared_address(&s.job_full[i]), WARPS_COMPUTE * ARRIVALS);
            mbarrier_init(shared_address(&s.job_empty[i]), ARRIVALS);
        }
#pragma unroll 1
        for (int i = 0; i < DESC_BLOCKS; i++) {
            mbarrier_init(shared_address(&s.desc_full[i]), 1);
            mbarrier_init(shared_address(&s.desc_empty[i]), (WARPS_ALL - 1) * ARRIVALS);
        }
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            mbarrier_init(shared_address(&s.route_listed[i]), WARPS_COMPUTE * ARRIVALS);
            mbarrier_init(shared_address(&s.route_ready[i]), WARPS_COMPUTE * ARRIVALS);
            mbarrier_init(shared_address(&s.route_free[i]), WARPS_STORE * ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        /* lists are older than all launches */
        fetch_descriptors(s, p, 0, evict_first_policy());
        if (NMK_MAX_TASKS > DESC_BLOCK) fetch_descriptors(s, p, 1, evict_first_policy());
    }
    let_next_begin();
    wait_launches();
    deal_attention(s, p, thread);
    Mask columns = 0, filters = 0;
    u32 flags = 0;
#pragma unroll 1
    for (int n = 0; n < PLACES; n++)
        if (s.pos[n] >= 0) {
            columns |= (Mask)1 << n, flags |= s.flags[n];
            if (s.flags[n] & NMK_COLUMN_FILTERS) filters |= (Mask)1 << n;
        }

    if (thread == 0) s.only = columns && !(columns & columns - 1) ? first_bit(columns) : -1;
    __syncthreads();

    if (warp >= WARPS_COMPUTE) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
        if (warp == WARPS_COMPUTE) { /* ------------------------------------------------ producer */
            if (lane != 0) LEAVE;
            Loader c = {{p, s, memory, ROLE_LOAD, columns, 0, -1}, {0, 1}, {0, 0}, p.in_flight, false,
                        evict_first_policy(), nullptr, 0, 0};
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
                c.ease(EASED >> op & 1);
//@slot dispatch load
                if (NMK_L2_STAGES > 0) c.stream_ahead(c.run, c.stages, c.stage_bytes);
                else c.stream(c.run, c.stages, c.stage_bytes);
                c.stages = 0;
            }
            /* no copy may land in a block that has left */
#pragma unroll 1
            for (int n = p.in_flight - c.eased - c.room; n > 0; n--)
                c.wait(&s.full[c.landed.index], c.landed.phase), c.landed.advance(p.ring_stages);
#pragma unroll 1
            for (int b = c.task / DESC_BLOCK; b <= c.task / DESC_BLOCK + 2 && b < NMK_MAX_TASKS / DESC_BLOCK; b++)
                c.wait(&s.desc_full[b % DESC_BLOCKS], b / DESC_BLOCKS & 1);
            LEAVE;
        }
        if (warp == WARPS_COMPUTE + 1) { /* -------------------------------------------- helper */
            Helper c = {{p, s, memory, ROLE_HELP, columns, lane, -1},
                        filters, (WIDE ? (u32)(filters != 0) : (u32)filters) | (flags & NMK_COLUMN_LOGPROBS)};
            if (blockIdx.x == 0 && lane == 0) c.tell_time(0);
#pragma unroll 1
            for (;;) {
                if (!c.next()) break;
                const int *d = c.desc();
                int op = d[0];
                if (op == 0) break;
//@slot dispatch help
                c.stamp(3);
                c.signal(d);
            }
            LEAVE;
        }
        { /* --------------------------------------------------------------------------- storers */
            Storer c = {{p, s, memory, ROLE_STORE, columns, lane, -1}, (u32)(warp - WARPS_COMPUTE - 2), 0};
#pragma unroll 1
            for (;;) {
                if (!c.next()) break;
                const int *d = c.desc();
                int op = d[0];
                if (op == 0) break;
//@slot dispatch store
                c.stamp(2);
                c.signal(d);
            }
        }
#ifdef NMK_MIXED
    others_done:
        go_on(memory, &next, ns, true);
#endif
        return;
    }

    /* ------------------------------------------------------------------------------------- consumers */
    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    Consumer c = {{p, s, memory, ROLE_COMPUTE, columns, lane, -1}, {0, 0}, warp, 0, 0};
#pragma unroll 1
    for (;;) {
        if (!c.next()) break;
        const int *d = c.desc();
        int op = d[0];
        if (c.warp == 0) c.stamp(0);
        if (op == 0) break;
        asm volatile("" : "+r"(c.warp));
        int tiles = -1, width = 0; /* what is left to the pipelines */
        bool claimed = false;
        const bf16 *row = nullptr;
#ifdef NMK_WIDE
        const bf16 *xn = nullptr;
        int chunks = 1, instance = 0; /* row tiles of one expert; of the route */
#endif
        if (WAITS_COMPUTE >> op & 1) c.wait_task(d);
//@slot dispatch compute
#ifdef NMK_WIDE
        if (tiles >= 0) gemm_x_wide(c, xn, tiles, claimed, chunks, instance);
        if (row) row_tile_wide(c, row, width);
#else
        if (tiles >= 0) gemm_x_compute(c, tiles, claimed);
        if (!row) continue;
        row_tile_any<RAGGED>(c, row, width);
        if (HANDS >> op & 1) c.hand_sum();
#endif
    }
#ifdef NMK_MIXED
    go_on(memory, &next, ns, false);
#endif
}

#ifdef NMK_MIXED
/* By one thread, when all are done: the barriers are memory again. */
DEVICE void end_part(u8 *memory)
{
    Shared &s = *(Shared *)(memory + SHARED_REST);
    mbarriers_end(s.full, NMK_RING_STAGES), mbarriers_end(s.empty, NMK_RING_STAGES);
    mbarriers_end(s.job_full, JOBS), mbarriers_end(s.job_empty, JOBS), mbarriers_end(s.route_listed, 2);
    mbarriers_end(s.route_ready, 2), mbarriers_end(s.route_free, 2);
    mbarriers_end(s.desc_full, DESC_BLOCKS), mbarriers_end(s.desc_empty, DESC_BLOCKS);
}

/* Whether this block has seen that the step is lost. */
DEVICE bool is_lost(const u8 *memory) { return *(const volatile u32 *)&((const Shared *)(memory + SHARED_REST))->gone; }
#endif
