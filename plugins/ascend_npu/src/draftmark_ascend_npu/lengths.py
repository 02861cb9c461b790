"""What the host tells the fused operator: two lists of lengths, exact or, while a graph is captured, a bound."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from draftmark import GraphError, LengthsError, Mode
from draftmark.runtime import Exact, ForwardBatch, HostLengths

StepKey = tuple[Mode, int]
"""Mode and draft step: forwards of one captured program differ in it."""


@dataclass(frozen=True)
class HostLists:
    """The lists of one forward, padded requests included.

    Attributes:
        rows: running sums of query rows, without a leading 0: actual_seq_lengths in TND.
        prefix: committed tokens of each request, at least 1: actual_seq_lengths_kv of the prefix pass. A request
            without a prefix reads one token whose weight the merge sets to zero.
        whole: prefix and tail of each request: actual_seq_lengths_kv of the one-pass form. Not a running sum, because
            the keys are paged.
        host: what they were made from.
    """

    rows: list[int]
    prefix: list[int]
    whole: list[int]
    host: HostLengths

    @property
    def exact(self) -> bool:
        """Whether the operator may be run with them; a bound would shift the diagonal of the causal mask."""
        return isinstance(self.host, Exact)

    @classmethod
    def of(cls, batch: ForwardBatch) -> HostLists:
        """The lists of a batch; no device read."""
        prefix = [*batch.host.upper_bound(), *[0] * (batch.padded_reqs - batch.num_reqs)]
        whole = [n + t for n, t in zip(prefix, batch.tail_lens, strict=True)]
        return cls(list(accumulate(batch.q_lens)), [max(1, n) for n in prefix], whole, batch.host)


class Plans:
    """The latest lists of each kind of forward; `plan` sets them, eager calls and graph updates read them."""

    def __init__(self) -> None:
        self._latest: dict[StepKey, HostLists] = {}

    def set(self, batch: ForwardBatch) -> None:
        """Note a batch's lists."""
        self._latest[batch.mode, batch.step] = HostLists.of(batch)

    def of(self, batch: ForwardBatch) -> HostLists:
        """The lists of this very batch.

        Raises:
            LengthsError: `plan` was not called for it, so the lists at hand are another batch's.
        """
        lists = self._latest.get((batch.mode, batch.step))
        if lists is None or lists.host != batch.host or len(lists.rows) != batch.padded_reqs:
            raise LengthsError(
                f"the host lists of {batch.mode.value} step {batch.step} are another batch's; "
                "call plan(batch) before every forward"
            )
        return lists

    def latest(self, step: StepKey) -> HostLists:
        """The lists that were planned last, exact or not: what a capture bakes in, and every replay replaces."""
        return self._latest[step]

    def for_replay(self, step: StepKey, requests: int) -> HostLists:
        """The lists with which a captured forward of so many padded requests is to run next.

        Raises:
            GraphError: `plan` was not called for such a batch, or with a bound only.
        """
        lists = self._latest.get(step)
        if lists is None or len(lists.rows) != requests or not lists.exact:
            got = "none" if lists is None else f"{len(lists.rows)} {'exact' if lists.exact else 'bounded'} lengths"
            raise GraphError(
                f"replaying {step[0].value} step {step[1]} needs {requests} exact host lengths, got {got}; "
                "call plan(batch) with Exact lengths before replay()"
            )
        return lists
