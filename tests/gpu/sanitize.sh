#!/usr/bin/env bash
# compute-sanitizer on the toy: no bad access (memcheck), no shared memory race (racecheck), over a prompt and a few
# tokens of a ragged batch, drawn in a way that wakes all tasks.  Skips itself without a GPU or without the tool.
set -u
cd "$(dirname "$0")/../.."
run=build/nmc-toy/nmk-run
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1)
if [ -z "$tool" ]; then echo "skip - compute-sanitizer: not installed"; exit 0; fi
if ! nvidia-smi -L >/dev/null 2>&1; then echo "skip - compute-sanitizer: no GPU"; exit 0; fi
failed=0
export NMK_PATIENCE_MS=600000 # a step takes a thousand times as long
kernel=$(mktemp --suffix=.cu)
trap 'rm -f "$kernel"' EXIT
for check in memcheck racecheck; do
    # racecheck does not see everything that orders: prelude.cuh has a variant for it, which needs a ring stage's room
    if [ $check = memcheck ]; then
        cat build/nmc-toy/megakernel.cu
    else
        echo "#define NMK_RACECHECK"
        sed -E 's/^(#define NMK_RING_STAGES) .*/\1 11/; s/^(#define NMK_SHARED_REST_BYTES) .*/\1 51200/' build/nmc-toy/megakernel.cu
    fi >"$kernel"
    log=$(timeout 250 "$tool" --tool $check --error-exitcode 9 "$run" --checkpoint examples/nmc-toy --device cuda:0 --kernel "$kernel" --ring-stages 11 --temperature 1 \
        --top-k 100 --top-p 0.9 --min-p 0.001 --repetition-penalty 1.1 --max-tokens 2 --ignore-eos --prompt-ids 1,3,6,100,200,300,400,500,600,700 --prompt-ids 1,3,6 2>&1)
    code=$?
    if [ $code = 0 ] && echo "$log" | grep -q "ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards"; then
        echo "ok - compute-sanitizer $check: nothing found"
    else
        echo "not ok - compute-sanitizer $check: exit $code: $(echo "$log" | grep -v '^ *$' | head -n 12 | tr '\n' ';')"
        failed=1
    fi
done
exit $failed
