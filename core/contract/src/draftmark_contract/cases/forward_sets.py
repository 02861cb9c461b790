"""Sets of forwards that cover a geometry: its modes, draft steps, prefix lengths and trees. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from draftmark.geometry import Geometry, Mode

from ..check import Case
from ..oracle.formulas import draft_steps, max_prefix, max_requests, rows_and_tail
from .forwards import ForwardCase, ragged, uniform
from .geometries import Shape, shapes

TREES = ("random", "unused", "chain", "masks")
"""Kinds of trees for the forwards around a page boundary."""


def prefixes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Return named lists of prefix lengths: empty, around a page boundary, and at the context limit ("wall")."""
    size, wall = geometry.attention.page_size, max_prefix(geometry)
    near = sorted({1, max(size - 1, 1), size, size + 1})
    return {
        "empty": (0,),
        "edges": (near[-1], 1, near[0] + 2),
        "wall": (wall, 0, min(size, wall), wall - 1, near[-1], wall // 2 + 1)[: geometry.limits.max_num_reqs],
    }


@cache
def all_forwards(geometry: Geometry, first_page: int = 0) -> tuple[ForwardCase, ...]:
    """Return forwards of every mode and draft step: with and without padding, several trees, ragged prefills."""
    found: list[ForwardCase] = []
    for mode, step in programs(geometry):
        for n, (name, lens) in enumerate(prefixes(geometry).items()):
            padded = {1: 1, 3: 4}.get(len(lens), max_requests(geometry))
            for tree in TREES if mode is Mode.VERIFY and name == "edges" else ("random",):
                label = f"{mode.value}{step or ''}-{name}{'' if tree == 'random' else '-' + tree}"
                forward = uniform(
                    label, geometry, mode, lens, padded, step=step, tree=tree, seed=n, first_page=first_page
                )
                found.append(forward)
        size = geometry.attention.page_size
        label, lens = f"{mode.value}{step or ''}", (size + 1, size)
        both = uniform(label, geometry, mode, lens, 4, step=step, seed=9, first_page=first_page)
        found.append(both.sharing_prefix())
        found.append(uniform(f"{label}-idle", geometry, mode, (), 2, step=step, first_page=first_page))
        found += _full(geometry, mode, step, first_page) + _above(geometry, mode, step, first_page)
    if Mode.EXTEND in geometry.modes:
        found += extends(geometry, first_page)
    return tuple(found)


def representative_forwards(geometry: Geometry, first_page: int = 0) -> list[ForwardCase]:
    """Return padded forwards with prefixes around a page boundary, for every mode, draft step and kind of tree."""
    return [
        one
        for one in all_forwards(geometry, first_page)
        if "edges" in one.name or "ragged" in one.name or "above" in one.name
    ]


def spanning_forwards(geometry: Geometry, first_page: int = 0) -> list[ForwardCase]:
    """Return short and long forwards for every mode and draft step, with every kind of tree, and some prefills."""
    kinds = ("edges", "wall", "above", "extend-ragged", "extend-full")
    return [one for one in all_forwards(geometry, first_page) if any(kind in one.name for kind in kinds)]


def longest_forwards(geometry: Geometry, first_page: int = 0) -> list[ForwardCase]:
    """Return the forwards that use most of a buffer, for every mode and step: at the context limit, on full pages."""
    return [
        one for one in all_forwards(geometry, first_page) if any(kind in one.name for kind in ("wall", "full", "above"))
    ]


def forward_cases(*names: str, few: bool = False) -> list[Case]:
    """Return one case per forward, for the shapes that every check runs and for the shapes in `names`.

    Args:
        few: True to return only the representative forwards of a shape that has `Shape.brief` set.
    """
    return [
        shape.case(forward, forward.name)
        for shape in shapes(*names)
        for forward in (few_forwards(shape) if few else all_forwards(shape.geometry))
    ]


def few_forwards(shape: Shape) -> Sequence[ForwardCase]:
    """Return a shape's forwards for checks that do not vary host lengths; only representative ones if it is brief."""
    return representative_forwards(shape.geometry) if shape.brief else all_forwards(shape.geometry)


def _full(geometry: Geometry, mode: Mode, step: int, first_page: int) -> list[ForwardCase]:
    """Return forwards with tails (new tokens) that end on a page's last token, or start on its first or last token."""
    size, (_, tail) = geometry.attention.page_size, rows_and_tail(geometry, mode, step)
    label, short = f"{mode.value}{step or ''}-full", -tail % size
    lens = (short, short + size, size, size - 1)[: geometry.limits.max_num_reqs]
    return [
        uniform(name, geometry, mode, some, padded, step=step, tree="star", seed=4, first_page=first_page)
        for name, some, padded in ((label, lens, 4), (f"{label}-alone", lens[:1], 1))
    ]


def _above(geometry: Geometry, mode: Mode, step: int, first_page: int) -> list[ForwardCase]:
    """Return a batch larger than every captured graph, which runs eagerly (sglang#28767), or [] without such a size."""
    most = geometry.limits.max_num_reqs
    if most <= max(geometry.limits.capture_batch_sizes, default=0):
        return []
    name, lens = f"{mode.value}{step or ''}-above", [n * 41 % (max_prefix(geometry) + 1) for n in range(1, most + 1)]
    return [uniform(name, geometry, mode, lens, most, step=step, tree="random", seed=6, first_page=first_page)]


def programs(geometry: Geometry) -> list[tuple[Mode, int]]:
    """Return (mode, draft step) of every forward of the geometry in which all requests have equal row counts."""
    uniform_modes = [mode for mode in geometry.modes if mode not in (Mode.EXTEND, Mode.DRAFT)]
    steps = draft_steps(geometry) if Mode.DRAFT in geometry.modes else 0
    return [(mode, 0) for mode in uniform_modes] + [(Mode.DRAFT, step) for step in range(steps)]


def last_steps(geometry: Geometry) -> dict[Mode, int]:
    """Return the last draft step of every mode. EXTEND has no steps."""
    return {**dict(programs(geometry)), Mode.EXTEND: 0}


def extends(geometry: Geometry, first_page: int = 0) -> list[ForwardCase]:
    """Return ragged prefills: without prefix, chunked, one token, the most tokens, at the context limit, padded."""
    size, c, most = geometry.attention.page_size, geometry.limits.max_context_len, geometry.limits.max_extend_tokens
    rest = most - 24
    found = [
        ragged("extend-fresh", geometry, (0,), (min(size + 3, most),), seed=1, first_page=first_page),
        ragged("extend-ragged", geometry, (0, size + 1, 1), (5, 1, 17), padded=1, seed=2, first_page=first_page),
        ragged("extend-hole", geometry, (3, size, 0), (4, 0, 5), padded=1, seed=4, first_page=first_page),
        ragged("extend-full", geometry, (c - rest, 0, 3), (rest, 1, 23), padded=1, seed=3, first_page=first_page),
    ]
    live = geometry.limits.max_num_reqs
    if live > max(geometry.limits.capture_batch_sizes, default=0):
        lens, rows = [n * 29 % (c - 3) for n in range(live)], [1 + n % 3 for n in range(live)]
        found.append(ragged("extend-above", geometry, lens, rows, seed=5, first_page=first_page))
    return found
