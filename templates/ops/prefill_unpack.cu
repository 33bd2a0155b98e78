/*@op
  name    = "prefill_unpack",
  summary = "keys and values of all positions that the chunk's tokens see, from their pages, as attention takes them",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"kv_heads", "i32"}, {"head_dim", "i32"}, {"window", "i32"}, {"full_layers", "i32"},
              {"sliding_layers", "i32"} },
  tile    = "every",
  task    = { {"sliding", "i32"}, {"kv_layer", "i32"} },
  reads   = { {"pages", "bf16", role = "compute", lo = "0", hi = "1"} },
  writes  = { {"keys", "bf16", role = "compute", claim = true}, {"values", "bf16", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device compute
DEVICE void compute(Consumer &c, const Task &t) {}

//@reference
/* Whole tiles of keys.  Of pages that are not held all becomes zeros; of a page that is, what is still to come stays in
 * K, whose scores are masked, and becomes zeros in V: that is multiplied. */
uint16_t *keys = buffer(vm, t.keys), *values = buffer(vm, t.values);
const int layers = t.sliding ? P.sliding_layers : P.full_layers;
const uint16_t zeros[HEAD_DIM] = {0};
int unit = 0;
for (int i = 0; i < vm->chunk->spans; i++) {
    const struct seen s = seen_by(vm->chunk, i, t.sliding, P.window);
    for (int u = 0; u < s.tiles * P.kv_heads; u++) {
        const int head = u % P.kv_heads, tile = u / P.kv_heads;
        if (unit++ % NMK_SMS != sm->id) continue;
        for (int j = tile * KEY_TILE; j < (tile + 1) * KEY_TILE; j++) {
            const int pos = s.low + j, held = pos / PAGE * PAGE < s.end && pos / PAGE >= s.lo / PAGE;
            const uint16_t *k = zeros, *v = zeros;
            if (held) k = page_row(vm, s.slot, pos, t.sliding, layers, t.kv_layer, P.kv_heads, head, 0);
            if (held && pos < s.end) v = page_row(vm, s.slot, pos, t.sliding, layers, t.kv_layer, P.kv_heads, head, 1);
            for (int d8 = 0; d8 < P.head_dim; d8 += 8)
                memcpy(keys + key_at(head, s.base + j, d8), k + d8, 16);
            for (int dim = 0; dim < P.head_dim; dim++) values[value_at(head, s.base + j, dim)] = v[dim];
        }
    }
}
