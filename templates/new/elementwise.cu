/*@op
  name     = "NAME",
  summary  = "y = scale * x",               -- one line for `nmkgen ops`
  pipeline = "elementwise",                 -- a function of one number: reads, writes and tasks follow from that
  params   = { {"scale", "f32"} },          -- fixed when generating: P::scale on the device, P.scale in C
  try      = { value = "logits", with = { scale = 0.5 } }, -- how its tests insert it into a model that lacks it
@*/
//@device inline
/* Runs in other ops' registers too: no loops, no tables. exp_fast and the like are in templates/prelude.cuh. */
DEVICE float apply(float x) { return P::scale * x; }

//@reference
/* The plainest correct C: the device is judged by it. */
return P.scale * x;

//@test tolerance=1e-6 scales every element
/* Fill what the op reads, and say what it must leave: `in` and `out` are the value before and after. */
float *in = input(test, t.in), *out = expect_f32(test, t.out);
for (int n = 0; n < NMK_COLUMNS; n++)
    for (int i = 0; i < t.width && live(test, n); i++) {
        const int at = n * t.width + i;
        in[at] = uniform(test, -100, 100);
        out[at] = (float)((double)P.scale * in[at]);
    }
