"""What a plan asks for: its engines and cases, what of them fits a device, and what a run before has done."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from .engines import Engine
from .throughput import Case, phases

LISTS = ("equality", "rows", "drafting", "profiles", "failed", "not_run")
PHASES = ("decode", "verify", "prefill", "mixed")


class Plan:
    """A plan as it was read.

    Args:
        kv_bytes: of the shared KV pages of every engine, where the plan's do not fit the device; 0 for the plan's.
        engines: of the rows as many, the first ones, where not all fit the device; 0 for all.
        page_size: of the engines of the rows, where it shall not be the plan's; 0 for the plan's.

    Attributes:
        timed, said, drafting: engines of the rows, of the texts and of the drafts.
        cases: of each phase, in the order in which they are asked.
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
        """Models of all engines, as vLLM names them."""
        return {name for one in (*self.timed, *self.said, *self.drafting) for name in one.architectures}

    def rounds(self) -> list[list[tuple[str, Case]]]:
        """The first case of each phase, then the second: a run that ends early has something of each."""
        beside = itertools.zip_longest(*self.cases.values())
        return [[(phase, case) for phase, case in zip(PHASES, one, strict=True) if case] for one in beside]


def asked(phase: str, case: Case, engine: Engine) -> bool:
    """Whether an engine runs a case of a phase."""
    return phase in phases(engine) and case.asked_of(engine)


def alike(engines: list[Engine], numbers: list[int]) -> list[list[int]]:
    """Numbers of engines that are the same but for their process.

    A process keeps what its host gave it: two of one engine were seen 5 % apart, turn after turn, where steps wait for
    the host. So a plan may name an engine twice, and its row is of all of its processes' turns.
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
    """Whether a row is an engine's of this case."""
    about = {"phase": phase, "case": case.name, "backend": engine.backend, "page_size": engine.page_size}
    return about | engine.unusual == {name: row[name] for name in (*about, "drafter", "kv_dtype") if name in row}


def resumed(result: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """A result that begins with what a run before has measured, if there was one; its failures are tried again."""
    if path is None or not path.exists():
        return result
    before = json.loads(path.read_text())
    if before["device"] != result["device"] or before["commit"] != result["commit"]:
        raise SystemExit(
            f"{path} is of {before['device']} and commit {before['commit']}, this run of {result['device']} and "
            f"{result['commit']}; leave --resume out"
        )
    return {**result, **{name: before[name] for name in ("equality", "rows", "drafting", "profiles")}}
