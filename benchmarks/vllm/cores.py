"""Pin an engine's main thread, and each of its ranks, to a core of its own while the engine runs a case.

The virtual cores of a host differ in speed from each other and over time, by more than backends do. With runner V1,
where steps wait for the host, turns of one engine differed by 13 % depending on the core of its main thread. So all
engines run on the same core within a turn, and on the next core in the next turn.

After an answer a rank polls for its next request for a second without a pause (vLLM's `SpinCondition`), longer than
many turns last. The rank does so on a core that no turn uses, so that it does not slow down the next engine. It yields
between two polls. How much time it took from that engine without this move was not measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .engines import Engine

LEAST = 4
"""Fewest cores of a machine on which engines are pinned."""
THREADS = Path("/proc/self/task")
ALL: list[int] = sorted(os.sched_getaffinity(0)) if THREADS.exists() else []
"""Cores of this process before anything was pinned."""


def on_core(turn: int, work: Callable[[Any, Engine], Any], llm: Any, engine: Engine) -> Any:
    """Run `work` with the engine's main thread on a core that depends on the turn, and each rank on another.

    The ranks of several GPUs move to the last core afterwards, which no turn of theirs uses.
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
    """Pin the process's first thread to a core, and all its other threads to the rest."""
    for path in THREADS.iterdir():
        thread = int(path.name)
        with contextlib.suppress(OSError):  # the thread may have ended since `iterdir` listed it
            os.sched_setaffinity(thread, {core} if thread == os.getpid() else set(rest))
