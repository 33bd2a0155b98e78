#!/bin/bash
# nmk-run on the CPU with the toy: text, files, ids, several prompts, random weights.
cd "$(dirname "$0")/../.." || exit 2
run=build/nmc-toy/nmk-run
toy=examples/nmc-toy
. tests/helper.sh

go() { timeout 120 $run --device cpu --max-tokens 24 "$@" 2>"$out/stderr"; }

text=$(go --checkpoint $toy --prompt "def add(a, b):")
result "text in, text out" "$([ ${#text} -gt 20 ] && echo 1)" "\"$text\" $(cat "$out/stderr")"
result "figures on stderr" "$(grep -qE '^24 tokens in [0-9.]+ s: [0-9.]+ tokens/s on cpu' "$out/stderr" && echo 1)" \
  "$(cat "$out/stderr")"
printf 'def add(a, b):' >"$out/prompt"
again=$(go --checkpoint $toy --prompt-file "$out/prompt")
result "a prompt from a file" "$([ "$again" = "$text" ] && echo 1)" "$again"
again=$(go --checkpoint $toy --prompt "<BOS_TOKEN>def add(a, b):")
result "a text that writes BOS gets no second one" "$([ "$again" = "$text" ] && echo 1)" "$again"
two=$(go --checkpoint $toy --prompt "def add(a, b):" --prompt "class")
result "several prompts, a line each" "$([ "$(grep -c '^\[[12]\] ' <<<"$two")" = 2 ] && [[ $two == "[1] $text"* ]] && echo 1)" "$two"
ids=$(go --checkpoint $toy --ids --prompt-ids 1,100,200)
result "ids" "$([ "$(wc -w <<<"$ids")" = 24 ] && [[ $ids =~ ^[0-9\ ]+$ ]] && echo 1)" "$ids"
result "--stats" "$(go --checkpoint $toy --stats --prompt x >/dev/null && grep -q 'model nmc-toy, 1 rows' "$out/stderr" && echo 1)" \
  "$(cat "$out/stderr")"
one=$(go --random-weights 3 --ignore-eos --prompt-ids 1,2,3)
two=$(go --random-weights 3 --ignore-eos --prompt-ids 1,2,3 --threads 1)
result "random weights without a checkpoint" "$([ "$(wc -w <<<"$one")" = 24 ] && [ "$one" = "$two" ] && echo 1)" "$one / $two"
exit $failed
