"""Converts a verdict to JSON: the full record with every item, and the short record for a repository (50 KB)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR, __version__

from ..backend_under_test import INTERPRETED
from .item import PARTLY_REFUSED
from .outcome import Outcome, Result
from .subject import Kind
from .verdict import Verdict

SCHEMA = 3
"""Version of both forms; increases when a field changes its meaning."""
MOST_BYTES = 50_000
"""Maximum size of a short record, in bytes."""
MOST_CASES = (60, 20, 5, 0)
"""Maximum number of cases that a short record names per check and reason; the first limit that fits is used."""
MOST_REASONS = 30
"""Number of refusal reasons in a short record, the most frequent ones."""
LONGEST = 160
"""Maximum length of a reason in a short record, in characters."""
COUNTS = re.compile(r'\{\n\s+("[\w .]+": \d+(?:,\n\s+"[\w .]+": \d+)*)\n\s+\}')
"""Matches a JSON object that contains only counts, in the layout of `json`."""


def full_record(verdict: Verdict) -> dict[str, Any]:
    """Return the full record, which has every item and its message."""
    return {**_head(verdict), "info": verdict.info, "results": [result.as_json() for result in verdict.results]}


def short_record(verdict: Verdict) -> dict[str, Any]:
    """Return the short record: verdict, counts of every check, items that did not pass, and reasons of refusals."""
    found = [_short(verdict, most) for most in MOST_CASES]
    return next((one for one in found if len(as_text(one).encode()) <= MOST_BYTES), found[-1])


def as_text(record: dict[str, Any]) -> str:
    """Return a record of either form as JSON text, with each check's counts on one line."""
    text = json.dumps(record, indent=1, ensure_ascii=False)
    return COUNTS.sub(lambda found: "{" + re.sub(r"\n\s+", " ", found[1]) + "}", text) + "\n"


def _short(verdict: Verdict, most_cases: int) -> dict[str, Any]:
    open_ones = [one for one in verdict.results if one.outcome not in (Outcome.PASSED, Outcome.REFUSED)]
    reasons = Counter(one.message for one in verdict.results if one.outcome is Outcome.REFUSED)
    return {
        **_head(verdict),
        "runs": [{name: value for name, value in run.items() if name != "source"} for run in verdict.runs],
        "refusals": {reason[:LONGEST]: count for reason, count in reasons.most_common(MOST_REASONS)},
        "not_passed": _groups(open_ones, most_cases),
        "checks": _by_check(verdict.results),
    }


def _head(verdict: Verdict) -> dict[str, Any]:
    layer = {
        "facts": verdict.facts,
        "rules": {one.value: verdict.rules_with(one) for one in (Outcome.PASSED, Outcome.FAILED)},
        "rules_left_out": verdict.rules_left_out,
    }
    return {
        "schema": SCHEMA,
        "backend": verdict.backend,
        "kind": verdict.kind.value,
        "verdict": verdict.word.value,
        "of": verdict.scope.value,
        "contract": f"{CONTRACT_MAJOR}.{verdict.minor}",
        "profiles": list(verdict.profiles),
        "tried": {profile: {"tried": tried, "of": of} for profile, (tried, of) in verdict.tried.items()},
        "line": verdict.line,
        "counts": asdict(verdict.counts),
        "newer": asdict(verdict.newer),
        "partly_refused": sum(PARTLY_REFUSED in result.marks for result in verdict.results),
        "declared_roundoffs": verdict.declared_roundoffs,
        "items": verdict.items,
        "tiers_run": list(verdict.tiers_run),
        "error": verdict.error,
        "identity": verdict.identity,
        "source": verdict.source,
        "suite": {"draftmark": __version__, "contract": f"{CONTRACT_MAJOR}.{CONTRACT_MINOR}"},
        "runs": list(verdict.runs),
        "known_failures": list(verdict.known),
        **(layer if verdict.kind is Kind.LAYER else {}),
    }


def _groups(results: Sequence[Result], most: int) -> list[dict[str, Any]]:
    """Group results by outcome and reason. Each group has counts per check and at most `most` case names per check."""
    groups: dict[tuple[str, str], dict[str, list[str]]] = {}
    for result in results:
        reason = _reason(result)[:LONGEST]
        groups.setdefault((result.outcome.value, reason), {}).setdefault(result.check, []).append(result.case)
    rows = []
    for (outcome, reason), checks in groups.items():
        counts = {check: len(cases) for check, cases in checks.items()}
        row: dict[str, Any] = {"outcome": outcome, "reason": reason, "items": sum(counts.values()), "checks": counts}
        # Items that the suite computed without kernels are only counted, not listed.
        if most and reason != INTERPRETED[:LONGEST]:
            row["cases"] = {check: " ".join(cases[:most]) for check, cases in checks.items()}
        rows.append(row)
    return rows


def _reason(result: Result) -> str:
    """Return why an item did not pass: the message line after the rule for a failure, otherwise the first line."""
    first, _, rest = result.message.partition("\n")
    return first if result.outcome in (Outcome.DECLARED, Outcome.UNJUDGED) else rest.partition("\n")[0] or first


def _by_check(results: Sequence[Result]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for result in results:
        found.setdefault(result.check, Counter())[result.outcome.value] += 1
    return {check: dict(counts) for check, counts in found.items()}
