/*@op
  name    = "prefill_expert_up",
  summary = "h = silu(gate * xn) * (up * xn) * router weight, for every expert's own tokens, pair by pair",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"hidden", "i32"}, {"experts", "i32"}, {"experts_per_token", "i32"}, {"expert_ff", "i32"} },
  tile    = "every",
  task    = { {"weight_kib", "i32"} },
  reads   = { {"xn_rows", "bf16", role = "load", lo = "0", hi = "1"},
              {"first", "i32", role = "load", lo = "0", hi = "1"},
              {"pair", "i32", role = "load", lo = "0", hi = "1"},
              {"weight", "f32", role = "compute", lo = "0", hi = "1"} },
  writes  = { {"h", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device load
DEVICE Product product(const Context &c, const Task &t)
{
    return {c.weights(t.weight_kib), c.buffer<u8>(t.xn_rows), stages_of(P::hidden), P::expert_ff / 8, P::experts, true,
            c.buffer<int>(t.first)};
}

/* The pair's weight, and its token. */
DEVICE int2 about(const ChunkLoader &c, const Task &t, int n)
{
    const int pair = __ldcg(c.buffer<int>(t.pair) + n);
    if (pair < 0) return make_int2(0, -1);
    return make_int2(__ldcg(c.buffer<int>(t.weight) + pair), pair / P::experts_per_token);
}

//@device compute
DEVICE Gated gated(const ChunkConsumer &c, const Task &t) { return {c.buffer<u8>(t.h), P::expert_ff}; }

//@reference
const int slabs = (P.expert_ff + BLOCK - 1) / BLOCK, padded = nmk_packed_cols(P.hidden);
const int32_t *firsts = buffer(vm, t.first), *pairs = buffer(vm, t.pair);
const float *weights = buffer(vm, t.weight);
uint16_t place[P.hidden], x[P.hidden], place_h[P.expert_ff], *h = buffer(vm, t.h);
find_places(place, P.hidden), find_places(place_h, P.expert_ff);
for (int unit = sm->id; unit < P.experts * slabs; unit += NMK_SMS) {
    const int e = unit / slabs, row0 = unit % slabs * BLOCK;
    for (int i = firsts[e]; i < firsts[e + 1] && pairs[i] >= 0; i++) {
        const uint16_t *rows = buffer(vm, t.xn_rows);
        for (int k = 0; k < P.hidden; k++) x[k] = rows[(size_t)(pairs[i] / P.experts_per_token) * padded + place[k]];
        for (int row = row0; row < row0 + BLOCK && row < P.expert_ff; row++) {
            const uint16_t *gate = weight_row(vm, t.weight_kib, e, 2 * P.expert_ff, P.hidden, row);
            const uint16_t *up = weight_row(vm, t.weight_kib, e, 2 * P.expert_ff, P.hidden, P.expert_ff + row);
            const float v = silu(dot(gate, x, P.hidden)) * dot(up, x, P.hidden);
            h[operand_at(P.expert_ff, (size_t)i, place_h[row])] = bf16_round(v * weights[pairs[i]]);
        }
    }
}
