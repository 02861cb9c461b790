"""Specifications of a backend's buffers, which must exist before capture and never move.

A plugin declares shapes; the core computes sizes, allocates and checks. This module does not import torch, so
`draftmark size` prints the buffer table on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .errors import BufferError
from .geometry import DTYPE_BYTES


@dataclass(frozen=True)
class BufferSpec:
    """Name, shape, dtype and memory of one buffer, on the device unless `pinned`.

    Attributes:
        name: unique within a backend, e.g. ``"slot_mapping"``.
        shape: extents, outermost first.
        dtype: torch dtype name, e.g. ``"int32"``.
        formula: source of the shape, for readers: ``"max_rows"`` or a vendor page.
        pinned: the buffer is in pinned host memory, not on the device.
        zeros: the buffer starts as zeros; otherwise its contents before the first use are undefined.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    formula: str
    pinned: bool = False
    zeros: bool = False

    @property
    def numel(self) -> int:
        """Number of entries: the product of the shape."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, without guard words."""
        return self.numel * DTYPE_BYTES[self.dtype]


def validate_specs(specs: list[BufferSpec]) -> None:
    """Raise `BufferError` for a duplicate name, an unknown dtype, a wrong field type or an invalid extent."""
    seen: set[str] = set()
    if not isinstance(specs, (list, tuple)):
        raise BufferError(f"the specifications are {specs!r}, but they must be a list of BufferSpec; write [spec]")
    for spec in specs:
        if not isinstance(spec, BufferSpec):
            raise BufferError(f"buffers() must return BufferSpec objects, got {spec!r}; see draftmark.buffers")
        if spec.name in seen:
            raise BufferError(f"buffer {spec.name!r} is declared twice; names are unique within a backend")
        seen.add(spec.name)
        if spec.dtype not in DTYPE_BYTES:
            raise BufferError(
                f"buffer {spec.name!r} has dtype {spec.dtype!r}, but only {', '.join(DTYPE_BYTES)} exist; "
                "use a torch dtype name"
            )
        _check_kinds(spec)
        for extent in spec.shape:
            if not isinstance(extent, int) or isinstance(extent, bool) or extent < 0:
                raise BufferError(
                    f"buffer {spec.name!r} has shape {spec.shape!r}, but extents must be integers >= 0; "
                    "check the formula of this buffer"
                )


def _check_kinds(spec: BufferSpec) -> None:
    for name, kind in (("pinned", bool), ("zeros", bool), ("shape", tuple)):
        value = getattr(spec, name)
        if not isinstance(value, kind):
            raise BufferError(
                f"buffer {spec.name!r} has {name} {value!r}, but it must be a {kind.__name__}; "
                "see the fields of draftmark.BufferSpec"
            )
