#!/bin/bash
# Another schedule in a program built before: the same answer on the CPU machine, and a message for what is no such folder.
cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh
program=build/nmc-toy/nmk-run
aside='^nmk-run: weights: ' # when they take more than a second

variant() { # NAME FLAG...
  local name=$1
  shift
  build/nmkgen variant specs/nmc-toy.yaml -o "$out/$name" "$@" >"$out/log" 2>&1 || cat "$out/log"
}
answer() { # FLAG...
  timeout 120 $program --device cpu --checkpoint examples/nmc-toy --prompt "What is 17 + 25?" --max-tokens 12 --ids "$@" 2>&1 |
    grep -vE "$aside|^(kernel|[0-9]+ tokens in)"
}

want=$(answer)
result "the schedule built in answers" "$([ "$(wc -w <<<"$want")" -ge 12 ] && echo 1)" "$want"
same() { # NAME FLAG...
  local name=$1 got
  shift
  variant v "$@"
  got=$(answer --variant "$out/v")
  result "$name" "$([ "$got" = "$want" ] && echo 1)" "'$got', built in '$want'"
}
same "as generated"
same "another order, other buffers" --set reuse_buffers=false \
  --set 'order=[norm, qkv, router, attention, route, combine, up, o_proj, down, residual]'
same "another placement" --set placement.rule=random --set placement.seed=5 --set ring_stages=8
same "round robin" --set placement.rule=round_robin --set in_flight=5

variant good
refuses() { # NAME TEXT
  expect "$1" 1 "$2" --device cpu --checkpoint examples/nmc-toy --prompt hi --variant "$out/bad"
  rm -rf "$out/bad"
}
refuses "no folder" "$out/bad/lists: "
bad() { rm -rf "$out/bad" && cp -r "$out/good" "$out/bad"; }
bad && rm "$out/bad/megakernel.cu"
refuses "no kernel" "$out/bad/megakernel.cu: "
bad && echo >>"$out/bad/megakernel.cu"
refuses "another kernel" "megakernel.cu: is not the kernel that nmkgen wrote together with"
bad && sed -i 's/^max_tasks .*/max_tasks 60/' "$out/bad/lists"
refuses "a line changed" "lists: lines were changed after nmkgen wrote them"
bad && sed -i 's/^max_tasks .*/max_tasks many/' "$out/bad/lists"
refuses "a line that is no number" "lists:8: max_tasks: expected 1 number from 1 to "
bad && sed -i '/^arena_bytes/d' "$out/bad/lists"
refuses "a line missing" "lists:11: expected \"arena_bytes ...\", got \"exchange_at"
bad && sed -i 's/^nmk-lists 3/nmk-lists 4/' "$out/bad/lists"
refuses "another version" "lists: version 4, this program reads 3"
bad && sed -i 's/^abi 0x./abi 0xf0/' "$out/bad/lists"
refuses "another shape" "lists:4: nmc-toy of another shape, target, version or number of columns than this program's: build again"
bad && truncate -s -4 "$out/bad/lists"
refuses "cut short" "is the file whole?"
bad && printf '\1' | dd of="$out/bad/lists" bs=1 seek=$(($(stat -c %s "$out/bad/lists") - 200)) conv=notrunc 2>/dev/null
refuses "a word changed" "the words are not those that nmkgen proved"
bad && head -c 40 "$out/good/lists" >"$out/bad/lists"
refuses "a few lines" "lists:"
bad && : >"$out/bad/lists"
refuses "an empty file" "lists:1: expected \"nmk-lists ...\", got \"\""
mkdir "$out/other" && build/nmkgen variant tests/gpu/specs/nmc-layers.yaml -o "$out/other" >/dev/null && mv "$out/other" "$out/bad"
refuses "another model" "lists:2: is for model nmc-layers, this program for nmc-toy"
variant bad --set split.chunks_max=16
refuses "other places for attention's chunks" "the variant 128: it can run on a GPU only"
expect "a kernel beside it" 1 "expected one of them" --device cpu --checkpoint examples/nmc-toy --prompt hi \
  --variant "$out/good" --kernel x.cu
exit $failed
