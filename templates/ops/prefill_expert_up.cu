/*@op
  name    = "prefill_expert_up",
  summary = "h = silu(gate * xn) * (up * xn) * router weight, for every expert's own tokens, pair by pair",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"hidden", "i32"}, {"experts", "i32"}, {"experts_per_token", "i32"}, {"expert_ff", "i32"} },
  tile    = "every",
  task    = { {"weight_kib", "i32"} },
  reads   = { {"xn_pairs", "bf16", role = "load", lo = "0", hi = "1"},
              {"first", "i32", role = "load", lo = "0", hi = "1"},
              {"pair", "i32", role = "load", lo = "0", hi = "1"},
              {"weight", "f32", role = "compute", lo = "0", hi = "1"} },
  writes  = { {"h", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device load
DEVICE Product product(const Context &c, const Task &t)
{
    return {c.weights(t.weight_kib), c.buffer<u8>(t.xn_pairs), stages_of(P::hidden), P::expert_ff / 8, P::experts,
            c.buffer<int>(t.first)};
}

/* The pair's weight. */
DEVICE int2 about(const ChunkLoader &c, const Task &t, int n)
{
    const int pair = __ldcg(c.buffer<int>(t.pair) + n);
    return make_int2(pair < 0 ? 0 : __ldcg(c.buffer<int>(t.weight) + pair), 0);
}

//@device compute
DEVICE Output output(const ChunkConsumer &c, const Task &t)
{
    return {c.buffer<u8>(t.h), P::expert_ff, true, nullptr};
}

//@reference
const int slabs = (P.expert_ff + BLOCK - 1) / BLOCK;
const int32_t *firsts = buffer(vm, t.first), *pairs = buffer(vm, t.pair);
const float *weights = buffer(vm, t.weight);
uint16_t place[P.hidden], x[P.hidden], place_h[P.expert_ff], *h = buffer(vm, t.h);
find_places(place, P.hidden), find_places(place_h, P.expert_ff);
for (int unit = sm->id; unit < P.experts * slabs; unit += NMK_SMS) {
    const int e = unit / slabs, row0 = unit % slabs * BLOCK;
    for (int i = firsts[e]; i < firsts[e + 1] && pairs[i] >= 0; i++) {
        operand_row(x, buffer(vm, t.xn_pairs), (size_t)i, P.hidden, place);
        for (int row = row0; row < row0 + BLOCK && row < P.expert_ff; row++) {
            const uint16_t *gate = weight_row(vm, t.weight_kib, e, 2 * P.expert_ff, P.hidden, row);
            const uint16_t *up = weight_row(vm, t.weight_kib, e, 2 * P.expert_ff, P.hidden, P.expert_ff + row);
            const float v = silu(dot(gate, x, P.hidden)) * dot(up, x, P.hidden);
            h[operand_at(P.expert_ff, (size_t)i, place_h[row])] = bf16_round(v * weights[pairs[i]]);
        }
    }
}
