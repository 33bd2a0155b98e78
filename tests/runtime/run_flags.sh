#!/bin/bash
# nmk-run: wrong flags and missing parts give one message and the right exit status.
cd "$(dirname "$0")/../.." || exit 2
program=build/nmc-toy/nmk-run
toy=examples/nmc-toy
. tests/helper.sh
aside='^nmk-run: weights: ' # when they take more than a second
export NMK_CACHE_DIR=$out/cache

expect "an unknown flag" 2 "unknown flag --max-token; the nearest is --max-tokens" --max-token 3
expect "an unknown flag with a value" 2 "unknown flag --divice; the nearest is --device" --divice=cpu
expect "a word that is no flag" 2 "hello: a flag was expected" hello
expect "a flag without its value" 2 "--prompt needs a value: TEXT" --checkpoint $toy --prompt
expect "a switch with a value" 2 "--ids takes no value" --ids=3
expect "no tokens" 2 "--max-tokens 0: expected a whole number from 1" --max-tokens 0
expect "a number with a tail" 2 "--max-tokens 12x" --max-tokens 12x
expect "a negative temperature" 2 "--temperature -1: expected a number from 0" --temperature -1
expect "a temperature that is no number" 2 "--temperature nan" --temperature nan
expect "a share above 1" 2 "--top-p 1.5: expected a number from 0 to 1" --top-p 1.5
expect "fewer tokens than none" 2 "--top-k -1: expected a whole number from 0" --top-k -1
expect "a seed that is no number" 2 "--seed abc" --seed abc
expect "a ring deeper than generated" 2 "--ring-stages 99: expected 1 to" --ring-stages 99
expect "no checkpoint" 2 "--checkpoint DIR is needed" --prompt x
expect "no prompt" 2 "--prompt TEXT is needed" --checkpoint $toy
expect "more prompts than any step has columns" 2 "at most 16 prompts" $(printf -- '--prompt %d ' {1..17})

expect "no such folder" 1 "/nonexistent" --checkpoint /nonexistent --prompt x --device cpu
expect "ids that are none" 1 "--prompt-ids 1,x: expected token ids" --checkpoint $toy --prompt-ids 1,x --device cpu
expect "an id outside the vocabulary" 1 "token 4096 is not in 0 to 4095" --checkpoint $toy --prompt-ids 1,4096 --device cpu
expect "no such prompt file" 1 "/nonexistent" --checkpoint $toy --prompt-file /nonexistent --device cpu
expect "text without a tokenizer" 1 "needs the checkpoint's tokenizer.json" --random-weights 1 --prompt x --device cpu
expect "a device of no kind" 1 "device gpu: expected auto, cpu or cuda:N" --checkpoint $toy --prompt x --device gpu
expect "a context larger than the model's" 1 "nmc-toy allows 1 to 4096" --checkpoint $toy --prompt x --max-len 5000 --device cpu
expect "a prompt longer than --max-len" 1 "the context holds 4, answer included" --checkpoint $toy --prompt-ids 1,2,3,4,5 \
  --max-len 4 --device cpu
expect "a prompt longer than the model's context" 1 "prompt 1 has 5000 tokens: the context holds 4096" --checkpoint $toy \
  --prompt-ids "$(yes 7 | head -5000 | paste -sd,)" --device cpu

# without a driver, without a compiler
export NMK_LIBCUDA=/nonexistent/libcuda.so.1
expect "no libcuda" 1 "no CUDA driver: cannot open /nonexistent/libcuda.so.1" --checkpoint $toy --prompt x --device cuda:0
touch "$out/libcuda.so.1"
NMK_LIBCUDA=$out/libcuda.so.1 expect "a libcuda that is none" 1 "no CUDA driver: cannot open" --checkpoint $toy --prompt x \
  --device cuda:0

# Drivers of paper.
stub() { # NAME VERSION
  echo "int cuDriverGetVersion(int *v) { *v = $2; return 0; }" | gcc -shared -fPIC -x c - -o "$out/$1.so" 2>"$out/gcc"
}
if stub old 11040 && stub part 13000; then
  NMK_LIBCUDA=$out/old.so expect "an old driver" 1 "CUDA driver too old: $out/old.so supports CUDA 11.4, CUDA 12.0 or newer" \
    --checkpoint $toy --prompt x --device cuda:0
  NMK_LIBCUDA=$out/part.so expect "a driver that lacks functions" 1 "is not a usable CUDA driver: it lacks cuInit" \
    --checkpoint $toy --prompt x --device cuda:0
else
  echo "not ok - drivers of paper: $(head -3 "$out/gcc")" && failed=1
fi
if timeout 60 $program --checkpoint $toy --prompt-ids 1,2 --max-tokens 1 --device auto >/dev/null 2>"$out/stderr" &&
  grep -q "on cpu" "$out/stderr"; then
  echo "ok - device auto without a driver is the CPU"
else
  echo "not ok - device auto without a driver: $(head -c 300 "$out/stderr")" && failed=1
fi
if NMK_NVRTC=/nonexistent/libnvrtc.so build/nmc-toy/nmk-compile >"$out/stdout" 2>"$out/stderr"; then
  echo "not ok - no NVRTC: compiled" && failed=1
elif grep -q "NMK_NVRTC does not name a usable NVRTC: /nonexistent/libnvrtc.so" "$out/stderr"; then
  echo "ok - an NVRTC that is not there"
else
  echo "not ok - no NVRTC: $(head -c 300 "$out/stderr")" && failed=1
fi

for word in --help --version; do
  if $program $word >"$out/stdout" 2>"$out/stderr" && grep -q nmc-toy "$out/stdout"; then
    echo "ok - $word"
  else
    echo "not ok - $word: $(head -c 300 "$out/stderr")" && failed=1
  fi
done
exit $failed
