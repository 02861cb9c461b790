"""Tests that a slot of recurrent state has the bytes that SGLang's own configuration code computes for a request."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from draftmark import GeometryError, Limits, StateGeometry
from draftmark_tools.models import state_facts

KDA: dict[str, Any] = {
    "num_heads": 32,
    "head_dim": 128,
    "short_conv_kernel_size": 4,
    "kda_layers": [1, 2, 3, 5],
    "full_attn_layers": [4],
}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3-Next": ("qwen3_next", "Qwen3NextConfig", {"full_attention_interval": 4}),
    "Nemotron-H": ("nemotron_h", "NemotronHConfig", {"n_groups": 8}),
    "Kimi-Linear": ("kimi_linear", "KimiLinearConfig", {"num_hidden_layers": 5, "linear_attn_config": KDA}),
    "Falcon-H1": ("falcon_h1", "FalconH1Config", {"mamba_d_ssm": 1024, "mamba_d_head": 8}),
    "LFM2": ("lfm2", "Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}),
}
"""Module and class below sglang.srt.configs, and the arguments of the class, by model."""


def test_names_are_sglangs() -> None:
    """Each class exists in the installed release."""
    for module, name, _ in CONFIGS.values():
        assert hasattr(import_module(f"sglang.srt.configs.{module}"), name)


def sglang_bytes(model: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return SGLang's configuration, and its bytes of one request's slot, on one of `ranks` attention ranks."""
    name, kind, fields = CONFIGS[model]
    module = import_module(f"sglang.srt.configs.{name}")
    if hasattr(module, "get_parallel"):
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(attn_tp_size=ranks))
        monkeypatch.setattr(module, "linear_attn_tp_size", lambda: ranks, raising=False)
    else:
        monkeypatch.setattr(module, "get_attention_tp_size", lambda: ranks)
    config = getattr(module, kind)(**fields)
    return config, config.mamba2_cache_params.mamba_cache_per_req


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("model", CONFIGS)
def test_slot_bytes_are_sglangs(model: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers' slots of one request have the bytes of SGLang's `mamba_cache_per_req`."""
    config, expected = sglang_bytes(model, ranks, monkeypatch)
    facts = state_facts(config, ranks, conv_dtype="bfloat16")
    geometry = StateGeometry.create(facts.shape, Limits(1, 1), num_layers=len(facts.layers))
    assert geometry.num_layers * geometry.slot_bytes == expected
    facts.check(geometry)


def test_groups_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are neither a multiple nor a divisor of the groups are refused; SGLang adds groups there."""
    config, _ = sglang_bytes("Nemotron-H", 16, monkeypatch)
    assert state_facts(config, 16).shape.num_key_heads == 1
    config.n_groups = 3
    with pytest.raises(GeometryError, match="3 groups"):
        state_facts(config, 8)
