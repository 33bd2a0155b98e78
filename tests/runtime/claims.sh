#!/bin/bash
# schedule.claim and schedule.order change who works when, never what comes out: the toy with everything dealt, with
# everything claimed, and in the published orders is proved, gives the same bits on the CPU machine, whatever the seed, and
# its kernel compiles without spills.  Two orders differ in their bits where one adds the experts to the residual before the
# attention, the other after; those that add the experts first are held against transformers.
cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh

bits() { grep -a '^bits, ' <<<"$1"; }
order=build/tests/nmc-toy/runtime/refvm_order
attention_first=$(bits "$(timeout 120 $order --bits)") experts_first=
result "the shipped schedule" "$([ "$(wc -l <<<"$attention_first")" = 2 ] && echo 1)" "$attention_first"

# variant NAME: with the schedule in $out/NAME.yaml.
variant() {
  local name=$1 made=$out/$1 said
  mkdir "$made"
  cat specs/nmc-toy.yaml "$out/$name.yaml" >"$made/nmc-toy.yaml"
  said=$(build/nmkgen "$made/nmc-toy.yaml" -o "$made" 2>&1)
  result "$name: proved" "$([[ $said == *proven* ]] && echo 1)" "$said"

  # What knows the lists is compiled anew; the rest knows the model only.
  said=$(printf '%s\n' "$made"/{encoder,refvm}.c tests/runtime/refvm_{order,golden,claims}.c | xargs -P 2 -I{} bash -c 'gcc \
    -std=gnu11 -O3 -ffp-contract=off -Wall -Wextra -Werror -DNMK_MODEL="\"nmc-toy\"" -I"$0" -Iruntime -Itests -c \
    -o "$0/$(basename {}).o" {}' "$made" 2>&1 && for test in order golden claims; do
    own=$made/refvm.c.o; [ $test = claims ] && own= # includes it
    gcc -o "$made/$test" "$made"/{refvm_$test,encoder}.c.o $own build/nmc-toy/libnmk.a -l:libjson-c.a -l:libpcre2-8.a \
      -l:libxxhash.a -l:libutf8proc.a -ldl -lpthread -lm 2>&1; done)
  result "$name: compiled" "$([ -x "$made/order" ] && [ -x "$made/golden" ] && [ -x "$made/claims" ] && echo 1)" "$said"
  if grep -q queue "$made/nmc-toy.yaml"; then # its mistakes are in tickets
    said=$(timeout 60 "$made/claims")
    result "$name: every unit once" "$(! grep -aq '^not ok' <<<"$said" && grep -aq '^ok' <<<"$said" && echo 1)" "$said"
  fi
  said=$(timeout 120 "$made/order" --bits)
  local want=$attention_first
  if grep -q 'down.*o_proj' "$made/nmc-toy.yaml"; then
    want=$experts_first
    if [ -z "$want" ]; then
      want=$(bits "$said")
      experts_first=$want
      local golden
      golden=$(timeout 120 "$made/golden")
      result "$name: as transformers" "$(! grep -aq '^not ok' <<<"$golden" && grep -aq '^ok' <<<"$golden" && echo 1)" "$golden"
    fi
  fi
  result "$name: the same bits" \
    "$([ -n "$want" ] && [ "$(bits "$said")" = "$want" ] && ! grep -aq '^not ok' <<<"$said" && echo 1)" "$said"

  compiles "$name: the kernel compiles" "$made/megakernel.cu"
}

printf 'schedule:\n  claim: {up: static}\n' >"$out/static.yaml"
printf 'schedule:\n  claim: {up: queue, attention: queue}\n' >"$out/queue.yaml"
cp tests/bench/orders/*.yaml "$out"
for file in "$out"/*.yaml; do variant "$(basename "$file" .yaml)"; done
exit $failed
