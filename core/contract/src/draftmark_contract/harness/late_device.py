"""Delays a device's queued work while the host continues, by a queue on a CPU and by a spinning kernel on a GPU.

The order of the work does not depend on time.
"""

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
"""Launcher of the delay kernel by device type. On other devices rounds are queued without a delay.
(This repository's NPU emulator runs nothing before the host waits, so its work is always late.)"""


class Lateness:
    """Delays the queued work of a device while the host continues."""

    def __init__(self, device: str, late: LateDevice | None) -> None:
        self._device = torch.device(device)
        self._late = late
        self._here = 0

    @property
    def waits(self) -> list[str]:
        """Names of the calls in which the host has waited for the device. Empty where no `LateDevice` records them."""
        return [] if self._late is None else self._late.waits

    def linger(self) -> None:
        """Queue a pause: the device stops at this point of its queue until `arrive`."""
        if self._late is None:
            spin = SPINS.get(self._device.type)
            if spin is not None:
                spin(self._device)
        else:
            self._here = self._late.mark()

    def arrive(self) -> None:
        """Run the queued work up to the point of `linger`. A real device reaches that point without this call."""
        if self._late is not None:
            self._late.advance(self._here)


@contextmanager
def running_late(device: str, tensors: Iterable[torch.Tensor]) -> Iterator[Lateness]:
    """Run the block with a late device. Leaving the block waits for all queued work.

    Args:
        tensors: tensors to treat as device memory; on a CPU the queue cannot tell them from host memory.
    """
    if torch.device(device).type != "cpu":
        yield Lateness(device, None)
        synchronize(device)
        return
    with LateDevice() as late:
        late.owns(tensors)
        del tensors  # Delete this reference, so that the block can free a tensor.
        yield Lateness(device, late)
