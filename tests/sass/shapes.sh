#!/bin/bash
# The machine code of shapes that take other paths through the templates than the models do.  Needs NVRTC, no GPU.

cd "$(dirname "$0")/../.." || exit 2
. tests/sass/helper.sh
small_kernels shapes

for model in narrow-layers wide-layers columns-16 columns-32 columns-64 large-experts ragged-experts large-experts-16; do
  made=$work/$model
  if build/nmkgen tests/gpu/specs/$model.yaml -o $made >$work/$model.log 2>&1; then
    judge $model $made/megakernel.cu
  else
    cat $work/$model.log
    verdict "$model is generated" 1 "see above"
  fi
done
exit $failed
