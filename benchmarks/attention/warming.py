"""Compiles kernels in several processes before a run; Triton then finds them in its disk cache.

In a run with many shapes or versions, compilation in one process would take longer than the timed calls.
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
"""Number of pages in the pool. Pages repeat, because compilation depends on a case's layout and not on its memory."""


def warm(
    cases: Sequence[Case], names: Sequence[str], pairs: list[str], processes: int, seconds: float, device: str = "cuda"
) -> int:
    """Launch each case once on each of our backends. A failed launch is printed and does not stop the others.

    Args:
        names: names of our backends.
        pairs: ``NAME=FOLDER`` for each backend that is a copy of the package (`versions.versions`).

    Returns:
        Number of groups of cases that ended in time.
    """
    groups: dict[tuple[object, ...], list[Case]] = {}
    for name in names:
        for case in cases:
            # Cases of one shape and kind share most kernels, so one process compiles them.
            groups.setdefault((name, replace(case.model, page=1), case.name.split("-")[0]), []).append(case)
    with multiprocessing.get_context("spawn").Pool(processes, _begin, (pairs,)) as pool:
        waiting = [pool.apply_async(_launch, (str(key[0]), group, device)) for key, group in groups.items()]
        until = time.monotonic() + seconds
        for one in waiting:
            one.wait(max(0.0, min(until - time.monotonic(), FOREVER)))
    return sum(one.ready() for one in waiting)


def _begin(pairs: list[str]) -> None:
    OURS.update(versions(pairs))


def _launch(name: str, cases: list[Case], device: str) -> None:
    for case in cases:
        try:
            ours(OURS[name], build(case, device, 1, PAGES)).calls[0]()
        except Absent:
            continue
        except Exception as failure:
            print(f"{case.name} {name}: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}", flush=True)
