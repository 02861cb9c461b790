"""Makes a small DFlash drafter for the memorizer, trained on its hidden states, so that most drafts are accepted.

A block is the last token and `DRAFTS` masks. Its rows see the hidden states of all earlier tokens, and one another.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, silu

from .engines import block_config
from .memorizer import LENGTH, ROOT, SHAPE, WINDOW

DRAFTS, LAYERS, MASK, THETA = 7, 2, 0, 10000.0
READ = [0, 2]
"""The outputs of these layers of the memorizer are the context: not the last layer's, which transformers normalizes."""
WINDOWS = 8
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = (
    SHAPE[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
)
INNER = SHAPE["intermediate_size"]


def parameters(seed: int, device: str) -> dict[str, Tensor]:
    """Return random weights, with the names that vLLM loads."""
    made = {"fc.weight": (HIDDEN, len(READ) * HIDDEN)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        made |= {
            f"{at}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(*size, generator=generator) * size[1] ** -0.5 for name, size in made.items()}
    sizes = {"hidden_norm.weight": HIDDEN, "norm.weight": HIDDEN}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        sizes |= {f"{at}self_attn.{one}_norm.weight": HEAD_DIM for one in "qk"}
        sizes |= {f"{at}{one}_layernorm.weight": HIDDEN for one in ("input", "post_attention")}
    found |= {name: torch.ones(size) for name, size in sizes.items()}
    return {name: one.to(device).requires_grad_() for name, one in found.items()}


def rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotate heads of shape [..., positions, heads, HEAD_DIM] by their positions of shape [..., positions]."""
    half = HEAD_DIM // 2
    angles = positions[..., None].float() * THETA ** (-torch.arange(half, device=heads.device) / half)
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def drafts(weights: dict[str, Tensor], features: Tensor, block: Tensor, anchors: Tensor) -> Tensor:
    """Return the hidden states of the masks of each block.

    Args:
        features: outputs of the read layers, [windows, WINDOW, len(READ) * HIDDEN].
        block: embeddings of each block, [windows, blocks, 1 + DRAFTS, HIDDEN].
        anchors: position of each block's first row, [windows, blocks]; the block sees the features before it.
    """

    def norm(one: Tensor, name: str) -> Tensor:
        return rms_norm(one, one.shape[-1:], weights[name], 1e-6)

    context = norm(linear(features, weights["fc.weight"]), "hidden_norm.weight")
    windows, blocks, rows, _ = block.shape
    at = anchors[..., None] + torch.arange(rows, device=block.device)
    there = torch.arange(context.shape[1], device=block.device)
    seen = (there < anchors[..., None])[:, :, None, None, :].expand(-1, -1, HEADS, rows, -1)
    every = torch.ones(windows, blocks, HEADS, rows, rows, dtype=torch.bool, device=block.device)
    hidden = block
    for layer in range(LAYERS):
        own, name = norm(hidden, f"layers.{layer}.input_layernorm.weight"), f"layers.{layer}.self_attn."

        def heads(one: Tensor, which: str, count: int, name: str = name) -> Tensor:
            return linear(one, weights[f"{name}{which}_proj.weight"]).view(*one.shape[:-1], count, HEAD_DIM)

        q = rotated(norm(heads(own, "q", HEADS), f"{name}q_norm.weight"), at)
        k, v = rotated(norm(heads(own, "k", KV_HEADS), f"{name}k_norm.weight"), at), heads(own, "v", KV_HEADS)
        before = rotated(norm(heads(context, "k", KV_HEADS), f"{name}k_norm.weight"), there)
        stored = heads(context, "v", KV_HEADS)
        k, v, before, stored = (one.repeat_interleave(HEADS // KV_HEADS, -2) for one in (k, v, before, stored))
        scores = torch.cat((torch.einsum("wbrhd,wthd->wbhrt", q, before), torch.einsum("wbrhd,wbshd->wbhrs", q, k)), -1)
        scores = scores * HEAD_DIM**-0.5
        chances = scores.masked_fill(~torch.cat((seen, every), -1), float("-inf")).softmax(-1)
        past, block_part = chances.split([len(there), rows], -1)
        mixed = torch.einsum("wbhrt,wthd->wbrhd", past, stored) + torch.einsum("wbhrs,wbshd->wbrhd", block_part, v)
        hidden = hidden + linear(mixed.flatten(-2), weights[f"{name}o_proj.weight"])
        own, name = norm(hidden, f"layers.{layer}.post_attention_layernorm.weight"), f"layers.{layer}.mlp."
        gated = silu(linear(own, weights[f"{name}gate_proj.weight"])) * linear(own, weights[f"{name}up_proj.weight"])
        hidden = hidden + linear(gated, weights[f"{name}down_proj.weight"])
    return norm(hidden, "norm.weight")[:, :, 1:]


def train(target: Any, steps: int, device: str, blocks: int, seed: int = 0) -> tuple[dict[str, Tensor], float]:
    """Train a drafter for the memorizer; return its weights, and the share of right drafts in the last steps."""
    torch.manual_seed(seed)
    text = torch.tensor(list((ROOT / "docs" / "design.md").read_bytes()[:LENGTH]), device=device)
    weights = parameters(seed, device)
    embedded, head = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    optimizer = torch.optim.AdamW(weights.values(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    right: list[float] = []
    for step in range(steps):
        first = torch.randint(0, LENGTH - WINDOW, (WINDOWS,), device=device)
        rows = text[first[:, None] + torch.arange(WINDOW, device=device)]
        with torch.no_grad():
            outputs = target(input_ids=rows, output_hidden_states=True).hidden_states
        features = torch.cat([outputs[layer + 1] for layer in READ], -1)
        anchors = torch.randint(1, WINDOW - DRAFTS, (WINDOWS, blocks), device=device)
        ids = torch.full((WINDOWS, blocks, 1 + DRAFTS), MASK, device=device)
        ids[..., 0] = rows.gather(1, anchors)
        wanted = rows.gather(1, (anchors[..., None] + torch.arange(1, 1 + DRAFTS, device=device)).flatten(1))
        logits = linear(drafts(weights, features, embedded[ids], anchors), head).flatten(1, 2)
        loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        right.append((logits.detach().argmax(-1) == wanted).float().mean().item())
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, right drafts {right[-1]:.3f}", flush=True)
    return weights, sum(right[-10:]) / len(right[-10:])


def write(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write a drafter in bfloat16. Embedding and output matrix are the target's."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: one.detach().to(torch.bfloat16).cpu().contiguous() for name, one in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = block_config(SHAPE, LAYERS, READ, MASK, SHAPE["max_position_embeddings"], THETA, "bfloat16")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main() -> None:
    """Train a drafter for the memorizer in a folder, and write it to FOLDER-head."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("memorizer", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--blocks", type=int, default=64, help="blocks of each window of the text")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(asked.memorizer, dtype=torch.float32).to(asked.device)
    weights, _ = train(target, asked.steps, asked.device, asked.blocks)
    write(asked.memorizer.with_name(asked.memorizer.name + "-head"), weights)


if __name__ == "__main__":
    main()
