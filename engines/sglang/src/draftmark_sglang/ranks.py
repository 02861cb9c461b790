"""Do all tensor-parallel ranks run the same forwards? Asked with DRAFTMARK_GUARD=1."""

from __future__ import annotations

from draftmark.runtime import ForwardBatch, RankGuard, step_digest


class Forwards:
    """Compares each forward of a rank with the others', when the next one begins.

    A graph works out pages and tails inside, so that a batch is whole only behind its replay.

    Attributes:
        compared: how many were.
    """

    def __init__(self, asked: bool, page_size: int) -> None:
        self._guard = _guard() if asked else None
        self._page_size = page_size
        self._batch: ForwardBatch | None = None
        self.compared = 0

    def begin(self) -> None:
        """Compare the last forward. Its batch's buffers must not have been written since.

        Raises:
            RanksDisagree: on every rank alike, a forward or two late.
        """
        if self._guard is not None and self._batch is not None:
            self._guard.observe(step_digest(self._batch, self._page_size))
            self.compared += 1
        self._batch = None

    def planned(self, batch: ForwardBatch) -> None:
        """Keep what is about to run. What is only captured says nothing."""
        self._batch = batch


def _guard() -> RankGuard | None:
    """None with one rank."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = get_attn_tp_group()
    return RankGuard(group.device_group) if group.world_size > 1 else None
