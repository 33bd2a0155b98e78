#!/bin/bash
# nmk-serve: wrong flags and missing parts give one message and the right exit status, before anything is loaded.
cd "$(dirname "$0")/../.." || exit 2
serve=build/nmc-toy/nmk-serve
toy=examples/nmc-toy
failed=0
out=$(mktemp -d) || exit 2
trap 'rm -rf "$out"' EXIT

# expect NAME STATUS TEXT ARG...: one line on stderr that has TEXT, nothing on stdout
expect() {
  local name=$1 status=$2 text=$3
  shift 3
  timeout 60 $serve "$@" >"$out/stdout" 2>"$out/stderr" </dev/null
  local rc=$?
  if [ $rc != "$status" ]; then
    echo "not ok - $name: exit status $rc, expected $status: $(head -c 300 "$out/stderr")"
  elif ! grep -qF -- "$text" "$out/stderr"; then
    echo "not ok - $name: message \"$(head -c 300 "$out/stderr")\", expected \"$text\" in it"
  elif [ "$(grep -vc 'left out$' "$out/stderr")" != 1 ] || [ -s "$out/stdout" ]; then
    echo "not ok - $name: $(wc -l <"$out/stderr") lines of message"
  else
    echo "ok - $name" && return
  fi
  failed=1
}

expect "an unknown flag" 2 "unknown flag --max-modellen; the nearest is --max-model-len" --max-modellen 3
expect "an unknown flag with a value" 2 "unknown flag --hosts; the nearest is --host" --hosts=a
expect "a word that is no flag" 2 "$toy: a flag was expected" $toy
expect "a flag without its value" 2 "--port needs a value: N" --checkpoint $toy --port
expect "a switch with a value" 2 "--help takes no value" --help=3
expect "a port that is none" 2 "--port 65536: expected 0 to 65535" --port 65536
expect "a length with another tail" 2 "--max-model-len 8kk: expected a number of tokens" --max-model-len 8kk
expect "no sequences" 2 "--max-num-seqs 0: expected a whole number from 1" --max-num-seqs 0
expect "a seed that is no number" 2 "--random-weights x" --random-weights x
expect "an empty key" 2 "--api-key ''" --api-key=
expect "no checkpoint" 2 "--checkpoint DIR is needed" --port 0
expect "a folder that is none" 1 "nmk-serve: /nowhere" --checkpoint /nowhere --port 0
expect "an address that is none" 1 "nmk-serve: " --checkpoint $toy --port 0 --host 999.1.1.1
expect "a device that is none" 1 "device gpu: expected auto, cpu or cuda:N" --checkpoint $toy --port 0 --device gpu
expect "more context than the model has" 1 "a context of 1048576 tokens" --checkpoint $toy --port 0 --max-model-len 1M

# A checkpoint whose template is broken is refused at the start.
cp -r $toy "$out/broken" && echo '{% if %}' >"$out/broken/chat_template.jinja"
expect "a broken template" 1 "chat_template.jinja: line 1" --checkpoint "$out/broken" --port 0 --device cpu

$serve --checkpoint $toy --port 0 --device cpu 2>"$out/log" &
first=$!
for _ in {1..200}; do
  port=$(sed -n 's,.*http://127.0.0.1:\([0-9]*\)/v1.*,\1,p' "$out/log")
  [ -n "$port" ] && break
  sleep 0.05
done
expect "a port that is taken" 1 "127.0.0.1:$port: the port is in use" --checkpoint $toy --port "$port" --device cpu
kill $first
if wait $first; then
  echo "ok - ends at SIGTERM"
else
  echo "not ok - ends at SIGTERM: $(tail -n 1 "$out/log")" && failed=1
fi

if $serve --help | grep -q -- --served-model-name && $serve --version | grep -q nmc-toy; then
  echo "ok - help and version"
else
  echo "not ok - help and version" && failed=1
fi
exit $failed
