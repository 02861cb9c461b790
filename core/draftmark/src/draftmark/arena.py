"""Allocation of all buffers of a backend.

In guard mode (``DRAFTMARK_GUARD=1``) the arena is a `draftmark_tools.guard.GuardedArena`, which finds writes outside a
buffer and reads of uninitialized memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .buffers import BufferSpec, validate_specs
from .devices import present_device, synchronize
from .errors import BufferError
from .graphs import mark_pinned
from .guard import GUARD_VARIABLE, guard_checks, guarding

POISON_BYTE = 0xFF
"""Poison, all ones: NaN in every float dtype, -1 in every signed integer; never a valid slot, page or length."""


class Arena:
    """Named buffers of one backend, at fixed addresses for the lifetime of the arena, which owns the memory.

    Attributes:
        guarded: every buffer lies between guard words, which `check` reads.
        specs: specifications of all buffers, in order of allocation.
    """

    guarded = False

    def __init__(self, specs: list[BufferSpec], device: torch.device) -> None:
        self.specs, self._device = list(specs), device
        self._tensors = {spec.name: self._allocate(spec) for spec in specs}

    @classmethod
    def allocate(cls, specs: list[BufferSpec], device: torch.device | str, *, guard: bool | None = None) -> Arena:
        """Allocate every buffer.

        Args:
            specs: specifications from the backend's `buffers` hook.
            device: device of the buffers that are not pinned.
            guard: add guard words and poison; None reads DRAFTMARK_GUARD.

        Raises:
            BufferError: a specification is malformed, or `device` is invalid or not present.
        """
        validate_specs(specs)
        guarded = guarding() if guard is None else guard
        if not isinstance(guarded, bool):
            raise BufferError(f"guard is {guard!r}, but it must be True, False or None; None reads {GUARD_VARIABLE}")
        device = present_device("an arena", device)
        kind: type[Arena] = guard_checks().GuardedArena if guarded else cls
        return kind(specs, device)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor of buffer `name`, in its declared shape and dtype; raise `BufferError` if it is unknown."""
        if name not in self._tensors:
            raise BufferError(
                f"buffer {name!r} is not in the arena, which has {', '.join(self._tensors) or 'none'}; "
                "declare it in the backend's buffers()"
            )
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def addresses(self) -> dict[str, int]:
        """Return the data pointer of each buffer by name; the pointers never change."""
        return {name: tensor.data_ptr() for name, tensor in self._tensors.items()}

    def poison(self) -> None:
        """Overwrite every buffer with poison (NaN or -1), except those that start as zeros: no step needs old contents.

        Waits for the device if a buffer is pinned; otherwise the host could overwrite a pending copy's source.
        """
        if any(spec.pinned for spec in self.specs):
            synchronize(self._device)
        for spec in self.specs:
            if not spec.zeros:
                self._tensors[spec.name].view(-1).view(torch.uint8).fill_(POISON_BYTE)

    def check(self) -> None:
        """Raise `GuardError` if bytes around a buffer changed. Reads the device; not allowed in captured regions.

        Without guard mode there are no guard words, and this method does nothing.
        """

    def _allocate(self, spec: BufferSpec) -> torch.Tensor:
        raw = self._bytes(spec, spec.nbytes)
        return (raw.zero_() if spec.zeros else raw).view(getattr(torch, spec.dtype)).view(spec.shape)

    def _bytes(self, spec: BufferSpec, count: int) -> torch.Tensor:
        """Return `count` uninitialized bytes in the memory of `spec`."""
        where = torch.device("cpu") if spec.pinned else self._device
        pin = spec.pinned and self._device.type != "cpu"
        raw = torch.empty(int(count), dtype=torch.uint8, device=where, pin_memory=pin)
        if spec.pinned:
            mark_pinned(raw)
        return raw
