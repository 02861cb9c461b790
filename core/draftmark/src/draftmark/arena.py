"""Allocation of all buffers of a backend.

In guard mode (``DRAFTMARK_GUARD=1``) every buffer lies between guard words, and fresh memory is poisoned. `check` then
finds writes outside a buffer. A read of uninitialized memory returns NaN or -1 instead of a plausible value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .buffers import BufferSpec, validate_specs
from .devices import present_device, synchronize
from .errors import BufferError, GuardError
from .graphs import mark_pinned
from .guard import GUARD_VARIABLE, guarding

GUARD_BYTES = 512
"""Guard bytes on each side: the rounding of the CUDA allocator, within which an overrun is otherwise invisible."""
GUARD_BYTE = 0xA5
POISON_BYTE = 0xFF
"""Poison, all ones: NaN in every float dtype, -1 in every signed integer; never a valid slot, page or length."""


@dataclass(frozen=True)
class Block:
    """An allocated buffer: specification, typed view, and the guard bytes on both sides."""

    spec: BufferSpec
    tensor: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor

    @property
    def hit(self) -> bool:
        """True if a guard byte changed. Reads the device."""
        return not all(bool((guard == GUARD_BYTE).all()) for guard in (self.before, self.after))


class Arena:
    """Named buffers of one backend, at fixed addresses for the lifetime of the arena, which owns the memory."""

    def __init__(self, blocks: list[Block], device: torch.device, guarded: bool) -> None:
        self._blocks = {block.spec.name: block for block in blocks}
        self._device = device
        self.guarded = guarded

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
        return cls([_allocate(spec, device, guarded) for spec in specs], device, guarded)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor of buffer `name`, in its declared shape and dtype; raise `BufferError` if it is unknown."""
        if name not in self._blocks:
            raise BufferError(
                f"buffer {name!r} is not in the arena, which has {', '.join(self._blocks) or 'none'}; "
                "declare it in the backend's buffers()"
            )
        return self._blocks[name].tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    @property
    def specs(self) -> list[BufferSpec]:
        """Specifications of all buffers, in order of allocation."""
        return [block.spec for block in self._blocks.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, without guard words."""
        return sum(block.spec.nbytes for block in self._blocks.values())

    def addresses(self) -> dict[str, int]:
        """Return the data pointer of each buffer by name; the pointers never change."""
        return {name: block.tensor.data_ptr() for name, block in self._blocks.items()}

    def poison(self) -> None:
        """Overwrite every buffer with poison (NaN or -1), except those that start as zeros: no step needs old contents.

        Waits for the device if a buffer is pinned; otherwise the host could overwrite a pending copy's source.
        """
        if any(block.spec.pinned for block in self._blocks.values()):
            synchronize(self._device)
        for block in self._blocks.values():
            if not block.spec.zeros:
                _bytes(block.tensor).fill_(POISON_BYTE)

    def check(self) -> None:
        """Raise `GuardError` if bytes around a buffer changed. Reads the device; not allowed in captured regions.

        Without guard mode there are no guard words, and this method does nothing.
        """
        hit = [name for name, block in self._blocks.items() if block.hit]
        if hit:
            raise GuardError(hit)

    def table(self) -> str:
        """Return one line per buffer: name, shape, dtype, bytes, formula."""
        rows = []
        for spec in self.specs:
            shape = "x".join(map(str, spec.shape))
            what = f"{spec.name:<20} {shape:<20} {spec.dtype:<9}"
            rows.append(f"{what} {spec.nbytes:>14,}  {spec.formula}")
        return "\n".join([*rows, f"{'total':<51} {self.nbytes:>14,}"])


def _allocate(spec: BufferSpec, device: torch.device, guarded: bool) -> Block:
    guard = GUARD_BYTES if guarded else 0
    end = guard + int(spec.nbytes)
    where = torch.device("cpu") if spec.pinned else device
    raw = torch.empty(end + guard, dtype=torch.uint8, device=where, pin_memory=spec.pinned and device.type != "cpu")
    if spec.pinned:
        mark_pinned(raw)
    before, payload, after = raw[:guard], raw[guard:end], raw[end:]
    before.fill_(GUARD_BYTE)
    after.fill_(GUARD_BYTE)
    if spec.zeros:
        payload.zero_()
    elif guarded:
        payload.fill_(POISON_BYTE)
    tensor = payload.view(getattr(torch, spec.dtype)).view(spec.shape)
    return Block(spec, tensor, before, after)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
