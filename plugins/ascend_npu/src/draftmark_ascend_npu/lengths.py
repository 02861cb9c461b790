"""Lists of row counts and KV lengths on the host, which the fused operator takes as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from draftmark import GraphError, LengthsError, Mode
from draftmark.runtime import Exact, ForwardBatch, HostLengths

from .sizing import PIECE_ROWS, pieces

StepKey = tuple[Mode, int]
"""Mode and draft step. Forwards of one captured program have different keys."""


@dataclass(frozen=True)
class HostLists:
    """Holds the length lists of one forward, padded requests included.

    Attributes:
        q_lens: query rows of each request.
        tail_lens: tail slots (KV slots of the new tokens) of each request.
        host: the host's prefix lengths of the live requests.
    """

    q_lens: tuple[int, ...]
    tail_lens: tuple[int, ...]
    host: HostLengths

    @classmethod
    def of(cls, batch: ForwardBatch) -> HostLists:
        """Make the lists of a batch without reading the device."""
        return cls(batch.q_lens, batch.tail_lens, batch.host)

    @property
    def exact(self) -> bool:
        """True if the lists hold exact lengths, which the operator needs. A bound would shift the causal diagonal."""
        return isinstance(self.host, Exact)

    @cached_property
    def rows(self) -> list[int]:
        """Running sums of query rows, without a leading 0: actual_seq_lengths in TND."""
        return list(accumulate(self.q_lens))

    @cached_property
    def prefix(self) -> list[int]:
        """Committed tokens of each request, at least 1: actual_seq_lengths_kv of the prefix pass.

        A request without a prefix reads one token, and the merge gives it weight zero.
        """
        return [max(1, n) for n in self._prefixes()]

    @cached_property
    def whole(self) -> list[int]:
        """Prefix and tail of each request: actual_seq_lengths_kv in one pass. Over pages it is not a running sum."""
        return [n + t for n, t in zip(self._prefixes(), self.tail_lens, strict=True)]

    @cached_property
    def pieces(self) -> list[int]:
        """Request of each piece of at most 16 rows, for latent rows in EXTEND. A request without rows is one piece."""
        return [request for request, count in enumerate(pieces(self.q_lens)) for _ in range(count)]

    @cached_property
    def piece_lists(self) -> tuple[list[int], list[int]]:
        """Running sums of the pieces' rows, and keys of each piece: its request's keys up to the piece's last row."""
        ends = [end for n in self.q_lens for end in (*range(PIECE_ROWS, n, PIECE_ROWS), n)]
        firsts = [0, *accumulate(self.q_lens)]
        keys = [self._prefixes()[request] + end for request, end in zip(self.pieces, ends, strict=True)]
        return [firsts[request] + end for request, end in zip(self.pieces, ends, strict=True)], keys

    def recovered(self, lens: Sequence[int]) -> HostLists:
        """Return the lists of this forward with `lens`, the prefix lengths copied from the device.

        Raises:
            LengthsError: a length exceeds its bound, so it belongs to another batch.
        """
        bounds = self.host.upper_bound()
        live = tuple(lens[: len(bounds)])
        if any(not 0 <= n <= most for n, most in zip(live, bounds, strict=True)):
            raise LengthsError(
                f"lengths {live} came back from the device, but the host's bounds are {tuple(bounds)}; call "
                "plan(batch) before write_metadata(batch), with bounds of the same rows"
            )
        return replace(self, host=Exact(live))

    def _prefixes(self) -> list[int]:
        known = self.host.upper_bound()
        return [*known, *[0] * (len(self.q_lens) - len(known))]


class Plans:
    """Holds the latest lists of each mode and draft step. `plan` writes them; calls and graph updates read them."""

    def __init__(self) -> None:
        self._latest: dict[StepKey, HostLists] = {}
        self._planned: dict[StepKey, HostLengths] = {}

    def set(self, batch: ForwardBatch) -> None:
        """Store a batch's lists."""
        self._latest[batch.mode, batch.step] = HostLists.of(batch)
        self._planned[batch.mode, batch.step] = batch.host

    def recovered(self, step: StepKey, lens: Sequence[int]) -> HostLists:
        """Replace bounds in the latest lists by `lens`, the device's exact lengths. See `HostLists.recovered`."""
        self._latest[step] = self._latest[step].recovered(lens)
        return self._latest[step]

    def of(self, batch: ForwardBatch) -> HostLists:
        """Return the lists of this batch.

        Raises:
            LengthsError: `plan` was not called for the batch, so the latest lists belong to another batch.
        """
        step = (batch.mode, batch.step)
        lists = self._latest.get(step)
        if lists is None or self._planned[step] != batch.host or lists.q_lens != batch.q_lens:
            raise LengthsError(
                f"the host lists of {batch.mode.value} step {batch.step} belong to another batch; "
                "call plan(batch) before every forward"
            )
        return lists

    def latest(self, step: StepKey) -> HostLists:
        """Return the lists that were planned last, exact or bounds. A capture uses them; every replay replaces them."""
        return self._latest[step]

    def for_replay(self, step: StepKey, requests: int, bounded: bool = False) -> HostLists:
        """Return the lists for the next replay of a captured forward with `requests` padded requests.

        Args:
            bounded: true if bounds suffice, because the graph copies its lengths back.

        Raises:
            GraphError: `plan` was not called for a batch of this size, or was called with bounds only.
        """
        lists = self._latest.get(step)
        if lists is None or len(lists.q_lens) != requests or not (lists.exact or bounded):
            got = "none" if lists is None else f"{len(lists.q_lens)} {'exact' if lists.exact else 'bounded'} lengths"
            raise GraphError(
                f"replaying {step[0].value} step {step[1]} needs {requests} exact host lengths, got {got}; "
                "call plan(batch) with Exact lengths before replay(), or make the geometry with overlap"
            )
        return lists
