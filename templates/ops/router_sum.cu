/*@op
  name    = "router_sum",
  summary = "logits += Wrouter * (gamma * x) of the SM's own 16 rows of x, and their squares, in fixed point",
  params  = { {"hidden", "i32"}, {"experts", "i32"}, {"logit_copies", "i32"}, {"hands", "i32"} },
  tile    = "owner",
  task    = { {"tile", "i32"}, {"weight_kib", "i32"}, {"gamma_kib", "i32"} },
  reads   = { {"acc", role = "compute", scope = "sm"} },
  writes  = { {"acc", role = "compute", scope = "sm"},
              {"logits", "u64", role = "compute", adds = true, lo = "tile%logit_copies*columns",
               hi = "tile%logit_copies*columns+columns"} },
  cost    = "16*2*experts",
@*/
//@device load
typedef RouterSums<P::experts, P::logit_copies> Sums;

DEVICE void load(Loader &c, const Task &t) { Sums::load(c, t.tile, c.weights(t.weight_kib), c.weights(t.gamma_kib)); }

//@device compute
DEVICE void compute(Consumer &c, const Task &t)
{
    u64 *sums = Sums::copy_of(c.buffer<u64>(t.logits), t.tile);
    float v[4];
    const float4 x = Sums::product(c, t.tile, v);
    if (c.warp < Sums::EXPERT_TILES) Sums::add(c, sums, c.warp, v);
    if (c.warp == WARPS_COMPUTE - 1) {
        const float rows[4] = {x.x, x.y, x.z, x.w};
        float squares[2];
        sum_squares(rows, squares);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int column = 2 * c.t() + j;
            if (c.g() >= 2 || !c.live(column)) continue;
            atomicAdd(sums + column * Sums::ROW + Sums::ROWS + c.g(), nmk_fixed_square(squares[j], c.g()));
        }
    }
    if (P::hands) c.hand_sum();
}

//@reference
add_to_sums(vm, sm, (uint64_t *)buffer(vm, t.logits), t.tile, P.experts, P.logit_copies, t.weight_kib, t.gamma_kib);
