/*@op
  name    = "prefill_router",
  summary = "logits = xn * Wrouter, f32",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"hidden", "i32"}, {"experts", "i32"} },
  tile    = "every",
  task    = { {"weight_kib", "i32"} },
  reads   = { {"xn", "bf16", role = "load", lo = "0", hi = "1"} },
  writes  = { {"logits", "f32", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device load
DEVICE Product product(const Context &c, const Task &t)
{
    return {c.weights(t.weight_kib), c.buffer<u8>(t.xn), stages_of(P::hidden), (P::experts + 15) / 16, 0, nullptr};
}

DEVICE int2 about(const ChunkLoader &, const Task &, int) { return make_int2(0, 0); }

//@device compute
DEVICE void store(ChunkConsumer &c, const Task &t, const Unit &u, int first, Part &v, About)
{
    constexpr int ROW_TILES = (P::experts + 15) / 16;
    const int row_tile = u.slab * SLAB_TILES + c.warp, token = u.block * BLOCK_TOKENS + first + 2 * c.t();
    if (row_tile >= ROW_TILES) return;
    float *to = c.buffer<float>(t.logits) + (u64)token * (ROW_TILES * 16) + row_tile * 16 + c.g();
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
        const int n = i / 2 * 8 + i % 2, at = i / 2 * 4 + i % 2;
        if (token + n >= c.k.tokens) continue;
        to[n * (ROW_TILES * 16)] = v[at], to[n * (ROW_TILES * 16) + 8] = v[at + 2];
    }
}

//@reference
const int rows = (P.experts + 15) / 16 * 16, blocks = (vm->chunk->tokens + BLOCK - 1) / BLOCK;
uint16_t place[P.hidden], x[P.hidden];
if (sm->id < blocks) find_places(place, P.hidden);
for (int block = sm->id; block < blocks; block += NMK_SMS)
    for (int n = block * BLOCK; n < (block + 1) * BLOCK && n < vm->chunk->tokens; n++) {
        float *logits = (float *)buffer(vm, t.logits) + (size_t)n * rows;
        operand_row(x, buffer(vm, t.xn), (size_t)n, P.hidden, place);
        for (int e = 0; e < rows; e++)
            logits[e] = dot(weight_row(vm, t.weight_kib, 0, 0, P.hidden, e), x, P.hidden);
    }
