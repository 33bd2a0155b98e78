#!/bin/bash
# The demo: generate and prove the toy, then let it answer three questions in one ragged batch.  `make demo` calls this
# with the word "show"; as a test it checks what the demo prints.

cd "$(dirname "$0")/.." || exit 2
checkpoint=examples/nmc-toy
run=build/nmc-toy/nmk-run

# A chat of one question, as examples/nmc-toy/chat_template.jinja writes it.
question() {
  echo "<|START_OF_TURN_TOKEN|><|USER_TOKEN|><|START_TEXT|>$1<|END_TEXT|><|END_OF_TURN_TOKEN|>""\
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>"
}

demo() {
  set -e
  echo "== A megakernel from specs/nmc-toy.yaml: generated, and its schedule proved"
  build/nmkgen check specs/nmc-toy.yaml
  wc -c build/nmc-toy/{megakernel.cu,abi.h,encoder.c,refvm.c,plan.txt} | sed '$d'
  echo
  echo "== The model of $checkpoint answers three questions in one batch"
  "$run" --checkpoint $checkpoint --max-tokens 128 --device "${NMK_DEVICE:-auto}" \
    --prompt "$(question 'Write a Python function that checks if a number is prime.')" \
    --prompt "$(question 'What is 17 + 25?')" \
    --prompt "$(question 'What is 7 times 8?')" 2>&1
  echo
  echo "The same, step by step:  build/nmkgen plan specs/nmc-toy.yaml;  $run --help"
}

if [ "$1" = show ]; then
  demo && exit 0
  echo "make demo: failed" >&2
  exit 1
fi

out=$(demo)
code=$?
failed=0
expect() { # NAME TEXT
  if [ $code = 0 ] && grep -qF -- "$2" <<<"$out"; then
    echo "ok - demo $1"
  else
    echo "not ok - demo $1: no '$2'" && failed=1
  fi
}
expect "proves the schedule" "proven"
expect "writes a function" "if n % i == 0:"
expect "adds" "<|START_TEXT|>42<|END_TEXT|>"
expect "multiplies" "<|START_TEXT|>56<|END_TEXT|>"
expect "says how fast" "tokens/s"
[ $failed = 0 ] || echo "$out"
exit $failed
