"""Makes a device late: by a queue on a CPU, by a spinning kernel on a GPU. No decision depends on a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from draftmark.devices import synchronize

from ..late_device import LateDevice

CYCLES = 40_000_000
"""Clock cycles of a GPU kernel that spins, about 20 ms: longer than a host needs to send a round."""


def _spin(device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]


SPINS: dict[str, Callable[[torch.device], None]] = {"cuda": _spin}
"""Delay kernel by device type. For other devices rounds are sent without a delay, and run when the device reaches them.
(This repository's NPU emulator runs nothing before the host waits, like a late device.)"""


class Lateness:
    """Keeps a device late while the host continues."""

    def __init__(self, device: str, late: LateDevice | None) -> None:
        self._device = torch.device(device)
        self._late = late
        self._here = 0

    @property
    def waits(self) -> list[str]:
        """Names of the calls that the host has waited in so far; empty where no `LateDevice` records them."""
        return [] if self._late is None else self._late.waits

    def linger(self) -> None:
        """Make the device pause when it reaches this point of the work that is sent to it."""
        if self._late is None:
            spin = SPINS.get(self._device.type)
            if spin is not None:
                spin(self._device)
        else:
            self._here = self._late.mark()

    def arrive(self) -> None:
        """Let the device run up to the point where it pauses. A real device does so by itself."""
        if self._late is not None:
            self._late.advance(self._here)


@contextmanager
def running_late(device: str, tensors: Iterable[torch.Tensor]) -> Iterator[Lateness]:
    """Run the block with a late device. Leaving the block waits for all work that was sent.

    Args:
        tensors: tensors in device memory, which a CPU queue cannot detect by itself.
    """
    if torch.device(device).type != "cpu":
        yield Lateness(device, None)
        synchronize(device)
        return
    with LateDevice() as late:
        late.owns(tensors)
        del tensors  # code in the block that drops a tensor must drop the last reference to it
        yield Lateness(device, late)
