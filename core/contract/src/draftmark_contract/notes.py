"""Declarations that a plugin makes to the suite only: the meaning of its metadata, and the bytes that a batch uses.

A plugin's package may have a module ``contract`` with any of these names. An engine never reads them::

    def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]
    def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]
    def roundoffs(geometry: Geometry, mode: Mode) -> int
    roles: dict[str, Role]

`layouts` returns the meaning of the metadata buffers (`draftmark_contract.layouts`) for each mode that the geometry
serves. `usage` returns, by buffer name, the bytes that one batch uses of each buffer that only the plugin can size.
Those are buffers with the roles `split_schedule`, `partial_out`, `partial_lse`, `workspace` and `host_staging`. The
bytes count from the start of the buffer, and the batch writes no byte after them. The suite passes a batch that
contains integers only (`q_lens`, `tail_lens`, `host`, `num_reqs`), so `usage` must not read a tensor of the batch.

`roundoffs` returns the largest error of a 16-bit output in unit roundoffs of Σ p|v|
(`draftmark_contract.oracle.attention.tolerance`). The usual bound is 3: a kernel rounds the weights, a partial result
and the result. A kernel that merges partial results at several levels, or in two passes, may declare 4 or 5, with the
reason. The verdict counts the items that were compared with such a bound.

`roles` names the role of a buffer if `draftmark_contract.roles` has no other rule for it. The module must not import
torch at its top. Without `layouts` or `usage` the suite counts the affected items as not judged. Without `roundoffs`
the bound is 3.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from draftmark import BackendPlugin, Geometry, LoadedBackend, Mode

from .check import ContractViolation
from .layouts import UNDECLARED, MetadataSpec
from .oracle.roundoffs import MOST_ROUNDOFFS, ROUNDOFFS
from .roles import Role

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


MODULE = "contract"
"""Module of a plugin's package with its notes. A plugin's own function `contract_notes` replaces it."""


class Notes:
    """Reads and checks the contract notes of one loaded backend (the functions in its module ``contract``).

    Attributes:
        roles: role of each buffer that the plugin names.
        has_layouts, has_usage: True when the plugin defines the function.
    """

    def __init__(self, backend: LoadedBackend) -> None:
        given = notes_of(backend.plugin)
        self._layouts: Callable[[Geometry], Any] | None = getattr(given, "layouts", None)
        self._usage: Callable[[Geometry, ForwardBatch], Any] | None = getattr(given, "usage", None)
        self._roundoffs: Callable[[Geometry, Mode], Any] | None = getattr(given, "roundoffs", None)
        self.roles: dict[str, Role] = {name: Role(role) for name, role in getattr(given, "roles", {}).items()}
        self.has_layouts, self.has_usage = self._layouts is not None, self._usage is not None

    def layouts(self, geometry: Geometry) -> dict[Mode, MetadataSpec]:
        """Return the declared meaning of the metadata in each mode of `geometry`, or `UNDECLARED` if none is declared.

        Raises:
            ContractViolation: the function raised, or a mode is missing.
        """
        if self._layouts is None:
            return dict.fromkeys(geometry.modes, UNDECLARED)
        found = _answer("layouts", self._layouts, geometry)
        said = found if isinstance(found, dict) else {}
        missing = [mode.value for mode in geometry.modes if not isinstance(said.get(mode), MetadataSpec)]
        if missing:
            raise _wrong("layouts", f"a MetadataSpec for {', '.join(missing)}", found)
        return said

    def usage(self, geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
        """Return the bytes that `batch` uses of each plugin-sized buffer, by name; {} without a declared usage."""
        found = {} if self._usage is None else _answer("usage", self._usage, geometry, batch)
        if not isinstance(found, dict):
            raise _wrong("usage", "a dict", found)
        return found

    def roundoffs(self, geometry: Geometry, mode: Mode) -> int:
        """Return the bound of a 16-bit output in `mode`, in unit roundoffs; `ROUNDOFFS` if none is declared.

        Raises:
            ContractViolation: the function raised, or returned another number than `ROUNDOFFS` … `MOST_ROUNDOFFS`.
        """
        found = ROUNDOFFS if self._roundoffs is None else _answer("roundoffs", self._roundoffs, geometry, mode)
        if type(found) is not int or not ROUNDOFFS <= found <= MOST_ROUNDOFFS:
            raise _wrong("roundoffs", f"an int from {ROUNDOFFS} to {MOST_ROUNDOFFS}", found)
        return found


def notes_of(plugin: object) -> Any:
    """Return a plugin's notes: what its function `contract_notes` returns, or else the notes of its class.

    Raises:
        ContractViolation: the function raised.
    """
    own = getattr(plugin, "contract_notes", None)
    return module_of(type(plugin)) if own is None else _answer("contract_notes", own)


def module_of(kind: type) -> ModuleType | None:
    """Return the module ``contract`` in the package of a plugin class, or of its nearest base class that has one."""
    for owner in kind.__mro__:
        if owner is BackendPlugin:
            break
        package = getattr(sys.modules.get(owner.__module__), "__package__", None)
        if package and importlib.util.find_spec(f"{package}.{MODULE}") is not None:
            return importlib.import_module(f"{package}.{MODULE}")
    return None


def _answer(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        raise ContractViolation(
            f"{name}() of the plugin's contract notes raised {type(error).__name__}: {error}",
            remedy="fix the module contract of the plugin's package",
        ) from error


def _wrong(name: str, expected: str, got: object) -> ContractViolation:
    return ContractViolation(
        f"{name}() of the plugin's contract notes has the wrong type or value",
        got=repr(got),
        expected=expected,
        remedy="fix the module contract of the plugin's package",
    )
