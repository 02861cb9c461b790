"""Hypothesis strategies of scenes."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from draftmark import Mode

from .geometries import make_geometry
from .scenes import Request, Scene, Slot, block, chain, tree

TAILS = (1, 2, 3, 5, 8, 31, 32, 33, 40)
"""Values of num_draft_tokens, with sizes around multiples of a 32-bit mask word."""


@st.composite
def scenes(draw: st.DrawFn, /, mode: Mode, tails: tuple[int, ...] = TAILS, **fields: Any) -> Scene:
    """Draw a valid `Scene` of one mode. Trees and pages come from one drawn seed: drawing each number is slower."""
    k = draw(st.sampled_from((1, 2, 3, 4)))
    steps = draw(st.integers(2 if mode is Mode.DRAFT else 1, 4))
    d = draw(st.sampled_from(tails))
    live = draw(st.integers(1, 3))
    geometry = make_geometry(
        page_size=draw(st.sampled_from((1, 3, 4, 16))),
        window_left=draw(st.sampled_from((-1, -1, 0, 1, 2, 5, 11, 30))),
        max_context_len=draw(st.integers(4, 24)),
        overlap=draw(st.booleans()),
        topk=k,
        num_steps=steps,
        num_draft_tokens=d,
        max_num_reqs=live,
        capture_batch_sizes=(live + draw(st.integers(0, 2)),),
        block_size=d if mode is Mode.DRAFT_BLOCK else 1,
        row_budgets=(draw(st.integers(1, live * d + 3)),),
        modes=tuple(Mode),
        **fields,
    )
    step = draw(st.integers(0, steps - 2)) if mode is Mode.DRAFT else 0
    rng = random.Random(seed := draw(st.integers(0, 2**20)))
    wall = geometry.limits.max_context_len
    longest = wall - 1 if mode is Mode.EXTEND else wall + (d if geometry.limits.overlap else 0)
    prefixes = [draw(st.integers(0, longest)) for _ in range(live)]
    treed = (Mode.VERIFY, Mode.DRAFT, Mode.RAGGED_VERIFY)
    causal = mode not in treed or ((mode is not Mode.DRAFT or k == 1) and draw(st.booleans()))
    shape = draw(st.sampled_from(("tree", "tree", "arbitrary")))
    requests, room, budget = [], geometry.limits.max_extend_tokens, geometry.limits.row_budgets[0]
    for i, prefix in enumerate(prefixes):
        if mode is Mode.EXTEND:
            n = draw(st.integers(1, min(wall - prefix, room - (live - 1 - i))))
            room -= n
            requests.append(Request(prefix, chain(n), n))
        elif mode is Mode.DRAFT:
            tail = chain(step + 1) if causal else _beams(rng, k, step)
            requests.append(Request(prefix, tail, k))
        elif mode is Mode.DRAFT_BLOCK:
            requests.append(Request(prefix, block(d), d))
        elif mode is Mode.RAGGED_VERIFY:
            n = draw(st.integers(0, min(d, budget)))
            budget -= n
            requests.append(Request(prefix, chain(n) if causal or not n else _drafted(rng, n, shape), n))
        else:
            n = 1 if mode is Mode.DECODE else d
            tail = chain(n) if causal else _drafted(rng, n, shape)
            requests.append(Request(prefix, tail, n))
    host = draw(st.sampled_from(("exact", "upper_bound", "unknown")))
    return Scene(geometry, mode, tuple(requests), step, geometry.max_reqs, causal, host, seed)


def _beams(rng: random.Random, k: int, step: int) -> tuple[Slot, ...]:
    """Return k tail slots per draft step, each with a random parent in the step before, like a beam search."""
    parents: list[int | None] = [None] * k
    for level in range(1, step + 1):
        parents += [rng.randrange((level - 1) * k, level * k) for _ in range(k)]
    return tree(parents)


def _drafted(rng: random.Random, n: int, shape: str) -> tuple[Slot, ...]:
    """Return n random tail slots: arbitrary mask bits and depths if `shape` is "arbitrary", otherwise a tree.

    The last slots of a tree may be unused; their parent is the root.
    """
    if shape == "arbitrary":
        bits = [frozenset({s} | {t for t in range(n) if rng.random() < 0.5}) for s in range(n)]
        return tuple(Slot(rng.randrange(n), seen) for seen in bits)
    used = rng.randint(1, n)
    return tree([None] + [rng.randrange(s) if s < used else 0 for s in range(1, n)])
