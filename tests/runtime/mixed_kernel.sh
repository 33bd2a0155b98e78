#!/bin/bash
# The kernel that is a step and behind it a chunk compiles, without spills and with products that are not serialized: the
# toy's and North Mini Code's.
cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh

for model in nmc-toy north-mini-code; do
  said=$(build/$model/nmk-compile --launch mixed 2>&1)
  rc=$?
  if [[ $said == *"no NVRTC"* ]]; then
    echo "skip - $model: a step and a chunk in one kernel: no NVRTC"
  else
    result "$model: a step and a chunk in one kernel" "$([[ $rc = 0 && $said == *"168 registers, spills 0 bytes"* ]] && echo 1)" "$said"
  fi
done
said=$(build/nmc-toy/nmk-compile --launch both 2>&1)
result "a launch that there is not" "$([[ $? = 2 && $said == *"--launch both"* ]] && echo 1)" "$said"
exit $failed
