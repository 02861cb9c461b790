"""Attention sinks got wrong: left out, counted twice, in other units, of another head, by value, as a value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.batch import ForwardBatch
from draftmark.cache import KVCache
from draftmark.runtime import is_recording

from .mutant import Mutant, around
from .plain_attention import Parts, attending

Tensor = torch.Tensor
PIECE = 512
"""Keys that a split goes through."""


def _shown(change: Callable[[Tensor, Geometry, ForwardBatch], Tensor]) -> Callable[[Any], None]:
    """A patch: `attend` is shown other sinks."""

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
    return _shown(lambda sinks, geometry, batch: _none(sinks) if when(geometry, batch) else sinks)


def _times(factor: Callable[[Geometry], float]) -> Callable[[Any], None]:
    return _shown(lambda sinks, geometry, batch: sinks * factor(geometry))


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
    """Head h' of KV head n is looked up at h' · KV heads + n."""
    a = geometry.attention
    return sinks.view(a.group_size, a.num_kv_heads).T.reshape(-1)


def _backwards(sinks: Tensor, geometry: Geometry, batch: ForwardBatch) -> Tensor:
    return sinks.view(-1, geometry.attention.group_size).flip(1).reshape(-1)


def _by_value(backend: Any) -> None:
    """A copy of each layer's sinks, made when they are first seen, as a graph keeps what was passed by value."""
    copies: dict[int, Tensor] = {}

    def change(sinks: Tensor, geometry: Geometry, batch: ForwardBatch) -> Tensor:
        if not is_recording() and sinks.data_ptr() not in copies:
            copies[sinks.data_ptr()] = sinks.clone()
        return copies.get(sinks.data_ptr(), sinks) if is_recording() else sinks

    _shown(change)(backend)


def _first_layers(backend: Any) -> None:
    """The sinks of a forward's first layer serve all that share its metadata."""
    first: list[Tensor] = []

    def change(sinks: Tensor, geometry: Geometry, batch: ForwardBatch) -> Tensor:
        if not first:
            first.append(sinks)
        return first[0]

    _shown(change)(backend)
    around(backend, "write_metadata", lambda original, batch: (first.clear(), original(batch))[1])


def _once_a_piece(scores: Tensor, sinks: Tensor) -> Tensor:
    """Each piece of a row's keys counts the sink, as where a split kernel adds it before the merge."""
    pieces = -(-(scores > float("-inf")).sum(-1, keepdim=True) // PIECE)
    top, sink = scores.amax(-1, keepdim=True), sinks[:, None, None]
    mass = (scores - top).exp()
    return mass / (mass.sum(-1, keepdim=True) + pieces * (sink - top).exp())


def _not_beside_the_largest(scores: Tensor, sinks: Tensor) -> Tensor:
    """exp(sink), where the keys' sum is of exp(logit - largest)."""
    mass = (scores - scores.amax(-1, keepdim=True)).exp()
    return mass / (mass.sum(-1, keepdim=True) + sinks[:, None, None].exp())


def _as_a_quotient(scores: Tensor, sinks: Tensor) -> Tensor:
    """exp(sink) / exp(largest), which is no number where both are large."""
    top = scores.amax(-1, keepdim=True)
    mass = (scores - top).exp()
    return mass / (mass.sum(-1, keepdim=True) + sinks[:, None, None].exp() / top.exp())


def _of_value_one(weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    rest = (1 - weights.sum(-1)).transpose(1, 2)
    return torch.einsum("rhqk,rkhd->rqhd", weights, v) + rest[..., None]


def _unasked(backend: Any) -> None:
    """Sinks that are missing count nothing, and those of a layer without are passed over."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        a = backend.geometry.attention
        fits = cache.sinks is not None and cache.sinks.shape[0] == a.num_qo_heads
        other = torch.full((a.num_qo_heads,), float("-inf"), device=cache.k.device)
        original(q, replace(cache, sinks=(cache.sinks if fits else other) if a.sinks else None), batch, out)

    around(backend, "attend", call)


def _mutant(name: str, what: str, patch: Callable[[Any], None]) -> Mutant:
    return Mutant(name, f"sinks: {what}", "gpt-oss", patch=patch)


MUTANTS = (
    _mutant("N01", "left out", _left_out(lambda geometry, batch: True)),
    _mutant("N02", "counted twice", _shown(lambda sinks, geometry, batch: sinks + math.log(2))),
    _mutant("N03", f"counted once per piece of {PIECE} keys", attending(Parts(sinks=_once_a_piece))),
    _mutant("N04", "multiplied by the softmax scale", _times(_scale)),
    _mutant("N05", "soft-capped as a key's logit is", _shown(_capped)),
    _mutant("N06", "of the KV head, not of the query head", _shown(_by_kv_head)),
    _mutant("N07", "looked up with heads and groups exchanged", _shown(_transposed)),
    _mutant("N08", "in reverse order within a group", _shown(_backwards)),
    _mutant("N09", "a graph keeps a copy from before its capture", _by_value),
    _mutant("N10", "taken for base 2", _times(lambda geometry: math.log(2))),
    _mutant("N11", "brought to base 2 twice", _times(lambda geometry: 1 / math.log(2))),
    _mutant("N12", "in eager forwards alone", _left_out(lambda geometry, batch: is_recording())),
    _mutant("N13", "of the first layer for all layers of its shape", _first_layers),
    _mutant("N14", "with a value of one", attending(Parts(values=_of_value_one))),
    _mutant("N15", "left out under a window", _left_out(lambda geometry, batch: geometry.attention.window_left >= 0)),
    _mutant("N16", "left out in EXTEND", _left_out(lambda geometry, batch: batch.mode is Mode.EXTEND)),
    _mutant("N17", "left out in VERIFY", _left_out(lambda geometry, batch: batch.mode is Mode.VERIFY)),
    _mutant("N18", "not taken relative to the largest logit", attending(Parts(sinks=_not_beside_the_largest))),
    _mutant("N19", "a quotient of two exponentials", attending(Parts(sinks=_as_a_quotient))),
    _mutant("N20", "missing or foreign ones are passed over", _unasked),
    _mutant("N21", "held to ±100", _shown(lambda sinks, geometry, batch: sinks.clamp(-100, 100))),
)

KILLER = {
    **{f"N{number:02}": "sinks.take_their_share" for number in (1, 2, 4, 5, 6, 7, 8, 10, 11, 14, 15, 16, 17, 18)},
    "N03": "sinks.count_once_over_many_keys",
    **dict.fromkeys(("N09", "N12"), "sinks.are_read_at_every_replay"),
    "N13": "sinks.are_each_layers_own",
    **dict.fromkeys(("N19", "N21"), "sinks.may_lie_far_from_all_logits"),
    "N20": "sinks.that_do_not_fit_are_refused",
}
"""The check of each mutant's class."""
