"""Mutants that the checks of `sinks` kill."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Geometry, Mode
from draftmark.runtime import ForwardBatch, KVCache, is_recording

from ..designs.plain_attention import Parts, attending
from ..mutant import Mutant, around

SPLIT = 512
"""Number of keys in a split of the split-KV kernel."""


def _with_sinks(change: Callable[[Tensor, Geometry, ForwardBatch], Tensor]) -> Callable[[Any], None]:
    """Return a patch that passes changed sinks to `attend`."""

    def patch(backend: Any) -> None:
        def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
            if cache.sinks is not None:
                cache = replace(cache, sinks=change(cache.sinks, backend.geometry, batch).contiguous())
            original(q, cache, batch, out)

        around(backend, "attend", call)

    return patch


def _none(sinks: Tensor) -> Tensor:
    return torch.full_like(sinks, float("-inf"))


def _left_out(when: Callable[[Geometry, ForwardBatch], bool]) -> Callable[[Any], None]:
    return _with_sinks(lambda sinks, geometry, batch: _none(sinks) if when(geometry, batch) else sinks)


def _times(factor: Callable[[Geometry], float]) -> Callable[[Any], None]:
    return _with_sinks(lambda sinks, geometry, batch: sinks * factor(geometry))


def _scale(geometry: Geometry) -> float:
    scale = geometry.attention.softmax_scale
    assert scale is not None
    return scale


def _capped(sinks: Tensor, geometry: Geometry, batch: ForwardBatch) -> Tensor:
    cap = geometry.attention.logits_soft_cap
    return cap * torch.tanh(sinks / cap) if cap else sinks


def _by_kv_head(sinks: Tensor, geometry: Geometry, batch: ForwardBatch) -> Tensor:
    a = geometry.attention
    return sinks[: a.num_kv_heads].repeat_interleave(a.group_size)


def _transposed(sinks: Tensor, geometry: Geometry, batch: ForwardBatch) -> Tensor:
    """Read the sink of query head h' of KV head n at index h' · num_kv_heads + n."""
    a = geometry.attention
    return sinks.view(a.group_size, a.num_kv_heads).T.reshape(-1)


def _backwards(sinks: Tensor, geometry: Geometry, batch: ForwardBatch) -> Tensor:
    return sinks.view(-1, geometry.attention.group_size).flip(1).reshape(-1)


def _by_value(backend: Any) -> None:
    """Capture copies of the sinks, as if a graph received the values. Later changes of the sinks are not seen."""
    copies: dict[int, Tensor] = {}

    def change(sinks: Tensor, geometry: Geometry, batch: ForwardBatch) -> Tensor:
        if not is_recording() and sinks.data_ptr() not in copies:
            copies[sinks.data_ptr()] = sinks.clone()
        return copies.get(sinks.data_ptr(), sinks) if is_recording() else sinks

    _with_sinks(change)(backend)


def _first_layers(backend: Any) -> None:
    """Use the sinks of a forward's first layer in every layer that shares its metadata."""
    first: list[Tensor] = []

    def change(sinks: Tensor, geometry: Geometry, batch: ForwardBatch) -> Tensor:
        if not first:
            first.append(sinks)
        return first[0]

    _with_sinks(change)(backend)
    around(backend, "write_metadata", lambda original, batch: (first.clear(), original(batch))[1])


def _once_per_split(scores: Tensor, sinks: Tensor) -> Tensor:
    """Count the sink once for each split of a row's keys, as a split-KV kernel that adds it before the combine."""
    splits = -(-(scores > float("-inf")).sum(-1, keepdim=True) // SPLIT)
    top, sink = scores.amax(-1, keepdim=True), sinks[:, None, None]
    mass = (scores - top).exp()
    return mass / (mass.sum(-1, keepdim=True) + splits * (sink - top).exp())


def _without_row_maximum(scores: Tensor, sinks: Tensor) -> Tensor:
    """Add exp(sink) without subtracting the row maximum, although the sum over the keys subtracts it."""
    mass = (scores - scores.amax(-1, keepdim=True)).exp()
    return mass / (mass.sum(-1, keepdim=True) + sinks[:, None, None].exp())


def _as_a_quotient(scores: Tensor, sinks: Tensor) -> Tensor:
    """Compute the sink's share as exp(sink) / exp(maximum), which is NaN if both overflow."""
    top = scores.amax(-1, keepdim=True)
    mass = (scores - top).exp()
    return mass / (mass.sum(-1, keepdim=True) + sinks[:, None, None].exp() / top.exp())


def _of_value_one(weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    rest = (1 - weights.sum(-1)).transpose(1, 2)
    return torch.einsum("rhqk,rkhd->rqhd", weights, v) + rest[..., None]


def _no_sink_checks(backend: Any) -> None:
    """Ignore missing sinks, and sinks in a layer that must have none, instead of raising an error."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        a = backend.geometry.attention
        fits = cache.sinks is not None and cache.sinks.shape[0] == a.num_qo_heads
        other = torch.full((a.num_qo_heads,), float("-inf"), device=cache.k.device)
        original(q, replace(cache, sinks=(cache.sinks if fits else other) if a.sinks else None), batch, out)

    around(backend, "attend", call)


def _mutant(name: str, what: str, patch: Callable[[Any], None]) -> Mutant:
    return Mutant(name, what, "gpt-oss", patch=patch)


MUTANTS = (
    _mutant("N01", "Leaves out the attention sinks", _left_out(lambda geometry, batch: True)),
    _mutant("N02", "Counts each sink twice", _with_sinks(lambda sinks, geometry, batch: sinks + math.log(2))),
    _mutant("N03", f"Counts the sink once per split of {SPLIT} keys", attending(Parts(sinks=_once_per_split))),
    _mutant("N04", "Multiplies the sinks by the softmax scale", _times(_scale)),
    _mutant("N05", "Applies the soft cap to the sinks", _with_sinks(_capped)),
    _mutant("N06", "Uses the sink of the KV head instead of the query head", _with_sinks(_by_kv_head)),
    _mutant("N07", "Indexes the sinks with KV heads and groups exchanged", _with_sinks(_transposed)),
    _mutant("N08", "Reverses the sinks within a head group", _with_sinks(_backwards)),
    _mutant("N09", "Replays with a copy of the sinks from before the capture", _by_value),
    _mutant("N10", "Treats the sinks as base-2 logarithms", _times(lambda geometry: math.log(2))),
    _mutant("N11", "Converts the sinks to base 2 twice", _times(lambda geometry: 1 / math.log(2))),
    _mutant("N12", "Leaves out the sinks in captured graphs", _left_out(lambda geometry, batch: is_recording())),
    _mutant("N13", "Uses the first layer's sinks in all layers of its shape", _first_layers),
    _mutant("N14", "Gives the sink a value of one instead of zero", attending(Parts(values=_of_value_one))),
    _mutant(
        "N15",
        "Leaves out the sinks when the layer has a window",
        _left_out(lambda geometry, batch: geometry.attention.window_left >= 0),
    ),
    _mutant("N16", "Leaves out the sinks in EXTEND", _left_out(lambda geometry, batch: batch.mode is Mode.EXTEND)),
    _mutant("N17", "Leaves out the sinks in VERIFY", _left_out(lambda geometry, batch: batch.mode is Mode.VERIFY)),
    _mutant("N18", "Does not subtract the row maximum from the sink", attending(Parts(sinks=_without_row_maximum))),
    _mutant("N19", "Divides two exponentials that can both overflow", attending(Parts(sinks=_as_a_quotient))),
    _mutant("N20", "Accepts missing sinks and sinks of the wrong shape", _no_sink_checks),
    _mutant("N21", "Clamps the sinks to ±100", _with_sinks(lambda sinks, geometry, batch: sinks.clamp(-100, 100))),
)
KILLER = {
    **dict.fromkeys(
        ("N01", "N02", "N04", "N05", "N06", "N07", "N08", "N10", "N11", "N14", "N15", "N16", "N17", "N18"),
        "sinks.take_their_share",
    ),
    "N03": "sinks.count_once_over_many_keys",
    **dict.fromkeys(("N09", "N12"), "sinks.are_read_at_every_replay"),
    "N13": "sinks.are_each_layers_own",
    **dict.fromkeys(("N19", "N21"), "sinks.may_lie_far_from_all_logits"),
    "N20": "sinks.that_do_not_fit_are_refused",
}
