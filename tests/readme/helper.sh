# For tests that change a copy of the tree, by a section of README.md or otherwise; sourced from the top folder behind
# tests/helper.sh, with $section set.
tree=$PWD/build/tests/readme/$section

# What the tree holds beside build/: a line a file.
contents() { (cd "$tree" && find . -path ./build -prune -o -type f -print0 | sort -z | xargs -0 md5sum); }

copy_tree() {
  rm -rf "$tree"
  mkdir -p "$tree/build"
  cp -pr Makefile README.md CONTRIBUTING.md gen runtime server specs templates tests "$tree/"
  ln -s "$PWD/examples" "$tree/examples"
  # what was built of the generator serves here too; programs are built anew, without optimisation
  cp -pr build/nmkgen build/gen "$tree/build/"
}

# follow TITLE: copies the tree, does all steps.  Leaves their output in $out/steps; new and changed files in $out/diff.
follow() {
  copy_tree
  contents >"$out/before"
  lua5.4 tests/readme/helper_steps.lua README.md "$1" >"$out/steps.sh" || return 1
  (cd "$tree" && export MAKEFLAGS="CFLAGS=-std=gnu11\\ -O0" && timeout 250 bash "$out/steps.sh") >"$out/steps" 2>&1
  local rc=$?
  [ $rc = 0 ] || tail -n 40 "$out/steps"
  contents >"$out/after"
  diff "$out/before" "$out/after" | sed -n 's/^[<>] [0-9a-f]* *//p' | sort -u >"$out/diff"
  return $rc
}

for program in build/nmc-toy/nmk-compile build/tests/nmc-toy/readme/helper_logits; do
  [ -x $program ] || { echo "not ok - readme: $program is not built"; exit 1; }
done
