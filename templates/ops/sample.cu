/*@op
  name    = "sample",
  summary = "token = best candidate of all SMs; moves the column to its next position or ends it",
  params  = { {"vocab", "i32"} },
  tile    = "columns",
  task    = { {"column", "i32"} },
  reads   = { {"cand", "f32", role = "help", lo = "0", hi = "sms"} },
  writes  = { {"control", role = "help", launch = "later"} },
  cost    = "0",
@*/
//@device help
DEVICE void help(Helper &c, const Task &t)
{
    const int rows = NMK_SMS * WARPS_STORE, n = t.column;
    int *out = (int *)c.p.out + (u64)c.p.out_row * NMK_COLUMNS + n;
    const float *value = c.buffer<float>(t.cand);
    const int *which = (const int *)(value + rows * NMK_COLUMNS);
    float best = -INFINITY;
    int id = 0x7fffffff;
    auto keep = [&](float v, int i) {
        if (v > best || (v == best && i < id)) best = v, id = i;
    };
#pragma unroll 1
    for (int r = c.lane; r < rows; r += 32)
        keep(__ldcg(value + r * NMK_COLUMNS + n), __ldcg(which + r * NMK_COLUMNS + n));
#pragma unroll
    for (int s = 1; s <= 16; s <<= 1) keep(__shfl_xor_sync(~0u, best, s), __shfl_xor_sync(~0u, id, s));
    nmk_control *control = (nmk_control *)c.p.control;
    nmk_column *column = &control->column[n];
    const bool sampled = c.live(n) && (__ldcg(&column->flags) & 1);
    if (sampled && (u32)id >= (u32)P::vocab) id = 0; /* every logit was NaN */
    bool stop = false;
    const int stops = __ldcg(&control->stop_count);
    if (c.lane < stops) stop = __ldcg(&control->stop_ids[c.lane]) == id;
    stop = __any_sync(~0u, stop);
    if (c.lane != 0) return;
    /* below -1: nothing of this step counts, somebody gave up a wait */
    *out = load_relaxed((const u32 *)c.p.abort) ? -2 : sampled ? id : -1;
    if (!sampled) return;
    const int remaining = __ldcg(&column->remaining) - 1, pos = c.s.pos[n] + 1;
    column->token = id;
    column->remaining = remaining;
    column->base = pos;
    column->pos = stop || remaining == 0 ? -1 : pos;
}

//@reference
const float *value = buffer(vm, t.cand);
const int32_t *id = (const int32_t *)(value + NMK_SMS * 2 * NMK_COLUMNS);
struct nmk_column *c = &vm->control->column[t.column];
struct candidate best = {-INFINITY, INT32_MAX};
if (!active(vm, t.column) || !(c->flags & 1)) return 0;
for (int i = 0; i < NMK_SMS * 2; i++) better(&best, value[i * NMK_COLUMNS + t.column], id[i * NMK_COLUMNS + t.column]);
if (best.id < 0 || best.id >= P.vocab) return fail(sm, "no logit of column %d is a number", t.column);
vm->out[t.column] = c->token = best.id;
c->base = ++c->pos;
c->remaining--;
int ends = c->remaining == 0;
for (int i = 0; i < vm->control->stop_count; i++) ends |= best.id == vm->control->stop_ids[i];
if (ends) c->pos = -1;
