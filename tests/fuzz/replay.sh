#!/bin/bash
# Inputs that a fuzzer once found: corpus/TARGET/NAME, which says in a few words what was wrong.

cd "$(dirname "$0")/../.." || exit 2
for folder in tests/fuzz/corpus/*; do
  build/fuzz/fuzz "${folder##*/}" "$folder"/* || failed=1
done
exit ${failed:-0}
