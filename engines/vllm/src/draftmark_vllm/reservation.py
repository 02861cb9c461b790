"""Reserves the backends' memory while vLLM measures how much memory a step needs.

vLLM gives the rest of the device to KV after this measurement, and creates metadata builders, with their arenas, later.
The measurement runs a forward without metadata. So the first such forward allocates the size of the arenas, and the
first builder frees it.
"""

from __future__ import annotations

import torch


class Reservation:
    """Memory that one process holds until its first builder exists.

    Attributes:
        held: the allocated bytes, by shape of layer.
    """

    def __init__(self) -> None:
        self.held: dict[object, torch.Tensor] = {}

    def hold(self, key: object, nbytes: int, device: torch.device) -> None:
        """Allocate `nbytes` for one shape of layer. A second call with the same key does nothing."""
        if key not in self.held and device.type != "cpu":
            self.held[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def release(self) -> None:
        """Free all memory that `hold` has allocated, so that the backends' own buffers can use it."""
        self.held.clear()


RESERVATION = Reservation()
"""One for each process: vLLM creates layers and builders apart, and passes no object from one to the other."""
