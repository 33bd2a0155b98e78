#!/bin/bash
# ASAN_TESTS of the Makefile: what of the tests of server and runtime takes seconds under ASan and UBSan, leaks included.
# make test-asan runs all of them.

cd "$(dirname "$0")/../../build/asan" || exit 2
export NMK_SLOW=${NMK_SLOW:-$(<build/slow)}
while read -r test; do
  if "$test" >build/quick.log 2>&1 </dev/null; then
    echo "ok - $test under ASan"
  else
    echo "not ok - $test under ASan: exit status $?"
    grep -v '^ok' build/quick.log | head -n 60
  fi
done <build/quick
