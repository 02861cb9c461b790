"""Sequence lengths: one owner, everything else derived.

Engines keep the length of a request three times, on the device, on the host, and as a sum, and lose when one
is not moved (sglang#26753). Here the device tensor is the fact. `SequenceLengths.advance` is the only way to
move it; the host's view is a value derived when asked for, and says by its type how much it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import LengthsError


@dataclass(frozen=True)
class Exact:
    """The host knows every length."""

    lens: tuple[int, ...]

    def upper_bound(self) -> tuple[int, ...]:
        """Return a length per request that the device does not exceed."""
        return self.lens


@dataclass(frozen=True)
class UpperBound:
    """The host knows lengths that the device does not exceed (it may be a round ahead of the host)."""

    lens: tuple[int, ...]

    def upper_bound(self) -> tuple[int, ...]:
        """Return a length per request that the device does not exceed."""
        return self.lens


@dataclass(frozen=True)
class Unknown:
    """The host knows only how many requests there are, and the limit all of them keep."""

    num_reqs: int
    bound: int
    """`Geometry.max_prefix_len`."""

    def upper_bound(self) -> tuple[int, ...]:
        """Return a length per request that the device does not exceed."""
        return (self.bound,) * self.num_reqs


HostLengths = Exact | UpperBound | Unknown
"""What the host knows of prefix lengths. Always present, always able to give an upper bound (sglang#26738)."""


class SequenceLengths:
    """Committed lengths of all rows an engine can hold; the only owner of this fact.

    Rows 0 … max_rows-1 are the engine's request rows. As many null rows follow, from `first_null_row` on:
    entry i of a padded batch points at null row ``first_null_row + i``, whose length is 0 and never moves.

    The device half of `advance` is capturable; the host half is plain Python and must follow every replay.
    Between an advance and its `settle` the host knows a bound, not the length.

    Attributes:
        device: int32 ``[2 · max_rows]``, KV tokens committed. Owned here; read-only for everybody else.
        first_null_row: max_rows.
    """

    def __init__(self, max_rows: int, max_prefix_len: int, device: torch.device | str) -> None:
        self.device = torch.zeros(2 * max_rows, dtype=torch.int32, device=device)
        self.first_null_row = max_rows
        self._bound = max_prefix_len
        self._settled = [0] * max_rows
        self._in_flight = [0] * max_rows

    def advance(self, rows: torch.Tensor, by: torch.Tensor) -> None:
        """The device's half: ``device[rows] += by``, except for null rows. Capturable, no host read.

        Args:
            rows: int64 ``[n]``, distinct but for null rows, which may repeat.
            by: integers ``[n]``, tokens committed, >= 0.
        """
        self.device.index_add_(0, rows, torch.where(rows < self.first_null_row, by, 0).to(torch.int32))

    def dispatched(self, rows: Sequence[int], at_most: int) -> None:
        """The host's half: each row was advanced by at most `at_most` tokens that the host has not seen."""
        if at_most < 0:
            raise LengthsError(f"{at_most} tokens cannot be in flight; dispatch the round's tail length, >= 0")
        for row in rows:
            self._request_row(row)
            self._in_flight[row] += at_most

    def settle(self, rows: Sequence[int], by: Sequence[int], at_most: int) -> None:
        """The host's half: the advance that was dispatched with `at_most` turned out to be `by`, row for row.

        Raises:
            LengthsError: more than was in flight.
        """
        for row, count in zip(rows, by, strict=True):
            self._request_row(row)
            if not 0 <= count <= at_most <= self._in_flight[row]:
                raise LengthsError(
                    f"row {row} settles {count} tokens of at most {at_most}, but {self._in_flight[row]} are in "
                    "flight; call dispatched() once for every replay and settle() once for every dispatch"
                )
            self._in_flight[row] -= at_most
            self._settled[row] += count

    def reset(self, row: int) -> None:
        """Empty the row of a request that leaves, on both sides."""
        self._request_row(row)
        self.device[row].zero_()  # an assignment would copy the number from the host, and wait
        self._settled[row] = self._in_flight[row] = 0

    # -- the host's view, derived -------------------------------------------------------------------------

    def exact(self, rows: Sequence[int]) -> Exact:
        """Return the lengths of `rows`.

        Raises:
            LengthsError: something is in flight; the caller settles it first (one named wait a round).
        """
        late = [row for row in rows if self._in_flight[self._request_row(row)]]
        if late:
            raise LengthsError(
                f"rows {late} have tokens in flight, so no exact length is known; settle() them first, "
                "or use a backend that takes an upper bound"
            )
        return Exact(tuple(self._settled[row] for row in rows))

    def upper_bound(self, rows: Sequence[int]) -> UpperBound:
        """Return what the host last saw plus everything in flight, within the geometry's limit."""
        seen = (self._settled[self._request_row(row)] + self._in_flight[row] for row in rows)
        return UpperBound(tuple(min(length, self._bound) for length in seen))

    def unknown(self, rows: Sequence[int]) -> Unknown:
        """Return the limit alone."""
        return Unknown(len(rows), self._bound)

    def _request_row(self, row: int) -> int:
        if not 0 <= row < self.first_null_row:
            raise LengthsError(
                f"row {row} is not a request row (0 … {self.first_null_row - 1}); null rows stay empty by themselves"
            )
        return row
