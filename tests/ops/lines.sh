#!/bin/bash
# What compilers say of an op names the op's file and its line: NVRTC of device code, gcc of references and tests; of an op
# with tasks, of one that is a function of a number, and of such a one inserted at a point.

cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh
root=$out/root
mkdir "$root" && cp -r gen templates specs "$root/"

nmkgen() { NMK_ROOT=$root build/nmkgen "$@" >"$out/log" 2>&1 || cat "$out/log"; }
nmkgen new-op row_max --like task
nmkgen new-op scale_it

# says TEXT FILE: the compiler's words of the last compilation name FILE.  Of NVRTC "FILE(LINE)", of gcc "FILE:LINE:".
says() { grep -qF -- "$1" "$out/log" && echo 1; }

device() { # NAME WHERE
  build/nmc-toy/nmk-compile --no-cache "$out/model/megakernel.cu" >"$out/log" 2>&1
  if grep -q 'no NVRTC' "$out/log"; then
    echo "skip - $1: no NVRTC"
  else
    result "$1" "$(says "$2")" "$(grep -m 3 error "$out/log" | xargs -0)"
  fi
}
host() { # NAME WHERE
  compile_host
  result "$1" "$(says "$2")" "$(grep -m 3 error "$out/log" | xargs -0)"
}
compile_host() {
  printf '#include "refvm.c"\n#include "ops/helper_cases.h"\n#include "op_tests.h"\n' |
    gcc -std=gnu11 -Wall -fsyntax-only -I"$out/model" -Iruntime -Itests -x c - >"$out/log" 2>&1
}
line() { grep -nF -- "$2" "$root/templates/ops/$1.cu" | head -n 1 | cut -d: -f1; }

# broken OP TEXT: generates with `no_such_thing` behind the line that has TEXT; sets at to that line's number.
broken() {
  local file=templates/ops/$1.cu
  cp "$root/$file" "$out/whole"
  at=$(line "$1" "$2")
  [ -n "$at" ] || { result "$file has a line '$2'" "" "it has not" && return; }
  at=$((at + 1))
  sed -i "$((at - 1))a no_such_thing;" "$root/$file"
  where=$file
  shift 2
  nmkgen "$@" -o "$out/model"
  cp "$out/whole" "$root/$file"
}

cat specs/nmc-toy.yaml - >"$out/point.yaml" <<'END'
insert:
  - { op: scale_it, value: final_logits, with: { scale: 0.5 } }
END
toy=specs/nmc-toy.yaml

broken residual 'if (!P::handed) c.hand_sum();' $toy
device "NVRTC names the line of a role's code" "$where($at)"
broken row_max 'float most = P::floor;' $toy --try row_max
device "NVRTC names the line of a helper's code" "$where($at)"
broken scale_it '//@device inline' $toy --try scale_it
device "NVRTC names the line of an elementwise op" "$where($at)"
broken scale_it '//@device inline' "$out/point.yaml"
device "NVRTC names the line of what a point calls" "$where($at)"
broken residual 'uint16_t *yb = buffer(vm, t.yb);' $toy
host "gcc names the line of a reference" "$where:$at:"
broken scale_it '//@reference' $toy --try scale_it
host "gcc names the line of an elementwise op's reference" "$where:$at:"
broken scale_it '//@reference' "$out/point.yaml"
host "gcc names the line of the reference at a point" "$where:$at:"
broken row_max '/* Fill what the op reads' $toy --try row_max
host "gcc names the line of a test" "$where:$at:"
# and without a mistake nobody complains
nmkgen $toy --try row_max -o "$out/model"
compile_host
result "gcc says nothing where nothing is wrong" "$([ ! -s "$out/log" ] && echo 1)" "$(head -n 3 "$out/log" | xargs)"
exit $failed
