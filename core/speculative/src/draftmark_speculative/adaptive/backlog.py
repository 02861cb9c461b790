"""Buffer of the tokens and features from rounds without drafts, until the draft head processes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..request import Request


class Backlog:
    """Holds the tokens and features that the draft head has not processed yet, for each request in order of position.

    A plain round (without drafts) adds one row to each request. The device appends rows, and the host counts them
    without a copy from the device. A request with dropped rows has *lapsed*: the head lacks a part of its text. Nothing
    is drafted for such a request until it is prefilled again.

    Attributes:
        room: rows that fit for each request.

    Args:
        max_reqs: number of request rows of the state; all null rows share one entry, which nothing reads.
        width: width of the target's features.
    """

    def __init__(self, max_reqs: int, room: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.room, self._null = room, max_reqs
        self._features = torch.zeros((max_reqs + 1) * room, width, dtype=dtype, device=device)
        self._tokens = torch.zeros((max_reqs + 1) * room, dtype=torch.int64, device=device)
        # First, last and next free entry of each state row. All null rows share one entry, because nothing reads it.
        self._first = torch.arange(max_reqs + 1, dtype=torch.int64, device=device) * room
        self._last = self._first + (room - 1)
        self._last[max_reqs] = self._first[max_reqs]
        self._next = self._first.clone()
        self._lapsed = torch.zeros(max_reqs + 1, dtype=torch.bool, device=device)
        # Maps a request id to (row assignment, number of waiting rows). None: the request was dropped.
        self._waiting: dict[int, tuple[int, int | None]] = {}

    def append(self, rows: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor) -> None:
        """Append one row for each request, on the device. Captured.

        Args:
            rows: int64 ``[R]``, state rows.
            tokens: int64 ``[R]``, the token that follows each row's own token.
            features: ``[R, width]``, features of each row's own token.
        """
        entry = rows.clamp(max=self._null)
        at = self._next.index_select(0, entry)
        self._tokens.index_copy_(0, at, tokens)
        self._features.index_copy_(0, at, features)
        self._next.index_copy_(0, entry, at + 1)
        torch.minimum(self._next, self._last, out=self._next)

    def counted(self, requests: Sequence[Request]) -> None:
        """Add one waiting row to the host's count of each request, for a plain round that is enqueued."""
        self._waiting = {r.id: (r.assignment, None if self.lapsed(r) else self.waiting(r) + 1) for r in requests}

    def caught_up(self, requests: Sequence[Request]) -> None:
        """Set the host's count of waiting rows to 0 for these requests. Lapsed requests stay lapsed."""
        for request in requests:
            if not self.lapsed(request):
                self._waiting.pop(request.id, None)

    def waiting(self, request: Request) -> int:
        """Return the number of waiting rows of a request; 0 after a new prefill or a lapse."""
        assignment, count = self._waiting.get(request.id, (request.assignment, 0))
        return count or 0 if assignment == request.assignment else 0

    def lapsed(self, request: Request) -> bool:
        """Return True if the request has lapsed: some of its rows were dropped since its prefill."""
        assignment, count = self._waiting.get(request.id, (request.assignment, 0))
        return count is None and assignment == request.assignment

    def lapse(self, requests: Sequence[Request], rows: torch.Tensor) -> None:
        """Drop the waiting rows of `requests` and mark them as lapsed; `rows` contains their state rows."""
        self._waiting |= {r.id: (r.assignment, None) for r in requests}
        self._lapsed.index_fill_(0, rows, True)

    def current(self, rows: torch.Tensor) -> torch.Tensor:
        """Return bool ``[R]``: False if the request in the state row has lapsed (rows were dropped). Capturable."""
        return ~self._lapsed.index_select(0, rows.clamp(max=self._null))

    def full(self, requests: Sequence[Request]) -> bool:
        """Return True if some request has no room for another row."""
        return any(self.waiting(request) >= self.room for request in requests)

    def read(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and features at `places`; the entries of state row r start at ``r * room``."""
        return self._tokens.index_select(0, places), self._features.index_select(0, places)

    def forget(self, rows: torch.Tensor) -> None:
        """Empty the device entries of state rows, after the head has read them or the request was prefilled."""
        self._next.index_copy_(0, rows, self._first.index_select(0, rows))
        self._lapsed.index_fill_(0, rows, False)

    def clear(self) -> None:
        """Drop all rows, on the host and on the device."""
        self._waiting = {}
        self._next.copy_(self._first)
        self._lapsed.zero_()
        self._features.zero_()
