"""The verdict: one line with its denominator, and the JSON record that a release may carry."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftmark.registry import entry
from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR, __version__

from ..check import Tier, unavailable
from .item import Outcome, Result, all_items
from .known import hash_of, known_failures, plugin_folder

if TYPE_CHECKING:
    from draftmark.loaded import LoadedBackend

COMMIT_VARIABLE = "DRAFTMARK_COMMIT"
SCHEMA = 1
"""Of the JSON record; grows when a field changes its meaning."""


@dataclass(frozen=True)
class Verdict:
    """What one run says of one backend.

    Attributes:
        results: one per item that ran, in the suite's order.
        denominator: items of each tier, the same for every backend.
        tiers_run: the tiers of which every item ran.
        source: where the plugin's code stood: commit, clean tree, hash of its files.
        error: why the backend could not be loaded at all.
        runs: where items were decided, if in more than one run: versions, and how many; see `journal`.
    """

    backend: str
    results: tuple[Result, ...]
    denominator: dict[str, int]
    tiers_run: tuple[str, ...]
    source: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    known: tuple[dict[str, str], ...] = ()
    error: str = ""
    runs: tuple[dict[str, Any], ...] = ()

    @property
    def counts(self) -> Counter[str]:
        """Items by outcome."""
        return Counter(result.outcome.value for result in self.results)

    @property
    def failures(self) -> list[Result]:
        """The items that fail the run."""
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    @property
    def complete(self) -> bool:
        """Whether every item of at least the sizing tier ran, and no tier ran in part."""
        ran = Counter(result.tier for result in self.results)
        return bool(self.tiers_run) and set(ran) <= set(self.tiers_run)

    @property
    def conforms(self) -> bool:
        """Every item of the tiers that ran is met."""
        return self.complete and not self.failures and not self.error

    @property
    def line(self) -> str:
        """The verdict in one line."""
        total, counts = sum(self.denominator.values()), self.counts
        good = counts["passed"] + counts["refused"]
        word = "conforms to" if self.conforms else "does not conform to" if self.failures else "has no verdict on"
        parts = [f"{good} of {total} items passed"]
        parts += [f"{counts[name]} {text}" for name, text in _COUNTED.items() if counts[name]]
        interpreted = sum("interpreted" in result.marks for result in self.results)
        if interpreted:
            parts.append(f"{interpreted} by the metadata interpreter")
        if len(self.results) < sum(self.denominator[tier] for tier in self.tiers_run) or not self.tiers_run:
            parts.append(f"only {len(self.results)} items selected")
        parts.append(f"tiers run: {', '.join(self.tiers_run) or 'none in full'}")
        parts.append(f"not run: {self._not_run or 'none'}")
        return f"{self.backend} {word} draftmark contract {CONTRACT_MAJOR}.{CONTRACT_MINOR}: {'; '.join(parts)}"

    @property
    def _not_run(self) -> str:
        ran = Counter(result.tier for result in self.results)
        left = {tier: count - ran[tier] for tier, count in self.denominator.items() if tier not in self.tiers_run}
        missing = [f"{tier} ({count} items)" for tier, count in left.items()]
        return ", ".join(missing + [f"{module} (needs {need})" for module, need in unavailable().items()])

    def as_json(self) -> dict[str, Any]:
        """The record; see `SCHEMA`."""
        return {
            "schema": SCHEMA,
            "contract": [CONTRACT_MAJOR, CONTRACT_MINOR],
            "draftmark": __version__,
            "backend": self.backend,
            "verdict": "conforms" if self.conforms else "fails" if self.failures or self.error else "none",
            "line": self.line,
            "error": self.error,
            "info": self.info,
            "source": self.source,
            "items": sum(self.denominator.values()),
            "denominator": self.denominator,
            "tiers_run": list(self.tiers_run),
            "tiers_not_run": [tier for tier in self.denominator if tier not in self.tiers_run],
            "counts": dict(self.counts),
            "known_failures": list(self.known),
            "runs": list(self.runs),
            "results": [result.as_json() for result in self.results],
        }

    def write(self, path: Path) -> None:
        """Write the record as JSON."""
        path.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


_COUNTED = {
    "refused": "of them by refusing alike",
    "failed": "failed",
    "unjudged": "not judged, of an opaque layout whose kernels did not run",
    "known": "known failures",
    "upcoming": "upcoming",
}


def judge(
    name: str,
    backend: LoadedBackend | None,
    results: Sequence[Result],
    error: str = "",
    runs: Sequence[dict[str, Any]] = (),
) -> Verdict:
    """The verdict on a run's results."""
    items = all_items()
    order = {item.id: position for position, item in enumerate(items)}
    denominator = Counter(item.tier.value for item in items)
    ran = Counter(result.tier for result in results)
    full = tuple(tier.value for tier in Tier if denominator[tier.value] and ran[tier.value] == denominator[tier.value])
    return Verdict(
        name,
        tuple(sorted(results, key=lambda result: order.get(result.item, len(order)))),
        {tier.value: denominator[tier.value] for tier in Tier},
        full,
        source_of(backend) if backend else {},
        asdict(backend.info) if backend else {},
        tuple(asdict(entry) for entry in _known(backend)),
        error,
        tuple(runs),
    )


def stale(record: dict[str, Any], backend: LoadedBackend) -> list[str]:
    """Reasons why a recorded verdict no longer speaks of this backend; empty means that it does."""
    now = source_of(backend)
    denominator = Counter(item.tier.value for item in all_items())
    checks = {
        f"schema {record.get('schema')} is not {SCHEMA}": record.get("schema") == SCHEMA,
        f"it speaks of {record.get('backend')!r}": record.get("backend") == backend.name,
        "it is no verdict of conformance": record.get("verdict") == "conforms",
        "it was recorded from a tree with uncommitted changes": bool(record.get("source", {}).get("clean")),
        "the plugin's files have changed since": record.get("source", {}).get("files_sha256") == now["files_sha256"],
        f"the suite has {sum(denominator.values())} items now, it counted {record.get('items')}": (
            record.get("items") == sum(denominator.values())
        ),
    }
    return [reason for reason, holds in checks.items() if not holds]


def source_of(backend: LoadedBackend) -> dict[str, Any]:
    """Distribution, version, commit, clean tree and a hash of the plugin's own files."""
    row = entry(backend.name)
    folder = plugin_folder(backend)
    commit, clean = _commit(folder)
    return {
        "distribution": row.distribution if row else "",
        "version": row.version if row else "",
        "commit": commit,
        "clean": clean,
        "files_sha256": hash_of(folder),
    }


def _known(backend: LoadedBackend | None) -> list[Any]:
    try:
        return list(known_failures(backend)) if backend else []
    except ValueError:  # load.known_failures_are_current says so
        return []


def _commit(folder: Path | None) -> tuple[str, bool]:
    """Commit that holds the folder, and whether the folder equals it; ("", False) outside a repository.

    A machine that only lends its device has a copy without history, or with an older one: there DRAFTMARK_COMMIT tells.
    It is taken at its word for being clean: the hash of the files tells whether it was.
    """
    told = os.environ.get(COMMIT_VARIABLE, "")
    if told:
        return told, True
    if folder is None or not _git(folder, "ls-files", "."):
        return "", False
    return _git(folder, "rev-parse", "HEAD"), not _git(folder, "status", "--porcelain", "--", ".")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
