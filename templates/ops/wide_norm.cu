/*@op
  name    = "wide_norm",
  summary = "xn = norm(x) * gamma of one column for all SMs, where a step has more columns than an MMA",
  params  = { {"hidden", "i32"}, {"eps", "f32"}, {"norm_mean", "i32"} },
  tile    = "columns",
  task    = { {"gamma_kib", "i32"}, {"column", "i32"} },
  reads   = { {"x", "f32", role = "help", lo = "0", hi = "hidden"} },
  writes  = { {"xn", "bf16", role = "help", lo = "column", hi = "column+1"} },
  cost    = "0",
@*/
//@device help
constexpr int HELD = 8; /* float4 that a lane has in hand at once */

/* f(index, four values) for what the lane has of the row.  Read from L2 for every sum that there is. */
template <class F> DEVICE void each(const Helper &c, const float *x, F f)
{
#pragma unroll 1
    for (int first = c.lane * 4; first < P::hidden; first += HELD * 128) {
        float4 v[HELD];
#pragma unroll
        for (int j = 0; j < HELD; j++) v[j] = __ldcg((const float4 *)(x + min(first + j * 128, P::hidden - 4)));
#pragma unroll
        for (int j = 0; j < HELD; j++)
            if (first + j * 128 < P::hidden) f(first + j * 128, v[j]);
    }
}

DEVICE void help(Helper &c, const Task &t)
{
    if (!c.live(t.column)) return;
    const float *x = c.buffer<float>(t.x) + t.column * P::hidden;
    float mean = 0, sum = 0;
    if (P::norm_mean) {
        each(c, x, [&](int, const float4 &v) { sum += v.x + v.y + v.z + v.w; });
        mean = warp_sum(sum) * (1.f / P::hidden), sum = 0;
    }
    auto center = [&](float4 v) { return make_float4(v.x - mean, v.y - mean, v.z - mean, v.w - mean); };
    each(c, x, [&](int, const float4 &v) {
        const float4 u = center(v);
        sum += u.x * u.x + u.y * u.y + u.z * u.z + u.w * u.w;
    });
    const float scale = rsqrtf(warp_sum(sum) * (1.f / P::hidden) + P::eps);
    const bf16 *gamma = (const bf16 *)c.weights(t.gamma_kib);
    bf16 *xn = c.buffer<bf16>(t.xn) + t.column * P::hidden;
    each(c, x, [&](int i, const float4 &v) {
        const float4 u = center(v);
        const uint2 g = __ldg((const uint2 *)(gamma + i));
        *(uint2 *)(xn + i) = make_uint2(bf16_pair(u.x * scale * bf16_low(g.x), u.y * scale * bf16_high(g.x)),
                                        bf16_pair(u.z * scale * bf16_low(g.y), u.w * scale * bf16_high(g.y)));
    });
}

//@reference
const float *x = (const float *)buffer(vm, t.x) + t.column * P.hidden;
const uint16_t *gamma = weight_row(vm, t.gamma_kib, 0, 0, P.hidden, 0);
uint16_t *xn = (uint16_t *)buffer(vm, t.xn) + t.column * P.hidden;
double mean = 0, squares = 0;
if (!active(vm, t.column)) return 0;
for (int i = 0; P.norm_mean && i < P.hidden; i++) mean += (double)x[i] / P.hidden;
for (int i = 0; i < P.hidden; i++) squares += ((double)x[i] - mean) * ((double)x[i] - mean);
const float scale = 1.0f / sqrtf((float)(squares / P.hidden) + P.eps);
for (int i = 0; i < P.hidden; i++) xn[i] = bf16_round((x[i] - (float)mean) * scale * bf16_value(gamma[i]));
