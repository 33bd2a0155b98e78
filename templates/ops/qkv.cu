/*@op
  name     = "qkv",
  summary  = "q, k, v = xn * Wqkv + bias, gamma of their norm and rope on q and k, k and v appended to their page",
  pipeline = "gemm_x",
  eased    = true, -- releases that the whole machine waits for (the residual, logits, q k v) stand behind these loads
  params   = { {"hidden", "i32"}, {"heads", "i32"}, {"kv_heads", "i32"}, {"head_dim", "i32"},
               {"full_layers", "i32"}, {"sliding_layers", "i32"}, {"rope_halves", "i32"}, {"qk_norm", "i32"},
               {"qkv_bias", "i32"} },
  tile     = "spread",
  task     = { {"tile", "i32"}, {"tiles", "i32"}, {"weight_kib", "i32"}, {"rope", "i32"}, {"sliding", "i32"},
               {"kv_layer", "i32"}, {"bias_kib", "i32"}, {"gamma_kib", "i32"} },
  reads    = { {"xn", "bf16", role = "compute", scope = "sm", wide = { lo = "0", hi = "columns" }},
               {"control", role = "store", launch = "older"} },
  writes   = { {"qkv", "bf16", role = "store", lo = "tile*16", hi = "(tile+tiles)*16", posts = true},
               {"squares", "f32", role = "store", lo = "tile*qk_norm", hi = "(tile+tiles)*qk_norm",
                posts = true},
               {"kv", role = "store", launch = "later"} },
  cost     = "tiles*32*hidden",
@*/
//@device store
constexpr int Q = P::heads * P::head_dim, KV = P::kv_heads * P::head_dim, ROWS = Q + 2 * KV;
constexpr int HALF_PAGE = NMK_PAGE_TOKENS * P::head_dim * 2; /* bytes of K, then of V, of one kv head */
constexpr int DIM_TILES = P::head_dim / 16;

/* The natural row of a row pair's first or second row.  Pairs that turn together are the rows g and g+8 of an MMA tile,
 * so a pair is lane-local.  In halves, dims i and i + head_dim/2 turn together: q and k are then stored pair by pair,
 * here and in their pages, which no product notices; v goes to its own dims. */
DEVICE int natural(int row, int second)
{
    if constexpr (P::rope_halves) return row - row % P::head_dim / 2 + second * (P::head_dim / 2);
    return row + second;
}

/* Rounded once: q, with the factor of the scores, and k and v to bf16.  With qk_norm q and k are those before the
 * division by their rms, a factor of the head that commutes with the turn: attention divides, by what squares holds. */
DEVICE void store(Storer &c, const Task &t)
{
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < t.tiles; c.next_job(at)) {
        if (!c.mine()) continue;
        /* the tile's rows are pairs on MMA rows g and g+8 */
        const int row = (t.tile + at.row) * 16 + 2 * c.g(), d = row % P::head_dim, n0 = c.column(at);
        float2 turn[2] = {{1.f, 0.f}, {1.f, 0.f}};
        int page[2] = {0, 0};
        const int *table = (const int *)(t.sliding ? c.p.table_sliding : c.p.table_full);
        float bias[2] = {0, 0}, gamma[2] = {1, 1};
        if constexpr (P::qkv_bias) {
            const u16 *from = (const u16 *)c.weights(t.bias_kib);
            bias[0] = bf16_low(__ldg(from + natural(row, 0))), bias[1] = bf16_low(__ldg(from + natural(row, 1)));
        }
        if constexpr (P::qk_norm) {
            if (row < Q + KV) {
                const u16 *from = (const u16 *)c.weights(t.gamma_kib) + (row < Q ? 0 : P::head_dim);
                gamma[0] = bf16_low(__ldg(from + natural(d, 0))), gamma[1] = bf16_low(__ldg(from + natural(d, 1)));
            }
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (!c.live(n0 + j)) continue;
            const int pos = c.s.pos[n0 + j];
            const float2 *rope = (const float2 *)c.p.rope + (u64)pos * (P::head_dim / 2);
            const int *pages = table + (u64)c.s.table_row[n0 + j] * c.p.table_stride;
            if (t.rope && row < Q + KV) turn[j] = __ldg(rope + d / 2);
            if (row >= Q + P::qk_norm * KV) page[j] = __ldg(pages + pos / NMK_PAGE_TOKENS);
        }
        float v[4];
        if constexpr (POSTED) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if (!c.stored(n0 + j)) continue;
                if (P::rope_halves && row >= Q + KV) /* as below: the next row's lane has the word of the other half */
                    c.clear(c.exchange<bf16>(t.qkv) + (n0 + j) * ROWS + natural(row, c.g() & 1) - (c.g() & 1));
                else
                    c.clear(c.exchange<bf16>(t.qkv) + (n0 + j) * ROWS + row);
                if (P::qk_norm && c.g() == 0 && row < Q + KV)
                    c.clear(c.exchange<float>(t.squares) + (n0 + j) * (ROWS / 16) + t.tile + at.row);
            }
        }
        c.wait_job();
        c.take(v);
        if constexpr (P::qkv_bias) v[0] += bias[0], v[1] += bias[0], v[2] += bias[1], v[3] += bias[1];
        if constexpr (P::qk_norm) {
            if (row < Q + KV) {
                float squares[2];
                sum_squares(v, squares);
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (c.g() == 0 && c.live(n0 + j))
                        c.post(c.exchange<float>(t.squares) + (n0 + j) * (ROWS / 16) + t.tile + at.row, squares[j]);
                v[0] *= gamma[0], v[1] *= gamma[0], v[2] *= gamma[1], v[3] *= gamma[1];
            }
        }
        if (POSTED && row >= Q + KV) {
            /* A step that is lost may come to NaNs, and V stays in its page: times the 0 of a position that is not seen
             * yet it would still be one. */
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = fminf(fmaxf(v[j], -3e38f), 3e38f);
        }
        /* attention works in base 2 */
        const float scale = row < Q ? rsqrtf((float)P::head_dim) * 1.4426950408889634f : 1.f;
        u32 pair[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float even = v[j] * turn[j].x - v[2 + j] * turn[j].y, odd = v[j] * turn[j].y + v[2 + j] * turn[j].x;
            pair[j] = bf16_pair(even * scale, odd * scale);
            u32 word = pair[j];
            if (POSTED && P::rope_halves && row >= Q + KV) { /* a tile is all v or none */
                const u32 got = __shfl_xor_sync(~0u, pair[j], 4);
                word = c.g() & 1 ? __byte_perm(got, pair[j], 0x7632) : __byte_perm(pair[j], got, 0x5410);
            }
            if (!c.live(n0 + j)) continue;
            bf16 *to = c.exchange<bf16>(t.qkv) + (n0 + j) * ROWS;
            if (POSTED && P::rope_halves && row >= Q + KV)
                c.post((u32 *)(to + natural(row, c.g() & 1) - (c.g() & 1)), word);
            else if (P::rope_halves && row >= Q + KV)
                to[natural(row, 0)] = (bf16)pair[j], to[natural(row, 1)] = (bf16)(pair[j] >> 16);
            else
                c.post((u32 *)(to + row), word);
        }
        if (row < Q + P::qk_norm * KV) continue; /* with a norm attention appends k */
        /* append to the page, in the order that attention streams it; read by later launches only */
        const int head = (row - Q) % KV / P::head_dim;
        const int layers = t.sliding ? P::sliding_layers : P::full_layers;
        u8 *pool = (u8 *)(t.sliding ? c.p.kv_sliding : c.p.kv_full);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (!c.live(n0 + j)) continue;
            const int token = c.s.pos[n0 + j] % NMK_PAGE_TOKENS, tile = token >> 4, r = token & 15;
            u8 *half = pool + (((u64)page[j] * layers + t.kv_layer) * P::kv_heads + head) * (2 * HALF_PAGE);
            half += tile * DIM_TILES * 512;
            if (row < Q + KV) { /* K: tokens are rows */
                const int k_tile = d / 32 * 2 + (d >> 2 & 1), of_lane = ((r & 7) * 4 + (d >> 3 & 3)) * 16;
                *(u32 *)(half + k_tile * 512 + of_lane + (d & 2) * 4 + (r >> 3) * 4) = pair[j];
            } else { /* V: dims are rows */
#pragma unroll
                for (int z = 0; z < 2; z++) {
                    const int dim = natural(d, z), m = dim & 15;
                    u8 *v_tile = half + HALF_PAGE + dim / 16 * 512 + ((m & 7) * 4 + ((r & 7) >> 1)) * 16;
                    *(u16 *)(v_tile + (r >> 3) * 8 + (m >> 3) * 4 + (r & 1) * 2) = (u16)(z ? pair[j] >> 16 : pair[j]);
                }
            }
        }
    }
}

//@reference
/* Rows in the device's order: 2j and 2j + 1 of a head turn together: in halves its dims j and j + head_dim / 2. */
const int q_rows = P.heads * P.head_dim, k_rows = P.kv_heads * P.head_dim, width = q_rows + 2 * k_rows;
const float q_scale = (float)(1.4426950408889634 / sqrt(P.head_dim));
uint16_t *qkv = buffer(vm, t.qkv);
float *squares = buffer(vm, t.squares);
const uint16_t *bias = (const uint16_t *)(const void *)(vm->weights + (size_t)t.bias_kib * 1024);
const uint16_t *gammas = (const uint16_t *)(const void *)(vm->weights + (size_t)t.gamma_kib * 1024);
for (int row = t.tile * 16; row < (t.tile + t.tiles) * 16; row += 2) {
    const int dim = row % P.head_dim, is_v = row >= q_rows + k_rows;
    const int first = P.rope_halves ? row - dim + dim / 2 : row, second = first + (P.rope_halves ? P.head_dim / 2 : 1);
    const uint16_t *gamma = gammas + (row < q_rows ? 0 : P.head_dim) - (row - dim);
    for (int n = 0; n < NMK_COLUMNS; n++) {
        const struct nmk_column *c = &vm->control->column[n];
        if (!active(vm, n)) continue;
        float even = TIMES_X(weight_row(vm, t.weight_kib, 0, 0, P.hidden, first), n);
        float odd = TIMES_X(weight_row(vm, t.weight_kib, 0, 0, P.hidden, second), n);
        if (P.qkv_bias) even += bf16_value(bias[first]), odd += bf16_value(bias[second]);
        if (P.qk_norm && !is_v) { /* before the division by the rms, which attention makes up for */
            float *sum = &squares[n * (width / 16) + row / 16];
            *sum = (row % 16 ? *sum : 0) + even * even + odd * odd;
            even *= bf16_value(gamma[first]), odd *= bf16_value(gamma[second]);
        }
        if (t.rope && !is_v) {
            const float *turn = vm->rope + (size_t)c->pos * (size_t)P.head_dim + dim;
            const float e = even * turn[0] - odd * turn[1], o = even * turn[1] + odd * turn[0];
            even = e, odd = o;
        }
        if (row < q_rows) even *= q_scale, odd *= q_scale;
        const uint16_t a = bf16_round(even), b = bf16_round(odd);
        const int at = is_v ? first : row, at_b = is_v ? second : row + 1;
        qkv[n * width + at] = a, qkv[n * width + at_b] = b;
        if (row < q_rows || (P.qk_norm && !is_v)) continue;
        const int head = (row - q_rows - is_v * k_rows) / P.head_dim;
        uint16_t *page = kv_page(vm, c, c->pos, t.sliding, t.sliding ? P.sliding_layers : P.full_layers, t.kv_layer,
                                 P.kv_heads, head);
        page += (is_v * PAGE + c->pos % PAGE) * P.head_dim;
        page[at % P.head_dim] = a, page[at_b % P.head_dim] = b;
    }
}
