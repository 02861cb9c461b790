"""Known failures of a plugin, read from its own `contract.toml`; strict: one that passes, or matches nothing, fails.

They are counted as declared, keep a profile from being named, and may not touch the core profile.

[[known_failure]]
id = "window-fp8"
item = "numerics.matches_float64[window-*-fp8]"
reason = "the vendor's kernel ignores the window for fp8 KV"
url = "https://example.org/issue/1"
fault = "vendor"          # or "plugin", "driver", "torch"
"""

from __future__ import annotations

import fnmatch
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftmark.loaded import LoadedBackend

FILE = "contract.toml"


@dataclass(frozen=True)
class KnownFailure:
    """One entry; `item` is an item id in which ``*`` and ``?`` are wild."""

    id: str = ""
    item: str = ""
    reason: str = ""
    url: str = ""
    fault: str = ""

    @property
    def missing(self) -> list[str]:
        """Fields left empty."""
        return [name for name in ("id", "item", "reason", "url", "fault") if not getattr(self, name)]

    def matches(self, item: str) -> bool:
        """Whether this entry speaks of the item with this id."""
        # Brackets are part of an id, not a character class.
        return fnmatch.fnmatchcase(item, self.item.replace("[", "[[]"))


def known_failures(backend: LoadedBackend) -> list[KnownFailure]:
    """The entries of the plugin's `contract.toml`; none when there is no such file.

    Raises:
        ValueError: the file is not TOML, or an entry has an unknown field.
    """
    folder = plugin_folder(backend)
    path = folder / FILE if folder else None
    if path is None or not path.is_file():
        return []
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("known_failure", [])
    try:
        return [KnownFailure(**entry) for entry in entries]
    except TypeError as error:
        raise ValueError(
            f"{FILE} of {backend.name}: {error}; the fields are id, item, reason, url and fault"
        ) from error


def plugin_folder(backend: LoadedBackend) -> Path | None:
    """The folder of the plugin's own module, or None when it has no file."""
    file = getattr(sys.modules.get(backend.module), "__file__", None)
    return Path(file).parent if file else None
