#!/bin/bash
# README.md, "Add an opcode in ten minutes", followed word by word in a copy of the tree.  The op is one new file; the model
# that it makes has the logits of the toy, capped.

cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh
section=opcode
. tests/readme/helper.sh

follow "Add an opcode in ten minutes"
result "readme: the steps of adding an opcode" $((! $?)) "see above"
result "readme: an opcode is one new file, beside the spec" \
  $([ "$(cat "$out/diff")" = $'./specs/softcap-toy.yaml\n./templates/ops/logit_softcap.cu' ] && echo 1) "$(xargs <"$out/diff")"
count() { grep -cE "$1" "$out/steps"; }
result "readme: the tests of the scaffold and of the op pass" \
  $([ "$(count '^ok - op logit_softcap: .* columns live$')" = 4 ] && [ "$(count '^not ok')" = 0 ] && echo 1) \
  "$(grep 'ok - ' "$out/steps" | xargs)"
compiled=$(grep -E 'op logit_softcap: the kernel compiles' "$out/steps" | tail -n 1)
case $compiled in
skip*) echo "skip - readme: the op compiles without spills: no NVRTC" ;;
*) result "readme: the op compiles without spills" $([[ $compiled = *"spills 0 bytes" ]] && echo 1) "$compiled" ;;
esac
result "readme: nmkgen ops tells of the op" $([ "$(count '^[0-9]+ logit_softcap: y = cap \* tanh')" = 1 ] && echo 1) "no"

# The same prompt through both models: 30 * tanh(x / 30) of each logit, worked out here.
ids="17 305 2048 9 77 4095 1"
build/tests/nmc-toy/readme/helper_logits examples/nmc-toy $ids >"$out/plain" 2>&1
make -s -C "$tree" CFLAGS='-std=gnu11 -O0' build/tests/softcap-toy/readme/helper_logits >"$out/make" 2>&1
"$tree"/build/tests/softcap-toy/readme/helper_logits examples/nmc-toy $ids >"$out/capped" 2>&1
why=$(paste "$out/plain" "$out/capped" | awk '
  function tanh(x, e) { e = exp(-2 * (x < 0 ? -x : x)); return (x < 0 ? -1 : 1) * (1 - e) / (1 + e) }
  { want = 30 * tanh($1 / 30); off = want - $2; if (off < 0) off = -off; if (off > most) most = off
    change = $1 - $2; if (change < 0) change = -change; if (change > changed) changed = change }
  END { if (NR != 4096 || !(most < 1e-4) || !(changed > 0.1))
          printf "%d logits, largest error %g, largest change %g", NR, most, changed }')
result "readme: the model has the toy's logits, capped" $([ -z "$why" ] && echo 1) "$why: $(head -n 3 "$out/capped" | xargs)"

compiles "readme: the model's kernel compiles without spills" "$tree/build/softcap-toy/megakernel.cu"
rm -rf "$tree"
exit $failed
