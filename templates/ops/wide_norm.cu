/*@op
  name    = "wide_norm",
  summary = "xn = norm(xb) * gamma of one column for all SMs, where a step has more columns than an MMA",
  params  = { {"hidden", "i32"}, {"eps", "f32"}, {"norm_mean", "i32"} },
  tile    = "columns",
  task    = { {"gamma_kib", "i32"}, {"column", "i32"} },
  reads   = { {"xb", "bf16", role = "help", lo = "0", hi = "hidden"} },
  writes  = { {"xn", "bf16", role = "help", lo = "column", hi = "column+1"} },
  cost    = "0",
@*/
//@device help
constexpr int HELD = 8; /* times eight values that a lane has in hand at once */

/* f(index, eight values) for what the lane has of the row.  Read from L2 for every sum that there is. */
template <class F> DEVICE void each(const Helper &c, const bf16 *x, F f)
{
#pragma unroll 1
    for (int first = c.lane * 8; first < P::hidden; first += HELD * 256) {
        uint4 v[HELD];
#pragma unroll
        for (int j = 0; j < HELD; j++) v[j] = load_l2(x + min(first + j * 256, P::hidden - 8));
#pragma unroll
        for (int j = 0; j < HELD; j++)
            if (first + j * 256 < P::hidden) f(first + j * 256, v[j]);
    }
}

DEVICE void help(Helper &c, const Task &t)
{
    if (!c.live(t.column)) return;
    const bf16 *x = c.buffer<bf16>(t.xb) + t.column * P::hidden;
    float mean = 0, sum = 0;
    if (P::norm_mean) {
        auto add = [&](u32 pair) { sum += bf16_low(pair) + bf16_high(pair); };
        each(c, x, [&](int, const uint4 &v) { add(v.x), add(v.y), add(v.z), add(v.w); });
        mean = warp_sum(sum) * (1.f / P::hidden), sum = 0;
    }
    auto add = [&](u32 pair) {
        const float low = bf16_low(pair) - mean, high = bf16_high(pair) - mean;
        sum += low * low + high * high;
    };
    each(c, x, [&](int, const uint4 &v) { add(v.x), add(v.y), add(v.z), add(v.w); });
    const float scale = rsqrtf(warp_sum(sum) * (1.f / P::hidden) + P::eps);
    const bf16 *gamma = (const bf16 *)c.weights(t.gamma_kib);
    bf16 *xn = c.buffer<bf16>(t.xn) + t.column * P::hidden;
    auto scaled = [&](u32 pair, u32 g) {
        const float low = bf16_low(pair) - mean, high = bf16_high(pair) - mean;
        return bf16_pair(low * scale * bf16_low(g), high * scale * bf16_high(g));
    };
    each(c, x, [&](int i, const uint4 &v) {
        const uint4 g = __ldg((const uint4 *)(gamma + i));
        *(uint4 *)(xn + i) = make_uint4(scaled(v.x, g.x), scaled(v.y, g.y), scaled(v.z, g.z), scaled(v.w, g.w));
    });
}

//@reference
const uint16_t *x = (const uint16_t *)buffer(vm, t.xb) + t.column * P.hidden;
const uint16_t *gamma = weight_row(vm, t.gamma_kib, 0, 0, P.hidden, 0);
uint16_t *xn = (uint16_t *)buffer(vm, t.xn) + t.column * P.hidden;
double mean = 0, squares = 0;
if (!active(vm, t.column)) return 0;
for (int i = 0; P.norm_mean && i < P.hidden; i++) mean += (double)bf16_value(x[i]) / P.hidden;
for (int i = 0; i < P.hidden; i++) squares += (bf16_value(x[i]) - mean) * (bf16_value(x[i]) - mean);
const float scale = 1.0f / sqrtf((float)(squares / P.hidden) + P.eps);
for (int i = 0; i < P.hidden; i++) xn[i] = bf16_round((bf16_value(x[i]) - (float)mean) * scale * bf16_value(gamma[i]));
