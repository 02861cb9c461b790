"""Runs one forward on a whole layer and on each rank's part of it, and compares them side by side."""

from __future__ import annotations

import torch

from draftmark.geometry import Recurrence, StateShape

from ..backend_under_test import BackendUnderTest
from ..cases.state_ranges import Sharded
from .pools import raw
from .state_harness import StateHarness
from .state_tensors import StateTensors

Slices = list[tuple[int, slice]]


def assert_shards(subject: BackendUnderTest, sharded: Sharded) -> None:
    """Check the whole layer against the oracle, and then the ranks' outputs and slots put together."""
    forward, slots = sharded.forward, sharded.forward.num_pages
    whole = StateHarness(subject, sharded.geometry, slots)
    batch = whole.load(forward)
    expected, given = whole.expected(forward), whole.tensors
    ranks = []
    for number in range(sharded.count):
        rank = StateHarness(subject, sharded.ranks, slots)
        mine = rank.load(forward)
        _take(given, rank.tensors, sharded, number)
        rank.prepare(mine)
        rank.layer(forward, mine)
        rank.assert_guards(forward)
        ranks.append(rank.tensors)
    # The whole layer's tensors now receive the ranks' results, as if one backend had computed them.
    _gather(ranks, given, sharded)
    whole.assert_step(forward, batch, expected, f"the output of {sharded.count} ranks")


def _take(whole: StateTensors, rank: StateTensors, sharded: Sharded, number: int) -> None:
    """Copy a rank's part of every input and slot."""
    for theirs, mine in zip(whole.layers, rank.layers, strict=True):
        target = dict(mine.tensors())
        for name, one in theirs.tensors():
            if name not in ("out", "convolved"):
                target[name].copy_(_part(one, name, sharded, number))
    for (name, one), (_, mine_) in zip(whole.stored.items(), rank.stored.items(), strict=True):
        raw(mine_).copy_(raw(_part(one, name, sharded, number)))


def _gather(ranks: list[StateTensors], whole: StateTensors, sharded: Sharded) -> None:
    """Write the outputs and slots of all ranks to the whole layer's tensors."""
    for number, rank in enumerate(ranks):
        for theirs, mine in zip(whole.layers, rank.layers, strict=True):
            target = dict(theirs.tensors())
            for name, one in mine.tensors():
                if name in ("out", "convolved"):
                    _scatter(target[name], one, name, sharded, number)
        for name, one in rank.stored.items():
            _scatter(whole.stored[name], one, name, sharded, number)


def _index(name: str, sharded: Sharded, number: int) -> tuple[int, torch.Tensor]:
    """Return the axis along which a tensor is sharded, and a rank's indices on it."""
    shape, count = sharded.geometry.state, sharded.count

    def own(size: int, first: int = 0) -> torch.Tensor:
        return torch.arange(first + number * (size // count), first + (number + 1) * (size // count))

    if name in ("x", "convolved", "weight", "bias", "conv"):
        parts, first = [], 0
        for size in _parts(shape):
            parts.append(own(size, first))
            first += size
        return {"weight": 0, "bias": 0, "conv": 2}.get(name, 1), torch.cat(parts)
    heads = shape.num_key_heads if name in ("q", "k") else shape.num_heads
    return (2 if name == "state" else 1), own(heads)


def _parts(shape: StateShape) -> tuple[int, ...]:
    """Return the channels of q, k and v, which are sharded apart."""
    if shape.recurrence is Recurrence.NONE:
        return (shape.conv_channels,)
    keys = shape.num_key_heads * shape.key_dim
    return keys, keys, shape.num_heads * shape.value_dim


def _part(one: torch.Tensor, name: str, sharded: Sharded, number: int) -> torch.Tensor:
    axis, index = _index(name, sharded, number)
    return one.index_select(axis, index.to(one.device))


def _scatter(whole: torch.Tensor, part: torch.Tensor, name: str, sharded: Sharded, number: int) -> None:
    axis, index = _index(name, sharded, number)
    raw(whole).index_copy_(axis, index.to(whole.device), raw(part))
