"""The interface to transformers' attention registry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from draftmark.errors import ModelError
from draftmark_speculative.models.attention import NAME, RUN
from draftmark_speculative.models.tiny import tiny_hf_model, tiny_model


class Echo:
    """`AttentionStep` that returns its queries and records the layers that called it."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Return each row's own query."""
        self.seen.append(layer)
        return q


class Broken(Echo):
    """`AttentionStep` that fails in the middle of a forward."""

    def attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Raise an error."""
        raise RuntimeError("out of pages")


def _call(layer_idx: int | None = 0, mask: Any = None, value_dim: int = 8, **arguments: Any) -> LayerCall:
    calls: list[Any] = []

    def run(layer: int, called: Any, q: Any, k: Any, v: Any, sinks: Any = None) -> Any:
        calls.append((layer, called, q.shape, k.shape))
        return q

    module = SimpleNamespace(layer_idx=layer_idx)
    q, k, v = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, value_dim)
    out, _ = AttentionInterface()[NAME](module, q, k, v, mask, **{RUN: run, **arguments})
    assert out.shape == (1, 3, 4, 8)
    return calls[0]


LayerCall = tuple[int, Any, Any, Any]


def test_no_mask_function_is_registered() -> None:
    """draftmark registers no mask function: one would read the device on the host in captured regions."""
    assert NAME not in ALL_MASK_ATTENTION_FUNCTIONS


def test_attention_parameters_are_read_from_the_call() -> None:
    """Attention parameters are read from the call; transformers' window includes the query, window_left does not."""
    layer, called, q, k = _call(layer_idx=5, scaling=0.5, sliding_window=9, softcap=30.0, dropout=0.0, is_causal=True)
    assert (layer, called.softmax_scale, called.window_left, called.logits_soft_cap) == (5, 0.5, 8, 30.0)
    assert (called.num_qo_heads, called.num_kv_heads, called.head_dim) == (4, 2, 8)
    assert (q, k) == ((3, 4, 8), (3, 2, 8))


def test_missing_arguments_have_default_values() -> None:
    """A missing scale means head_dim ** -0.5; a missing window or cap means none; None counts as missing."""
    _, called, _, _ = _call(scaling=None, sliding_window=None, softcap=None, s_aux=None)
    assert (called.softmax_scale, called.window_left, called.logits_soft_cap) == (8**-0.5, -1, 0.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"s_aux": torch.zeros(3)}, "sinks .* of shape .3., but draftmark serves one logit for each of its 4"),
        ({"sinks": torch.zeros(4)}, "sinks=Tensor"),
        ({"position_bias": torch.zeros(4)}, "position_bias=Tensor"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False.*looks ahead"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"chunk_size": 8}, "chunk_size=8"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "cu_seq_lens_q=Tensor"),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "its own mask"),
        ({"value_dim": 6}, "stores both alike, or one latent row"),
        ({"layer_idx": None}, "layer_idx"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_attention_argument_is_rejected(arguments: dict[str, Any], named: str) -> None:
    """An argument or mask that draftmark would ignore raises an error that names it."""
    with pytest.raises(ModelError, match=named):
        _call(**arguments)


def test_own_attention_is_restored_after_a_forward() -> None:
    """After a forward, successful or failed, the model's own attention is active and generate works as before."""
    model = tiny_model("llama")
    own = model.hf.config._attn_implementation
    prompt = torch.tensor([[5, 6, 7]])
    before = model.hf.generate(prompt, max_new_tokens=4, do_sample=False)
    echo, rows = Echo(), torch.arange(3)
    model.forward(rows, rows, echo)
    assert echo.seen == [0, 1]
    with pytest.raises(RuntimeError, match="out of pages"):
        model.forward(rows, rows, Broken())
    assert model.hf.config._attn_implementation == own
    assert torch.equal(model.hf.generate(prompt, max_new_tokens=4, do_sample=False), before)


def test_layer_changed_after_the_check_is_rejected() -> None:
    """A layer that calls attention with other parameters than verified raises an error."""
    model = tiny_model("mistral")
    model.hf.config.sliding_window = 5
    rows = torch.arange(3)
    with pytest.raises(ModelError, match=r"layer 0 called attention with .*window_left=4.*load the model again"):
        model.forward(rows, rows, Echo())


def test_attention_outside_the_forward_is_rejected() -> None:
    """Naming draftmark's attention in a configuration is not enough: outside CausalLM.forward it raises an error."""
    hf = tiny_hf_model("llama")
    hf.config._attn_implementation = NAME
    with pytest.raises(ModelError, match=r"outside CausalLM\.forward"):
        hf(torch.tensor([[1, 2]]), use_cache=False)
