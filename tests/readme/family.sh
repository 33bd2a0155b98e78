#!/bin/bash
# README.md, "Add a model family", followed word by word in a copy of the tree.  The family is one new file; its model has the
# logits that a plain program computes from the same random weights.

cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh
section=family
. tests/readme/helper.sh

follow "Add a model family"
result "readme: the steps of adding a family" $((! $?)) "see above"
result "readme: a family is one new file, beside the spec" \
  $([ "$(cat "$out/diff")" = $'./specs/families/side_by_side.lua\n./specs/side-by-side-tiny.yaml' ] && echo 1) \
  "$(xargs <"$out/diff")"
result "readme: the family's lists are proven" \
  $(grep -qE '^side-by-side-tiny: 3 layers, .*, proven$' "$out/steps" && echo 1) "$(head -n 3 "$out/steps" | xargs)"
result "readme: nmkgen keys tells of the family" \
  $(grep -q '^In the family side_by_side, parallel block, RMSNorm, dense:$' "$out/steps" && echo 1) "no"

make -s -C "$tree" CFLAGS='-std=gnu11 -O1' build/tests/side-by-side-tiny/readme/helper_side_by_side >"$out/make" 2>&1
"$tree"/build/tests/side-by-side-tiny/readme/helper_side_by_side 5 17 305 2048 9 77 4095 1 >"$out/logits" 2>&1
result "readme: the model computes what the family says" $((! $?)) "$(tail -n 3 "$out/make" "$out/logits" | xargs)"
compiles "readme: the family's kernel compiles without spills" "$tree/build/side-by-side-tiny/megakernel.cu"
rm -rf "$tree"
exit $failed
