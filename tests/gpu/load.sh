#!/usr/bin/env bash
# nmk-serve on the GPU under load: the toy with its tokenizer, then the model at full size with random weights and prompts
# of token ids.  Every answer has to be the one that its request gets alone.  NMK_LOAD_SECONDS: of the full size.
set -u
cd "$(dirname "$0")/../.."
load=build/tests/nmc-toy/server/load
seconds=${NMK_LOAD_SECONDS:-20}
if ! nvidia-smi -L >/dev/null 2>&1; then echo "skip - load on the GPU: no GPU"; exit 0; fi
failed=0

# run NAME SECONDS FLAG...
run() {
    local name=$1 most=$(($2 + 240))
    echo "# load on the GPU: $name"
    timeout "$most" "$load" --clients 64 --seconds "$2" --server "build/$name/nmk-serve" --device cuda:0 "${@:3}"
    local code=$?
    [ $code = 0 ] || failed=1
    [ $code -le 1 ] || echo "not ok - load on the GPU, $name: exit status $code"
}

run nmc-toy 20 --checkpoint examples/nmc-toy
if [ -x build/north-mini-code/nmk-serve ]; then
    run north-mini-code "$seconds" --random-weights 1 --max-model-len 8192
else
    echo "skip - load on the GPU, north-mini-code: not built (make gpu)"
fi
exit $failed
