# For tests in shell, sourced from the top folder: a folder for what they write, one line of result a case.  They end with
# `exit $failed`.
failed=0
out=$(mktemp -d) || exit 2
trap 'rm -rf "$out"' EXIT

result() { # NAME CONDITION WHY
  if [ "$2" = 1 ]; then
    echo "ok - $1"
  else
    echo "not ok - $1: $3" && failed=1
  fi
}

# compiles NAME KERNEL: without spills, where NVRTC is.
compiles() {
  local said
  if said=$(build/nmc-toy/nmk-compile "$2" 2>&1); then
    result "$1" "$([[ $said == *"spills 0 bytes stored 0 loaded"* ]] && echo 1)" "$said"
  elif [[ $said == *"no NVRTC"* ]]; then
    echo "skip - $1: no NVRTC"
  else
    result "$1" 0 "$(head -n 3 <<<"$said" | tr '\n' ' ')"
  fi
}

# expect NAME STATUS TEXT ARG...: $program says one line on stderr that has TEXT, nothing on stdout.  Lines that match
# $aside do not count.
expect() {
  local name=$1 status=$2 text=$3
  shift 3
  timeout 60 "$program" "$@" >"$out/stdout" 2>"$out/stderr" </dev/null
  local rc=$?
  if [ $rc != "$status" ]; then
    echo "not ok - $name: exit status $rc, expected $status: $(head -c 300 "$out/stderr")"
  elif ! grep -qF -- "$text" "$out/stderr"; then
    echo "not ok - $name: message \"$(head -c 300 "$out/stderr")\", expected \"$text\" in it"
  elif [ "$(grep -vcE "${aside:-^$}" "$out/stderr")" != 1 ] || [ -s "$out/stdout" ]; then
    echo "not ok - $name: $(wc -l <"$out/stderr") lines of message"
  else
    echo "ok - $name" && return
  fi
  failed=1
}
