#!/bin/bash
# Serves tests/gen/tune.lua: a bench whose best schedule is known.  It reads what --variant brings, multiplies a price for
# each step away from the best, and adds noise and a drift that would fool who measures one schedule after the other.
while [ $# -gt 0 ]; do
  case $1 in --variant) variant=$2 ;; --batch) batch=$2 ;; esac
  shift 2
done
[ -z "$NMK_FAKE_FAIL" ] || { echo "bench-decode: no CUDA driver"; exit 1; }
count=$(($(cat "$NMK_FAKE_COUNT" 2>/dev/null || echo 0) + 1))
echo "$count" >"$NMK_FAKE_COUNT"
[ "$count" != "$NMK_FAKE_STOP" ] || exit 130
echo "toy on cuda:0 (a machine of paper): kernel 0.1 s"
echo "| batch | context | sampling | ms/step |"
echo "|--|--|--|--|"
head -c 600 "$variant/lists" | tr -d '\0' | grep -a -E '^(in_flight|split|ring_stages) ' |
  awk -v batches="$batch" -v count="$count" -v seed="${NMK_FAKE_SEED:-1}" '
    function away(x, best) { return x > best ? x - best : best - x }
    { for (i = 2; i <= NF; i++) v[$1, i - 1] = $i }
    END {
      srand(count * 7919 + seed)
      n = split(batches, b, ",")
      for (i = 1; i <= n; i++) {
        best = b[i] == 1 ? 2 : 4
        ms = 1 + 0.02 * away(v["in_flight", b[i]], best) + 0.01 * away(v["split", 3], 2) \
          + 0.01 * (12 - v["ring_stages", 1])
        ms *= 1 + 0.004 * (rand() - 0.5) + 0.002 * count / 10
        printf "| %d | 2048 | greedy | %.4f (1-1) | 0 |\n", b[i], ms
      }
    }'
