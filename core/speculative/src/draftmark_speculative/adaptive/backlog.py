"""What the head has not read yet: tokens and features of plain rounds, until drafting resumes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..request import Request


class Backlog:
    """Rows for the head by state row, in order of position. The device appends, the host counts along.

    A plain round adds one row to each of its requests, so the host knows how many there are without asking. A request
    whose rows were given up has *lapsed*: the head lacks a part of its text, so nothing is drafted for it until it is
    prefilled anew.

    Attributes:
        room: rows that each request has.

    Args:
        max_reqs: request rows of the state; all null rows share one entry, which nothing reads.
        width: of the target's features.
    """

    def __init__(self, max_reqs: int, room: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.room, self._null = room, max_reqs
        self._features = torch.zeros((max_reqs + 1) * room, width, dtype=dtype, device=device)
        self._tokens = torch.zeros((max_reqs + 1) * room, dtype=torch.int64, device=device)
        # Where each row's next entry goes, and the last place it may be: the null row has but one.
        self._first = torch.arange(max_reqs + 1, dtype=torch.int64, device=device) * room
        self._last = self._first + (room - 1)
        self._last[max_reqs] = self._first[max_reqs]
        self._next = self._first.clone()
        self._lapsed = torch.zeros(max_reqs + 1, dtype=torch.bool, device=device)
        # By request id: the row's assignment, and the rows that wait, or None of a request that has lapsed.
        self._waiting: dict[int, tuple[int, int | None]] = {}

    def append(self, rows: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor) -> None:
        """Add one row a request, the device's half. Captured.

        Args:
            rows: int64 ``[R]``, state rows.
            tokens: int64 ``[R]``, the token behind each row's own; features ``[R, width]``, of the row's own.
        """
        entry = rows.clamp(max=self._null)
        at = self._next.index_select(0, entry)
        self._tokens.index_copy_(0, at, tokens)
        self._features.index_copy_(0, at, features)
        self._next.index_copy_(0, entry, at + 1)
        torch.minimum(self._next, self._last, out=self._next)

    def counted(self, requests: Sequence[Request]) -> None:
        """Note that a plain round of these requests is sent, the host's half."""
        self._waiting = {r.id: (r.assignment, None if self.lapsed(r) else self.waiting(r) + 1) for r in requests}

    def caught_up(self, requests: Sequence[Request]) -> None:
        """Note that nothing waits for these requests any more, the host's half."""
        for request in requests:
            if not self.lapsed(request):
                self._waiting.pop(request.id, None)

    def waiting(self, request: Request) -> int:
        """Rows that wait for a request; 0 for one that has been prefilled anew, or has lapsed."""
        assignment, count = self._waiting.get(request.id, (request.assignment, 0))
        return count or 0 if assignment == request.assignment else 0

    def lapsed(self, request: Request) -> bool:
        """Whether rows of a request were given up since its prefill."""
        assignment, count = self._waiting.get(request.id, (request.assignment, 0))
        return count is None and assignment == request.assignment

    def lapse(self, requests: Sequence[Request], rows: torch.Tensor) -> None:
        """Give up what waits for requests in state rows `rows`, on both sides."""
        self._waiting |= {r.id: (r.assignment, None) for r in requests}
        self._lapsed.index_fill_(0, rows, True)

    def current(self, rows: torch.Tensor) -> torch.Tensor:
        """bool, whether the head has read the text of a state row, but for what waits. Capturable."""
        return ~self._lapsed.index_select(0, rows.clamp(max=self._null))

    def full(self, requests: Sequence[Request]) -> bool:
        """Whether some request has no room for one row more."""
        return any(self.waiting(request) >= self.room for request in requests)

    def read(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and features at places; those of state row r begin at ``r * room``."""
        return self._tokens.index_select(0, places), self._features.index_select(0, places)

    def forget(self, rows: torch.Tensor) -> None:
        """Empty the entries of state rows that were read or prefilled, the device's half."""
        self._next.index_copy_(0, rows, self._first.index_select(0, rows))
        self._lapsed.index_fill_(0, rows, False)

    def clear(self) -> None:
        """Forget all, on both sides."""
        self._waiting = {}
        self._next.copy_(self._first)
        self._lapsed.zero_()
        self._features.zero_()
