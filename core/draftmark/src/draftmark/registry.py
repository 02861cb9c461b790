"""Discovery and loading of backends.

`available()` reads installed metadata and imports nothing. `load(name)` imports one entry point and registers it in its
own plugin manager, so a broken plugin does not affect others. Every failure becomes a `BackendLoadError` with
the cause and the remedy. The caller names the backend; this module does not choose one by hardware.
"""

from __future__ import annotations

import importlib.metadata as md
import os
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from .errors import BackendLoadError, LoadFailure
from .version import CONTRACT_MAJOR, ENTRY_POINT_GROUP

if TYPE_CHECKING:
    from .loaded import LoadedBackend

GROUP_PATTERN = re.compile(r"draftmark\.backends\.v(\d+)")
HEADER_PATTERN = re.compile(r"^(Name|Version):[ \t]*(\S+)", re.MULTILINE)
BACKEND_VARIABLE = "DRAFTMARK_BACKEND"


@dataclass(frozen=True)
class Available:
    """Entry point of a backend, as read from installed metadata.

    Attributes:
        name: backend name that `load` accepts.
        module: value of the entry point, e.g. ``"package:Class"``.
        distribution, version: distribution that contains the entry point.
        contract_major: contract major from the entry point's group; this core loads only its own `CONTRACT_MAJOR`.
    """

    name: str
    module: str
    distribution: str
    version: str
    contract_major: int


def available() -> list[Available]:
    """List every installed backend of any contract major, sorted by name. Imports no backend.

    Packages are read again after a change of the import path, or of the names in one of its folders.
    """
    return list(_installed(tuple(map(_changed, sys.path)), tuple(map(id, sys.meta_path))))


def _changed(folder: str) -> tuple[str, int]:
    """Return a folder of the import path, and when a file or folder was last added to it or removed from it."""
    try:
        folder = folder or os.getcwd()
        return folder, os.stat(folder).st_mtime_ns
    except OSError:
        return folder, 0


@lru_cache(maxsize=1)
def _installed(folders: tuple[tuple[str, int], ...], finders: tuple[int, ...]) -> list[Available]:
    found: dict[str, list[Available]] = {}
    for distribution in md.distributions():
        # A distribution may be on the path twice (an editable install and a copy): the first wins, as for imports.
        name, rows = _rows(distribution)
        found.setdefault(name, rows)
    return sorted(chain.from_iterable(found.values()), key=lambda row: (row.name, row.distribution))


def load(name: str | None = None) -> LoadedBackend:
    """Load one backend by name.

    Args:
        name: name of an installed backend; None or an empty string reads DRAFTMARK_BACKEND.

    Returns:
        A `LoadedBackend`: the hooks as plain methods, not yet bound to a device.

    Raises:
        BackendLoadError: with `failure`, `cause` and `remedy`.
    """
    from .loaded import LoadedBackend

    name = name or os.environ.get(BACKEND_VARIABLE) or ""
    if not isinstance(name, str):
        cause, remedy = f"a backend name is a string, not {name!r}", "`draftmark list` prints the names"
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
            f"but this core supports v{CONTRACT_MAJOR}",
            f"install a release of {rows[0].distribution} for contract v{CONTRACT_MAJOR}",
        )
    from difflib import get_close_matches  # imported here: difflib takes longer to import than this module

    names = [row.name for row in installed]
    # The cutoff is above 0.73, the similarity of the two different names cuda_trtllm and cuda_triton.
    close = get_close_matches(name, names, n=1, cutoff=0.8)
    package = "name an installed backend (`draftmark list`), or install the package that provides this one"
    raise BackendLoadError(
        name,
        LoadFailure.ENTRY_POINT_MISSING,
        f"no installed distribution registers it (installed: {', '.join(names) or 'none'})",
        f"did you mean {close[0]}?" if close else package,
    )


def _rows(distribution: md.Distribution) -> tuple[str, list[Available]]:
    """Return name and backends of a distribution; none if its metadata is damaged, so that others still load."""
    try:
        # `distribution.metadata` parses a whole README twice for each package of the environment: 50 ms at every load.
        texts = (distribution.read_text(file) for file in ("METADATA", "PKG-INFO", ""))
        header = next(text for text in texts if text).partition("\n\n")[0]
        found = dict(reversed(HEADER_PATTERN.findall(header)))
        name, version, rows = found["Name"], found["Version"], []
        if "draftmark.backends." in (distribution.read_text("entry_points.txt") or ""):
            groups = [(entry, GROUP_PATTERN.fullmatch(entry.group)) for entry in distribution.entry_points]
            rows = [Available(one.name, one.value, name, version, int(group[1])) for one, group in groups if group]
        return re.sub(r"[-_.]+", "-", name).lower(), rows
    except Exception:  # the parser of importlib.metadata may raise anything on damaged metadata
        return "", []
