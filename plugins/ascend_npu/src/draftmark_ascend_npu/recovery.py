"""Copies exact lengths from the device if the host has only bounds, on a separate stream.

The fused operator takes lists on the host. With overlap the host is one step late and has only bounds. So
`prefix_lens` is copied to pinned memory on a second stream as soon as it is written, and the host waits only for that
copy. vllm-ascend recovers its lengths in this way too. A graph is split after each `write_metadata`, and the copy runs
between the parts. The runtime sees only events, copies and replays::

    eager:    write_metadata: the side stream waits for the stream, copies; attend: the host waits for the copy
    replay:   first part; the side stream waits for it, copies; second part, which stops at its first attention;
              the host waits for the copy and updates the calls with the lengths; the second part continues
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from draftmark import LengthsError

from .lengths import HostLists, Plans, StepKey

_torch: Any = torch
"""torch with torch_npu's `torch.npu`, which torch's type stubs lack."""


class Recovery:
    """Copies exact lengths from the device to the host, for one backend.

    Args:
        host: pinned int32 ``[max_reqs]``, target of the copies. It holds one forward's lengths; `lists` waits for them.
        plans: latest host lists. The copied lengths make them exact.
    """

    def __init__(self, host: torch.Tensor, plans: Plans) -> None:
        self._host = host
        self._plans = plans
        self._side: Any = None
        self._arrived: Any = None
        self._fetched: HostLists | None = None

    def fetch(self, step: StepKey, prefix_lens: torch.Tensor) -> None:
        """Enqueue the copy of a forward's lengths, after the work on the current stream."""
        self._open()
        self._side.wait_stream(_torch.npu.current_stream())
        with _torch.npu.stream(self._side):
            self._host[: len(prefix_lens)].copy_(prefix_lens, non_blocking=True)
            self._arrived.record()
        self._fetched = self._plans.latest(step)

    def keep(self, prefix_lens: torch.Tensor) -> None:
        """Keep the tensor of an eager forward's lengths allocated until the copy to the host has run."""
        prefix_lens.record_stream(self._side)

    def lists(self, step: StepKey) -> HostLists:
        """Wait for the copy that `fetch` enqueued, and return the step's exact lists.

        Raises:
            LengthsError: no lengths were fetched for these lists.
        """
        planned = self._plans.latest(step)
        if self._fetched is not planned:
            raise LengthsError(
                f"the lengths of {step[0].value} step {step[1]} are bounds, and none were copied from the device; "
                "call write_metadata(batch) after plan(batch)"
            )
        self._fetched = None
        self._arrived.synchronize()
        return self._plans.recovered(step, self._host[: len(planned.q_lens)].tolist())

    def _open(self) -> None:
        if self._side is None:
            self._side = _torch.npu.Stream()
            self._arrived = _torch.npu.Event()


@dataclass(frozen=True)
class Point:
    """Place at which a captured program is split into two graphs, so that lengths can be copied to the host in between.

    Attributes:
        recovery: copies the lengths.
        plans: host lists that the lengths make exact.
        step: mode and draft step.
        prefix_lens: static tensor that the program fills before the split.
    """

    recovery: Recovery
    plans: Plans
    step: StepKey
    prefix_lens: torch.Tensor

    def fetch(self) -> None:
        """Enqueue the copy, after the part of the program that writes the lengths."""
        self.recovery.fetch(self.step, self.prefix_lens)
