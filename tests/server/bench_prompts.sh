#!/bin/bash
# bench-prompts with the toy on the CPU machine: every part gives its rows, and the trace of a seed is the same.
cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh

bench() {
  timeout 200 build/nmc-toy/bench-prompts --device cpu --first 60,120 --beside 300 --rows 2 --trace 4 --requests 4 \
    --prompts 20-80 --answers 4-9 "$@" 2>&1
}
rows() { # PATTERN COUNT: whether so many lines of the log are such
  [ "$(grep -cE "$1" "$out/log")" = "$2" ] && echo 1
}

bench --server-flags "--prefill-budget-ms 200 --decode-share 50" >"$out/log"
rc=$?
result "it ends well" "$([ $rc = 0 ] && echo 1)" "status $rc: $(tail -n 3 "$out/log")"
result "prompts alone" "$(rows '^\| (60|120) \| [0-9.]+ \([0-9.]+-[0-9.]+\) \| [0-9]+ \|$' 2)" "$(cat "$out/log")"
result "a prompt beside two that decode" "$(rows '^\| 2 \| 300 \| [0-9.]+ \| [0-9.]+ \| [0-9.]+ % \|' 3)" "$(cat "$out/log")"
result "a trace" "$(rows '^\| 4 \| 4 of 4 \|' 1)" "$(cat "$out/log")"
result "the server has its flags" "$(rows 'about 200 ms beside sequences that decode, which keep 50 %' 1)" "$(cat "$out/log")"

trace() { bench --first 0 --beside 0 --seed "$1" | grep -oE '^\| 4 \| 4 of 4 .* [0-9]+, [0-9]+ \| [0-9.]+ \| ' | cut -d'|' -f6; }
one=$(trace 7) two=$(trace 7) three=$(trace 8)
result "a seed is a trace" "$([ -n "$one" ] && [ "$one" = "$two" ] && [ "$one" != "$three" ] && echo 1)" "$one; $two; $three"

bench --prompts 9-3 >"$out/log"
rc=$?
result "a range that is none" "$([ $rc = 2 ] && rows 'LOW-HIGH' 1)" "status $rc: $(cat "$out/log")"
exit $failed
