"""Write SmolLM2, and this repository's draft head for it, in the formats that vLLM loads.

Usage: ``python -m benchmarks.vllm.smollm2 OUT --gguf FILE --head FOLDER``. Writes ``OUT/smollm2`` (bfloat16 weights,
and the demo's prompts as tokens) and ``OUT/smollm2-head``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Unpack the model from a GGUF file, and convert the draft head."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from draftmark_vllm.heads.convert import convert

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples" / "prompts" / "demo.txt")
    asked = parser.parse_args()
    given = {"gguf_file": asked.gguf.name}
    model = AutoModelForCausalLM.from_pretrained(asked.gguf.parent, dtype=torch.float32, **given)
    tokenizer = AutoTokenizer.from_pretrained(asked.gguf.parent, **given)
    path = asked.out / "smollm2"
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: one.bfloat16().contiguous() for name, one in model.state_dict().items() if "lm_head" not in name}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    config |= {"tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    texts = asked.prompts.read_text().split("\n---\n")
    prompts = [tokenizer(text.strip() + "\n")["input_ids"] for text in texts]
    (path / "prompts.json").write_text(json.dumps(prompts))
    (path / "config.json").write_text(json.dumps(config))
    convert(asked.head, path, asked.out / "smollm2-head")


if __name__ == "__main__":
    main()
