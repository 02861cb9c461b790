"""Tiny SGLang models without weight files: a config.json, and random weights seeded by the parameters' names.

SGLang's own dummy weights are so small that the output tokens hardly depend on attention.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import torch

from draftmark_sglang_judge.small_models import write_config

SHAPE: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    max_position_embeddings=256,
)
DRAFT_NOISE = 0.05
"""Difference between the weights of a draft model and of a target of the same shape."""


def any_model(folder: Path, architecture: str, model_type: str, **shape: Any) -> str:
    """Write a model's config.json and return the folder, for SGLang's ``load_format="dummy"``."""
    return str(write_config(folder, architecture, model_type=model_type, **(SHAPE | shape)))


def use_random_weights() -> None:
    """Replace SGLang's dummy weights in this process by random weights.

    The first model's weights are seeded by parameter name. A second model, the draft model, gets nearly equal weights.
    """
    from sglang.srt.model_loader import loader

    models: list[Any] = []

    def initialize(model: Any, *_: Any, **__: Any) -> None:
        models.append(model)
        seen: set[int] = set()
        for name, parameter in model.state_dict().items():
            if torch.is_floating_point(parameter) and parameter.data_ptr() not in seen and "rotary" not in name:
                seen.add(parameter.data_ptr())
                parameter.data.copy_(_values(name, parameter.shape, DRAFT_NOISE if len(models) > 1 else 0.0))

    loader.initialize_dummy_weights = initialize


def _values(name: str, shape: torch.Size, noise: float) -> torch.Tensor:
    make = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=make)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * values
    if len(shape) < 2:
        return 0.1 * values
    if "embed" in name:
        return 0.3 * values
    scale = 3.0 if "lm_head" in name else 1.5
    return scale / math.sqrt(shape[-1]) * values * (1 + noise * torch.randn(shape, generator=make))
