"""One core for an engine's own thread while it is asked, and one for each of its ranks.

A host's virtual cores differ in speed, each by itself and over time, by more than backends do: with runner V1, whose
steps wait for the host, turns of one engine lay 13 % apart as its thread came to stand on one core or another. Engines
that are asked in turns stand on the same one in a turn, and on the next in the next.

A rank that has answered looks for its next request for a second without a pause (vLLM's `SpinCondition`), longer than
many turns are. It does so on a core where nobody works, so that nothing runs beside the next engine. It yields between
two looks; what it took from that engine before was not measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .engines import Engine

LEAST = 4
"""Cores of a machine on which there is one to spare."""
THREADS = Path("/proc/self/task")
ALL: list[int] = sorted(os.sched_getaffinity(0)) if THREADS.exists() else []
"""What there was when nothing had been pinned."""


def on_core(turn: int, work: Callable[[Any, Engine], Any], llm: Any, engine: Engine) -> Any:
    """Let an engine work on the cores of a turn: its own thread on one, each rank of several GPUs on another; ranks
    step aside afterwards, to the last core, which no turn has.
    """
    ranks = engine.num_gpus if engine.num_gpus > 1 else 0
    if len(ALL) < LEAST + ranks:
        return work(llm, engine)
    taken, stands = 1 + ranks, ALL[:-1] if ranks else ALL
    cores = [stands[(turn * taken + number) % len(stands)] for number in range(taken)]
    rest = [core for core in ALL if core not in cores]
    pin(cores[0], rest)
    if not ranks:
        return work(llm, engine)
    llm.collective_rpc("take_core", args=(cores[1:], rest))
    found = work(llm, engine)
    llm.collective_rpc("take_core", args=([ALL[-1]] * ranks, rest))
    return found


def pin(core: int, rest: list[int]) -> None:
    """Give the process's first thread a core, and all its other threads the rest."""
    for path in THREADS.iterdir():
        thread = int(path.name)
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(thread, {core} if thread == os.getpid() else set(rest))
