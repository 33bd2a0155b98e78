#!/bin/bash
# The demo: generate and prove the toy, serve it, and ask it three questions over HTTP: with curl, and with the example
# client.  `make demo` calls this with the word "show"; as a test it checks what the demo prints.

cd "$(dirname "$0")/.." || exit 2
set -o pipefail
checkpoint=examples/nmc-toy
serve=build/nmc-toy/nmk-serve
log=$(mktemp) || exit 2
server=

stop() {
  [ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null
  rm -f "$log"
}
trap stop EXIT

# The server's URL, once it listens.
url() { sed -n 's,.*listening url=\(http[^ ]*\).*,\1,p' "$log"; }

demo() {
  echo "== A megakernel from specs/nmc-toy.yaml: generated, and its schedule proved"
  build/nmkgen check specs/nmc-toy.yaml || return 1
  wc -c build/nmc-toy/{megakernel.cu,abi.h,encoder.c,refvm.c,plan.txt} | sed '$d'
  echo
  echo "== $serve --checkpoint $checkpoint"
  "$serve" --checkpoint $checkpoint --device "${NMK_DEVICE:-auto}" --port 0 2>"$log" &
  server=$!
  while [ -z "$(url)" ] && kill -0 $server 2>/dev/null; do sleep 0.1; done
  sed 's/^/   /' "$log"
  [ -n "$(url)" ] || return 1
  echo
  echo "== curl: What is 17 + 25? The answer's events, shortened"
  if command -v curl >/dev/null; then
    curl -sSN --fail-with-body "$(url)/chat/completions" -d '{"stream": true, "temperature": 0,
      "messages": [{"role": "user", "content": "What is 17 + 25?"}]}' | sed -E 's/"id":.*"choices":/... "choices":/; /^$/d' ||
      return 1
  else
    echo "(curl is not installed)"
  fi
  echo
  echo "== build/nmk-chat, the example client"
  for question in 'What is 7 times 8?' 'Write a Python function that checks if a number is prime.'; do
    echo "> $question"
    build/nmk-chat --url "$(url)" --temperature 0 "$question" 2>&1 || return 1
  done
  echo
  echo "== What the server said meanwhile"
  grep 'request finished' "$log"
  echo
  echo "Go on:  $serve --checkpoint $checkpoint   and in another terminal   build/nmk-chat"
}

if [ "$1" = show ]; then
  demo && exit 0
  echo "make demo: failed" >&2
  exit 1
fi

out=$(mktemp) || exit 2
demo >"$out" 2>&1
code=$?
failed=0
expect() { # NAME TEXT [-x: a whole line]
  if [ $code = 0 ] && grep -qF $3 -- "$2" "$out"; then
    echo "ok - demo $1"
  else
    echo "not ok - demo $1: no '$2'" && failed=1
  fi
}
expect "proves the schedule" "proven"
if command -v curl >/dev/null; then
  expect "streams reasoning" '"delta":{"reasoning_content":" add"'
  expect "streams an answer" '"delta":{"content":"4"}'
  expect "ends the stream" 'data: [DONE]' -x
else
  echo "skip - demo with curl: it is not installed"
fi
expect "multiplies" "56" -x
expect "writes a function" "if n % i == 0:"
expect "logs the requests" "request finished id="
[ $failed = 0 ] || cat "$out"
rm -f "$out"
exit $failed
