"""One case of the attention benchmark: every backend answers, and those whose answers are right are timed, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from draftmark_contract.cli.measuring import Replayed, relative_error

from .cases import Case, Inputs, build, clear_unused, cleared, reference
from .ours import OURS, ours
from .peers import Peer, backends
from .stubs import Absent

TOLERANCE = 1e-2
ROUNDED_TOLERANCE = 5e-2
"""Of weights that are rounded to e4m3: three bits of mantissa are wrong by 2.6 % of what they say, on average."""
TURNS = 24
TURN_SECONDS = 0.008
"""Of a turn: far less than what a GPU averages its power over, so that whoever takes turns runs at the same clocks."""
Question = tuple[str, bool]
"""A tail (`Peer.tail`), and whether rows are rounded to e4m3."""
WARM_TURNS = 5
"""Turns of each that are not counted."""


def turn_of(calls: list) -> Callable[[], float]:
    """What takes a turn of a peer's calls: replays of their graph back to back. Microseconds of one call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = Replayed(calls)
    graph.microseconds()
    replays = max(1, round(TURN_SECONDS * 1e6 / (graph.microseconds() * len(calls))))
    return lambda: round(graph.microseconds(replays), 4)


def measure(case: Case, names: set[str] | None, turns: int = TURNS) -> list[dict]:
    """One row per backend of one case: each answers, then those whose answers are right are timed, in turns."""
    return _timed(_answered(case, names), turns)


def measure_pages(case: Case, pages: Iterable[int], names: set[str] | None, turns: int) -> list[dict]:
    """The same of one case with pages of several sizes, which take turns with each other too.

    Of two cases that are measured one after the other a GPU that its power limits runs one at other clocks.
    """
    return _timed([one for page in pages for one in _answered(case.paged(page), names)], turns)


def _answered(case: Case, names: set[str] | None) -> list[tuple[Case, dict, Peer | None]]:
    """A row of each backend, and what is to be timed of it: nothing where it is absent or wrong."""
    inputs = build(case)
    plugins = {name: partial(ours, plugin) for name, plugin in OURS.items()}
    asked: dict[str, Callable[[Inputs], Peer]] = {**plugins, **backends(case)}
    expected: dict[Question, torch.Tensor] = {}
    found: list[tuple[Case, dict, Peer | None]] = []
    for name, make in asked.items():
        if names and name not in names:
            continue
        if name not in OURS:
            clear_unused(inputs)  # peers may read what no token occupies; ours must not mind it
        row, right = _row(case, name), None
        with _told(row):
            peer = make(inputs)
            right = peer if _is_right(row, peer, inputs, expected) else None
        found.append((case, row, right))
    return found


def _timed(found: list[tuple[Case, dict, Peer | None]], turns: int) -> list[dict]:
    """The rows, with their times.

    A GPU that its power limits runs at clocks that what ran before has left it, for a second or so. In turns that are
    short beside that all run at the same ones, as in a model's step, where attention alone does not decide them; every
    other turn goes backwards.
    """
    takers: list[tuple[dict, Callable[[], float]]] = []
    for _, row, peer in found:
        if peer is not None:
            with _told(row):
                takers.append((row, turn_of(peer.calls)))
    for turn in range(WARM_TURNS + turns):
        for row, take in takers if turn % 2 == 0 else takers[::-1]:
            us = take()
            if turn >= WARM_TURNS:
                row["turns"].append(us)
    for case, row, _ in found:
        if row["turns"]:
            row["us"] = median(row["turns"])
            row["tb_per_s"] = case.kv_bytes / row["us"] / 1e6
        print(_line(row), flush=True)
    return [row for _, row, _ in found]


def _is_right(row: dict, peer: Peer, inputs: Inputs, expected: dict[Question, torch.Tensor]) -> bool:
    """Whether a peer answers its question; `expected` keeps the answers of this case.

    Who may round rows and weights to e4m3, and is not exact, is asked for the answer to rounded rows.
    """
    peer.calls[0]()
    torch.cuda.synchronize()

    def error(rounded: bool) -> float:
        asked = peer.tail, rounded
        if asked not in expected:
            clean = tuple(cleared(cache) for cache in inputs.caches[0])
            told = replace(inputs, q=inputs.q.to(clean[0].dtype).to(inputs.q.dtype)) if rounded else inputs
            expected[asked] = reference(told, clean, peer.tail)
        return relative_error(peer.outs[0], expected[asked])

    worst, rounded = error(False), False
    if peer.rounds and not worst < TOLERANCE:
        worst, rounded = error(True), True
    right = worst < (ROUNDED_TOLERANCE if rounded else TOLERANCE)
    row |= {"max_err": worst, "checked": right, "tail": peer.tail, "rounded": rounded}
    row["note"] = peer.note if right else "wrong answer, not timed"
    return right


@contextmanager
def _told(row: dict) -> Iterator[None]:
    """A peer that is absent, or fails, is a row that says why; ours must not fail."""
    try:
        yield
    except Absent as absent:
        row["note"] = str(absent)
    except Exception as failure:
        if row["backend"] in OURS:
            raise
        row["note"] = f"failed: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


def _row(case: Case, name: str) -> dict:
    """What is not known yet of a backend in a case."""
    return {
        "case": case.name, "shape": case.model.shape, "page_size": case.model.page, "kv_dtype": case.model.kv_dtype,
        "backend": name, "us": None, "turns": [], "tb_per_s": None, "max_err": None, "checked": False, "tail": "",
        "rounded": False, "note": "",
    }  # fmt: skip


def _line(row: dict) -> str:
    if row["us"] is None:
        return f"{row['case']:36} {row['backend']:20} absent: {row['note']}"
    return (
        f"{row['case']:36} {row['backend']:20} {row['us']:8.1f} us {row['tb_per_s']:5.2f} TB/s "
        f"error {row['max_err']:.1e}  tail {row['tail']}{', rounded to e4m3' * row['rounded']}"
    )
