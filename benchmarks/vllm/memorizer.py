"""Train a small Llama until it knows a text by heart.

Usage: ``python -m benchmarks.vllm.memorizer OUT``.

Greedy texts of a random model change with rounding. This model's best logit is far ahead of the next, so two correct
backends generate equal texts even in bfloat16. The kernels are specialized for its head dimension and its group size.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
ROOT = Path(__file__).parents[2]
LENGTH, WINDOW, BATCH = 8192, 256, 8
PROMPTS = (24, 31, 64, 130, 200, 310, 47, 96)


def train(steps: int, device: str = "cpu", seed: int = 0) -> tuple[torch.nn.Module, list[list[int]]]:
    """Train a model, and return it with prompts: pieces of the text, most with a partly filled last page."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    text = torch.tensor(list((ROOT / "docs" / "design.md").read_bytes()[:LENGTH]), device=device)
    config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        first = torch.randint(0, LENGTH - WINDOW, (BATCH,), device=device)
        rows = text[first[:, None] + torch.arange(WINDOW, device=device)]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    rng = random.Random(seed)
    starts = [rng.randrange(0, LENGTH - 512) for _ in PROMPTS]
    return model, [text[at : at + n].tolist() for at, n in zip(starts, PROMPTS, strict=True)]


def main() -> None:
    """Write the model in bfloat16, and its prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    model, prompts = train(asked.steps, asked.device)
    model.to(torch.bfloat16).save_pretrained(asked.out)
    (asked.out / "prompts.json").write_text(json.dumps(prompts))


if __name__ == "__main__":
    main()
