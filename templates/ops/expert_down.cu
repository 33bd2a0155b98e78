/*@op
  name     = "expert_down",
  summary  = "acc += sum over the active experts of h * Wdown, in ascending order, for the SM's own 16 rows",
  params   = { {"experts", "i32"}, {"experts_per_token", "i32"}, {"expert_ff", "i32"}, {"hidden", "i32"},
               {"h_units", "i32"}, {"hands", "i32"} },
  tile     = "owner",
  task     = { {"tile", "i32"}, {"weight_kib", "i32"} },
  reads    = { {"h", "bf16", role = "compute", lo = "0", hi = "h_units", awaits = true},
               {"route", role = "load", scope = "sm"}, {"route", role = "compute", scope = "sm"},
               {"acc", role = "compute", scope = "sm"} },
  writes   = { {"acc", role = "compute", scope = "sm"} },
  cost     = "0",
@*/
//@device load
typedef Packed<P::expert_ff> L;
constexpr u64 EXPERT_BYTES = (u64)(P::hidden / 16) * L::tile_bytes;

DEVICE void load(Loader &c, const Task &t)
{
    const int instance = c.desc()[7], b = instance & 1;
    c.wait_route(instance);
    const u8 *from = c.weights(t.weight_kib) + (u64)t.tile * L::tile_bytes;
    const int active = c.s.active[b];
#pragma unroll 1
    for (int i = 0; i < active; i++) c.stream(from + c.s.expert[b][i] * EXPERT_BYTES, L::stages, L::stage_bytes);
}

//@device compute
/* h is already multiplied by the router weight, so all experts add up in one accumulator.  A column that did not choose
 * an expert multiplies by zeros: exact, so its bits do not depend on the others' choices. */
#ifdef NMK_WIDE
/* Of an expert's h only the rows of the columns that chose it are loaded, eight at a time, into shared memory; from
 * there each goes to where its column is in the accumulator.  Two such loads are under way.  Where that has no place
 * for rows so wide, every tile of columns of which one chose the expert is multiplied, the others' columns by zeros. */
constexpr bool GATHERED = NMK_X_BYTES > 0;
constexpr int GRANULE_BYTES = 9 * 64; /* eight rows and one of zeros */
constexpr int LOAD_BYTES = L::granules * GRANULE_BYTES;
/* Tiles of columns whose products hide each other's latency. */
constexpr int GROUP = COLUMN_TILES < 4 ? COLUMN_TILES : 4;
static_assert(!GATHERED || NMK_X_BYTES == WARPS_COMPUTE * 2 * LOAD_BYTES, "gathered rows");
static_assert(!GATHERED || L::stages < NMK_RING_STAGES, "an expert's stages are held until its last rows are done");

/* Which rows of a load the lane takes for its columns, or the one of zeros: 4 bits for each tile of columns.  Returns
 * the tiles of which there is a column. */
DEVICE u32 find_rows(const Consumer &c, u64 columns, int eight, u32 &rows)
{
    int before = -eight * TILE_COLUMNS; /* rows of other tiles than n */
    u32 tiles = 0;
    rows = 0;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
        const u32 tile = (u32)(columns >> n * TILE_COLUMNS) & 0xff;
        const int row = before + __popc(tile & ((1u << c.g()) - 1));
        const bool mine = tile >> c.g() & 1 && (u32)row < TILE_COLUMNS;
        rows |= (u32)(mine ? row : TILE_COLUMNS) << 4 * n;
        tiles |= (u32)(tile != 0) << n;
        before += __popc(tile);
    }
    return tiles;
}

DEVICE void add_expert(Consumer &c, const bf16 *h, u64 columns, int first)
{
    int row[COLUMN_TILES];
    u32 tiles = 0;
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++) {
        const int column = n * TILE_COLUMNS + c.g();
        const bool mine = columns >> column & 1;
        row[n] = mine ? (first + count_bits(columns & below(column))) * P::expert_ff : -1;
        tiles |= (u32)((columns >> n * TILE_COLUMNS & 0xff) != 0) << n;
    }
    auto from = [&](int n) { return row[n]; };
    multiply_wide<1, COLUMN_TILES, WIDE_DEPTH, true>(c, (float(&)[1][COLUMN_TILES][4])c.acc, h, from, tiles, false,
                                                     P::expert_ff, L::tiles);
}

DEVICE void compute_gathered(Consumer &c, const Task &t)
{
    const int b = c.desc()[7] & 1, active = c.s.active[b];
    const Routes &r = c.s.routes[b];
    const bf16 *h = c.buffer<bf16>(t.h);
    u8 *gathered = c.ring + SHARED_X + c.warp * (2 * LOAD_BYTES);
    if (active == 0) return;
#pragma unroll 1
    for (int i = c.lane; i < 2 * L::granules * 4; i += 32)
        *(uint4 *)(gathered + i / 4 * GRANULE_BYTES + TILE_COLUMNS * 64 + i % 4 * 16) = make_uint4(0, 0, 0, 0);
    int ahead = 0, eight_ahead = 0;
    auto fetch = [&](int turn) {
        if (ahead < active) {
            const int first = r.first[ahead], count = r.first[ahead + 1] - first;
            const int row = first + min(eight_ahead * TILE_COLUMNS + c.g(), count - 1);
            const u32 to = shared_address(gathered) + turn * LOAD_BYTES + c.lane * 16;
#pragma unroll
            for (int q = 0; q < L::granules; q++)
                copy_async(to + q * GRANULE_BYTES,
                           h + row * P::expert_ff + min(L::k(c.warp, q) + 8 * c.t(), P::expert_ff - 8));
            if (++eight_ahead * TILE_COLUMNS >= count) eight_ahead = 0, ahead++;
        }
        commit_async();
    };
    fetch(0), fetch(1);
    int turn = 0;
#pragma unroll 1
    for (int slot = 0; slot < active; slot++) {
        const u64 columns = r.columns[slot];
        const int eights = (count_bits(columns) + TILE_COLUMNS - 1) / TILE_COLUMNS;
#pragma unroll 1
        for (int eight = 0; eight < eights; eight++) {
            u32 rows, seen = 0;
            const u32 tiles = find_rows(c, columns, eight, rows);
            const u8 *from = gathered + turn * LOAD_BYTES + c.t() * 16;
            Slot at = c.slot;
            wait_async<1>();
            __syncwarp();
#pragma unroll
            for (int q = 0; q < L::granules; q++) {
                uint4 a[2];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const int part = (2 * q + k) % L::tiles; /* of the stage: a tile of A */
                    if (part == 0) c.wait_full(at), seen = 0;
                    a[k] = c.tile<L::tiles>(at, part), seen |= a[k].x;
                    if (part + 1 == L::tiles) {
                        if (eight + 1 == eights) c.release(seen);
                        at.advance(c.p.ring_stages);
                    }
                }
#pragma unroll
                for (int n = 0; n < COLUMN_TILES; n += GROUP) {
                    if (!(tiles >> n & (1 << GROUP) - 1)) continue;
                    uint4 x[GROUP];
#pragma unroll
                    for (int j = 0; j < GROUP && n + j < COLUMN_TILES; j++)
                        x[j] = *(const uint4 *)(from + q * GRANULE_BYTES + (rows >> 4 * (n + j) & 15) * 64);
#pragma unroll
                    for (int j = 0; j < GROUP && n + j < COLUMN_TILES; j++) mma(c.acc[n + j], a[0], x[j].x, x[j].y);
#pragma unroll
                    for (int j = 0; j < GROUP && n + j < COLUMN_TILES; j++) mma(c.acc[n + j], a[1], x[j].z, x[j].w);
                }
            }
            __syncwarp();
            fetch(turn);
            turn ^= 1;
        }
    }
    wait_async<0>();
}

DEVICE void compute(Consumer &c, const Task &t)
{
    if constexpr (GATHERED) {
        compute_gathered(c, t);
    } else {
        const int b = c.desc()[7] & 1, active = c.s.active[b];
        const Routes &r = c.s.routes[b];
#pragma unroll 1
        for (int slot = 0; slot < active; slot++) add_expert(c, c.buffer<bf16>(t.h), r.columns[slot], r.first[slot]);
    }
}
#else
constexpr bool HELD = L::granules <= 12; /* the registers have room for a warp's share of an expert's h */
constexpr int AHEAD = L::granules <= 3 ? 4 : L::granules <= 6 ? 2 : 1; /* experts whose h is loaded ahead */

DEVICE int row_of(const Consumer &c, int b, int slot)
{
    if constexpr (POSTED) return c.row_of_h<P::experts_per_token>(b, min(slot, SLOTS - 1), c.g());
    return slot * NMK_COLUMNS + c.g();
}

DEVICE void fetch(Consumer &c, const bf16 *h, int b, int slot, int active, uint4 (&v)[L::granules])
{
    const bool chosen = slot < active && c.s.weight[b][slot * 8 + c.g()] != 0.f;
    const bf16 *from = h + row_of(c, b, slot) * P::expert_ff + 8 * c.t();
#pragma unroll
    for (int q = 0; q < L::granules; q++) {
        const int k = L::k(c.warp, q);
        v[q] = make_uint4(0, 0, 0, 0);
        if (chosen && (P::expert_ff % 256 == 0 || k + 8 * c.t() < P::expert_ff)) v[q] = load_words(from + k);
    }
}

/* Until all that the warp has of the slot's h is there. */
DEVICE void look_again(Consumer &c, const bf16 *h, int b, int slot, int active, uint4 (&v)[L::granules])
{
    u32 looks = 0;
#pragma unroll 1
    for (;;) {
        u32 word = 0;
#pragma unroll
        for (int q = 0; q < L::granules; q++) word = least(word, least(v[q]));
        if (!c.lacks(word, looks)) return;
        fetch(c, h, b, slot, active, v);
    }
}

DEVICE void compute_held(Consumer &c, const bf16 *h, int b, int active, float (&odd)[4])
{
    uint4 v[AHEAD][L::granules];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) fetch(c, h, b, j, active, v[j]);
#pragma unroll 1
    for (int i = 0; i < active; i += AHEAD) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (i + j >= active) break;
            if constexpr (POSTED) look_again(c, h, b, i + j, active, v[j]);
#pragma unroll
            for (int s = 0; s < L::stages; s++) {
                uint4 a[L::tiles];
                const u32 seen = c.load_stage(a);
                multiply(c.acc[0], odd, a, v[j], s * L::tiles);
                c.release(seen);
            }
            fetch(c, h, b, i + j + AHEAD, active, v[j]);
        }
    }
}

DEVICE void compute(Consumer &c, const Task &t)
{
    const int b = c.desc()[7] & 1, active = c.s.active[b];
    const bf16 *h = c.exchange<bf16>(t.h);
    float odd[4] = {0, 0, 0, 0};
    if constexpr (HELD) {
        compute_held(c, h, b, active, odd);
    } else {
#pragma unroll 1
        for (int slot = 0; slot < active; slot++) {
            const bool chosen = c.s.weight[b][slot * 8 + c.g()] != 0.f;
            const int from = row_of(c, b, slot) * P::expert_ff;
            if constexpr (P::expert_ff % 512 == 0) row_tile_sum(c, h, from, chosen, P::expert_ff, odd);
            else ragged_sum<L::tiles>(c, h, from, chosen, P::expert_ff, odd);
        }
    }
    add_sum(c, odd);
    if (P::hands) c.hand_sum();
}
#endif

//@reference
const struct vm_route *r = route_of(sm, d);
const uint16_t *h = buffer(vm, t.h);
if (!r) return -1;
for (int slot = 0; slot < r->active; slot++)
    for (int i = 0; i < 16; i++) {
        const uint16_t *w =
            weight_row(vm, t.weight_kib, r->expert[slot], P.hidden, P.expert_ff, t.tile * 16 + i);
        for (int n = 0; n < NMK_COLUMNS; n++)
            if (r->weight[slot][n] != 0)
                sm->acc[i][n] += dot(w, h + r->row[slot][n] * P.expert_ff, P.expert_ff);
    }
