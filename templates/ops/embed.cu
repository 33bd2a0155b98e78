/*@op
  name    = "embed",
  summary = "x = E[token]: gather the rows of the packed embedding, bf16 to f32",
  params  = { {"hidden", "i32"} },
  tile    = "owner",
  task    = { {"tile", "i32"}, {"weight_kib", "i32"} },
  reads   = { {"control", role = "store", launch = "older"} },
  writes  = { {"x", "f32", role = "store", lo = "tile*16", hi = "tile*16+16", posts = true} },
  cost    = "16*2*columns",
@*/
//@device store
DEVICE void store(Storer &c, const Task &t)
{
    typedef Packed<P::hidden> L;
    const nmk_control *control = (const nmk_control *)c.p.control;
    /* of each tile of columns a storer takes four, eight lanes a column, a pair of rows of x a lane */
#pragma unroll 1
    for (int first = 0; first < PLACES; first += TILE_COLUMNS) {
        const int column = first + c.index * 4 + (c.lane >> 3), k = t.tile * 16 + (c.lane & 7) * 2;
        u32 pair = 0;
        if (c.live(column)) {
            const int token = __ldcg(&control->column[column].token);
            const u8 *row_tile = c.weights(t.weight_kib) + (u64)(token >> 4) * L::tile_bytes;
            pair = __ldg((const u32 *)(row_tile + L::pair_offset(token & 15, k)));
        }
        if constexpr (POSTED) {
            float *to = c.exchange<float>(t.x) + column * P::hidden + k;
            if (!c.stored(column)) return;
            c.post(to, bf16_low(pair)), c.post(to + 1, bf16_high(pair));
            c.clear(to), c.clear(to + 1);
        } else {
            float2 *to = (float2 *)(c.buffer<float>(t.x) + column * P::hidden + k);
            if (c.stored(column)) *to = make_float2(bf16_low(pair), bf16_high(pair));
        }
    }
}

//@reference
float *x = buffer(vm, t.x);
for (int n = 0; n < NMK_COLUMNS; n++) {
    const struct nmk_column *c = &vm->control->column[n];
    const uint16_t *e = active(vm, n) ? weight_row(vm, t.weight_kib, 0, 0, P.hidden, c->token) : NULL;
    for (int i = t.tile * 16; i < t.tile * 16 + 16; i++) x[n * P.hidden + i] = e ? bf16_value(e[i]) : 0;
}
