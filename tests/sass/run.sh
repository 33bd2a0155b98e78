#!/bin/bash
# The machine code of the kernels of every model in build/: no buffer released under a load, no spills.  First the check
# itself, on small kernels that it must refuse or accept.  Needs NVRTC, no GPU.

cd "$(dirname "$0")/../.." || exit 2
. tests/sass/helper.sh

lua5.4 tests/sass/instructions.lua $work || failed=1
small_kernels kernels

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

# Of every model of which something was emitted.
for kernel in build/*/megakernel.cu; do
  model=${kernel#build/}
  judge "${model%/*}" $kernel
done
exit $failed
