/*@op
  name    = "router_sum",
  summary = "logits += Wrouter * (gamma * x) of the SM's own 16 rows of x, and their squares, in fixed point",
  params  = { {"hidden", "i32"}, {"experts", "i32"}, {"logit_copies", "i32"}, {"hands", "i32"} },
  tile    = "owner",
  task    = { {"tile", "i32"}, {"weight_kib", "i32"}, {"gamma_kib", "i32"} },
  reads   = { {"acc", role = "compute", scope = "sm"} },
  writes  = { {"acc", role = "compute", scope = "sm"},
              {"logits", "u64", role = "compute", adds = true, lo = "tile%logit_copies*columns",
               hi = "tile%logit_copies*columns+columns"} },
  cost    = "16*2*experts",
@*/
//@device load
/* In place of a norm and a product that wait for the whole of x, one exchange earlier: the logits are sums over the
 * rows of x, the norm's factor is the same for all of them, and integers add up to the same in any order.  route
 * multiplies by that factor.
 *
 * Of the sums there are copies, because additions to one place come one after the other, in each a row for each column:
 * the experts, then the squares in two parts. */
typedef PackedX L;
constexpr int EXPERT_TILES = (P::experts + 15) / 16;
constexpr int ROW = EXPERT_TILES * 16 + 2;
constexpr int TILE_BYTES = 512; /* 16 rows of 16 k of a granule: of each 8 k the lower four, or the upper */
constexpr bool TOGETHER = L::tiles != 3; /* the two are one behind the other */
constexpr int GAMMA = EXPERT_TILES * 2 * TILE_BYTES;
static_assert(COLUMN_TILES == 1 && NMK_X_KEPT, "acc is the residual of all columns");
static_assert(EXPERT_TILES <= WARPS_COMPUTE && GAMMA + 32 <= NMK_STAGE_BYTES, "a warp has one tile, all are one stage");

/* One stage: of each row tile of the router the granule in which the SM's rows are, then gamma. */
DEVICE void load(Loader &c, const Task &t)
{
    const u8 *from = c.weights(t.weight_kib);
    const u32 bar = c.claim_slot();
    u32 to = shared_address(c.ring) + c.fill.index * NMK_STAGE_BYTES;
    c.s.stage_tag[c.fill.index] = 0;
    mbarrier_expect(bar, GAMMA + 32);
    bulk_copy(to + GAMMA, c.weights(t.gamma_kib) + t.tile * 32, 32, bar, c.policy);
    const int k = t.tile * 16 & ~31;
#pragma unroll 1
    for (int e = 0; e < EXPERT_TILES; e++, from += L::tile_bytes, to += 2 * TILE_BYTES) {
        bulk_copy(to, from + L::pair_offset(0, k), TOGETHER ? 2 * TILE_BYTES : TILE_BYTES, bar, c.policy);
        if (!TOGETHER) bulk_copy(to + TILE_BYTES, from + L::pair_offset(0, k + 4), TILE_BYTES, bar, c.policy);
    }
    c.fill.advance(c.p.ring_stages);
}

//@device compute
DEVICE void compute(Consumer &c, const Task &t)
{
    float4 *parts = (float4 *)c.s.prob; /* attention's, which is between barriers like these */
    static_assert(sizeof c.s.prob == WARPS_COMPUTE * 32 * sizeof(float4), "all warps' sums");
    u64 *const sums = c.buffer<u64>(t.logits) + t.tile % P::logit_copies * (NMK_COLUMNS * ROW);
    const u8 *stage = c.ring + c.slot.index * NMK_STAGE_BYTES;
    const int lane = c.lane;
    c.wait_full(c.slot);
    const uint4 w0 = *(const uint4 *)(stage + c.warp * 2 * TILE_BYTES + lane * 16);
    const uint4 w1 = *(const uint4 *)(stage + (c.warp * 2 + 1) * TILE_BYTES + lane * 16);
    const bf16 *gamma = (const bf16 *)(stage + GAMMA);
    const float low = bf16_low(gamma[c.g()]), high = bf16_low(gamma[c.g() + 8]);
    c.release(w0.x | w1.x | __float_as_uint(low) | __float_as_uint(high));
    const int column = 2 * c.t();
    parts[c.warp * 32 + lane] = make_float4(c.acc[0][0], c.acc[0][1], c.acc[0][2], c.acc[0][3]);
    barrier_compute();
    u32 seen;
    const float4 x = sum_warps(parts + lane, seen); /* the same bits that the storers get */
    auto add = [&](int row, int j, u64 v) {
        if (c.live(column + j)) atomicAdd(sums + (column + j) * ROW + row, v);
    };
    /* a lane has two rows of x and two columns; as an operand it needs the eight rows of its k, of one column */
    const u32 upper = transpose_8x8(bf16_pair(x.x * low, x.y * low));
    const u32 lower = transpose_8x8(bf16_pair(x.z * high, x.w * high));
    u32 b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 u = __shfl_sync(~0u, upper, lane & 28 | i), l = __shfl_sync(~0u, lower, lane & 28 | i);
        b[i] = c.t() >> 1 != (t.tile & 1) ? 0 : c.t() & 1 ? l : u;
    }
    if (c.warp < EXPERT_TILES) {
        float v[4] = {0, 0, 0, 0};
        mma(v, w0, b[0], b[1]), mma(v, w1, b[2], b[3]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            add(c.warp * 16 + c.g(), j, nmk_fixed(v[j]));
            add(c.warp * 16 + c.g() + 8, j, nmk_fixed(v[2 + j]));
        }
    }
    if (c.warp == WARPS_COMPUTE - 1) {
        const float v[4] = {x.x, x.y, x.z, x.w};
        float squares[2];
        sum_squares(v, squares);
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (c.g() < 2) add(EXPERT_TILES * 16 + c.g(), j, nmk_fixed_square(squares[j], c.g()));
    }
    if (P::hands) c.hand_sum();
}

//@reference
const int rows = (P.experts + 15) / 16 * 16, row0 = t.tile * 16;
uint64_t *sums = (uint64_t *)buffer(vm, t.logits) + t.tile % P.logit_copies * NMK_COLUMNS * (rows + 2);
const uint16_t *gamma = weight_row(vm, t.gamma_kib, 0, 0, P.hidden, 0);
for (int n = 0; n < NMK_COLUMNS; n++, sums += rows + 2) {
    if (!active(vm, n)) continue;
    float x[16], squares = 0;
    for (int i = 0; i < 16; i++) {
        const float y = sm->x[i][n] + sm->acc[i][n]; /* on the device acc is both */
        squares += y * y;
        x[i] = bf16_value(bf16_round(y * bf16_value(gamma[row0 + i])));
    }
    for (int e = 0; e < rows; e++) {
        const uint16_t *w = weight_row(vm, t.weight_kib, 0, 0, P.hidden, e);
        float v = 0;
        for (int i = 0; i < 16; i++) v += x[i] * bf16_value(w[row0 + i]);
        __atomic_fetch_add(&sums[e], nmk_fixed(v), __ATOMIC_RELAXED);
    }
    for (int i = 0; i < 2; i++)
        __atomic_fetch_add(&sums[rows + i], nmk_fixed_square(squares, i), __ATOMIC_RELAXED);
}
