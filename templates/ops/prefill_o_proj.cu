/*@op
  name    = "prefill_o_proj",
  summary = "o = attn * Wo + bias",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"q_width", "i32"}, {"hidden", "i32"}, {"o_bias", "i32"} },
  tile    = "every",
  task    = { {"weight_kib", "i32"}, {"bias_kib", "i32"} },
  reads   = { {"attn", "bf16", role = "load", lo = "0", hi = "1"} },
  writes  = { {"o", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device load
DEVICE Product product(const Context &c, const Task &t)
{
    return {c.weights(t.weight_kib), c.buffer<u8>(t.attn), stages_of(P::q_width), P::hidden / 16, 0, nullptr};
}

/* Row n of what comes out is the token's. */
DEVICE int2 about(const ChunkLoader &c, const Task &, int n) { return make_int2(n < c.k.tokens ? n : -1, 0); }

//@device compute
DEVICE Output output(const ChunkConsumer &c, const Task &t)
{
    return {c.buffer<u8>(t.o), P::hidden, false, P::o_bias ? (const u16 *)c.weights(t.bias_kib) : nullptr};
}

//@reference
const int slabs = (P.hidden + SLAB - 1) / SLAB, blocks = (vm->chunk->tokens + BLOCK - 1) / BLOCK;
const uint16_t *bias = (const uint16_t *)(const void *)(vm->weights + (size_t)t.bias_kib * 1024);
uint16_t place[P.q_width], x[P.q_width];
if (sm->id < slabs * blocks) find_places(place, P.q_width);
for (int unit = sm->id; unit < slabs * blocks; unit += NMK_SMS)
    for (int n = unit / slabs * BLOCK; n < (unit / slabs + 1) * BLOCK && n < vm->chunk->tokens; n++) {
        uint16_t *o = (uint16_t *)buffer(vm, t.o) + (size_t)n * P.hidden;
        operand_row(x, buffer(vm, t.attn), (size_t)n, P.q_width, place);
        for (int row = unit % slabs * SLAB; row < (unit % slabs + 1) * SLAB && row < P.hidden; row++) {
            const float v = dot(weight_row(vm, t.weight_kib, 0, 0, P.q_width, row), x, P.q_width);
            o[row] = bf16_round(P.o_bias ? v + bf16_value(bias[row]) : v);
        }
    }
