/*@op
  name    = "attention",
  summary = "partial attention of chunks of one row's pages per kv head, online softmax in base 2",
  params  = { {"heads", "i32"}, {"kv_heads", "i32"}, {"head_dim", "i32"}, {"window", "i32"}, {"full_layers", "i32"},
              {"sliding_layers", "i32"}, {"part_slots", "i32"}, {"qk_norm", "i32"}, {"eps", "f32"},
              {"sequential", "i32"}, {"claim_attention", "i32"}, {"attention_ticket", "i32"},
              {"turns", "i32"} },
  early   = "turns",
  claim   = "schedule",
  chained = true, -- the release of q k v stands behind these loads
  tile    = "every",
  task    = { {"sliding", "i32"}, {"kv_layer", "i32"} },
  reads   = { {"qkv", "bf16", role = "compute", lo = "0", hi = "(heads+2*kv_heads)*head_dim", awaits = true},
              {"squares", "f32", role = "compute", lo = "0", hi = "qk_norm*(heads+kv_heads)*head_dim//16",
                awaits = true},
              {"kv", role = "load", launch = "older"} },
  writes  = { {"part", "f32", role = "store", lo = "sm", hi = "part_slots", step = "sms", claim = true, posts = true},
              {"kv", role = "compute", launch = "later"} },
  cost    = "0",
@*/
//@device load
constexpr int HALF_PAGE = NMK_PAGE_TOKENS * P::head_dim * 2; /* K, then V, of one kv head */
constexpr int GROUP = P::heads / P::kv_heads; /* query heads of a kv head: MMA columns, in one or two tiles */
constexpr int TILES = (GROUP + 7) / 8, DIM_TILES = P::head_dim / 16;
constexpr int PAIRS = (GROUP + 1) / 2;        /* a lane of an MMA has two columns; part holds no more of them */
constexpr int SLOT = DIM_TILES * 8 * PAIRS;   /* float4 of a partial */
/* A page of one kv head in one stage: then four warps multiply P by V of one page and four by that of the other. */
constexpr bool WHOLE = 2 * HALF_PAGE <= NMK_STAGE_BYTES;
static_assert(P::heads == GROUP * P::kv_heads && GROUP <= 16, "the heads of a kv head are the columns of two tiles");
static_assert(P::head_dim == (WHOLE ? 64 : 128) && HALF_PAGE <= NMK_STAGE_BYTES, "stages are pages, or halves of them");

constexpr bool CLAIMED = P::claim_attention != NMK_CLAIM_STATIC;
/* Where all wait for attention: four pages a turn, K of the first turn in registers before q is there. */
constexpr bool TURNS = P::turns;
static_assert(!TURNS || (TILES == 1 && !CLAIMED && !WHOLE && COLUMN_TILES == 1), "what turns are written for");

/* Two pages at a time: K K V V, or one after the other where a stage holds both; in turns four, all K before V. */
DEVICE void load(Loader &c, const Task &t)
{
    const int kind = t.sliding, count = CLAIMED ? c.s.chunk0[kind][PLACES] : c.s.segments[kind];
    const u64 page_bytes = (u64)(kind ? P::sliding_layers : P::full_layers) * P::kv_heads * (2 * HALF_PAGE);
    const int *tables = (const int *)(kind ? c.p.table_sliding : c.p.table_full);
    const u8 *pool = (const u8 *)(kind ? c.p.kv_sliding : c.p.kv_full);
    int first = 0, second = 0; /* page ids, read one pair ahead */
    auto peek = [&](const Segment &g) {
        const int *table = tables + (u64)c.s.table_row[g.column] * c.p.table_stride + g.page;
        /* a chunk of own tokens alone is past the row's last page */
        first = NMK_OWN_PAGES == 0 || g.pages > 0 ? __ldg(table) : 0, second = g.pages > 1 ? __ldg(table + 1) : 0;
    };
    u32 *tickets = (u32 *)c.p.tickets + (P::attention_ticket + t.kv_layer + kind * P::full_layers) * 64;
    u32 *ticket = tickets + (c.p.epoch & 1) * 32;
    if (CLAIMED && blockIdx.x == 0) tickets[(c.p.epoch + 1 & 1) * 32] = 0; /* the next step's: nobody draws from it */
    const bool deals = P::claim_attention == NMK_CLAIM_FULL && kind;
    if (!CLAIMED && count) peek(c.s.segment[kind][0]);
#pragma unroll 1
    for (int i = !CLAIMED ? 0 : deals ? blockIdx.x : (int)atomicAdd(ticket, 1u); i < count;) {
        const Segment g = CLAIMED ? segment_of(c.s, kind, i) : c.s.segment[kind][i];
        if (CLAIMED) {
            peek(g);
            c.wait(&c.s.empty[c.fill.index], c.fill.phase); /* who reads the slot's segment reads its stage later */
            claimed_segment(c.s, c.fill.index) = g;
        }
        const int *table = tables + (u64)c.s.table_row[g.column] * c.p.table_stride + g.page;
        const u8 *from = pool + ((u64)t.kv_layer * P::kv_heads + g.kv_head) * (2 * HALF_PAGE);
        int a = first, b = second;
        if (!CLAIMED && i + 1 < count) peek(c.s.segment[kind][i + 1]);
#pragma unroll 1
        for (int k = 0; k < g.pages; k += TURNS ? 4 : 2) {
            const int two = min(2, g.pages - k);
            const int next_a = k + 2 < g.pages ? __ldg(table + k + 2) : 0;
            const int next_b = k + 3 < g.pages ? __ldg(table + k + 3) : 0;
            if constexpr (TURNS) {
                const int four = min(4, g.pages - k);
                const int after_a = k + 4 < g.pages ? __ldg(table + k + 4) : 0;
                const int after_b = k + 5 < g.pages ? __ldg(table + k + 5) : 0;
#pragma unroll 1
                for (int q = 0; q < 2 * four; q++) {
                    const int n = q < four ? q : q - four, page = n < 2 ? (n ? b : a) : n & 1 ? next_b : next_a;
                    c.push(from + (u64)page * page_bytes + (q >= four ? HALF_PAGE : 0), HALF_PAGE, 0);
                }
                a = after_a, b = after_b;
                continue;
            }
            if constexpr (WHOLE) {
#pragma unroll 1
                for (int q = 0; q < two; q++) c.push(from + (u64)(q ? b : a) * page_bytes, 2 * HALF_PAGE, 0);
            } else {
#pragma unroll 1
                for (int q = 0; q < 2 * two; q++)
                    c.push(from + (u64)(q & (two - 1) ? b : a) * page_bytes + (q >= two ? HALF_PAGE : 0), HALF_PAGE, 0);
            }
            a = next_a, b = next_b;
        }
        i = !CLAIMED ? i + 1 : deals ? i + NMK_SMS : (int)atomicAdd(ticket, 1u);
    }
    if (CLAIMED) c.push_end();
}

//@device compute
constexpr int ROWS = (P::heads + 2 * P::kv_heads) * P::head_dim, K0 = P::heads * P::head_dim,
              V0 = K0 + P::kv_heads * P::head_dim;
constexpr int FRAGMENTS = P::head_dim / 32; /* 16 bytes of a lane, 32 dims of a row of q or K */

/* The group's q as MMA columns.  Columns without a head repeat the last one: no other bytes, and nobody looks. */
DEVICE void fetch_q(Consumer &c, const bf16 *qkv, const Segment &g, uint4 (&q)[TILES][FRAGMENTS])
{
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        const int head = GROUP % 8 ? min(n * 8 + c.g(), GROUP - 1) : n * 8 + c.g();
        const bf16 *from = qkv + g.column * ROWS + (g.kv_head * GROUP + head) * P::head_dim + 8 * c.t();
#pragma unroll
        for (int i = 0; i < FRAGMENTS; i++) q[n][i] = load_words(from + i * 32);
    }
}

/* q of an SM's first chunk, and its heads' sums of squares: all SMs wait for these few lines at once, so they are read
 * from L2 once an SM, 16 bytes a thread, and handed on in shared memory.  Not where registers are few; and where words
 * tell that they are there, eight rows lose by the barrier what one gains (tests/bench/RESULTS.md). */
constexpr bool SHARED_Q = TILES == 1 && !CLAIMED && FEW && (!POSTED || TURNS);
constexpr int OF_HEAD = P::head_dim / 8, Q_PIECES = GROUP * OF_HEAD;
constexpr int PIECES = Q_PIECES + P::qk_norm * GROUP * DIM_TILES / 4;
static_assert(!SHARED_Q || PIECES <= 32 * WARPS_COMPUTE, "a thread has a piece");

/* Threads without a piece have the last one too. */
DEVICE int piece_of(const Consumer &c) { return min(c.warp * 32 + c.lane, PIECES - 1); }

DEVICE uint4 fetch_piece(const Consumer &c, const bf16 *qkv, const float *squares, const Segment &g)
{
    const int i = piece_of(c);
    const void *from = qkv + g.column * ROWS + g.kv_head * (GROUP * P::head_dim) + i * 8;
    if (P::qk_norm && i >= Q_PIECES)
        from = squares + (g.column * (ROWS / P::head_dim) + g.kv_head * GROUP) * DIM_TILES + (i - Q_PIECES) * 4;
    return load_l2(from);
}

/* A quarter of a head's sums of squares, by each of the four lanes that share a column (g). */
DEVICE float2 fetch_squares(const Consumer &c, const float *squares, int column, int head)
{
    const float *from = squares + (column * (ROWS / P::head_dim) + head) * DIM_TILES;
    if constexpr (POSTED && DIM_TILES == 8)
        return make_float2(load_float(from + 2 * c.t()), load_float(from + 2 * c.t() + 1));
    if constexpr (DIM_TILES == 8) return __ldcg((const float2 *)from + c.t());
    return make_float2(load_float(from + c.t()), 0.f);
}

DEVICE float2 fetch_q_squares(const Consumer &c, const float *squares, const Segment &g, int n)
{
    return fetch_squares(c, squares, g.column, g.kv_head * GROUP + min(n * 8 + c.g(), GROUP - 1));
}

/* 1 / rms of a head, in all four lanes. */
DEVICE float head_scale(float2 quarter)
{
    float sum = quarter.x + quarter.y;
    sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
    return rsqrtf(sum * (1.f / P::head_dim) + P::eps);
}

DEVICE u32 least_half(float2 v) { return least(__float_as_uint(v.x), __float_as_uint(v.y)); }

DEVICE u32 scale_pair(u32 pair, float scale) { return bf16_pair(bf16_low(pair) * scale, bf16_high(pair) * scale); }

/* Eight dims of a key, rounded as in its page, where later steps find it. */
DEVICE void scale_key(uint4 &key, float scale)
{
    key.x = scale_pair(key.x, scale), key.y = scale_pair(key.y, scale);
    key.z = scale_pair(key.z, scale), key.w = scale_pair(key.w, scale);
}

/* Column-wise (over lanes with the same t) maximum and sum of a tile's 16 tokens. */
DEVICE float tokens_max(float v)
{
#pragma unroll
    for (int s = 4; s <= 16; s <<= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, s));
    return v;
}

DEVICE float tokens_sum(float v)
{
#pragma unroll
    for (int s = 4; s <= 16; s <<= 1) v += __shfl_xor_sync(~0u, v, s);
    return v;
}

/* Where qkv leaves K as it is before its norm: the column's own row goes to its page, in the order of qkv's.  A lane
 * takes 4 dims.  Nobody waits for it: so it comes after all chunks, each by another warp. */
DEVICE void append(Consumer &c, const Segment &g, const bf16 *qkv, const float *squares, const Task &t)
{
    const int kind = t.sliding, pos = c.s.pos[g.column], r = pos % NMK_PAGE_TOKENS, d = c.lane * 4 % P::head_dim;
    const int *table = (const int *)(kind ? c.p.table_sliding : c.p.table_full);
    const int page = __ldg(table + (u64)c.s.table_row[g.column] * c.p.table_stride + pos / NMK_PAGE_TOKENS);
    const bf16 *from = qkv + g.column * ROWS + K0 + g.kv_head * P::head_dim + d;
    uint2 key;
    float2 quarter;
    u32 looks = 0;
#pragma unroll 1
    for (;;) {
        if constexpr (POSTED) key = make_uint2(load_word(from), load_word(from + 2));
        else key = __ldcg((const uint2 *)from);
        quarter = fetch_squares(c, squares, g.column, P::heads + g.kv_head);
        if (!POSTED || !c.lacks(least(least(key.x, key.y), least_half(quarter)), looks)) break;
    }
    const float scale = head_scale(quarter);
    const u64 index = ((u64)page * (kind ? P::sliding_layers : P::full_layers) + t.kv_layer) * P::kv_heads + g.kv_head;
    u8 *to = (u8 *)(kind ? c.p.kv_sliding : c.p.kv_full) + index * (2 * HALF_PAGE);
    to += ((r >> 4) * DIM_TILES + d / 32 * 2 + (d >> 2 & 1)) * 512;
    to += ((r & 7) * 4 + (d >> 3 & 3)) * 16 + (r >> 3 & 1) * 4;
    if (c.lane * 4 < P::head_dim) *(u32 *)to = scale_pair(key.x, scale), *(u32 *)(to + 8) = scale_pair(key.y, scale);
}

/* K of a turn: of each of the two pairs of its pages, a warp has a tile of 16 tokens. */
struct Keys {
    uint4 of[2][DIM_TILES];
};

/* Pages of the chunk from the current slot on, at most four: warp w has tile w % 4 of page w / 4 and of page
 * 2 + w / 4, or of the last one, where there are less: whoever looks at that masks it.  Frees their slots. */
DEVICE void take_keys(Consumer &c, int pages, Keys &keys)
{
    u32 seen = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const Slot at = c.slot_after(min(2 * h + (c.warp >> 2), max(pages - 1, 0)));
        const uint4 *from = (const uint4 *)(c.ring + at.index * NMK_STAGE_BYTES + (c.warp & 3) * (DIM_TILES * 512) +
                                            c.lane * 16);
        if (pages > 0) c.wait_full(at);
#pragma unroll
        for (int j = 0; j < DIM_TILES; j++) keys.of[h][j] = from[j * 32], seen |= keys.of[h][j].x;
    }
    asm volatile("" : "+r"(seen)); /* the loads end here where no slot is freed, too: tests/sass asks for that */
    c.release_some(max(pages, 0), seen);
}

struct Before {
    Keys keys;
};

DEVICE Before before(Consumer &c, const Task &t)
{
    Before b;
    take_keys(c, c.s.segments[t.sliding] ? min(c.s.segment[t.sliding][0].pages, 4) : 0, b.keys);
    return b;
}

/* Scores of one tile: rows g and g+8, columns 2t and 2t+1. */
DEVICE void scores(const uint4 (&key)[DIM_TILES], const uint4 (&q)[FRAGMENTS], const float (&norm)[2],
                   float (&a)[4])
{
    float b[4] = {0, 0, 0, 0};
    a[0] = a[1] = a[2] = a[3] = 0;
#pragma unroll
    for (int j = 0; j < FRAGMENTS; j++) mma(a, key[2 * j], q[j].x, q[j].y), mma(b, key[2 * j + 1], q[j].z, q[j].w);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        a[j] += b[j];
        if constexpr (P::qk_norm) a[j] *= norm[j & 1];
    }
}

/* Whether column n is one of the step's tokens that the chunk's column sees; an idle one's position is below any
 * low. */
DEVICE bool sees(const Shared &s, int column, int low, int n)
{
    return s.group[n] == s.group[column] && s.pos[n] <= s.pos[column] && s.pos[n] >= low;
}

/* The step's own tokens, straight from L2, as a tile: token g is column g.  Row g of its K; what is not there is
 * another one and masked.  Returns what `least` does. */
DEVICE u32 fetch_own_key(const Consumer &c, const bf16 *qkv, const float *squares, const Segment &seg, int low,
                         uint4 (&key)[DIM_TILES], float2 &key_squares)
{
    const int n = sees(c.s, seg.column, low, c.g()) ? c.g() : seg.column;
    const bf16 *from = qkv + n * ROWS + K0 + seg.kv_head * P::head_dim + 8 * c.t();
    u32 word = 0;
    if constexpr (P::qk_norm) {
        key_squares = fetch_squares(c, squares, n, P::heads + seg.kv_head);
        word = least_half(key_squares);
    }
#pragma unroll
    for (int k = 0; k < FRAGMENTS; k++) {
        key[k] = load_words(from + k * 32);
        word = least(word, least(key[k]));
    }
    return word;
}

/* Dims g and g+8 of the warp's 16 of its V, tokens 2t and 2t+1. */
DEVICE u32 fetch_own_value(const Consumer &c, const bf16 *qkv, const Segment &seg, int low, uint2 &v)
{
    const int g = c.g(), t2 = 2 * c.t();
    const bf16 *from = qkv + V0 + seg.kv_head * P::head_dim + c.warp * 16 + g - (g & 1);
    u32 word = 0;
    v = make_uint2(0, 0);
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const bool there = sees(c.s, seg.column, low, t2 + j);
        const bf16 *row = from + (there ? t2 + j : seg.column) * ROWS;
        const u32 low16 = load_word(row), high16 = load_word(row + 8);
        word = least(word, least(low16, high16));
        v.x |= there ? (low16 >> (g & 1) * 16 & 0xffff) << 16 * j : 0;
        v.y |= there ? (high16 >> (g & 1) * 16 & 0xffff) << 16 * j : 0;
    }
    return word;
}

/* Scores and softmax of 16-token tiles by a warp each; then every warp multiplies P by V of all tiles for its own 16
 * dims, as in compute.  Maxima are exchanged before P is, so that P of all tiles is to one scale. */
DEVICE void compute(Consumer &c, const Task &t, const Before &b)
{
    Shared &s = c.s;
    const int kind = t.sliding, count = s.segments[kind];
    const bf16 *qkv = c.exchange<bf16>(t.qkv);
    const float *squares = c.exchange<float>(t.squares);
    const float none = -1e30f;
    Keys keys = b.keys;
    uint4 q[FRAGMENTS]; /* from chunk to chunk: of the next one, where there are more */
    float2 q_squares = make_float2(0, 0);
    auto fetch = [&](const Segment &g) {
        const int head = g.kv_head * GROUP + min(c.g(), GROUP - 1);
        const bf16 *from = qkv + g.column * ROWS + head * P::head_dim + 8 * c.t();
#pragma unroll
        for (int k = 0; k < FRAGMENTS; k++) q[k] = load_words(from + k * 32);
        if constexpr (P::qk_norm) q_squares = fetch_squares(c, squares, g.column, head);
    };
    float o[4];
    uint4 v[2][4];
    /* V of two pages of the turn, or of the last one where there are less: times 0. */
    auto take_values = [&](int there) {
        const int w = c.warp;
        Slot at = c.slot;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            if (e && there > 1) at.advance(c.p.ring_stages);
            const uint4 *from = (const uint4 *)(c.ring + at.index * NMK_STAGE_BYTES + w * 512 + c.lane * 16);
            if (there > e) c.wait_full(at);
#pragma unroll
            for (int j = 0; j < 4; j++) v[e][j] = from[j * 256];
        }
    };
    int i = 0, k = 0; /* chunk, and the turn's first page in it */
#pragma unroll 1
    while (i < count) {
        asm volatile("" : "+r"(c.lane), "+r"(c.warp)); /* no address is worth a register from turn to turn */
        const int w = c.warp;
        const Segment &seg = s.segment[kind][i];
        const int lane = c.lane, g = c.g(), t2 = 2 * c.t();
        const int there = min(seg.pages - k, 4);
        const bool ends = there < (seg.last ? 4 : 5) && k + 4 >= seg.pages, owns = ends && seg.last;
        const bool own = owns && w == WARPS_COMPUTE - 1; /* the own tokens' tile is the last one */
        if (i + k > 0) take_keys(c, there, keys);
        float2 key_squares = make_float2(0, 0);
        u32 word, looks = 0;
        if (own) {
            do word = fetch_own_key(c, qkv, squares, seg, s.low[kind][seg.column], keys.of[1], key_squares);
            while (POSTED && c.lacks(word, looks));
        }
        if (i + k == 0) { /* by way of the buffers that probabilities go to later */
            uint4 piece;
            do piece = fetch_piece(c, qkv, squares, seg);
            while (POSTED && c.lacks(least(piece), looks));
            const int at = piece_of(c), head = at / OF_HEAD, part = at % OF_HEAD;
            uint4 *shared_q = (uint4 *)s.prob[0];
            float *shared_squares = &s.score_sum[0][0][0];
            uint4 *to = shared_q + part / 4 * 32 + head * 4 + part % 4;
            if (P::qk_norm && at >= Q_PIECES) to = (uint4 *)shared_squares + (at - Q_PIECES);
            *to = piece;
            barrier_compute();
            const int mine = min(g, GROUP - 1);
#pragma unroll
            for (int n = 0; n < FRAGMENTS; n++) q[n] = shared_q[n * 32 + mine * 4 + c.t()];
            if constexpr (P::qk_norm) q_squares = ((const float2 *)shared_squares)[mine * 4 + c.t()];
        } else if (POSTED && k == 0) {
            auto least_of_q = [&] {
                u32 word = 0;
#pragma unroll
                for (int n = 0; n < FRAGMENTS; n++) word = least(word, least(q[n]));
                return P::qk_norm ? least(word, least_half(q_squares)) : word;
            };
            while (c.lacks(least_of_q(), looks)) fetch(seg);
        }
        float norm[2] = {1.f, 1.f}; /* 1 / rms of this lane's two heads */
        if constexpr (P::qk_norm) {
            const float of_g = head_scale(q_squares);
            norm[0] = __shfl_sync(~0u, of_g, t2 * 4), norm[1] = __shfl_sync(~0u, of_g, t2 * 4 + 4);
        }
        const int low = s.low[kind][seg.column], base = s.base[seg.column];
        float a[2][4];
        if (own) {
            const float scale = P::qk_norm ? head_scale(key_squares) : 1.f;
#pragma unroll
            for (int j = FRAGMENTS - 1; j >= 0; j--) { /* as it lies in a stage, whose rows g + 8 are empty */
                uint4 n = keys.of[1][j];
                if constexpr (P::qk_norm) scale_key(n, scale);
                keys.of[1][2 * j + 1] = make_uint4(n.z, 0, n.w, 0);
                keys.of[1][2 * j] = make_uint4(n.x, 0, n.y, 0);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int page = 2 * h + (w >> 2), token = (seg.page + k + page) * NMK_PAGE_TOKENS + (w & 3) * 16 + g;
            bool first = page < there && token >= low && token < base;
            bool second = page < there && token + 8 >= low && token + 8 < base;
            if (h == 1 && own) {
                first = sees(s, seg.column, low, g);
                second = false;
            }
            scores(keys.of[h], q, norm, a[h]);
            if (!first) a[h][0] = a[h][1] = -INFINITY;
            if (!second) a[h][2] = a[h][3] = -INFINITY;
        }
        if (ends && i + 1 < count) fetch(s.segment[kind][i + 1]);
        uint2 own_v = make_uint2(0, 0);
        if (owns) {
            u32 word, again = 0;
            do word = fetch_own_value(c, qkv, seg, low, own_v);
            while (POSTED && c.lacks(word, again));
        }
        const float m0 = tokens_max(fmaxf(fmaxf(a[0][0], a[0][2]), fmaxf(a[1][0], a[1][2])));
        const float m1 = tokens_max(fmaxf(fmaxf(a[0][1], a[0][3]), fmaxf(a[1][1], a[1][3])));
        const int turn = c.pair++ & 1;
        if (g == 0) *(float2 *)&s.score_max[turn][w][t2] = make_float2(m0, m1);
        barrier_compute(); /* also: q has been read, or the probabilities of the turn before */
        /* maxima and sums so far are where the storer finds them at last */
        float4 *const upto = (float4 *)&s.part_ml[c.job % TAGS][2 * t2];
        float4 earlier = make_float4(none, none, 0, 0);
        if (k > 0) earlier = *upto;
        float new0 = earlier.x, new1 = earlier.y;
#pragma unroll
        for (int j = 0; j < WARPS_COMPUTE; j++) {
            const float2 m = *(const float2 *)&s.score_max[turn][j][t2];
            new0 = fmaxf(new0, m.x), new1 = fmaxf(new1, m.y);
        }
        float l0 = 0, l1 = 0;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float p0 = exp2_fast(a[h][0] - new0), p1 = exp2_fast(a[h][1] - new1),
                        p2 = exp2_fast(a[h][2] - new0), p3 = exp2_fast(a[h][3] - new1);
            l0 += p0 + p2, l1 += p1 + p3;
            s.prob[h][w][lane] = make_uint2(transpose_8x8(bf16_pair(p0, p1)), transpose_8x8(bf16_pair(p2, p3)));
        }
        l0 = tokens_sum(l0), l1 = tokens_sum(l1);
        if (g == 0) *(float2 *)&s.score_sum[turn][w][t2] = make_float2(l0, l1);
        const float r0 = exp2_fast(earlier.x - new0), r1 = exp2_fast(earlier.y - new1);
        if (k == 0) o[0] = o[1] = o[2] = o[3] = 0;
        o[0] *= r0, o[1] *= r1, o[2] *= r0, o[3] *= r1;
        barrier_compute();
        float z[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int h = 0; 2 * h < there; h++) {
            take_values(there - 2 * h);
            u32 seen = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) seen |= v[j / 4][j % 4].x;
            c.release_some(min(there - 2 * h, 2), seen);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint2 p = s.prob[h][j][lane];
                mma(o, v[0][j], p.x, p.y);
            }
            if (h && there < 4) break; /* where own tokens may be */
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint2 p = s.prob[h][4 + j][lane];
                mma(z, v[1][j], p.x, p.y);
            }
        }
        if (owns) {
            const uint2 p = s.prob[1][WARPS_COMPUTE - 1][lane];
            mma(o, make_uint4(own_v.x, own_v.y, 0, 0), p.x, p.y);
        }
        if (w == 0 && g == 0) {
            float sum0 = earlier.z * r0, sum1 = earlier.w * r1;
#pragma unroll
            for (int j = 0; j < WARPS_COMPUTE; j++) {
                const float2 l = *(const float2 *)&s.score_sum[turn][j][t2];
                sum0 += l.x, sum1 += l.y;
            }
            *upto = make_float4(new0, new1, sum0, sum1);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) o[j] += z[j];
        if (!ends) {
            k += 4;
            continue;
        }
        c.hand(o);
        i++, k = 0;
    }
    if constexpr (P::qk_norm) {
#pragma unroll 1
        for (int i = c.warp; i < count; i += WARPS_COMPUTE)
            if (s.segment[kind][i].last) {
                const Task u = task(c.desc()); /* anew: while there is K no register is free for it */
                append(c, s.segment[kind][i], c.exchange<bf16>(u.qkv), c.exchange<float>(u.squares), u);
            }
    }
    c.forget_x();
}

/* Scores and softmax of one 16-token tile by one warp; then every warp multiplies P by V of all tiles for its own 16
 * dims (rows g and g+8 of warp w: dims 16w+g, 16w+g+8; columns 2t, 2t+1: heads), so nothing is reduced at the end.
 * 64 dims are four warps': there warps w and w+4 have the same dims, of the first and of the second page of a pair. */
DEVICE void compute(Consumer &c, const Task &t)
{
    Shared &s = c.s;
    const int kind = t.sliding, count = s.segments[kind], w = c.warp;
    const bf16 *qkv = c.exchange<bf16>(t.qkv);
    const float *squares = c.exchange<float>(t.squares);
    const float none = -1e30f;
    /* with two tiles there are no registers for it, nor with norms beside the accumulator of 64 columns, and who claims
     * does not know what comes */
    constexpr bool AHEAD = TILES == 1 && !CLAIMED && !(P::qk_norm && COLUMN_TILES == 8);
    uint4 ahead[TILES][FRAGMENTS];
    float2 squares_ahead[TILES];
    auto fetch = [&](const Segment &g) {
        fetch_q(c, qkv, g, ahead);
        if constexpr (P::qk_norm) {
#pragma unroll
            for (int n = 0; n < TILES; n++) squares_ahead[n] = fetch_q_squares(c, squares, g, n);
        }
    };
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (SHARED_Q && count) piece = fetch_piece(c, qkv, squares, s.segment[kind][0]);
    else if (AHEAD && count) fetch(s.segment[kind][0]);
#pragma unroll 1
    for (int i = 0; CLAIMED || i < count; i++) {
        asm volatile("" : "+r"(c.lane)); /* no lane-dependent address is worth a register from chunk to chunk */
        const int lane = c.lane, g = c.g(), t2 = 2 * c.t(), dims = WHOLE ? w & 3 : w;
        Segment seg;
        if constexpr (CLAIMED) {
            c.wait_full(c.slot);
            const int tag = s.stage_tag[c.slot.index];
            seg = claimed_segment(s, c.slot.index);
            /* All warps go on, or none: below they meet at barriers.  And all have seen all of the segment: the slot is
             * freed with words of its stage alone. */
            const u32 bits = seg.column | seg.kv_head | seg.page | seg.pages | seg.slot | seg.last;
            if (c.any_warp((u32)tag >> 31 | (u32)c.gone() | (bits & c.p.zero))) {
                c.release(tag);
                break;
            }
            if (P::qk_norm && seg.last && w == seg.slot % WARPS_COMPUTE) append(c, seg, qkv, squares, t);
        } else {
            seg = s.segment[kind][i];
        }
        const int low = s.low[kind][seg.column], base = s.base[seg.column], token0 = seg.page * NMK_PAGE_TOKENS;
        if (!AHEAD) fetch(seg);
        uint4 key[FRAGMENTS], own_v = make_uint4(0, 0, 0, 0);
        float2 key_squares = make_float2(0, 0);
        /* This step's own tokens of the sequence, straight from L2: token g is column g.  Returns what `least` does. */
        auto fetch_own = [&] {
            const int pos = s.pos[seg.column], own = s.group[seg.column];
            const bf16 *kv = qkv + seg.kv_head * P::head_dim;
            /* an idle column's position is below any low */
            auto there = [&](int n) { return s.group[n] == own && s.pos[n] <= pos && s.pos[n] >= low; };
            u32 word = 0;
            const bool mine = there(g);
            if constexpr (P::qk_norm) {
                if (mine) key_squares = fetch_squares(c, squares, g, P::heads + seg.kv_head);
            }
#pragma unroll
            for (int k = 0; k < FRAGMENTS; k++) {
                key[k] = make_uint4(0, 0, 0, 0);
                if (mine) key[k] = load_words(kv + g * ROWS + K0 + k * 32 + 8 * c.t());
            }
            own_v.x = own_v.y = 0;
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (there(t2 + j) && (!WHOLE || w < 4)) {
                    const u16 *from = kv + (t2 + j) * ROWS + V0 + dims * 16 + g - (g & 1);
                    const u32 low16 = load_word(from), high16 = load_word(from + 8);
                    word = least(word, least(low16, high16));
                    own_v.x |= (low16 >> (g & 1) * 16 & 0xffff) << 16 * j;
                    own_v.y |= (high16 >> (g & 1) * 16 & 0xffff) << 16 * j;
                }
#pragma unroll
            for (int k = 0; k < FRAGMENTS; k++) word = least(word, least(key[k]));
            if constexpr (P::qk_norm) word = least(word, least_half(key_squares));
            return word;
        };
        if constexpr (POSTED) {
            u32 looks = 0, word;
#pragma unroll 1
            for (;;) {
                word = seg.last ? fetch_own() : 0;
#pragma unroll
                for (int n = 0; n < TILES; n++) {
#pragma unroll
                    for (int k = 0; k < FRAGMENTS; k++) word = least(word, least(ahead[n][k]));
                    if constexpr (P::qk_norm) word = least(word, least_half(squares_ahead[n]));
                }
                if (!c.lacks(word, looks)) break;
                fetch(seg);
            }
        }
        if (SHARED_Q && i == 0) { /* by way of the exchange buffers that the first pair does not use */
            const int idle = (c.pair & 1) ^ 1, at = piece_of(c), head = at / OF_HEAD, k = at % OF_HEAD;
            uint4 *shared_q = (uint4 *)s.prob[idle];
            float *shared_squares = &s.score_sum[idle][0][0];
            uint4 *to = shared_q + k / 4 * 32 + head * 4 + k % 4;
            if (P::qk_norm && at >= Q_PIECES) to = (uint4 *)shared_squares + (at - Q_PIECES);
            *to = piece;
            barrier_compute();
            const int mine = min(g, GROUP - 1);
#pragma unroll
            for (int n = 0; n < FRAGMENTS; n++) ahead[0][n] = shared_q[n * 32 + mine * 4 + c.t()];
            if constexpr (P::qk_norm) {
                if constexpr (DIM_TILES == 8) squares_ahead[0] = ((const float2 *)shared_squares)[mine * 4 + c.t()];
                else squares_ahead[0] = make_float2(shared_squares[mine * 4 + c.t()], 0.f);
            }
        }
        uint4 q[TILES][FRAGMENTS];
        float norm[TILES][2]; /* 1 / rms of this lane's two heads */
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int k = 0; k < FRAGMENTS; k++) q[n][k] = ahead[n][k];
            if constexpr (P::qk_norm) {
                const float of_g = head_scale(squares_ahead[n]);
                norm[n][0] = __shfl_sync(~0u, of_g, t2 * 4), norm[n][1] = __shfl_sync(~0u, of_g, t2 * 4 + 4);
            } else {
                norm[n][0] = norm[n][1] = 1.f;
            }
        }
        if (AHEAD && i + 1 < count) fetch(s.segment[kind][i + 1]);
        float max[TILES][2], sum[TILES][2], o[TILES][4];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            max[n][0] = max[n][1] = none, sum[n][0] = sum[n][1] = 0;
            o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0;
        }
        if (seg.last) { /* this step's own tokens of the sequence, straight from L2: token g is column g */
            const int pos = s.pos[seg.column], own = s.group[seg.column];
            const bf16 *kv = qkv + seg.kv_head * P::head_dim;
            /* an idle column's position is below any low */
            auto seen = [&](int n) { return s.group[n] == own && s.pos[n] <= pos && s.pos[n] >= low; };
#ifdef NMK_WIDE /* token g is the sequence's column that has g others before it; a step has NMK_POSITIONS at most */
            Mask all = __ballot_sync(~0u, lane < PLACES && seen(lane % PLACES));
            if (PLACES > 32) all |= (Mask)__ballot_sync(~0u, lane + 32 < PLACES && seen((lane + 32) % PLACES)) << 32;
            auto column_of = [&](int n) {
                Mask left = all;
                for (; n > 0; n--) left &= left - 1;
                return first_bit(left);
            };
            auto there = [&](int n) { return column_of(n) >= 0; };
#else
            auto column_of = [](int n) { return n; };
            auto there = seen;
#endif
            const int at = column_of(g);
            const bool mine = there(g);
            uint4 v = own_v;
            if constexpr (!POSTED) {
                if constexpr (P::qk_norm) {
                    if (mine) key_squares = fetch_squares(c, squares, at, P::heads + seg.kv_head);
                }
#pragma unroll
                for (int k = 0; k < FRAGMENTS; k++) {
                    key[k] = make_uint4(0, 0, 0, 0);
                    if (mine) key[k] = load_l2(kv + at * ROWS + K0 + k * 32 + 8 * c.t());
                }
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (there(t2 + j) && (!WHOLE || w < 4)) {
                        const u16 *from = kv + column_of(t2 + j) * ROWS + V0 + dims * 16 + g;
                        v.x |= (u32)__ldcg(from) << 16 * j, v.y |= (u32)__ldcg(from + 8) << 16 * j;
                    }
            }
            if constexpr (P::qk_norm) {
                const float scale = head_scale(key_squares);
#pragma unroll
                for (int k = 0; k < FRAGMENTS; k++) scale_key(key[k], scale);
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                float a[4] = {0, 0, 0, 0}, b[4] = {0, 0, 0, 0};
#pragma unroll
                for (int k = 0; k < FRAGMENTS; k++) {
                    mma(a, make_uint4(key[k].x, 0, key[k].y, 0), q[n][k].x, q[n][k].y);
                    mma(b, make_uint4(key[k].z, 0, key[k].w, 0), q[n][k].z, q[n][k].w);
                }
                a[0] += b[0], a[1] += b[1];
                if constexpr (P::qk_norm) a[0] *= norm[n][0], a[1] *= norm[n][1];
                const float s0 = mine ? a[0] : none, s1 = mine ? a[1] : none;
                max[n][0] = tokens_max(s0), max[n][1] = tokens_max(s1);
                const float p0 = mine ? exp2_fast(s0 - max[n][0]) : 0, p1 = mine ? exp2_fast(s1 - max[n][1]) : 0;
                sum[n][0] = tokens_sum(p0), sum[n][1] = tokens_sum(p1);
                mma(o[n], v, transpose_8x8(bf16_pair(p0, p1)), 0);
            }
        }
        /* at: the slot of the page that this warp has looked at */
        auto release_pair = [&](Slot at, bool two, u32 seen) {
            if constexpr (!SHARED_Q) {
                c.release(seen);
                if (two) c.wait_full(c.slot), c.release(seen);
            } else {
                if (two && w < 4) at.advance(c.p.ring_stages), c.wait_full(at);
                c.release_some(two ? 2 : 1, seen);
            }
        };
#pragma unroll 1
        for (int k = 0; k < seg.pages; k += 2) {
            const bool two = k + 1 < seg.pages, mine = w < 4 || two; /* warps 0-3: first page, 4-7: second */
            const int turn = c.pair++ & 1; /* the exchange is double buffered; two tiles need both halves at once */
            c.wait_full(c.slot);
            Slot at = c.slot;
            if (w >= 4) at.advance(c.p.ring_stages);
            if (two && w >= 4) c.wait_full(at);
            const u8 *page = c.ring + at.index * NMK_STAGE_BYTES;
            float a[TILES][4] = {};
            u32 seen = 0;
            if (mine) {
                uint4 key[DIM_TILES];
                const uint4 *from = (const uint4 *)(page + (w & 3) * (DIM_TILES * 512) + lane * 16);
#pragma unroll
                for (int j = 0; j < DIM_TILES; j++) key[j] = from[j * 32], seen |= key[j].x;
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    float b[4] = {0, 0, 0, 0};
#pragma unroll
                    for (int j = 0; j < FRAGMENTS; j++)
                        mma(a[n], key[2 * j], q[n][j].x, q[n][j].y), mma(b, key[2 * j + 1], q[n][j].z, q[n][j].w);
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        a[n][j] += b[j];
                        if constexpr (P::qk_norm) a[n][j] *= norm[n][j & 1];
                    }
                }
            }
            if constexpr (!WHOLE) {
                release_pair(at, two, seen);
            }
            if constexpr (TILES == 2) barrier_compute(); /* the exchange of the pair before is over */
            if (mine) {
                const int token = token0 + (k + (w >> 2)) * NMK_PAGE_TOKENS + (w & 3) * 16 + g;
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const int x = TILES == 2 ? n : turn;
                    if (token < low || token >= base) a[n][0] = a[n][1] = -INFINITY;
                    if (token + 8 < low || token + 8 >= base) a[n][2] = a[n][3] = -INFINITY;
                    const float m0 = tokens_max(fmaxf(fmaxf(a[n][0], a[n][2]), none));
                    const float m1 = tokens_max(fmaxf(fmaxf(a[n][1], a[n][3]), none));
                    const float p0 = exp2_fast(a[n][0] - m0), p1 = exp2_fast(a[n][1] - m1),
                                p2 = exp2_fast(a[n][2] - m0), p3 = exp2_fast(a[n][3] - m1),
                                l0 = tokens_sum(p0 + p2), l1 = tokens_sum(p1 + p3);
                    s.prob[x][w][lane] =
                        make_uint2(transpose_8x8(bf16_pair(p0, p1)), transpose_8x8(bf16_pair(p2, p3)));
                    if (g == 0) {
                        *(float2 *)&s.score_max[x][w][t2] = make_float2(m0, m1);
                        *(float2 *)&s.score_sum[x][w][t2] = make_float2(l0, l1);
                    }
                }
            }
            barrier_compute();
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const int x = TILES == 2 ? n : turn;
                float new0 = max[n][0], new1 = max[n][1];
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (j < 4 || two) {
                        const float2 m = *(const float2 *)&s.score_max[x][j][t2];
                        new0 = fmaxf(new0, m.x), new1 = fmaxf(new1, m.y);
                    }
                const float r0 = exp2_fast(max[n][0] - new0), r1 = exp2_fast(max[n][1] - new1);
                max[n][0] = new0, max[n][1] = new1, sum[n][0] *= r0, sum[n][1] *= r1;
                o[n][0] *= r0, o[n][1] *= r1, o[n][2] *= r0, o[n][3] *= r1;
            }
            /* what 4 tiles of one page, tile h and on, add to the sums and, times V, to o */
            auto add = [&](const uint4 (&v)[4], int h, bool values) {
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const int x = TILES == 2 ? n : turn;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const uint2 p = s.prob[x][h + j][lane];
                        const float2 m = *(const float2 *)&s.score_max[x][h + j][t2];
                        const float2 l = *(const float2 *)&s.score_sum[x][h + j][t2];
                        const float s0 = exp2_fast(m.x - max[n][0]), s1 = exp2_fast(m.y - max[n][1]);
                        float z[4] = {0, 0, 0, 0};
                        sum[n][0] += l.x * s0, sum[n][1] += l.y * s1;
                        if (!values) continue;
                        mma(z, v[j], p.x, p.y);
                        o[n][0] += z[0] * s0, o[n][1] += z[1] * s1, o[n][2] += z[2] * s0, o[n][3] += z[3] * s1;
                    }
                }
            };
            if constexpr (WHOLE) {
                uint4 v[4] = {};
                if (mine) {
                    const uint4 *from = (const uint4 *)(page + HALF_PAGE + dims * 512 + lane * 16);
#pragma unroll
                    for (int j = 0; j < 4; j++) v[j] = from[j * (DIM_TILES * 32)], seen |= v[j].x;
                }
                add(v, 0, w < 4);
                if (two) add(v, 4, w >= 4);
                release_pair(at, two, seen);
            } else {
#pragma unroll 1
                for (int h = 0; h < (two ? 8 : 4); h += 4) {
                    c.wait_full(c.slot);
                    const uint4 *from = (const uint4 *)(c.ring + c.slot.index * NMK_STAGE_BYTES + w * 512 + lane * 16);
                    uint4 v[4];
                    seen = 0;
#pragma unroll
                    for (int j = 0; j < 4; j++) v[j] = from[j * 256], seen |= v[j].x;
                    add(v, h, true);
                    c.release(seen);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++) { /* a tile is a job of its own */
            if (w == 0 && g == 0)
                *(float4 *)&s.part_ml[c.job % TAGS][2 * t2] = make_float4(max[n][0], max[n][1], sum[n][0], sum[n][1]);
            if (CLAIMED && w == 0 && lane == 0) s.job_tag[c.job % TAGS] = seg.slot;
            c.hand(o[n]);
        }
    }
    if constexpr (CLAIMED) {
        const float nothing[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int mark = 1; mark <= WARPS_STORE; mark++) {
            if (w == 0 && c.lane == 0) s.job_tag[c.job % TAGS] = -mark;
            c.hand(nothing);
        }
    }
    if constexpr (P::qk_norm && !CLAIMED) {
#pragma unroll 1
        for (int i = w; i < count; i += WARPS_COMPUTE)
            if (s.segment[kind][i].last) append(c, s.segment[kind][i], qkv, squares, t);
    }
    if (P::sequential) c.forget_x();
}

//@device store
/* part: [slot][16 dims, by warp][4 g/2][PAIRS heads/2][2 g%2] float4 as the MMA left it, g and g+8 of two heads; then
 * [slot][PAIRS] float4: maxima, then sums of two heads.  The float4 of g and g+1 lie side by side, for combine. */
DEVICE void store(Storer &c, const Task &t)
{
    const int kind = t.sliding, count = c.s.segments[kind] * TILES;
    float4 *part = c.exchange<float4>(t.part);
    if constexpr (POSTED) {
        /* How many slots the step before has used nobody knows.  Of all of them those who share a slot's maxima do not
         * know who reads them last; a slot's own words combine clears, who reads each once. */
        float4 *ml = part + (u64)P::part_slots * SLOT;
        const int count = (P::part_slots - (int)blockIdx.x + NMK_SMS - 1) / NMK_SMS * PAIRS;
#pragma unroll 1
        for (int i = c.index * 32 + c.lane; i < count; i += 32 * WARPS_STORE) {
            const int slot = blockIdx.x + i / PAIRS * NMK_SMS;
            store_words(c.other_copy(ml + slot * PAIRS + i % PAIRS), make_uint4(ABSENT, ABSENT, ABSENT, ABSENT));
        }
    }
#pragma unroll 1
    for (int i = 0; CLAIMED ? !c.gone() : i < count; i++, c.job++) {
        if (!c.mine()) continue;
        int slot = blockIdx.x + i / TILES * NMK_SMS;
        const int first = i % TILES * 4;
        c.wait_job();
        if constexpr (CLAIMED) {
            slot = c.s.job_tag[c.job % TAGS];
            if (c.gone()) slot = -1; /* the tag may be that of another op's job */
            if (slot < 0) {          /* the end marks, as in expert_up */
                c.free_job(slot);
                c.job += slot == -1 ? WARPS_STORE : 1;
                break;
            }
        }
        const float4 *d = c.job_data();
        float4 v[8], ml = make_float4(0, 0, 0, 0);
        if (c.lane < 4) ml = *(const float4 *)&c.s.part_ml[c.job % TAGS][c.lane * 4];
        u32 seen = __float_as_uint(ml.x);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = d[j * 32], seen |= __float_as_uint(v[j].x);
        if constexpr (WHOLE) { /* two halves of the tokens: of the first pages, then of the second ones */
#pragma unroll
            for (int j = 0; j < 4; j++)
                v[j].x += v[j + 4].x, v[j].y += v[j + 4].y, v[j].z += v[j + 4].z, v[j].w += v[j + 4].w;
        }
        if (c.lane < 4 && first + c.lane < PAIRS)
            c.post(part + (u64)P::part_slots * SLOT + slot * PAIRS + first + c.lane, ml);
        const int pair = first + c.t();
        float4 *to = part + (u64)slot * SLOT + ((c.g() >> 1) * PAIRS + pair) * 2 + (c.g() & 1);
        if (PAIRS % 4 == 0 || pair < PAIRS) {
#pragma unroll
            for (int j = 0; j < DIM_TILES; j++) c.post(to + j * (8 * PAIRS), v[j]);
        }
        c.free_job(seen);
    }
}

//@reference
const int width = (P.heads + 2 * P.kv_heads) * P.head_dim, layers = t.sliding ? P.sliding_layers : P.full_layers;
const uint16_t *qkv = buffer(vm, t.qkv);
const float *squares = buffer(vm, t.squares);
float *part = buffer(vm, t.part), *part_ml = part + (size_t)P.part_slots * SLOT_FLOATS;
int slot = 0, unit = -1, more = 0; /* slot: of the column's first chunk; unit: the chunk that is claimed */
if (P.claim_attention != NMK_CLAIM_STATIC) {
    const int how = P.claim_attention == NMK_CLAIM_FULL && t.sliding ? NMK_CLAIM_STATIC : NMK_CLAIM_QUEUE;
    const int ticket = P.attention_ticket + t.kv_layer + t.sliding * P.full_layers;
    int all = 0;
    if (sm->id == 0) atomic_store(ticket_at(vm, ticket, vm->epoch + 1), 0);
    for (int n = 0; n < NMK_COLUMNS; n++)
        if (active(vm, n)) all += P.kv_heads * chunks_of(vm, &vm->control->column[n], t.sliding, P.window).count;
    more = claim(vm, sm, d, ticket, how, sm->id, all, &unit);
    if (unit < 0) return more;
}
for (int n = 0; n < NMK_COLUMNS; n++) {
    const struct nmk_column *c = &vm->control->column[n];
    if (!active(vm, n)) continue;
    const struct chunks s = chunks_of(vm, c, t.sliding, P.window);
    for (int i = 0; i < P.kv_heads * s.count; i++, slot++) {
        if (unit >= 0 ? slot != unit : slot % NMK_SMS != sm->id) continue;
        const int head = i / s.count, chunk = i % s.count;
        const uint16_t *q = qkv + n * width + head * GROUP * HEAD_DIM, *k[TURN_TOKENS], *v[TURN_TOKENS];
        const uint16_t *own_k[16], *own_v[16];
        uint16_t normed[NMK_COLUMNS][HEAD_DIM]; /* this step's keys, as later steps find them in their pages */
        struct softmax *state = &sm->softmax;
        int own = 0;
        memset(state, 0, sizeof *state);
        for (int h = 0; h < GROUP; h++) {
            const int at = n * (width / 16) + (head * GROUP + h) * (HEAD_DIM / 16);
            state->m[h] = -1e30f, state->scale[h] = P.qk_norm ? head_scale(squares + at, P.eps) : 1;
        }
        if (chunk == s.count - 1) { /* the last chunk holds this step's tokens of the sequence too */
            for (int o = 0; o < NMK_COLUMNS; o++) {
                const struct nmk_column *other = &vm->control->column[o];
                if (!active(vm, o) || other->group != c->group || other->pos > c->pos || other->pos < s.lo) continue;
                own_k[own] = qkv + o * width + (P.heads + head) * HEAD_DIM;
                own_v[own] = qkv + o * width + (P.heads + P.kv_heads + head) * HEAD_DIM;
                if (P.qk_norm) {
                    const int at = o * (width / 16) + (P.heads + head) * (HEAD_DIM / 16);
                    const float scale = head_scale(squares + at, P.eps);
                    for (int j = 0; j < HEAD_DIM; j++) normed[own][j] = bf16_round(bf16_value(own_k[own][j]) * scale);
                    own_k[own] = normed[own];
                    if (o == n) /* qkv appends V, and K only where there is no norm */
                        memcpy(kv_page(vm, c, c->pos, t.sliding, layers, t.kv_layer, P.kv_heads, head) +
                               c->pos % PAGE * HEAD_DIM, normed[own], sizeof normed[own]);
                }
                own++;
            }
            if (!P.turns) attend(state, q, own_k, own_v, own, 0);
        }
        const int page0 = chunk_page(vm, &s, chunk), page1 = chunk_page(vm, &s, chunk + 1);
        /* in turns the last one, which has less than four pages, has the own tokens too */
        const int step = P.turns ? TURN_PAGES * PAGE : 16, ends = page1 * PAGE;
        for (int at = page0 * PAGE; P.turns ? at <= ends : at < ends; at += step) {
            int tokens = 0;
            for (int e = 0; P.turns && at + step > ends && e < own; e++) k[tokens] = own_k[e], v[tokens++] = own_v[e];
            for (int pos = at; pos < at + step && pos < ends; pos++) {
                if (pos < s.lo || pos >= c->base) continue;
                const uint16_t *page = kv_page(vm, c, pos, t.sliding, layers, t.kv_layer, P.kv_heads, head);
                k[tokens] = page + pos % PAGE * HEAD_DIM;
                v[tokens++] = page + (PAGE + pos % PAGE) * HEAD_DIM;
            }
            attend(state, q, k, v, tokens, P.turns);
        }
        for (int h = 0; h < GROUP; h++) {
            float *to = part + (size_t)slot * SLOT_FLOATS, *ml = part_ml + (slot * PAIRS + h / 2) * 4 + h % 2;
            for (int dim = 0; dim < HEAD_DIM; dim++) to[part_float(h, dim)] = state->o[h][dim];
            ml[0] = state->m[h], ml[2] = state->l[h];
        }
    }
}
return more;
