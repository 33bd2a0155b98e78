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
DEVICE void load(Loader &c, const Task &t) {}

//@device compute
DEVICE void compute(Consumer &c, const Task &t) {}

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
