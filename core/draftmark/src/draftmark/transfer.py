"""Between host and device without waiting: numbers go up through pinned memory, results come down behind an event.

torch's caching host allocator keeps a pinned block until the copies that use it are done, so nothing here has to
outlive its copy by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(values: Any, device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of host numbers on `device`; on CUDA the copy is only enqueued."""
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)


class AsyncHostCopy:
    """Copies of device tensors, on their way to the host.

    The copies are enqueued behind the work that makes the tensors, which may be overwritten by what follows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors[0].device.type != "cuda":
            # A copy, although nothing is late here: a later replay overwrites what the graph returned.
            self._hosts = [tensor.to("cpu", copy=True) for tensor in tensors]
            return
        self._hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(self._hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> list[list[Any]]:
        """The tensors as lists; waits until they are here."""
        if self._event is not None:
            self._event.synchronize()
        return [host.tolist() for host in self._hosts]
