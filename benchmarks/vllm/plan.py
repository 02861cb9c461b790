"""Reads the plan of a benchmark run (engines and cases), and applies device limits."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from .engines import Engine
from .throughput import Case, phases

KEPT = ("equality", "rows", "drafting", "profiles")
"""Lists of a result that a resumed run begins with; what failed or did not run is tried again."""
LISTS = (*KEPT, "failed", "not_run")
PHASES = ("decode", "verify", "prefill", "mixed")


class Plan:
    """Holds the engines and cases of a benchmark run, as read from its JSON file.

    Args:
        path: JSON file of the plan.
        kv_bytes: size of the shared KV pages, for devices that cannot hold the plan's; 0 for the plan's size.
        engines: number of timed engines, the first of the plan, for devices that cannot hold all; 0 for all.
        page_size: page size of the timed engines instead of the plan's; 0 for the plan's.

    Attributes:
        timed: engines for throughput.
        said: engines for the comparison of texts.
        drafting: engines for tokens per round.
        cases: cases of each phase, in the order of the plan.
    """

    def __init__(self, path: Path, kv_bytes: int = 0, engines: int = 0, page_size: int = 0) -> None:
        self.read: dict[str, Any] = json.loads(path.read_text())
        self.timed, self.said, self.drafting = (
            [Engine(**one) for one in self.read.get(name, ())] for name in ("throughput", "equality", "drafting")
        )
        self.timed = self.timed[: engines or None]
        if kv_bytes:
            self.timed = [replace(one, kv_bytes=kv_bytes) if one.shared else one for one in self.timed]
        if page_size:
            self.timed = [replace(one, page_size=page_size) for one in self.timed]
        asked = self.read.get("cases", {})
        self.cases = {phase: [Case(**one) for one in asked.get(phase, ())] for phase in PHASES}

    @property
    def architectures(self) -> set[str]:
        """Architectures of all engines, as vLLM names them."""
        return {name for one in (*self.timed, *self.said, *self.drafting) for name in one.architectures}

    def rounds(self) -> list[list[tuple[str, Case]]]:
        """Return the first case of each phase, then the second of each. An early end leaves rows of each phase."""
        beside = itertools.zip_longest(*self.cases.values())
        return [[(phase, case) for phase, case in zip(PHASES, one, strict=True) if case] for one in beside]


def asked(phase: str, case: Case, engine: Engine) -> bool:
    """Return whether an engine runs a case of a phase."""
    return phase in phases(engine) and case.asked_of(engine)


def alike(engines: list[Engine], numbers: list[int]) -> list[list[int]]:
    """Group the numbers of engines that have equal configurations.

    The speed of a process depends on the core and memory that its host gave it: where steps wait for the host, two
    processes of one engine differed by 5 % in every turn. So a plan can name an engine twice, and its row then has the
    turns of all its processes.
    """
    found: list[list[int]] = []
    for number in numbers:
        group = next((one for one in found if engines[one[0]] == engines[number]), None)
        if group is None:
            found.append([number])
        else:
            group.append(number)
    return found


def same(row: dict[str, Any], phase: str, case: Case, engine: Engine) -> bool:
    """Return whether a row is the one of this engine, phase and case."""
    about = {"phase": phase, "case": case.name, "backend": engine.backend, "page_size": engine.page_size}
    return about | engine.unusual == {name: row[name] for name in (*about, "drafter", "kv_dtype") if name in row}
