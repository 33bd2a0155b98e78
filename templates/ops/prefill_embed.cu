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
/* A warp a token: eight columns a lane, which lie in two tiles of the packed row. */
DEVICE void compute(ChunkConsumer &c, const Task &t)
{
    typedef Packed<P::hidden> L;
    const nmk_chunk *chunk = (const nmk_chunk *)c.p.control;
    const int spans = __ldcg(&chunk->spans);
    int lane = c.lane;
#pragma unroll 1
    for (int turn = 0;; turn++) {
        const int n = token_of(c, turn);
        if (turn * NMK_SMS * WARPS_COMPUTE >= c.k.tokens) break;
        if (n >= c.k.tokens) continue;
        asm volatile("" : "+r"(lane)); /* else all addresses are held */
#pragma unroll 1
        for (int i = lane; i < spans; i += 32) {
            const int4 span = __ldcg((const int4 *)(chunk->span + i)); /* first, count, pos, slot */
            if (n >= span.x && n < span.x + span.y)
                c.buffer<int2>(t.places)[n] = make_int2(span.z + n - span.x, span.w);
        }
        const int token = __ldcg(chunk->token + n);
        const u8 *row_tile = c.weights(t.weight_kib) + (u64)(token >> 4) * L::tile_bytes;
        float *x = c.buffer<float>(t.x) + (u64)n * P::hidden;
#pragma unroll 2
        for (int k = lane * 8; k < P::hidden; k += 256) {
            u32 pair[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                pair[j] = __ldg((const u32 *)(row_tile + L::pair_offset(token & 15, k + 2 * j)));
            *(float4 *)(x + k) =
                make_float4(bf16_low(pair[0]), bf16_high(pair[0]), bf16_low(pair[1]), bf16_high(pair[1]));
            *(float4 *)(x + k + 4) =
                make_float4(bf16_low(pair[2]), bf16_high(pair[2]), bf16_low(pair[3]), bf16_high(pair[3]));
        }
    }
}

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
