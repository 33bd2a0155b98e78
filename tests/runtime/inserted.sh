#!/bin/bash
# Ops that a spec inserts change what they say and nothing else: the toy with x * 1 behind values of every kind has the
# toy's logits, bit for bit, and with x / 2 at the last point half of them.

cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh
section=inserted
. tests/readme/helper.sh

copy_tree
cd "$tree" && {
  build/nmkgen new-op scale_it
  sed 's/^model: .*/model: inserted/' specs/nmc-toy.yaml
  cat <<'END'
insert:
  - { op: scale_it, value: x, with: { scale: 1 } }
  - { op: scale_it, value: qkv, layers: [0, 2, 4], with: { scale: 1 } }
  - { op: scale_it, value: qkv, layers: [2], with: { scale: 1 } }
  - { op: scale_it, value: dense_h, with: { scale: 1 } }
  - { op: scale_it, value: logits, layers: all, with: { scale: 1 } }
  - { op: scale_it, value: final_logits, with: { scale: 0.5 } }
  - { op: scale_it, value: raw_logits, layers: outside, with: { scale: 1 } }
END
} 2>"$out/err" | sed '/^templates/d' >specs/inserted.yaml
make -s CFLAGS='-std=gnu11 -O0' build/tests/inserted/readme/helper_logits >"$out/make" 2>&1
result "inserted ops: the model builds" $((! $?)) "$(tail -n 3 "$out/make" | xargs)"
cd ../../../.. || exit 2

half() { lua5.4 -e 'for line in io.lines() do print(("%.17g"):format(tonumber(line) / 2)) end'; }
different=0
for ids in "17" "17 305 2048 9 77 4095 1" "4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"; do
  build/tests/nmc-toy/readme/helper_logits examples/nmc-toy $ids 2>&1 | half >"$out/plain" 2>&1
  "$tree"/build/tests/inserted/readme/helper_logits examples/nmc-toy $ids >"$out/inserted" 2>&1
  [ "$(wc -l <"$out/plain")" = 4096 ] && cmp -s "$out/plain" "$out/inserted" || different=$((different + 1))
done
result "inserted ops: half of each logit, bit for bit" $((different == 0)) \
  "$different of 3 prompts differ: $(paste "$out/plain" "$out/inserted" | head -n 2 | xargs)"
compiles "inserted ops: the kernel compiles without spills" "$tree/build/inserted/megakernel.cu"
rm -rf "$tree"
exit $failed
