/*@op
  name    = "prefill_attention",
  summary = "attention of every token of the chunk to the keys that it sees, online softmax in base 2",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"heads", "i32"}, {"kv_heads", "i32"}, {"head_dim", "i32"}, {"window", "i32"} },
  tile    = "every",
  task    = { {"sliding", "i32"} },
  reads   = { {"q", "bf16", role = "load", lo = "0", hi = "1"}, {"keys", "bf16", role = "load", lo = "0", hi = "1"},
              {"values", "bf16", role = "load", lo = "0", hi = "1"} },
  writes  = { {"attn", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device load
constexpr int TILE_BYTES = KEY_TILE * P::head_dim * 2, GROUP_BYTES = 8 * P::head_dim * 2; /* 8 keys, or rows of q */
constexpr int QUERY_BYTES = QUERY_ROWS * P::head_dim * 2, Q_WIDTH = P::heads * P::head_dim;
static_assert(P::head_dim == 64 || P::head_dim == 128, "what the products of a tile are");
static_assert(2 * QUERY_BYTES + KEY_SLOTS * TILE_BYTES <= CHUNK_STAGING, "it takes the place of the ring");

/* The first loader streams keys and values, a tile's keys ahead of the values of the tile before, across units; the
 * others bring the units' q, one unit ahead, 16 bytes at a time to where they are in core matrices of 8 rows. */
DEVICE void load(ChunkLoader &c, const Task &t)
{
    if (!c.begin()) return;
    Attention &a = c.k.attention;
    const Plan &plan = a.plan;
    const int units = queries_count(plan), warp = WARPS_COMPUTE + c.index, before = a.units[warp];
    int passed = a.tiles[warp];
    c.drain(); /* the ring's memory is attention's now */
    if (c.index == 0 && c.lane == 0) {
        const u8 *keys = c.buffer<u8>(t.keys), *values = c.buffer<u8>(t.values), *behind = nullptr;
        auto push = [&](const u8 *from) {
            const int slot = passed % KEY_SLOTS;
            c.wait(&a.empty[slot], (passed / KEY_SLOTS & 1) ^ 1);
            const u32 bar = shared_address(&a.full[slot]);
            mbarrier_expect(bar, TILE_BYTES);
            bulk_copy(shared_address(c.ring) + 2 * QUERY_BYTES + slot * TILE_BYTES, from, TILE_BYTES, bar);
            passed++;
        };
#pragma unroll 1
        for (int i = 0; i < units; i++) {
            const Queries u = queries_of(plan, t.sliding, i);
            const u64 from = ((u64)u.head * (NMK_KEY_TOKENS / KEY_TILE) + u.scratch) * TILE_BYTES;
#pragma unroll 1
            for (int j = 0; j < u.tiles; j++) {
                push(keys + from + (u64)j * TILE_BYTES);
                if (behind) push(behind);
                behind = values + from + (u64)j * TILE_BYTES;
            }
        }
        if (behind) push(behind);
    } else if (c.index > 0) {
        const bf16 *q = c.buffer<bf16>(t.q);
#pragma unroll 1
        for (int i = 0; i < units; i++) {
            const int buffer = (before + i) & 1;
            const Queries u = queries_of(plan, t.sliding, i);
            const u32 to = shared_address(c.ring) + buffer * QUERY_BYTES;
            c.wait(&a.query_empty[buffer], ((before + i) >> 1 & 1) ^ 1);
            /* 8 rows x 64 bytes at a time; rows without a token repeat another, and nobody looks at what they give */
#pragma unroll 1
            for (int j = c.index - 1; j < QUERY_ROWS / 8 * (P::head_dim / 32); j += LOADERS - 1) {
                const int row = j / (P::head_dim / 32) * 8 + (c.lane & 7), r = row % WARPGROUP_ROWS;
                const int dims = j % (P::head_dim / 32) * 4 + (c.lane >> 3);
                const int token = row / WARPGROUP_ROWS * ROW_TOKENS + min(r / GROUP, ROW_TOKENS - 1);
                const bf16 *from = q + (u64)(u.token + min(token, u.count - 1)) * Q_WIDTH;
                copy_async(to + row / 8 * GROUP_BYTES + dims * 128 + row % 8 * 16,
                           from + (u.head * GROUP + r % GROUP) * P::head_dim + dims * 8);
            }
            commit_async();
            wait_async<0>();
            fence_async_shared();
            __syncwarp();
            if (c.lane == 0) mbarrier_arrive(shared_address(&a.query_full[buffer]));
            passed += 2 * u.tiles;
        }
    }
    /* What comes next may fill the ring: compute has read the last tile of each slot, and all of q before. */
    if (c.index > 0 || c.lane == 0) {
#pragma unroll 1
        for (int slot = 0; slot < KEY_SLOTS; slot++)
            c.wait(&a.empty[slot], ((passed + KEY_SLOTS - 1 - slot) / KEY_SLOTS & 1) ^ 1);
    }
    __syncwarp();
    if (c.lane == 0) a.tiles[warp] = passed, a.units[warp] = before + units;
    __syncwarp();
}

//@device compute
constexpr int PIECES = GROUP * P::head_dim / 8; /* of 16 bytes, of a token's heads */

/* Token of the warpgroup that a row is of; rows past the last one repeat it. */
DEVICE int token_of(int row) { return min(row / GROUP, ROW_TOKENS - 1); }

/* A unit's rows, as a product takes them: there a lane's words of four groups of 8 dims lie together, and tokens side
 * by side.  They go through shared memory, where the unit's q was: stores of single pieces, each to a line of its own,
 * took as long as seven tiles of keys.  Returns what a release takes. */
DEVICE u32 store(const ChunkConsumer &c, const Task &t, const Queries &u, u32 stage, const float (&o)[P::head_dim / 2],
                 const float (&sum)[2])
{
    constexpr int WIDTH = (Q_WIDTH + 255) / 256 * 256;
    int lane = c.lane;
    asm volatile("" : "+r"(lane)); /* or all addresses would be computed ahead of the loop over tiles, and spilled */
    const int group = c.warp / 4, row = (c.warp & 3) * 16 + (lane >> 2), q = lane & 3;
    /* a piece's tokens are turned against those of the next: lanes write to different banks */
    auto at = [&](int piece, int token) {
        return stage + (piece * ROW_TOKENS + (token + piece + piece / 16 * 4) % ROW_TOKENS) * 16;
    };
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = row + 8 * h;
        float l = sum[h];
        l += __shfl_xor_sync(~0u, l, 1);
        l += __shfl_xor_sync(~0u, l, 2);
        l = 1 / l;
        if (r >= GROUP * ROW_TOKENS) continue;
#pragma unroll
        for (int i = 0; i < P::head_dim / 32; i++) {
            u32 w[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int e = 16 * i + 4 * j + 2 * h;
                w[j] = bf16_pair(o[e] * l, o[e + 1] * l);
            }
            const u32 to = at((r % GROUP * (P::head_dim / 32) + i) * 4 + q, r / GROUP);
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                         ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
        }
    }
    barrier_warpgroup(group);
    bf16 *attn = c.buffer<bf16>(t.attn);
    const int first = u.token + group * ROW_TOKENS, count = u.count - group * ROW_TOKENS;
    u32 seen = 0;
#pragma unroll 4
    for (int i = (c.warp & 3) * 32 + lane; i < PIECES * ROW_TOKENS; i += 4 * 32) {
        const int piece = i / ROW_TOKENS, token = i % ROW_TOKENS, n = first + token;
        const int place = nmk_packed_at(WIDTH, u.head * (GROUP * P::head_dim) + piece / 4 * 32 + piece % 4 * 2);
        uint4 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(at(piece, token))
                     : "memory");
        seen |= v.x;
        bf16 *to = attn + ((u64)(n / 64) * (WIDTH / 64) + place / 64) * 4096;
        if (token < count) *(uint4 *)(to + (n % 64 / 8 * 8 + place % 64 / 8) * 64 + n % 8 * 8) = v;
    }
    return seen;
}

/* The product for a tile's scores and that of the tile before's probabilities and values are under way together; the
 * scores become probabilities while the second one runs, and the other warpgroup's behind it.  The tiles of all units
 * are one stream: a unit's first scores go with the last values of the unit before. */
DEVICE void compute(ChunkConsumer &c, const Task &t)
{
    if (!c.begin()) {
        c.end();
        return;
    }
    Attention &a = c.k.attention;
    const Plan &plan = a.plan;
    /* what operands are made of is the same in all lanes, which the compiler has to see */
    const int units = queries_count(plan), group = __shfl_sync(~0u, c.warp / 4, 0);
    const int before = __shfl_sync(~0u, a.units[c.warp], 0);
    int passed = __shfl_sync(~0u, a.tiles[c.warp], 0);
    const u32 queries = shared_address(c.ring) + group * (WARPGROUP_ROWS / 8) * GROUP_BYTES;
    const u32 slots = shared_address(c.ring) + 2 * QUERY_BYTES;
    const int row = (c.warp & 3) * 16 + (c.lane >> 2), column = (c.lane & 3) * 2;
    const int offset[2] = {token_of(row) - column, token_of(row + 8) - column};
    auto take = [&]() {
        const int slot = passed % KEY_SLOTS;
        c.wait(&a.full[slot], passed / KEY_SLOTS & 1);
        passed++;
        return slot;
    };
    float o[P::head_dim / 2], s[KEY_TILE / 2], top[2] = {0, 0}, sum[2] = {0, 0};
    uint4 p[KEY_TILE / 16];
#pragma unroll
    for (int i = 0; i < P::head_dim / 2; i++) o[i] = 0;
#pragma unroll
    for (int i = 0; i < KEY_TILE / 2; i++) s[i] = 0;
#pragma unroll
    for (int i = 0; i < KEY_TILE / 16; i++) p[i] = make_uint4(0, 0, 0, 0);
    int begun = 0, left = 0; /* units; tiles of the last of them whose scores are still to come */
    int key0 = 0, pos = 0;   /* of the tile; of this warpgroup's first token */
    bool fresh = true;       /* p is of a unit's first tile */
    if (group == 1) turn_give(0);
#pragma unroll 1
    while (units > 0) {
        const bool border = left == 0, started = begun > 0, more = !border || begun < units;
        int keys = 0, values = 0;
        if (border) {
            if (more) {
                const Queries u = queries_of(plan, t.sliding, begun);
                left = u.tiles, pos = u.pos + group * ROW_TOKENS, key0 = u.tile * KEY_TILE;
                c.wait(&a.query_full[(before + begun) & 1], (before + begun) >> 1 & 1);
            }
            begun++;
        }
        const int buffer = (before + begun - 1) & 1; /* that of q */
        if (more) keys = take();
        if (started) values = take();
        turn_wait(group);
        wgmma_fence();
        /* where there is nothing yet, or nothing left, to multiply, nobody looks at what comes out */
        const u64 q = wgmma_operand(queries + buffer * QUERY_BYTES, 128, GROUP_BYTES);
        const u64 k = wgmma_operand(slots + keys * TILE_BYTES, 128, GROUP_BYTES);
        const u64 v = wgmma_operand(slots + values * TILE_BYTES, 128, KEY_TILE * 16);
#pragma unroll
        for (int i = 0; i < P::head_dim / 16; i++) wgmma(s, wgmma_ahead(q, i * 256), wgmma_ahead(k, i * 256), i > 0);
        wgmma_commit();
#pragma unroll
        for (int i = 0; i < KEY_TILE / 16; i++) wgmma(o, p[i], wgmma_ahead(v, i * 256), i > 0 || !fresh);
        wgmma_commit();
        turn_give(1 - group);
        wgmma_wait<1>(s);
        if (more) c.arrive(&a.empty[keys]);
        left--;
        const float before_sum[2] = {sum[0], sum[1]}; /* of the unit whose last values are under way */
        if (border) top[0] = top[1] = -1e30f, sum[0] = sum[1] = 0;
        if (key0 + KEY_TILE - 1 > pos) {
#pragma unroll
            for (int j = 0; j < KEY_TILE / 2; j++)
                if (j / 4 * 8 + j % 2 > pos - key0 + offset[j / 2 % 2]) s[j] = -INFINITY;
        }
        if (t.sliding && key0 <= pos + ROW_TOKENS - 1 - P::window) {
#pragma unroll
            for (int j = 0; j < KEY_TILE / 2; j++)
                if (j / 4 * 8 + j % 2 <= pos - P::window - key0 + offset[j / 2 % 2]) s[j] = -INFINITY;
        }
        key0 += KEY_TILE;
        float shrink[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float m = top[h], n = m, l = 0;
#pragma unroll
            for (int j = 2 * h; j < KEY_TILE / 2; j += 8)
                m = fmaxf(m, fmaxf(s[j], s[j + 1])), n = fmaxf(n, fmaxf(s[j + 4], s[j + 5]));
            m = fmaxf(m, n);
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            shrink[h] = exp2_fast(top[h] - m), top[h] = m;
#pragma unroll
            for (int j = 2 * h; j < KEY_TILE / 2; j += 4) {
                s[j] = exp2_fast(s[j] - m), l += s[j];
                s[j + 1] = exp2_fast(s[j + 1] - m), l += s[j + 1];
            }
            sum[h] = sum[h] * shrink[h] + l;
        }
        wgmma_wait<0>(o);
#pragma unroll
        for (int i = 0; i < KEY_TILE / 16; i++)
            p[i] = make_uint4(bf16_pair(s[8 * i], s[8 * i + 1]), bf16_pair(s[8 * i + 2], s[8 * i + 3]),
                              bf16_pair(s[8 * i + 4], s[8 * i + 5]), bf16_pair(s[8 * i + 6], s[8 * i + 7]));
        if (border && started) {
            const Queries u = queries_of(plan, t.sliding, begun - 2);
            const u32 seen = store(c, t, u, queries + (buffer ^ 1) * QUERY_BYTES, o, before_sum);
            c.arrive(&a.query_empty[buffer ^ 1], seen);
#pragma unroll
            for (int i = 0; i < P::head_dim / 2; i++) o[i] = 0; /* nobody needs it, but else it is kept meanwhile */
        }
        if (started) c.arrive(&a.empty[values]);
        if (!more) break;
        fresh = border;
#pragma unroll
        for (int i = 0; i < P::head_dim / 2; i++) o[i] *= shrink[i / 2 % 2];
    }
    if (group == 0) turn_wait(0);
    if (c.lane == 0) a.tiles[c.warp] = passed, a.units[c.warp] = before + units;
    fence_async_global(); /* the next product reads this by bulk copies */
    c.end();
}

//@reference
/* Tile by tile of keys, whose borders are multiples of 128 of the position.  As on the device the exponentials are
 * relative to the maximum so far and go into the product rounded to bf16, but into the sum as they are. */
enum { TOKENS = 16 }; /* of a unit */
const int width = P.heads * P.head_dim;
const uint16_t *queries = buffer(vm, t.q), *keys = buffer(vm, t.keys), *values = buffer(vm, t.values);
uint16_t *attn = buffer(vm, t.attn), place[NMK_HEADS * HEAD_DIM];
int unit = 0;
find_places(place, width);
for (int i = 0; i < vm->chunk->spans; i++) {
    const struct seen s = seen_by(vm->chunk, i, t.sliding, P.window);
    for (int u = 0; u < (s.count + TOKENS - 1) / TOKENS * P.kv_heads; u++) {
        const int kv_head = u % P.kv_heads, first = u / P.kv_heads * TOKENS;
        const int tokens = s.count - first < TOKENS ? s.count - first : TOKENS;
        struct softmax state[TOKENS];
        if (unit++ % NMK_SMS != sm->id) continue;
        for (int n = 0; n < tokens; n++) {
            memset(&state[n], 0, sizeof state[n]);
            for (int h = 0; h < GROUP; h++) state[n].m[h] = -1e30f;
        }
        for (int tile = 0; tile < s.tiles; tile++) {
            uint16_t k[KEY_TILE][HEAD_DIM], v[KEY_TILE][HEAD_DIM];
            const int pos0 = s.low + tile * KEY_TILE, key0 = s.base + tile * KEY_TILE;
            if (pos0 > s.pos + first + tokens - 1) break;
            if (t.sliding && pos0 + KEY_TILE <= s.pos + first + 1 - P.window) continue;
            for (int j = 0; j < KEY_TILE; j++)
                for (int d8 = 0; d8 < HEAD_DIM; d8 += 8) memcpy(k[j] + d8, keys + key_at(kv_head, key0 + j, d8), 16);
            for (int j = 0; j < KEY_TILE; j++)
                for (int dim = 0; dim < HEAD_DIM; dim++) v[j][dim] = values[value_at(kv_head, key0 + j, dim)];
            for (int n = 0; n < tokens; n++) {
                const int pos = s.pos + first + n, lo = t.sliding && pos + 1 > P.window ? pos + 1 - P.window : 0;
                const int from = lo > pos0 ? lo - pos0 : 0, to = pos + 1 - pos0 < KEY_TILE ? pos + 1 - pos0 : KEY_TILE;
                if (from >= to) continue;
                const uint16_t *rows[KEY_TILE];
                for (int j = from; j < to; j++) rows[j - from] = v[j];
                for (int h = 0; h < GROUP; h++) {
                    const uint16_t *q = queries + (size_t)(s.first + first + n) * width;
                    q += (kv_head * GROUP + h) * HEAD_DIM;
                    float p[KEY_TILE], top = state[n].m[h], sum = 0;
                    for (int j = from; j < to; j++) {
                        p[j - from] = dot(q, k[j], HEAD_DIM);
                        if (p[j - from] > top || p[j - from] != p[j - from]) top = p[j - from];
                    }
                    const float old = exp2f(state[n].m[h] - top);
                    for (int j = 0; j < to - from; j++) {
                        p[j] = exp2f(p[j] - top);
                        sum += p[j];
                        p[j] = bf16_value(bf16_round(p[j]));
                    }
                    state[n].l[h] = state[n].l[h] * old + sum;
                    state[n].m[h] = top;
                    accumulate(state[n].o[h], old, p, rows, to - from);
                }
            }
        }
        for (int n = 0; n < tokens; n++)
            for (int h = 0; h < GROUP; h++)
                for (int dim = 0; dim < HEAD_DIM; dim++) {
                    const int at = place[(kv_head * GROUP + h) * HEAD_DIM + dim];
                    const float v = state[n].o[h][dim] / state[n].l[h];
                    attn[operand_at(width, (size_t)(s.first + first + n), at)] = bf16_round(v);
                }
    }
}

//@test tolerance=0.01 a softmax of what each token sees, where values are one-hot
/* Keys are zeros, so all that a token sees counts alike; value j is 1 in dim pos % head_dim: the output counts them. */
const int width = P.heads * P.head_dim;
uint16_t *q = input(test, t.q), *keys = input(test, t.keys), *values = input(test, t.values);
float *attn = expect_bf16(test, t.attn);
for (int i = 0; i < test->chunk.spans; i++) {
    const struct seen s = seen_by(&test->chunk, i, t.sliding, P.window);
    for (int head = 0; head < P.kv_heads; head++)
        for (int j = 0; j < s.tiles * KEY_TILE; j++)
            for (int dim = 0; dim < P.head_dim; dim++) {
                keys[key_at(head, s.base + j, dim)] = 0;
                values[value_at(head, s.base + j, dim)] = bf16_round((s.low + j) % P.head_dim == dim);
            }
    for (int n = s.first; n < s.first + s.count; n++)
        for (int k = 0; k < width; k++) {
            const int pos = s.pos + n - s.first, lo = t.sliding && pos >= P.window ? pos + 1 - P.window : 0;
            int seen = 0;
            for (int p = lo; p <= pos; p++) seen += p % P.head_dim == k % P.head_dim;
            q[n * width + k] = bf16_round(uniform(test, -2, 2));
            attn[operand_at(width, (size_t)n, nmk_packed_at(nmk_packed_cols(width), k))] =
                (float)seen / (float)(pos + 1 - lo);
        }
}
