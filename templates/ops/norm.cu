/*@op
  name    = "norm",
  summary = "xn = rmsnorm(x) * gamma, by every SM for itself, kept in registers as B fragments",
  params  = { {"hidden", "i32"}, {"eps", "f32"} },
  tile    = "every",
  task    = { {"gamma_kib", "i32"} },
  reads   = { {"x", "f32", role = "compute", lo = "0", hi = "hidden"} },
  writes  = { {"xn", "bf16", role = "compute", scope = "sm"} },
  cost    = "0",
@*/
//@device compute
struct Before {
    uint4 gamma[PackedX::granules];
};

DEVICE Before before(Consumer &c, const Task &t)
{
    Before b;
    const bf16 *gamma = (const bf16 *)c.weights(t.gamma_kib) + 8 * c.t();
#pragma unroll
    for (int q = 0; q < PackedX::granules; q++) b.gamma[q] = __ldg((const uint4 *)(gamma + PackedX::k(c.warp, q)));
    return b;
}

DEVICE void compute(Consumer &c, const Task &t, const Before &b)
{
    const float *x = c.buffer<float>(t.x) + c.g() * P::hidden + 8 * c.t();
    const bool live = c.live(c.g());
    float4 v[2 * PackedX::granules];
    float sum = 0;
#pragma unroll
    for (int q = 0; q < PackedX::granules; q++) {
        const float4 *from = (const float4 *)(x + PackedX::k(c.warp, q));
        v[2 * q] = v[2 * q + 1] = make_float4(0, 0, 0, 0);
        if (live) v[2 * q] = __ldcg(from), v[2 * q + 1] = __ldcg(from + 1);
    }
#pragma unroll
    for (int q = 0; q < 2 * PackedX::granules; q++)
        sum += v[q].x * v[q].x + v[q].y * v[q].y + v[q].z * v[q].z + v[q].w * v[q].w;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (c.t() == 0) c.s.sum[c.warp][c.g()] = sum;
    barrier_compute();
    float total = 0;
#pragma unroll
    for (int w = 0; w < WARPS_COMPUTE; w++) total += c.s.sum[w][c.g()];
    const float scale = rsqrtf(total * (1.f / P::hidden) + P::eps);
#pragma unroll
    for (int q = 0; q < PackedX::granules; q++) {
        const float4 &u = v[2 * q], &w = v[2 * q + 1];
        const uint4 &gamma = b.gamma[q];
        c.x[q].x = bf16_pair(u.x * scale * bf16_low(gamma.x), u.y * scale * bf16_high(gamma.x));
        c.x[q].y = bf16_pair(u.z * scale * bf16_low(gamma.y), u.w * scale * bf16_high(gamma.y));
        c.x[q].z = bf16_pair(w.x * scale * bf16_low(gamma.z), w.y * scale * bf16_high(gamma.z));
        c.x[q].w = bf16_pair(w.z * scale * bf16_low(gamma.w), w.w * scale * bf16_high(gamma.w));
    }
}

//@reference
const float *x = buffer(vm, t.x);
const uint16_t *gamma = weight_row(vm, t.gamma_kib, 0, 0, P.hidden, 0);
for (int n = 0; n < NMK_COLUMNS; n++, x += P.hidden) {
    if (!active(vm, n)) {
        memset(sm->xn[n], 0, sizeof sm->xn[n]);
        continue;
    }
    double squares = 0;
    for (int i = 0; i < P.hidden; i++) squares += (double)x[i] * x[i];
    const float scale = 1.0f / sqrtf((float)(squares / P.hidden) + P.eps);
    for (int i = 0; i < P.hidden; i++) sm->xn[n][i] = bf16_round(x[i] * scale * bf16_value(gamma[i]));
}
