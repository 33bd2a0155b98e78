/*@op
  name    = "norm",
  summary = "xn = norm(xb) * gamma, RMSNorm or LayerNorm, by every SM for itself, kept as B fragments",
  params  = { {"hidden", "i32"}, {"eps", "f32"}, {"norm_mean", "i32"} },
  tile    = "every",
  wide    = "wide_norm",
  task    = { {"gamma_kib", "i32"} },
  reads   = { {"xb", "bf16", role = "compute", lo = "0", hi = "hidden", awaits = true} },
  writes  = { {"xn", "bf16", role = "compute", scope = "sm"} },
  cost    = "0",
@*/
//@device compute
/* A lane has 8 values of each granule of its warp, of column g; columns that only pad the row count as zeros. */
typedef PackedX L;
constexpr int G = L::granules;
constexpr int HELD = X_SHARED ? 8 : G; /* granules that a lane has in hand at once */

/* One live column has a way of its own, where a warp's granules are no more than its groups of four lanes. */
constexpr bool ONE = X_REGISTERS && !P::norm_mean && G <= 8;

struct Before {
    uint4 gamma[HELD];
};

DEVICE Before before(Consumer &c, const Task &t)
{
    Before b;
    const bf16 *gamma = (const bf16 *)c.weights(t.gamma_kib) + 8 * c.t();
    if (ONE && c.s.only >= 0) {
        b.gamma[0] = __ldg((const uint4 *)(gamma + L::k(c.warp, min(c.g(), G - 1))));
        return b;
    }
#pragma unroll
    for (int q = 0; q < HELD; q++) b.gamma[q] = __ldg((const uint4 *)(gamma + L::k(c.warp, q)));
    return b;
}

/* The warp's part of the sum of what a column's lanes have, to where all warps see it. */
DEVICE void leave_sum(Consumer &c, float sum)
{
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (c.t() == 0) c.s.sum[c.warp][c.g()] = sum;
}

/* The whole column's sum. */
DEVICE float column_sum(Consumer &c, float sum)
{
    leave_sum(c, sum);
    barrier_compute();
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS_COMPUTE; w++) total += c.s.sum[w][c.g()];
    return total;
}

DEVICE float pair_sum(u32 v) { return bf16_low(v) + bf16_high(v); }
DEVICE float values_sum(const uint4 &v) { return pair_sum(v.x) + pair_sum(v.y) + pair_sum(v.z) + pair_sum(v.w); }

/* Of two or all of a lane's values of a granule, less the mean.  Rounded as said here wherever it stands: one column
 * alone and among others has the same bits. */
DEVICE float add_squares(float sum, u32 pair, float mean)
{
    const float low = bf16_low(pair) - mean, high = bf16_high(pair) - mean;
    return __fmaf_rn(high, high, __fmaf_rn(low, low, sum));
}

DEVICE float squares(const uint4 &v, float mean)
{
    return __fadd_rn(add_squares(add_squares(0, v.x, mean), v.y, mean),
                     add_squares(add_squares(0, v.z, mean), v.w, mean));
}

/* What x is multiplied with here: with NMK_X_UNSCALED nothing, see norm_factors.  The places of the sums are free: a
 * norm waits for what all SMs have made of the last one's x, behind all tasks that read its sums, and all warps meet
 * when that wait is over. */
DEVICE float factor(Consumer &c, float squares)
{
    if (!NMK_X_UNSCALED) return rsqrtf(column_sum(c, squares) * (1.f / P::hidden) + P::eps);
    leave_sum(c, squares);
    return 1;
}

DEVICE u32 scaled(u32 pair, float mean, float scale, u32 gamma)
{
    return bf16_pair((bf16_low(pair) - mean) * scale * bf16_low(gamma),
                     (bf16_high(pair) - mean) * scale * bf16_high(gamma));
}

DEVICE uint4 scaled(const uint4 &v, float mean, float scale, const uint4 &gamma)
{
    return make_uint4(scaled(v.x, mean, scale, gamma.x), scaled(v.y, mean, scale, gamma.y),
                      scaled(v.z, mean, scale, gamma.z), scaled(v.w, mean, scale, gamma.w));
}

/* Whether the lane's values of granule q are in the row. */
DEVICE bool inside(const Consumer &c, int q) { return P::hidden % 256 == 0 || L::k(c.warp, q) + 8 * c.t() < P::hidden; }

/* The sum of a lane's granules, in the order in which lanes that have one each would add them up. */
template <int N> DEVICE float granules_sum(const Consumer &c, const uint4 (&v)[N], float mean)
{
    float sum = 0;
    if constexpr (!ONE) {
#pragma unroll
        for (int q = 0; q < N; q++)
            if (!P::norm_mean || inside(c, q)) sum += squares(v[q], mean);
        return sum;
    }
    float of[8];
#pragma unroll
    for (int q = 0; q < 8; q++) of[q] = q < N ? squares(v[q % N], mean) : 0.f;
#pragma unroll
    for (int s = 1; s < 8; s *= 2)
#pragma unroll
        for (int q = 0; q < 8; q += 2 * s) of[q] += of[q + s];
    return of[0];
}

/* The same for one column: each group of lanes has a granule.  What columns that are not live get nobody looks at: x
 * again. */
DEVICE void of_one(Consumer &c, const Task &t, const Before &b)
{
    const int k = L::k(c.warp, min(c.g(), G - 1)) + 8 * c.t();
    const bf16 *from = c.exchange<bf16>(t.xb) + c.s.only * P::hidden + min(k, P::hidden - 8);
    uint2 *own = c.s.prob[0][c.warp]; /* attention's, which is between barriers like these; two halves of 32 */
    uint4 v;
    u32 looks = 0;
#pragma unroll 1
    do v = load_words(from);
    while (POSTED && c.lacks(least(v), looks));
    if (k >= P::hidden) v = make_uint4(0, 0, 0, 0);
    float sum = c.g() < G ? squares(v, 0) : 0.f;
#pragma unroll
    for (int s = 4; s <= 16; s *= 2) sum += __shfl_xor_sync(~0u, sum, s);
    const uint4 y = scaled(v, 0, factor(c, sum), b.gamma[0]);
    own[c.lane] = make_uint2(y.x, y.y), own[WARPS_COMPUTE * 32 + c.lane] = make_uint2(y.z, y.w);
    __syncwarp();
#pragma unroll
    for (int q = 0; q < G; q++) {
        const uint2 low = own[q * 4 + c.t()], high = own[WARPS_COMPUTE * 32 + q * 4 + c.t()];
        c.x[q] = make_uint4(low.x, low.y, high.x, high.y);
    }
}

/* N: all granules. */
template <int N> DEVICE void in_registers(Consumer &c, const Task &t, const Before &b)
{
    const bf16 *x = c.exchange<bf16>(t.xb) + c.g() * P::hidden + 8 * c.t();
    const bool live = c.live(c.g());
    uint4 v[N];
    u32 looks = 0;
#pragma unroll 1
    for (;;) {
        u32 word = 0;
#pragma unroll
        for (int q = 0; q < N; q++) {
            v[q] = make_uint4(0, 0, 0, 0);
            if (live && inside(c, q)) v[q] = load_words(x + L::k(c.warp, q));
        }
#pragma unroll
        for (int q = 0; q < N; q++) word = least(word, least(v[q]));
        if (!POSTED || !c.lacks(word, looks)) break;
    }
    float mean = 0;
    if (P::norm_mean) {
        float all = 0;
#pragma unroll
        for (int q = 0; q < N; q++) all += values_sum(v[q]);
        mean = column_sum(c, all) * (1.f / P::hidden);
        barrier_compute(); /* all have read the sums */
    }
    const float scale = factor(c, granules_sum<N>(c, v, mean));
#pragma unroll
    for (int q = 0; q < N; q++) {
        c.x[q] = scaled(v[q], mean, scale, b.gamma[q]);
        if (P::norm_mean && !inside(c, q)) c.x[q] = make_uint4(0, 0, 0, 0);
    }
}

/* f(first granule, values) for all that the lane has of the row, HELD granules at a time. */
template <class F> DEVICE void each(Consumer &c, const Task &t, F f)
{
    const bf16 *x = c.exchange<bf16>(t.xb) + c.g() * P::hidden + 8 * c.t();
    const bool live = c.live(c.g());
#pragma unroll 1
    for (int q0 = 0; q0 < G; q0 += HELD) {
        uint4 v[HELD];
        u32 looks = 0;
#pragma unroll 1
        for (;;) {
            u32 word = 0;
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                const bool there = live && q0 + j < G && inside(c, q0 + j);
                const bf16 *from = x + (there ? L::k(c.warp, q0 + j) : 0);
                v[j] = make_uint4(0, 0, 0, 0);
                if (there) v[j] = load_words(from);
            }
#pragma unroll
            for (int j = 0; j < HELD; j++) word = least(word, least(v[j]));
            if (!POSTED || !c.lacks(word, looks)) break;
        }
        f(q0, v);
    }
}

/* Rows that registers do not hold: read again from L2 for every sum that there is. */
DEVICE void in_shared(Consumer &c, const Task &t, const Before &b)
{
    float mean = 0, sum = 0;
    if (P::norm_mean) {
        each(c, t, [&](int, const uint4(&v)[HELD]) {
#pragma unroll
            for (int j = 0; j < HELD; j++) sum += values_sum(v[j]);
        });
        mean = column_sum(c, sum) * (1.f / P::hidden), sum = 0;
        barrier_compute(); /* all have read the sums */
    }
    each(c, t, [&](int q0, const uint4(&v)[HELD]) {
#pragma unroll
        for (int j = 0; j < HELD; j++)
            if (!P::norm_mean || q0 + j < G && inside(c, q0 + j)) sum += squares(v[j], mean);
    });
    const float scale = rsqrtf(column_sum(c, sum) * (1.f / P::hidden) + P::eps);
    each(c, t, [&](int q0, const uint4(&v)[HELD]) {
        const bf16 *from = (const bf16 *)c.weights(t.gamma_kib) + 8 * c.t();
        uint4 gamma[HELD];
#pragma unroll
        for (int j = 0; j < HELD; j++)
            gamma[j] = q0 == 0 ? b.gamma[j] : __ldg((const uint4 *)(from + L::k(c.warp, min(q0 + j, G - 1))));
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            if (q0 + j >= G) continue;
            uint4 y = scaled(v[j], mean, scale, gamma[j]);
            if (P::norm_mean && !inside(c, q0 + j)) y = make_uint4(0, 0, 0, 0);
            *c.fragment(2 * (q0 + j)) = make_uint2(y.x, y.y), *c.fragment(2 * (q0 + j) + 1) = make_uint2(y.z, y.w);
        }
    });
}

DEVICE void compute(Consumer &c, const Task &t, const Before &b)
{
    if (ONE && c.s.only >= 0) {
        if constexpr (ONE) of_one(c, t, b);
    } else if constexpr (X_SHARED) in_shared(c, t, b);
    else in_registers<G>(c, t, b);
}

//@reference
const uint16_t *x = buffer(vm, t.xb);
const uint16_t *gamma = weight_row(vm, t.gamma_kib, 0, 0, P.hidden, 0);
for (int n = 0; n < NMK_COLUMNS; n++, x += P.hidden) {
    if (!active(vm, n)) {
        memset(sm->xn[n], 0, sizeof sm->xn[n]);
        continue;
    }
    double mean = 0, squares = 0;
    for (int i = 0; P.norm_mean && i < P.hidden; i++) mean += (double)bf16_value(x[i]) / P.hidden;
    for (int i = 0; i < P.hidden; i++) squares += (bf16_value(x[i]) - mean) * (bf16_value(x[i]) - mean);
    const float scale = 1.0f / sqrtf((float)(squares / P.hidden) + P.eps);
    for (int i = 0; i < P.hidden; i++)
        sm->xn[n][i] =
            bf16_round((bf16_value(x[i]) - (float)mean) * (NMK_X_UNSCALED ? 1 : scale) * bf16_value(gamma[i]));
    sm->factor[n] = NMK_X_UNSCALED ? scale : 1;
}
