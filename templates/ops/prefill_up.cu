/*@op
  name    = "prefill_up",
  summary = "dense_h = silu(gate * xn) * (up * xn)",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"hidden", "i32"}, {"dense_ff", "i32"} },
  tile    = "every",
  task    = { {"weight_kib", "i32"} },
  reads   = { {"xn", "bf16", role = "load", lo = "0", hi = "1"} },
  writes  = { {"dense_h", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device load
DEVICE Product product(const Context &c, const Task &t)
{
    return {c.weights(t.weight_kib), c.buffer<u8>(t.xn), stages_of(P::hidden), P::dense_ff / 8, 0, nullptr};
}

DEVICE int2 about(const ChunkLoader &, const Task &, int) { return make_int2(__float_as_int(1.f), 0); }

//@device compute
DEVICE Output output(const ChunkConsumer &c, const Task &t)
{
    return {c.buffer<u8>(t.dense_h), P::dense_ff, true, nullptr};
}

//@reference
const int slabs = (P.dense_ff + BLOCK - 1) / BLOCK, blocks = (vm->chunk->tokens + BLOCK - 1) / BLOCK;
uint16_t place[P.hidden], x[P.hidden], place_h[P.dense_ff], *h = buffer(vm, t.dense_h);
if (sm->id < slabs * blocks) find_places(place, P.hidden), find_places(place_h, P.dense_ff);
for (int unit = sm->id; unit < slabs * blocks; unit += NMK_SMS)
    for (int n = unit / slabs * BLOCK; n < (unit / slabs + 1) * BLOCK && n < vm->chunk->tokens; n++) {
        operand_row(x, buffer(vm, t.xn), (size_t)n, P.hidden, place);
        for (int row = unit % slabs * BLOCK; row < (unit % slabs + 1) * BLOCK && row < P.dense_ff; row++) {
            const float gate = dot(weight_row(vm, t.weight_kib, 0, 0, P.hidden, row), x, P.hidden);
            const float up = dot(weight_row(vm, t.weight_kib, 0, 0, P.hidden, P.dense_ff + row), x, P.hidden);
            h[operand_at(P.dense_ff, (size_t)n, place_h[row])] = bf16_round(silu(gate) * up);
        }
    }
