#!/bin/bash
# The references of norm, row tiles and route in models that none of ours is: LayerNorm, softmax routers, odd widths.
# The family's values are changed in a copy of specs/.

cd "$(dirname "$0")/../.." || exit 2
work=build/tests/blocks
rm -rf $work && mkdir -p $work/root
cp -r specs $work/root && ln -s "$PWD/gen" "$PWD/templates" $work/root || exit 2
family=$work/root/specs/families/cohere2_moe.lua

for variant in "false sigmoid 256 512" "true chosen 576 1520" "true all 272 560"; do
  read -r mean score hidden ff <<<"$variant"
  sed "s/layer_norm = false/layer_norm = $mean/; s/route = \"sigmoid\"/route = \"$score\"/" \
    specs/families/cohere2_moe.lua >$family
  if [ $mean = true ] && [ "$(diff $family specs/families/cohere2_moe.lua | grep -c '^<.*layer_norm = true.*"'$score'"')" != 1 ]; then
    echo "not ok - blocks $variant: the family has no such facts to change"
    continue
  fi
  sed "s/^model: .*/model: blocks/; s/hidden: 256/hidden: $hidden/; s/dense_ff: 512/dense_ff: $ff/
       s/experts: 16/experts: 10/" specs/nmc-toy.yaml >$work/blocks.yaml
  if ! NMK_ROOT=$work/root build/nmkgen $work/blocks.yaml -o $work/model >$work/log 2>&1 ||
    ! cc -std=gnu11 -O2 -Wall -Wextra -Werror -I$work/model -Iruntime -o $work/run -x c tests/ops/blocks.h \
      $work/model/encoder.c runtime/built_in.c runtime/util.c -lm -lpthread >$work/log 2>&1; then
    echo "not ok - blocks $variant: $(head -n 3 $work/log | tr '\n' ' ')"
    continue
  fi
  $work/run || failed=1
done
exit ${failed:-0}
