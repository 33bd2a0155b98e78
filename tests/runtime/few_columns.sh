#!/bin/bash
# schedule.columns: the toy generated for fewer columns gives transformers' greedy text, alone and as a ragged batch, and
# its kernel compiles without spills.
cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh

# Prompts and answers of the goldens, in turn; each line the numbers with commas.
sed 's/.*"prompts": //' tests/golden/nmc-toy.json | grep -oE '"(ids|greedy64)": \[[0-9, ]+\]' | head -n 6 |
  sed 's/[^0-9]*[0-9]*": //; s/[][ ]//g' >"$out/golden"
prompt() { sed -n "$((2 * $1 - 1))p" "$out/golden"; }
answer() { sed -n "$((2 * $1))p" "$out/golden" | tr ',' ' '; }

for columns in 1 3; do
  made=$out/$columns
  mkdir "$made"
  { cat specs/nmc-toy.yaml && printf 'schedule:\n  columns: %d\n' $columns; } >"$made/nmc-toy.yaml"
  said=$(build/nmkgen "$made/nmc-toy.yaml" -o "$made" 2>&1)
  result "columns $columns: proved" "$([[ $said == *proven* ]] && echo 1)" "$said"

  said=$(for source in runtime/*.c "$made"/*.c; do [[ $source == */compile.c ]] || echo "$source"; done |
    xargs -P 2 -I{} bash -c 'gcc -std=gnu11 -O2 -ffp-contract=off -Wall -Wextra -Werror -I"$0" -Iruntime \
      -DNMK_KERNEL_PATH="\"$0/megakernel.cu\"" -c -o "$0/$(basename {}).o" {}' "$made" 2>&1 &&
    gcc -o "$made/nmk-run" "$made"/*.o -l:libjson-c.a -l:libpcre2-8.a -l:libxxhash.a -l:libutf8proc.a -ldl -lpthread -lm 2>&1)
  result "columns $columns: compiled" "$([ -x "$made/nmk-run" ] && echo 1)" "$said"

  go() {
    timeout 120 "$made/nmk-run" --checkpoint examples/nmc-toy --device cpu --max-tokens 64 --ignore-eos --ids "$@" 2>"$out/stderr"
  }
  if [ $columns = 1 ]; then
    for i in 1 2 3; do
      got=$(go --prompt-ids "$(prompt $i)")
      result "columns 1: greedy text of prompt $i" "$([ -n "$got" ] && [ "${got% }" = "$(answer $i)" ] && echo 1)" \
        "$got $(cat "$out/stderr")"
    done
    go --prompt x --prompt y
    result "columns 1: one prompt at a time" "$(grep -q 'at most 1 prompt$' "$out/stderr" && echo 1)" "$(cat "$out/stderr")"
  else
    got=$(go --prompt-ids "$(prompt 1)" --prompt-ids "$(prompt 2)" --prompt-ids "$(prompt 3)" | sed 's/ $//')
    want=$(for i in 1 2 3; do echo "[$i] $(answer $i)"; done)
    result "columns $columns: greedy text of a ragged batch" "$([ "$got" = "$want" ] && echo 1)" "$got $(cat "$out/stderr")"
  fi

  compiles "columns $columns: the kernel compiles" "$made/megakernel.cu"
done
exit $failed
