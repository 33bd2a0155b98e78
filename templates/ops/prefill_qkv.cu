/*@op
  name    = "prefill_qkv",
  summary = "q, k, v = xn * Wqkv + bias, norm and rope on q and k, k and v into their pages",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"hidden", "i32"}, {"heads", "i32"}, {"kv_heads", "i32"}, {"head_dim", "i32"},
              {"full_layers", "i32"}, {"sliding_layers", "i32"}, {"rope_halves", "i32"}, {"qk_norm", "i32"},
              {"qkv_bias", "i32"}, {"eps", "f32"} },
  tile    = "every",
  task    = { {"weight_kib", "i32"}, {"first_row", "i32"}, {"rope", "i32"}, {"sliding", "i32"}, {"kv_layer", "i32"},
              {"bias_kib", "i32"}, {"gamma_kib", "i32"} },
  reads   = { {"xn", "bf16", role = "load", lo = "0", hi = "1"},
              {"places", "i32", role = "compute", lo = "0", hi = "1"} },
  writes  = { {"q", "bf16", role = "compute", claim = true}, {"pages", "bf16", role = "compute", claim = true},
              {"kv", role = "compute", launch = "later"} },
  cost    = "0",
@*/
//@device load
constexpr int Q = P::heads * P::head_dim, KV = P::kv_heads * P::head_dim, ROWS = Q + 2 * KV;

DEVICE Product product(const Context &c, const Task &t)
{
    const int first = t.first_row / 16;
    return {c.weights(t.weight_kib) + (u64)first * Packed<P::hidden>::tile_bytes, c.buffer<u8>(t.xn),
            stages_of(P::hidden), ROWS / 16 - first, 0, nullptr};
}

/* A token's position, and its page. */
DEVICE int2 about(const ChunkLoader &c, const Task &t, int n)
{
    if (n >= c.k.tokens) return make_int2(0, 0);
    const int2 place = __ldcg(c.buffer<int2>(t.places) + n);
    const int *table = (const int *)(t.sliding ? c.p.table_sliding : c.p.table_full);
    return make_int2(place.x, __ldg(table + (u64)place.y * c.p.table_stride + place.x / NMK_PAGE_TOKENS));
}

//@device compute
constexpr int HALF_PAGE = NMK_PAGE_TOKENS * P::head_dim * 2; /* bytes of K, then of V, of one kv head */
constexpr int DIM_TILES = P::head_dim / 16;

/* The natural row of a row pair's first or second row, as in ops/qkv.cu. */
DEVICE int natural(int row, int second)
{
    if constexpr (P::rope_halves) return row - row % P::head_dim / 2 + second * (P::head_dim / 2);
    return row + second;
}

/* The rows of a pair of one token to where a step's attention looks for them; half: of the page, K. */
DEVICE void append(u8 *half, int token, int row, int d, u32 pair)
{
    const int r = token & 15;
    half += (token >> 4) * DIM_TILES * 512;
    if (row < Q + KV) { /* K: tokens are rows */
        const int k_tile = d / 32 * 2 + (d >> 2 & 1), of_lane = ((r & 7) * 4 + (d >> 3 & 3)) * 16;
        *(u32 *)(half + k_tile * 512 + of_lane + (d & 2) * 4 + (r >> 3) * 4) = pair;
        return;
    }
#pragma unroll
    for (int z = 0; z < 2; z++) { /* V: dims are rows */
        const int dim = natural(d, z), m = dim & 15;
        u8 *v_tile = half + HALF_PAGE + dim / 16 * 512 + ((m & 7) * 4 + ((r & 7) >> 1)) * 16;
        *(u16 *)(v_tile + (r >> 3) * 8 + (m >> 3) * 4 + (r & 1) * 2) = (u16)(z ? pair >> 16 : pair);
    }
}

/* With qk_norm, by which each of the lane's tokens is divided: squares of the row tile, then of the head's. */
DEVICE void norms(ChunkConsumer &c, float (&scale)[PART / 2], const Part &v)
{
    float *sums = (float *)c.staging();
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        const int at = i / 2 * 4 + i % 2;
        float squares = v[at] * v[at] + v[at + 2] * v[at + 2];
#pragma unroll
        for (int s = 4; s <= 16; s <<= 1) squares += __shfl_xor_sync(~0u, squares, s);
        if (c.g() == 0) sums[c.warp * PART_TOKENS + i / 2 * 8 + 2 * c.t() + i % 2] = squares;
    }
    barrier_compute();
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        float squares = 0;
#pragma unroll
        for (int j = 0; j < DIM_TILES; j++)
            squares += sums[(c.warp / DIM_TILES * DIM_TILES + j) * PART_TOKENS + i / 2 * 8 + 2 * c.t() + i % 2];
        scale[i] = rsqrtf(squares * (1.f / P::head_dim) + P::eps);
    }
    barrier_compute();
}

/* RoPE read at once, as the registers allow that are left in the kernel as a whole. */
constexpr int TURNS = P::qk_norm && NMK_EXPERTS && P::head_dim > 64 ? 2 : 4;

/* The tile's rows are pairs on MMA rows g and g + 8, which turn together. */
DEVICE void store(ChunkConsumer &c, const Task &t, const Unit &u, int first, Part &v, About about)
{
    const int row = t.first_row + (u.slab * SLAB_TILES + c.warp) * 16 + 2 * c.g(), d = row % P::head_dim;
    const int token = u.block * BLOCK_TOKENS + first + 2 * c.t();
    float scale[PART / 2], gamma[2] = {1, 1};
    if (P::qkv_bias && row < ROWS) {
        const u16 *from = (const u16 *)c.weights(t.bias_kib);
        const float even = bf16_low(__ldg(from + natural(row, 0))), odd = bf16_low(__ldg(from + natural(row, 1)));
#pragma unroll
        for (int i = 0; i < PART; i++) v[i] += i & 2 ? odd : even;
    }
    if constexpr (P::qk_norm) {
        norms(c, scale, v);
        if (row < Q + KV) {
            const u16 *from = (const u16 *)c.weights(t.gamma_kib) + (row < Q ? 0 : P::head_dim);
            gamma[0] = bf16_low(__ldg(from + natural(d, 0))), gamma[1] = bf16_low(__ldg(from + natural(d, 1)));
        }
    }
    if (row >= ROWS) return;
    if (row < Q + KV) {
        int pair = d / 2;
#pragma unroll
        for (int h = 0; h < PART / 2; h += TURNS) {
            float2 turns[TURNS];
            asm volatile("" : "+r"(pair), "+f"(v[max(2 * h - 1, 0)]));
#pragma unroll
            for (int i = 0; i < TURNS; i++) turns[i] = make_float2(1.f, 0.f);
            if (t.rope) {
                const float2 *rope = (const float2 *)c.p.rope + pair;
#pragma unroll
                for (int i = 0; i < TURNS; i++)
                    turns[i] = __ldg(rope + (u64)about[(h + i) / 2 * 8 + i % 2 + 2 * c.t()].x * (P::head_dim / 2));
            }
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                const int at = (h + i) / 2 * 4 + i % 2;
                const float even = v[at] * gamma[0], odd = v[at + 2] * gamma[1];
                v[at] = even * turns[i].x - odd * turns[i].y, v[at + 2] = even * turns[i].y + odd * turns[i].x;
            }
        }
    }
    if (row < Q) { /* attention works in base 2 */
        const float q_scale = rsqrtf((float)P::head_dim) * 1.4426950408889634f;
        bf16 *q = c.buffer<bf16>(t.q) + (u64)token * Q + row;
#pragma unroll
        for (int i = 0; i < PART / 2; i++) {
            const int n = i / 2 * 8 + i % 2, at = i / 2 * 4 + i % 2;
            const float by = P::qk_norm ? scale[i] * q_scale : q_scale;
            if (token + n < c.k.tokens) *(u32 *)(q + n * Q) = bf16_pair(v[at] * by, v[at + 2] * by);
        }
        return;
    }
    const int layers = t.sliding ? P::sliding_layers : P::full_layers, head = (row - Q) % KV / P::head_dim;
    u8 *pool = (u8 *)(t.sliding ? c.p.kv_sliding : c.p.kv_full);
    pool += ((u64)t.kv_layer * P::kv_heads + head) * (2 * HALF_PAGE);
    const u64 page_bytes = (u64)layers * P::kv_heads * (2 * HALF_PAGE);
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        const int n = i / 2 * 8 + i % 2, at = i / 2 * 4 + i % 2;
        const int2 place = about[n + 2 * c.t()];
        u32 pair = bf16_pair(v[at], v[at + 2]);
        /* a step rounds k before its norm, then again */
        if (P::qk_norm && row < Q + KV) pair = bf16_pair(bf16_low(pair) * scale[i], bf16_high(pair) * scale[i]);
        if (token + n < c.k.tokens) append(pool + place.y * page_bytes, place.x % NMK_PAGE_TOKENS, row, d, pair);
    }
}

//@reference
/* Dims in the order of a step's q and k (ops/qkv.cu): in halves 2j and 2j + 1 are a head's dims j and j + head_dim / 2.
 * Rounded as there, k twice where it has a norm; q is divided by its rms here. */
const int q_rows = P.heads * P.head_dim, k_rows = P.kv_heads * P.head_dim, rows = q_rows + 2 * k_rows;
const int slabs = (rows - t.first_row + SLAB - 1) / SLAB, blocks = (vm->chunk->tokens + BLOCK - 1) / BLOCK;
const int half = P.head_dim / 2, step = P.rope_halves ? half : 1;
const float q_scale = (float)(1.4426950408889634 / sqrt(P.head_dim));
const uint16_t *bias = (const uint16_t *)(const void *)(vm->weights + (size_t)t.bias_kib * 1024);
const uint16_t *gammas = (const uint16_t *)(const void *)(vm->weights + (size_t)t.gamma_kib * 1024);
const int32_t *places = buffer(vm, t.places);
uint16_t place[P.hidden], x[P.hidden];
if (sm->id < slabs * blocks) find_places(place, P.hidden);
for (int unit = sm->id; unit < slabs * blocks; unit += NMK_SMS)
    for (int n = unit / slabs * BLOCK; n < (unit / slabs + 1) * BLOCK && n < vm->chunk->tokens; n++) {
        const int first = t.first_row + unit % slabs * SLAB, end = first + SLAB < rows ? first + SLAB : rows;
        const int pos = places[2 * n], slot = places[2 * n + 1];
        operand_row(x, buffer(vm, t.xn), (size_t)n, P.hidden, place);
        for (int row = first; row < end; row += P.head_dim) {
            const int is_v = row >= q_rows + k_rows, is_k = !is_v && row >= q_rows;
            const uint16_t *gamma = gammas + (is_k ? P.head_dim : 0);
            float v[HEAD_DIM], squares = 0, scale = 1;
            for (int i = 0; i < P.head_dim; i++) {
                v[i] = dot(weight_row(vm, t.weight_kib, 0, 0, P.hidden, row + i), x, P.hidden);
                if (P.qkv_bias) v[i] += bf16_value(bias[row + i]);
                squares += v[i] * v[i];
            }
            if (P.qk_norm && !is_v) scale = 1 / sqrtf(squares / (float)P.head_dim + P.eps);
            uint16_t *kv = NULL, *q = (uint16_t *)buffer(vm, t.q) + (size_t)n * q_rows + row;
            if (is_k || is_v)
                kv = page_row(vm, slot, pos, t.sliding, t.sliding ? P.sliding_layers : P.full_layers, t.kv_layer,
                              P.kv_heads, (row - q_rows - is_v * k_rows) / P.head_dim, is_v);
            for (int i = 0; i < P.head_dim && is_v; i++) kv[i] = bf16_round(v[i]);
            for (int j = 0; j < half && !is_v; j++) {
                const int a = P.rope_halves ? j : 2 * j, b = a + step;
                const float *turn = vm->rope + (size_t)pos * (size_t)P.head_dim + 2 * j;
                float even = v[a], odd = v[b];
                if (P.qk_norm) even *= bf16_value(gamma[a]), odd *= bf16_value(gamma[b]);
                if (t.rope) {
                    const float e = even * turn[0] - odd * turn[1], o = even * turn[1] + odd * turn[0];
                    even = e, odd = o;
                }
                if (!is_k) {
                    q[2 * j] = bf16_round(even * q_scale * scale), q[2 * j + 1] = bf16_round(odd * q_scale * scale);
                    continue;
                }
                kv[2 * j] = bf16_round(even), kv[2 * j + 1] = bf16_round(odd);
                if (!P.qk_norm) continue;
                kv[2 * j] = bf16_round(bf16_value(kv[2 * j]) * scale);
                kv[2 * j + 1] = bf16_round(bf16_value(kv[2 * j + 1]) * scale);
            }
        }
    }
