/*@op
  name    = "guess",
  summary = "the experts that the only live column may choose, by the router's logits of x before attention",
  params  = { {"experts", "i32"}, {"experts_per_token", "i32"}, {"route_score", "i32"}, {"logit_copies", "i32"},
              {"logit_units", "i32"} },
  tile    = "every",
  task    = { {"made", "i32"} },
  reads   = { {"guesses", "u64", role = "help", lo = "0", hi = "made*logit_units"} },
  writes  = { {"guess", role = "help", scope = "sm"} },
  cost    = "0",
@*/
//@device help
/* made: 0 where there are no such sums, and so no guess.  The norm's factor changes no order. */
DEVICE void help(Helper &c, const Task &t)
{
    typedef Router<P::experts, P::experts_per_token, P::route_score> R;
    const int b = c.desc()[7] & 1;
    u32 key[4], logit = 0;
    int expert = -1;
    if (c.s.only < 0) return;
    if (t.made) {
        const long long *sums = c.buffer<long long>(t.guesses);
        R::keys_of(RouterSums<P::experts, P::logit_copies>::parts_of(sums, c.s.only, c.lane), c.lane, key);
        choose_largest<P::experts_per_token>(key, c.lane, expert, logit);
    }
    if (c.lane < P::experts_per_token) c.s.guess[b].expert[c.lane] = expert;
    c.arrive(&c.s.guess_made[b]);
}

//@reference
/* Which row tiles of experts are streamed early changes no result. */
