"""A forward whose tokens are on their way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from draftmark.transfer import AsyncHostCopy

from .request import Request


@dataclass(frozen=True)
class FinishedForward:
    """What a forward brought one request."""

    request: Request
    tokens: list[int]


class PendingForward:
    """The results of one forward, from the moment it is enqueued.

    Attributes:
        at_most: tokens that it committed for each request at most; 0 for a prefill, whose count the host knows.
    """

    def __init__(
        self, requests: Sequence[Request], tokens: torch.Tensor, counts: torch.Tensor | None, at_most: int
    ) -> None:
        """
        Args:
            tokens: int64 ``[n, m]``, a row per request.
            counts: int64 ``[n]``, how many of them are tokens; None means all.
        """
        self.at_most = at_most
        self._requests = list(requests)
        self._arrival = AsyncHostCopy([tokens] if counts is None else [tokens, counts])
        for request in requests:
            request.in_flight += 1

    def land(self) -> Iterator[FinishedForward]:
        """Wait for the results; once."""
        tokens, *counts = self._arrival.wait()
        lengths = counts[0] if counts else [len(row) for row in tokens]
        for request, row, count in zip(self._requests, tokens, lengths, strict=True):
            request.in_flight -= 1
            yield FinishedForward(request, row[:count])
