#!/bin/bash
# Models that people run and specs/ does not have, by the shapes in their config.json, two layers of each: what nmkgen
# makes of them is proven.  With NMK_MODELS=all it compiles too, without spills, for every kind of launch (`make models`).

cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh

# name family hidden heads kv_heads head_dim ff vocab tied [experts experts_per_token]
models() {
  cat <<'EOF'
llama-3.2-3b       llama     3072  24   8  128   8192  128256 true
tinyllama-1.1b     llama     2048  32   4   64   5632   32000 false
smollm2-360m       llama      960  15   5   64   2560   49152 true
smollm2-1.7b       llama     2048  32  32   64   8192   49152 true
mistral-7b         mistral   4096  32   8  128  14336   32768 false
llama-2-13b        llama     5120  40  40  128  13824   32000 false
yi-34b             llama     7168  56   8  128  20480   64000 false
mistral-small-24b  mistral   5120  32   8  128  32768  131072 false
qwen3-1.7b         qwen3     2048  16   8  128   6144  151936 true
qwen3-4b           qwen3     2560  32   8  128   9728  151936 true
qwen3-14b          qwen3     5120  40   8  128  17408  151936 false
qwen3-32b          qwen3     5120  64   8  128  25600  151936 false
qwen2.5-0.5b       qwen2      896  14   2   64   4864  151936 true
qwen2.5-1.5b       qwen2     1536  12   2  128   8960  151936 true
qwen2.5-3b         qwen2     2048  16   2  128  11008  151936 true
qwen2.5-7b         qwen2     3584  28   4  128  18944  152064 false
qwen2.5-14b        qwen2     5120  40   8  128  13824  152064 false
qwen2.5-32b        qwen2     5120  40   8  128  27648  152064 false
mixtral-8x7b       mixtral   4096  32   8  128  14336   32000 false  8 2
EOF
}

# What is known not to have registers enough, and is refused once compiled (README.md, Limits).
spills=" mixtral-8x7b:32 mixtral-8x7b:64 "

while read -r name family hidden heads kv_heads head_dim ff vocab tied experts per_token; do
  width="dense_ff: $ff"
  [ -z "$experts" ] || width="experts: $experts, experts_per_token: $per_token, expert_ff: $ff"
  cat >"$out/$name.yaml" <<EOF
model: $name
family: $family
target: h200
shape: { layers: 2, hidden: $hidden, heads: $heads, kv_heads: $kv_heads, head_dim: $head_dim, $width,
         vocab: $vocab, tied: $tied, rope_theta: 10000, norm_eps: 1e-5, max_context: 32768 }
EOF
  for kind in 8 16 32 64 prefill; do
    flags=(--set "columns=$kind")
    case $kind in 16 | 32) [ "$NMK_MODELS" = all ] || continue ;; prefill) flags=(--launch prefill) ;; esac
    made=$out/$kind
    [ $kind != prefill ] || made=$out/of/prefill
    said=$(build/nmkgen "$out/$name.yaml" "${flags[@]}" -o "$made" 2>&1)
    result "$name, $kind: proven" "$([[ $said == *" proven;"* ]] && echo 1)" "$said"
    [ "$NMK_MODELS" != all ] || [[ $spills == *" $name:$kind "* ]] ||
      compiles "$name, $kind: compiles without spills" "$made/megakernel.cu"
  done
done < <(models)
exit $failed
