/*@op
  name    = "residual",
  summary = "y = x + acc for the SM's own 16 rows; acc starts again from zero",
  params  = { {"hidden", "i32"}, {"handed", "i32"} },
  tile    = "owner",
  task    = { {"tile", "i32"} },
  reads   = { {"acc", role = "compute", scope = "sm"},
              {"x", "f32", role = "store", lo = "tile*16", hi = "tile*16+16", awaits = true} },
  writes  = { {"acc", role = "compute", scope = "sm"},
              {"y", "f32", role = "store", lo = "tile*16", hi = "tile*16+16", posts = true} },
  cost    = "0",
@*/
//@device compute
DEVICE void compute(Consumer &c, const Task &t)
{
    if (!P::handed) c.hand_sum();
}

//@device store
/* Before the wait, because x is mostly there long since. */
DEVICE void prepare(const Storer &c, int column, const float *x, float *y, float (&old)[4])
{
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int n = (column + j) * P::hidden;
        if (c.live(column + j)) old[j] = load_float(x + n), old[2 + j] = load_float(x + n + 8);
        if (c.stored(column + j)) c.clear(y + n), c.clear(y + n + 8);
    }
}

DEVICE void store(Storer &c, const Task &t)
{
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < 1; c.next_job(at)) {
        if (!c.mine()) continue;
        const float *x = c.exchange<float>(t.x) + t.tile * 16 + c.g();
        float *y = c.exchange<float>(t.y) + t.tile * 16 + c.g();
        float old[4] = {0, 0, 0, 0}, v[4];
        if constexpr (POSTED) prepare(c, c.column(at), x, y, old);
        c.wait_job(); /* x may be the other storer's, and only what compute knows is behind it */
        u32 looks = 0;
#pragma unroll 1
        while (!POSTED || c.lacks(least(as_words(make_float4(old[0], old[1], old[2], old[3]))), looks)) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int n = (c.column(at) + j) * P::hidden;
                if (c.live(c.column(at) + j)) old[j] = load_float(x + n), old[2 + j] = load_float(x + n + 8);
            }
            if constexpr (!POSTED) break;
        }
        c.take(v);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int n = (c.column(at) + j) * P::hidden;
            if (c.live(c.column(at) + j)) c.post(y + n, old[j] + v[j]), c.post(y + n + 8, old[2 + j] + v[2 + j]);
        }
    }
}

//@reference
const float *x = buffer(vm, t.x);
float *y = buffer(vm, t.y);
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = 0; i < 16; i++) {
        const int at = n * P.hidden + t.tile * 16 + i;
        y[at] = x[at] + sm->acc[i][n];
        sm->acc[i][n] = 0;
    }

//@test tolerance=1e-6 adds what the SM has summed up, and starts again
float *x = input(test, t.x), *y = expect_f32(test, t.y);
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = 0; i < P.hidden && live(test, n); i++) {
        float *acc = &on_sm(test, i / 16)->acc[i % 16][n];
        *acc = uniform(test, -3, 3);
        x[n * P.hidden + i] = uniform(test, -8, 8);
        y[n * P.hidden + i] = x[n * P.hidden + i] + *acc;
    }

//@test tolerance=0 leaves x alone where nothing was summed up
float *x = input(test, t.x), *y = expect_f32(test, t.y), *same = expect_f32(test, t.x);
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = 0; i < P.hidden && live(test, n); i++)
        x[n * P.hidden + i] = y[n * P.hidden + i] = same[n * P.hidden + i] = uniform(test, -8, 8);
