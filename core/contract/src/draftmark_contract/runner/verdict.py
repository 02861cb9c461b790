"""The verdict: what a run says of a backend, in one line whose every word has a condition."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from draftmark.version import CONTRACT_MAJOR

from ..check import unavailable
from ..profiles import Profile
from .outcome import Counts, Outcome, Result


class Word(StrEnum):
    """What a verdict comes to."""

    CONFORMS = "conforms"
    WITH_KNOWN = "conforms with known failures"
    DOES_NOT = "does not conform"
    NONE = "has no verdict"


class Scope(StrEnum):
    """Of what the word is said: without kernels that ran, "conforms" is said of sizes and metadata alone."""

    SIZING = "sizing"
    METADATA = "sizing and metadata"
    BACKEND = "backend"


@dataclass(frozen=True)
class Newer:
    """Items newer than the contract that the plugin targets: how many ran, of which contract the newest is, and how
    many of them failed.
    """

    items: int = 0
    failing: int = 0
    newest: str = ""


@dataclass(frozen=True)
class Verdict:
    """What one run says of one backend.

    Attributes:
        results: one per item that ran, in the suite's order.
        items: of each tier, the items of the contract that the plugin targets; the same for every backend that does.
        tiers_run: the tiers of which every item ran.
        counts: of those items.
        core: how many items of the core profile were not met, by outcome.
        profiles: served in full, as far as the tiers that ran can tell.
        minor: of the contract that the plugin targets.
        identity: digests of the code that was judged and of the suite, see `identity`.
        source: where that code stood, see `source`.
        error: why there is no backend to judge, as a clause: "it does not load: …".
        runs: where and when items were decided, and how many.
    """

    backend: str
    results: tuple[Result, ...]
    items: dict[str, int]
    tiers_run: tuple[str, ...]
    counts: Counts
    core: dict[str, int]
    profiles: tuple[Profile, ...]
    scope: Scope
    minor: int
    newer: Newer = Newer()
    identity: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    known: tuple[dict[str, str], ...] = ()
    error: str = ""
    runs: tuple[dict[str, Any], ...] = ()

    @property
    def failures(self) -> list[Result]:
        """The items that fail the run."""
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    @property
    def complete(self) -> bool:
        """Whether every item of at least the sizing tier ran, and no tier ran in part."""
        return bool(self.tiers_run) and {result.tier for result in self.results} <= set(self.tiers_run)

    @property
    def word(self) -> Word:
        """Nothing in the core profile may be refused or declared; what was not judged does not conform either."""
        if self.error or self.counts.failed:
            return Word.DOES_NOT
        if not self.complete:
            return Word.NONE
        if self.core.get("refused") or self.core.get("declared"):
            return Word.DOES_NOT
        if Profile.CORE not in self.profiles:
            return Word.NONE
        return Word.WITH_KNOWN if self.counts.declared else Word.CONFORMS

    @property
    def conforms(self) -> bool:
        """Without an exception."""
        return self.word is Word.CONFORMS

    def exit_code(self, allow_known: bool = False) -> int:
        """0 for a backend that conforms, and for a selection of items in which nothing failed; known failures need
        `allow_known`.
        """
        good = self.word in (Word.CONFORMS, Word.WITH_KNOWN) or (self.word is Word.NONE and not self.complete)
        return int(not good or bool(self.counts.declared and not allow_known))

    @property
    def line(self) -> str:
        """The verdict in one line."""
        named = self.word in (Word.CONFORMS, Word.WITH_KNOWN)
        who = f"{self.scope.value} of {self.backend}" if named and self.scope is not Scope.BACKEND else self.backend
        word = self.word.value
        if self.scope is Scope.METADATA:
            word = word.replace("conforms", "conform")
        profiles = f" ({', '.join(self.profiles)})" if named else ""
        to = "on" if self.word is Word.NONE else "to"
        told = "; ".join([*self._because, str(self.counts), *self._newer, *self._not_run])
        return f"{who} {word} {to} draftmark contract {CONTRACT_MAJOR}.{self.minor}{profiles}: {told}"

    @property
    def _because(self) -> list[str]:
        if self.error:
            return [self.error]
        if self.word is Word.NONE and not self.complete:
            ran = len(self.results)
            return [f"{ran:,} {'item' if ran == 1 else 'items'} selected"]
        unmet = ", ".join(f"{count:,} {outcome}" for outcome, count in self.core.items() if outcome != "failed")
        return [f"of the core profile {unmet}"] if unmet and self.word in (Word.NONE, Word.DOES_NOT) else []

    @property
    def _newer(self) -> list[str]:
        if not self.newer.items:
            return []
        newer = self.newer
        return [f"upcoming: {newer.items:,} newer items, up to {newer.newest}, of which {newer.failing:,} fail"]

    @property
    def _not_run(self) -> list[str]:
        if self.results and not self.tiers_run:
            return [f"{self.counts.not_run:,} items not run"]
        ran = Counter(result.tier for result in self.results)
        left = {tier: count - ran[tier] for tier, count in self.items.items() if tier not in self.tiers_run}
        found = [f"{tier} tier not run ({count:,} items)" for tier, count in left.items() if not ran[tier]]
        found += [f"{count:,} items of the {tier} tier not run" for tier, count in left.items() if ran[tier]]
        kernels = ["its kernels did not run"] if self.scope is Scope.METADATA else []
        needs = [f"checks of {module} not run (they need {need})" for module, need in unavailable().items()]
        return kernels + ([", ".join(found)] if found else []) + needs
