/*@op
  name     = "expert_up",
  summary  = "h = silu(gate * xn) * (up * xn) * router weight, for the active experts",
  pipeline = "gemm_x",
  claim    = "queue",
  params   = { {"hidden", "i32"}, {"experts", "i32"}, {"experts_per_token", "i32"}, {"expert_ff", "i32"},
               {"claim_up", "i32"}, {"guesses", "i32"} },
  tile     = "every",
  task     = { {"weight_kib", "i32"}, {"ticket", "i32"}, {"rank", "i32"} },
  reads    = { {"xn", "bf16", role = "compute", scope = "sm", wide = { lo = "0", hi = "columns" }},
               {"route", role = "load", scope = "sm"}, {"route", role = "compute", scope = "sm"},
               {"route", role = "store", scope = "sm", returns = true},
               {"guess", role = "load", scope = "sm", guessed = true},
               {"guess", role = "store", scope = "sm", guessed = true} },
  writes   = { {"h", "bf16", role = "store", claim = true, posts = true} },
  cost     = "0",
@*/
//@device load
constexpr int CHUNKS = P::expert_ff / 8; /* row tiles of one expert: 8 gate and 8 up rows */

/* Row tiles that this SM has by number. */
DEVICE int dealt(int all, const Task &t) { return nmk_claim_rounds(P::claim_up, all, t.rank); }

/* Whether row tiles are streamed by a guess: places in which experts are take the place of slots. */
DEVICE bool guesses(const Shared &s) { return P::guesses && s.only >= 0; }

/* Of a stage's or job's tag: the row tile is one of a guessed expert. */
constexpr int GUESSED = 1 << 24;

#if NMK_GUESSES
/* Row tiles by number, those of a place one after the other: as long as the route is not known the guessed expert's,
 * then the chosen one's.  No SM has to know how far others are, because a place has the expert that was guessed for it
 * if that is chosen; what was streamed by a wrong guess is streamed anew. */
DEVICE void load_guessed(Loader &c, const u8 *from, int rank, int instance)
{
    typedef PackedX L;
    const Guess &g = c.s.guess[instance & 1];
    constexpr int ALL = P::experts_per_token * CHUNKS;
    auto stream = [&](int expert, int chunk, int tag) {
        const u64 tile = (u64)expert * CHUNKS + chunk % CHUNKS;
        c.stream(from + tile * L::tile_bytes, L::stages, L::stage_bytes, tag);
    };
    c.wait(&c.s.guess_made[instance & 1], instance >> 1 & 1);
    int early = rank; /* the first that is not streamed by a guess */
#pragma unroll 1
    for (; early < ALL; early += NMK_SMS) {
        const int guess = g.expert[early / CHUNKS];
        if (guess < 0 || c.passed(&c.s.route_listed[instance & 1], instance >> 1 & 1)) break;
        stream(guess, early, GUESSED | early);
    }
    c.wait_route(instance);
#pragma unroll 1
    for (int chunk = rank; chunk < ALL; chunk += NMK_SMS) {
        const int expert = g.chosen[chunk / CHUNKS];
        if (chunk >= early || expert != g.expert[chunk / CHUNKS]) stream(expert, chunk, chunk);
    }
    c.push_end();
}
#endif

DEVICE void load(Loader &c, const Task &t)
{
    typedef PackedX L;
    const int instance = c.desc()[7], b = instance & 1;
    const u8 *from = c.weights(t.weight_kib);
    u32 *ticket = (u32 *)c.p.tickets + (t.ticket * 2 + (c.p.epoch & 1)) * 32;
    int chunk = t.rank;
#if NMK_GUESSES
    if (guesses(c.s)) {
        load_guessed(c, from, t.rank, instance);
        return;
    }
#endif
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
/* Row tiles dealt by number; the claimed ones follow, and in any case the producer's end mark.  Where experts are
 * guessed all have their numbers with them: consumers begin before the route is known. */
DEVICE int compute(Consumer &c, const Task &t)
{
    const int instance = c.desc()[7];
    if (guesses(c.s)) return 0;
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
    const int fixed = guesses(c.s) ? 0 : dealt(c.s.active[b] * CHUNKS, t);
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
#if NMK_GUESSES
        if (guesses(c.s)) {
            const Guess &g = c.s.guess[b];
            const int place = (chunk & ~GUESSED) / CHUNKS;
            if (chunk & GUESSED && g.expert[place] != g.chosen[place]) continue;
            chunk = g.slot[place] * CHUNKS + (chunk & ~GUESSED) % CHUNKS;
        }
#endif
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
