"""Computes digests of the code that a verdict depends on: the plugin, plugins that it imports, core and suite.

A verdict is current while all of these digests are unchanged.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftmark.registry import available

from ..entries import entry
from .code_digest import digest_of, imports_of

if TYPE_CHECKING:
    from draftmark.loaded import LoadedBackend

STEP_PATH = (
    *(
        "arena",
        "backend",
        "batch",
        "batch_tensors",
        "buffers",
        "cache",
        "cache_checks",
        "devices",
        "geometry",
        "graphs",
    ),
    *("guard", "lengths", "requirements", "round_checks", "state", "transfer", "tree"),
)
"""Modules and packages of draftmark with code that runs, or decides sizes, from `open` to the end of a step."""
IMPORTED_ONLY = ("errors", "version", "hookspecs")
"""Modules that `STEP_PATH` imports and that do not run in a step: errors, a version, declarations of hooks."""
NOT_JUDGING = ("cli/", "runner/", "judge/", "page/", "schema/", "skeleton/", "contract_tests.py", "rules.toml")
"""Parts of the suite that present results, judge engine backends instead of plugins, or write a new package."""
JUDGING = tuple(f"runner/{name}.py" for name in ("item", "known", "limits", "outcome", "plugin", "resources"))
"""Files inside `NOT_JUDGING` that do count, because they decide how an item ends."""
PLUGIN, CORE, GUARD, SUITE, PROOF = "plugin", "core", "guard", "suite", "proof"
PROOFS = "draftmark_proof"
"""Package of the suite's proofs. It belongs to the identity where it is installed."""


@dataclass(frozen=True)
class Part:
    """A group of files that have one common digest.

    Attributes:
        name: ``"plugin"``, ``"core"``, ``"guard"``, ``"suite"``, or the name of a sibling backend.
        root: folder that contains the files; all other names are relative to it.
        only: files and folders that belong to the part; () for all.
        without: folders that do not belong to the part.
        but: files inside folders of `without` that still belong to the part.
    """

    name: str
    root: Path
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    but: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Return True if a file belongs to the part. name: path relative to `root`, with ``/``."""
        wanted = not self.only or any(name in (one, f"{one}.py") or name.startswith(f"{one}/") for one in self.only)
        return wanted and (name in self.but or not name.startswith(self.without or ("\0",)))

    def digest(self, files: Iterable[tuple[str, bytes]] | None = None) -> str:
        """Return the digest of `files`, (name relative to `root`, content), or by default of the files on disk."""
        return digest_of((name, data) for name, data in (self.files() if files is None else files) if self.has(name))

    @property
    def paths(self) -> list[Path]:
        """Folders and files that belong to the part. They need not exist."""
        named = [self.root / name for name in self.only] or [self.root]
        return [path if path.is_dir() else path.with_suffix(".py") for path in named]

    def files(self) -> Iterator[tuple[str, bytes]]:
        """Yield each file on disk as (name relative to `root`, content)."""
        for top in self.paths:
            for path in top.rglob("*") if top.is_dir() else [top]:
                if path.is_file():
                    yield path.relative_to(self.root).as_posix(), path.read_bytes()


def parts_of(backend: LoadedBackend) -> list[Part]:
    """Return the parts that a verdict on `backend` depends on; without the plugin if no distribution provides it."""
    found = [_package(PLUGIN, backend.name)]
    found += [_package(name, name) for name in getattr(backend.info, "runs_code_of", ())]
    core = Part(CORE, _folder("draftmark"), only=STEP_PATH)
    guard = Part(GUARD, _folder("draftmark_tools"), only=("guard",))
    suite = Part(SUITE, _folder(__package__.partition(".")[0]), without=NOT_JUDGING, but=JUDGING)
    proofs = [Part(PROOF, _folder(PROOFS))] if importlib.util.find_spec(PROOFS) else []
    return [*(part for part in found if part is not None), core, guard, suite, *proofs]


def identity_of(backend: LoadedBackend) -> dict[str, str]:
    """Return the name and digest of each part that a verdict on `backend` depends on."""
    return {part.name: part.digest() for part in parts_of(backend)}


def siblings_of(backend: LoadedBackend) -> set[str]:
    """Return the names of other installed backends that the plugin's code imports, at module level or in functions."""
    own = _package(PLUGIN, backend.name)
    imported = {name.partition(".")[0] for _, data in own.files() for name in imports_of(data)} if own else set()
    rows = [row for row in available() if row.name != backend.name]
    return {row.name for row in rows if row.module.partition(":")[0] in imported}


def _package(name: str, backend: str) -> Part | None:
    """Return a backend's own module as a part, without importing it; None if the module is not installed."""
    row = entry(backend)
    module = row.module.partition(":")[0] if row else ""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top) if top else None
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent.joinpath(*rest)
    if rest and not found.is_dir():
        return Part(name, found.parent, only=(rest[-1],))
    return Part(name, found) if rest or spec.submodule_search_locations else Part(name, found, only=(top,))


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None  # The package was imported before, so it has a spec and a file.
    return Path(spec.origin).parent
