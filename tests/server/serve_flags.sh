#!/bin/bash
# nmk-serve: wrong flags and missing parts give one message and the right exit status, before anything is loaded.
cd "$(dirname "$0")/../.." || exit 2
program=build/nmc-toy/nmk-serve
toy=examples/nmc-toy
. tests/helper.sh
aside=' info starting '

expect "an unknown flag" 2 "unknown flag --max-modellen; the nearest is --max-model-len" --max-modellen 3
expect "an unknown flag with a value" 2 "unknown flag --hosts; the nearest is --host" --hosts=a
expect "a word that is no flag" 2 "$toy: a flag was expected" $toy
expect "a flag without its value" 2 "--port needs a value: N" --checkpoint $toy --port
expect "a switch with a value" 2 "--help takes no value" --help=3
expect "a port that is none" 2 "--port 65536: expected 0 to 65535" --port 65536
expect "a length with another tail" 2 "--max-model-len 8kk: expected a number of tokens" --max-model-len 8kk
expect "no rows" 2 "--max-batch 0: expected a whole number from 1" --max-batch 0
expect "more rows than any step" 1 "17 sequences at once (--max-batch): this program was built with steps for 8 and 16" \
  --checkpoint $toy --device cpu --port 0 --max-batch 17
expect "no sequences" 2 "--max-num-seqs 0: expected a whole number from 1" --max-num-seqs 0
expect "a seed that is no number" 2 "--random-weights x" --random-weights x
expect "an empty key" 2 "--api-key ''" --api-key=
expect "no share of the GPU" 2 "--gpu-memory-utilization 0: expected a number above 0, at most 1" --gpu-memory-utilization 0
expect "more than the GPU" 2 "--gpu-memory-utilization 1.01: expected" --gpu-memory-utilization 1.01
expect "a share that is no number" 2 "--gpu-memory-utilization nan: expected" --gpu-memory-utilization=nan
expect "defaults of no kind" 2 "--generation-config none: expected auto or vllm" --generation-config none
expect "a log of no kind" 2 "--log-format xml: expected text or json" --log-format xml
expect "a level of no kind" 2 "--log-level loud: expected debug, info, warning or error" --log-level loud
expect "swap space" 2 "--swap-space is not a flag here: nothing is swapped" --checkpoint $toy --swap-space 4
expect "a model by its name" 2 "--model is not a flag here: --checkpoint DIR names the checkpoint" --model x
expect "several GPUs" 2 "--tensor-parallel-size is not a flag here: a model runs on one GPU" --tensor-parallel-size=2
expect "a switch of vLLM" 2 "--trust-remote-code is not a flag here: no code" --trust-remote-code
expect "a trace of no size" 2 "--trace-size 0: expected 1 to 1048576" --trace-size 0
expect "no checkpoint" 2 "--checkpoint DIR is needed" --port 0
expect "a folder that is none" 1 "nmk-serve: /nowhere" --checkpoint /nowhere --port 0
expect "an address that is none" 1 "nmk-serve: " --checkpoint $toy --port 0 --host 999.1.1.1
expect "a device that is none" 1 "device gpu: expected auto, cpu or cuda:N" --checkpoint $toy --port 0 --device gpu
expect "more context than the model has" 1 "a context of 1048576 tokens" --checkpoint $toy --port 0 --max-model-len 1M

expect "a template that is not there" 1 "--chat-template: cannot read /nowhere.jinja" --checkpoint $toy --port 0 --device cpu \
  --chat-template /nowhere.jinja
expect "a template without a tokenizer" 1 "--chat-template needs --checkpoint DIR" --random-weights 1 --port 0 --device cpu \
  --chat-template $toy/chat_template.jinja
expect "a share that the weights alone exceed" 1 "the weights of nmc-toy take 0.022 GiB" --checkpoint $toy --port 0 \
  --device cpu --gpu-memory-utilization 0.0001
expect "a failure as JSON" 1 '"level":"error","message":"failed","reason":"/nowhere' --checkpoint /nowhere --port 0 \
  --log-format json --log-level error

expect "a trace that cannot be written" 1 "nmk-serve: --trace: /nowhere/trace.json: No such file" --checkpoint $toy \
  --trace /nowhere/trace.json --port 0 --device cpu
# A checkpoint whose template is broken is refused at the start.
cp -r $toy "$out/broken" && echo '{% if %}' >"$out/broken/chat_template.jinja"
expect "a broken template" 1 "chat_template.jinja: line 1" --checkpoint "$out/broken" --port 0 --device cpu

$program --checkpoint $toy --port 0 --device cpu 2>"$out/log" &
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

$program --help >"$out/help" && $program --version | grep -q nmc-toy
result "help and version" $(($? == 0)) "exit status or no model"
# Every flag with a default says it, and no line is wider than a terminal of 120 columns.
bare=$(grep -E '^  --' "$out/help" | grep -vE -- '--(checkpoint|help|version) ' | grep -v '(.*)')
result "help names the defaults" $((${#bare} == 0)) "$bare"
result "help fits" $(($(wc -L <"$out/help") <= 120)) "$(wc -L <"$out/help") columns"
exit $failed
