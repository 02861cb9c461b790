"""Arena of guard mode: guard words around every buffer, and poison in fresh memory."""

from __future__ import annotations

import torch

from draftmark.arena import POISON_BYTE, Arena
from draftmark.buffers import BufferSpec
from draftmark.errors import GuardError

GUARD_BYTES = 512
"""Guard bytes on each side: the rounding of the CUDA allocator, within which an overrun is otherwise invisible."""
GUARD_BYTE = 0xA5


class GuardedArena(Arena):
    """Arena with guard words. A read of uninitialized memory returns NaN or -1 instead of a plausible value."""

    guarded = True

    def __init__(self, specs: list[BufferSpec], device: torch.device) -> None:
        self._guards: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        super().__init__(specs, device)

    def check(self) -> None:
        """Raise `GuardError` if bytes around a buffer changed. Reads the device; not allowed in captured regions."""
        hit = [name for name, guards in self._guards.items() if any(bool((g != GUARD_BYTE).any()) for g in guards)]
        if hit:
            raise GuardError(hit)

    def _allocate(self, spec: BufferSpec) -> torch.Tensor:
        end = GUARD_BYTES + int(spec.nbytes)
        raw = self._bytes(spec, end + GUARD_BYTES)
        payload, guards = raw[GUARD_BYTES:end], (raw[:GUARD_BYTES], raw[end:])
        for guard in guards:
            guard.fill_(GUARD_BYTE)
        payload.fill_(0 if spec.zeros else POISON_BYTE)
        self._guards[spec.name] = guards
        return payload.view(getattr(torch, spec.dtype)).view(spec.shape)
