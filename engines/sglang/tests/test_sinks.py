"""Tests of attention sinks, as in gpt-oss: the module that contains an attention layer holds the layer's sinks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftmark import Mode, load
from draftmark.runtime import Exact, ragged
from draftmark_sglang import attention as module
from draftmark_sglang.attention import LayerAttention
from draftmark_sglang.facts import RunnerFacts

FACTS = RunnerFacts("cpu", "float32", "float32", 16, 4, 100, 64, "EAGLE", 4, 3, 8)
HEADS, DIM, PREFIX, ROWS = 4, 16, 21, 5


class _Layer(torch.nn.Module):
    """Stands in for SGLang's `RadixAttention`, with the attributes that the adapter reads."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.tp_q_head_num, self.tp_k_head_num, self.head_dim = layer_id, HEADS, 2, DIM
        self.scaling, self.sliding_window_size, self.logit_cap = DIM**-0.5, None, 0.0


class _Around(torch.nn.Module):
    """Stands in for a decoder layer's attention module, which holds an attention layer and its sinks."""

    def __init__(self, layer_id: int, sinks: torch.Tensor | None) -> None:
        super().__init__()
        self.attn = _Layer(layer_id)
        self.sinks = None if sinks is None else torch.nn.Parameter(sinks, requires_grad=False)


def _opened(monkeypatch: Any, *sinks: torch.Tensor | None) -> tuple[LayerAttention, list[_Around], Any]:
    """Return `LayerAttention`, attention modules and KV pages of a model with one layer per element of `sinks`."""
    made = torch.nn.ModuleList(_Around(number, one) for number, one in enumerate(sinks))
    monkeypatch.setattr(module, "attention_layers", lambda model: [one.attn for one in model])
    pages = torch.randn(len(sinks), 2, 3 * 16, 2, DIM, generator=torch.Generator().manual_seed(1))
    pool = SimpleNamespace(get_kv_buffer=lambda layer_id: (pages[layer_id, 0], pages[layer_id, 1]))
    runner = SimpleNamespace(model=made, token_to_kv_pool=pool)
    return LayerAttention(runner, load("reference"), FACTS, (Mode.EXTEND, Mode.DECODE)), list(made), pages


def _rows(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(ROWS, heads, DIM, generator=generator) for heads in (HEADS, 2, 2))  # type: ignore[return-value]


def _dense(q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    k, v = kv.double().repeat_interleave(HEADS // 2, 2)
    scores = torch.einsum("qhd,nhd->hqn", q.double(), k) * DIM**-0.5
    scores = scores.masked_fill(torch.arange(PREFIX + ROWS) > PREFIX + torch.arange(ROWS)[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, ROWS, 1)], -1)
    return torch.einsum("hqn,nhd->qhd", scores.softmax(-1)[..., : PREFIX + ROWS], v)


def _extend(attention: LayerAttention) -> Any:
    """Return an EXTEND batch of one request on pages 1 and 2."""
    table = torch.zeros(1, attention.geometry.max_pages_per_req, dtype=torch.int32)
    table[0, :2] = torch.tensor([1, 2])
    lens = torch.tensor([PREFIX], dtype=torch.int32)
    return ragged(attention.geometry, lens, table, (ROWS,), Exact((PREFIX,)), 1)


def test_each_layer_uses_its_own_sinks(monkeypatch: Any) -> None:
    """Each layer's output uses its own sinks; a layer without sinks has another attention shape and uses none."""
    given = [torch.tensor([0.5, 3.0, -2.0, float("-inf")], dtype=torch.bfloat16), None]
    given.append(torch.tensor([2.0, 1.0, 0.0, 4.0], dtype=torch.bfloat16))
    attention, layers, pages = _opened(monkeypatch, *given)
    assert len(attention.shapes) == 2
    batch, generator = _extend(attention), torch.Generator().manual_seed(2)
    attention.plan(batch)
    attention.write_metadata(batch)
    for number, (layer, sinks) in enumerate(zip(layers, given, strict=True)):
        q, k, v = _rows(generator)
        out = attention.forward(layer.attn, q, k, v, batch, layer.sinks).view(ROWS, HEADS, DIM)
        kv = pages[number][:, 16 : 16 + PREFIX + ROWS]
        assert torch.equal(kv[0, PREFIX:], k) and torch.equal(kv[1, PREFIX:], v)
        assert (out.double() - _dense(q, kv, sinks)).abs().max() < 1e-5


def test_unexpected_sinks_raise(monkeypatch: Any) -> None:
    """A call with sinks raises if the layer had none at start-up; a call without sinks raises if it had some."""
    attention, layers, _ = _opened(monkeypatch, torch.zeros(HEADS), None)
    batch, (q, k, v) = _extend(attention), _rows(torch.Generator())
    with pytest.raises(NotImplementedError, match="layer 1: SGLang passes attention sinks"):
        attention.forward(layers[1].attn, q, k, v, batch, torch.zeros(HEADS))
    with pytest.raises(NotImplementedError, match="layer 0: SGLang passes no attention sinks"):
        attention.forward(layers[0].attn, q, k, v, batch)


def test_kernels_are_prepared_before_a_backend_is_bound(monkeypatch: Any, opening_order: list[tuple[str, Any]]) -> None:
    """One call prepares the kernels of every shape; all buffers and backends come after it, and again at a resize."""
    made, _, _ = _opened(monkeypatch, torch.zeros(HEADS), None)
    made.allocate(8)
    starts = [place for place, (name, _) in enumerate(opening_order) if name == "prepare"]
    assert starts == [0, len(opening_order) // 2]
    for start in starts:
        prepared = opening_order[start][1]
        assert [one for name, one in opening_order[start:] if name == "bind"][: len(prepared)] == prepared
    assert len(opening_order[0][1]) == len(made.shapes) == 2
