#!/usr/bin/env python3
"""Makes a checkpoint like the one in this folder: a small but really trained model of the cohere2_moe family.

    make_toy.py --out DIR [--seconds 230] [--workers 16]     train a new one, then write its golden values
    make_toy.py --out DIR --golden-only                      golden values of the checkpoint in DIR

Trains a byte-level BPE and transformers' own Cohere2MoeForCausalLM on the text of texts.py for a fixed wall-clock time
and exports the model in bf16 as DIR.  DIR/golden.json holds transformers' values in fp32 on the exported weights.

The shape, the tokenizer's pipeline and the golden inputs are read from the files here, which are the result of the
first run.  Needs torch, transformers 5 with cohere2_moe, tokenizers, safetensors, jinja2 and, for training, a GPU.
Downloads nothing.  The length of the training is a time, so another run gives another, similar model.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import types
from pathlib import Path
from time import time

from texts import GROUPS, HERE, render, texts

GOLDEN = HERE.parent.parent / "tests" / "golden" / "nmc-toy.json"
SHAPE = json.loads((HERE / "config.json").read_text())
SPECIALS = [t["content"] for t in json.loads((HERE / "tokenizer.json").read_text())["added_tokens"]]
VOCAB, EXPERTS = SHAPE["vocab_size"], SHAPE["num_experts"]
MIX = dict(zip(GROUPS, (0.50, 0.30, 0.06, 0.06, 0.08)))  # share of the windows
SHARD_BYTES = 10_000_000


def write_json(path, value, **style):
    path.write_text(json.dumps(value, ensure_ascii=False, **style) + "\n")


# ------------------------------------------------------------------------------------------------------- tokens


def train_tokenizer(some, path):
    """A new vocabulary and new merges; all else as in tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    old, tok = Tokenizer.from_file(str(HERE / "tokenizer.json")), Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder, tok.post_processor = old.pre_tokenizer, old.decoder, old.post_processor
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tok.train_from_iterator(some, trainer)
    tok.save(str(path))


def encode(job):
    """(path of tokenizer.json, texts) -> ids of each"""
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(job[0])
    return [tok.encode(text, add_special_tokens=False).ids for text in job[1]]


def build_data(folder, workers):
    """{"train"|"heldout": {group: [ids of a text]}}; leaves the new tokenizer.json in the folder."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    found, sample, path = texts(workers), [], folder / "tokenizer.json"
    for group in GROUPS:
        size, limit = 0, 20e6 if group in ("pairs", "plain") else 1.5e6  # characters
        for text in found["train"][group]:
            if size > limit:
                break
            sample.append(text)
            size += len(text)
    train_tokenizer(sample, path)
    data = {}
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for part, groups in found.items():
            data[part] = {}
            for group, some in groups.items():
                jobs = [(str(path), some[i : i + 500]) for i in range(0, len(some), 500)]
                data[part][group] = [ids for chunk in pool.map(encode, jobs) for ids in chunk]
    return data


class Windows:
    """Random windows that begin at a text's start; the texts of a group lie in a row."""

    def __init__(self, groups, device, seed):
        import torch

        self.random, self.names, self.ids, self.starts = random.Random(seed), [], {}, {}
        for group in GROUPS:
            flat, starts = [], []
            for ids in groups[group]:
                starts.append(len(flat))
                flat += ids
            starts = [s for s in starts if s + 1100 < len(flat)]
            if starts:
                self.names.append(group)
                self.starts[group] = starts
                self.ids[group] = torch.tensor(flat, dtype=torch.int32, device=device)

    def draw(self, rows, length, group=None):
        """(inputs, targets), each rows x length."""
        import torch

        chosen = [group] * rows if group else self.random.choices(self.names, [MIX[g] for g in self.names], k=rows)
        starts = [(g, self.random.choice(self.starts[g])) for g in chosen]
        window = torch.stack([self.ids[g][s : s + length + 1] for g, s in starts]).long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


# -------------------------------------------------------------------------------------------------------- model


def dense_experts(self, hidden_states, top_k_index, top_k_weights):
    """Every expert on every token, weighted by zero where the router did not choose it: the same sum as the sparse
    forms, and faster at this size, since nothing is sorted or gathered."""
    import torch.nn.functional as F

    experts, two_ffn, hidden = self.gate_up_proj.shape
    weight = hidden_states.new_zeros(hidden_states.shape[0], experts).scatter(1, top_k_index, top_k_weights)
    both = F.linear(hidden_states, self.gate_up_proj.reshape(experts * two_ffn, hidden))
    gate, up = both.view(-1, experts, 2, two_ffn // 2).unbind(2)
    inner = F.silu(gate) * up * weight.unsqueeze(-1)
    return inner.reshape(-1, experts * two_ffn // 2) @ self.down_proj.transpose(1, 2).reshape(-1, hidden)


def sparse_layers(model):
    return [(i, layer.mlp) for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]


def routing_of(result):
    """(logits over the experts, chosen experts) from what a router returns."""
    logits = next(r for r in result if r.is_floating_point() and r.shape[-1] == EXPERTS)
    return logits, next(r for r in result if not r.is_floating_point())


def masks(length, device):
    """Attention masks by layer kind; None lets the attention kernel use its own causal path."""
    import torch

    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    near = (distance >= 0) & (distance < SHAPE["sliding_window"])
    return {"full_attention": None, "sliding_attention": near[None, None]}


def loss_of(model, x, y, mask):
    import torch.nn.functional as F

    logits = model(input_ids=x, attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits.float().view(-1, VOCAB), y.view(-1))


def train(data, seconds, rows):
    """The model runs in bf16; the optimizer keeps fp32 master weights, whose bf16 rounding is what the model sees at
    each step and what is exported."""
    import torch
    from transformers.models.cohere2_moe.configuration_cohere2_moe import Cohere2MoeConfig
    from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeForCausalLM

    torch.manual_seed(0)
    config = Cohere2MoeConfig.from_pretrained(str(HERE))
    config._attn_implementation = "sdpa"
    model = Cohere2MoeForCausalLM(config).to("cuda").float()
    windows, mask = Windows(data["train"], "cuda", 3), {n: masks(n, "cuda") for n in (512, 1024)}

    # Our masks and our form of the experts must not change what the model computes.
    with torch.no_grad():
        x, _ = windows.draw(2, 512)
        model.set_experts_implementation("eager")
        want = model(input_ids=x, use_cache=False).logits
        for _, mlp in sparse_layers(model):
            mlp.experts.forward = types.MethodType(dense_experts, mlp.experts)
        got = model(input_ids=x, attention_mask=mask[512], use_cache=False).logits
        assert (got - want).norm() < 2e-3 * want.norm()

    params = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for m, p in zip(masters, params):
        m.grad = torch.zeros_like(m)
        p.data = p.data.to(torch.bfloat16)  # parameters only: the rotary frequencies stay in fp32
    groups = [{"params": [m for m in masters if m.dim() > 1], "weight_decay": 0.1},
              {"params": [m for m in masters if m.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip
    adam = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    model.train()

    # The model class has no load-balancing loss, so training starts without one.  If the router then leaves experts
    # idle, the usual term (Switch: experts * sum of share * mean probability) is added with a small weight.
    routed, balance, watched = {}, 0.0, False
    for i, mlp in sparse_layers(model):
        mlp.gate.register_forward_hook(lambda module, args, result, i=i: routed.__setitem__(i, routing_of(result)))

    def shares():
        return {i: c.reshape(-1).bincount(minlength=EXPERTS) / c.numel() for i, (_, c) in sorted(routed.items())}

    def imbalance():
        parts = [(share * torch.softmax(routed[i][0].float(), -1).mean(0)).sum() for i, share in shares().items()]
        return EXPERTS * torch.stack(parts).mean()

    begin, steps, recent = time(), 0, []
    while (done := (time() - begin) / seconds) < 1:
        length = 512 if done < 0.75 else 1024  # the last quarter teaches distances past 512
        x, y = windows.draw(rows * 512 // length, length)
        loss = loss_of(model, x, y, mask[length])
        (loss + balance * imbalance() if balance else loss).backward()
        for m, p in zip(masters, params):
            m.grad.copy_(p.grad) if p.grad is not None else m.grad.zero_()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        for g in adam.param_groups:
            g["lr"] = 2e-3 * min(1.0, (steps + 1) / 200) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))
        adam.step()
        with torch.no_grad():
            torch._foreach_copy_(params, [m.detach() for m in masters])
        model.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        steps += 1
        if steps % 100 == 0:  # the only point where the host waits for the GPU
            print(f"step {steps} {done:.0%} loss {torch.stack(recent).mean().item():.4f}", flush=True)
            recent = []
            if done > 0.08 and not watched:
                busy = {i: int((share >= 0.01).sum()) for i, share in shares().items()}
                balance, watched = 0.01 if min(busy.values()) < 0.75 * EXPERTS else 0.0, True
                print("experts with at least 1% of the choices, by layer:", busy, "balance weight", balance)
    return model.eval()


def evaluate(model, data):
    """Prints the loss in nats a token by group."""
    import torch

    with torch.no_grad():
        for part in data:
            windows = Windows(data[part], "cuda", 5)
            for group in windows.names:
                some = [loss_of(model, *windows.draw(64, 512, group), masks(512, "cuda")).item() for _ in range(4)]
                print(f"{part:8} {group:10} {sum(some) / len(some):.3f} nats a token")


# ------------------------------------------------------------------------------------------------------- export


def named_tensors(model):
    """The published layout: one tensor per expert and projection, no lm_head."""
    for name, value in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(v.chunk(2, dim=0) for v in value):
                yield name.replace("gate_up_proj", f"{e}.gate_proj.weight"), gate
                yield name.replace("gate_up_proj", f"{e}.up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(value):
                yield name.replace("down_proj", f"{e}.down_proj.weight"), down
        elif name != "lm_head.weight":
            yield name, value


def export(model, folder):
    import torch
    from safetensors.torch import save_file

    shards, size, places, total = [{}], 0, {}, 0
    for name, value in named_tensors(model):
        value = value.detach().cpu().to(torch.bfloat16).contiguous().clone()
        assert torch.isfinite(value).all(), name
        if size + value.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(folder / file), metadata={"format": "pt"})
        places.update({name: file for name in shard})
        total += sum(v.nbytes for v in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_json(folder / "model.safetensors.index.json", index, indent=2)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(HERE / name, folder / name)


# ------------------------------------------------------------------------------------------------------ goldens


def text_goldens(folder, old):
    """Ids from the tokenizers library and renderings from transformers, of the texts and chats in the old file."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast.from_pretrained(str(folder))
    cases, chats = [], []
    for text in (case["text"] for case in old["tokenizer"]):
        ids = fast.encode(text, add_special_tokens=False)
        cases.append({"text": text, "ids": ids, "ids_with_bos": fast.encode(text)})
    for chat in old["chat_template"]:
        given = {key: chat[key] for key in ("messages", "tools", "flags")}
        text = fast.apply_chat_template(chat["messages"], tools=chat["tools"], tokenize=False, **chat["flags"])
        assert text == render(chat["messages"], chat["tools"], **chat["flags"])
        chats.append({**given, "text": text})
    return fast, {"tokenizer": cases, "chat_template": chats}


def rounded(tensor, digits=5):
    return [round(v, digits) for v in tensor.tolist()]


def prompt_golden(model, tok, old, device):
    """What transformers computes at the end of one chat, and the 64 tokens it says next, greedily."""
    import torch

    after_layer, routed, hooks = {}, {}, []
    for i, layer in enumerate(model.model.layers):
        keep = lambda module, args, r, i=i: after_layer.__setitem__(i, r if torch.is_tensor(r) else r[0])
        hooks.append(layer.register_forward_hook(keep))
    for i, mlp in sparse_layers(model):
        keep = lambda module, args, r, i=i: routed.__setitem__(str(i), routing_of(r))
        hooks.append(mlp.gate.register_forward_hook(keep))
    text = render(old["messages"], old["tools"], add_generation_prompt=True, **old["flags"])
    ids = tok.encode(text, add_special_tokens=False)
    final = model.model(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state[0]
    top = (model.lm_head(final[-16:]) * model.config.logit_scale).topk(20)
    golden = {key: old[key] for key in ("name", "messages", "tools", "flags")} | {
        "text": text, "ids": ids,
        "last16": {
            "final_hidden_norm": rounded(final[-16:].norm(dim=-1), 6),
            "top20": [list(map(list, zip(i.tolist(), rounded(v)))) for i, v in zip(top.indices, top.values)],
            "experts_by_layer": {i: c.reshape(len(ids), -1)[-16:].sort(-1).values.tolist() for i, (_, c) in
                                 routed.items()},
        },
        "last_final_hidden": rounded(final[-1], 6),
        "last_residual_after_layer": [rounded(after_layer[i][0, -1]) for i in sorted(after_layer)],
        "last_router_logits_by_layer": {i: rounded(r.reshape(len(ids), -1)[-1]) for i, (r, _) in routed.items()},
        "greedy64": [], "greedy64_margin": [],
    }  # fmt: skip
    for hook in hooks:
        hook.remove()
    for _ in range(64):
        said = torch.tensor([ids + golden["greedy64"]], device=device)
        best = model(input_ids=said, use_cache=False, logits_to_keep=1).logits[0, -1].topk(2)
        golden["greedy64"].append(best.indices[0].item())
        golden["greedy64_margin"].append(round((best.values[0] - best.values[1]).item(), 5))
    golden["greedy64_text"] = tok.decode(golden["greedy64"], skip_special_tokens=False)
    return golden


def forced_golden(model, ids, device):
    """The most likely token at each position of a given text."""
    import torch

    out = model.model(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state[0]
    logits = model.lm_head(out) * model.config.logit_scale
    best = logits.topk(2)
    right = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(ids[1:], device=device)[:, None])
    return {"ids": ids, "top1": best.indices[:, 0].tolist(), "nats": round(-right.sum().item(), 4),
            "margin": rounded(best.values[:, 0] - best.values[:, 1], 4),
            "final_hidden_norm": rounded(out.norm(dim=-1), 4)}  # fmt: skip


def write_goldens(folder, forced):
    """golden.json; `forced`: held-out windows, or None for those of the old file (if the tokenizer is the same)."""
    import torch
    from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    old = json.loads(GOLDEN.read_text())
    model = Cohere2MoeForCausalLM.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    model.set_experts_implementation("eager")
    tok, golden = text_goldens(folder, old)
    with torch.no_grad():
        golden["prompts"] = [prompt_golden(model, tok, p, device) for p in old["prompts"]]
        forced = forced or [page["ids"] for page in old["teacher_forced"]]
        golden["teacher_forced"] = [forced_golden(model, ids, device) for ids in forced]
    about = "transformers in fp32 on the exported bf16 weights; written by make_toy.py"
    write_json(folder / "golden.json", {"about": about, **golden})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=230, help="wall-clock time of the training alone")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="windows of 512 tokens in a batch")
    parser.add_argument("--golden-only", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    forced = None
    if not args.golden_only:
        data = build_data(args.out, args.workers)
        model = train(data, args.seconds, args.rows)
        export(model, args.out)
        evaluate(model, data)
        windows = Windows(data["heldout"], "cpu", 11)
        forced = sum((windows.draw(n, 512, g)[0].tolist() for g, n in (("pairs", 2), ("plain", 2), ("tools", 1))), [])
    write_goldens(args.out, forced)


if __name__ == "__main__":
    main()
