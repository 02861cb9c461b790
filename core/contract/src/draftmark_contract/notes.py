"""What a plugin tells the suite, beside what it tells an engine: the meaning of its metadata, and bytes in use.

A plugin's package has a module ``contract`` with either or both of these functions, of which an engine reads nothing::

    def layouts(geometry: Geometry) -> dict[Mode, MetadataSpec]
    def usage(geometry: Geometry, batch: ForwardBatch) -> dict[str, int]

`layouts` gives, for each mode that the geometry serves, what the metadata buffers mean (`draftmark_contract.layouts`).
`usage` gives the bytes that one batch takes of each buffer whose need only the plugin knows, by name: those of an own
role (`split_schedule`, `partial_out`, `partial_lse`, `workspace`) and of `host_staging`; they are counted from the
beginning of the buffer, and no byte behind them is written by that batch. The suite asks with a batch of integers only
(`q_lens`, `tail_lens`, `host`, `num_reqs`), so `usage` may read no tensor of it. The module may not import torch at the
top. Where a function is missing, the suite judges what it can and counts the rest as not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from draftmark import Geometry, LoadedBackend, Mode

from .check import ContractViolation
from .layouts import UNSAID, MetadataSpec

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


class Notes:
    """The contract notes of one loaded backend, read and checked.

    Attributes:
        says_layouts, says_usage: whether the plugin has the function.
    """

    def __init__(self, backend: LoadedBackend) -> None:
        given = backend.contract_notes()
        self._layouts: Callable[[Geometry], Any] | None = getattr(given, "layouts", None)
        self._usage: Callable[[Geometry, ForwardBatch], Any] | None = getattr(given, "usage", None)
        self.says_layouts, self.says_usage = self._layouts is not None, self._usage is not None

    def layouts(self, geometry: Geometry) -> dict[Mode, MetadataSpec]:
        """What the metadata means in each mode of `geometry`; `UNSAID` where the plugin does not say.

        Raises:
            ContractViolation: the function raised, or a mode is missing.
        """
        if self._layouts is None:
            return dict.fromkeys(geometry.modes, UNSAID)
        found = _answer("layouts", self._layouts, geometry)
        said = found if isinstance(found, dict) else {}
        missing = [mode.value for mode in geometry.modes if not isinstance(said.get(mode), MetadataSpec)]
        if missing:
            raise _wrong("layouts", f"a MetadataSpec for {', '.join(missing)}", found)
        return said

    def usage(self, geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
        """Bytes of each own buffer that `batch` uses, by name; nothing where the plugin does not say."""
        found = {} if self._usage is None else _answer("usage", self._usage, geometry, batch)
        if not isinstance(found, dict):
            raise _wrong("usage", "a dict", found)
        return found


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
        f"{name}() of the plugin's contract notes has the wrong type",
        got=repr(got),
        expected=expected,
        remedy="fix the module contract of the plugin's package",
    )
