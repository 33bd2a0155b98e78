#!/bin/bash
# North Mini Code in several schedules, side by side: what is claimed at run time, and in which order the waves come.
#
#   tests/bench/variants.sh build DIR        bench-decode of every variant in DIR/NAME (no GPU; DIR can be taken elsewhere)
#   tests/bench/variants.sh run DIR [FLAG..] runs them in turn with bench-decode's flags, the shipped schedule first and last
#
# A variant is specs/north-mini-code.yaml with a `schedule:` behind it: one line here, or a file of tests/bench/orders.
set -u
mode=${1:-} dir=${2:-}
case $mode in build | run) ;; *) dir= ;; esac
[ -n "$dir" ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
shift 2

NAMES=(shipped up-static up-queue attention-full attention-queue released interleaved attention-first)
schedule() {
  case $1 in
  shipped) ;;
  up-static) printf 'schedule:\n  claim: {up: static}\n' ;;
  up-queue) printf 'schedule:\n  claim: {up: queue}\n' ;;
  attention-full) printf 'schedule:\n  claim: {attention: full}\n' ;;
  attention-queue) printf 'schedule:\n  claim: {attention: queue}\n' ;;
  *) cat "tests/bench/orders/$1.yaml" ;;
  esac
}

if [ "$mode" = run ]; then
  for name in "${NAMES[@]}" shipped; do
    echo "## $name"
    "$dir/$name/bench-decode" "$@" || exit 1
    echo
  done
  exit 0
fi

cd "$(dirname "$0")/../.." || exit 2
make --no-print-directory build/nmkgen || exit 1
for name in "${NAMES[@]}"; do
  made=$dir/$name
  mkdir -p "$made/obj"
  { cat specs/north-mini-code.yaml && schedule "$name"; } >"$made/north-mini-code.yaml"
  build/nmkgen "$made/north-mini-code.yaml" -o "$made" || exit 1
  for source in runtime/*.c "$made"/*.c tests/bench/decode.c; do
    case $source in runtime/run.c | runtime/compile.c) ;; *) echo "$source" ;; esac
  done | xargs -P "$(nproc)" -I{} bash -c 'gcc -std=gnu11 -O2 -Wall -Wextra -Werror -I"$0" -Iruntime -Itests \
    -DNMK_MODEL="\"north-mini-code\"" -DNMK_KERNEL_PATH="\"$0/megakernel.cu\"" -c -o "$0/obj/$(basename {}).o" {}' "$made" &&
    gcc -o "$made/bench-decode" "$made"/obj/*.o -l:libjson-c.a -l:libpcre2-8.a -l:libxxhash.a -l:libutf8proc.a -ldl \
      -lpthread -lm || exit 1
  rm -r "$made/obj"
done
