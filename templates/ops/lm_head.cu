/*@op
  name     = "lm_head",
  summary  = "best (score, id) per column over the SM's rows of the embedding, perturbed or not; scores for who asks",
  pipeline = "gemm_x",
  params   = { {"hidden", "i32"}, {"vocab", "i32"}, {"vocab_rows", "i32"}, {"logit_scale", "f32"} },
  points   = { {"final_logits", "f32"} },
  tile     = "spread",
  idle     = true, -- every SM offers a candidate, be it none
  task     = { {"tile", "i32"}, {"tiles", "i32"}, {"weight_kib", "i32"} },
  reads    = { {"xn", "bf16", role = "compute", scope = "sm", wide = { lo = "0", hi = "columns" }},
               {"control", role = "store", launch = "older"} },
  writes   = { {"cand", "f32", role = "store", lo = "sm", hi = "sm+1"},
               {"scores", "f32", role = "store", lo = "tile", hi = "tile+tiles"},
               {"raw_logits", "f32", role = "store", lo = "tile", hi = "tile+tiles"} },
  cost     = "tiles*32*hidden",
@*/
//@device store
/* A logit after bias and penalties. */
DEVICE float adjusted(const Storer &c, const nmk_column &n, int slot, int token, float logit)
{
    if (P::vocab < P::vocab_rows) token = min(token, P::vocab - 1);
    const uint2 a = __ldcg((const uint2 *)c.p.adjust + (u64)slot * P::vocab + token);
    return nmk_adjusted(logit, __uint_as_float(a.x), a.y, n.presence, n.frequency, n.repetition);
}

/* Whether the column has a mask for this step, which the host gives while the step runs. */
DEVICE bool masked(const Storer &c, int column) { return c.live(column) && c.s.flags[column] & NMK_COLUMN_MASKED; }

/* Waits for the masks of this step, as long as for another SM, and copies the part of this SM's tokens to where reading
 * is fast.  SMs that share words write the same there. */
DEVICE void take_masks(Storer &c, const Task &t)
{
    const u32 *until = (const u32 *)c.p.masks_until + blockIdx.x * NMK_MASK_FLAGS;
    u32 start = 0, n = 0;
#pragma unroll 1
    for (;;) {
        bool missing = false;
#pragma unroll 1
        for (int i = c.lane; i < NMK_COLUMNS; i += 32)
            missing |= masked(c, i) && (int)(load_acquire_system(until + i) - (u32)c.p.epoch) < 0;
        if (!__any_sync(~0u, missing) || !c.patient(n, start)) break;
    }
    const int first = t.tile / 8, end = (t.tile + t.tiles + 7) / 8; /* in 16 bytes, of 8 tiles each */
#pragma unroll 1
    for (int n = 0; n < NMK_COLUMNS; n++) {
        if (!masked(c, n)) continue;
#pragma unroll 1
        for (int i = n * (NMK_MASK_WORDS / 4) + first + c.lane; i < n * (NMK_MASK_WORDS / 4) + end; i += 32)
            __stcg((uint4 *)c.p.masks_taken + i, __ldcv((const uint4 *)c.p.masks + i));
    }
    __syncwarp();
}

/* Bits of a tile's 16 tokens. */
DEVICE u32 tile_mask(const Storer &c, int column, int tile)
{
    return __ldcg((const u16 *)c.p.masks_taken + column * (NMK_MASK_WORDS * 2) + tile);
}

/* What of a column leaves the SM: its best candidate, for those that are cut the score of every token (draw perturbs
 * what is left of them), for log-probabilities every logit. */
#ifdef NMK_WIDE
/* Columns are too many for registers: what is known of them is in shared memory. */
DEVICE void store(Storer &c, const Task &t)
{
    const nmk_control *control = (const nmk_control *)c.p.control;
    Offers &o = c.s.offers;
#pragma unroll 1
    for (int n = c.lane; n < PLACES; n += 32) o.best[c.index][n] = -INFINITY, o.id[c.index][n] = 0x7fffffff;
    __syncwarp();
    bool masks = false;
#pragma unroll 1
    for (int n = c.lane; n < NMK_COLUMNS; n += 32) masks |= masked(c, n);
    if (masks = __any_sync(~0u, masks)) take_masks(c, t);
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < t.tiles; c.next_job(at)) {
        if (!c.mine()) continue;
        float v[4];
        const int first = (t.tile + at.row) * 16 + c.g(), n0 = c.column(at);
        u32 allowed[2] = {0, 0};
        if (masks) { /* on their way while the job is */
#pragma unroll
            for (int j = 0; j < 2; j++) allowed[j] = tile_mask(c, min(n0 + j, NMK_COLUMNS - 1), t.tile + at.row);
        }
        c.wait_job();
        c.take(v);
#pragma unroll 1
        for (int j = 0; j < 2; j++) {
            const int n = n0 + j, flags = c.live(n) ? c.s.flags[n] : 0;
            const float heat = o.heat[n];
            const nmk_noise key = o.key[n];
            float best = -INFINITY;
            int id = 0x7fffffff;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int token = first + 8 * k;
                float score = at_final_logits((k ? j ? v[3] : v[2] : j ? v[1] : v[0]) * P::logit_scale);
                if (P::vocab < P::vocab_rows && token >= P::vocab) score = -INFINITY; /* pads the last tile */
                const int place = n * P::vocab_rows + token;
                if (flags & NMK_COLUMN_MASKED && !((j ? allowed[1] : allowed[0]) >> (c.g() + 8 * k) & 1))
                    score = NMK_MASKED_LOGIT;
                if (flags & NMK_COLUMN_LOGPROBS) c.buffer<float>(t.raw_logits)[place] = score;
                if (flags & NMK_COLUMN_ADJUSTS) score = adjusted(c, control->column[n], c.s.table_row[n], token, score);
                if (heat > 0) score = __fdividef(score, heat);
                if (flags & NMK_COLUMN_FILTERS) c.buffer<float>(t.scores)[place] = score;
                else if (heat > 0) score += gumbel(key, token);
                keep_better(best, id, score, token);
            }
            warp_best(best, id, 4);
            if (c.g() == 0 && beats(best, id, o.best[c.index][n], o.id[c.index][n]))
                o.best[c.index][n] = best, o.id[c.index][n] = id;
        }
    }
    __syncwarp();
    const int rows = NMK_SMS * WARPS_STORE, row = blockIdx.x * WARPS_STORE + c.index;
    float *value = c.buffer<float>(t.cand);
    int *which = (int *)(value + rows * NMK_COLUMNS);
#pragma unroll 1
    for (int n = c.lane; n < NMK_COLUMNS; n += 32)
        value[row * NMK_COLUMNS + n] = o.best[c.index][n], which[row * NMK_COLUMNS + n] = o.id[c.index][n];
}
#else
DEVICE void store(Storer &c, const Task &t)
{
    const nmk_control *control = (const nmk_control *)c.p.control;
    float best[2] = {-INFINITY, -INFINITY}, heat[2] = {0, 0};
    int id[2] = {0x7fffffff, 0x7fffffff}, flags = 0; /* of both columns, 16 bits each: a register more would spill */
    nmk_noise key[2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const nmk_column *n = &control->column[2 * c.t() + j];
        if (!c.live(2 * c.t() + j)) continue;
        flags |= c.s.flags[2 * c.t() + j] << 16 * j;
        heat[j] = __ldcg(&n->temperature);
        key[j] = nmk_noise_key(__ldcg(&n->seed_lo), __ldcg(&n->seed_hi), c.s.pos[2 * c.t() + j]);
    }
    const bool masks = __any_sync(~0u, flags & NMK_COLUMN_MASKED * 0x10001);
    if (masks) take_masks(c, t);
#pragma unroll 1
    for (int i = 0; i < t.tiles; i++, c.job++) {
        if (!c.mine()) continue;
        float v[4];
        u32 allowed[2] = {0, 0};
        if (masks) { /* on their way while the job is */
#pragma unroll
            for (int j = 0; j < 2; j++) allowed[j] = tile_mask(c, min(2 * c.t() + j, NMK_COLUMNS - 1), t.tile + i);
        }
        c.wait_job();
        c.take(v);
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = at_final_logits(v[k] * P::logit_scale);
        if (P::vocab < P::vocab_rows) { /* rows that pad the last tile are no tokens */
#pragma unroll
            for (int k = 0; k < 4; k++)
                if ((t.tile + i) * 16 + c.g() + 8 * (k >> 1) >= P::vocab) v[k] = -INFINITY;
        }
        if (flags & (NMK_COLUMN_LOGPROBS | NMK_COLUMN_ADJUSTS | NMK_COLUMN_MASKED) * 0x10001) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int token = (t.tile + i) * 16 + c.g() + 8 * (k >> 1), n = 2 * c.t() + (k & 1);
                const int asked = flags >> 16 * (k & 1);
                if (asked & NMK_COLUMN_MASKED && !(allowed[k & 1] >> (c.g() + 8 * (k >> 1)) & 1))
                    v[k] = NMK_MASKED_LOGIT;
                if (asked & NMK_COLUMN_LOGPROBS) c.buffer<float>(t.raw_logits)[n * P::vocab_rows + token] = v[k];
                if (asked & NMK_COLUMN_ADJUSTS)
                    v[k] = adjusted(c, control->column[n], c.s.table_row[n], token, v[k]);
            }
        }
        /* one copy of the noise: the four values in turn */
#pragma unroll 1
        for (int k = 0; k < 4; k++) {
            const int token = (t.tile + i) * 16 + c.g() + 8 * (k >> 1);
            float score = k == 0 ? v[0] : k == 1 ? v[1] : k == 2 ? v[2] : v[3];
            const float h = k & 1 ? heat[1] : heat[0];
            if (h > 0) score = __fdividef(score, h);
            if (flags >> 16 * (k & 1) & NMK_COLUMN_FILTERS)
                c.buffer<float>(t.scores)[(2 * c.t() + (k & 1)) * P::vocab_rows + token] = score;
            else if (h > 0) score += gumbel(k & 1 ? key[1] : key[0], token);
            if (k & 1) keep_better(best[1], id[1], score, token);
            else keep_better(best[0], id[0], score, token);
        }
    }
    const int rows = NMK_SMS * WARPS_STORE, row = blockIdx.x * WARPS_STORE + c.index;
    float *value = c.buffer<float>(t.cand);
    int *which = (int *)(value + rows * NMK_COLUMNS);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        warp_best(best[j], id[j], 4);
        const int n = 2 * c.t() + j, at = row * NMK_COLUMNS + n;
        if (c.g() == 0 && c.stored(n)) value[at] = best[j], which[at] = id[j];
    }
}
#endif

//@reference
float *value = buffer(vm, t.cand);
int32_t *id = (int32_t *)(value + NMK_SMS * 2 * NMK_COLUMNS);
for (int n = 0; n < NMK_COLUMNS; n++) {
    const struct nmk_column *c = &vm->control->column[n];
    const nmk_noise key = nmk_noise_key(c->seed_lo, c->seed_hi, c->pos);
    struct candidate best = {-INFINITY, INT32_MAX};
    const uint32_t *mask = vm->masks + (size_t)n * NMK_MASK_WORDS;
    if (active(vm, n) && c->flags & NMK_COLUMN_MASKED && !mask_given(vm, n))
        return fail(sm, "no mask was given for column %d", n);
    for (int row = t.tile * 16; row < (t.tile + t.tiles) * 16 && row < P.vocab; row++) {
        if (!active(vm, n) || !(c->flags & NMK_COLUMN_SAMPLES)) break;
        const size_t at = (size_t)n * P.vocab_rows + (size_t)row;
        float v = TIMES_X(weight_row(vm, t.weight_kib, 0, 0, P.hidden, row), n);
        v = at_final_logits(v * P.logit_scale);
        if (c->flags & NMK_COLUMN_MASKED && !(mask[row / 32] >> row % 32 & 1)) v = NMK_MASKED_LOGIT;
        if (c->flags & NMK_COLUMN_LOGPROBS) ((float *)buffer(vm, t.raw_logits))[at] = v;
        if (c->flags & NMK_COLUMN_ADJUSTS) {
            const struct nmk_adjust *a = &vm->adjust[(size_t)c->slot * P.vocab + (size_t)row];
            v = nmk_adjusted(v, a->bias, a->seen, c->presence, c->frequency, c->repetition);
        }
        if (c->temperature > 0) v = v / c->temperature;
        if (c->flags & NMK_COLUMN_FILTERS) ((float *)buffer(vm, t.scores))[at] = v;
        else if (c->temperature > 0) v += noise(key, row);
        better(&best, v, row);
    }
    const int at = sm->id * 2 * NMK_COLUMNS + n; /* two rows an SM, one for each of the device's storer warps */
    value[at] = best.value, id[at] = best.id;
    value[at + NMK_COLUMNS] = -INFINITY, id[at + NMK_COLUMNS] = INT32_MAX;
}
