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
DEVICE void load(Loader &c, const Task &t) {}

//@device compute
DEVICE void compute(Consumer &c, const Task &t) {}

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
