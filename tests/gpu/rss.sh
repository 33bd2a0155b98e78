#!/bin/bash
# Host memory of nmk-serve with a checkpoint of North Mini Code's size, on a real GPU: below 4 GB while it loads, below
# 300 MB beside what the driver takes afterwards.  The file is a hole, so it takes no space; reading it takes a while.
cd "$(dirname "$0")/../.." || exit 2
model=${1:-north-mini-code}
serve=build/$model/nmk-serve
writer=build/tests/$model/runtime/load_memory
. tests/helper.sh

if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "skip - host memory of $model: no GPU"
  exit 0
fi
if [ ! -x "$serve" ] || [ ! -x "$writer" ]; then
  echo "skip - host memory of $model: $writer is not built (make gpu)"
  exit 0
fi
"$writer" write "$out/checkpoint" && cp examples/nmc-toy/tokenizer{,_config}.json "$out/checkpoint" || exit 2

"$serve" --checkpoint "$out/checkpoint" --device cuda:0 --port 0 2>"$out/log" &
server=$!
for _ in {1..1500}; do
  grep -q 'http://' "$out/log" && break
  kill -0 $server 2>/dev/null || break
  sleep 0.2
done
status=$(cat /proc/$server/status 2>/dev/null)
kib() { sed -n "s/^$1:[[:space:]]*\([0-9]*\) kB/\1/p" <<<"$status"; }
most=$(kib VmHWM) now=$(kib VmRSS)
kill $server 2>/dev/null
wait $server
# A driver's own share, without any model: a process that only opens the GPU.
build/nmc-toy/nmk-serve --random-weights 1 --device cuda:0 --port 0 2>"$out/log2" &
other=$!
for _ in {1..300}; do grep -q 'http://' "$out/log2" && break; kill -0 $other 2>/dev/null || break; sleep 0.2; done
status=$(cat /proc/$other/status 2>/dev/null)
driver=$(kib VmRSS)
kill $other 2>/dev/null
wait $other
grep -E 'weights|host' "$out/log"
echo "# at most $((${most:-0} / 1024)) MiB, $((${now:-0} / 1024)) MiB after loading, a toy $((${driver:-0} / 1024)) MiB"
result "host memory while $model loads" $((${most:-0} > 0 && ${most:-0} < 4000000)) \
  "${most:-0} KiB at most; $(tail -n 1 "$out/log")"
result "host memory after loading $model" $((${now:-0} > 0 && ${driver:-0} > 0 && ${now:-0} - ${driver:-0} < 300000)) \
  "${now:-0} KiB, ${driver:-0} KiB for a toy; $(tail -n 1 "$out/log")"
exit $failed
