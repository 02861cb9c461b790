"""What the head has not read yet: tokens and features of plain rounds, until drafting resumes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..request import Request


class Backlog:
    """Rows for the head by state row, in order of position. The device appends, the host counts along.

    A plain round adds one row to each of its requests, so the host knows how many there are without asking.

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
        self._lens = torch.zeros(max_reqs + 1, dtype=torch.int64, device=device)
        # By request id: the row's assignment, and the rows that wait.
        self._waiting: dict[int, tuple[int, int]] = {}

    def append(self, rows: torch.Tensor, tokens: torch.Tensor, features: torch.Tensor) -> None:
        """Add one row a request, the device's half. Captured.

        Args:
            rows: int64 ``[R]``, state rows.
            tokens: int64 ``[R]``, the token behind each row's own; features ``[R, width]``, of the row's own.
        """
        entry = rows.clamp(max=self._null)
        at = entry * self.room + self._lens.index_select(0, entry).clamp(max=self.room - 1)
        self._tokens.index_copy_(0, at, tokens)
        self._features.index_copy_(0, at, features)
        self._lens.index_add_(0, entry, torch.ones_like(entry))
        self._lens[self._null :].zero_()

    def counted(self, requests: Sequence[Request]) -> None:
        """Note that a plain round of these requests is sent, the host's half."""
        self._waiting = {r.id: (r.assignment, self.waiting(r) + 1) for r in requests}

    def caught_up(self, requests: Sequence[Request]) -> None:
        """Note that nothing waits for these requests any more, the host's half."""
        for request in requests:
            self._waiting.pop(request.id, None)

    def waiting(self, request: Request) -> int:
        """Rows that wait for a request; 0 for one that has been prefilled anew."""
        assignment, count = self._waiting.get(request.id, (request.assignment, 0))
        return count if assignment == request.assignment else 0

    def full(self, requests: Sequence[Request]) -> bool:
        """Whether some request has no room for one row more."""
        return any(self.waiting(request) >= self.room for request in requests)

    def places(self, request: Request) -> list[int]:
        """Where the rows of a request lie, for `read`."""
        assert request.row is not None, f"request {request.id} has no row"
        return [request.row * self.room + i for i in range(self.waiting(request))]

    def read(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and features at places."""
        return self._tokens.index_select(0, places), self._features.index_select(0, places)

    def forget(self, rows: torch.Tensor) -> None:
        """Empty the entries of state rows, the device's half."""
        self._lens.index_fill_(0, rows, 0)

    def clear(self) -> None:
        """Forget all, on both sides."""
        self._waiting = {}
        self._lens.zero_()
        self._features.zero_()
