/*@op
  name    = "norm",
  summary = "xn = norm(x) * gamma, RMSNorm or LayerNorm, by every SM for itself, kept as B fragments",
  params  = { {"hidden", "i32"}, {"eps", "f32"}, {"norm_mean", "i32"} },
  tile    = "every",
  wide    = "wide_norm",
  task    = { {"gamma_kib", "i32"} },
  reads   = { {"x", "f32", role = "compute", lo = "0", hi = "hidden", awaits = true} },
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

/* The whole column's sum of what its lanes have. */
DEVICE float column_sum(Consumer &c, float sum)
{
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (c.t() == 0) c.s.sum[c.warp][c.g()] = sum;
    barrier_compute();
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS_COMPUTE; w++) total += c.s.sum[w][c.g()];
    return total;
}

/* Rounded as said here wherever it stands: one column alone and among others has the same bits. */
DEVICE float square(const float4 &v)
{
    return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmul_rn(v.x, v.x))));
}

DEVICE float squares(const float4 &u, const float4 &w) { return __fadd_rn(square(u), square(w)); }

DEVICE void subtract(float4 &v, float mean) { v.x -= mean, v.y -= mean, v.z -= mean, v.w -= mean; }

DEVICE void scale_into(uint4 &x, const float4 &u, const float4 &w, float scale, const uint4 &gamma)
{
    x.x = bf16_pair(u.x * scale * bf16_low(gamma.x), u.y * scale * bf16_high(gamma.x));
    x.y = bf16_pair(u.z * scale * bf16_low(gamma.y), u.w * scale * bf16_high(gamma.y));
    x.z = bf16_pair(w.x * scale * bf16_low(gamma.z), w.y * scale * bf16_high(gamma.z));
    x.w = bf16_pair(w.z * scale * bf16_low(gamma.w), w.w * scale * bf16_high(gamma.w));
}

/* Whether the lane's values of granule q are in the row. */
DEVICE bool inside(const Consumer &c, int q) { return P::hidden % 256 == 0 || L::k(c.warp, q) + 8 * c.t() < P::hidden; }

/* The sum of a lane's granules, in the order in which lanes that have one each would add them up. */
template <int N> DEVICE float granules_sum(const float4 (&v)[2 * N])
{
    float sum = 0;
    if constexpr (!ONE) {
#pragma unroll
        for (int q = 0; q < 2 * N; q++) sum += square(v[q]);
        return sum;
    }
    float of[8];
#pragma unroll
    for (int q = 0; q < 8; q++) of[q] = q < N ? squares(v[2 * q % (2 * N)], v[(2 * q + 1) % (2 * N)]) : 0.f;
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
    const float4 *from = (const float4 *)(c.exchange<float>(t.x) + c.s.only * P::hidden + min(k, P::hidden - 8));
    uint2 *own = c.s.prob[0][c.warp]; /* attention's, which is between barriers like these; two halves of 32 */
    float4 u, w;
    u32 looks = 0;
#pragma unroll 1
    do u = load_floats(from), w = load_floats(from + 1);
    while (POSTED && c.lacks(least(least(u), least(w)), looks));
    if (k >= P::hidden) u = w = make_float4(0, 0, 0, 0);
    float sum = c.g() < G ? squares(u, w) : 0.f;
#pragma unroll
    for (int s = 4; s <= 16; s *= 2) sum += __shfl_xor_sync(~0u, sum, s);
    const float scale = rsqrtf(column_sum(c, sum) * (1.f / P::hidden) + P::eps);
    uint4 y;
    scale_into(y, u, w, scale, b.gamma[0]);
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
    const float *x = c.exchange<float>(t.x) + c.g() * P::hidden + 8 * c.t();
    const bool live = c.live(c.g());
    float4 v[2 * N];
    u32 looks = 0;
#pragma unroll 1
    for (;;) {
        u32 word = 0;
#pragma unroll
        for (int q = 0; q < N; q++) {
            const float4 *from = (const float4 *)(x + L::k(c.warp, q));
            v[2 * q] = v[2 * q + 1] = make_float4(0, 0, 0, 0);
            if (live && inside(c, q))
                v[2 * q] = load_floats(from), v[2 * q + 1] = load_floats(from + 1);
        }
#pragma unroll
        for (int q = 0; q < 2 * N; q++) word = least(word, least(v[q]));
        if (!POSTED || !c.lacks(word, looks)) break;
    }
    if (P::norm_mean) {
        float all = 0;
#pragma unroll
        for (int q = 0; q < 2 * N; q++) all += v[q].x + v[q].y + v[q].z + v[q].w;
        const float mean = column_sum(c, all) * (1.f / P::hidden);
#pragma unroll
        for (int q = 0; q < 2 * N; q++)
            if (inside(c, q / 2)) subtract(v[q], mean);
        barrier_compute(); /* all have read the sums */
    }
    const float scale = rsqrtf(column_sum(c, granules_sum<N>(v)) * (1.f / P::hidden) + P::eps);
#pragma unroll
    for (int q = 0; q < N; q++) scale_into(c.x[q], v[2 * q], v[2 * q + 1], scale, b.gamma[q]);
}

/* f(first granule, values) for all that the lane has of the row, HELD granules at a time. */
template <class F> DEVICE void each(Consumer &c, const Task &t, F f)
{
    const float *x = c.exchange<float>(t.x) + c.g() * P::hidden + 8 * c.t();
    const bool live = c.live(c.g());
#pragma unroll 1
    for (int q0 = 0; q0 < G; q0 += HELD) {
        float4 v[2 * HELD];
        u32 looks = 0;
#pragma unroll 1
        for (;;) {
            u32 word = 0;
#pragma unroll
            for (int j = 0; j < HELD; j++) {
                const bool there = live && q0 + j < G && inside(c, q0 + j);
                const float4 *from = (const float4 *)(x + (there ? L::k(c.warp, q0 + j) : 0));
                v[2 * j] = v[2 * j + 1] = make_float4(0, 0, 0, 0);
                if (there) v[2 * j] = load_floats(from), v[2 * j + 1] = load_floats(from + 1);
            }
#pragma unroll
            for (int j = 0; j < 2 * HELD; j++) word = least(word, least(v[j]));
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
        each(c, t, [&](int, float4(&v)[2 * HELD]) {
#pragma unroll
            for (int j = 0; j < 2 * HELD; j++) sum += v[j].x + v[j].y + v[j].z + v[j].w;
        });
        mean = column_sum(c, sum) * (1.f / P::hidden), sum = 0;
        barrier_compute(); /* all have read the sums */
    }
    auto center = [&](int q0, float4(&v)[2 * HELD]) {
#pragma unroll
        for (int j = 0; j < 2 * HELD; j++)
            if (P::norm_mean && q0 + j / 2 < G && inside(c, q0 + j / 2)) subtract(v[j], mean);
    };
    each(c, t, [&](int q0, float4(&v)[2 * HELD]) {
        center(q0, v);
#pragma unroll
        for (int j = 0; j < 2 * HELD; j++) sum += square(v[j]);
    });
    const float scale = rsqrtf(column_sum(c, sum) * (1.f / P::hidden) + P::eps);
    each(c, t, [&](int q0, float4(&v)[2 * HELD]) {
        center(q0, v);
        const bf16 *from = (const bf16 *)c.weights(t.gamma_kib) + 8 * c.t();
        uint4 gamma[HELD];
#pragma unroll
        for (int j = 0; j < HELD; j++)
            gamma[j] = q0 == 0 ? b.gamma[j] : __ldg((const uint4 *)(from + L::k(c.warp, min(q0 + j, G - 1))));
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            if (q0 + j >= G) continue;
            uint4 y;
            scale_into(y, v[2 * j], v[2 * j + 1], scale, gamma[j]);
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
const float *x = buffer(vm, t.x);
const uint16_t *gamma = weight_row(vm, t.gamma_kib, 0, 0, P.hidden, 0);
for (int n = 0; n < NMK_COLUMNS; n++, x += P.hidden) {
    if (!active(vm, n)) {
        memset(sm->xn[n], 0, sizeof sm->xn[n]);
        continue;
    }
    double mean = 0, squares = 0;
    for (int i = 0; P.norm_mean && i < P.hidden; i++) mean += (double)x[i] / P.hidden;
    for (int i = 0; i < P.hidden; i++) squares += ((double)x[i] - mean) * ((double)x[i] - mean);
    const float scale = 1.0f / sqrtf((float)(squares / P.hidden) + P.eps);
    for (int i = 0; i < P.hidden; i++)
        sm->xn[n][i] = bf16_round((x[i] - (float)mean) * scale * bf16_value(gamma[i]));
}
