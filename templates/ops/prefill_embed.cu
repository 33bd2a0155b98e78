/*@op
  name    = "prefill_embed",
  summary = "x = E[token] of every token of the chunk; where each one stands: position, row of the page tables",
  launch  = "prefill",
  claim   = "chunk",
  params  = { {"hidden", "i32"} },
  tile    = "every",
  task    = { {"weight_kib", "i32"} },
  reads   = { {"chunk", role = "compute", launch = "older"} },
  writes  = { {"x", "f32", role = "compute", claim = true}, {"places", "i32", role = "compute", claim = true} },
  cost    = "0",
@*/
//@device compute
DEVICE void compute(Consumer &c, const Task &t) {}

//@reference
float *x = buffer(vm, t.x);
int32_t *places = buffer(vm, t.places);
for (int i = 0; i < vm->chunk->spans; i++) {
    const struct nmk_span *s = &vm->chunk->span[i];
    for (int n = s->first; n < s->first + s->count; n++) {
        if (n % NMK_SMS != sm->id) continue;
        const uint16_t *e = weight_row(vm, t.weight_kib, 0, 0, P.hidden, vm->chunk->token[n]);
        for (int k = 0; k < P.hidden; k++) x[(size_t)n * P.hidden + k] = bf16_value(e[k]);
        places[2 * n] = s->pos + n - s->first, places[2 * n + 1] = s->slot;
    }
}

//@test tolerance=0 says where every token stands
int32_t n = 0;
float *places = expect_f32(test, t.places);
for (int i = 0; i < test->chunk.spans; i++)
    for (int k = 0; k < test->chunk.span[i].count; k++, n++) {
        const int32_t place[2] = {test->chunk.span[i].pos + k, test->chunk.span[i].slot};
        memcpy(places + 2 * n, place, sizeof place); /* as bits: small whole numbers are numbers too */
    }
