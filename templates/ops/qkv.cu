/*@op
  name     = "qkv",
  summary  = "q, k, v = xn * Wqkv, rope on q and k where the layer has it, k and v appended to their page",
  pipeline = "gemm_x",
  eased    = true, -- releases that the whole machine waits for (the residual, logits, q k v) stand behind these loads
  params   = { {"hidden", "i32"}, {"heads", "i32"}, {"kv_heads", "i32"}, {"head_dim", "i32"},
               {"full_layers", "i32"}, {"sliding_layers", "i32"} },
  tile     = "spread",
  task     = { {"tile", "i32"}, {"tiles", "i32"}, {"weight_kib", "i32"}, {"rope", "i32"}, {"sliding", "i32"},
               {"kv_layer", "i32"} },
  reads    = { {"xn", "bf16", role = "compute", scope = "sm"}, {"control", role = "store", launch = "older"} },
  writes   = { {"qkv", "bf16", role = "store", lo = "tile*16", hi = "(tile+tiles)*16"},
               {"kv", role = "store", launch = "later"} },
  cost     = "tiles*32*hidden",
@*/
//@device store
constexpr int Q = P::heads * P::head_dim, KV = P::kv_heads * P::head_dim, ROWS = Q + 2 * KV;
constexpr int HALF_PAGE = NMK_PAGE_TOKENS * P::head_dim * 2; /* bytes of K, then of V, of one kv head */

DEVICE void store(Storer &c, const Task &t)
{
#pragma unroll 1
    for (int i = 0; i < t.tiles; i++, c.job++) {
        if (!c.mine()) continue;
        /* the tile's rows are paired (2i, 2i+1) on MMA rows g and g+8: a rope pair is lane-local */
        const int row = (t.tile + i) * 16 + 2 * c.g(), d = row % P::head_dim, n0 = 2 * c.t();
        float2 turn[2] = {{1.f, 0.f}, {1.f, 0.f}};
        int page[2] = {0, 0};
        const int *table = (const int *)(t.sliding ? c.p.table_sliding : c.p.table_full);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (!c.live(n0 + j)) continue;
            const int pos = c.s.pos[n0 + j];
            const float2 *rope = (const float2 *)c.p.rope + (u64)pos * (P::head_dim / 2);
            const int *pages = table + (u64)c.s.table_row[n0 + j] * c.p.table_stride;
            if (t.rope && row < Q + KV) turn[j] = __ldg(rope + d / 2);
            if (row >= Q) page[j] = __ldg(pages + pos / NMK_PAGE_TOKENS);
        }
        float v[4];
        c.wait_job();
        c.take(v);
        /* attention works in base 2 */
        const float scale = row < Q ? rsqrtf((float)P::head_dim) * 1.4426950408889634f : 1.f;
        u32 pair[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float even = v[j] * turn[j].x - v[2 + j] * turn[j].y, odd = v[j] * turn[j].y + v[2 + j] * turn[j].x;
            pair[j] = bf16_pair(even * scale, odd * scale);
            if (c.live(n0 + j)) *(u32 *)(c.buffer<bf16>(t.qkv) + (n0 + j) * ROWS + row) = pair[j];
        }
        if (row < Q) continue;
        /* append to the page, in the order that attention streams it; read by later launches only */
        const int head = (row - Q) % KV / P::head_dim;
        const int layers = t.sliding ? P::sliding_layers : P::full_layers;
        u8 *pool = (u8 *)(t.sliding ? c.p.kv_sliding : c.p.kv_full);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (!c.live(n0 + j)) continue;
            const int token = c.s.pos[n0 + j] % NMK_PAGE_TOKENS, tile = token >> 4, r = token & 15;
            u8 *half = pool + (((u64)page[j] * layers + t.kv_layer) * P::kv_heads + head) * (2 * HALF_PAGE);
            if (row < Q + KV) { /* K: tokens are rows */
                const int k_tile = d / 32 * 2 + (d >> 2 & 1), of_lane = ((r & 7) * 4 + (d >> 3 & 3)) * 16;
                *(u32 *)(half + (tile * 8 + k_tile) * 512 + of_lane + (d & 2) * 4 + (r >> 3) * 4) = pair[j];
            } else { /* V: dims are rows */
#pragma unroll
                for (int z = 0; z < 2; z++) {
                    const int m = (d + z) & 15;
                    u8 *v_tile = half + HALF_PAGE + (tile * 8 + d / 16) * 512 + ((m & 7) * 4 + ((r & 7) >> 1)) * 16;
                    *(u16 *)(v_tile + (r >> 3) * 8 + (m >> 3) * 4 + (r & 1) * 2) = (u16)(z ? pair[j] >> 16 : pair[j]);
                }
            }
        }
    }
}

//@reference
/* Rows in pairs: 2j and 2j + 1 of a head turn together. */
const int q_rows = P.heads * P.head_dim, k_rows = P.kv_heads * P.head_dim, width = q_rows + 2 * k_rows;
const float q_scale = (float)(1.4426950408889634 / sqrt(P.head_dim));
uint16_t *qkv = buffer(vm, t.qkv);
for (int row = t.tile * 16; row < (t.tile + t.tiles) * 16; row += 2) {
    const uint16_t *w = weight_row(vm, t.weight_kib, 0, 0, P.hidden, row);
    const int dim = row % P.head_dim;
    for (int n = 0; n < NMK_COLUMNS; n++) {
        const struct nmk_column *c = &vm->control->column[n];
        if (!active(vm, n)) continue;
        float even = dot(w, sm->xn[n], P.hidden), odd = dot(w + P.hidden, sm->xn[n], P.hidden);
        if (t.rope && row < q_rows + k_rows) {
            const float *turn = vm->rope + (size_t)c->pos * (size_t)P.head_dim + dim;
            const float e = even * turn[0] - odd * turn[1], o = even * turn[1] + odd * turn[0];
            even = e, odd = o;
        }
        if (row < q_rows) even *= q_scale, odd *= q_scale;
        const uint16_t a = bf16_round(even), b = bf16_round(odd);
        qkv[n * width + row] = a, qkv[n * width + row + 1] = b;
        if (row < q_rows) continue;
        const int is_v = row >= q_rows + k_rows, head = (row - q_rows - is_v * k_rows) / P.head_dim;
        uint16_t *page = kv_page(vm, c, c->pos, t.sliding, t.sliding ? P.sliding_layers : P.full_layers, t.kv_layer,
                                 P.kv_heads, head);
        page += (is_v * PAGE + c->pos % PAGE) * P.head_dim + dim;
        page[0] = a, page[1] = b;
    }
}
