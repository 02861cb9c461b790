"""Exact lengths from the device, where the host knows a bound: read back on a stream of its own.

The fused operator takes lists of the host. With overlap the host is a round behind, so what it is told are bounds,
and the lists come back from the device: `prefix_lens` is copied to pinned memory on a second stream as soon as it is
filled, and the host waits for that copy alone; vllm-ascend recovers its lengths so. A graph is cut in two behind each
`write_metadata`, and the copy is put between the halves: events, copies and replays, and nothing new to the runtime::

    eager:    write_metadata: side stream waits for the stream, copies; attend: the host waits for the copy
    replay:   first half; side stream waits for it, copies; second half, which stops at its first attention;
              the host waits for the copy; updates with the lengths, and the second half goes on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from draftmark import LengthsError

from .lengths import HostLists, Plans, StepKey

_torch: Any = torch
"""torch_npu adds torch.npu, of which torch's own types know nothing."""


class Recovery:
    """One backend's way of asking the device for lengths.

    Args:
        host: pinned int32 ``[max_reqs]``; what comes back. One forward at a time: whoever asks waits.
    """

    def __init__(self, host: torch.Tensor, plans: Plans) -> None:
        self._host = host
        self._plans = plans
        self._side: Any = None
        self._arrived: Any = None
        self._asked: HostLists | None = None

    def fetch(self, step: StepKey, prefix_lens: torch.Tensor) -> None:
        """Enqueue the copy of a forward's lengths, behind what is on the current stream."""
        self._open()
        self._side.wait_stream(_torch.npu.current_stream())
        with _torch.npu.stream(self._side):
            self._host[: len(prefix_lens)].copy_(prefix_lens, non_blocking=True)
            self._arrived.record()
        self._asked = self._plans.latest(step)

    def keep(self, prefix_lens: torch.Tensor) -> None:
        """An eager forward's lengths may be freed before the copy has run."""
        prefix_lens.record_stream(self._side)

    def lists(self, step: StepKey) -> HostLists:
        """Wait for the copy that `fetch` enqueued, and make the step's lists exact.

        Raises:
            LengthsError: nothing was fetched for these lists.
        """
        planned = self._plans.latest(step)
        if self._asked is not planned:
            raise LengthsError(
                f"the lengths of {step[0].value} step {step[1]} are bounds, and none were asked of the device; "
                "call write_metadata(batch) behind plan(batch)"
            )
        self._asked = None
        self._arrived.synchronize()
        return self._plans.recovered(step, self._host[: len(planned.q_lens)].tolist())

    def _open(self) -> None:
        if self._side is None:
            self._side = _torch.npu.Stream()
            self._arrived = _torch.npu.Event()


@dataclass(frozen=True)
class Point:
    """Where a captured program was cut: behind it the device knows the lengths of one step.

    Attributes:
        prefix_lens: the static tensor that the program fills.
    """

    recovery: Recovery
    plans: Plans
    step: StepKey
    prefix_lens: torch.Tensor

    def ask(self) -> None:
        """Enqueue the copy, behind the half of the program that fills the lengths."""
        self.recovery.fetch(self.step, self.prefix_lens)
