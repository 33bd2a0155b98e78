#!/bin/bash
# Steps of more columns than an MMA takes, on the CPU machine: the same texts as transformers', and rows in company.

cd "$(dirname "$0")/../.." || exit 2
for test in engine_cpu columns; do
  build/tests/toy-64/runtime/$test | sed 's/^\(ok\|not ok\) - /\1 - 64 columns: /'
  [ "${PIPESTATUS[0]}" = 0 ] || failed=1
done
exit ${failed:-0}
