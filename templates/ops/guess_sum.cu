/*@op
  name    = "guess_sum",
  summary = "guesses += Wrouter * (gamma * x) of the SM's own 16 rows of x before attention, in fixed point",
  params  = { {"experts", "i32"}, {"logit_copies", "i32"} },
  tile    = "owner",
  task    = { {"tile", "i32"}, {"weight_kib", "i32"}, {"gamma_kib", "i32"} },
  reads   = { {"acc", role = "compute", scope = "sm"} },
  writes  = { {"guesses", "u64", role = "store", adds = true, lo = "tile%logit_copies*columns",
               hi = "tile%logit_copies*columns+columns"} },
  cost    = "16*2*experts",
@*/
//@device load
typedef RouterSums<P::experts, P::logit_copies> Sums;

DEVICE void load(Loader &c, const Task &t) { Sums::load(c, t.tile, c.weights(t.weight_kib), c.weights(t.gamma_kib)); }

//@device compute
/* What attention adds to x hardly moves the router's choice.  For more than one live column nobody asks, see guess. */
DEVICE void compute(Consumer &c, const Task &t)
{
    if (c.s.only < 0) {
        c.wait_full(c.slot), c.release(0);
        return;
    }
    float v[4];
    Sums::product(c, t.tile, v);
    c.hand(v);
}

//@device store
/* The consumers' next wait is for all of x, so they leave the additions to who has nothing to do. */
DEVICE void store(Storer &c, const Task &t)
{
    u64 *sums = Sums::copy_of(c.buffer<u64>(t.guesses), t.tile);
    if (c.s.only < 0) return;
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < 1; c.next_job(at)) {
        if (!c.mine()) continue;
        c.wait_job();
        float v[WARPS_COMPUTE][4];
        c.take_apart(v);
#pragma unroll
        for (int w = 0; w < Sums::EXPERT_TILES; w++) Sums::add(c, sums, w, v[w]);
    }
}

//@reference
add_to_sums(vm, sm, (uint64_t *)buffer(vm, t.guesses), t.tile, P.experts, P.logit_copies, t.weight_kib, t.gamma_kib);
