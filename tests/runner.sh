#!/bin/bash
# tests/run itself: what it counts as passed, failed and skipped.

cd "$(dirname "$0")/.." || exit 2
work=build/tests/runner
rm -rf $work
mkdir -p $work/tests/{gen,sched} $work/build/tests/nmc-toy/runtime $work/tests/runtime
cp tests/run $work/tests/

echo 'print("ok - a") print("ok - b") print("skip - c: none here") print("okay")' >$work/tests/gen/good.lua
echo 'error("never run")' >$work/tests/gen/helper.lua
failed=0

counts() { # NAME EXPECTED-LINE EXPECTED-EXIT [WORD]
  local out code
  out=$(NMK_TEST_SECONDS=2 $work/tests/run $4 2>/dev/null)
  code=$?
  if [ "$(tail -n 1 <<<"$out")" = "$2" ] && [ $code = "$3" ]; then
    echo "ok - runner $1"
  else
    echo "not ok - runner $1: '$(tail -n 1 <<<"$out")', exit $code" && failed=1
  fi
}

counts "good" "2 passed, 0 failed, 1 skipped" 0
counts "nothing to run is no success" "0 passed, 0 failed, 0 skipped" 1 nosuchtest
echo 'print("ok - d") print("not ok - e: 1 is not 2") os.exit(1)' >$work/tests/sched/bad.lua
counts "a failed case" "3 passed, 1 failed, 1 skipped" 1
counts "by word" "1 passed, 1 failed, 0 skipped" 1 sched
echo 'print("ok - d") os.exit(3)' >$work/tests/sched/bad.lua
counts "an exit status" "1 passed, 1 failed, 0 skipped" 1 sched
echo 'print("well")' >$work/tests/sched/bad.lua
counts "no result" "0 passed, 1 failed, 0 skipped" 1 sched
echo 'while true do end' >$work/tests/sched/bad.lua
counts "a test without end" "0 passed, 1 failed, 0 skipped" 1 sched
touch $work/tests/runtime/lost.c
counts "a program that is not built" "0 passed, 1 failed, 0 skipped" 1 lost
exit $failed
