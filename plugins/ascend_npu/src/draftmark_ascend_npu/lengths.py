"""What the host tells the fused operator: two lists of lengths, exact or, while a graph is captured, a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from draftmark import GraphError, LengthsError, Mode
from draftmark.runtime import Exact, ForwardBatch, HostLengths

StepKey = tuple[Mode, int]
"""Mode and draft step: forwards of one captured program differ in it."""


@dataclass(frozen=True)
class HostLists:
    """The lists of one forward, padded requests included.

    Attributes:
        q_lens, tail_lens: query rows and tail slots of each request.
        host: what is known of the prefixes of the live ones.
    """

    q_lens: tuple[int, ...]
    tail_lens: tuple[int, ...]
    host: HostLengths

    @classmethod
    def of(cls, batch: ForwardBatch) -> HostLists:
        """The lists of a batch; no device read."""
        return cls(batch.q_lens, batch.tail_lens, batch.host)

    @property
    def exact(self) -> bool:
        """Whether the operator may be run with them; a bound would shift the diagonal of the causal mask."""
        return isinstance(self.host, Exact)

    @cached_property
    def rows(self) -> list[int]:
        """Running sums of query rows, without a leading 0: actual_seq_lengths in TND."""
        return list(accumulate(self.q_lens))

    @cached_property
    def prefix(self) -> list[int]:
        """Committed tokens of each request, at least 1: actual_seq_lengths_kv of the prefix pass.

        A request without a prefix reads one token whose weight the merge sets to zero.
        """
        return [max(1, n) for n in self._prefixes()]

    @cached_property
    def whole(self) -> list[int]:
        """Prefix and tail of each request: actual_seq_lengths_kv of the one-pass form. The keys are paged: no sum."""
        return [n + t for n, t in zip(self._prefixes(), self.tail_lens, strict=True)]

    def recovered(self, lens: Sequence[int]) -> HostLists:
        """The same forward, now that the device has said what its prefixes are.

        Raises:
            LengthsError: a length that the bound excludes, so what was read is not this batch's.
        """
        bounds = self.host.upper_bound()
        live = tuple(lens[: len(bounds)])
        if any(not 0 <= n <= most for n, most in zip(live, bounds, strict=True)):
            raise LengthsError(
                f"lengths {live} came back from the device, but the host was told at most {tuple(bounds)}; "
                "plan(batch) before write_metadata(batch), with bounds of the same rows"
            )
        return replace(self, host=Exact(live))

    def _prefixes(self) -> list[int]:
        known = self.host.upper_bound()
        return [*known, *[0] * (len(self.q_lens) - len(known))]


class Plans:
    """The latest lists of each kind of forward; `plan` sets them, eager calls and graph updates read them."""

    def __init__(self) -> None:
        self._latest: dict[StepKey, HostLists] = {}
        self._told: dict[StepKey, HostLengths] = {}

    def set(self, batch: ForwardBatch) -> None:
        """Note a batch's lists."""
        self._latest[batch.mode, batch.step] = HostLists.of(batch)
        self._told[batch.mode, batch.step] = batch.host

    def recovered(self, step: StepKey, lens: Sequence[int]) -> HostLists:
        """Make the latest lists of a forward exact, by what its device said; see `HostLists.recovered`."""
        self._latest[step] = self._latest[step].recovered(lens)
        return self._latest[step]

    def of(self, batch: ForwardBatch) -> HostLists:
        """The lists of this very batch.

        Raises:
            LengthsError: `plan` was not called for it, so the lists at hand are another batch's.
        """
        step = (batch.mode, batch.step)
        lists = self._latest.get(step)
        if lists is None or self._told[step] != batch.host or lists.q_lens != batch.q_lens:
            raise LengthsError(
                f"the host lists of {batch.mode.value} step {batch.step} are another batch's; "
                "call plan(batch) before every forward"
            )
        return lists

    def latest(self, step: StepKey) -> HostLists:
        """The lists that were planned last, exact or not: what a capture bakes in, and every replay replaces."""
        return self._latest[step]

    def for_replay(self, step: StepKey, requests: int, bounded: bool = False) -> HostLists:
        """The lists with which a captured forward of so many padded requests is to run next.

        Args:
            bounded: a bound will do, because the graph says what its lengths are.

        Raises:
            GraphError: `plan` was not called for such a batch, or with a bound only.
        """
        lists = self._latest.get(step)
        if lists is None or len(lists.q_lens) != requests or not (lists.exact or bounded):
            got = "none" if lists is None else f"{len(lists.q_lens)} {'exact' if lists.exact else 'bounded'} lengths"
            raise GraphError(
                f"replaying {step[0].value} step {step[1]} needs {requests} exact host lengths, got {got}; "
                "call plan(batch) with Exact lengths before replay(), or make the geometry with overlap"
            )
        return lists
