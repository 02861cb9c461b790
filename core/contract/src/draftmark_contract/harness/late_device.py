"""Makes a device late: a queue that nobody runs on a CPU, a kernel that spins on a GPU. No clock decides anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from draftmark.devices import synchronize

from ..late_device import LateDevice

CYCLES = 40_000_000
"""Of a GPU's clock, some 20 ms: longer than a host takes to send a round, shorter than anybody minds."""


def _spin(device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]


SPINS: dict[str, Callable[[torch.device], None]] = {"cuda": _spin}
"""By device type. Of other devices no delay is known: rounds are sent all the same, and run as the device gets to them.
(Of this repository's NPU emulator nothing runs before somebody waits, as on a late device.)"""


class Lateness:
    """How a device is kept late while the host goes on."""

    def __init__(self, device: str, late: LateDevice | None) -> None:
        self._device = torch.device(device)
        self._late = late
        self._here = 0

    @property
    def waits(self) -> list[str]:
        """Names of the calls for which the host waited so far, where a `LateDevice` can tell; else none."""
        return [] if self._late is None else self._late.waits

    def linger(self) -> None:
        """The device stays at this point of what is sent to it for a while, once it gets here."""
        if self._late is None:
            spin = SPINS.get(self._device.type)
            if spin is not None:
                spin(self._device)
        else:
            self._here = self._late.mark()

    def arrive(self) -> None:
        """The device gets to where it lingers; a real one does so by itself."""
        if self._late is not None:
            self._late.advance(self._here)


@contextmanager
def running_late(device: str, tensors: Iterable[torch.Tensor]) -> Iterator[Lateness]:
    """What the block sends is late; leaving the block waits for all of it.

    Args:
        tensors: what lies on the device; a CPU has to be told.
    """
    if torch.device(device).type != "cpu":
        yield Lateness(device, None)
        synchronize(device)
        return
    with LateDevice() as late:
        late.owns(tensors)
        del tensors  # who drops a tensor in the block shall be the last to hold it
        yield Lateness(device, late)
