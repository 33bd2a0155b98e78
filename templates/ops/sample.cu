/*@op
  name    = "sample",
  summary = "token = best candidate of all SMs; moves the column to its next position or ends it",
  params  = { {"vocab", "i32"}, {"vocab_rows", "i32"} },
  tile    = "columns",
  task    = { {"column", "i32"} },
  reads   = { {"cand", "f32", role = "help", lo = "0", hi = "sms"},
              {"drawn", "f32", role = "help", lo = "0", hi = "sms"},
              {"tops", "f32", role = "help", lo = "0", hi = "sms"},
              {"raw_logits", "f32", role = "help", lo = "0", hi = "vocab_rows//16"} },
  writes  = { {"control", role = "help", launch = "later"} },
  cost    = "0",
@*/
//@device help
/* Log-probabilities of the column's token and of the most likely ones, to the host. */
DEVICE void tell_logprobs(Helper &c, const Task &t, int id)
{
    constexpr int all = NMK_SMS * NMK_TOPS, round = 32 * ((NMK_SMS + 31) / 32);
    const float *value = c.buffer<float>(t.tops) + t.column * (NMK_SMS * (2 * NMK_TOPS + 1)), *sums = value + 2 * all;
    const float logit = __ldcg(c.buffer<float>(t.raw_logits) + t.column * P::vocab_rows + id);
    static_assert(all % 16 == 0, "scan takes multiples of 16");
    /* in the order of SMs, so of ids: among equals the first is the lower id */
    Tops tops = {-INFINITY, 0x7fffffff};
    c.scan<1>(value, all, [&](bool inside, int i, float v) {
        tops.offer(inside ? v : -INFINITY, inside ? i : 0x7fffffff);
    });
    const float most = __shfl_sync(~0u, tops.value, 0);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < round; i += 32) {
        const int sm = min(i + c.lane, NMK_SMS - 1);
        const float part = __ldcg(sums + sm) * exp_fast(__ldcg(value + sm * NMK_TOPS) - most);
        if (i + c.lane < NMK_SMS) sum += part;
    }
    const float norm = most + __logf(warp_sum(sum));
    nmk_tops *to = (nmk_tops *)c.p.tops + (u64)c.p.out_row * NMK_COLUMNS + t.column;
    if (c.lane == 0) to->chosen = logit - norm;
    if (c.lane >= NMK_TOPS || tops.id >= all) return;
    to->id[c.lane] = __ldcg((const int *)value + all + tops.id), to->logprob[c.lane] = tops.value - norm;
}

/* What earlier launches left, on its way before the candidates are there. */
struct Before {
    int stops, stop_id, remaining;
};
DEVICE Before before(Helper &c, const Task &t)
{
    const nmk_control *control = (const nmk_control *)c.p.control;
    return {__ldcg(&control->stop_count), __ldcg(&control->stop_ids[c.lane % NMK_STOP_IDS]),
            __ldcg(&control->column[t.column].remaining)};
}

DEVICE void help(Helper &c, const Task &t, const Before &b)
{
    const int n = t.column, flags = c.live(n) ? c.s.flags[n] : 0;
    const bool filtered = flags & NMK_COLUMN_FILTERS;
    /* of a column that is cut those SMs that cut it, see Helper::share */
    const int every = filtered ? count_bits(c.filters) : 1, turn = filtered ? count_bits(c.filters & below(n)) : 0;
    const int rows = filtered ? NMK_SMS : NMK_SMS * WARPS_STORE, width = filtered ? 1 : NMK_COLUMNS;
    int *out = (int *)c.p.out + (u64)c.p.out_row * NMK_COLUMNS + n;
    const float *value = filtered ? c.buffer<float>(t.drawn) : c.buffer<float>(t.cand) + n;
    const int *which = (const int *)(value + rows * width);
    float best = -INFINITY;
    int id = 0x7fffffff;
    const u32 lost = load_relaxed((const u32 *)c.p.abort); /* who gave up did so before it offered its candidate */
#pragma unroll
    for (int r = 0; r < NMK_SMS * WARPS_STORE; r += 32) { /* again the last one does no harm */
        const int at = min(turn + (r + c.lane) * every, (rows - 1 - turn) / every * every + turn) * width;
        keep_better(best, id, __ldcg(value + at), __ldcg(which + at));
    }
    warp_best(best, id, 1);
    nmk_column *column = &((nmk_control *)c.p.control)->column[n];
    const bool sampled = flags & NMK_COLUMN_SAMPLES, none = (u32)id >= (u32)P::vocab; /* none: every logit was NaN */
    if (flags & NMK_COLUMN_LOGPROBS && !none) tell_logprobs(c, t, id);
    if (flags & NMK_COLUMN_LOGPROBS) __threadfence_system(); /* the host takes them when it sees the token */
    __syncwarp();
    const bool stop = __any_sync(~0u, c.lane < b.stops && b.stop_id == id);
    if (c.lane != 0) return;
    if (n == 0) c.tell_time(1);
    /* below -1: nothing of this step counts, somebody gave up a wait */
    *out = lost ? -2 : sampled && !none ? id : -1;
    if (sampled && none) column->pos = -1;
    if (!sampled || none) return;
    if (flags & NMK_COLUMN_ADJUSTS) {
        u32 *seen = &((nmk_adjust *)c.p.adjust)[(u64)c.s.table_row[n] * P::vocab + id].seen;
        *seen = __ldcg(seen) + 1; /* from L2: another SM may have done so in the last step */
    }
    const int remaining = b.remaining - 1, pos = c.s.pos[n] + 1;
    column->token = id;
    column->remaining = remaining;
    column->base = pos;
    column->pos = stop || remaining == 0 ? -1 : pos;
}

//@reference
struct nmk_column *c = &vm->control->column[t.column];
struct candidate best = {-INFINITY, INT32_MAX};
if (!active(vm, t.column) || !(c->flags & NMK_COLUMN_SAMPLES)) return 0;
const int filtered = c->flags & NMK_COLUMN_FILTERS;
const float *value = filtered ? buffer(vm, t.drawn) : buffer(vm, t.cand);
const int32_t *id = (const int32_t *)value + (filtered ? NMK_SMS : NMK_SMS * 2 * NMK_COLUMNS);
struct share mine;
for (int i = 0; filtered && i < NMK_SMS; i++)
    if (share(vm, i, P.vocab_rows, &mine) && mine.column == t.column) better(&best, value[i], id[i]);
for (int i = t.column; !filtered && i < NMK_SMS * 2 * NMK_COLUMNS; i += NMK_COLUMNS) better(&best, value[i], id[i]);
if (best.id < 0 || best.id >= P.vocab) return fail(sm, "no logit of column %d is a number", t.column);
if (c->flags & NMK_COLUMN_LOGPROBS) {
    const float *tops = (const float *)buffer(vm, t.tops) + t.column * NMK_SMS * (2 * NMK_TOPS + 1);
    const float *logit = (const float *)buffer(vm, t.raw_logits) + (size_t)t.column * P.vocab_rows;
    const int32_t *ids = (const int32_t *)tops + NMK_SMS * NMK_TOPS;
    struct candidate top[NMK_TOPS];
    float sum = 0;
    no_tops(top);
    for (int i = 0; i < NMK_SMS * NMK_TOPS; i++) offer(top, tops[i], ids[i]);
    for (int i = 0; i < NMK_SMS; i++)
        sum += tops[NMK_SMS * 2 * NMK_TOPS + i] * expf(tops[i * NMK_TOPS] - top[0].value);
    struct nmk_tops *to = &vm->tops[t.column];
    to->chosen = logit[best.id] - top[0].value - logf(sum);
    for (int i = 0; i < NMK_TOPS; i++) to->id[i] = top[i].id, to->logprob[i] = top[i].value - top[0].value - logf(sum);
}
if (c->flags & NMK_COLUMN_ADJUSTS) vm->adjust[(size_t)c->slot * P.vocab + best.id].seen++;
vm->out[t.column] = c->token = best.id;
c->base = ++c->pos;
c->remaining--;
int ends = c->remaining == 0;
for (int i = 0; i < vm->control->stop_count; i++) ends |= best.id == vm->control->stop_ids[i];
if (ends) c->pos = -1;
