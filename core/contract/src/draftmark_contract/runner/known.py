"""Known failures of a plugin, from its `contract.toml`. The run fails if an entry matches no item, or its item passes.

Known failures count as "declared". Their profiles are then not served. The core profile may have no known failure.

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
from types import ModuleType
from typing import TYPE_CHECKING

from draftmark import BackendPlugin

if TYPE_CHECKING:
    from draftmark.loaded import LoadedBackend

FILE = "contract.toml"


@dataclass(frozen=True)
class KnownFailure:
    """One entry of `contract.toml`. `item` is an item id that may contain the wildcards ``*`` and ``?``."""

    id: str = ""
    item: str = ""
    reason: str = ""
    url: str = ""
    fault: str = ""

    @property
    def missing(self) -> list[str]:
        """Names of the required fields that are empty."""
        return [name for name in ("id", "item", "reason", "url", "fault") if not getattr(self, name)]

    def matches(self, item: str) -> bool:
        """Return True if the entry covers this item id."""
        # Brackets are part of an item id, and fnmatch must not read them as a character class.
        return fnmatch.fnmatchcase(item, self.item.replace("[", "[[]"))


def known_failures(backend: LoadedBackend) -> list[KnownFailure]:
    """Return the entries of the plugin's `contract.toml`; an empty list if there is no file.

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
    """Return the folder of the plugin's module, or None if the module has no file."""
    plugin = backend.plugin
    if isinstance(plugin, BackendPlugin):
        module = type(plugin).__module__
    else:
        module = plugin.__name__ if isinstance(plugin, ModuleType) else backend.implementation("describe").__module__
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).parent if file else None
