"""List of the calls that a replay makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class Tape:
    """Recorded calls in order, each with bound operands and target tensors for its results.

    A kernel in a device graph writes to the addresses of its capture. A call on the tape therefore runs the captured
    operator and copies new results to the tensors of the capture. This keeps a replay bitwise equal to eager mode,
    which an out= overload would not guarantee.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Callable[[], Any], Callable[[Any], Any] | None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, call: Callable[[], Any], targets: list[Tensor | None]) -> None:
        """Add a call. `targets` has one entry per leaf of its result, None for a leaf that is not a new tensor."""
        self._entries.append((call, delivery(targets)))

    def run(self) -> None:
        """Make every call in order and copy its results to their targets."""
        for call, deliver in self._entries:
            result = call()
            if deliver is not None:
                deliver(result)


def delivery(targets: list[Tensor | None]) -> Callable[[Any], Any] | None:
    """Return a function that copies a call's results to `targets`, one per leaf; None if there is no target."""
    fresh = [target for target in targets if target is not None]
    if not fresh:
        return None
    return fresh[0].copy_ if len(targets) == 1 else partial(_deliver, targets)


def _deliver(targets: list[Tensor | None], result: Any) -> None:
    for target, value in zip(targets, tree_leaves(result), strict=True):
        # A result that only the backward pass needs (an LSTM's workspace) is absent in inference mode, i.e. at replay.
        if target is not None and value is not None:
            target.copy_(value)
