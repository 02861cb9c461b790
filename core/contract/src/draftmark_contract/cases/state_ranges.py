"""Forwards over recurrent state at production sizes, of drawn shapes, dtypes, strides and shards. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftmark.geometry import (
    STATE_MODES,
    Gate,
    Limits,
    Recurrence,
    StateGeometry,
    StateShape,
)

from ..check import Case
from . import state
from .forwards import ForwardCase
from .space import covering, log_uniform
from .state import CHAIN, FEW, LAYERS, LIMITS, SINCE, TREE, geometry_of
from .state_sets import case_of, draft_of

PRODUCTION: dict[str, StateShape] = {
    "qwen3-next-tp8": state.recurrent(Recurrence.DELTA, Gate.HEAD, (4, 2), 128, 128),
    "kimi-linear-tp8": state.recurrent(Recurrence.DELTA, Gate.KEY, (4, 4), 128, 128),
    "nemotron-h-tp8": state.recurrent(Recurrence.DECAY, Gate.HEAD, (16, 1), 64, 128),
    "granite-tp8": state.recurrent(Recurrence.DECAY, Gate.KEY, (6, 6), 64, 128),
    "lightning-tp16": state.recurrent(Recurrence.DECAY, Gate.CONSTANT, (4, 4), 128, 128, **state.NO_CONVOLUTION),
    "lfm2": state.convolution(2048),
}
"""Layers of models, per rank of the named number of ranks."""
ALL_MODES = ("qwen3-next-tp8", "nemotron-h-tp8", "lfm2")
"""Layers that run large batches of every mode; the others run one."""
WITH_TREES = ("qwen3-next-tp8", "lfm2")
"""Layers that also run large batches of trees, and of verifies with lent slots."""
CROWD = 24
"""Requests of a large batch."""


def crowds() -> list[Case]:
    """Return batches of 24 requests in every mode, the longest with more than 2,048 tokens, for layers of models."""
    found = []
    limits = Limits(CROWD, 4096, 64, (CROWD + 8,), row_budgets=(80,))
    every = {"chain": (draft_of(3, False), limits), "tree": (draft_of(4, True), limits)}
    every["saves"] = (draft_of(3, False), replace(limits, state_interval=64))
    for name, shape in PRODUCTION.items():
        for label, (draft, limit) in every.items():
            if label != "chain" and name not in WITH_TREES:
                continue
            geometry = geometry_of(shape, draft, limit, layers=1)
            for forward in _crowd(geometry, label)[: 4 if name in ALL_MODES else 1]:
                found.append(case_of(name, [forward], geometry, f"{label}-{forward.mode.value}"))
    return found


def _crowd(geometry: StateGeometry, label: str) -> list[ForwardCase]:
    lens = [(n * n * 7) % 4000 for n in range(CROWD)]
    tree = "chain" if geometry.draft.topk == 1 else "random"
    rows = [n % (geometry.draft.num_draft_tokens + 1) for n in range(CROWD)]
    verifies = [
        state.verify(geometry, lens, tree=tree, padded=CROWD + 8, seed=1),
        state.verify_rows(geometry, lens, rows, tree=tree, seed=2),
    ]
    if label == "saves":
        return [state.lent(one, lambda n: n % 3 > 0) for one in verifies]
    plain = [state.extend(geometry, lens, [1 + n % 3 for n in range(CROWD)]), state.decode(geometry, lens)]
    return [*verifies, *(plain if label == "chain" else [])]


def far() -> list[Case]:
    """Return forwards on slots after which element offsets of states and of windows do not fit 32 bits."""
    found = []
    more = {"conv_channels": 5632, "conv_kernel": 4}
    shapes = {
        "delta": state.recurrent(Recurrence.DELTA, Gate.HEAD, (4, 2), 64, 64, **more),
        "decay": state.recurrent(Recurrence.DECAY, Gate.HEAD, (4, 2), 64, 64, **more),
        "conv": state.convolution(8192),
    }
    limits = replace(LIMITS, state_interval=4)
    for name, shape in shapes.items():
        geometry = geometry_of(shape, CHAIN, limits, layers=1)
        numel = min(n for n in (geometry.state_numel, geometry.conv_numel) if n)
        for mode in STATE_MODES:
            made = state.of_mode(geometry, mode, first=2**31 // numel + 3)
            found.append(case_of(name, state.lent(made), geometry, mode.value))
    return found


def strided() -> list[Case]:
    """Return forwards of every mode: chains for each layer, and trees for one layer of each recurrence."""
    found = []
    for name in LAYERS:
        for draft in (CHAIN, TREE)[: 1 + (name in FEW)]:
            geometry = geometry_of(name, draft)
            label = "chain" if draft is CHAIN else "tree"
            found.append(case_of(name, state.each_mode(geometry), geometry, label))
    return found


@dataclass(frozen=True)
class Optional:
    """Forwards of a layer with dtypes or sizes that a backend may refuse. Its reason then has one of the words."""

    geometry: StateGeometry
    forwards: tuple[ForwardCase, ...]
    words: tuple[str, ...]


STORED = (
    *(("bfloat16", "bfloat16", "bfloat16"), ("float16", "float16", "float16"), ("bfloat16", "float16", "bfloat16")),
    *(("bfloat16", "float32", "float32"), ("float16", "bfloat16", "float16"), ("float32", "bfloat16", "float32")),
    *(("float32", "float16", "bfloat16"), ("float16", "float32", "float32"), ("float32", "float32", "float16")),
    ("float64", "float64", "float64"),
)
"""Dtypes of activations, states and windows that a backend may refuse."""


def dtypes() -> list[Case]:
    """Return forwards with every combination of dtypes that engines store."""
    found = []
    for name in LAYERS:
        for dtype, stored, window in STORED:
            if name not in FEW and (dtype, stored, window) not in STORED[:2]:
                continue
            shape = replace(LAYERS[name], dtype=dtype, state_dtype=stored, conv_dtype=window)
            if shape.recurrence is Recurrence.NONE:
                shape = replace(shape, state_dtype="float32")
            geometry = geometry_of(shape, TREE)
            long = state.extend(geometry, (0, 9), (40, 17), seed=7)
            words = tuple(dict.fromkeys((dtype, stored, window)))
            value = Optional(geometry, (*state.each_mode(geometry, seed=3), long), words)
            found.append(case_of(name, value, geometry, f"{dtype}-{stored}-{window}"))
    return found


AXES: dict[str, Sequence[Any]] = {
    "rule": (
        (Recurrence.DELTA, Gate.HEAD),
        (Recurrence.DELTA, Gate.KEY),
        (Recurrence.DECAY, Gate.HEAD),
        (Recurrence.DECAY, Gate.KEY),
        (Recurrence.DECAY, Gate.CONSTANT),
        (Recurrence.NONE, Gate.HEAD),
    ),
    "mode": STATE_MODES,
    "key_heads": ((1, 1), (2, 7)),
    "group": ((1, 1), (2, 6)),
    "key_dim": ((1, 15), (16, 40), (41, 100)),
    "value_dim": ((1, 15), (16, 40), (41, 100)),
    "kernel": (0, 2, 3, 4, 5),
    "channels": ((1, 16), (17, 300)),
    "rows": ((1, 1), (2, 8), (9, 40)),
    "requests": ((1, 1), (2, 9), (10, 30)),
    "layers": (1, 2, 5),
    "dtype": ("bfloat16", "float16", "float32"),
}
"""Ranges of sizes. Each two of them meet in some case."""
WORK = 2**18
"""Most elements of the states of all rows."""


def drawn() -> list[Case]:
    """Return forwards of drawn sizes."""
    points = covering(AXES, random.Random("sizes of state"))
    return [*(_drawn(point, number) for number, point in enumerate(points)), _many_heads()]


def _many_heads() -> Case:
    """Return a verify of 40 heads of one value, as Mamba1's channels are; an interpreter is too slow for more cases."""
    shape = state.recurrent(Recurrence.DECAY, Gate.KEY, (40, 1), 1, 16, dtype="float16", conv_dtype="float16")
    geometry = geometry_of(shape, draft_of(3, tree=True))
    forward = state.verify(geometry, (5, 0), tree="random", padded=4, seed=1)
    return Case("decay-key-verify-heads40", Optional(geometry, (forward,), _sizes(shape)), SINCE)


def _sizes(shape: StateShape) -> tuple[str, ...]:
    every = shape.num_heads, shape.key_dim, shape.value_dim, shape.conv_kernel, shape.conv_channels
    return tuple(map(str, every))


def _drawn(values: dict[str, Any], number: int) -> Case:
    rule, mode, dtype = values["rule"], values["mode"], values["dtype"]
    dice = random.Random(f"state {number}")
    one = {name: log_uniform(dice, *values[name]) for name in ("key_heads", "group", "key_dim", "value_dim", "rows")}
    requests, channels = (log_uniform(dice, *values[name]) for name in ("requests", "channels"))
    rows = one["rows"]
    if rule[0] is Recurrence.NONE:
        kernel = values["kernel"] or 3
        shape = state.convolution(channels, kernel, dtype=dtype, conv_dtype=dtype, conv_silu=bool(number % 2))
    else:
        size = rows * requests * one["key_dim"] * one["value_dim"]
        key_heads = max(1, min(one["key_heads"], WORK // size))
        heads = key_heads * max(1, min(one["group"], WORK // (size * key_heads)))
        convolves = {"conv_channels": channels if values["kernel"] else 0, "conv_kernel": values["kernel"]}
        given = {"dtype": dtype, "conv_dtype": dtype, **convolves}
        shape = state.recurrent(rule[0], rule[1], (heads, key_heads), one["value_dim"], one["key_dim"], **given)
    limits = Limits(requests, 200, max(rows * requests, 8), (requests + number % 3,), row_budgets=(rows * requests,))
    draft = draft_of(rows, tree=number % 2 == 1)
    geometry = geometry_of(shape, draft, limits, layers=values["layers"])
    lens = [dice.choice((0, 1, 2, 5, 77)) for _ in range(requests)]
    forward = state.of_mode(geometry, mode, lens=lens, rows=[dice.randrange(rows + 1) for _ in lens], seed=number)
    name = f"{rule[0].value}-{rule[1].value}-{mode.value}-{number}".replace("_", "-")
    return Case(name, Optional(geometry, (forward,), _sizes(shape)), SINCE)


@dataclass(frozen=True)
class Sharded:
    """A forward of a whole layer, and the geometry of each rank.

    Attributes:
        geometry: geometry of the whole layer.
        forward: its forward.
        ranks: geometry of one rank.
        count: number of ranks.
    """

    geometry: StateGeometry
    forward: ForwardCase
    ranks: StateGeometry
    count: int


def shards() -> list[Case]:
    """Return forwards of whole layers, for 2 and 4 ranks."""
    found = []
    more: dict[str, Any] = {**state.EXACT}
    shapes = {
        "gdn": state.recurrent(Recurrence.DELTA, Gate.HEAD, (8, 4), 16, 32, **more),
        "kda": state.recurrent(Recurrence.DELTA, Gate.KEY, (4, 4), 32, 16, **more),
        "mamba2": state.recurrent(Recurrence.DECAY, Gate.HEAD, (16, 4), 16, 32, **more),
        "conv": state.convolution(48, **more),
    }
    for name, shape in shapes.items():
        for count in (2, 4):
            geometry = geometry_of(shape, TREE)
            none = shape.recurrence is Recurrence.NONE
            names = ("conv_channels", *(() if none else ("num_heads", "num_key_heads")))
            rank = geometry_of(replace(shape, **{one: getattr(shape, one) // count for one in names}), TREE)
            for forward in state.each_mode(geometry):
                value = Sharded(geometry, forward, rank, count)
                found.append(case_of(name, value, geometry, f"ranks{count}-{forward.mode.value}"))
    return found
