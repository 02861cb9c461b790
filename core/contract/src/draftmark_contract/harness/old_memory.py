"""Contents that the memory of a backend's buffers may have when the backend opens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from draftmark.arena import Arena

Fill = Callable[[str, torch.Tensor], None]
"""Writes the bytes of one buffer, given its name and its memory as uint8 ``[bytes]``."""
BYTES = (0x00, 0x01, 0x2A, 0x7F, 0x80, 0xFF)
NUMBERS = (1, 5)
"""Numbers that 32-bit words hold. They are valid lengths, pages, rows and slots."""


def _one_byte(byte: int, name: str, memory: torch.Tensor) -> None:
    memory.fill_(byte)


def _one_number(number: int, name: str, memory: torch.Tensor) -> None:
    memory.zero_()
    memory[::4] = number


def _random(name: str, memory: torch.Tensor) -> None:
    dice = torch.Generator().manual_seed(len(name))
    memory.copy_(torch.randint(256, memory.shape, dtype=torch.uint8, generator=dice))


FILLS: tuple[tuple[str, Fill], ...] = (
    *((f"bytes {byte:02X}", partial(_one_byte, byte)) for byte in BYTES),
    *((f"words of {number}", partial(_one_number, number)) for number in NUMBERS),
    ("random bytes", _random),
)
"""Description and function of each content, except that of an earlier backend."""


class Left:
    """Keeps the bytes of a backend's buffers for the next backend."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def keep(self, arena: Arena) -> None:
        """Copy the buffers of a backend that has run."""
        self._kept = {name: _memory(arena[name]).clone() for name in arena}

    def fill(self, name: str, memory: torch.Tensor) -> None:
        """Write the kept bytes of the buffer of this name; zeros where that buffer was shorter or absent."""
        memory.zero_()
        kept = self._kept.get(name, memory[:0])
        size = min(len(kept), len(memory))
        memory[:size] = kept[:size]


def fill_buffers(arena: Arena, fill: Fill) -> None:
    """Fill every buffer of an arena that the core leaves uninitialized."""
    for spec in arena.specs:
        if not spec.zeros:
            fill(spec.name, _memory(arena[spec.name]))


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
