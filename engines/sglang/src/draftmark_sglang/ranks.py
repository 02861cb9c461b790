"""Check that all tensor-parallel ranks run the same forwards, enabled by DRAFTMARK_GUARD=1."""

from __future__ import annotations

from draftmark.runtime import ForwardBatch
from draftmark_engines.ranks import RankGuard, step_digest


class ForwardComparison:
    """Compares each forward of this rank with the other ranks' forwards, when the next forward begins.

    The comparison waits for the next forward, because the CUDA graph fills page tables and draft trees in the replay.

    Attributes:
        compared: number of forwards that were compared.
    """

    def __init__(self, enabled: bool, page_size: int) -> None:
        self._guard = _guard() if enabled else None
        self._page_size = page_size
        self._batch: ForwardBatch | None = None
        self.compared = 0

    def begin(self) -> None:
        """Compare the previous forward with the other ranks' forwards, before its batch's buffers are overwritten.

        Raises:
            RanksDisagree: a forward differed. Every rank raises, one or two forwards later.
        """
        if self._guard is not None and self._batch is not None:
            self._guard.observe(step_digest(self._batch, self._page_size))
            self.compared += 1
        self._batch = None

    def remember(self, batch: ForwardBatch) -> None:
        """Keep the batch of the forward that runs next. A batch that is only captured is not compared."""
        self._batch = batch


def _guard() -> RankGuard | None:
    """Return the guard of this rank's attention TP group; None if the group has one rank."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = get_attn_tp_group()
    return RankGuard(group.device_group) if group.world_size > 1 else None
