#!/bin/bash
# luacheck over the Lua, clang-format over the C.  The CUDA is laid out by hand.

cd "$(dirname "$0")/.." || exit 2
failed=0
mkdir -p build

if ! command -v luacheck >/dev/null; then
  echo "skip - luacheck: not installed (make deps)"
elif luacheck --no-color -q gen specs server tests; then
  echo "ok - luacheck"
else
  echo "not ok - luacheck: see above" && failed=1
fi

shopt -s nullglob
sources=(gen/*.[ch] runtime/*.[ch] server/*.[ch] bench/*.[ch] tests/*.h tests/{runtime,ops,server,gpu,bench,models,conformance,fuzz}/*.[ch] examples/*/*.[ch])
if ! command -v clang-format >/dev/null; then
  echo "skip - clang-format: not installed (make deps)"
elif clang-format --dry-run -Werror "${sources[@]}" 2>build/clang-format.log; then
  echo "ok - clang-format"
else
  grep -aoE '^[^:]+:[0-9]+' build/clang-format.log | sort -u | head -n 40
  echo "not ok - clang-format: these lines are laid out otherwise (clang-format -i FILE)" && failed=1
fi

# What these two do not look at, CUDA and comments in C: no line over 120 columns, no tab, no space at the end.
if grep -rnE '.{121,}|	| +$' templates specs gen runtime server bench examples/chat; then
  echo "not ok - layout: over 120 columns, a tab, or a space at the end" && failed=1
else
  echo "ok - layout"
fi
exit $failed
