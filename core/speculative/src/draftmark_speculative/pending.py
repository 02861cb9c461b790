"""Forwards whose tokens are on their way to the host, and what the host knows of lengths meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftmark.runtime import AsyncHostCopy, HostLengths, SequenceLengths

from .config import EngineConfig, HostKind
from .drafts import Round
from .request import Request


@dataclass(frozen=True)
class FinishedForward:
    """The tokens that a forward brought one request."""

    request: Request
    tokens: list[int]


class PendingForward:
    """The results of one forward, from the moment it is enqueued.

    Attributes:
        at_most: tokens that it committed for each request at most; 0 for a prefill, whose count the host knows.
        sent: the round that it was; None for a prefill.
        report: what the round says of itself, once `wait` has returned; None where it says nothing.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        at_most: int,
        sent: Round | None = None,
        report: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            tokens: int64 ``[n, m]``, a row per request.
            counts: int64 ``[n]``, how many of them are tokens; None means all.
            report: float32, of `Drafting.report`.
        """
        self.at_most, self.sent = at_most, sent
        self.report: list[float] | None = None
        self._counted, self._reports = counts is not None, report is not None
        self._requests = list(requests)
        self._copy = AsyncHostCopy([one for one in (tokens, counts, report) if one is not None])
        for request in requests:
            request.in_flight += 1

    def wait(self) -> list[FinishedForward]:
        """Wait for the results; to be called once."""
        tokens, *rest = self._copy.wait()
        lengths = rest[0] if self._counted else [len(row) for row in tokens]
        self.report = rest[-1] if self._reports else None
        for request in self._requests:
            request.in_flight -= 1
        return [
            FinishedForward(request, row[:count])
            for request, row, count in zip(self._requests, tokens, lengths, strict=True)
        ]


class HostView:
    """Tells backends about lengths as `HostKind` says, and settles what a forward committed: at once, or a round late.

    Args:
        lengths: the engine's; their host half is moved here and nowhere else.
    """

    def __init__(self, lengths: SequenceLengths, config: EngineConfig) -> None:
        self._lengths, self._kind = lengths, config.host_lengths
        self._at_once = config.overlap or config.host_lengths is HostKind.EXACT
        # By request id: the row's assignment, the count that is withheld for a round, and the most it could have been.
        self._unsettled: dict[int, tuple[int, int, int]] = {}

    def of(self, rows: Sequence[int]) -> HostLengths:
        """What a backend may know of these rows."""
        if self._kind is HostKind.EXACT:
            return self._lengths.exact(rows)
        return self._lengths.upper_bound(rows) if self._kind is HostKind.UPPER_BOUND else self._lengths.unknown(rows)

    def stored(self, row: int, count: int) -> None:
        """Note a prefill that was just sent and stores `count` tokens, neither more nor less."""
        self._lengths.dispatched([row], count)
        self._lengths.settle([row], [count], count)

    def sent(self, rows: Sequence[int], at_most: int) -> None:
        """Note a round that is under way and commits `at_most` tokens a row."""
        self._lengths.dispatched(rows, at_most)

    def settle(self, finished: FinishedForward, at_most: int) -> None:
        """Settle what a round committed. The sync-free path without overlap does so a round late."""
        request, count = finished.request, len(finished.tokens)
        if request.row is None:
            return  # it was sent back to wait, and gets a row again only when this has come
        if self._at_once:
            self._lengths.settle([request.row], [count], at_most)
            return
        late = self._unsettled.get(request.id)
        if late is not None and late[0] == request.assignment:
            self._lengths.settle([request.row], [late[1]], late[2])
        self._unsettled[request.id] = (request.assignment, count, at_most)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._unsettled.pop(request.id, None)
