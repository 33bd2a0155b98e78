#!/usr/bin/env python3
"""Makes the checkpoints in the folders here: tiny random models of every family, with what transformers computes on them.

    make_models.py --out DIR [NAME...]

Writes DIR/tiny-NAME/model.safetensors (bf16), config.json, generation_config.json and golden.json, for each of MODELS or
for those named.  Needs torch, transformers 5 and safetensors; no tokenizer, no download; a GPU makes it faster.  Nothing that is built
or tested here needs this file: it says where the numbers come from.

A mechanism that a test is to see must matter, so nothing is at its neutral value: norms have uneven gammas, biases are
far from zero, scores of attention and router are uneven, positions go well past the length that RoPE is scaled from,
and past the window.

golden.json: for each prompt the logits after its last token, the most likely token at each position with its distance
to the second, and the next 16 tokens, greedily.  The prompts are those of many random ones whose continuation is the
least ambiguous.
"""

import argparse
import hashlib
import json
import math
import re
from pathlib import Path

LENGTHS = (3, 17, 64, 65, 150)
NEXT = 16
CANDIDATES = 192
LOGITS = 4.0  # their standard deviation, about

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def plain(theta):
    return {"rope_type": "default", "rope_theta": theta}


def shape(hidden, layers, heads, kv_heads, ff, vocab, **more):
    return dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
                intermediate_size=ff, vocab_size=vocab, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
                pad_token_id=2, **more)  # fmt: skip


# folder: (transformers' name, configuration)
MODELS = {
    "llama": ("Llama", shape(192, 2, 3, 1, 32, 331, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
                             rope_parameters=LLAMA3)),
    "llama-bias": ("Llama", shape(128, 2, 4, 2, 32, 304, head_dim=64, rms_norm_eps=1e-6, tie_word_embeddings=False,
                                  attention_bias=True, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0,
                                                                        "factor": 2.5})),
    "llama-wide": ("Llama", shape(64, 1, 16, 1, 64, 300, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
                                  rope_parameters=plain(500000.0))),
    "qwen2": ("Qwen2", shape(128, 2, 5, 1, 64, 301, head_dim=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
                             use_sliding_window=False, rope_parameters=plain(1000000.0))),
    "qwen3": ("Qwen3", shape(128, 2, 2, 1, 64, 313, head_dim=128, rms_norm_eps=1e-6, tie_word_embeddings=True,
                             use_sliding_window=False, rope_parameters=plain(1000000.0))),
    "qwen3-yarn": ("Qwen3", shape(128, 2, 4, 1, 32, 320, head_dim=64, rms_norm_eps=1e-6, tie_word_embeddings=True,
                                  use_sliding_window=False, rope_parameters=YARN)),
    "qwen3-moe": ("Qwen3Moe", shape(128, 2, 2, 1, 96, 307, head_dim=64, rms_norm_eps=1e-6, tie_word_embeddings=False,
                                    num_experts=16, num_experts_per_tok=4, moe_intermediate_size=32,
                                    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
                                    use_sliding_window=False, rope_parameters=plain(1000000.0))),
    "cohere2": ("Cohere2", shape(128, 3, 2, 1, 64, 336, layer_norm_eps=1e-5, logit_scale=0.25, sliding_window=64,
                                 layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                                 tie_word_embeddings=True, rope_parameters=plain(50000.0))),
    "mixtral": ("Mixtral", shape(128, 2, 2, 2, 32, 300, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
                                 num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
                                 rope_parameters=plain(1000000.0))),
}  # fmt: skip


def random_weights(model, name):
    import torch

    config = model.config
    g = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big"))
    head = LOGITS / math.sqrt(config.hidden_size) / getattr(config, "logit_scale", 1.0)
    for path, p in sorted(model.named_parameters()):
        z = torch.randn(p.shape, generator=g)
        unit = z / math.sqrt(p.shape[-1])
        if re.search(r"[qk]_norm\.weight$", path):
            value = 1.4 + 0.4 * z
        elif re.search(r"norm\.weight$", path):
            value = 1 + 0.3 * z
        elif path.endswith(".bias"):
            value = 0.5 * z
        elif "embed_tokens" in path or "lm_head" in path:
            # A mean that LayerNorm has to take away; it moves all logits alike.
            value = head * (z + (0.7 if config.model_type == "cohere2" else 0))
        elif re.search(r"(mlp|block_sparse_moe)\.gate\.weight$", path):
            value = 2 * unit
        elif re.search(r"[qk]_proj\.weight$", path):
            value = 1.3 * unit
        elif path.endswith("o_proj.weight"):
            value = 2 * unit
        else:
            value = 1.5 * unit
        if path.endswith("down_proj.weight") or path.endswith("o_proj.weight") or path.endswith("down_proj"):
            value = value * (head if config.model_type == "cohere2" else 1)  # as large as what they are added to
        p.data.copy_(value.to(torch.bfloat16))


def export(model, folder):
    """bf16 as transformers saves it: under the names of published checkpoints, one tensor for each expert's matrix."""
    from safetensors.torch import load_file

    import torch

    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    print("  saved as:", sorted({re.sub(r"\d+", "N", n) + " " + str(tuple(t.shape)) for n, t in tensors.items()}))
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())


def router_gaps(model, ids, run):
    """What `run` gives, and for each row of ids the least distance, over layers and the positions from the last token
    of the prompt on, between the last expert chosen and the first one left out."""
    import torch
    import torch.nn.functional as F

    k, gaps, hooks = getattr(model.config, "num_experts_per_tok", None), [], []

    def hook(module, args, result):
        logits = F.linear(args[0].reshape(-1, args[0].shape[-1]), module.weight)
        top = logits.view(ids.shape[0], -1, logits.shape[-1])[:, -1].topk(k + 1).values
        gaps.append(top[:, k - 1] - top[:, k])

    for path, module in model.named_modules():
        if re.search(r"(mlp|block_sparse_moe)\.gate$", path):
            hooks.append(module.register_forward_hook(hook))
    result = run()
    for h in hooks:
        h.remove()
    return result, torch.stack(gaps).min(0).values if gaps else torch.full((ids.shape[0],), math.inf, device=ids.device)


def rounded(tensor, digits=4):
    return [round(v, digits) for v in tensor.tolist()]


def prompt(model, vocab, length, g):
    """The golden values of the least ambiguous of many random prompts."""
    import torch

    device = model.device
    ids = torch.randint(3, vocab, (CANDIDATES, length), generator=g).to(device)
    text, margins, router = ids, [], torch.full((CANDIDATES,), math.inf, device=device)
    for _ in range(NEXT):
        logits, gap = router_gaps(model, text, lambda: model(input_ids=text, use_cache=False).logits[:, -1])
        best = logits.topk(2)
        margins.append(best.values[:, 0] - best.values[:, 1])
        router = torch.minimum(router, gap)
        text = torch.cat([text, best.indices[:, :1]], 1)
    margins = torch.stack(margins, 1)
    distinct = torch.tensor([len(set(row.tolist())) for row in text[:, length:]], device=device)
    score = torch.minimum(margins.min(1).values, 4 * router) - (distinct < 6) * 100
    i = int(score.argmax())
    logits = model(input_ids=ids[i : i + 1], use_cache=False).logits[0]
    best = logits.topk(2)
    print(f"  {length} tokens: least margin {margins[i].min():.3f}, router {router[i]:.3f}, "
          f"{int(distinct[i])} distinct, logits {logits.std():.2f}", flush=True)  # fmt: skip
    return {"ids": ids[i].tolist(), "logits": rounded(logits[-1]), "top1": best.indices[:, 0].tolist(),
            "margin": rounded(best.values[:, 0] - best.values[:, 1]), "greedy": text[i, length:].tolist(),
            "greedy_margin": rounded(margins[i])}  # fmt: skip


def make(name, out):
    import torch
    import transformers

    kind, config = MODELS[name]
    folder = out / f"tiny-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    print(name, flush=True)
    config = getattr(transformers, kind + "Config")(**config)
    model_class = getattr(transformers, kind + "ForCausalLM")
    model = model_class(config)
    random_weights(model, name)
    export(model, folder)
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        prompts = [prompt(model, config.vocab_size, n, g) for n in LENGTHS]
    about = f"transformers {transformers.__version__} in fp32 on the bf16 weights; written by make_models.py"
    text = json.dumps({"about": about, "prompts": prompts}, separators=(",", ":"))
    (folder / "golden.json").write_text(text.replace('{"ids"', '\n{"ids"') + "\n")
    print(f"  {sum(f.stat().st_size for f in folder.iterdir())} bytes", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", default=list(MODELS))
    args = parser.parse_args()
    for name in args.names:
        make(name, args.out)


if __name__ == "__main__":
    main()
