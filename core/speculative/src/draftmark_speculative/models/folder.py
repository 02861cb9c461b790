"""Model folders: a configuration and whole safetensors files, never pickles."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from draftmark.errors import ModelError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def check_folder(path: Path) -> None:
    """Raise `ModelError` unless `path` holds a readable config.json and whole *.safetensors files."""
    _check_config(path / "config.json")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickles:
            raise ModelError(
                f"{path.name} holds its weights as a pickle only ({pickles[0]}), which runs code when it is read; "
                "convert it to safetensors (save_pretrained of a trusted copy) or download that format"
            )
        raise ModelError(f"{path.name} holds no *.safetensors file; download the model's weights into it")
    for file in weights:
        _check_safetensors(file)


def has_tokenizer(path: Path) -> bool:
    """Whether the folder brings a tokenizer of any format."""
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def _check_config(file: Path) -> None:
    if not file.is_file():
        raise ModelError(
            f"{file.parent.name} is not a model folder: it has no config.json; "
            "name a folder with config.json and *.safetensors, or a .gguf file"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        cause = str(error).split("\n")[0]
        raise ModelError(
            f"{file.parent.name}/config.json ({file.stat().st_size:,} bytes) is not JSON ({cause}); download it again"
        ) from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(
            f"{file.parent.name}/config.json names no model_type; use the config.json that came with the weights"
        )


def _check_safetensors(file: Path) -> None:
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{file.parent.name}/{file.name} ({file.stat().st_size:,} bytes) is not a whole safetensors file "
            f"({error}); download it again and compare its size"
        ) from None
