"""Folders of a model shape without weights: a configuration, a tokenizer, and a draft head."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.vllm.engines import Engine
from benchmarks.vllm.engines import head as head_of
from benchmarks.vllm.engines import model as model_of
from benchmarks.vllm.shapes import SHAPES

SPECIAL = ("<pad>", "<s>", "</s>")
"""Tokens below `workload.FIRST_ID`."""


def write(folder: Path, engine: Engine) -> tuple[Path, Path | None]:
    """Write the folders of an engine's model and, if it has one, of its EAGLE-3 head; return both."""
    path = model_of(folder, engine)
    if not (path / "tokenizer.json").exists():
        write_tokenizer(path, SHAPES[engine.shape]["vocab_size"])
    return path, head_of(folder, engine) if engine.drafts and engine.drafter == "eagle3" else None


def name_layers(head: Path) -> None:
    """Name the layers that a draft head reads as SGLang does: it counts them from one less than vLLM.

    By default SGLang reads layers that coincide in a shallow model, and the head would get too few hidden states.
    """
    config = json.loads((head / "config.json").read_text())
    layers = [number - 1 for number in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_config"] = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers}
    (head / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer in which token n is the word ``tN``, so that a server writes text without a trained model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"t{number}" for number in range(len(SPECIAL), vocabulary))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, begin, end = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, bos_token=begin, eos_token=end)
    fast.save_pretrained(folder)
