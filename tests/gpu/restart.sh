#!/usr/bin/env bash
# nmk-serve when its GPU is lost: it starts again at the same port and gives the same answers.  The toy's kernel traps
# here when a sequence has FATAL tokens to go.
cd "$(dirname "$0")/../.." || exit 2
FATAL=77
serve=build/nmc-toy/nmk-serve
. tests/helper.sh

if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "skip - a lost GPU: no GPU"
  exit 0
fi

trap_line="    if (flags \\& NMK_COLUMN_SAMPLES \\&\\& __ldcg(\\&column->remaining) == $FATAL) asm volatile(\"trap;\");"
sed '/^namespace op_sample {/,/^} \/\//s/^    nmk_column \*column = .*->column\[n\];$/&\n'"$trap_line/" \
  build/nmc-toy/megakernel.cu >"$out/failing.cu"
compiled=$(build/nmc-toy/nmk-compile "$out/failing.cu" 2>&1)
result "a kernel that fails on demand" $(($? == 0 && $(grep -c '"trap;"' "$out/failing.cu") == 1)) "$compiled"

$serve --checkpoint examples/nmc-toy --device cuda:0 --port 0 --kernel "$out/failing.cu" 2>"$out/log" &
server=$!
trap 'kill $server 2>/dev/null; rm -rf "$out"' EXIT

log_has() { grep -c -- "$1" "$out/log"; }
for _ in {1..600}; do
  [ "$(log_has ' listening ')" = 1 ] && break
  kill -0 $server 2>/dev/null || break
  sleep 0.1
done
port=$(sed -n 's,.*listening url=http://127.0.0.1:\([0-9]*\)/.*,\1,p' "$out/log")
if [ -z "$port" ]; then
  result "nmk-serve starts with it" 0 "$(tail -n 3 "$out/log")"
  exit 1
fi

# ask METHOD PATH BODY: the answer with its head, at most 60 s from now, whoever accepts the connection.
ask() {
  exec 3<>"/dev/tcp/127.0.0.1/$port" || return 1
  printf '%s %s HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s' "$1" "$2" ${#3} "$3" >&3
  timeout 60 cat <&3
  exec 3>&-
}
# complete TOKENS
complete() {
  ask POST /v1/completions "{\"temperature\": 0, \"ignore_eos\": true, \"max_tokens\": $1, \"prompt\": [1, 3, 6, 100]}"
}
status() { head -n 1 <<<"$1" | cut -d ' ' -f 2; }
text() { grep -o '"text":"[^"]*"' <<<"$1"; }

first=$(complete 20)
result "an answer" $(($(status "$first") == 200)) "$first"
for loss in 1 2; do
  answer=$(complete $FATAL)
  result "loss $loss: the request fails" $(($(status "$answer") == 500)) "$answer"
  start=$SECONDS
  answer=$(complete 20)
  echo "# an answer $((SECONDS - start)) s after the loss"
  [ "$(text "$answer")" = "$(text "$first")" ]
  result "loss $loss: the same port gives the same answer" $(($? == 0 && $(status "$answer") == 200)) \
    "$answer; $(tail -n 3 "$out/log")"
  answer=$(ask GET /health "")
  result "loss $loss: it is healthy" $(($(status "$answer") == 200)) "$answer"
  result "loss $loss: the log says so" $(($(log_has ' error engine lost reason=') == loss &&
    $(log_has ' warning starting again restarts=1') == loss &&
    $(log_has " listening url=http://127.0.0.1:$port/v1") == loss + 1)) "$(grep -E ' (error|warning) ' "$out/log")"
done
kill $server
wait $server
code=$?
result "it ends at SIGTERM" $((code == 0)) "exit status $code: $(tail -n 1 "$out/log")"
grep -E ' (error|warning) ' "$out/log" | sed 's/^/# /'
exit $failed
