"""MTP layers of a model folder: the tensors ``model.layers.N.*`` after the model's last layer, as DeepSeek V3 has them.

transformers renames and stacks the tensors (`MtpModel.from_pretrained`). It finds them by a list of each family's layer
numbers; here the number follows from the model's own num_hidden_layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from safetensors import safe_open

from draftmark import ModelError

from ..memory import is_out_of_memory
from ..models import CausalLM
from ..models.files import MOST_OF_A_CAUSE
from .head import MtpHead

IGNORED = "_keys_to_ignore_on_load_unexpected"
"""Attribute of a transformers model with the patterns of its MTP tensors."""


def load_mtp(model: CausalLM, num_modules: int = 1) -> MtpHead:
    """Read the first MTP layers from the folder that the model was loaded from.

    Raises:
        ModelError: the model was not loaded from a folder, the folder has fewer MTP layers or only a part of one, or a
            layer would run incorrectly.
    """
    hf, config = model.hf, model.hf.config.get_text_config()
    folder, first = Path(config.name_or_path or "."), int(config.num_hidden_layers)
    if not config.name_or_path or not folder.is_dir():
        raise _refusal(model, "it was not loaded from a folder", "use load_model, or pass Mtp an MtpHead")
    keys = list(_keys(folder))
    for layer in range(first, first + num_modules):
        if not any(re.search(rf"(^|\.)layers\.{layer}\.", key) for key in keys):
            which = "no MTP layer" if layer == first else f"only {layer - first} of {num_modules} MTP layers"
            reason = f"its folder has {which} (no tensor of layers.{layer})"
            raise _refusal(model, reason, "use a checkpoint with that layer, or other drafts")
    numbers = "|".join(map(str, range(first, first + num_modules)))
    pattern = re.compile(rf"(^|\.)layers\.({numbers})\.")
    return MtpHead(_read(model, hf, config, pattern, num_modules), model)


def _read(model: CausalLM, hf: Any, config: Any, pattern: re.Pattern[str], num_modules: int) -> Any:
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        MtpModel = None
    if not hasattr(MtpModel, "forward_layer"):
        reason = "this transformers has no MtpModel with forward_layer"
        raise _refusal(model, reason, "use transformers 5.23 or later") from None
    try:
        with mtp_layers(config, num_modules), _found_by(hf, pattern):
            return MtpModel.from_pretrained(hf, device_map={"": hf.device})
    except Exception as error:  # damaged files raise KeyError, RuntimeError, SafetensorError, …
        if is_out_of_memory(error):
            raise
        cause = shorten(" ".join(str(error).split()), MOST_OF_A_CAUSE, placeholder=" …").rstrip(". ")
        reason = f"its MTP layer cannot be read ({type(error).__name__}: {cause})"
        raise _refusal(model, reason, "download the model again") from None


@contextmanager
def mtp_layers(config: Any, count: int) -> Iterator[None]:
    """Make a (text) configuration describe `count` MTP layers inside the context, with the last layer's kind of MLP."""
    given: dict[str, Any] = {"num_mtp_layers": count}
    if getattr(config, "mlp_layer_types", None) and not getattr(config, "mtp_mlp_layer_types", None):
        given["mtp_mlp_layer_types"] = [config.mlp_layer_types[-1]] * count
    own = {name: getattr(config, name) for name in given if hasattr(config, name)}
    for name, value in given.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name in given:
            if name in own:
                setattr(config, name, own[name])
            else:
                delattr(config, name)


@contextmanager
def _found_by(hf: Any, pattern: re.Pattern[str]) -> Iterator[None]:
    """Make transformers look for the MTP layers of the model under `pattern` inside the context."""
    setattr(hf, IGNORED, [pattern.pattern])
    try:
        yield
    finally:
        delattr(hf, IGNORED)


def _keys(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            yield from opened.keys()


def _refusal(model: CausalLM, reason: str, remedy: str) -> ModelError:
    return ModelError(f"model {model.name!r} has no MTP drafts: {reason}; {remedy}")
