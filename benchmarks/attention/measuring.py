"""Measures one case: every backend computes it; then backends with a correct output are timed alternately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from draftmark_contract.cli.measuring import Replayed, relative_error

from . import engines, fa3, peers
from .cases import Case, Inputs, build, clear_unused, cleared, reference
from .ours import OURS, exact, ours
from .peers import Peer
from .stubs import Absent

TOLERANCE = 1e-2
ROUNDED_TOLERANCE = 5e-2
"""Largest error of weights rounded to e4m3: with three mantissa bits each is wrong by 2.6 % on average."""
TURNS = 24
TURN_SECONDS = 0.008
"""Seconds of a turn: far less than the time over which a GPU averages its power, so all backends have equal clocks."""
Problem = tuple[str, bool]
"""A tail (`Peer.tail`), and True if rows are rounded to e4m3."""
WARM_TURNS = 5
"""Turns of each backend that are not counted."""


def turn_of(calls: list) -> Callable[[], float]:
    """Capture a peer's calls in a graph. Return a function that replays it for one turn and returns µs per call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = Replayed(calls)
    graph.microseconds()
    replays = max(1, round(TURN_SECONDS * 1e6 / (graph.microseconds() * len(calls))))
    return lambda: round(graph.microseconds(replays), 4)


def measure(case: Case, names: set[str] | None, turns: int = TURNS) -> list[dict]:
    """Return one row per backend of one case, with times of the backends that compute it correctly."""
    return _timed(_answered(case, names), turns)


def measure_pages(case: Case, pages: Iterable[int], names: set[str] | None, turns: int) -> list[dict]:
    """Return the rows of one case with several page sizes. The sizes are timed alternately.

    A power-limited GPU would run two cases at different clocks if one were measured after the other.
    """
    return _timed([one for page in pages for one in _answered(case.paged(page), names)], turns)


def _answered(case: Case, names: set[str] | None) -> list[tuple[Case, dict, Peer | None]]:
    """Return each backend's case, row and calls to time. The calls are None if the backend is absent or wrong."""
    inputs = build(case)
    plugins = {name: partial(ours, plugin) for name, plugin in OURS.items()}
    if case.model.rounded:
        plugins["cuda_triton-exact"] = partial(exact, OURS["cuda_triton"])
    makers: dict[str, Callable[[Inputs], Peer]] = {**plugins, **backends(case)}
    expected: dict[Problem, torch.Tensor] = {}
    found: list[tuple[Case, dict, Peer | None]] = []
    for name, make in makers.items():
        if names and name not in names:
            continue
        if name not in plugins:
            clear_unused(inputs)  # other libraries may read unused slots; draftmark's plugins must ignore them
        row, right = _row(case, name), None
        with _noting_failures(row):
            peer = make(inputs)
            right = peer if _is_right(row, peer, inputs, expected) else None
        found.append((case, row, right))
    return found


def _timed(found: list[tuple[Case, dict, Peer | None]], turns: int) -> list[dict]:
    """Return the rows with their times.

    For about a second, a power-limited GPU runs at clocks that depend on the previous work. Turns shorter than that
    give all backends equal clocks, as in a model's step. Every other turn runs the backends in reverse order.
    """
    timed: list[tuple[dict, Callable[[], float]]] = []
    for _, row, peer in found:
        if peer is not None:
            with _noting_failures(row):
                timed.append((row, turn_of(peer.calls)))
    for turn in range(WARM_TURNS + turns):
        for row, take in timed if turn % 2 == 0 else timed[::-1]:
            us = take()
            if turn >= WARM_TURNS:
                row["turns"].append(us)
    for case, row, _ in found:
        if row["turns"]:
            row["us"] = median(row["turns"])
            row["tb_per_s"] = case.kv_bytes / row["us"] / 1e6
        print(_line(row), flush=True)
    return [row for _, row, _ in found]


def _is_right(row: dict, peer: Peer, inputs: Inputs, expected: dict[Problem, torch.Tensor]) -> bool:
    """Return True if a peer's output is correct; `expected` keeps the reference outputs of this case.

    A peer that is allowed to round queries to e4m3 is also compared with the reference for rounded queries.
    """
    peer.calls[0]()
    torch.cuda.synchronize()

    def error(rounded: bool) -> float:
        problem = peer.tail, rounded
        if problem not in expected:
            clean = tuple(cleared(cache) for cache in inputs.caches[0])
            used = replace(inputs, q=inputs.q.to(clean[0].dtype).to(inputs.q.dtype)) if rounded else inputs
            expected[problem] = reference(used, clean, peer.tail)
        return relative_error(peer.outs[0], expected[problem])

    worst, rounded = error(False), False
    if peer.rounds and not worst < TOLERANCE:
        worst, rounded = error(True), True
    right = worst < (ROUNDED_TOLERANCE if rounded else TOLERANCE)
    row |= {"max_err": worst, "checked": right, "tail": peer.tail, "rounded": rounded}
    row["note"] = peer.note if right else "wrong answer, not timed"
    return right


@contextmanager
def _noting_failures(row: dict) -> Iterator[None]:
    """Catch the error of a peer (another library) and write it to the row. Errors of our own plugins are raised."""
    try:
        yield
    except Absent as absent:
        row["note"] = str(absent)
    except Exception as failure:
        if row["backend"] in OURS:
            raise
        row["note"] = f"failed: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


def _row(case: Case, name: str) -> dict:
    """Return a result row with the names of case and backend; its measured fields are still empty."""
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


def backends(case: Case) -> dict[str, Callable[[Inputs], Peer]]:
    """Return the peers (kernels of other libraries) of one case, by their name in the results.

    A chain's verification, and layers with a window, a soft cap or sinks, run only the fastest peers.
    """
    found: dict[str, Callable[[Inputs], Peer]] = {
        "flashinfer": peers.flashinfer_decode if case.name.startswith("decode") else peers.flashinfer,
        "flashinfer-once": peers.flashinfer_once,
        "xqa": peers.xqa,
        "fa3": fa3.fa3,
        "fa3-composed": fa3.composed,
        "sglang": engines.sglang,
        "vllm": engines.vllm,
        "xformers": engines.xformers,
        "flex": engines.flex,
    }
    if case.q_len > 1 and not case.tree and (any(case.lens) or not case.ragged):
        return {name: found[name] for name in ("flashinfer", "xqa", "fa3")}
    if case.model.window or case.model.cap or case.model.sinks:
        return {name: found[name] for name in ("flashinfer", "flashinfer-once", "xqa", "fa3", "fa3-composed")}
    return found
