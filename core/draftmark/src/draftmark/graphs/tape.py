"""The list of calls that a replay makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Tape:
    """Calls in order, each with its operands bound, and where its results belong.

    A kernel in a device graph writes to the addresses of its capture. A call on the tape therefore hands its fresh
    results over to the tensors of the capture: running the very operator that was captured, and copying, keeps replay
    bitwise equal to eager, which an out-variant (another overload) would not promise.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Callable[[], Any], Callable[[Any], Any] | None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, call: Callable[[], Any], targets: list[Tensor | None]) -> None:
        """Add a call. `targets`: one per leaf of its result, None where the result is no fresh tensor."""
        self._entries.append((call, delivery(targets)))

    def run(self) -> None:
        for call, deliver in self._entries:
            result = call()
            if deliver is not None:
                deliver(result)


def delivery(targets: list[Tensor | None]) -> Callable[[Any], Any] | None:
    """What copies a call's results to `targets`, one per leaf; None where no leaf has one."""
    fresh = [target for target in targets if target is not None]
    if not fresh:
        return None
    return fresh[0].copy_ if len(targets) == 1 else partial(_deliver, targets)


def _deliver(targets: list[Tensor | None], result: Any) -> None:
    for target, value in zip(targets, tree_leaves(result), strict=True):
        # A result kept for backward only (an LSTM's workspace) is absent at replay, which runs in inference mode.
        if target is not None and value is not None:
            target.copy_(value)
