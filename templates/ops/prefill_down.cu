/*@op
  name    = "prefill_down",
  summary = "mlp = dense_h * Wdown",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"dense_ff", "i32"}, {"hidden", "i32"} },
  tile    = "every",
  task    = { {"weight_kib", "i32"} },
  reads   = { {"dense_h", "bf16", role = "load", lo = "0", hi = "1"} },
  writes  = { {"mlp", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device load
DEVICE Product product(const Context &c, const Task &t)
{
    return {c.weights(t.weight_kib), c.buffer<u8>(t.dense_h), stages_of(P::dense_ff), P::hidden / 16, 0, nullptr};
}

/* Row n of what comes out is the token's. */
DEVICE int2 about(const ChunkLoader &c, const Task &, int n) { return make_int2(n < c.k.tokens ? n : -1, 0); }

//@device compute
DEVICE Output output(const ChunkConsumer &c, const Task &t)
{
    return {c.buffer<u8>(t.mlp), P::hidden, false, nullptr};
}

//@reference
const int slabs = (P.hidden + SLAB - 1) / SLAB, blocks = (vm->chunk->tokens + BLOCK - 1) / BLOCK;
uint16_t place[P.dense_ff], h[P.dense_ff];
if (sm->id < slabs * blocks) find_places(place, P.dense_ff);
for (int unit = sm->id; unit < slabs * blocks; unit += NMK_SMS)
    for (int n = unit / slabs * BLOCK; n < (unit / slabs + 1) * BLOCK && n < vm->chunk->tokens; n++) {
        uint16_t *mlp = (uint16_t *)buffer(vm, t.mlp) + (size_t)n * P.hidden;
        operand_row(h, buffer(vm, t.dense_h), (size_t)n, P.dense_ff, place);
        for (int row = unit % slabs * SLAB; row < (unit % slabs + 1) * SLAB && row < P.hidden; row++)
            mlp[row] = bf16_round(dot(weight_row(vm, t.weight_kib, 0, 0, P.dense_ff, row), h, P.dense_ff));
    }
