"""Kernels compiled beforehand, by processes beside each other: Triton finds on disk what any of them has made.

Of a run with many shapes or versions compiling takes longer than timing, and one processor does it.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace

from .cases import Case, build
from .ours import OURS, ours
from .stubs import Absent
from .versions import versions

FOREVER = 24 * 3600.0
PAGES = 256
"""Of a pool in which pages repeat: a launch is compiled for a case's layout, not for its memory."""


def warm(
    cases: Sequence[Case], names: Sequence[str], told: list[str], processes: int, seconds: float, device: str = "cuda"
) -> int:
    """Launch each case once on each of our backends, somewhere. What fails is told, and fails again where it is timed.

    Args:
        names: of our backends; `told` says which of them are versions (`versions.versions`).

    Returns:
        How many groups of cases ended in time.
    """
    groups: dict[tuple[object, ...], list[Case]] = {}
    for name in names:
        for case in cases:
            # Those of one shape and kind have most kernels in common: one process compiles them.
            groups.setdefault((name, replace(case.model, page=1), case.name.split("-")[0]), []).append(case)
    with multiprocessing.get_context("spawn").Pool(processes, _begin, (told,)) as pool:
        waiting = [pool.apply_async(_launch, (str(key[0]), group, device)) for key, group in groups.items()]
        until = time.monotonic() + seconds
        for one in waiting:
            one.wait(max(0.0, min(until - time.monotonic(), FOREVER)))
    return sum(one.ready() for one in waiting)


def _begin(told: list[str]) -> None:
    OURS.update(versions(told))


def _launch(name: str, cases: list[Case], device: str) -> None:
    for case in cases:
        try:
            ours(OURS[name], build(case, device, 1, PAGES)).calls[0]()
        except Absent:
            continue
        except Exception as failure:
            print(f"{case.name} {name}: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}", flush=True)
