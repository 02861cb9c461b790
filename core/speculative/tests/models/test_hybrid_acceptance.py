"""A model with recurrent state is accepted when its logits equal transformers', and rejected in one sentence else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftmark import ModelError, Recurrence
from draftmark_speculative.models import wrap_model
from draftmark_speculative.models.states import HybridLayers, ProbeStates
from draftmark_speculative.models.states.delta import DeltaBlock, KimiDelta, Projected
from draftmark_speculative.models.states.lightning import MiniMaxLightning
from draftmark_speculative.models.states.mamba2 import Mamba2Block
from draftmark_speculative.models.states.short_conv import ShortConvBlock
from draftmark_speculative.models.tiny import tiny_hf_model, tiny_model
from draftmark_speculative.models.tiny_hybrids import HYBRIDS
from draftmark_tools.models import state_facts

ATTENTION = {"falcon_h1": (0, 1), "lfm3": (1, 2), "nemotron_h": (2,)}
"""Decoder layers with attention of the tiny models that differ from the others."""
STATES = {"falcon_h1": 2, "lfm3": 1}


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_is_accepted(family: str) -> None:
    """Every served family is accepted, with its layers of each kind."""
    model = tiny_model(family)
    assert len(model.layers) == len(model.sinks) == len(ATTENTION.get(family, (1,)))
    assert len(model.states) == STATES.get(family, 2)
    for shape in model.states:
        assert (shape.dtype, shape.state_dtype, shape.conv_dtype) == ("float32", "float32", "float32")
        assert shape.conv_silu is (shape.recurrence is not Recurrence.NONE)
    assert not [module for module in model.hf.modules() if "forward" in vars(module)], "transformers' own forwards"


@pytest.mark.parametrize("family", HYBRIDS)
def test_shapes_are_those_of_the_configuration(family: str) -> None:
    """The modules have the shape and layers that `draftmark_tools.models.state_facts` reads from the configuration."""
    hf = tiny_hf_model(family)
    hybrid, facts = HybridLayers(hf), state_facts(hf.config, dtype="float32", state_dtype="float32")
    assert set(hybrid.shapes) == {facts.shape}
    assert tuple(block.decoder_layer for block in hybrid.blocks) == facts.layers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "granitemoehybrid", "lfm2_moe"])
def test_half_precision_is_accepted(family: str, dtype: str) -> None:
    """Activations and windows have the model's dtype; states are float32."""
    model = tiny_model(family, dtype=dtype)
    assert {(one.dtype, one.state_dtype, one.conv_dtype) for one in model.states} == {(dtype, "float32", dtype)}


@pytest.mark.parametrize(
    ("family", "alike"), [("nemotron_h", False), ("granitemoehybrid", True), ("qwen3_5_text", True), ("llama", True)]
)
def test_models_that_transformers_decodes_otherwise_are_known(family: str, alike: bool) -> None:
    """Only a model with a limited time step computes other logits over transformers' cache."""
    assert tiny_model(family).decodes_alike is alike


def test_model_without_state_has_no_states() -> None:
    """A model with attention only has no shapes of states."""
    assert tiny_model("llama").states == ()


# -- rejected ---------------------------------------------------------------------------------------------------


def _refused(hf: Any, named: str) -> None:
    family = hf.config.model_type
    with pytest.raises(ModelError, match=named) as refused:
        wrap_model(hf, name="some-model")
    message = str(refused.value)
    assert message.startswith(f"model 'some-model' (family {family}) cannot be decoded: "), message
    assert "; use " in message and "\n" not in message
    assert not [module for module in hf.modules() if "forward" in vars(module)], "transformers' own forwards"


def _change(monkeypatch: pytest.MonkeyPatch, block: type, method: str, change: Callable[..., Any]) -> None:
    own = getattr(block, method)
    monkeypatch.setattr(block, method, lambda self, *arguments: change(own, self, *arguments))


def _one_decay(projected: Projected) -> Projected:
    decay = projected.log_decay
    return projected._replace(log_decay=decay.mean(-1, keepdim=True).expand_as(decay).contiguous())


WRONG: list[tuple[str, type, str, Callable[..., Any]]] = [
    ("qwen3_5_text", DeltaBlock, "output", lambda own, self, out, gate: own(self, out, gate * 0 + 1)),
    ("qwen3_next", DeltaBlock, "_unit", lambda own, self, x, *scale: x.view(len(x), -1, self.shape.key_dim)),
    ("kimi_linear", KimiDelta, "project", lambda own, self, hidden: _one_decay(own(self, hidden))),
    ("minimax", MiniMaxLightning, "wide", lambda own, self, x: own(self, x) * 2),
    ("granitemoehybrid", Mamba2Block, "output", lambda own, self, out, gate: own(self, out, gate * 0 + 1)),
    ("nemotron_h", Mamba2Block, "project", lambda own, self, hidden: own(self, hidden) * 1.1),
    ("lfm2", ShortConvBlock, "convolve", lambda own, self, x, *rest: torch.nn.functional.silu(own(self, x, *rest))),
]
"""Family, block, method, and a mistake in that method."""


@pytest.mark.parametrize(
    ("family", "block", "method", "change"), WRONG, ids=[f"{family}-{name}" for family, _, name, _ in WRONG]
)
def test_block_with_a_mistake_is_rejected(
    family: str, block: type, method: str, change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that computes other logits than transformers' module is found at load."""
    hf = tiny_hf_model(family)
    _change(monkeypatch, block, method, change)
    _refused(hf, "its logits differ from transformers' own by")


def test_state_that_a_decode_forgets_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode that begins with an empty state is found, although one forward over all rows is right."""
    hf = tiny_hf_model("lfm2")
    own = ProbeStates._batch

    def forgetful(self: ProbeStates, count: int) -> Any:
        self._stored = 0
        return own(self, count)

    monkeypatch.setattr(ProbeStates, "_batch", forgetful)
    _refused(hf, "its logits after 2 tokens differ from those of one forward by")


def test_other_activation_of_the_convolution_is_rejected() -> None:
    """A convolution with another activation than SiLU is rejected by name."""
    _refused(tiny_hf_model("granitemoehybrid", hidden_act="gelu"), "layer 0 applies gelu after the short convolution")


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("kernel_size", (1,), "of 1 taps"), ("dilation", (2,), "dilation 2"), ("groups", 24, "in 24 groups")],
)
def test_other_convolution_is_rejected(field: str, value: Any, named: str) -> None:
    """A convolution of one tap, with gaps, or over several channels is rejected with its numbers."""
    hf = tiny_hf_model("lfm2")
    setattr(hf.model.layers[0].conv.conv, field, value)
    _refused(hf, f"its layer 0 has a convolution .*{named}")


def test_unknown_module_with_state_is_rejected() -> None:
    """A layer with a module of another class is rejected with its index."""
    hf = tiny_hf_model("qwen3_5_text")
    module = hf.model.layers[2].linear_attn
    module.__class__ = type("Other", (type(module),), {})
    _refused(hf, "its layer 2 keeps a state in a module that draftmark has no block for")


def test_forward_with_a_padding_mask_is_rejected() -> None:
    """A module that gets a padding mask raises an error, because packed rows have no padding."""
    model = tiny_model("lfm2")
    with model._hybrid.running(None), pytest.raises(ModelError, match="layer 0 with state got a padding mask"):
        model.hf(torch.tensor([[1, 2, 3]]), attention_mask=torch.tensor([[0, 1, 1]]), use_cache=False)
    assert "forward" not in vars(model.hf.model.layers[0].conv)
