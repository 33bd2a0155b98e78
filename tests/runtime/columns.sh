#!/bin/bash
# Steps of more columns than an MMA takes, on the CPU machine: the same texts as transformers', and rows in company.
# Those of a model of its own, then the wider ones that the toy's programs carry beside their own (--max-batch).

cd "$(dirname "$0")/../.." || exit 2
run() { # NAME PROGRAM WORD...
  local name=$1
  "${@:2}" | sed "s/^\(ok\|not ok\) - /\1 - $name: /"
  [ "${PIPESTATUS[0]}" = 0 ] || failed=1
}
for test in engine_cpu columns; do
  run "64 columns" build/tests/toy-64/runtime/$test
  for rows in 3 12 16; do run "toy, $rows rows" build/tests/nmc-toy/runtime/$test $rows; done
done

verdict() { # NAME STATUS WHY
  [ "$2" = 0 ] && echo "ok - $1" && return
  echo "not ok - $1: $3" && failed=1
}
ask() { build/nmc-toy/nmk-run --checkpoint examples/nmc-toy --device cpu --prompt "What is 7 times 8?" "$@" 2>&1; }
said=$(ask --max-batch 17)
[ $? = 1 ] && [ "$said" = "nmk-run: 17 sequences at once (--max-batch): this program was built with steps for 8 and 16" ]
verdict "more rows than any step has" $? "$said"
said=$(ask --max-batch 1 --prompt b)
[ $? = 2 ] && [[ $said == "nmk-run: --max-batch 1: there are 2 prompts" ]]
verdict "more prompts than rows" $? "$said"

# What a variant is for decides how many rows it has.
folder=build/tests/variant-columns
build/nmkgen variant specs/nmc-toy.yaml --set columns=16 --set split.pages_per_chunk=1 -o $folder >/dev/null
said=$(ask --variant $folder --max-tokens 4 --stats --max-batch 12)
verdict "a variant of 16 columns" $? "$said"
said=$(ask --variant $folder --max-batch 17)
[ $? = 1 ] && [[ $said == "nmk-run: 17 sequences at once: the steps of the variant in $folder hold 16" ]]
verdict "more rows than a variant has" $? "$said"
exit ${failed:-0}
