/*@op
  name    = "combine",
  summary = "attn = the chunks' partials of each head, merged in chunk order",
  params  = { {"heads", "i32"}, {"kv_heads", "i32"}, {"head_dim", "i32"}, {"part_slots", "i32"} },
  tile    = "cyclic",
  task    = { {"first", "i32"}, {"step", "i32"}, {"end", "i32"}, {"sliding", "i32"} },
  reads   = { {"part", "f32", role = "help", lo = "0", hi = "part_slots"} },
  writes  = { {"attn", "bf16", role = "help", lo = "first", hi = "end", step = "step"} },
  cost    = "0",
@*/
//@device help
static_assert(NMK_CHUNKS_MAX <= MAX_PARTS, "combine holds all partials of a head at once");

/* A unit is (column, kv head, 8 of the 256 float4 of a partial): 2 heads x 2 dims a lane, lane group p takes partials
 * p, p+4, ... */
DEVICE void help(Helper &c, const Task &t)
{
    const Shared &s = c.s;
    const int kind = t.sliding, lane = c.lane, p = lane >> 3, d4 = lane & 7, head = 2 * (d4 & 3);
    const float *part = c.buffer<float>(t.part), *part_ml = part + (u64)P::part_slots * 1024;
    bf16 *attn = c.buffer<bf16>(t.attn);
#pragma unroll 1
    for (int u = t.first; u < t.end; u += t.step) {
        const int n = u / (P::kv_heads * 32), kv_head = u / 32 % P::kv_heads, i8 = u % 32, chunks = s.chunks[kind][n];
        if (chunks == 0) continue;
        const int slot = s.chunk0[kind][n] + kv_head * chunks + p;
        const float *from = part + (u64)slot * 1024 + i8 * 32 + d4 * 4, *ml = part_ml + (u64)slot * 16 + head;
        constexpr int EACH = (NMK_CHUNKS_MAX + 3) / 4;
        float2 m[EACH], l[EACH];
        float4 v[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            m[j] = make_float2(-1e30f, -1e30f), l[j] = make_float2(0, 0), v[j] = make_float4(0, 0, 0, 0);
            if (p + 4 * j < chunks) {
                m[j] = __ldcg((const float2 *)(ml + j * 64)), l[j] = __ldcg((const float2 *)(ml + j * 64 + 8));
                v[j] = __ldcg((const float4 *)(from + j * 4096));
            }
        }
        float2 top = m[0], sum = make_float2(0, 0);
        float4 o = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 1; j < EACH; j++) top.x = fmaxf(top.x, m[j].x), top.y = fmaxf(top.y, m[j].y);
#pragma unroll
        for (int k = 8; k <= 16; k <<= 1) {
            top.x = fmaxf(top.x, __shfl_xor_sync(~0u, top.x, k));
            top.y = fmaxf(top.y, __shfl_xor_sync(~0u, top.y, k));
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const float a = exp2_fast(m[j].x - top.x), b = exp2_fast(m[j].y - top.y);
            sum.x += l[j].x * a, sum.y += l[j].y * b;
            o.x += v[j].x * a, o.y += v[j].y * b, o.z += v[j].z * a, o.w += v[j].w * b;
        }
#pragma unroll
        for (int k = 8; k <= 16; k <<= 1) {
            sum.x += __shfl_xor_sync(~0u, sum.x, k), sum.y += __shfl_xor_sync(~0u, sum.y, k);
            o.x += __shfl_xor_sync(~0u, o.x, k), o.y += __shfl_xor_sync(~0u, o.y, k);
            o.z += __shfl_xor_sync(~0u, o.z, k), o.w += __shfl_xor_sync(~0u, o.w, k);
        }
        const float ra = 1.f / sum.x, rb = 1.f / sum.y;
        o.x *= ra, o.z *= ra, o.y *= rb, o.w *= rb;
        /* lanes d4 and d4+4 hold dims g and g+1 (g even): one keeps the low half of the tile, the other dims + 8 */
        const bool high = d4 >= 4;
        const float xa = __shfl_xor_sync(~0u, high ? o.x : o.z, 4), xb = __shfl_xor_sync(~0u, high ? o.y : o.w, 4);
        const u32 a = high ? bf16_pair(xa, o.z) : bf16_pair(o.x, xa);
        const u32 b = high ? bf16_pair(xb, o.w) : bf16_pair(o.y, xb);
        if (p == 0) {
            const int dim = i8 / 4 * 16 + i8 % 4 * 2 + (high ? 8 : 0);
            bf16 *to = attn + (n * P::heads + kv_head * 8 + head) * P::head_dim + dim;
            *(u32 *)to = a, *(u32 *)(to + P::head_dim) = b;
        }
    }
}

//@reference
/* A unit is 8 of a slot's 256 quadruples of one (column, kv head): 2 dims by 2 heads each. */
const float *part = buffer(vm, t.part), *part_ml = part + (size_t)P.part_slots * SLOT_FLOATS;
uint16_t *attn = buffer(vm, t.attn);
int start[NMK_COLUMNS], count[NMK_COLUMNS], slot = 0;
for (int n = 0; n < NMK_COLUMNS; n++) {
    start[n] = slot, count[n] = 0;
    if (active(vm, n)) count[n] = chunks_of(&vm->control->column[n], t.sliding, NMK_WINDOW).count;
    slot += P.kv_heads * count[n];
}
for (int u = t.first; u < t.end; u += t.step) {
    const int n = u / (P.kv_heads * 32), kv_head = u / 32 % P.kv_heads;
    if (n >= NMK_COLUMNS || !active(vm, n)) continue;
    for (int i = u % 32 * 32; i < u % 32 * 32 + 32; i++) { /* i: float within the slot, see attention */
        const int lane = i / 4 % 32, head = lane % 4 * 2 + i % 2, dim = i / 128 * 16 + lane / 4 + i % 4 / 2 * 8;
        const int slot0 = start[n] + kv_head * count[n];
        float top = -1e30f, sum = 0, o = 0;
        for (int s = slot0; s < slot0 + count[n]; s++)
            if (part_ml[s * 16 + head] > top) top = part_ml[s * 16 + head];
        for (int s = slot0; s < slot0 + count[n]; s++) {
            const float scale = exp2f(part_ml[s * 16 + head] - top);
            sum += part_ml[s * 16 + 8 + head] * scale, o += part[(size_t)s * SLOT_FLOATS + i] * scale;
        }
        attn[(n * P.heads + kv_head * GROUP + head) * HEAD_DIM + dim] = bf16_round(o / sum);
    }
}
