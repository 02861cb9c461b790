"""Find and load backends.

`available()` reads installed metadata and imports nothing. `load(name)` imports that one entry point into a
plugin manager of its own, so a broken plugin does not affect another, and turns every failure into one
`BackendLoadError` with the cause and the remedy. Nothing here chooses hardware: the caller names a backend.
"""

from __future__ import annotations

import importlib.metadata as md
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import BackendLoadError, LoadFailure
from .version import CONTRACT_MAJOR, ENTRY_POINT_GROUP

if TYPE_CHECKING:
    from .loaded import LoadedBackend

GROUP_PATTERN = re.compile(r"draftmark\.backends\.v(\d+)")
BACKEND_VARIABLE = "DRAFTMARK_BACKEND"


@dataclass(frozen=True)
class Available:
    """One entry point, as read from installed metadata.

    Attributes:
        name: what `load` takes.
        module: the entry point's value.
        distribution, version: the package that installed it.
        contract_major: from the entry point's group; only 1 can be loaded by this core.
    """

    name: str
    module: str
    distribution: str
    version: str
    contract_major: int


def available() -> list[Available]:
    """List every installed backend of any contract major, sorted by name; none of them is imported."""
    found: dict[tuple[str, str, str], Available] = {}
    for distribution in md.distributions():
        for row in _rows(distribution):
            # One project can be on the path twice (an editable install and a copy): the first wins, as imports do.
            found.setdefault((row.name, _normal(row.distribution), str(row.contract_major)), row)
    return sorted(found.values(), key=lambda row: (row.name, row.distribution))


def entry(name: str) -> Available | None:
    """Find the first installed backend of that name, of any contract major; None without one. Nothing is imported."""
    return next((row for row in available() if row.name == name), None)


def load(name: str | None = None) -> LoadedBackend:
    """Load one backend by name, or the one that DRAFTMARK_BACKEND names.

    Returns:
        A `LoadedBackend`: the hooks as plain methods, not yet bound to a device.

    Raises:
        BackendLoadError: with `failure`, `cause` and `remedy`.
    """
    from .loaded import LoadedBackend

    name = name or os.environ.get(BACKEND_VARIABLE) or ""
    if not isinstance(name, str):
        cause, remedy = f"a backend is named by a text, not by {name!r}", "`draftmark list` shows the names"
        raise BackendLoadError(str(name), LoadFailure.ENTRY_POINT_MISSING, cause, remedy)
    return LoadedBackend.from_entry_point(_find(name))


def _find(name: str) -> md.EntryPoint:
    installed = available()
    rows = [row for row in installed if row.name == name]
    usable = [row for row in rows if row.contract_major == CONTRACT_MAJOR]
    if len(usable) == 1:
        row = usable[0]
        return md.EntryPoint(row.name, row.module, ENTRY_POINT_GROUP)
    if usable:
        owners = " and ".join(f"{row.distribution} {row.version}" for row in usable)
        raise BackendLoadError(
            name, LoadFailure.DUPLICATE_NAME, f"{owners} both register it", "uninstall one of them with pip"
        )
    if rows:
        raise BackendLoadError(
            name,
            LoadFailure.WRONG_CONTRACT_MAJOR,
            f"{rows[0].distribution} {rows[0].version} implements contract v{rows[0].contract_major}, "
            f"this core speaks v{CONTRACT_MAJOR}",
            f"install a release of {rows[0].distribution} for contract v{CONTRACT_MAJOR}",
        )
    known = ", ".join(row.name for row in installed) or "none"
    raise BackendLoadError(
        name,
        LoadFailure.ENTRY_POINT_MISSING,
        f"no installed distribution registers it (installed: {known})",
        f"pip install its package, e.g. draftmark-{name.replace('_', '-') or 'NAME'}, or name an installed backend",
    )


def _rows(distribution: md.Distribution) -> list[Available]:
    """The backends of one distribution; none if its metadata is damaged, which must not hide the others'."""
    try:
        rows = []
        for entry in distribution.entry_points:
            if group := GROUP_PATTERN.fullmatch(entry.group):
                name = distribution.metadata["Name"]
                rows.append(Available(entry.name, entry.value, name, distribution.version, int(group[1])))
        return [row for row in rows if row.distribution]
    except Exception:  # importlib.metadata raises whatever its parser trips over
        return []


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
