/*@op
  name    = "prefill_expert_down",
  summary = "a row of mlp for each pair of a token and one of its experts: h * Wdown; the next norm adds them up",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"experts", "i32"}, {"expert_ff", "i32"}, {"hidden", "i32"} },
  tile    = "every",
  task    = { {"weight_kib", "i32"} },
  reads   = { {"h", "bf16", role = "load", lo = "0", hi = "1"}, {"first", "i32", role = "load", lo = "0", hi = "1"},
              {"pair", "i32", role = "compute", lo = "0", hi = "1"} },
  writes  = { {"mlp", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device load
DEVICE Product product(const Context &c, const Task &t)
{
    return {c.weights(t.weight_kib), c.buffer<u8>(t.h), stages_of(P::expert_ff), P::hidden / 16, P::experts,
            c.buffer<int>(t.first)};
}

/* The pair's row of what comes out. */
DEVICE int2 about(const ChunkLoader &c, const Task &t, int n)
{
    return make_int2(__ldcg(c.buffer<int>(t.pair) + n), 0);
}

//@device compute
DEVICE Output output(const ChunkConsumer &c, const Task &t)
{
    return {c.buffer<u8>(t.mlp), P::hidden, false, nullptr};
}

//@reference
/* A token's choices are in ascending order, so its rows are summed as a step sums them. */
const int slabs = (P.hidden + SLAB - 1) / SLAB;
const int32_t *firsts = buffer(vm, t.first), *pairs = buffer(vm, t.pair);
uint16_t place[P.expert_ff], h[P.expert_ff];
find_places(place, P.expert_ff);
for (int unit = sm->id; unit < P.experts * slabs; unit += NMK_SMS) {
    const int e = unit / slabs, row0 = unit % slabs * SLAB;
    for (int i = firsts[e]; i < firsts[e + 1] && pairs[i] >= 0; i++) {
        uint16_t *mlp = (uint16_t *)buffer(vm, t.mlp) + (size_t)pairs[i] * P.hidden;
        operand_row(h, buffer(vm, t.h), (size_t)i, P.expert_ff, place);
        for (int row = row0; row < row0 + SLAB && row < P.hidden; row++)
            mlp[row] = bf16_round(dot(weight_row(vm, t.weight_kib, e, P.hidden, P.expert_ff, row), h, P.expert_ff));
    }
}
