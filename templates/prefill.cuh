/* What the roles of a prefill launch have in common, and its products: packed weights times the rows of many tokens.
 *
 * Eight warps compute, two warpgroups; the other four all load.  A unit of a product is 128 rows of weights (a slab, 16
 * to a warp) times up to 256 tokens (a tile, in blocks of 64), by wgmma: weights go from the ring to registers as they
 * lie, which is what its A operand takes; tokens stay in shared memory, in core matrices of 8 tokens x 8 k.  A stage of
 * the ring is 64 k of both; of a tile of one block 128 k: it is for weights that all wait then.  A token's sum goes
 * over k in the order of memory whatever the tile, so its bits depend neither on the tile nor on its neighbours.
 *
 * Always: what this launch wrote is read after an acquire of the task's counters; by bulk copies only behind a proxy
 * fence too.  Every unit is found by arithmetic, the same in all warps: nothing is handed out. */

constexpr int SLAB_TILES = WARPS_COMPUTE, BLOCK_TOKENS = 64, TILE_BLOCKS = 4, TILE_TOKENS = TILE_BLOCKS * BLOCK_TOKENS;
constexpr int LOADERS = WARPS_ALL - WARPS_COMPUTE; /* each brings two row tiles and one block of tokens */
static_assert(LOADERS == TILE_BLOCKS && 2 * LOADERS == SLAB_TILES, "who brings what");
constexpr int STAGE_K = 64, STAGE_ROW_TILE = 16 * STAGE_K * 2, STAGE_WEIGHTS = SLAB_TILES * STAGE_ROW_TILE;
constexpr int STAGE_BLOCK = BLOCK_TOKENS * STAGE_K * 2, STAGE_TOTAL = STAGE_WEIGHTS + TILE_BLOCKS * STAGE_BLOCK;
constexpr int STAGES = 4;
constexpr int CHUNK_STAGING = STAGES * STAGE_TOTAL, STAGING_BYTES = WARPS_COMPUTE * 2048;
static_assert(CHUNK_STAGING + STAGING_BYTES <= SHARED_REST, "the ring and what is staged for global memory");

/* A unit: blocks .. of the rows that an operand has, a slab of the weights (those of an expert).
 * Without blocks: the task has no more. */
struct Unit {
    int slab, block, blocks, expert;
};

/* What becomes of sums, and where: h, an operand of so many columns, or rows of bf16; nowhere: the op stores its sums
 * itself. */
struct Output {
    u8 *to;
    int width;
    bool gated;
    const u16 *bias; /* of rows; null: none */
};

/* Where a warp is in the ring, how many units and tasks it has begun, and a consumer's task: registers are for sums. */
struct Progress {
    int index;
    u32 phase, units, marks;
    int steps;
    Output output;
};

/* A stage of the ring: full with a lane's arrival from every loader, and the bytes announced. */
struct Chunked {
    u64 full[STAGES], empty[STAGES];
    u64 begun, done;        /* marks: of a task by loaders to compute, and back */
    /* units by turns: which one it is, and what its op's loader knows of its tokens */
    alignas(16) Unit unit[2];
    int2 about[2][TILE_TOKENS];
    int tiles[2][128 + 4];  /* experts' tiles before this one; of two tasks by turns */
    int first[2][128 + 4];
    Attention attention;
    Progress progress[WARPS_ALL];
    int tokens; /* of the chunk */
};
/* Of Shared only steps need what stands between the tables of columns and the tags: there it is. */
static_assert(sizeof(Chunked) <= sizeof(Shared::weight) + sizeof(Shared::prob) + 2 * sizeof(Shared::bin_low),
              "no room");
DEVICE Chunked &chunked(Shared &s) { return *(Chunked *)&s.segment; }

/* ------------------------------------------------------------------------------------------------ async proxy */

/* Between what threads wrote to shared memory and what wgmma or a bulk copy reads of it. */
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
/* The same of global memory. */
DEVICE void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/* Announces bytes to a barrier without arriving. */
DEVICE void mbarrier_announce(u32 bar, u32 bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

DEVICE void barrier_loaders() { asm volatile("bar.sync 6, 128;" ::: "memory"); }
DEVICE void barrier_warpgroup(int warpgroup)
{
    if (warpgroup) asm volatile("bar.sync 5, 128;" ::: "memory");
    else asm volatile("bar.sync 4, 128;" ::: "memory");
}

/* The same where nothing is looked at before a later wait. */
template <int MOST> DEVICE void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(MOST) : "memory");
}

/* ------------------------------------------------------------------------------------------------ units */

/* What an op multiplies.  weights: row_tiles of them, or of each expert; from: the operand, in blocks.  first: of
 * experts, where each one's rows of the operand begin. */
struct Product {
    const u8 *weights, *from;
    int steps, row_tiles, experts;
    const int *first;
};

DEVICE constexpr int stages_of(int k) { return (k + 255) / 256 * 256 / STAGE_K; }

/* Blocks in a tile: what is best for the SM that has most to do.  A narrow tile reads its weights more often; two
 * blocks cost what three do. */
DEVICE int tile_blocks(int blocks, int slabs)
{
    int best = TILE_BLOCKS, least = 1 << 30;
#pragma unroll 1
    for (int w = TILE_BLOCKS; w > 0; w--) {
        const int rounds = ((blocks + w - 1) / w * slabs + NMK_SMS - 1) / NMK_SMS;
        const int cost = rounds * (3 * (w == 2 ? 3 : w) + 5);
        if (cost < least) best = w, least = cost;
    }
    return best;
}

/* This SM's units: slabs of one tile after the other, so that neighbours share its tokens, and all of them the weights.
 * Experts' tiles one expert after the other, by the tables of Chunked. */
struct Units {
    const Chunked &k;
    int turn, at, slabs, expert, experts, blocks, tiles;

    __device__ __forceinline__ Units(const Chunked &chunk, int turn_, const Product &p)
        : k(chunk), turn(turn_), at(blockIdx.x), slabs((p.row_tiles + SLAB_TILES - 1) / SLAB_TILES), expert(0),
          experts(p.experts)
    {
        blocks = (k.tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
        const int wide = tile_blocks(blocks, slabs);
        tiles = (blocks + wide - 1) / wide;
    }
    __device__ __forceinline__ bool next(Unit &u)
    {
        int tile = at / slabs, start = 0;
        u.slab = at - tile * slabs;
        if (experts) {
            const int *before = k.tiles[turn] + expert; /* tiles before an expert's */
            while (expert < experts && tile >= before[1]) expert++, before++;
            if (expert == experts) return false;
            start = k.first[turn][expert], blocks = k.first[turn][expert + 1] - start;
            tile -= before[0], tiles = before[1] - before[0];
        }
        if (tile >= tiles) return false;
        /* even tiles: a rest of one block beside full ones leaves SMs with less to do than others */
        const int from = blocks * tile / tiles;
        u.expert = expert, u.block = start + from, u.blocks = blocks * (tile + 1) / tiles - from;
        at += NMK_SMS;
        return true;
    }
};

/* ------------------------------------------------------------------------------------------------ load */

/* Global to shared memory, completes on bar, behind a proxy fence if this launch wrote it. */
DEVICE void bulk_copy(u32 dst, const void *src, u32 bytes, u32 bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}

struct ChunkLoader : Loader {
    Chunked &k;
    int index; /* of the loaders */

    __device__ __forceinline__ Progress &progress() const { return k.progress[WARPS_COMPUTE + index]; }

    __device__ __forceinline__ bool next()
    {
        const bool on = Context::next();
        if (task & (DESC_BLOCK - 1)) return true;
        if (index == 0 && lane == 0) fetch(task / DESC_BLOCK + 2);
        u32 any;
        asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 6, 128, p;\n"
                     "selp.u32 %0, 1, 0, q;\n}"
                     : "=r"(any)
                     : "r"((u32)!on)
                     : "memory");
        return !any;
    }

    /* Waits for what the task waits for, and lets compute begin.  first: of experts, see Product; the tables of this
     * turn follow from it.  False: the step is lost.
     *
     * Compute has then ended the task before: what is said of a unit is kept for one further unit, and of a task's
     * units each fills all stages of the ring, so that the next but one cannot be begun while it is in use; but the
     * mark at a task's end is a single stage. */
    __device__ __forceinline__ bool begin(const int *first = nullptr, int experts = 0)
    {
        const u32 marks = progress().marks, turn = marks & 1;
        if (index == 0) {
            wait_task(desc());
            wait(&k.done, marks - 1 & 1);
            if (experts) tabulate(turn, first, experts);
        }
        barrier_loaders();
        fence_async_global();
        arrive(&k.begun);
        if (lane == 0) progress().marks = marks + 1;
        __syncwarp();
        return !gone();
    }

    /* By which turn's tables the task of the last begin() goes. */
    __device__ __forceinline__ int turn() const { return progress().marks - 1 & 1; }

    /* Until compute has used up all of the ring, which then is anybody's. */
    __device__ __forceinline__ void drain()
    {
        Slot next = {progress().index, progress().phase};
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) wait(&k.empty[next.index], next.phase), next.advance(STAGES);
    }

    __device__ __forceinline__ void tabulate(int turn, const int *from, int experts)
    {
        constexpr int EACH = 4;
        int sum = 0, tiles[EACH], start = __ldcg(from + min(lane * EACH, experts));
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int e = lane * EACH + i, end = __ldcg(from + min(e + 1, experts));
            k.first[turn][e] = start / BLOCK_TOKENS, tiles[i] = sum;
            sum += ((end - start) / BLOCK_TOKENS + TILE_BLOCKS - 1) / TILE_BLOCKS, start = end;
        }
        int upto = sum;
#pragma unroll
        for (int i = 1; i <= 16; i <<= 1) {
            const int v = __shfl_up_sync(~0u, upto, i);
            if (lane >= i) upto += v;
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) k.tiles[turn][lane * EACH + i] = upto - sum + tiles[i];
        if (lane == 31) k.tiles[turn][128] = upto, k.first[turn][128] = start / BLOCK_TOKENS;
        __syncwarp();
    }
};

/* The stages of all units.  about(n): what compute will want to know of the operand's n-th row. */
template <class A> DEVICE void load_product(ChunkLoader &c, const Product &p, A about)
{
    const u32 ring = shared_address(c.ring);
    const u32 tile_bytes = p.steps * STAGE_ROW_TILE;
    Units units(c.k, c.turn(), p);
    Slot at = {c.progress().index, c.progress().phase};
    u32 done = c.progress().units;
    Unit u;
#pragma unroll 1
    while (units.next(u) && !c.gone()) {
        asm volatile("" : "+r"(c.lane)); /* else addresses are held over all units */
        const bool mine = c.index < u.blocks;
        const int tile = u.slab * SLAB_TILES + 2 * c.index, n = (u.block + c.index) * BLOCK_TOKENS + c.lane;
        const u8 *w = p.weights + ((u64)u.expert * p.row_tiles + min(tile, p.row_tiles - 1)) * tile_bytes;
        const int deep = u.blocks == 1 ? 2 : 1, piece = deep * STAGE_ROW_TILE;
        const u32 second = tile + 1 < p.row_tiles ? tile_bytes : 0; /* row tile, from the first */
        const u8 *b = p.from + (u64)(u.block + c.index) * p.steps * STAGE_BLOCK;
        c.wait(&c.k.empty[at.index], at.phase); /* compute is in the unit before this one: see begin() */
        {
            int2 known[2] = {make_int2(0, 0), make_int2(0, 0)};
            if (mine) known[0] = about(n), known[1] = about(n + 32);
            int2 *to = c.k.about[done & 1] + c.index * BLOCK_TOKENS + c.lane;
            to[0] = known[0], to[32] = known[1];
            if (c.index == 0 && c.lane == 0) c.k.unit[done & 1] = u;
        }
#pragma unroll 1
        for (int i = 0; i < p.steps; i += deep) {
            const u32 bar = shared_address(&c.k.full[at.index]), slot = ring + at.index * STAGE_TOTAL;
            const u32 block = slot + deep * STAGE_WEIGHTS + c.index * STAGE_BLOCK;
            c.wait(&c.k.empty[at.index], at.phase);
            if (c.lane == 0) {
                const u32 to = slot + c.index * 2 * piece;
                mbarrier_announce(bar, 2 * piece + (mine ? deep * STAGE_BLOCK : 0));
                bulk_copy(to, w, piece, bar);
                bulk_copy(to + piece, w + second, piece, bar);
                if (mine) bulk_copy(block, b, deep * STAGE_BLOCK, bar);
            }
            mbarrier_arrive(bar);
            w += piece, b += deep * STAGE_BLOCK;
            at.advance(STAGES);
        }
        done++;
    }
    c.wait(&c.k.empty[at.index], at.phase);
    if (c.index == 0 && c.lane == 0) c.k.unit[done & 1].blocks = 0;
    mbarrier_arrive(shared_address(&c.k.full[at.index]));
    at.advance(STAGES);
    if (c.lane == 0) {
        Progress &p = c.progress();
        p.index = at.index, p.phase = at.phase, p.units = done + 1;
    }
    __syncwarp();
}

/* ------------------------------------------------------------------------------------------------ compute */

struct ChunkConsumer : Consumer {
    Chunked &k;

    __device__ __forceinline__ Progress &progress() const { return k.progress[warp]; }

    /* Until the loaders have begun the task: what it waited for is there.  False: the step is lost. */
    __device__ __forceinline__ bool begin()
    {
        const u32 marks = progress().marks;
        wait(&k.begun, marks & 1);
        if (warp == 0) stamp(1);
        return !any_warp(gone());
    }
    __device__ __forceinline__ void end()
    {
        const u32 marks = progress().marks;
        arrive(&k.done);
        if (lane == 0) progress().marks = marks + 1;
        __syncwarp();
    }
    /* Whether any warp that this one meets in a task's units has seen that the step is lost. */
    __device__ __forceinline__ bool lost() const
    {
        if (NMK_QK_NORM) return any_warp(gone());
        u32 any;
        asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\n"
                     "selp.u32 %0, 1, 0, q;\n}"
                     : "=r"(any)
                     : "r"((u32)gone()), "r"(4 + (warp >> 2))
                     : "memory");
        return any;
    }
    __device__ __forceinline__ u8 *staging() const { return ring + CHUNK_STAGING; }
};

/* What the loaders left of a unit's tokens, from one of them on.  Addresses of shared memory here have 32 bits. */
struct About {
    u32 address;
    __device__ __forceinline__ int2 operator[](int n) const
    {
        int2 v;
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address + n * 8) : "memory");
        return v;
    }
};

DEVICE uint4 load_shared(u32 from)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

/* Four 8 x 8 matrices of 16-bit numbers, as an MMA leaves them, to shared memory the other way around: a row there is a
 * column here.  to: where row lane % 8 of matrix lane / 8 goes. */
DEVICE void store_turned(u32 to, u32 a, u32 b, u32 c, u32 d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

/* One unit's products: this warp's 16 rows times N tokens, DEEP * 64 k a stage.  Two steps of 16 k are under way while
 * the weights of the next two are loaded. */
template <int N, int DEEP> DEVICE void multiply(ChunkConsumer &c, Slot &at, float (&d)[128], int steps)
{
    uint4 a[2][2];
    const u32 ring = shared_address(c.ring), mine = c.warp * (DEEP * STAGE_ROW_TILE) + c.lane * 16;
    float(&sums)[N / 2] = *(float(*)[N / 2])d;
    auto half = [&](uint4(&a)[2], u32 slot, int first, int i) {
#pragma unroll
        for (int j = 0; j < 2; j++) a[j] = load_shared(slot + mine + (first + j) * 512);
        /* the next 8 k, the next 8 tokens */
        const u64 b = wgmma_operand(slot + DEEP * STAGE_WEIGHTS + first / 4 * STAGE_BLOCK, 128, 1024);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 2; j++) wgmma(sums, a[j], wgmma_ahead(b, (first % 4 + j) * 256), i + first + j);
        wgmma_commit();
        wgmma_wait<1>();
    };
    static_assert((STAGES & STAGES - 1) == 0, "the stage before one");
#pragma unroll 1
    for (int i = 0; i < steps; i += DEEP) {
        const u32 slot = ring + at.index * STAGE_TOTAL;
        c.wait(&c.k.full[at.index], at.phase);
        half(a[0], slot, 0, i);
        if (i > 0) c.arrive(&c.k.empty[at.index - 1 & STAGES - 1]);
        half(a[1], slot, 2, i);
        if constexpr (DEEP == 2) half(a[0], slot, 4, i), half(a[1], slot, 6, i);
        at.advance(STAGES);
    }
    wgmma_wait<0>();
    c.arrive(&c.k.empty[at.index - 1 & STAGES - 1]);
}

/* h = silu(gate) * up * weight(token) as an operand: rows g and g + 8 are gate and up of one column.  The four warps of
 * a warpgroup have 32 columns, and with them whole lines of core matrices. */
DEVICE void store_gated(ChunkConsumer &c, const float (&d)[128], const Unit &u, const Output &h, About about)
{
    const int padded = nmk_packed_cols(h.width), warpgroup = c.warp >> 2, q = c.g() >> 1, odd = c.g() & 1;
    const int inside = (u.slab * SLAB_TILES + c.warp) * 8 < h.width ? ~0 : 0;
    const u32 stage = shared_address(c.staging()) + warpgroup * (STAGING_BYTES / 2);
    /* out of the staging a lane takes 8 places of row lane % 8 */
    const int piece = c.lane >> 3, row = c.lane & 7, column = (u.slab * 2 + warpgroup) * 32;
    const int place = nmk_packed_at(padded, column + (piece >> 1) * 4 + (piece & 1) * 2);
    u8 *to = h.to + ((u64)u.block * (padded / 64) + place / 64) * STAGE_BLOCK + place % 64 / 8 * 128 + row * 16;
    /* words are turned: else pieces share banks */
    const u32 mine = q * 128 + (2 * c.t() + odd) * 16 + ((c.warp + q) & 3) * 4;
#pragma unroll
    for (int b = 0; b < TILE_BLOCKS; b++) {
        if (b >= u.blocks) break;
        const u32 buffer = stage + (b & 1) * (STAGING_BYTES / 4);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int i = b * 32 + j * 4;
            const int n = b * BLOCK_TOKENS + 8 * j + 2 * c.t();
            const float by0 = __int_as_float(about[n].x & inside), by1 = __int_as_float(about[n + 1].x & inside);
            const float h0 = __fdividef(d[i], 1.f + __expf(-d[i])) * d[i + 2] * by0;
            const float h1 = __fdividef(d[i + 1], 1.f + __expf(-d[i + 1])) * d[i + 3] * by1;
            const float other = __shfl_xor_sync(~0u, odd ? h0 : h1, 4);
            const u32 pair = odd ? bf16_pair(other, h1) : bf16_pair(h0, other);
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(buffer + j * 512 + mine), "r"(pair) : "memory");
        }
        barrier_warpgroup(warpgroup);
        if (column < padded) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int j = (c.warp & 3) + 4 * i;
                uint4 v = load_shared(buffer + j * 512 + piece * 128 + row * 16);
                if (piece & 1) v = make_uint4(v.y, v.z, v.w, v.x);
                if (piece & 2) v = make_uint4(v.z, v.w, v.x, v.y);
                *(uint4 *)(to + (u64)b * (padded / 64) * STAGE_BLOCK + j * 1024) = v;
            }
        }
    }
}

/* Sums as rows of bf16; about: each token's row, -1: none.  32 tokens at a time go through the staging, by turns in its
 * halves, so that whole lines are stored: a warpgroup has 64 columns of a row. */
DEVICE void store_rows(ChunkConsumer &c, const float (&d)[128], const Unit &u, const Output &rows, About about)
{
    constexpr int TOKENS = 32;
    const int warpgroup = c.warp >> 2, column = (u.slab * 2 + warpgroup) * 64, thread = (c.warp & 3) * 32 + c.lane;
    const u32 stage = shared_address(c.staging()) + warpgroup * (STAGING_BYTES / 2);
    /* a token's eight pieces of 16 bytes are turned against those of the next: else they share banks */
    auto place = [&](int token, int piece) { return stage + token * 128 + ((piece ^ token) & 7) * 16; };
    const u32 to = place((c.lane >> 4) * 8 + (c.lane & 7), (c.warp & 3) * 2 + (c.lane >> 3 & 1));
    const int piece = thread & 7, token = thread >> 3; /* that it takes out of the staging; and the 16th behind */
    const u32 from = place(token, piece);
    float low = 0, high = 0;
    if (NMK_O_BIAS && rows.bias && column + (c.warp & 3) * 16 < rows.width) {
        const u16 *bias = rows.bias + column + (c.warp & 3) * 16 + c.g();
        low = bf16_low(__ldg(bias)), high = bf16_low(__ldg(bias + 8));
    }
    u8 *out = rows.to + (column + piece * 8) * 2;
    const bool inside = column + piece * 8 < rows.width;
#pragma unroll
    for (int b = 0; b < TILE_TOKENS / TOKENS; b++) {
        if (b * TOKENS >= u.blocks * BLOCK_TOKENS) break;
        const u32 buffer = (b & 1) * (TOKENS * 128);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = b * 16 + j * 8 + i * 2;
                const float more = i & 1 ? high : low;
                w[i] = NMK_O_BIAS ? bf16_pair(d[at] + more, d[at + 1] + more) : bf16_pair(d[at], d[at + 1]);
            }
            store_turned(to + buffer + j * (16 * 128), w[0], w[1], w[2], w[3]);
        }
        barrier_warpgroup(warpgroup);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = about[b * TOKENS + i * 16 + token].x;
            const uint4 v = load_shared(from + buffer + i * (16 * 128));
            if (row >= 0 && inside) *(uint4 *)(out + (u64)row * (rows.width * 2)) = v;
        }
    }
}

/* Part of a warp's sums, of 32 tokens: v[4 * j ..] are tokens n + 8 * j + 2t and the next, of row g, then of row g + 8
 * of the warp's row tile; n counts from the unit's first one. */
constexpr int PART_TOKENS = 32, PART = PART_TOKENS / 2;
typedef float Part[PART];

DEVICE void take_part(Part &v, const float (&d)[128], int n)
{
#pragma unroll
    for (int i = 0; i < PART; i++) asm volatile("mov.f32 %0, %1;" : "=f"(v[i]) : "f"(d[n * PART + i]));
}

/* All units.  store(unit, n, part, about) is in a loop, one copy; registers cannot be indexed, so each of the parts has
 * its own way there. */
template <class F> DEVICE void compute_product(ChunkConsumer &c, const Product &p, const Output &output, F store)
{
    float d[128] = {}; /* wgmma reads what it overwrites: else all of it is held through all ops */
    if (c.lane == 0) {
        Progress &to = c.progress();
        to.steps = p.steps, to.output = output;
    }
    __syncwarp();
#pragma unroll 1
    for (;;) {
        volatile Progress &my = c.progress();
        Slot at = {my.index, my.phase};
        c.wait(&c.k.full[at.index], at.phase);
        const int blocks = c.k.unit[my.units & 1].blocks;
        if (c.lost()) return;
        if (blocks > 0) {
            const int steps = my.steps;
            /* no width of 128, for the sake of registers: a block that is not there gives what nobody looks at */
            if (blocks == 4) multiply<256, 1>(c, at, d, steps);
            else if (blocks > 1) multiply<192, 1>(c, at, d, steps);
            else multiply<64, 2>(c, at, d, steps);
        } else {
            c.arrive(&c.k.empty[at.index]);
            at.advance(STAGES);
        }
        const u32 turn = my.units & 1;
        __syncwarp();
        if (c.lane == 0) my.index = at.index, my.phase = at.phase, my.units = my.units + 1;
        __syncwarp();
        if (blocks == 0) break;
        asm volatile("" : "+r"(c.lane)); /* else addresses are held over all units */
        const Output to = {my.output.to, my.output.width, my.output.gated, my.output.bias};
        if (to.to) {
            const About about = {shared_address(c.k.about[turn])};
            if (to.gated) store_gated(c, d, c.k.unit[turn], to, about);
            else store_rows(c, d, c.k.unit[turn], to, about);
            continue;
        }
#pragma unroll 1
        for (int i = 0; i < blocks * (BLOCK_TOKENS / PART_TOKENS); i++) {
            Part v;
#define NMK_PART(n) \
    case n: \
        take_part(v, d, n); \
        break;
            switch (i) {
                NMK_PART(0)
                NMK_PART(1)
                NMK_PART(2)
                NMK_PART(3)
                NMK_PART(4)
                NMK_PART(5)
                NMK_PART(6)
            default:
                take_part(v, d, 7);
            }
#undef NMK_PART
            asm volatile("" : "+r"(c.lane));
            store(c.k.unit[turn], i * PART_TOKENS, v, {shared_address(c.k.about[turn]) + i * PART_TOKENS * 8});
        }
    }
}

/* Which token a warp has in its turn: whole groups of eight to an SM where there are enough. */
DEVICE int token_of(const ChunkConsumer &c, int turn)
{
    const bool many = c.k.tokens >= NMK_SMS * WARPS_COMPUTE;
    const int all = turn * NMK_SMS * WARPS_COMPUTE;
    return all + (many ? (int)blockIdx.x * WARPS_COMPUTE + c.warp : c.warp * NMK_SMS + (int)blockIdx.x);
}
