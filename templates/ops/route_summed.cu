/*@op
  name    = "route_summed",
  summary = "route of logits that are sums; where one column is live by the helper, and what the guess was worth",
  params  = { {"experts", "i32"}, {"experts_per_token", "i32"}, {"route_score", "i32"}, {"logit_copies", "i32"},
              {"logit_units", "i32"}, {"eps", "f32"} },
  tile    = "every",
  wait    = "help",
  task    = { {"ticket", "i32"} },
  reads   = { {"logits", "f32", role = "help", lo = "0", hi = "logit_units"}, -- as it makes numbers of them
              {"guess", role = "help", scope = "sm"} },
  writes  = { {"route", role = "help", scope = "sm"} },
  cost    = "0",
@*/
//@device compute
/* The helper waits for the sums in any case.  Of one column it makes the route, while the consumers begin with what was
 * guessed; more are too much for one warp, and it lets the consumers do them. */
typedef Router<P::experts, P::experts_per_token, P::route_score> R;
typedef RouterSums<P::experts, P::logit_copies> Sums;

/* The lane's four logits of a column. */
DEVICE void load_keys(const long long *sums, int column, int lane, u32 (&key)[4])
{
    const float4 v = Sums::parts_of(sums, column, lane);
    const float scale = Sums::scale_of(sums, column, P::eps);
    R::keys_of(make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale), lane, key);
}

DEVICE void compute(Consumer &c, const Task &t)
{
    const int instance = c.desc()[7], b = instance & 1;
    if (c.s.only >= 0) return;
    const long long *sums = c.buffer<long long>(t.logits);
    c.wait(&c.s.route_due[b], instance >> 1 & 1);
    R::route_all(c, b, [&](int n, u32 (&key)[4]) { load_keys(sums, n, c.lane, key); });
    if (threadIdx.x == 0 && blockIdx.x == 0) count_active(c, t.ticket, c.s.active[b]);
}

//@device help
constexpr int COUNT = P::experts_per_token;

/* Arrives as all consumers do where the route is theirs. */
DEVICE void arrive_for_all(Helper &c, u64 *bar)
{
    __syncwarp();
#pragma unroll 1
    for (int i = c.lane; i < WARPS_COMPUTE * ARRIVALS; i += 32) mbarrier_arrive(shared_address(bar));
}

DEVICE void help(Helper &c, const Task &t)
{
    Shared &s = c.s;
    const int b = c.desc()[7] & 1, lane = c.lane;
    if (s.only < 0) {
        c.arrive(&s.route_due[b]);
        return;
    }
    u32 key[4], logit = 0;
    int expert = -1;
    float all = 0, most = 0;
    load_keys(c.buffer<long long>(t.logits), s.only, lane, key);
    if (P::route_score == SOFTMAX_ALL) all = R::sum_all(key, most);
    choose_largest<COUNT>(key, lane, expert, logit);

    /* eight lanes have a choice, the next eight a guess; slots are in ascending order of experts */
    Guess &g = s.guess[b];
    const bool chose = lane < COUNT;
    const int mine = chose ? expert : lane >> 3 == 1 ? g.expert[lane & 7] : -2 - lane;
    const u32 same = __match_any_sync(~0u, mine);
    int slot = 0, place = __ffs(same >> 8 & 0xff) - 1;
#pragma unroll
    for (int q = 0; q < R::WORDS; q++) {
        const u32 mask = __reduce_or_sync(~0u, chose && expert >> 5 == q ? 1u << (expert & 31) : 0u);
        slot += __popc(expert >> 5 > q ? mask : expert >> 5 == q ? mask & ((1u << (expert & 31)) - 1) : 0);
    }
    /* the n-th choice that nobody guessed to the n-th place whose guess was wrong */
    u32 wrong = ~__ballot_sync(~0u, lane >> 3 == 1 && same & 0xff) >> 8 & 0xff;
    const u32 missed = __ballot_sync(~0u, chose && place < 0);
    const int guessed = COUNT - __popc(missed);
    if (place < 0) {
#pragma unroll 1
        for (int n = __popc(missed & ((1u << lane) - 1)); n > 0; n--) wrong &= wrong - 1;
        place = max(__ffs(wrong) - 1, 0); /* of a lost step anything */
    }
    if (chose) s.expert[b][slot] = expert, g.chosen[place] = expert, g.slot[place] = slot;
    if (lane == 0) s.active[b] = COUNT;
    arrive_for_all(c, &s.route_listed[b]);
    for (int i = lane; i < COUNT * 8; i += 32) s.weight[b][i] = 0;
    __syncwarp();
    if (P::route_score == SOFTMAX_CHOSEN) most = value_of(__shfl_sync(~0u, logit, 0));
    const float weight = R::weigh(lane, logit, most, all);
    if (chose) s.weight[b][slot * 8 + s.only] = weight;
    arrive_for_all(c, &s.route_ready[b]);
    if (lane == 0 && blockIdx.x == 0) count_active(c, t.ticket, COUNT), count_guessed(c, t.ticket, guessed);
}

//@reference
const uint64_t *sums = vm->forced ? (const uint64_t *)(vm->forced + (size_t)t.logits * 128) : buffer(vm, t.logits);
float logits[NMK_COLUMNS][P.experts];
for (int n = 0; n < NMK_COLUMNS; n++) logits_of_sums(sums, n, P.experts, P.logit_copies, P.eps, logits[n]);
make_route(vm, sm, d, t.ticket, P.experts, P.experts_per_token, P.route_score, logits[0]);
