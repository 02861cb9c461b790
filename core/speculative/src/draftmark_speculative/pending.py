"""Forwards in flight (results not on the host yet), and the prefix lengths that the host may use until then."""

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
    """Tokens that one forward yielded for one request."""

    request: Request
    tokens: list[int]
    saved: int = 0
    """Length of the checkpoint of recurrent state that the forward saved; 0 for none."""
    lent: tuple[int, int | None] = (0, None)
    """Row assignment and spare slot of the request when the forward was enqueued."""


class PendingForward:
    """Holds one enqueued forward while its results are copied to the host.

    Attributes:
        at_most: most tokens that the forward committed for a request; 0 for a prefill, which has exact counts.
        sent: the round that was enqueued; None for a prefill.
        report: values of `Drafting.report`, set by `wait`; None if the round has no report.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokens: torch.Tensor,
        counts: torch.Tensor | None,
        at_most: int,
        sent: Round | None = None,
        report: torch.Tensor | None = None,
        saved: torch.Tensor | None = None,
        lent: Sequence[tuple[int, int | None]] = (),
    ) -> None:
        """Start the copy of a forward's results to the host.

        Args:
            tokens: int64 ``[n, m]``, a row per request.
            counts: int64 ``[n]``, number of valid tokens in each row; None means all.
            report: float32, from `Drafting.report`.
            saved: int32 ``[n]``, length of each request's checkpoint, or 0; None without checkpoints.
            lent: of `Checkpoints.lent`, for each request; with `saved`.
        """
        self.at_most, self.sent = at_most, sent
        self.report: list[float] | None = None
        self._requests, self._lent = list(requests), list(lent)
        self._given = [one is not None for one in (counts, saved, report)]
        self._copy = AsyncHostCopy([one for one in (tokens, counts, saved, report) if one is not None])
        for request in requests:
            request.in_flight += 1

    def wait(self) -> list[FinishedForward]:
        """Wait for the results and return them. Call it once."""
        tokens, *rest = self._copy.wait()
        found = iter(rest)
        counts, saved, self.report = (next(found) if given else None for given in self._given)
        counts = [len(row) for row in tokens] if counts is None else counts
        for request in self._requests:
            request.in_flight -= 1
        saved, lent = saved or [0] * len(tokens), self._lent or [(0, None)] * len(tokens)
        return [
            FinishedForward(request, row[:count], length, spare)
            for request, row, count, length, spare in zip(self._requests, tokens, counts, saved, lent, strict=True)
        ]


class HostView:
    """Tracks the requests' prefix lengths on the host, in the precision of `HostKind`.

    The host adds a round's committed tokens at once, or one round later.

    Args:
        lengths: the engine's lengths. Only this class adds to their host half while a request runs.
    """

    def __init__(self, lengths: SequenceLengths, config: EngineConfig) -> None:
        self._lengths, self._kind = lengths, config.host_lengths
        self._at_once = config.overlap or config.host_lengths is HostKind.EXACT
        # Maps a request id to (row assignment, tokens to add one round later, upper bound of these tokens).
        self._unsettled: dict[int, tuple[int, int, int]] = {}

    def of(self, rows: Sequence[int]) -> HostLengths:
        """Return the host lengths that a backend may read for these rows."""
        if self._kind is HostKind.EXACT:
            return self._lengths.exact(rows)
        return self._lengths.upper_bound(rows) if self._kind is HostKind.UPPER_BOUND else self._lengths.unknown(rows)

    def stored(self, row: int, count: int) -> None:
        """Record a prefill that was just enqueued and stores exactly `count` tokens."""
        self._lengths.dispatched([row], count)
        self._lengths.settle([row], [count], count)

    def sent(self, rows: Sequence[int], at_most: int) -> None:
        """Record a round in flight that commits at most `at_most` tokens a row."""
        self._lengths.dispatched(rows, at_most)

    def settle(self, finished: FinishedForward, at_most: int) -> None:
        """Add a round's committed tokens to the host's lengths. Inexact ones without overlap get them a round later."""
        request, count = finished.request, len(finished.tokens)
        if request.row is None:
            return  # the request was preempted and has no row
        if self._at_once:
            self._lengths.settle([request.row], [count], at_most)
            return
        late = self._unsettled.get(request.id)
        if late is not None and late[0] == request.assignment:
            self._lengths.settle([request.row], [late[1]], late[2])
        self._unsettled[request.id] = (request.assignment, count, at_most)

    def forget(self, request: Request) -> None:
        """Drop the committed tokens of an ended request that are not yet added to the host's lengths."""
        self._unsettled.pop(request.id, None)
