/* What the attention of a prefill launch is made of: which keys the chunk's spans see, and how the work is cut.
 *
 * The keys and values that a layer's spans see lie in the scratch, in tiles whose borders are multiples of KEY_TILE of
 * the position, each span's tiles after those of the span before.  A unit is one kv head's query heads of some
 * consecutive tokens, 64 rows for each warpgroup: row r is head r % GROUP of token r / GROUP.  A row goes over the
 * tiles in ascending order, and a tile that is masked for it changes nothing: so its bits do not depend on where spans
 * and units begin. */

constexpr int KEY_TILE = 128;
constexpr int KEY_SLOTS = 4; /* tiles of keys or of values in shared memory */
constexpr int QUERY_ROWS = 128, WARPGROUP_ROWS = 64;

/* The launch's spans, and prefix sums over them. */
struct Plan {
    nmk_span span[NMK_SPANS];
    int tile0[2][NMK_SPANS + 1]; /* of the scratch, by kind */
    int unit0[NMK_SPANS + 1];    /* in the order of work */
    u8 order[NMK_SPANS];         /* longest first */
};

/* Barriers of its own: what it streams is of other sizes than the ring's stages.  Between its tasks all are at rest, as
 * is the ring while it runs.  Where each warp is in them lies here: other ops have no registers for it. */
struct Attention {
    u64 full[KEY_SLOTS], empty[KEY_SLOTS], query_full[2], query_empty[2];
    int tiles[WARPS_ALL], units[WARPS_ALL]; /* that have passed through */
    Plan plan;
};

constexpr int GROUP = NMK_HEADS / NMK_KV_HEADS;
constexpr int ROW_TOKENS = WARPGROUP_ROWS / GROUP; /* tokens of a warpgroup's rows; GROUP need not divide 64 */
constexpr int UNIT_TOKENS = 2 * ROW_TOKENS;
static_assert(NMK_HEADS == GROUP * NMK_KV_HEADS && GROUP <= WARPGROUP_ROWS, "a token's heads are one warpgroup's");

/* First position that a span sees. */
DEVICE int span_low(const nmk_span &span, int sliding) { return sliding ? max(0, span.pos + 1 - NMK_WINDOW) : 0; }

/* By all threads of the block, once a launch; ends with all of them having it. */
DEVICE void attention_init(Attention &a, const nmk_params &p, int thread)
{
    const nmk_chunk *chunk = (const nmk_chunk *)p.control;
    const int spans = min(__ldcg(&chunk->spans), NMK_SPANS);
    Plan &plan = a.plan;
    if (thread < WARPS_ALL) a.tiles[thread] = a.units[thread] = 0;
    if (thread < NMK_SPANS) {
        const int4 v = thread < spans ? __ldcg((const int4 *)&chunk->span[thread]) : make_int4(0, 0, 0, 0);
        plan.span[thread] = {v.x, v.y, v.z, v.w};
    }
    if (thread == 0) {
#pragma unroll 1
        for (int i = 0; i < KEY_SLOTS; i++) {
            mbarrier_init(shared_address(&a.full[i]), 1);
            mbarrier_init(shared_address(&a.empty[i]), WARPS_COMPUTE * ARRIVALS);
        }
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            mbarrier_init(shared_address(&a.query_full[i]), WARPS_ALL - WARPS_COMPUTE - 1);
            mbarrier_init(shared_address(&a.query_empty[i]), WARPS_COMPUTE * ARRIVALS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (thread < NMK_SPANS) {
        const int end = plan.span[thread].pos + plan.span[thread].count;
        int rank = 0;
#pragma unroll 1
        for (int i = 0; i < NMK_SPANS; i++) {
            const int other = plan.span[i].pos + plan.span[i].count;
            rank += other > end || (other == end && i < thread);
        }
        plan.order[rank] = thread;
    }
    __syncthreads();
    if (thread < 3) {
        int sum = 0;
#pragma unroll 1
        for (int i = 0; i <= NMK_SPANS; i++) {
            if (thread < 2) plan.tile0[thread][i] = sum;
            else plan.unit0[i] = sum;
            if (i == NMK_SPANS) break;
            const nmk_span &span = plan.span[thread < 2 ? i : plan.order[i]];
            if (span.count == 0) continue;
            if (thread < 2) sum += (span.pos + span.count - 1) / KEY_TILE - span_low(span, thread) / KEY_TILE + 1;
            else sum += (span.count + UNIT_TOKENS - 1) / UNIT_TOKENS * NMK_KV_HEADS;
        }
    }
    __syncthreads();
}

/* A unit of attention. */
struct Queries {
    int token, pos, count; /* token: of the chunk */
    int head;              /* kv head */
    int tile, tiles;       /* of keys, by position */
    int scratch;           /* the first of them there */
};

/* Units are dealt in turns, forth and back, because they are in order of length: a span's last tokens first. */
DEVICE int queries_number(int turn) { return turn * NMK_SMS + (turn & 1 ? NMK_SMS - 1 - blockIdx.x : blockIdx.x); }

/* How many this SM has. */
DEVICE int queries_count(const Plan &plan)
{
    const int all = plan.unit0[NMK_SPANS], turns = (all + NMK_SMS - 1) / NMK_SMS;
    return turns - (turns > 0 && queries_number(turns - 1) >= all);
}

DEVICE Queries queries_of(const Plan &plan, int sliding, int turn)
{
    const int number = queries_number(turn);
    int at = 0;
#pragma unroll 1
    while (number >= plan.unit0[at + 1]) at++;
    const int index = plan.order[at], n = number - plan.unit0[at];
    const nmk_span &span = plan.span[index];
    const int block = (span.count + UNIT_TOKENS - 1) / UNIT_TOKENS - 1 - n / NMK_KV_HEADS, from = block * UNIT_TOKENS;
    Queries u;
    u.token = span.first + from, u.pos = span.pos + from, u.count = min(UNIT_TOKENS, span.count - from);
    u.head = n % NMK_KV_HEADS;
    u.tile = (sliding ? max(0, u.pos + 1 - NMK_WINDOW) : 0) / KEY_TILE;
    u.tiles = (u.pos + u.count - 1) / KEY_TILE - u.tile + 1;
    u.scratch = plan.tile0[sliding][index] + u.tile - span_low(span, sliding) / KEY_TILE;
    return u;
}

/* The warpgroups take turns at the tensor cores: while one multiplies the other works on its scores. */
DEVICE void turn_wait(int warpgroup)
{
    if (warpgroup) asm volatile("bar.sync 3, 256;" ::: "memory");
    else asm volatile("bar.sync 2, 256;" ::: "memory");
}
DEVICE void turn_give(int warpgroup) /* to this one */
{
    if (warpgroup) asm volatile("bar.arrive 3, 256;" ::: "memory");
    else asm volatile("bar.arrive 2, 256;" ::: "memory");
}
