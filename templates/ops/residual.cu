/*@op
  name    = "residual",
  summary = "x += acc for the SM's own 16 rows, yb the same in bf16",
  params  = { {"hidden", "i32"}, {"handed", "i32"} },
  tile    = "owner",
  task    = { {"tile", "i32"} },
  reads   = { {"acc", role = "compute", scope = "sm"},
              {"x", "f32", role = "store", lo = "tile*16", hi = "tile*16+16", awaits = true, unkept = true} },
  writes  = { {"acc", role = "compute", scope = "sm"},
              {"y", "f32", role = "store", lo = "tile*16", hi = "tile*16+16", posts = true, unkept = true},
              {"yb", "bf16", role = "store", lo = "tile*16", hi = "tile*16+16", posts = true} },
  cost    = "0",
@*/
//@device compute
DEVICE void compute(Consumer &c, const Task &t)
{
    if (!P::handed) c.hand_sum();
}

//@device store
DEVICE void store(Storer &c, const Task &t)
{
#pragma unroll 1
    for (Tile at = {0, 0}; at.row < 1; c.next_job(at)) {
        if (!c.mine()) continue;
        const PairedRows<P::hidden> shared(c, at, c.exchange<bf16>(t.yb) + t.tile * 16);
        float v[4];
        shared.clear(c);
#if NMK_X_KEPT
        c.wait_job();
        c.take(v);
        shared.post(c, v);
#else
        const float *x = c.exchange<float>(t.x) + t.tile * 16 + c.g();
        float *y = c.exchange<float>(t.y) + t.tile * 16 + c.g();
        float old[4] = {0, 0, 0, 0};
        /* before the wait, because x is mostly there long since */
        if constexpr (POSTED) load_rows<P::hidden>(c, at, x, old);
        clear_rows<P::hidden>(c, at, y);
        c.wait_job(); /* x may be the other storer's, and only what compute knows is behind it */
        u32 looks = 0;
#pragma unroll 1
        while (!POSTED || c.lacks(least(as_words(make_float4(old[0], old[1], old[2], old[3]))), looks)) {
            load_rows<P::hidden>(c, at, x, old);
            if constexpr (!POSTED) break;
        }
        c.take(v);
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] += old[i];
        shared.post(c, v);
        post_rows<P::hidden>(c, at, y, v);
#endif
    }
}

//@reference
uint16_t *yb = buffer(vm, t.yb);
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = 0; i < 16; i++) {
        const int at = n * P.hidden + t.tile * 16 + i;
#if NMK_X_KEPT
        const float y = sm->x[i][n] += sm->acc[i][n];
#else
        const float y = ((const float *)buffer(vm, t.x))[at] + sm->acc[i][n];
        ((float *)buffer(vm, t.y))[at] = y;
#endif
        yb[at] = bf16_round(y);
        sm->acc[i][n] = 0;
    }

//@test tolerance=1e-6 adds what the SM has summed up
float *yb = expect_bf16(test, t.yb);
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = 0; i < P.hidden && live(test, n); i++) {
        struct vm_sm *sm = on_sm(test, i / 16);
        const float x = uniform(test, -8, 8), acc = uniform(test, -3, 3);
        sm->acc[i % 16][n] = acc;
#if NMK_X_KEPT
        sm->x[i % 16][n] = x;
#else
        ((float *)input(test, t.x))[n * P.hidden + i] = x;
#endif
        yb[n * P.hidden + i] = bf16_value(bf16_round(x + acc));
    }
