/*@op
  name     = "expert_up",
  summary  = "h = silu(gate * xn) * (up * xn) * router weight, for the active experts",
  pipeline = "gemm_x",
  claim    = "queue",
  params   = { {"hidden", "i32"}, {"experts", "i32"}, {"experts_per_token", "i32"}, {"expert_ff", "i32"},
               {"claim_up", "i32"} },
  tile     = "every",
  task     = { {"weight_kib", "i32"}, {"ticket", "i32"}, {"rank", "i32"} },
  reads    = { {"xn", "bf16", role = "compute", scope = "sm", wide = { lo = "0", hi = "columns" }},
               {"route", role = "load", scope = "sm"}, {"route", role = "compute", scope = "sm"},
               {"route", role = "store", scope = "sm", returns = true} },
  writes   = { {"h", "bf16", role = "store", claim = true, posts = true} },
  cost     = "0",
@*/
//@device load
constexpr int CHUNKS = P::expert_ff / 8; /* row tiles of one expert: 8 gate and 8 up rows */

/* Row tiles that this SM has by number. */
DEVICE int dealt(int all, const Task &t) { return nmk_claim_rounds(P::claim_up, all, t.rank); }

DEVICE void load(Loader &c, const Task &t)
{
    typedef PackedX L;
    const int instance = c.desc()[7], b = instance & 1;
    const u8 *from = c.weights(t.weight_kib);
    u32 *ticket = (u32 *)c.p.tickets + (t.ticket * 2 + (c.p.epoch & 1)) * 32;
    int chunk = t.rank;
    c.wait_route(instance);
    const int all = c.s.active[b] * CHUNKS, fixed = dealt(all, t) * NMK_SMS;
#pragma unroll 1
    for (;;) {
        if (P::claim_up != NMK_CLAIM_STATIC && chunk >= fixed) chunk = fixed + (int)atomicAdd(ticket, 1u);
        if (chunk >= all) break;
        const u64 tile = (u64)c.s.expert[b][chunk / CHUNKS] * CHUNKS + chunk % CHUNKS;
        c.stream(from + tile * L::tile_bytes, L::stages, L::stage_bytes, chunk);
        chunk = P::claim_up != NMK_CLAIM_STATIC && chunk >= fixed ? fixed : chunk + NMK_SMS;
    }
    c.push_end();
}

//@device compute
/* Row tiles dealt by number; the claimed ones follow, and in any case the producer's end mark. */
DEVICE int compute(Consumer &c, const Task &t)
{
    const int instance = c.desc()[7];
    c.wait_route(instance);
    return dealt(c.s.active[instance & 1] * CHUNKS, t);
}

//@device store
#ifdef NMK_WIDE
/* A job is a tile of the columns that chose the expert; h has a row for each pair of column and expert. */
DEVICE void store(Storer &c, const Task &t)
{
    const int instance = c.desc()[7];
    c.wait_route(instance);
    const Routes &r = c.s.routes[instance & 1];
    bf16 *h = c.buffer<bf16>(t.h);
#pragma unroll 1
    for (; !c.gone(); c.job++) {
        if (!c.mine()) continue;
        c.wait_job();
        const int tag = c.s.job_tag[c.job % TAGS];
        if (tag < 0) { /* the two end marks: -1 for whoever's turn it is, then -2 */
            c.free_job(tag);
            c.job += tag == -1 ? WARPS_STORE : 1;
            break;
        }
        float v[4];
        c.take(v);
        const int chunk = tag / COLUMN_TILES, slot = chunk / CHUNKS, row = chunk % CHUNKS * 8 + c.g();
        const int first = r.first[slot] + tag % COLUMN_TILES * TILE_COLUMNS + 2 * c.t(), end = r.first[slot + 1];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (first + j >= end) continue;
            const float silu = v[j] / (1.f + __expf(-v[j]));
            h[(first + j) * P::expert_ff + row] = (bf16)bf16_pair(silu * v[2 + j] * r.weight[first + j], 0.f);
        }
    }
}
#else
/* Which rows of h a step writes is a matter of its columns alone, but who does is not: each SM clears its share. */
DEVICE void clear_share(Storer &c, const bf16 *h)
{
    constexpr int VECTORS = NMK_COLUMNS * P::experts_per_token * P::expert_ff / 8;
#pragma unroll 1
    for (int i = (blockIdx.x * WARPS_STORE + c.index) * 32 + c.lane; i < VECTORS; i += NMK_SMS * WARPS_STORE * 32)
        store_words((void *)c.other_copy(h + i * 8), make_uint4(ABSENT, ABSENT, ABSENT, ABSENT));
}

DEVICE void store(Storer &c, const Task &t)
{
    const int instance = c.desc()[7], b = instance & 1;
    bf16 *h = c.exchange<bf16>(t.h);
    if constexpr (POSTED) clear_share(c, h);
    c.wait_route(instance);
    const int fixed = dealt(c.s.active[b] * CHUNKS, t);
#pragma unroll 1
    for (int i = 0; !c.gone(); i++, c.job++) {
        if (!c.mine()) continue;
        int chunk = t.rank + i * NMK_SMS;
        c.wait_job();
        if (i >= fixed) chunk = c.s.job_tag[c.job % TAGS];
        /* in a step that is lost the tag may be that of another op's job, of attention's where that claims */
        if (NMK_SEGMENTS_CLAIMED && c.gone()) chunk = -1;
        if (chunk < 0) { /* the two end marks: -1 for whoever's turn it is, then -2 */
            c.free_job(chunk);
            c.job += chunk == -1 ? WARPS_STORE : 1;
            break;
        }
        float v[4];
        c.take(v);
        const int slot = chunk / CHUNKS, row = chunk % CHUNKS * 8 + c.g();
        if constexpr (POSTED) {
            /* a word is two rows, of this lane and the next row's: one lane has it of column 2t, the other of 2t + 1 */
            const int odd = c.g() & 1, n = 2 * c.t() + odd;
            const float *weight = c.s.weight[b] + slot * 8 + 2 * c.t();
#pragma unroll
            for (int j = 0; j < 2; j++) v[j] = v[j] / (1.f + __expf(-v[j])) * v[2 + j] * weight[j];
            const float got = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 4);
            u32 *to = (u32 *)(h + c.row_of_h<P::experts_per_token>(b, slot, n) * P::expert_ff + row - odd);
            if (weight[odd] != 0.f) c.post(to, odd ? bf16_pair(got, v[1]) : bf16_pair(v[0], got));
        } else {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int n = 2 * c.t() + j;
                const float weight = c.s.weight[b][slot * 8 + n];
                if (weight == 0.f) continue;
                const float silu = v[j] / (1.f + __expf(-v[j]));
                h[(slot * NMK_COLUMNS + n) * P::expert_ff + row] = (bf16)bf16_pair(silu * v[2 + j] * weight, 0.f);
            }
        }
    }
    if constexpr (POSTED) c.arrive(&c.s.route_free[b]);
}
#endif

//@reference
const struct vm_route *r = route_of(sm, d);
uint16_t *h = buffer(vm, t.h);
if (!r) return -1;
int chunk;
const int more = claim(vm, sm, d, t.ticket, P.claim_up, t.rank, r->active * (P.expert_ff / 8), &chunk);
if (chunk < 0) return more;
const int slot = chunk / (P.expert_ff / 8), row0 = chunk % (P.expert_ff / 8) * 8, e = r->expert[slot];
for (int row = row0; row < row0 + 8; row++) {
    const uint16_t *gate = weight_row(vm, t.weight_kib, e, 2 * P.expert_ff, P.hidden, row);
    const uint16_t *up = weight_row(vm, t.weight_kib, e, 2 * P.expert_ff, P.hidden, P.expert_ff + row);
    for (int n = 0; n < NMK_COLUMNS; n++) {
        if (r->weight[slot][n] == 0) continue;
        const float v = silu(TIMES_X(gate, n)) * TIMES_X(up, n);
        h[r->row[slot][n] * P.expert_ff + row] = bf16_round(v * r->weight[slot][n]);
    }
}
return more;
