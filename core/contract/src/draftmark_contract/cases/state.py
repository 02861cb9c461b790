"""Layers with recurrent state: shapes, rounds and accepted paths for the checks of state. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from draftmark.geometry import STATE_MODES, DraftShape, Gate, Limits, Mode, Recurrence, StateGeometry, StateShape

from ..oracle.history import NO_PARENT, Request
from .forwards import ForwardCase, device_rows, ragged, uniform

SINCE = (1, 5)
LIMITS = Limits(
    max_num_reqs=6, max_context_len=400, max_extend_tokens=96, capture_batch_sizes=(1, 4, 8), row_budgets=(12, 40)
)
CHAIN = DraftShape(topk=1, num_steps=4, num_draft_tokens=5)
TREE = DraftShape(topk=3, num_steps=4, num_draft_tokens=7)
EXACT: dict[str, Any] = {"dtype": "float32", "conv_dtype": "float32"}
"""Dtypes with which an output shows every error above 1e-5."""
NO_CONVOLUTION: dict[str, Any] = {"conv_channels": 0, "conv_kernel": 0}


def recurrent(
    recurrence: Recurrence, gate: Gate, heads: tuple[int, int], value_dim: int, key_dim: int, **more: Any
) -> StateShape:
    """Return a layer with `heads` = (heads, key heads), and a convolution of 4 over q, k and v."""
    channels = 2 * heads[1] * key_dim + heads[0] * value_dim
    given: dict[str, Any] = {"conv_channels": channels, "conv_kernel": 4, "dtype": "bfloat16", **more}
    return StateShape(recurrence, gate, *heads, key_dim, value_dim, **given)


def convolution(channels: int, kernel: int = 3, **more: Any) -> StateShape:
    """Return a layer with a short convolution only, without SiLU."""
    given: dict[str, Any] = {"dtype": "bfloat16", "conv_silu": False, **more}
    return StateShape(Recurrence.NONE, Gate.HEAD, 0, 0, 0, 0, channels, kernel, **given)


LAYERS = {
    "gdn": recurrent(Recurrence.DELTA, Gate.HEAD, (4, 2), 32, 16, **EXACT),
    "kda": recurrent(Recurrence.DELTA, Gate.KEY, (3, 3), 16, 32),
    "mamba2": recurrent(Recurrence.DECAY, Gate.HEAD, (4, 1), 16, 32, **EXACT),
    "mamba1": recurrent(Recurrence.DECAY, Gate.KEY, (3, 1), 1, 16, dtype="float16", conv_dtype="float16"),
    "lightning": recurrent(Recurrence.DECAY, Gate.CONSTANT, (3, 3), 32, 16, **EXACT, **NO_CONVOLUTION),
    "conv": convolution(40),
}
"""Layers that most checks run: two of each recurrence with other gates, and one convolution."""
ROUNDED = {
    "gdn-rounded": recurrent(Recurrence.DELTA, Gate.HEAD, (4, 2), 32, 64, round_prompts=True),
    "kda-rounded": recurrent(Recurrence.DELTA, Gate.KEY, (3, 3), 16, 32, round_prompts=True),
    "mamba2-rounded": recurrent(Recurrence.DECAY, Gate.HEAD, (8, 2), 16, 32, round_prompts=True),
    "lightning-rounded": recurrent(
        Recurrence.DECAY, Gate.CONSTANT, (3, 3), 32, 16, dtype="float16", round_prompts=True, **NO_CONVOLUTION
    ),
}
"""Layers that let prompts round operands to 16 bits; other modes may not."""
FEW = ("gdn", "mamba2", "conv")
"""One layer of each recurrence."""
LAYER_COUNT = 2
"""Layers of each shape, so that a layer's rows can be taken for another's."""


def geometry_of(
    layer: str | StateShape,
    draft: DraftShape = CHAIN,
    limits: Limits = LIMITS,
    modes: tuple[Mode, ...] = STATE_MODES,
    layers: int = LAYER_COUNT,
) -> StateGeometry:
    """Return a geometry of a layer of `LAYERS` or `ROUNDED`, or of another one."""
    shape = {**LAYERS, **ROUNDED}[layer] if isinstance(layer, str) else layer
    limits = limits if Mode.RAGGED_VERIFY in modes else replace(limits, row_budgets=())
    return StateGeometry.create(shape, limits, draft, modes=modes, num_layers=layers)


# -- accepted paths -------------------------------------------------------------------------------------------

Choice = Callable[[int, Request], int]
"""Chooses the last accepted row of a request: takes its number and the request; `NO_PARENT` accepts nothing."""


def accept(forward: ForwardCase, choice: Choice) -> ForwardCase:
    """Return a verify with an accepted path for each live request, from row 0 to the chosen row."""

    def leaf(n: int, one: Request) -> int:
        chosen = choice(n, one) if one.live and one.rows else NO_PARENT
        return chosen if chosen == NO_PARENT or one.lineage(chosen)[-1] == 0 else 0

    if forward.mode not in (Mode.VERIFY, Mode.RAGGED_VERIFY):
        return forward
    return replace(forward, requests=tuple(replace(one, leaf=leaf(n, one)) for n, one in enumerate(forward.requests)))


def any_leaf(seed: int) -> Choice:
    """Return a choice of any row, or of none, drawn from a seed."""
    dice = random.Random(f"leaves {seed}")
    return lambda n, one: dice.randrange(-1, one.rows)


def lent(forward: ForwardCase, lends: Callable[[int], bool] = lambda n: True) -> ForwardCase:
    """Return the forward with a checkpoint slot for each live request for which `lends` holds."""
    first = forward.num_pages
    requests = tuple(
        replace(one, save=first + n if one.live and lends(n) else 0) for n, one in enumerate(forward.requests)
    )
    return replace(forward, requests=requests, num_pages=first + len(requests))


# -- forwards -------------------------------------------------------------------------------------------------


def verify(
    geometry: StateGeometry,
    prefixes: Sequence[int],
    *,
    tree: str = "random",
    padded: int | None = None,
    seed: int = 0,
    choice: Choice | None = None,
    name: str = "verify",
) -> ForwardCase:
    """Return a VERIFY of D rows for each request."""
    count = len(prefixes) if padded is None else padded
    made = uniform(name, geometry, Mode.VERIFY, prefixes, count, tree=tree, seed=seed)
    return accept(made, choice or any_leaf(seed))


def verify_rows(
    geometry: StateGeometry,
    prefixes: Sequence[int],
    rows: Sequence[int],
    *,
    tree: str = "random",
    budget: int | None = None,
    padded: int | None = None,
    seed: int = 0,
    choice: Choice | None = None,
    name: str = "ragged",
) -> ForwardCase:
    """Return a RAGGED_VERIFY of `rows` rows. With an odd seed the host knows them; else its bound is D each."""
    most = geometry.limits.row_budgets[-1] if budget is None else budget
    made = device_rows(name, geometry, prefixes, rows, most, tree=tree, padded=padded, seed=seed)
    bounds = tuple(rows) if seed % 2 and sum(rows) else ()
    return accept(replace(made, bounds=bounds), choice or any_leaf(seed))


def decode(geometry: StateGeometry, prefixes: Sequence[int], padded: int | None = None, seed: int = 0) -> ForwardCase:
    """Return a DECODE."""
    return uniform("decode", geometry, Mode.DECODE, prefixes, padded or len(prefixes), seed=seed)


def extend(
    geometry: StateGeometry, prefixes: Sequence[int], rows: Sequence[int], padded: int = 0, seed: int = 0
) -> ForwardCase:
    """Return an EXTEND."""
    return ragged("extend", geometry, prefixes, rows, padded=padded, seed=seed)


def each_mode(geometry: StateGeometry, prefixes: Sequence[int] = (37, 0, 3), seed: int = 0) -> list[ForwardCase]:
    """Return one padded forward of each mode of a geometry; trees if its drafts have branches."""
    return [of_mode(geometry, mode, prefixes, seed=seed, padded=1) for mode in geometry.modes]


def of_mode(
    geometry: StateGeometry,
    mode: Mode,
    lens: Sequence[int] = (37, 0, 3),
    rows: Sequence[int] = (),
    seed: int = 0,
    first: int = 0,
    padded: int = 0,
) -> ForwardCase:
    """Return a forward of any mode; trees if its drafts have branches.

    Args:
        rows: rows of each request in EXTEND and RAGGED_VERIFY; by default a few for each.
        first: first slot that a request has.
        padded: padded requests.
    """
    tree, most, count = "chain" if geometry.draft.topk == 1 else "random", geometry.draft.num_draft_tokens, len(lens)
    if mode is Mode.EXTEND:
        given = rows if sum(rows) else [2 + 3 * n % 17 for n in range(count)]
        return ragged("extend", geometry, lens, given, padded=padded, seed=seed, first_page=first)
    if mode is Mode.DECODE:
        return uniform("decode", geometry, mode, lens, count + padded, seed=seed, first_page=first)
    if mode is Mode.VERIFY:
        made = uniform("verify", geometry, mode, lens, count + padded, tree=tree, seed=seed, first_page=first)
        return accept(made, any_leaf(seed))
    given, budget = rows or [1 + (n + seed) % most for n in range(count)], geometry.limits.row_budgets[-1]
    made = device_rows("ragged", geometry, lens, given, budget, tree=tree, seed=seed, first_page=first)
    return accept(made, any_leaf(seed))


def forest(rows: int, seed: int) -> tuple[int, ...]:
    """Return the parents of several trees, each with its own root after the committed state."""
    dice = random.Random(f"forest {rows} {seed}")
    return (NO_PARENT, *(dice.randrange(-1, row) for row in range(1, rows)))


def with_parents(forward: ForwardCase, parents: Callable[[int, int], tuple[int, ...]]) -> ForwardCase:
    """Return the forward with other trees. `parents` takes a request's rows and its number."""
    requests = tuple(
        replace(one, parents=parents(one.rows, n)) if one.live else one for n, one in enumerate(forward.requests)
    )
    return replace(forward, requests=requests)
