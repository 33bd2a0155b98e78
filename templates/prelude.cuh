/* Device primitives, the shared memory of one block, and what the four roles of a block have in common.
 *
 * One block per SM, twelve warps: eight consumers (role compute), and in the third warpgroup the producer (load), the
 * helper (help) and two storers (store).  Every role walks the SM's task list by itself; they meet only in the weight
 * ring (load to compute), in the job buffers (compute to store), in the route tables and in the descriptor blocks.
 *
 * Always: bulk copies read only memory that is older than the launch, so no cross-proxy fence is needed; a release
 * fence waits for every load its SM has in flight, so bytes in flight are capped apart from the ring's depth; a ring
 * slot or job buffer is freed only by an arrive whose address depends on the words loaded from it, because ptxas
 * otherwise issues the arrive while the last load is still outstanding (tests/sass checks the machine code).
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u16 bf16; /* bit pattern */

#define DEVICE static __device__ __forceinline__
#define INFINITY __int_as_float(0x7f800000)

constexpr int WARPS_COMPUTE = 8, WARPS_STORE = 2, WARPS_ALL = 12;
constexpr int TILE_COLUMNS = 8; /* of an MMA */
constexpr int COLUMN_TILES = (NMK_COLUMNS + TILE_COLUMNS - 1) / TILE_COLUMNS; /* the MMAs' N, in tiles */
constexpr bool FEW = COLUMN_TILES < 8; /* whether there are registers for another way with one live tile of columns */
constexpr int PLACES = COLUMN_TILES * TILE_COLUMNS; /* in registers and shared memory; global buffers: NMK_COLUMNS */
#if NMK_COLUMNS > 8 /* more than an MMA takes: the normalised x is in global memory, and who needs it reads it in L2 */
#define NMK_WIDE 1
constexpr bool WIDE = true;
typedef unsigned long long Mask; /* of columns */
#else
constexpr bool WIDE = false;
typedef unsigned int Mask;
#endif
constexpr int JOBS = 4;         /* job buffers between compute and store: 8 warps x 512 bytes each */
constexpr int JOB_BYTES = WARPS_COMPUTE * 512;
constexpr int TAGS = 2 * JOBS;  /* tags live until the storer has read them, one lap longer than a buffer */
constexpr int DESC_BLOCK = 8;   /* descriptors fetched by one bulk copy */
constexpr int DESC_BLOCKS = 4;  /* blocks in shared memory: the producer may run two ahead of the slowest role */
constexpr int SLOTS = WIDE ? 128 : 64; /* most experts that can be active in one step */
#ifdef NMK_RACECHECK /* which does not see through __syncwarp and one lane's arrive */
constexpr bool EVERY_LANE_ARRIVES = true;
#else
constexpr bool EVERY_LANE_ARRIVES = false;
#endif
constexpr u32 L2_PACE = 600; /* clocks from one stage for L2 to the next: little faster than memory, see stream_ahead */
constexpr int ARRIVALS = EVERY_LANE_ARRIVES ? 32 : 1; /* at an mbarrier, by a warp */

enum role_id { ROLE_LOAD, ROLE_COMPUTE, ROLE_STORE, ROLE_HELP };

/* ------------------------------------------------------------------------------------------------ numbers */

DEVICE float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

/* Two f32 to a bf16 pair, round to nearest even. */
DEVICE u32 bf16_pair(float low, float high)
{
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float exp_fast(float x) { return exp2_fast(x * 1.4426950408889634f); }

/* Order-preserving key of a float; 0 is below every number. */
DEVICE u32 key_of(float v)
{
    const u32 u = __float_as_uint(v);
    return u >> 31 ? ~u : u | 0x80000000u;
}

DEVICE float value_of(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

/* By a warp whose lanes have four keys each: lane i gets the place of the i-th largest and its key.  Ties: the lowest
 * place.  Keys that were chosen are 0 then. */
template <int COUNT> DEVICE void choose_largest(u32 (&key)[4], int lane, int &place, u32 &largest)
{
#pragma unroll 1
    for (int i = 0; i < COUNT; i++) {
        u32 best = key[0];
        int at = 0;
#pragma unroll
        for (int j = 1; j < 4; j++)
            if (key[j] > best) best = key[j], at = j;
        const u32 top = __reduce_max_sync(~0u, best);
        const int owner = __ffs(__ballot_sync(~0u, best == top)) - 1;
        const int e = __shfl_sync(~0u, lane * 4 + at, owner);
#pragma unroll
        for (int j = 0; j < 4; j++) key[j] = lane == owner && j == at ? 0 : key[j];
        if (lane == i) place = e, largest = top;
    }
}

/* D += A * B, m16n8k16: a = one lane's 16 bytes of a packed weight tile, b0 b1 = two k pairs of column g. */
DEVICE void mma(float (&d)[4], const uint4 &a, u32 b0, u32 b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

DEVICE u32 transpose_8x8(u32 a)
{
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

/* ------------------------------------------------------------------------------------------------ memory */

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void mbarrier_init(u32 bar, u32 arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

#ifdef NMK_MIXED
/* threadIdx.x, read anew: else the step would keep it in registers for the chunk behind it. */
DEVICE int thread_now()
{
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* What is put there next may be no barrier, or a new one. */
DEVICE void mbarriers_end(u64 *bar, int count)
{
#pragma unroll 1
    for (int i = 0; i < count; i++)
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(&bar[i])) : "memory");
}
#endif

DEVICE void mbarrier_arrive(u32 bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

DEVICE void mbarrier_expect(u32 bar, u32 bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

DEVICE u64 evict_first_policy()
{
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* Steps may overlap (programmatic dependent launch, runtime/gpu.c): a block of the next one begins where one of this
 * step has ended.  Until wait_launches it touches nothing that launches write; behind that all they wrote is there. */
DEVICE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
DEVICE void wait_launches() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/* Global to shared, completes on bar.  src older than the launch, 16-byte aligned; bytes a multiple of 16. */
DEVICE void bulk_copy(u32 dst, const void *src, u32 bytes, u32 bar, u64 policy)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;"
                 ::"r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}

/* Global to L2. */
DEVICE void prefetch(const void *src, u32 bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

DEVICE u32 load_acquire(const u32 *p)
{
    u32 v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* Of memory that the host writes. */
DEVICE u32 load_acquire_system(const u32 *p)
{
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

DEVICE u32 load_relaxed(const u32 *p)
{
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* Makes this warp's earlier stores visible to whoever acquires the counter; one lane, after __syncwarp. */
DEVICE void add_release(u32 *p)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

/* The same without that: of a task whose words tell that they are there. */
DEVICE void add_relaxed(u32 *p)
{
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
}

/* What this step wrote is read through L2: L1 is not coherent. */
DEVICE uint4 load_l2(const void *p) { return __ldcg((const uint4 *)p); }

/* 16 bytes from L2 to shared memory, and what ends a group of such copies. */
DEVICE void copy_async(u32 to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

DEVICE void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/* Until no more than MOST of the lane's groups are under way. */
template <int MOST> DEVICE void wait_async() { asm volatile("cp.async.wait_group %0;" ::"n"(MOST) : "memory"); }

/* Data that tells that it is there (schedule.exchange: validated).  Each 32-bit word is ABSENT until its one store of
 * the step, which never stores that: no fence, no acquire.  Of such buffers there are two copies.  A step uses that of
 * its parity, and who writes a word leaves ABSENT in the other copy's, for the next step: whether the column is live or
 * not, because the next step does not know which were.  Launches are ordered, so a step's copy is all ABSENT when it
 * begins.  Words are always stored and loaded as 32 bits, or as vectors of them. */
constexpr bool POSTED = NMK_EXCHANGE_BYTES > 0;
constexpr u32 ABSENT = NMK_ABSENT;
/* Opcodes whose signals order nothing, because all that they store tells that it is there; whose waits are hints,
 * because of all that they load they see whether it is there.  A hint comes when so many have yet to arrive as make it
 * likely that the words come while they are looked for: that saves a way to L2 and back. */
DEVICE constexpr u32 hinted(u32 arrivals) { return arrivals - (arrivals >> 2); }
//@slot relaxed

/* The number next to it for that zero. */
DEVICE u32 present(u32 word) { return max((int)word, (int)ABSENT + 1); }

DEVICE void store_word(void *p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v)); }
DEVICE void store_words(void *p, const uint4 &v)
{
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w));
}

DEVICE u32 load_word(const void *p)
{
    if constexpr (!POSTED) return __ldcg((const u32 *)p);
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

DEVICE uint4 load_words(const void *p)
{
    if constexpr (!POSTED) return __ldcg((const uint4 *)p);
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

DEVICE float4 as_floats(const uint4 &v)
{
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
DEVICE float load_float(const float *p)
{
    if constexpr (!POSTED) return __ldcg(p);
    return __uint_as_float(load_word(p));
}
DEVICE float4 load_floats(const float4 *p)
{
    if constexpr (!POSTED) return __ldcg(p);
    return as_floats(load_words(p));
}
DEVICE uint4 as_words(const float4 &v)
{
    return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

/* ABSENT if one of them is: it is the least integer. */
DEVICE u32 least(u32 a, u32 b) { return min((int)a, (int)b); }
DEVICE u32 least(const uint4 &v) { return least(least(v.x, v.y), least(v.z, v.w)); }
DEVICE u32 least(const float4 &v) { return least(as_words(v)); }

DEVICE void barrier_compute() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

/* ------------------------------------------------------------------------------------------------ sampling */

DEVICE float gumbel(nmk_noise key, int token)
{
    const float u = nmk_noise_uniform(key, token);
    /* near u = 1 the fast logarithm's absolute error is larger than the result */
    const float t = 1.f - u, e = t < 0.015625f ? t * (1.f + t * (0.5f + t * (1 / 3.f))) : -__logf(u);
    return -__logf(e);
}

/* ------------------------------------------------------------------------------------------------ packed weights */

/* The packed form of a [rows][K] matrix: row tiles of 16 rows, cut into stages, a stage into 8 warps x tiles. */
template <int K> struct Packed {
    static constexpr int padded = (K + 255) / 256 * 256;
    static constexpr int granules = padded / 256;                /* of 32 k, per warp */
    static constexpr int tiles = 2 * granules % 4 == 0 ? 4 : 2 * granules % 3 == 0 ? 3 : 2; /* per stage and warp */
    static constexpr int stages = 2 * granules / tiles;          /* per row tile */
    static constexpr int stage_bytes = WARPS_COMPUTE * tiles * 512;
    static constexpr int tile_bytes = 16 * padded * 2;
    static_assert(stage_bytes <= NMK_STAGE_BYTES, "a stage is larger than a ring slot");

    /* First k of warp w's granule q. */
    static __device__ __forceinline__ int k(int w, int q)
    {
        if (tiles == 3) return (w * granules + q) * 32;
        return q / (tiles / 2) * (tiles * 128) + w * (tiles * 16) + q % (tiles / 2) * 32;
    }

    /* Byte offset, inside a row tile, of the pair (k, k+1) of row r (0..15); k even. */
    static __device__ __forceinline__ int pair_offset(int r, int k)
    {
        int stage, warp, tile;
        if (tiles == 3) {
            warp = k / (granules * 32);
            const int i = k % (granules * 32) / 32 * 2 + (k >> 2 & 1);
            stage = i / 3, tile = i % 3;
        } else {
            stage = k / (tiles * 128), warp = k % (tiles * 128) / (tiles * 16);
            tile = k % (tiles * 16) / 32 * 2 + (k >> 2 & 1);
        }
        const int lane = (r & 7) * 4 + (k >> 3 & 3), word = (k & 2) + (r >> 3);
        return ((stage * WARPS_COMPUTE + warp) * tiles + tile) * 512 + lane * 16 + word * 4;
    }
};

typedef Packed<NMK_HIDDEN> PackedX;

/* The normalised x is kept as B fragments: in registers, or in shared memory where a warp's share of a row is more than
 * they hold. */
constexpr bool X_SHARED = NMK_X_BYTES > 0 && !WIDE;
constexpr bool X_REGISTERS = !X_SHARED && !WIDE;
static_assert(!X_SHARED || NMK_X_BYTES == TILE_COLUMNS * PackedX::padded * 2, "the fragments of a row");

/* ------------------------------------------------------------------------------------------------ shared memory */

/* One chunk of attention: a range of one column's pages for one kv head. */
struct Segment {
    int column, kv_head, page, pages; /* page: index in the row's page table */
    int slot, last, pad0, pad1;       /* slot: of the partial, chunk number; last: also holds this step's own tokens */
};

/* How far the distribution of an SM's column is kept: scores (logits after penalties and temperature) down to a
 * distance from the best one, as a 24-bit key.  While it is looked for, its digits of 8 bits so far, and how much
 * (tokens or mass) of what they leave open still belongs to it. */
struct Cut {
    float best;
    u32 prefix, limit; /* limit: the largest key that is kept by what is known */
    u64 target;
};

#ifdef NMK_WIDE
/* Which columns go to which expert: pairs of both, an expert's one after the other and in order of columns.  A pair's
 * number is also the row of h. */
constexpr int PAIRS = PLACES * 8;
struct Routes {
    u64 columns[SLOTS]; /* of an active expert */
    u16 first[SLOTS + 2];
    float weight[PAIRS];
    u8 column[PAIRS];
};

/* While routes are made, by columns and by experts. */
struct Choices {
    u64 columns[128];
    float weight[PLACES][8];
    u8 expert[PLACES][8], slot[128];
    u32 active[4];
    int pairs[4];
};

/* The storers' best candidate of each column, and what they perturb with. */
struct Offers {
    float best[WARPS_STORE][PLACES], heat[PLACES];
    int id[WARPS_STORE][PLACES];
    nmk_noise key[PLACES];
};
#endif

struct Shared {
    u64 full[NMK_RING_STAGES], empty[NMK_RING_STAGES];
    u64 job_full[JOBS], job_empty[JOBS], desc_full[DESC_BLOCKS], desc_empty[DESC_BLOCKS];
    u64 route_listed[2], route_ready[2]; /* the active experts are known; with the weights */
    u64 route_free[2];                   /* the storers are done with it: of schedule.exchange: validated */
    alignas(128) int desc[DESC_BLOCKS * DESC_BLOCK * NMK_DESC_WORDS];
    /* columns, fixed for the launch; kind 0 = full, 1 = sliding */
    int pos[PLACES], base[PLACES], group[PLACES], table_row[PLACES], flags[PLACES];
    int low[2][PLACES], pages[2][PLACES], first_page[2][PLACES], chunks[2][PLACES], chunk0[2][PLACES + 1];
    alignas(16) Segment segment[2][NMK_MAX_SEGMENTS]; /* this SM's; where chunks are claimed, see claimed_segment */
    int segments[2];
    /* route, double buffered by instance */
    int active[2], expert[2][SLOTS];
#ifdef NMK_WIDE
    Routes routes[2];
    Choices choices;
    Offers offers;
#else
    float weight[2][SLOTS * 8];
    alignas(16) u32 chosen[2][8][4]; /* by each column, a bit for each expert; not where but one is live */
#endif
    /* consumers among themselves */
    alignas(16) float sum[8][8];
    alignas(16) float score_max[2][8][8], score_sum[2][8][8];
#ifdef NMK_RACECHECK /* which does not see order that comes by way of other SMs */
    struct {
#else
    union {
#endif
        alignas(16) uint2 prob[2][8][32];
        struct { /* route's, of one live column, between barriers as attention is: as keys, and the largest in order */
            alignas(16) u32 logit[128], best[40], best_expert[40];
        };
        float scan[512]; /* the helper's, in tasks that wait for the lm_head: no attention is left then */
    };
    /* the helper's sampling: where its column's distribution is cut, and what it works on */
    Cut cut;
    u32 bin_low[256], bin_high[256];
    /* beside the data: what a stage or job is, where only run time knows */
    alignas(16) float part_ml[TAGS][16];
    int stage_tag[NMK_RING_STAGES], job_tag[TAGS];
    u32 gone; /* not 0: this block has seen that the step is lost */
    int only; /* the live column, where there is but one; else -1 */
};

/* Descriptor block b of this SM's list into shared memory. */
DEVICE void fetch_descriptors(Shared &s, const nmk_params &p, int b, u64 policy)
{
    constexpr u32 bytes = DESC_BLOCK * NMK_DESC_WORDS * 4;
    const u32 bar = shared_address(&s.desc_full[b % DESC_BLOCKS]);
    mbarrier_expect(bar, bytes);
    const u8 *from = (const u8 *)p.lists + ((u64)blockIdx.x * (NMK_MAX_TASKS / DESC_BLOCK) + b) * bytes;
    bulk_copy(shared_address(s.desc + b % DESC_BLOCKS * (DESC_BLOCK * NMK_DESC_WORDS)), from, bytes, bar, policy);
}

constexpr int SHARED_JOBS = NMK_RING_STAGES * NMK_STAGE_BYTES;
constexpr int SHARED_X = SHARED_JOBS + JOBS * JOB_BYTES;
constexpr int SHARED_REST = SHARED_X + NMK_X_BYTES;
constexpr int SHARED_BYTES = SHARED_REST + sizeof(Shared);
static_assert(NMK_COLUMNS <= 64, "masks of columns have 64 bits");
static_assert(SHARED_BYTES <= NMK_SMEM_BYTES, "shared memory: NMK_SMEM_BYTES is smaller than what the kernel uses");

/* ------------------------------------------------------------------------------------------------ contexts */

DEVICE int count_bits(u32 bits) { return __popc(bits); }
DEVICE int count_bits(u64 bits) { return __popcll(bits); }
DEVICE int first_bit(u32 bits) { return __ffs(bits) - 1; }
DEVICE int first_bit(u64 bits) { return __ffsll(bits) - 1; }
/* The bits below bit n, of none if that is negative. */
DEVICE u64 below_bit(int n) { return n >= 64 ? ~0ull : ((u64)1 << max(n, 0)) - 1; }
/* Of a mask, what is before column n. */
DEVICE Mask below(int n) { return ((Mask)1 << n) - 1; }

/* A link of the dispatch; keeps the compiler from making a jump table of the chain. */
DEVICE bool is(int &op, int code)
{
    asm volatile("" : "+r"(op));
    return op == code;
}

/* The same for ops that share their code, as bits. */
DEVICE bool is_any(int &op, u32 codes)
{
    asm volatile("" : "+r"(op));
    return codes >> op & 1;
}

/* What every role has: the launch's parameters, the block's memory, and where it is in the task list. */
struct Context {
    const nmk_params &p;
    Shared &s;
    u8 *ring;
    u32 role;    /* a constant in every role's code */
    Mask columns; /* bit n: column n is live */
    int lane, task;

    template <class T> __device__ __forceinline__ T *buffer(int offset128) const
    {
        return (T *)((u8 *)p.arena + (u64)(u32)offset128 * 128);
    }
    /* Of data that tells that it is there: this step's copy, and from a word in it to that in the other copy. */
    template <class T> __device__ __forceinline__ T *exchange(int offset128) const
    {
        return (T *)((u8 *)buffer<T>(offset128) + (POSTED && p.epoch & 1 ? (u64)NMK_EXCHANGE_BYTES : 0));
    }
    template <class T> __device__ __forceinline__ T *other_copy(T *word) const
    {
        return (T *)((u8 *)word + (p.epoch & 1 ? -(long long)NMK_EXCHANGE_BYTES : (long long)NMK_EXCHANGE_BYTES));
    }
    __device__ __forceinline__ void post(float *to, float v) const
    {
        if constexpr (POSTED) store_word(to, present(__float_as_uint(v)));
        else *to = v;
    }
    __device__ __forceinline__ void post(u32 *to, u32 v) const
    {
        if constexpr (POSTED) store_word(to, present(v));
        else *to = v;
    }
    __device__ __forceinline__ void post(float4 *to, const float4 &v) const
    {
        if constexpr (POSTED) {
            const uint4 u = as_words(v);
            store_words(to, make_uint4(present(u.x), present(u.y), present(u.z), present(u.w)));
        } else {
            *to = v;
        }
    }
    __device__ __forceinline__ void clear(void *word) const
    {
        if constexpr (POSTED) store_word(other_copy((u8 *)word), ABSENT);
    }
    __device__ __forceinline__ const u8 *weights(int kib) const { return (const u8 *)p.weights + (u64)(u32)kib * 1024; }
    __device__ __forceinline__ const int *desc() const
    {
        return s.desc + (task & (DESC_BLOCKS * DESC_BLOCK - 1)) * NMK_DESC_WORDS;
    }
    __device__ __forceinline__ bool live(int column) const
    {
        /* attention with norms of q and k leaves no register for the set, nor do words that are looked at */
        return NMK_QK_NORM || POSTED ? s.pos[column] >= 0 : columns >> column & 1;
    }
    /* Whether the global buffers have a place for the column, live or not. */
    static __device__ __forceinline__ bool stored(int column)
    {
        return NMK_COLUMNS == PLACES || column < NMK_COLUMNS;
    }
    /* Whether there is anything to do for a tile of columns.  The first one counts as live. */
    __device__ __forceinline__ bool live_tile(int tile) const
    {
        return tile == 0 || (columns >> tile * TILE_COLUMNS & 0xff) != 0;
    }
    /* The same as a mask of tiles. */
    __device__ __forceinline__ u32 live_tiles() const
    {
        u32 tiles = 1;
#pragma unroll
        for (int n = 1; n < COLUMN_TILES; n++) tiles |= (u32)live_tile(n) << n;
        return tiles;
    }

    /* Whether the barrier's phase of that parity is over. */
    __device__ __forceinline__ bool passed(u64 *bar, u32 parity) const
    {
        u32 done;
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
        return done;
    }

    /* Every wait for another SM is bounded in time.  Who gives up leaves a word in p.abort; whoever waits for another
     * SM sees it and tells its block (gone).  All in the block fall through their waits, and leave at their next block
     * of descriptors (next).  So the kernel ends, and the engine lives.  A wait inside the block needs no clock: behind
     * it somebody waits for another SM.
     *
     * Mostly it is over at the first look, and then little code should be jumped over: instructions that are not near
     * the core cost more than these.  In PTX, because the compiler's loop is twice as long. */
    __device__ __forceinline__ void wait(u64 *bar, u32 parity)
    {
        if (__builtin_expect(!passed(bar, parity), 0))
            asm volatile("{\n"
                         ".reg .pred done, more;\n"
                         ".reg .u32 a;\n"
                         "again:\n"
                         "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                         "@done bra over;\n"
                         "ld.volatile.shared.u32 a, [%2];\n"
                         "setp.eq.u32 more, a, 0;\n"
                         "@more bra again;\n"
                         "over:\n"
                         "}" ::"r"(shared_address(bar)), "r"(parity), "r"(shared_address(&s.gone))
                         : "memory");
    }

    __device__ __forceinline__ bool gone() const { return *(volatile u32 *)&s.gone; }

    /* One lane, which gives up a wait: leaves a record, the first of this role of this block.  A step waits for nothing
     * before the one before it is over, so none of a later step is in its place.  The engine makes out which wait held
     * up the others.  COUNTED: for a counter; the step is in the word then, else it is in place of what the counter was
     * at, because this stands wherever words are looked at, and a few bytes more make Llama 3.2 1B 2.6 % slower
     * (tests/bench/RESULTS.md). */
    template <bool COUNTED>
    __device__ __forceinline__ void give_up(volatile u32 *abort, u32 lost, int counter, u32 expected = 0,
                                            u32 got = 0) const
    {
        nmk_hang *h = (nmk_hang *)p.hang + (blockIdx.x * 4 + role);
        const u32 step = COUNTED ? (p.epoch & NMK_HANG_STEP_MASK) << NMK_HANG_STEP_SHIFT : 0;
        const u32 here = 1u << 31 | step | role << 20 | blockIdx.x << 12 | task;
        if (*(volatile u32 *)&h->word == 0)
            asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(h), "r"(here), "r"(counter),
                         "r"(expected), "r"(COUNTED ? got : (u32)p.epoch) : "memory");
        if (!lost) *abort = here;
        *(volatile u32 *)&s.gone = 1;
    }

    /* One lane: polls until all arrivals of this step are in, or gives up. */
    __device__ __forceinline__ void wait_counter(int counter, int arrivals, bool hint)
    {
        const u32 *c = (const u32 *)p.counters + counter * 32;
        u32 target = (u32)p.epoch * (u32)arrivals;
        if (hint) target -= (u32)arrivals - hinted(arrivals);
        u32 n = 0, got, start = 0;
#pragma unroll 1
        while ((int)((got = hint ? load_relaxed(c) : load_acquire(c)) - target) < 0) {
            if (++n & 255) continue;
            u64 ns;
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
            const u32 now = ns >> 20; /* milliseconds, nearly */
            if (n == 256) start = now;
            volatile u32 *abort = (volatile u32 *)p.abort;
            const u32 lost = *abort;
            if (!lost && now - start < p.patience_ms) continue;
            give_up<true>(abort, lost, counter, target, got);
            break;
        }
    }

    /* For a warp that polls for what the host gives: false when it has waited long enough, or the step is lost anyway.
     * n and start: 0 at first. */
    __device__ __forceinline__ bool patient(u32 &n, u32 &start)
    {
        u64 ns;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
        const u32 now = ns >> 20;
        if (n++ == 0) start = now;
        volatile u32 *abort = (volatile u32 *)p.abort;
        const u32 lost = *abort;
        if (__any_sync(~0u, lost == 0 && now - start < p.patience_ms)) return true;
        if (lane == 0 && !lost) give_up<false>(abort, 0, NMK_HANG_HOST);
        *(volatile u32 *)&s.gone = 1;
        return false;
    }

    /* By a warp: whether one of its lanes has a word that is not there, and should look again.  The counter that the
     * task waits for hardly ever tells too early, so what counts is that this is bounded: by the number of looks, which
     * is one register, and a look at L2 takes half a microsecond or more. */
    __device__ __forceinline__ bool lacks(u32 word, u32 &looks)
    {
        if (!__any_sync(~0u, word == ABSENT)) return false;
        if (++looks & 255) return true;
        if (__any_sync(~0u, gone())) return false; /* only here: until now the words were worth no register */
        volatile u32 *abort = (volatile u32 *)p.abort;
        const u32 lost = __any_sync(~0u, *abort);
        if (!lost && looks >> 11 < p.patience_ms) return true;
        if ((threadIdx.x & 31) == 0) give_up<false>(abort, lost, desc()[2]);
        __syncwarp();
        return true;
    }

    /* The waits a descriptor asks for, by one lane. */
    __device__ __forceinline__ void wait_counters(const int *d)
    {
#pragma unroll 1
        for (int i = 2; i < 6 && d[i] >= 0; i += 2) wait_counter(d[i], d[i + 1], HINTED >> d[0] & 1);
    }

    /* The same by a warp. */
    __device__ __forceinline__ void wait_task(const int *d)
    {
        if (lane == 0) wait_counters(d);
        __syncwarp();
    }

#ifndef NMK_WIDE
    /* Where words tell that they are there, the row of h of an active expert and a column that chose it: a column has
     * COUNT rows, whatever it chooses. */
    template <int COUNT> __device__ __forceinline__ int row_of_h(int b, int slot, int column) const
    {
        int row = column * COUNT;
        if (s.only >= 0) return row + slot;
        const uint4 chosen = *(const uint4 *)s.chosen[b][column];
        const int expert = s.expert[b][slot];
        const u64 before = below_bit(expert), after = below_bit(expert - 64);
        row += __popc(chosen.x & (u32)before) + __popc(chosen.y & (u32)(before >> 32));
        return row + __popc(chosen.z & (u32)after) + __popc(chosen.w & (u32)(after >> 32));
    }
#endif

    __device__ __forceinline__ void wait_route(int instance)
    {
        wait(&(role == ROLE_LOAD ? s.route_listed : s.route_ready)[instance & 1], instance >> 1 & 1);
    }

    /* For the host: when the step began (0), or had its tokens (1).  By one lane of all SMs'. */
    __device__ __forceinline__ void tell_time(int what) const
    {
        u64 now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        ((volatile u64 *)p.times)[(u64)p.out_row * 2 + what] = now;
    }

    /* For bench-trace: the SM's clock at one of the NMK_TRACE_STAMPS points of the task. */
    __device__ __forceinline__ void stamp(int what)
    {
        u64 *trace = (u64 *)p.trace;
        if (trace && lane == 0) trace[(blockIdx.x * NMK_MAX_TASKS + task) * NMK_TRACE_STAMPS + what] = clock64();
    }

    /* Tells the other SMs that this warp has stored its part of the task. */
    __device__ __forceinline__ void signal(const int *d)
    {
        __syncwarp();
        if (lane != 0 || d[6] < 0) return;
        u32 *counter = (u32 *)p.counters + d[6] * 32;
        if (RELAXED >> d[0] & 1) add_relaxed(counter);
        else add_release(counter);
    }

    /* The warp has read or written its part of what the barrier guards.  seen: the OR of all words that it loaded, so
     * that the arrive cannot pass the loads. */
    __device__ __forceinline__ void arrive(u64 *bar, u32 seen = 0)
    {
        __syncwarp();
        if (EVERY_LANE_ARRIVES || lane == 0) mbarrier_arrive(shared_address(bar) + (seen & p.zero));
    }

    /* The next descriptor; a block is given back when its reader enters the next one.  False: the step is lost. */
    __device__ __forceinline__ bool next()
    {
        /* otherwise every op's lane-dependent addresses are hoisted out of the task loop, into spills */
        asm volatile("" : "+r"(lane));
        if (++task & (DESC_BLOCK - 1)) return true;
        const u32 block = (u32)task / DESC_BLOCK;
        wait(&s.desc_full[block % DESC_BLOCKS], block / DESC_BLOCKS & 1);
        if (block > 0) arrive(&s.desc_empty[(block - 1) % DESC_BLOCKS]);
        return !gone();
    }
};

/* A position in the weight ring. */
struct Slot {
    int index;
    u32 phase;
    __device__ __forceinline__ void advance(int stages)
    {
        if (++index == stages) index = 0, phase ^= 1;
    }
};

/* ------------------------------------------------------------------------------------------------ load */

struct Loader : Context {
    Slot fill, landed;
    int room;   /* stages that may still be issued before one must have landed */
    bool eased; /* one less at present */
    u64 policy;
    const u8 *run; /* what a task leaves to be streamed: so many stages of so many bytes */
    int stages;
    u32 stage_bytes;

    /* A release waits for every load its SM has in flight: one stage less while the machine waits for releases. */
    __device__ __forceinline__ void ease(bool on)
    {
        if (on == eased || p.in_flight == 1) return;
        eased = on;
        if (!on) room++;
        else if (room > 0) room--;
        else wait(&s.full[landed.index], landed.phase), landed.advance(p.ring_stages);
    }

    /* Waits until the next slot may be filled; returns its barrier. */
    __device__ __forceinline__ u32 claim_slot()
    {
        if (room > 0) room--;
        else wait(&s.full[landed.index], landed.phase), landed.advance(p.ring_stages);
        wait(&s.empty[fill.index], fill.phase);
        return shared_address(&s.full[fill.index]);
    }

    __device__ __forceinline__ void push(const u8 *src, u32 bytes, int stage_tag)
    {
        const u32 bar = claim_slot();
        s.stage_tag[fill.index] = stage_tag;
        mbarrier_expect(bar, bytes);
        bulk_copy(shared_address(ring) + fill.index * NMK_STAGE_BYTES, src, bytes, bar, policy);
        fill.advance(p.ring_stages);
    }

    /* count consecutive stages. */
    __device__ __forceinline__ void stream(const u8 *src, int count, u32 bytes, int tag = 0)
    {
#pragma unroll 1
        for (int i = 0; i < count; i++, src += bytes) push(src, bytes, tag);
    }

    /* Whether a stage may be issued now. */
    __device__ __forceinline__ bool may_issue()
    {
        if (room == 0) {
            if (!passed(&s.full[landed.index], landed.phase)) return false;
            room++, landed.advance(p.ring_stages);
        }
        return passed(&s.empty[fill.index], fill.phase);
    }

    /* The same, and while the ring is full those behind go to L2: memory would stand still. */
    __device__ __forceinline__ void stream_ahead(const u8 *src, int count, u32 bytes)
    {
        int ahead = 0; /* stages from src on that are there, or on their way */
        u32 last = clock();
#pragma unroll 1
        for (int i = 0; i < count; i++, src += bytes, ahead = max(ahead - 1, 0)) {
#pragma unroll 1
            while (ahead < min(NMK_L2_STAGES, count - i) && !may_issue() && !gone()) {
                if (room == 0 || (u32)clock() - last < L2_PACE) continue;
                prefetch(src + ahead * bytes, bytes);
                ahead++, last = clock();
            }
            push(src, bytes, 0);
        }
    }

    /* The whole task is one run of consecutive stages; the role's loop streams it, one copy for all ops. */
    __device__ __forceinline__ void stream_task(const u8 *src, int count, u32 bytes)
    {
        run = src, stages = count, stage_bytes = bytes;
    }

    /* Row tiles two by two, whose stages take turns. */
    __device__ __forceinline__ void stream_pairs(const u8 *src, int tiles, int count, u32 bytes, u32 tile_bytes)
    {
#pragma unroll 1
        for (int i = 0; i < tiles; i += 2, src += 2 * tile_bytes) {
            const int two = min(2, tiles - i);
#pragma unroll 1
            for (int k = 0; k < two * count; k++) push(src + (k % two) * tile_bytes + k / two * bytes, bytes, 0);
        }
    }

    /* A stage without data: the end of claimed work. */
    __device__ __forceinline__ void push_end()
    {
        const u32 bar = claim_slot();
        s.stage_tag[fill.index] = -1;
        mbarrier_arrive(bar);
        fill.advance(p.ring_stages);
    }

    /* The next descriptors, when all have done with the block that is there. */
    __device__ __forceinline__ void fetch(int b)
    {
        if (b >= NMK_MAX_TASKS / DESC_BLOCK) return;
        if (b >= DESC_BLOCKS) {
            wait(&s.desc_empty[b % DESC_BLOCKS], (b / DESC_BLOCKS & 1) ^ 1);
            if (gone()) return; /* fallen through: others still read what is there, and leave behind it */
        }
        fetch_descriptors(s, p, b, policy);
    }
};

/* ------------------------------------------------------------------------------------------------ row tiles */

/* What the consumer warps have of a row tile, one behind the other, summed up in their order.  seen: the OR of a word
 * of each. */
DEVICE float4 sum_warps(const float4 *d, u32 &seen)
{
    float4 sum = d[0];
    seen = __float_as_uint(sum.x);
#pragma unroll
    for (int i = 1; i < WARPS_COMPUTE; i++) {
        const float4 a = d[i * 32];
        sum.x += a.x, sum.y += a.y, sum.z += a.z, sum.w += a.w;
        seen |= __float_as_uint(a.x);
    }
    return sum;
}

/* By a warp that has a row tile, rows g and g+8 of columns 2t and 2t+1: the squares of its 16 rows, of each column.
 * Rounded as said here: a column has the same bits whether it is an even or an odd one. */
DEVICE void sum_squares(const float (&v)[4], float (&squares)[2])
{
    squares[0] = __fmaf_rn(v[2], v[2], __fmul_rn(v[0], v[0]));
    squares[1] = __fmaf_rn(v[3], v[3], __fmul_rn(v[1], v[1]));
#pragma unroll
    for (int s = 4; s <= 16; s <<= 1) {
        squares[0] += __shfl_xor_sync(~0u, squares[0], s);
        squares[1] += __shfl_xor_sync(~0u, squares[1], s);
    }
}

/* ------------------------------------------------------------------------------------------------ compute */

struct Consumer : Context {
    Slot slot;
    int warp;
    u32 job, pair;               /* pair: parity of the attention exchange buffers */
    uint4 x[X_REGISTERS ? PackedX::granules : 1]; /* normalised x, column g, this warp's k: B fragments */
    /* rows g and g+8 of the SM's own row tile, columns 2t and 2t+1 of each tile.  With NMK_X_KEPT what the eight warps
     * have adds up to the residual, which is nowhere else in full precision. */
    float acc[COLUMN_TILES][4];

    __device__ __forceinline__ int g() const { return lane >> 2; }
    __device__ __forceinline__ int t() const { return lane & 3; }
    /* Whether any of the eight warps says so. */
    static __device__ __forceinline__ bool any_warp(bool mine)
    {
        u32 any;
        asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 1, 256, p;\n"
                     "selp.u32 %0, 1, 0, q;\n}"
                     : "=r"(any) : "r"((u32)mine) : "memory");
        return any;
    }
    /* All eight warps leave at the same block of descriptors: they meet at named barriers, which nothing bounds. */
    __device__ __forceinline__ bool next()
    {
        const bool on = Context::next();
        if (task & (DESC_BLOCK - 1)) return true;
        return !any_warp(!on);
    }
    __device__ __forceinline__ void wait_task(const int *d)
    {
        if (d[2] < 0) return;
        if (threadIdx.x == 0) wait_counters(d);
        barrier_compute();
        if (warp == 0) stamp(1);
    }

    /* Tells the other SMs that all consumers have stored their part of the task. */
    __device__ __forceinline__ void signal_together(const int *d)
    {
        barrier_compute();
        if (warp == 0) signal(d);
    }

    /* The slot that many behind the current one. */
    __device__ __forceinline__ Slot slot_after(int count) const
    {
        Slot at = slot;
        if ((at.index += count) >= p.ring_stages) at.index -= p.ring_stages, at.phase ^= 1;
        return at;
    }
    __device__ __forceinline__ void wait_full(const Slot &at) { wait(&s.full[at.index], at.phase); }

    /* Lane's 16 bytes of this warp's tile i in the stage at a slot. */
    template <int TILES> __device__ __forceinline__ uint4 tile(const Slot &at, int i) const
    {
        return *(const uint4 *)(ring + at.index * NMK_STAGE_BYTES + (warp * TILES + i) * 512 + lane * 16);
    }

    /* This warp's tiles of the stage at the current slot, once it is there.  Returns what release takes. */
    template <int TILES> __device__ __forceinline__ u32 load_stage(uint4 (&a)[TILES])
    {
        u32 seen = 0;
        wait_full(slot);
#pragma unroll
        for (int k = 0; k < TILES; k++) a[k] = tile<TILES>(slot, k), seen |= a[k].x;
        return seen;
    }

    /* Frees the current slot.  seen: the OR of all words loaded from it, so that the arrive cannot pass the loads. */
    __device__ __forceinline__ void release(u32 seen)
    {
        arrive(&s.empty[slot.index], seen);
        slot.advance(p.ring_stages);
    }

    /* The same of so many slots from there on, each by another lane. */
    __device__ __forceinline__ void release_some(int count, u32 seen)
    {
        if constexpr (EVERY_LANE_ARRIVES) {
#pragma unroll 1
            for (int i = 0; i < count; i++) release(seen);
            return;
        }
        __syncwarp();
        if (lane < count) {
            int i = slot.index + lane;
            if (i >= p.ring_stages) i -= p.ring_stages;
            mbarrier_arrive(shared_address(&s.empty[i]) + (seen & p.zero));
        }
        slot.index += count;
        if (slot.index >= p.ring_stages) slot.index -= p.ring_stages, slot.phase ^= 1;
    }

    /* Where the lane's B fragment of this warp's tile i is, if not in registers; nobody else reads it. */
    __device__ __forceinline__ uint2 *fragment(int i) const
    {
        return (uint2 *)(ring + SHARED_X) + (i * WARPS_COMPUTE + warp) * 32 + lane;
    }

    /* Hands this warp's part of a tile to the storers. */
    __device__ __forceinline__ void hand(const float (&v)[4])
    {
        const u32 b = job % JOBS;
        wait(&s.job_empty[b], (job / JOBS & 1) ^ 1);
        *(float4 *)(ring + SHARED_JOBS + b * JOB_BYTES + warp * 512 + lane * 16) = make_float4(v[0], v[1], v[2], v[3]);
        arrive(&s.job_full[b]);
        job++;
    }

    /* By an op behind which a norm comes before anybody reads x: its registers are free until here. */
    __device__ __forceinline__ void forget_x()
    {
#pragma unroll
        for (int q = 0; q < (int)(sizeof x / sizeof *x); q++) x[q] = make_uint4(0, 0, 0, 0);
    }

    /* Hands on what the SM has summed up for its own row tile, and begins anew; where it keeps the residual it goes on
     * from there. */
    __device__ __forceinline__ void hand_sum()
    {
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
            if (live_tile(n)) hand(acc[n]);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (!NMK_X_KEPT) acc[n][k] = 0;
        }
    }
};

DEVICE u32 any_bits(const uint4 &v) { return v.x | v.y | v.z | v.w; }

/* One stage's worth of products.  first: index of its first tile in the row tile. */
template <int TILES, int GRANULES>
DEVICE void multiply(float (&even)[4], float (&odd)[4], const uint4 (&a)[TILES], const uint4 (&b)[GRANULES], int first)
{
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const uint4 &x = b[(first + i) >> 1];
        if ((first + i) & 1) mma(odd, a[i], x.z, x.w);
        else mma(even, a[i], x.x, x.y);
    }
}

/* One row tile times the x in shared memory. */
DEVICE void multiply_shared(Consumer &c, float (&even)[4], float (&odd)[4])
{
    typedef PackedX L;
#pragma unroll 1
    for (int s = 0; s < L::stages; s++) {
        uint4 a[L::tiles];
        const u32 seen = c.load_stage(a);
#pragma unroll
        for (int k = 0; k < L::tiles; k++) {
            const uint2 b = *c.fragment(s * L::tiles + k);
            if (k & 1) mma(odd, a[k], b.x, b.y);
            else mma(even, a[k], b.x, b.y);
        }
        c.release(seen);
    }
}

/* With NMK_X_UNSCALED the fragments are x * gamma, and this is what is missing: of the columns 2t and 2t+1 the factor
 * that their sums of squares make, which the norm left by warps.  So nobody waits for the other warps between x and the
 * first product, but behind it. */
DEVICE void norm_factors(Consumer &c, float (&factor)[2])
{
    float2 sum = make_float2(0, 0);
    barrier_compute();
#pragma unroll
    for (int w = 0; w < WARPS_COMPUTE; w++) {
        const float2 v = *(const float2 *)&c.s.sum[w][2 * c.t()];
        sum.x += v.x, sum.y += v.y;
    }
    factor[0] = rsqrtf(sum.x * (1.f / NMK_HIDDEN) + NMK_X_EPS);
    factor[1] = rsqrtf(sum.y * (1.f / NMK_HIDDEN) + NMK_X_EPS);
}

/* Row tiles of 16 rows times the normalised x; each goes to the storers.  claimed: after the first `tiles` more follow
 * until the producer's end mark, their number in the stage's tag. */
DEVICE void gemm_x_compute(Consumer &c, int tiles, bool claimed)
{
    typedef PackedX L;
    int mark = 0; /* the end of claimed tiles is handed on as one mark for each storer */
    float factor[2] = {1, 1};
    int i = 0;
#pragma unroll 1
    for (; i < tiles || (claimed && !c.gone()); i++) {
        float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
        if (!mark) {
            c.wait_full(c.slot);
            if (i >= tiles) {
                const int tag = c.s.stage_tag[c.slot.index];
                if (c.warp == 0 && c.lane == 0) c.s.job_tag[c.job % TAGS] = tag;
                if (tag < 0) mark = 1, c.release(tag);
            }
        }
        if (X_SHARED && !mark) {
            multiply_shared(c, even, odd);
#pragma unroll
            for (int k = 0; k < 4; k++) even[k] += odd[k];
        } else if (!mark) {
            uint4 a[L::tiles], next[L::tiles];
#pragma unroll
            for (int k = 0; k < L::tiles; k++) a[k] = c.tile<L::tiles>(c.slot, k);
#pragma unroll
            for (int s = 0; s < L::stages; s++) {
                if (s + 1 < L::stages) {
                    Slot ahead = c.slot;
                    ahead.advance(c.p.ring_stages);
                    c.wait_full(ahead);
#pragma unroll
                    for (int k = 0; k < L::tiles; k++) next[k] = c.tile<L::tiles>(ahead, k);
                }
                if constexpr (X_REGISTERS) multiply(even, odd, a, c.x, s * L::tiles);
                u32 seen = 0;
#pragma unroll
                for (int k = 0; k < L::tiles; k++) seen |= a[k].x;
                c.release(seen);
#pragma unroll
                for (int k = 0; k < L::tiles; k++) a[k] = next[k];
            }
#pragma unroll
            for (int k = 0; k < 4; k++) even[k] += odd[k];
        } else if (c.warp == 0 && c.lane == 0) {
            c.s.job_tag[c.job % TAGS] = -mark;
        }
        if (NMK_X_UNSCALED) { /* once a task: what stays in registers between tasks would cost attention its own */
            if (i == 0) norm_factors(c, factor);
#pragma unroll
            for (int k = 0; k < 4; k++) even[k] *= factor[k & 1];
        }
        c.hand(even);
        if (mark && mark++ == WARPS_STORE) break;
    }
    /* In a step that is lost some warps may see tiles where others see none, but all of them meet. */
    if (NMK_X_UNSCALED && i == 0) barrier_compute();
}

template <class Task> DEVICE void gemm_x_load(Loader &c, const Task &t)
{
    typedef PackedX L;
    const u8 *from = c.weights(t.weight_kib) + (u64)t.tile * L::tile_bytes;
    if (WIDE && (!FEW || c.live_tiles() > 1)) c.stream_pairs(from, t.tiles, L::stages, L::stage_bytes, L::tile_bytes);
    else c.stream_task(from, t.tiles * L::stages, L::stage_bytes);
}

/* The SM's own row tile of a [rows][K] matrix. */
template <int K, class Task> DEVICE void row_tile_load(Loader &c, const Task &t)
{
    typedef Packed<K> L;
    c.stream_task(c.weights(t.weight_kib) + (u64)t.tile * L::tile_bytes, L::stages, L::stage_bytes);
}

/* acc + odd += row tile times rows of bf16 activations that this step wrote: the row of the lane's column is at `in` +
 * from, zeros where it is not live.  width a multiple of 512, so that a stage is 4 tiles a warp.  The operands of AHEAD
 * stages are loaded ahead of their use: they come from L2.  Where all wait for attention they are all that is
 * lacking. */
DEVICE void row_tile_sum(Consumer &c, const bf16 *in, int from, bool live, int width, float (&odd)[4])
{
    constexpr int TILES = 4, AHEAD = NMK_TURNS ? 8 : 4;
    const int stages = width / 512;
    uint4 b[AHEAD][2];
    in += from + c.warp * 64 + 8 * c.t();
    auto fetch = [&](uint4(&d)[2], int s) {
        d[0] = d[1] = make_uint4(0, 0, 0, 0);
        if (live && s < stages) d[0] = load_words(in + s * 512), d[1] = load_words(in + s * 512 + 32);
    };
#pragma unroll
    for (int s = 0; s < AHEAD; s++) fetch(b[s], s);
    if constexpr (POSTED) {
        uint4 a[2][TILES];
        auto load = [&](uint4(&v)[TILES], Slot at) {
            c.wait_full(at);
#pragma unroll
            for (int k = 0; k < TILES; k++) v[k] = c.tile<TILES>(at, k);
        };
        load(a[0], c.slot);
#pragma unroll 1
        for (int s0 = 0; s0 < stages; s0 += AHEAD) {
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                if (s0 + j >= stages) break;
                u32 looks = 0, seen = 0;
                Slot ahead = c.slot; /* the last time the same again: a condition costs registers */
                if (s0 + j + 1 < stages) ahead.advance(c.p.ring_stages);
                load(a[(j + 1) & 1], ahead);
#pragma unroll 1
                while (c.lacks(least(least(b[j][0]), least(b[j][1])), looks)) fetch(b[j], s0 + j);
                multiply(c.acc[0], odd, a[j & 1], b[j], 0);
                fetch(b[j], s0 + j + AHEAD);
#pragma unroll
                for (int k = 0; k < TILES; k++) seen |= a[j & 1][k].x;
                c.release(seen);
            }
        }
    }
#pragma unroll 1
    for (int s0 = 0; !POSTED && s0 < stages; s0 += AHEAD) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (s0 + j >= stages) break;
            uint4 a[TILES];
            const u32 seen = c.load_stage(a);
            multiply(c.acc[0], odd, a, b[j], 0);
            fetch(b[j], s0 + j + AHEAD);
            c.release(seen);
        }
    }
}

/* The same for a width that is only a multiple of 16, of which a stage is T tiles a warp.  A unit of stages holds whole
 * granules. */
template <int T> DEVICE void ragged_sum(Consumer &c, const bf16 *in, int from, bool live, int width, float (&odd)[4])
{
    constexpr int UNIT = T == 3 ? 2 : 1, GRANULES = UNIT * T / 2, AHEAD = T == 2 ? 4 : 2;
    const int granules = (width + 255) / 256, units = granules / GRANULES;
    uint4 b[AHEAD][GRANULES];
    in += from;
    auto fetch = [&](uint4(&d)[GRANULES], int u) {
#pragma unroll
        for (int j = 0; j < GRANULES; j++) {
            const int q = u * GRANULES + j;
            const int k = 8 * c.t() + (T == 3 ? (c.warp * granules + q) * 32
                                              : q / (T / 2) * (T * 128) + c.warp * (T * 16) + q % (T / 2) * 32);
            d[j] = make_uint4(0, 0, 0, 0);
            if (live && u < units && k < width) d[j] = load_words(in + k);
        }
    };
#pragma unroll
    for (int u = 0; u < AHEAD; u++) fetch(b[u], u);
#pragma unroll 1
    for (int u0 = 0; u0 < units; u0 += AHEAD) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (u0 + j >= units) break;
            if constexpr (POSTED) {
                u32 looks = 0;
                auto lacks = [&] {
                    u32 word = 0;
#pragma unroll
                    for (int i = 0; i < GRANULES; i++) word = least(word, least(b[j][i]));
                    return c.lacks(word, looks);
                };
#pragma unroll 1
                while (lacks()) fetch(b[j], u0 + j);
            }
#pragma unroll
            for (int s = 0; s < UNIT; s++) {
                uint4 a[T];
                const u32 seen = c.load_stage(a);
                multiply(c.acc[0], odd, a, b[j], s * T);
                c.release(seen);
            }
            fetch(b[j], u0 + j + AHEAD);
        }
    }
}

DEVICE void add_sum(Consumer &c, const float (&odd)[4])
{
#pragma unroll
    for (int k = 0; k < 4; k++) c.acc[0][k] += odd[k];
}

/* acc += row tile times in[column][width]. */
DEVICE void row_tile_compute(Consumer &c, const bf16 *in, int width)
{
    float odd[4] = {0, 0, 0, 0};
    row_tile_sum(c, in, c.g() * width, c.live(c.g()), width, odd);
    add_sum(c, odd);
}

template <int T> DEVICE void row_tile_ragged(Consumer &c, const bf16 *in, int width)
{
    float odd[4] = {0, 0, 0, 0};
    ragged_sum<T>(c, in, c.g() * width, c.live(c.g()), width, odd);
    add_sum(c, odd);
}

/* ---- more columns than an MMA takes ---- */

#ifdef NMK_WIDE
/* acc += row tiles of the ring times activations that this step wrote: `in` + from(n) is the row of the lane's column g
 * of tile n, or with GAPS zeros where from(n) is below 0; tiles: of which n there is anything.  two: the stages of two
 * row tiles take turns, and one read of the activations serves both.  per: tiles of a stage and warp.  The operands of
 * DEPTH granules are loaded ahead of their use; what of a granule is past the width meets weights that are zero. */
template <int R, int N, int DEPTH, bool GAPS = false, class Rows>
DEVICE void multiply_wide(Consumer &c, float (&acc)[R][N][4], const bf16 *in, Rows from, u32 tiles, bool two, int width,
                          int per)
{
    const int granules = (width + 255) / 256, half = per >> 2; /* half: granules of a stage are two */
    uint4 b[DEPTH][N];
    auto place = [&](int q) {
        const int k = per == 3 ? (c.warp * granules + q) * 32
                               : (q >> half) * (per * 128) + c.warp * (per * 16) + (q & half) * 32;
        return min(k + 8 * c.t(), width - 8);
    };
    auto load = [&](uint4 &v, const bf16 *at, int n) {
        if constexpr (!GAPS) v = load_l2(at + from(n));
        else v = from(n) < 0 ? make_uint4(0, 0, 0, 0) : load_l2(at + from(n));
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
        const bf16 *row = in + place(min(d, granules - 1));
#pragma unroll
        for (int n = 0; n < N; n++)
            if (N == 1 || tiles >> n & 1) load(b[d][n], row, n);
    }
    int at = 0;
    u32 seen[R] = {};
#pragma unroll 1
    for (int q0 = 0; q0 < granules; q0 += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (q0 + d >= granules) break;
            uint4 a[R][2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                Slot second = c.slot;
                if (R > 1) second.advance(c.p.ring_stages);
                if (at == 0) {
                    c.wait_full(c.slot);
                    if (R > 1 && two) c.wait_full(second);
                    seen[0] = seen[R - 1] = 0;
                }
                const u32 offset = (c.warp * per + at) * 512 + c.lane * 16;
                a[0][h] = *(const uint4 *)(c.ring + c.slot.index * NMK_STAGE_BYTES + offset);
                seen[0] |= a[0][h].x;
                if (R > 1 && two) {
                    a[R - 1][h] = *(const uint4 *)(c.ring + second.index * NMK_STAGE_BYTES + offset);
                    seen[R - 1] |= a[R - 1][h].x;
                }
                if (++at == per) {
                    at = 0;
                    c.release(seen[0]);
                    if (R > 1 && two) c.release(seen[R - 1]);
                }
            }
            const bf16 *next = in + place(min(q0 + d + DEPTH, granules - 1));
            const bool more = q0 + d + DEPTH < granules;
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (N > 1 && !(tiles >> n & 1)) continue;
                const uint4 v = b[d][n];
                mma(acc[0][n], a[0][0], v.x, v.y);
                if (R > 1 && two) mma(acc[R - 1][n], a[R - 1][0], v.x, v.y);
                mma(acc[0][n], a[0][1], v.z, v.w);
                if (R > 1 && two) mma(acc[R - 1][n], a[R - 1][1], v.z, v.w);
                if (more) load(b[d][n], next, n);
            }
        }
    }
}

/* Granules of all tiles of columns for which there are registers. */
constexpr int WIDE_DEPTH = COLUMN_TILES < 8 ? 8 / COLUMN_TILES : 1, FEW_DEPTH = 8;

DEVICE void row_tile_wide(Consumer &c, const bf16 *in, int width)
{
    const u32 live = c.live_tiles();
    const int all = (width + 255) / 256 * 2, per = all % 4 == 0 ? 4 : all % 3 == 0 ? 3 : 2;
    in += c.g() * width;
    auto from = [&](int n) { return n * TILE_COLUMNS * width; };
    if (live == 1) /* with more loads under way */
        multiply_wide<1, 1, FEW_DEPTH>(c, (float(&)[1][1][4])c.acc, in, from, 1, false, width, per);
    else
        multiply_wide<1, COLUMN_TILES, WIDE_DEPTH>(c, (float(&)[1][COLUMN_TILES][4])c.acc, in, from, live, false, width,
                                                   per);
}

/* Row tiles, two at a time as they come, times the normalised x of all columns. */
DEVICE void gemm_x_pairs(Consumer &c, const bf16 *xn, int tiles, u32 live)
{
    auto from = [](int n) { return n * TILE_COLUMNS * NMK_HIDDEN; };
    xn += c.g() * NMK_HIDDEN;
#pragma unroll 1
    for (int i = 0; i < tiles; i += 2) {
        const bool two = i + 1 < tiles;
        float acc[2][COLUMN_TILES][4] = {};
        multiply_wide<2, COLUMN_TILES, WIDE_DEPTH>(c, acc, xn, from, live, two, NMK_HIDDEN, PackedX::tiles);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (r && !two) break;
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++)
                if (live >> n & 1) c.hand(acc[r][n]);
        }
    }
}

/* Row tiles times the normalised x.  claimed: until the producer's end mark, their number in the stage's tag; `chunks`
 * of them are an expert's, which gathers the columns that chose it.  A job's tag is then the row tile's number, and
 * which of the expert's tiles of columns it is. */
DEVICE void gemm_x_wide(Consumer &c, const bf16 *xn, int tiles, bool claimed, int chunks, int instance)
{
    const Routes &r = c.s.routes[instance & 1];
    const u32 live = c.live_tiles();
    auto tag_job = [&](int tag) {
        if (claimed && c.warp == 0 && c.lane == 0) c.s.job_tag[c.job % TAGS] = tag;
    };
    if (!claimed && (!FEW || live > 1)) return gemm_x_pairs(c, xn, tiles, live);
    asm volatile("" : "+r"(c.lane)); /* what either way computes from it is not worth a register in the other */
#pragma unroll 1
    for (int i = 0; claimed ? !c.gone() : i < tiles; i++) {
        int tag = 0, first = 0, count = TILE_COLUMNS;
        if (claimed) {
            c.wait_full(c.slot);
            tag = c.s.stage_tag[c.slot.index];
            if (tag < 0) { /* as one mark for each storer */
                const float none[4] = {0, 0, 0, 0};
                c.release(tag);
#pragma unroll 1
                for (int mark = 1; mark <= WARPS_STORE; mark++) tag_job(-mark), c.hand(none);
                break;
            }
            first = r.first[tag / chunks], count = r.first[tag / chunks + 1] - first;
        }
        auto row = [&](int i) { return (claimed ? r.column[first + min(i, count - 1)] : i) * NMK_HIDDEN; };
        if (count <= TILE_COLUMNS) {
            const int only = row(c.g());
            auto from = [&](int) { return only; };
            float acc[1][1][4] = {};
            multiply_wide<1, 1, FEW_DEPTH>(c, acc, xn, from, 1, false, NMK_HIDDEN, PackedX::tiles);
            tag_job(tag * COLUMN_TILES), c.hand(acc[0][0]);
        } else {
            const int tiles_of = (count + TILE_COLUMNS - 1) / TILE_COLUMNS;
            int rows[COLUMN_TILES];
            float acc[1][COLUMN_TILES][4] = {};
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) rows[n] = row(n * TILE_COLUMNS + c.g());
            auto from = [&](int n) { return rows[n]; };
            multiply_wide<1, COLUMN_TILES, WIDE_DEPTH>(c, acc, xn, from, (1u << tiles_of) - 1, false, NMK_HIDDEN,
                                                       PackedX::tiles);
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++)
                if (n < tiles_of) tag_job(tag * COLUMN_TILES + n), c.hand(acc[0][n]);
        }
    }
}
#endif

/* A width that row_tile_compute does not take, as the bit of its tiles a stage. */
template <int K> constexpr u32 RAGGED_BIT = K % 512 == 0 ? 0 : 1u << Packed<K>::tiles;

/* RAGGED: the bits of all widths that there are. */
template <u32 RAGGED> DEVICE void row_tile_any(Consumer &c, const bf16 *in, int width)
{
    if (RAGGED == 0 || width % 512 == 0) {
        row_tile_compute(c, in, width);
        return;
    }
    const int tiles = (width + 255) / 256 * 2;
    if (RAGGED >> 4 & 1 && tiles % 4 == 0) row_tile_ragged<4>(c, in, width);
    else if (RAGGED >> 3 & 1 && tiles % 3 == 0) row_tile_ragged<3>(c, in, width);
    else if (RAGGED >> 2 & 1) row_tile_ragged<2>(c, in, width);
}

/* ------------------------------------------------------------------------------------------------ store */

/* A job of a row tile: one of its tiles of columns. */
struct Tile {
    int row, column; /* numbers of tiles */
};

struct Storer : Context {
    u32 index, job; /* index: 0 or 1; the storers take jobs in turn */

    /* The job after this one, for whoever walks the row tiles that the consumers hand on. */
    __device__ __forceinline__ void next_job(Tile &at)
    {
        job++;
        if (WIDE) {
            while (++at.column < COLUMN_TILES)
                if (live_tile(at.column)) return;
            at.column = 0;
        }
        at.row++;
    }
    /* The first of a lane's two columns. */
    __device__ __forceinline__ int column(const Tile &at) const { return at.column * TILE_COLUMNS + 2 * t(); }

    __device__ __forceinline__ int g() const { return lane >> 2; }
    __device__ __forceinline__ int t() const { return lane & 3; }
    __device__ __forceinline__ bool mine() const { return job % WARPS_STORE == index; }
    __device__ __forceinline__ void wait_job() { wait(&s.job_full[job % JOBS], job / JOBS & 1); }
    __device__ __forceinline__ const float4 *job_data() const
    {
        return (const float4 *)(ring + SHARED_JOBS + job % JOBS * JOB_BYTES) + lane;
    }
    __device__ __forceinline__ void free_job(u32 seen) { arrive(&s.job_empty[job % JOBS], seen); }

    /* The job's tile, summed over the consumer warps in order: rows g, g (columns 2t, 2t+1), g+8, g+8. */
    __device__ __forceinline__ void take(float (&v)[4])
    {
        u32 seen;
        const float4 sum = sum_warps(job_data(), seen);
        v[0] = sum.x, v[1] = sum.y, v[2] = sum.z, v[3] = sum.w;
        free_job(seen);
    }
};

/* Where a job's two rows of a lane go in f32: to[0] and to[8] of the lane's two columns. */
template <int WIDTH> DEVICE void clear_rows(const Storer &c, const Tile &at, float *to)
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float *row = to + (c.column(at) + j) * WIDTH;
        if (POSTED && c.stored(c.column(at) + j)) c.clear(row), c.clear(row + 8);
    }
}

template <int WIDTH> DEVICE void post_rows(const Storer &c, const Tile &at, float *to, const float (&v)[4])
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float *row = to + (c.column(at) + j) * WIDTH;
        if (c.live(c.column(at) + j)) c.post(row, v[j]), c.post(row + 8, v[2 + j]);
    }
}

template <int WIDTH> DEVICE void load_rows(const Storer &c, const Tile &at, const float *from, float (&v)[4])
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const float *row = from + (c.column(at) + j) * WIDTH;
        if (c.live(c.column(at) + j)) v[j] = load_float(row), v[2 + j] = load_float(row + 8);
    }
}

/* Where a job of 16 rows goes in bf16, to rows of WIDTH for each column: as words of two rows, a lane's and the next
 * row's lane's.  One of the two has them of column 2t, the other of 2t + 1. */
template <int WIDTH> struct PairedRows {
    u32 *to;
    int column;
    bool odd;
    __device__ __forceinline__ PairedRows(const Storer &c, const Tile &at, bf16 *rows)
        : column(c.column(at) + (c.g() & 1)), odd(c.g() & 1)
    {
        to = (u32 *)(rows + column * WIDTH + c.g() - odd);
    }
    __device__ __forceinline__ void clear(const Storer &c) const
    {
        if (POSTED && c.stored(column)) c.clear(to), c.clear(to + 4);
    }
    __device__ __forceinline__ void post(const Storer &c, const float (&v)[4]) const
    {
        const float low = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 4), high = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 4);
        if (!c.live(column)) return;
        c.post(to, odd ? bf16_pair(low, v[1]) : bf16_pair(v[0], low));
        c.post(to + 4, odd ? bf16_pair(high, v[3]) : bf16_pair(v[2], high));
    }
};

/* ------------------------------------------------------------------------------------------------ help */

/* A candidate is better with a larger value; ties go to the lower id. */
DEVICE bool beats(float v, int i, float value, int id) { return v > value || (v == value && i < id); }
DEVICE void keep_better(float &value, int &id, float v, int i)
{
    if (beats(v, i, value, id)) value = v, id = i;
}

/* The best that any lane of a warp has; all lanes get it.  step: 1, or 4 for the lanes of one MMA column. */
DEVICE void warp_best(float &value, int &id, int step)
{
#pragma unroll 1
    for (int s = step; s <= 16; s <<= 1)
        keep_better(value, id, __shfl_xor_sync(~0u, value, s), __shfl_xor_sync(~0u, id, s));
}

DEVICE float warp_sum(float v)
{
#pragma unroll 1
    for (int s = 1; s <= 16; s <<= 1) v += __shfl_xor_sync(~0u, v, s);
    return v;
}

/* The best NMK_TOPS of what a warp was offered, one a lane, best first. */
struct Tops {
    float value;
    int id;

    __device__ __forceinline__ void offer(float v, int i)
    {
        u32 left = __ballot_sync(~0u, beats(v, i, __shfl_sync(~0u, value, NMK_TOPS - 1),
                                            __shfl_sync(~0u, id, NMK_TOPS - 1)));
#pragma unroll 1
        for (const u32 lane = threadIdx.x % 32; left; left &= left - 1) {
            const int from = __ffs(left) - 1, i0 = __shfl_sync(~0u, i, from);
            const float v0 = __shfl_sync(~0u, v, from), before = __shfl_up_sync(~0u, value, 1);
            const int id_before = __shfl_up_sync(~0u, id, 1);
            const u32 at = __popc(__ballot_sync(~0u, beats(value, id, v0, i0)));
            if (lane == at) value = v0, id = i0;
            else if (lane > at) value = before, id = id_before;
        }
    }
};

/* What an SM does of the cutting: tokens first .. first + count of a column. */
struct Share {
    int column, first, count;
};

struct Helper : Context {
    Mask filters; /* columns that are cut */
    u32 wanted;   /* not 0: optional tasks run in this launch.  All SMs see the same */

    __device__ __forceinline__ bool awake() const { return wanted; }

    /* Columns that are cut share the SMs, one to each SM, and the SMs of a column share the vocabulary: so what has to
     * be done once by each SM of a column is done by few.  All is sums of integers and maxima: who does what changes no
     * bit.  False: none is cut. */
    __device__ __forceinline__ bool share(int vocab, Share &mine) const
    {
        const int columns = count_bits(filters);
        if (columns == 0) return false;
        const int turn = blockIdx.x % columns, part = blockIdx.x / columns;
        const int parts = (NMK_SMS - turn + columns - 1) / columns, tiles = vocab / 16;
        Mask left = filters;
#pragma unroll 1
        for (int i = 0; i < turn; i++) left &= left - 1;
        mine.column = first_bit(left), mine.first = tiles * part / parts * 16;
        mine.count = tiles * (part + 1) / parts * 16 - mine.first;
        return true;
    }

    /* f(inside, index, value) for an array in global memory, lane by lane; all lanes together, those past the end with
     * inside = false.  Through shared memory: the loads are wide and in flight ahead of their use, and the code of f is
     * there no more often than WIDE times, the elements that a lane has in hand at once.  count: 16, 32, ... */
    template <int WIDE, class F> __device__ __forceinline__ void scan(const float *from, int count, F f)
    {
        if (NMK_VOCAB_ROWS / 16 < NMK_SMS && count == 0) return; /* an SM without a tile */
        float4 ahead[4];
        auto fetch = [&](int base) {
#pragma unroll
            for (int i = 0; i < 4; i++) /* no branches, which cost registers */
                ahead[i] = __ldcg((const float4 *)(from + min(base + i * 128 + lane * 4, count - 4)));
        };
        fetch(0);
#pragma unroll 1
        for (int base = 0; base < count; base += 512) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; i++) *(float4 *)(s.scan + i * 128 + lane * 4) = ahead[i];
            __syncwarp();
            fetch(base + 512);
#pragma unroll 1
            for (int i = lane; base + i - lane < count && i < 512; i += 32 * WIDE) {
                float v[WIDE];
#pragma unroll
                for (int k = 0; k < WIDE; k++) v[k] = s.scan[i + 32 * k];
#pragma unroll
                for (int k = 0; k < WIDE; k++) f(base + i + 32 * k < count, base + i + 32 * k, v[k]);
            }
        }
    }

    /* ---- where a distribution is cut; see Cut ---- */

    __device__ __forceinline__ const nmk_column *column(int n) const
    {
        return (const nmk_column *)((const nmk_control *)p.control)->column + n;
    }
    __device__ __forceinline__ bool wants(int n, int flag) const { return live(n) && (s.flags[n] & flag); }

    /* By the first task of a column: nothing is known but min_p.  cand: the lm_head's best score of each store warp. */
    __device__ __forceinline__ void begin_cut(int n, const float *cand)
    {
        float best = -INFINITY;
        constexpr int rows = NMK_SMS * WARPS_STORE;
#pragma unroll
        for (int r = 0; r < rows; r += 32)
            best = fmaxf(best, __ldcg(cand + min(r + lane, rows - 1) * NMK_COLUMNS + n));
#pragma unroll 1
        for (int i = 1; i <= 16; i <<= 1) best = fmaxf(best, __shfl_xor_sync(~0u, best, i));
        const float min_p = __ldcg(&column(n)->min_p);
        Cut &cut = s.cut;
        if (lane == 0) {
            cut.best = best, cut.prefix = 0, cut.target = __ldcg(&column(n)->top_k);
            cut.limit = min_p > 0 ? nmk_score_key(0, __logf(min_p)) : NMK_KEY_MOST;
        }
        __syncwarp();
    }

    /* One digit more: the bin at which the target is reached.  part: of the mass, which the first digit's bins add up
     * to; 0: the target is known. */
    __device__ __forceinline__ void narrow(const u64 *bins, float part)
    {
        u64 mine[8], sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const ulonglong2 two = __ldcg((const ulonglong2 *)(bins + lane * 8 + i));
            mine[i] = two.x, mine[i + 1] = two.y, sum += two.x + two.y;
        }
        u64 upto = sum; /* this lane's bins and all before */
#pragma unroll 1
        for (int i = 1; i <= 16; i <<= 1) {
            const u64 v = __shfl_up_sync(~0u, upto, i);
            if (lane >= i) upto += v;
        }
        Cut &cut = s.cut;
        const u64 total = __shfl_sync(~0u, upto, 31);
        u64 target = part > 0 ? (u64)((double)part * (double)total) : cut.target;
        target = max(1ull, min(target, total));
        __syncwarp();
        u64 before = upto - sum;
        if (before < target && target <= upto) {
            int bin = lane * 8;
#pragma unroll
            for (int i = 0; i < 7; i++)
                if (before + mine[i] < target && bin == lane * 8 + i) before += mine[i], bin++;
            cut.prefix = cut.prefix << 8 | bin, cut.target = target - before;
        }
        __syncwarp();
    }

    /* All digits are known: what is beyond them goes. */
    __device__ __forceinline__ void end_cut()
    {
        Cut &cut = s.cut;
        if (lane == 0) cut.limit = min(cut.limit, cut.prefix), cut.prefix = 0;
        __syncwarp();
    }
};

/* ------------------------------------------------------------------------------------------------ dealing */

/* Chunks of one (column, kv head), from the column's own visible pages alone: who else is in the batch must not move a
 * chunk's borders, or a row's bits would depend on it.  The last one also has this step's own tokens, which come from
 * L2 when all else is there: they count as NMK_OWN_PAGES, so that nobody waits for it. */
DEVICE int chunk_count(int pages)
{
    const int all = pages + NMK_OWN_PAGES;
    const int a = min((all + NMK_PAGES_PER_CHUNK - 1) / NMK_PAGES_PER_CHUNK, NMK_CHUNKS_MIN);
    return min(max(a, all / NMK_PAGES_PER_LONG_CHUNK), NMK_CHUNKS_MAX);
}

/* Page of the visible ones at which chunk k begins: the one before it ends there. */
DEVICE int chunk_page(int pages, int chunks, int k)
{
    if constexpr (NMK_OWN_PAGES == 0) return pages * k / chunks;
    return min((pages + NMK_OWN_PAGES) * k / chunks, pages);
}

/* Chunk j of a kind, as chunks are numbered: column by column, in it kv head by kv head. */
DEVICE Segment segment_of(const Shared &s, int kind, int j)
{
    int n = 0;
#pragma unroll 1
    while (j >= s.chunk0[kind][n + 1]) n++;
    const int chunks = s.chunks[kind][n], pages = s.pages[kind][n], c = j - s.chunk0[kind][n];
    const int head = c / chunks, k = c % chunks, from = chunk_page(pages, chunks, k);
    Segment seg;
    seg.column = n, seg.kv_head = head, seg.page = s.first_page[kind][n] + from;
    seg.pages = chunk_page(pages, chunks, k + 1) - from;
    seg.slot = j, seg.last = k + 1 == chunks, seg.pad0 = seg.pad1 = 0;
    return seg;
}

/* Where chunks are claimed the producer leaves what a chunk is beside its first stage. */
DEVICE Segment &claimed_segment(Shared &s, int stage) { return s.segment[stage & 1][stage >> 1]; }
