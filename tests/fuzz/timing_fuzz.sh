#!/bin/bash
# All fuzzers, side by side: timing_fuzz.sh [TARGET...]
#
#   NMK_FUZZ_SECONDS=60   for each
#   NMK_FUZZ_JOBS=0       how many at a time; 0: all
#   NMK_FUZZ_SEED=1

cd "$(dirname "$0")/../.." || exit 2
[ $# != 0 ] || mapfile -t all < <(build/fuzz/fuzz --list)
printf '%s\0' "$@" "${all[@]}" | xargs -0 -n 1 -P "${NMK_FUZZ_JOBS:-0}" \
  build/fuzz/fuzz --seconds "${NMK_FUZZ_SECONDS:-60}" --seed "${NMK_FUZZ_SEED:-1}"
