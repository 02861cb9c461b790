"""Model files, checked for completeness and read once: folders of safetensors (never pickles) and GGUF files.

transformers' GGUF loader parses the file's metadata three times in plain Python, and builds one tensor-name table per
module of the model. `read_once` gives the loader the reader that the check has opened, and one table. On two cores this
cuts the load time of SmolLM2-135M from 17 s to 5 s.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from draftmark import ModelError

from .refusals import rope_types

if TYPE_CHECKING:
    import gguf

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


STATED = {"attn_logit_softcapping": "attn_logit_softcapping", "attention.sliding_window": "sliding_window"}
"""GGUF metadata keys (after the architecture's name) that change attention, and the equal configuration fields."""
BLOCK = re.compile(r"blk\.(\d+)\.")
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight")
MOST_OF_A_CAUSE = 300
"""Most characters of another library's error that a message quotes, cut between words."""
_PATCHING = threading.Lock()
"""Lock for `read_once`, which patches gguf's module for one reader at a time."""


def check_folder(path: Path) -> None:
    """Raise `ModelError` unless `path` contains a readable config.json and complete *.safetensors files."""
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
    """Return True if the folder contains a tokenizer of any format."""
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
            f"{file.parent.name}/config.json has no model_type; use the config.json that came with the weights"
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


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Open the file's reader: metadata parsed, tensors memory-mapped.

    Raises:
        ModelError: the file is not GGUF or is cut short.
    """
    import gguf  # imported here because a model folder does not need the package

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]
        """GGUFReader over a plain array. With a memmap, each of about a million slices takes one microsecond more."""

        data: Any

        def _get(self, *args: Any, **kwargs: Any) -> Any:
            if type(self.data) is np.memmap:
                self.data = np.asarray(self.data)
            return super()._get(*args, **kwargs)

    try:
        return PlainReader(path)
    except Exception as error:  # damaged files raise IndexError, ValueError, MemoryError, …
        raise ModelError(
            f"{path.name} ({path.stat().st_size:,} bytes) is not a whole GGUF file ({type(error).__name__} at its "
            "first damaged field); download it again and compare its size"
        ) from None


@contextmanager
def read_once(path: Path, reader: gguf.GGUFReader) -> Iterator[None]:
    """Give every reader of `path`'s metadata the open `reader` while the context is active; one thread at a time.

    transformers imports both patched names from gguf when it loads a model, and accepts no reader as an argument.
    """
    import gguf

    make_reader, make_table = gguf.GGUFReader, gguf.get_tensor_name_map

    def known(file: Any, *args: Any, **kwargs: Any) -> Any:
        return reader if Path(file).samefile(path) else make_reader(file, *args, **kwargs)

    with _PATCHING:
        gguf.GGUFReader, gguf.get_tensor_name_map = known, functools.cache(make_table)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = make_reader, make_table


def refuse_dropped(reader: gguf.GGUFReader, config: Any, name: str) -> None:
    """Raise `ModelError` for metadata that changes attention and is missing from the (text) `config`."""
    family = str(_value(reader, "general.architecture"))
    tensors = {tensor.name for tensor in reader.tensors}
    layers = _value(reader, f"{family}.block_count")
    held = {int(found[1]) for found in map(BLOCK.match, tensors) if found}
    if isinstance(layers, int) and held and max(held) >= layers:
        raise ModelError(
            f"{name} holds weights of {max(held) + 1} layers, but its block_count is {layers}, and the rest would be "
            "dropped; download the model again"
        )
    scaled = _value(reader, f"{family}.rope.scaling.type") not in (None, "none") or tensors & set(ROPE_TENSORS)
    if scaled and rope_types(config) <= {"default"}:
        raise ModelError(
            f"model {name!r} (family {family}) cannot be decoded: the GGUF file scales its RoPE and transformers "
            "drops that; use the model's safetensors folder"
        )
    for key, field in STATED.items():
        stated, got = _value(reader, f"{family}.{key}"), getattr(config, field, None)
        if stated and got != stated:
            raise ModelError(
                f"model {name!r} (family {family}) cannot be decoded: the GGUF file sets {key} to {stated}, but "
                f"transformers reads {field} {got}; use the model's safetensors folder"
            )


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()
