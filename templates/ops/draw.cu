/*@op
  name    = "draw",
  summary = "of the SM's tokens: the best perturbed score of those kept; the most likely, for log-probabilities",
  optional = true,
  idle    = true,
  params  = { {"vocab", "i32"}, {"vocab_rows", "i32"} },
  tile    = "spread",
  task    = { {"tile", "i32"}, {"tiles", "i32"} },
  reads   = { {"cand", "f32", role = "help", lo = "0", hi = "sms"},
              {"scores", "f32", role = "help", lo = "0", hi = "vocab_rows//16"},
              {"raw_logits", "f32", role = "help", lo = "tile", hi = "tile+tiles"},
              {"cuts", "u64", role = "help", lo = "0", hi = "7*columns"},
              {"cutoff", role = "help", scope = "sm"}, {"control", role = "help", launch = "older"} },
  writes  = { {"drawn", "f32", role = "help", lo = "sm", hi = "sm+1"},
              {"tops", "f32", role = "help", lo = "sm", hi = "sm+1"} },
  cost    = "0",
@*/
//@device help
/* Of the share of the column that the SM cuts. */
DEVICE void draw_share(Helper &c, const Task &t, const Share &mine)
{
    const int n = mine.column;
    const bool k = c.wants(n, NMK_COLUMN_CUTS_K), p = c.wants(n, NMK_COLUMN_CUTS_P);
    if (!k && !p) c.begin_cut(n, c.buffer<float>(t.cand));
    else c.narrow(c.buffer<u64>(t.cuts) + ((p ? 6 : 3) * NMK_COLUMNS + n) * 256, 0), c.end_cut();
    const Cut cut = c.s.cut;
    const nmk_column *column = c.column(n);
    const nmk_noise key = nmk_noise_key(__ldcg(&column->seed_lo), __ldcg(&column->seed_hi), c.s.pos[n]);
    const float *scores = c.buffer<float>(t.scores) + n * P::vocab_rows + mine.first;
    float best = -INFINITY;
    int id = 0x7fffffff;
    c.scan<2>(scores, mine.count, [&](bool inside, int i, float score) {
        const int token = mine.first + i;
        if (inside && nmk_score_key(cut.best, score) <= cut.limit)
            keep_better(best, id, score + gumbel(key, token), token);
    });
    warp_best(best, id, 1);
    float *value = c.buffer<float>(t.drawn);
    if (c.lane == 0) value[blockIdx.x] = best, ((int *)value)[NMK_SMS + blockIdx.x] = id;
}

/* drawn: a value for each SM, then as many ids.  tops, of a column: the NMK_TOPS largest logits of each SM, as many
 * ids, and for each SM the sum of exponentials relative to its largest logit. */
DEVICE void help(Helper &c, const Task &t)
{
    const int first = t.tile * 16, count = t.tiles * 16;
    Share mine;
    if (c.share(P::vocab_rows, mine)) draw_share(c, t, mine);
#pragma unroll 1
    for (int n = 0; n < NMK_COLUMNS; n++) {
        if (c.wants(n, NMK_COLUMN_LOGPROBS)) {
            Tops tops = {-INFINITY, 0x7fffffff};
            const float *logits = c.buffer<float>(t.raw_logits) + n * P::vocab_rows + first;
            c.scan<1>(logits, count, [&](bool inside, int i, float logit) {
                tops.offer(inside ? logit : -INFINITY, inside ? first + i : 0x7fffffff);
            });
            const float most = __shfl_sync(~0u, tops.value, 0);
            float sum = 0;
            c.scan<4>(logits, count, [&](bool inside, int, float logit) {
                if (inside) sum += exp_fast(logit - most);
            });
            sum = warp_sum(sum);
            float *to = c.buffer<float>(t.tops) + n * (NMK_SMS * (2 * NMK_TOPS + 1));
            const int first_top = blockIdx.x * NMK_TOPS + c.lane;
            if (c.lane < NMK_TOPS) to[first_top] = tops.value, ((int *)to)[NMK_SMS * NMK_TOPS + first_top] = tops.id;
            if (c.lane == 0) to[NMK_SMS * 2 * NMK_TOPS + blockIdx.x] = sum;
        }
    }
}

//@reference
struct share mine;
if (share(vm, sm->id, P.vocab_rows, &mine)) {
    const struct nmk_column *c = &vm->control->column[mine.column];
    const int k = c->flags & NMK_COLUMN_CUTS_K, p = c->flags & NMK_COLUMN_CUTS_P, n = mine.column;
    const float *score = (const float *)buffer(vm, t.scores) + (size_t)n * P.vocab_rows;
    const nmk_noise key = nmk_noise_key(c->seed_lo, c->seed_hi, c->pos);
    const uint64_t *bins = (const uint64_t *)buffer(vm, t.cuts) + ((p ? 6 : 3) * NMK_COLUMNS + n) * 256;
    struct candidate best = {-INFINITY, INT32_MAX};
    struct cut *cut = &sm->cut;
    if (!k && !p) begin_cut(cut, c, buffer(vm, t.cand), n);
    else narrow(cut, bins, 0), end_cut(cut);
    for (int i = mine.first; i < mine.first + mine.count && i < P.vocab; i++)
        if (nmk_score_key(cut->best, score[i]) <= cut->limit) better(&best, score[i] + noise(key, i), i);
    float *value = buffer(vm, t.drawn);
    value[sm->id] = best.value, ((int32_t *)value)[NMK_SMS + sm->id] = best.id;
}
for (int n = 0; n < NMK_COLUMNS; n++) {
    const struct nmk_column *c = &vm->control->column[n];
    const int first = t.tile * 16, past = first + t.tiles * 16, end = past < P.vocab ? past : P.vocab;
    if (active(vm, n) && c->flags & NMK_COLUMN_LOGPROBS) {
        const float *logit = (const float *)buffer(vm, t.raw_logits) + (size_t)n * P.vocab_rows;
        struct candidate top[NMK_TOPS];
        float *to = (float *)buffer(vm, t.tops) + n * NMK_SMS * (2 * NMK_TOPS + 1), sum = 0;
        int32_t *ids = (int32_t *)to + NMK_SMS * NMK_TOPS;
        no_tops(top);
        for (int i = first; i < end; i++) offer(top, logit[i], i);
        for (int i = first; i < end; i++) sum += expf(logit[i] - top[0].value);
        for (int i = 0; i < NMK_TOPS; i++)
            to[sm->id * NMK_TOPS + i] = top[i].value, ids[sm->id * NMK_TOPS + i] = top[i].id;
        to[NMK_SMS * 2 * NMK_TOPS + sm->id] = sum;
    }
}
