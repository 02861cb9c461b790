"""The border to transformers' attention registry."""

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
    """A step that returns its queries and remembers the layers it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Each row gets its own query back."""
        self.seen.append(layer)
        return q


class Broken(Echo):
    """A step that fails in the middle of a forward."""

    def attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Fails."""
        raise RuntimeError("out of pages")


def _call(layer_idx: int | None = 0, mask: Any = None, value_dim: int = 8, **arguments: Any) -> LayerCall:
    calls: list[Any] = []

    def run(layer: int, called: Any, q: Any, k: Any, v: Any) -> Any:
        calls.append((layer, called, q.shape, k.shape))
        return q

    module = SimpleNamespace(layer_idx=layer_idx)
    q, k, v = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, value_dim)
    out, _ = AttentionInterface()[NAME](module, q, k, v, mask, **{RUN: run, **arguments})
    assert out.shape == (1, 3, 4, 8)
    return calls[0]


LayerCall = tuple[int, Any, Any, Any]


def test_no_mask_function_is_registered() -> None:
    """One would run packed-sequence detection, a host read inside captured regions."""
    assert NAME not in ALL_MASK_ATTENTION_FUNCTIONS


def test_the_layer_is_read_from_the_call() -> None:
    """Hugging Face's window counts the query itself; ours does not."""
    layer, called, q, k = _call(layer_idx=5, scaling=0.5, sliding_window=9, softcap=30.0, dropout=0.0, is_causal=True)
    assert (layer, called.softmax_scale, called.window_left, called.logits_soft_cap) == (5, 0.5, 8, 30.0)
    assert (called.num_qo_heads, called.num_kv_heads, called.head_dim) == (4, 2, 8)
    assert (q, k) == ((3, 4, 8), (3, 2, 8))


def test_absent_arguments_have_their_meaning() -> None:
    """No scale means head_dim ** -0.5; no window and no cap mean none; None is absent."""
    _, called, _, _ = _call(scaling=None, sliding_window=None, softcap=None, s_aux=None)
    assert (called.softmax_scale, called.window_left, called.logits_soft_cap) == (8**-0.5, -1, 0.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"s_aux": torch.zeros(4)}, "s_aux=Tensor.*attention sinks"),
        ({"position_bias": torch.zeros(4)}, "position_bias=Tensor"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False.*looks ahead"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"chunk_size": 8}, "chunk_size=8"),
        ({"cu_seq_lens_q": torch.zeros(2)}, "cu_seq_lens_q=Tensor"),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "its own mask"),
        ({"value_dim": 6}, "multi-head latent attention"),
        ({"layer_idx": None}, "layer_idx"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_be_ignored_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    """An argument without a meaning here would change the model silently."""
    with pytest.raises(ModelError, match=named):
        _call(**arguments)


def test_the_models_own_attention_is_back_after_a_forward() -> None:
    """Also after one that failed; generate then runs on the same weights as before."""
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


def test_a_layer_that_changes_after_the_check_is_caught() -> None:
    """The forward holds every call against what was verified."""
    model = tiny_model("mistral")
    model.hf.config.sliding_window = 5
    rows = torch.arange(3)
    with pytest.raises(ModelError, match=r"layer 0 called attention with .*window_left=4.*load the model again"):
        model.forward(rows, rows, Echo())


def test_our_attention_cannot_run_outside_our_forward() -> None:
    """Naming it in a configuration is not enough: there is no batch to attend over."""
    hf = tiny_hf_model("llama")
    hf.config._attn_implementation = NAME
    with pytest.raises(ModelError, match=r"outside CausalLM\.forward"):
        hf(torch.tensor([[1, 2]]), use_cache=False)
