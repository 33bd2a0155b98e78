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
DEVICE void load(Loader &c, const Task &t) {}

//@device compute
DEVICE void compute(Consumer &c, const Task &t) {}

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
