#!/bin/bash
# The machine code of the kernels of every model in build/: no buffer released under a load, no spills.  First the check
# itself, on small kernels that it must refuse or accept.  Needs NVRTC, no GPU.

cd "$(dirname "$0")/../.." || exit 2
check=tests/sass/early_release.lua
work=build/tests/sass
mkdir -p $work
failed=0

verdict() { # NAME STATUS WHY
  if [ "$2" = 0 ]; then
    echo "ok - sass $1"
  else
    echo "not ok - sass $1: $3" && failed=1
  fi
}

lua5.4 tests/sass/instructions.lua $work || failed=1

compile=build/nmc-toy/nmk-compile
if [ ! -x $compile ]; then
  echo "not ok - sass: $compile is not built"
  exit 1
fi
if ! $compile --no-cache --allow-spills -o $work/kernels.cubin tests/sass/kernels.cu >$work/kernels.log 2>&1; then
  if grep -qi 'nvrtc' $work/kernels.log && ! ls /usr/local/cuda*/lib64/libnvrtc.so* >/dev/null 2>&1; then
    echo "skip - sass: no NVRTC"
    exit 0
  fi
  cat $work/kernels.log
  echo "not ok - sass: the small kernels do not compile"
  exit 1
fi

for kernel in tied ahead; do
  lua5.4 $check $work/kernels.cubin $kernel >$work/$kernel.log
  verdict "accepts $kernel" $? "$(tail -n 1 $work/$kernel.log)"
done
for kernel in untied half_tied; do
  lua5.4 $check $work/kernels.cubin $kernel >$work/$kernel.log
  [ $? = 1 ] && grep -q 'arrive at .* under way' $work/$kernel.log
  verdict "refuses $kernel" $? "was accepted"
done
lua5.4 $check $work/kernels.cubin spilled >$work/spilled.log
[ $? = 1 ] && ! grep -q 'arrive at' $work/spilled.log && ! grep -q ' 0 spill' $work/spilled.log
verdict "counts spills" $? "none found"

# The toy's own kernel with the releases cut loose from the data.
sed 's/ + (seen & p\.zero)//' build/nmc-toy/megakernel.cu >$work/loose.cu
if cmp -s $work/loose.cu build/nmc-toy/megakernel.cu; then
  verdict "refuses the toy's kernel with loose releases" 1 "the kernel has no '+ (seen & p.zero)' to cut"
else
  build/nmc-toy/nmk-compile --allow-spills -o $work/loose.cubin $work/loose.cu >$work/loose.log &&
    ! lua5.4 $check $work/loose.cubin nmk_step >>$work/loose.log && grep -q 'arrive at .* under way' $work/loose.log
  verdict "refuses the toy's kernel with loose releases" $? "was accepted or did not compile"
fi

judge() { # MODEL COMPILER FILE.cu
  local model=$1
  "${@:2:1}" --allow-spills -o $work/$model.cubin "${@:3}" || { verdict "$model compiles" 1 "see above"; return; }
  lua5.4 $check $work/$model.cubin nmk_step >$work/$model.log 2>&1
  code=$? # 1: it found something; 2: it could not judge
  cat $work/$model.log
  [ $code -le 1 ] && ! grep -q 'arrive at' $work/$model.log
  verdict "$model releases no buffer early" $? "see above"
  grep -q ' 0 spill' $work/$model.log
  verdict "$model uses no local memory" $? "$(grep -o '[0-9]* spill' $work/$model.log)s or arrays with computed index"
}

# Of every model of which something was emitted.
for kernel in build/*/megakernel.cu; do
  model=${kernel#build/}
  judge "${model%/*}" $compile $kernel
done

# Shapes that take other paths through the templates than the models do.
for model in narrow-layers wide-layers columns-16 columns-32 columns-64 large-experts ragged-experts large-experts-16; do
  [ -e build/$model/megakernel.cu ] && continue
  if build/nmkgen tests/gpu/specs/$model.yaml -o $work/$model >$work/$model.log 2>&1; then
    judge $model $compile $work/$model/megakernel.cu
  else
    cat $work/$model.log
    verdict "$model is generated" 1 "see above"
  fi
done
exit $failed
