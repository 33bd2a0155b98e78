/*@op
  name     = "expert_down",
  summary  = "acc += sum over the active experts of h * Wdown, in ascending order, for the SM's own 16 rows",
  params   = { {"experts", "i32"}, {"expert_ff", "i32"}, {"hidden", "i32"}, {"h_units", "i32"} },
  tile     = "owner",
  task     = { {"tile", "i32"}, {"weight_kib", "i32"} },
  reads    = { {"h", "bf16", role = "compute", lo = "0", hi = "h_units"}, {"route", role = "load", scope = "sm"},
               {"route", role = "compute", scope = "sm"}, {"acc", role = "compute", scope = "sm"} },
  writes   = { {"acc", role = "compute", scope = "sm"} },
  cost     = "0",
@*/
//@device load
typedef Packed<P::expert_ff> L;
constexpr u64 EXPERT_BYTES = (u64)(P::hidden / 16) * L::tile_bytes;

DEVICE void load(Loader &c, const Task &t)
{
    const int instance = c.desc()[7], b = instance & 1;
    c.wait_route(instance);
    const u8 *from = c.weights(t.weight_kib) + (u64)t.tile * L::tile_bytes;
    const int active = c.s.active[b];
#pragma unroll 1
    for (int i = 0; i < active; i++) c.stream(from + c.s.expert[b][i] * EXPERT_BYTES, L::stages, L::stage_bytes);
}

//@device compute
/* h is already multiplied by the router weight, so all experts add up in one accumulator.  A column that did not choose
 * an expert multiplies by zeros: exact, so its bits do not depend on the others' choices. */
constexpr int AHEAD = L::granules <= 3 ? 4 : L::granules <= 6 ? 2 : 1; /* experts whose h is loaded ahead */

DEVICE void fetch(Consumer &c, const bf16 *h, int b, int slot, int active, uint4 (&v)[L::granules])
{
    const bool chosen = slot < active && c.s.weight[b][slot * 8 + c.g()] != 0.f;
    const bf16 *from = h + (slot * NMK_COLUMNS + c.g()) * P::expert_ff + 8 * c.t();
#pragma unroll
    for (int q = 0; q < L::granules; q++) {
        const int k = L::k(c.warp, q);
        v[q] = make_uint4(0, 0, 0, 0);
        if (chosen && (P::expert_ff % 256 == 0 || k + 8 * c.t() < P::expert_ff)) v[q] = load_l2(from + k);
    }
}

DEVICE void compute(Consumer &c, const Task &t)
{
    const int b = c.desc()[7] & 1, active = c.s.active[b];
    const bf16 *h = c.buffer<bf16>(t.h);
    uint4 v[AHEAD][L::granules];
    float odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < AHEAD; j++) fetch(c, h, b, j, active, v[j]);
#pragma unroll 1
    for (int i = 0; i < active; i += AHEAD) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (i + j >= active) break;
#pragma unroll
            for (int s = 0; s < L::stages; s++) {
                uint4 a[L::tiles];
                u32 seen = 0;
                c.wait_full(c.slot);
#pragma unroll
                for (int k = 0; k < L::tiles; k++) a[k] = c.tile<L::tiles>(c.slot, k), seen |= a[k].x;
                multiply(c.acc, odd, a, v[j], s * L::tiles);
                c.release(seen);
            }
            fetch(c, h, b, i + j + AHEAD, active, v[j]);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) c.acc[k] += odd[k];
}

//@reference
const struct vm_route *r = route_of(sm, d);
const uint16_t *h = buffer(vm, t.h);
if (!r) return -1;
for (int slot = 0; slot < r->active; slot++)
    for (int i = 0; i < 16; i++) {
        const uint16_t *w =
            weight_row(vm, t.weight_kib, r->expert[slot], P.hidden, P.expert_ff, t.tile * 16 + i);
        for (int n = 0; n < NMK_COLUMNS; n++)
            if (r->weight[slot][n] != 0)
                sm->acc[i][n] += dot(w, h + (slot * NMK_COLUMNS + n) * P.expert_ff, P.expert_ff);
    }
