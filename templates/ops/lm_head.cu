/*@op
  name     = "lm_head",
  summary  = "best (logit or Gumbel-perturbed logit, id) per column over the SM's rows of the embedding",
  pipeline = "gemm_x",
  params   = { {"hidden", "i32"}, {"vocab", "i32"}, {"logit_scale", "f32"} },
  tile     = "spread",
  task     = { {"tile", "i32"}, {"tiles", "i32"}, {"weight_kib", "i32"} },
  reads    = { {"xn", "bf16", role = "compute", scope = "sm"}, {"control", role = "store", launch = "older"} },
  writes   = { {"cand", "f32", role = "store", lo = "sm", hi = "sm+1"} },
  cost     = "tiles*32*hidden",
@*/
//@device store
/* A candidate is better with a larger value; ties go to the lower id. */
DEVICE void keep_better(float &value, int &id, float v, int i)
{
    if (v > value || (v == value && i < id)) value = v, id = i;
}

DEVICE void store(Storer &c, const Task &t)
{
    const nmk_control *control = (const nmk_control *)c.p.control;
    float best[2] = {-INFINITY, -INFINITY}, heat[2] = {0, 0};
    int id[2] = {0x7fffffff, 0x7fffffff};
    nmk_noise key[2] = {{0, 0}, {0, 0}};
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const nmk_column *n = &control->column[2 * c.t() + j];
        if (!c.live(2 * c.t() + j)) continue;
        heat[j] = __ldcg(&n->temperature);
        key[j] = nmk_noise_key(__ldcg(&n->seed_lo), __ldcg(&n->seed_hi), c.s.pos[2 * c.t() + j]);
    }
#pragma unroll 1
    for (int i = 0; i < t.tiles; i++, c.job++) {
        if (!c.mine()) continue;
        float v[4];
        c.wait_job();
        c.take(v);
        /* one copy of the noise: the four values in turn */
#pragma unroll 1
        for (int k = 0; k < 4; k++) {
            const int token = (t.tile + i) * 16 + c.g() + 8 * (k >> 1);
            float logit = (k == 0 ? v[0] : k == 1 ? v[1] : k == 2 ? v[2] : v[3]) * P::logit_scale;
            const float h = k & 1 ? heat[1] : heat[0];
            if (h > 0) logit = __fdividef(logit, h) + gumbel(k & 1 ? key[1] : key[0], token);
            if (k & 1) keep_better(best[1], id[1], logit, token);
            else keep_better(best[0], id[0], logit, token);
        }
    }
    const int rows = NMK_SMS * WARPS_STORE, row = blockIdx.x * WARPS_STORE + c.index;
    float *value = c.buffer<float>(t.cand);
    int *which = (int *)(value + rows * NMK_COLUMNS);
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int s = 4; s <= 16; s <<= 1)
            keep_better(best[j], id[j], __shfl_xor_sync(~0u, best[j], s), __shfl_xor_sync(~0u, id[j], s));
        const int n = 2 * c.t() + j, at = row * NMK_COLUMNS + n;
        if (c.g() == 0 && c.stored(n)) value[at] = best[j], which[at] = id[j];
    }
}

//@reference
float *value = buffer(vm, t.cand);
int32_t *id = (int32_t *)(value + NMK_SMS * 2 * NMK_COLUMNS);
for (int n = 0; n < NMK_COLUMNS; n++) {
    const struct nmk_column *c = &vm->control->column[n];
    const nmk_noise key = nmk_noise_key(c->seed_lo, c->seed_hi, c->pos);
    struct candidate best = {-INFINITY, INT32_MAX};
    for (int row = t.tile * 16; row < (t.tile + t.tiles) * 16 && row < P.vocab; row++) {
        if (!active(vm, n) || !(c->flags & 1)) break;
        float v = dot(weight_row(vm, t.weight_kib, 0, 0, P.hidden, row), sm->xn[n], P.hidden) * P.logit_scale;
        if (c->temperature > 0) v = v / c->temperature + noise(key, row);
        better(&best, v, row);
    }
    const int at = sm->id * 2 * NMK_COLUMNS + n; /* two rows an SM, one for each of the device's storer warps */
    value[at] = best.value, id[at] = best.id;
    value[at + NMK_COLUMNS] = -INFINITY, id[at + NMK_COLUMNS] = INT32_MAX;
}
