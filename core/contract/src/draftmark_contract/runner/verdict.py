"""The verdict of a run: one word about the backend, and the condition that defines each word."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from draftmark.version import CONTRACT_MAJOR

from ..judge.rules import left_out, rules
from ..oracle.roundoffs import MARKS
from ..profiles import Profile
from .outcome import Counts, Outcome, Result
from .stopped import WITHOUT_VERDICT
from .subject import Kind, Listed

UNSAID = "no item of this engine checks it"


class Word(StrEnum):
    """Possible verdicts on a backend."""

    CONFORMS = "conforms"
    WITH_KNOWN = "conforms with known failures"
    DOES_NOT = "does not conform"
    NONE = "has no verdict"


class Scope(StrEnum):
    """Range of a verdict. If no kernel ran, "conforms" applies only to sizes and metadata."""

    SIZING = "sizing"
    METADATA = "sizing and metadata"
    BACKEND = "backend"
    RULES = "rules"
    """The rules with an item, for a layer of an engine."""


@dataclass(frozen=True)
class Newer:
    """Counts the items newer than the contract that the plugin targets.

    Attributes:
        items: number of newer items that ran.
        failing: number of newer items that failed.
        newest: newest contract of these items, e.g. ``"1.4"``; "" for none.
    """

    items: int = 0
    failing: int = 0
    newest: str = ""


@dataclass(frozen=True)
class Verdict:
    """Holds the verdict of one run on one backend.

    Attributes:
        backend: name of the backend, e.g. ``"reference"`` or ``"vllm:CPU_ATTN"``.
        kind: plugin, or layer of an engine.
        results: results of the items that ran, in the suite's order.
        items: number of items of the targeted contract, by tier; equal for every backend that targets it.
        tiers_run: tiers in which every item ran.
        counts: outcomes of the items of the targeted contract.
        minor: minor version of the contract that the backend targets.
        core: number of core profile items that did not pass, by outcome.
        profiles: profiles served in full, proved by the tiers that ran; empty unless the run is `complete`.
        scope: range of the verdict.
        newer: summary of newer items.
        identity: digests of the judged code and of the suite, see `identity`.
        source: commit of that code, see `source`.
        info: the backend's description of itself.
        known: entries of the plugin's `contract.toml`.
        error: reason why the run gives no verdict, as a clause: "it does not load: …"; "" for a run to its end.
        runs: machine, date and number of items of each run.
        tried: profile → (number of its items that ran, number of its items).
        facts: facts about a layer: its engine with the release, torch, the device.
        left_out: rules without an item for this layer → the reason.
        unavailable: modules of checks that could not be imported → the missing package.
        listed: every item of the backend, in the suite's order.
    """

    backend: str
    kind: Kind
    results: tuple[Result, ...]
    items: dict[str, int]
    tiers_run: tuple[str, ...]
    counts: Counts
    minor: int
    core: dict[str, int] = field(default_factory=dict)
    profiles: tuple[Profile, ...] = ()
    scope: Scope = Scope.BACKEND
    newer: Newer = Newer()
    identity: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    known: tuple[dict[str, str], ...] = ()
    error: str = ""
    runs: tuple[dict[str, Any], ...] = ()
    tried: dict[str, tuple[int, int]] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    listed: tuple[Listed, ...] = field(default=(), repr=False)

    @property
    def failures(self) -> list[Result]:
        """Items that fail the run."""
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    def rules_with(self, outcome: Outcome) -> list[int]:
        """Return the sorted numbers of rules that have an item with this outcome."""
        known = rules()
        names = {result.rule for result in self.results if result.outcome is outcome}
        return sorted(known[name].number for name in names if name in known)

    @property
    def rules_left_out(self) -> dict[str, str]:
        """Every rule without an item for this layer → the reason, which the layer gives for the rule or its module."""
        if self.kind is not Kind.LAYER or not self.complete:
            return {}
        left = left_out({result.rule for result in self.results}, self.left_out)
        return {name: reason or UNSAID for name, reason in left.items()}

    @property
    def complete(self) -> bool:
        """True if every item of at least the sizing tier ran, and no tier ran only in part."""
        return bool(self.tiers_run) and {result.tier for result in self.results} <= set(self.tiers_run)

    @property
    def word(self) -> Word:
        """The verdict. Only a failed item, or a declared failure of the core, gives DOES_NOT.

        An error, a run of only some items, and a core that is not judged give NONE.
        """
        if self.error:
            return Word.NONE
        if self.counts.failed:
            return Word.DOES_NOT
        if not self.complete:
            return Word.NONE
        if self.kind is Kind.LAYER:
            return Word.CONFORMS if self.ran else Word.NONE
        if self.core.get("declared"):
            return Word.DOES_NOT
        if Profile.CORE not in self.profiles:
            return Word.NONE
        return Word.WITH_KNOWN if self.counts.declared else Word.CONFORMS

    @property
    def conforms(self) -> bool:
        """True if the backend conforms and has no known failures."""
        return self.word is Word.CONFORMS

    def exit_code(self, allow_known: bool = False, allow_part: bool = False) -> int:
        """Return 0 for a backend that conforms, 1 for one that does not, and 2 for a run without a verdict.

        A layer of an engine gives 1 if none of its items could run.

        Args:
            allow_known: return 0 also with declared failures.
            allow_part: return 0 also for a run of only some items, if at least one ran and none failed.
        """
        if self.word is Word.NONE:
            if self.kind is Kind.LAYER and not self.error and not self.ran:
                return 1
            if not (allow_part and self.is_part):
                return WITHOUT_VERDICT
        elif self.word is Word.DOES_NOT:
            return 1
        return int(bool(self.counts.declared and not allow_known))

    @property
    def is_part(self) -> bool:
        """True if the run ended normally, only some items were selected, at least one ran, and none failed."""
        return self.word is Word.NONE and not self.error and not self.complete and self.ran

    def recorded(self, allow_part: bool = False) -> bool:
        """Return True if output files are written: the run gives a verdict, or it is a part and `allow_part` is set."""
        return self.word is not Word.NONE or (allow_part and self.is_part)

    @property
    def ran(self) -> bool:
        """True if at least one item ran: it was not refused, and nothing that it needs is missing."""
        return any(result.ran for result in self.results)

    @property
    def declared_roundoffs(self) -> dict[str, int]:
        """Number of items with a bound of outputs that the plugin declares, by the item's mark."""
        found = Counter(mark for result in self.results for mark in result.marks)
        return {mark: found[mark] for mark in MARKS if mark in found}

    @property
    def line(self) -> str:
        """The verdict in one line."""
        named = self.word in (Word.CONFORMS, Word.WITH_KNOWN)
        who = f"{self._range} of {self.backend}" if named and self.scope is not Scope.BACKEND else self.backend
        word = self.word.value
        if named and self.scope in (Scope.METADATA, Scope.RULES) and self._range != "1 rule":
            word = word.replace("conforms", "conform")
        profiles = f" ({', '.join(self.profiles)})" if self.profiles and named else ""
        to = "on" if self.word is Word.NONE else "to"
        because = f", because {self._reason}" if self.word is Word.NONE else ""
        core = [f"core profile: {self._unmet_core}"] if self.word is Word.DOES_NOT and self._unmet_core else []
        rounds = [f"{count:,} items {mark}" for mark, count in self.declared_roundoffs.items()]
        counts = [str(self.counts), *rounds, *self._newer, *self._not_run] if self.results or not self.error else []
        details = "; ".join([*core, *counts, *(["nothing is recorded"] if self.error else [])])
        return f"{who} {word} {to} draftmark contract {CONTRACT_MAJOR}.{self.minor}{profiles}{because}: {details}"

    @property
    def _range(self) -> str:
        if self.scope is not Scope.RULES:
            return self.scope.value
        number = len({result.rule for result in self.results if result.ran})
        return "1 rule" if number == 1 else f"{number} rules"

    @property
    def _reason(self) -> str:
        """Reason why there is no verdict, as a clause."""
        if self.error:
            return self.error
        if self.complete and self.kind is Kind.LAYER:
            return "none of the items could run here"
        if self.complete:
            return f"the core profile is open ({self._unmet_core})"
        ran, items = len(self.results), sum(self.items.values())
        if not items:
            return "it has no item"
        none = "" if self.ran else ", and none of them could run here"
        refused = all(result.outcome is Outcome.REFUSED for result in self.results)
        none = ", and the backend refuses all of them" if refused else none
        return f"only {ran:,} of {items:,} items ran{none}"

    @property
    def _unmet_core(self) -> str:
        return ", ".join(f"{count:,} {outcome}" for outcome, count in self.core.items() if outcome != "failed")

    @property
    def _newer(self) -> list[str]:
        if not self.newer.items:
            return []
        newer = self.newer
        return [f"upcoming: {newer.items:,} newer items, up to {newer.newest}, {newer.failing:,} failing"]

    @property
    def _not_run(self) -> list[str]:
        if self.results and not self.tiers_run:
            return [f"{self.counts.not_run:,} items not run"]
        ran = Counter(result.tier for result in self.results)
        left = {tier: count - ran[tier] for tier, count in self.items.items() if count and tier not in self.tiers_run}
        found = [f"{tier} tier not run ({count:,} items)" for tier, count in left.items() if not ran[tier]]
        found += [f"{count:,} items of the {tier} tier not run" for tier, count in left.items() if ran[tier]]
        kernels = ["its kernels did not run"] if self.scope is Scope.METADATA else []
        needs = [f"checks of {module} not run (they need {need})" for module, need in self.unavailable.items()]
        return kernels + ([", ".join(found)] if found else []) + needs
