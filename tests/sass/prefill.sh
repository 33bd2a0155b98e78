#!/bin/bash
# The machine code of launches that take prompts, of all shipped specs, of those in tests/gpu/specs that ask for them, and
# of what else is in build/.  What these free is tied to products, not to loads, so no spills and products that run one
# behind another are all there is to see.
# Needs NVRTC, no GPU.

cd "$(dirname "$0")/../.." || exit 2
compile=build/nmc-toy/nmk-compile
work=build/tests/sass_prefill
rm -rf $work && mkdir -p $work
failed=0

for spec in specs/*.yaml $(grep -lE '^prefill:' tests/gpu/specs/*.yaml); do
  model=${spec##*/} && model=${model%.yaml}
  [ -e "build/$model/prefill/megakernel.cu" ] && continue
  root=.
  case $model in normed-*) root=build/tests/root ;; esac # made for build/normed-*
  if ! NMK_ROOT=$root build/nmkgen "$spec" --launch prefill -o "$work/$model/prefill" >"$work/$model.log" 2>&1; then
    echo "not ok - sass $model, prefill: is not generated: $(head -n 1 "$work/$model.log")" && failed=1
  fi
done
for kernel in build/*/prefill/megakernel.cu $work/*/prefill/megakernel.cu; do
  [ -e "$kernel" ] || continue
  model=${kernel%/prefill/*} && model=${model##*/}
  if $compile -o "$work/$model.cubin" "$kernel" >"$work/$model.log" 2>&1; then
    echo "ok - sass $model, prefill: compiles without spills, and no product waits"
  elif grep -qi nvrtc "$work/$model.log" && ! ls /usr/local/cuda*/lib64/libnvrtc.so* >/dev/null 2>&1; then
    echo "skip - sass $model, prefill: no NVRTC"
  else
    echo "not ok - sass $model, prefill: $(tail -n 1 "$work/$model.log")" && failed=1
  fi
done
exit $failed
