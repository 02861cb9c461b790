"""Committed sequence lengths, with one owner: the device tensor of `SequenceLengths`.

Engines keep the length of a request three times: on the device, on the host and as a sum. They fail when one of the
three is not updated (sglang#26753). Here the device tensor is the only source; only `SequenceLengths.advance` increases
it. The host's view is computed on request; its type states its precision: `Exact`, `UpperBound` or `Unknown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .devices import present_device
from .errors import LengthsError
from .guard import value_checks


@dataclass(frozen=True)
class _Lengths:
    lens: tuple[int, ...]

    def upper_bound(self) -> tuple[int, ...]:
        """Return an upper bound of each request's prefix length on the device, in tokens."""
        return self.lens


class Exact(_Lengths):
    """Exact prefix lengths of live requests on the host; `lens[r]` equals the device's value, in tokens."""


class UpperBound(_Lengths):
    """Upper bounds of prefix lengths, in tokens; the device may be one step ahead of the host."""


@dataclass(frozen=True)
class Unknown:
    """Prefix lengths unknown to the host, except for one common upper bound of all `num_reqs` live requests."""

    num_reqs: int
    bound: int
    """Tokens that each request has at most: `Geometry.max_prefix_len`."""

    def upper_bound(self) -> tuple[int, ...]:
        """Return an upper bound of each request's prefix length on the device, in tokens."""
        return (self.bound,) * self.num_reqs


HostLengths = Exact | UpperBound | Unknown
"""The host's view of prefix lengths. A batch always has one, and it always has an upper bound (sglang#26738)."""


class SequenceLengths:
    """Committed lengths of all requests in an engine; the only owner of this state.

    Rows 0 … max_rows-1 are the engine's request rows. An equal number of null rows follows, starting at
    `first_null_row`. Padding entry i of a batch uses null row ``first_null_row + i``, which always has length 0.

    `advance` updates the device and is capturable. `dispatched` and `settle` are plain Python on the host and must
    follow every replay. Between `dispatched` and `settle` the host has a bound, not the length.

    Attributes:
        device: int32 ``[2 · max_rows]``, committed KV tokens. Owned by this object; read-only for all other code.
        first_null_row: index of the first null row, equal to max_rows.
    """

    def __init__(self, max_rows: int, max_prefix_len: int, device: torch.device | str) -> None:
        for name, value in (("max_rows", max_rows), ("max_prefix_len", max_prefix_len)):
            if type(value) is not int or value < 1:
                raise LengthsError(f"{name} is {value!r}, but it must be an integer >= 1; take it from the geometry")
        device = present_device("SequenceLengths", device)
        self.device = torch.zeros(2 * max_rows, dtype=torch.int32, device=device)
        self.first_null_row = max_rows
        self._bound = max_prefix_len
        self._settled = [0] * max_rows
        self._in_flight = [0] * max_rows

    def advance(self, rows: torch.Tensor, by: torch.Tensor) -> None:
        """Add to the lengths on the device: ``device[rows] += by``, except for null rows. Capturable, no host read.

        Args:
            rows: int64 ``[n]``; request rows are distinct, null rows may repeat.
            by: integers ``[n]``, tokens committed, >= 0.

        Raises:
            LengthsError: a tensor has a wrong form; with DRAFTMARK_GUARD=1 also a wrong row or count.
        """
        check_advance(rows, by, self.device.device)
        if guard := value_checks(self.device.device):
            guard.check_advance(self.device, self.first_null_row, self._bound, rows, by)
        self.device.index_add_(0, rows, torch.where(rows < self.first_null_row, by, 0).to(torch.int32))

    def dispatched(self, rows: Sequence[int], at_most: int) -> None:
        """Record on the host that an `advance` of up to `at_most` tokens per row was enqueued.

        Raises:
            LengthsError: `at_most` is negative, or a row is not a request row.
        """
        if type(at_most) is not int or at_most < 0:
            raise LengthsError(f"{at_most!r} tokens cannot be in flight; dispatch the round's tail length, >= 0")
        for row in rows:
            self._request_row(row)
            self._in_flight[row] += at_most

    def settle(self, rows: Sequence[int], by: Sequence[int], at_most: int) -> None:
        """Record on the host the result of a dispatched `advance`: `by` tokens, one number per row.

        Args:
            rows: request rows.
            by: tokens that the device committed for each row, 0 … at_most.
            at_most: the bound that was given to `dispatched`.

        Raises:
            LengthsError: `by` exceeds `at_most`, or `at_most` exceeds the tokens in flight.
        """
        if len(rows) != len(by):
            raise LengthsError(f"{len(rows)} rows settle {len(by)} counts; pass one count for each row")
        for row, count in zip(rows, by, strict=True):
            self._request_row(row)
            if type(count) is not int or type(at_most) is not int:
                raise LengthsError(f"row {row} settles {count!r} of {at_most!r} tokens; pass integers, e.g. tolist()")
            if not 0 <= count <= at_most <= self._in_flight[row]:
                raise LengthsError(
                    f"row {row} settles {count} tokens of at most {at_most}, but {self._in_flight[row]} are in "
                    "flight; call dispatched() once for every replay and settle() once for every dispatch"
                )
            self._in_flight[row] -= at_most
            self._settled[row] += count

    def reset(self, row: int) -> None:
        """Set the length of a row to 0 on device and host, when its request ends."""
        self._request_row(row)
        self.device[row].zero_()  # an assignment would copy the number from the host and synchronize
        self._settled[row] = self._in_flight[row] = 0

    # -- the host's view, derived -------------------------------------------------------------------------

    def exact(self, rows: Sequence[int]) -> Exact:
        """Return the exact lengths of `rows`.

        Raises:
            LengthsError: tokens are in flight; the caller calls `settle` first, and waits for the device once per step.
        """
        late = [row for row in rows if self._in_flight[self._request_row(row)]]
        if late:
            raise LengthsError(
                f"rows {late} have tokens in flight, so their exact lengths are not known; call settle() first, "
                "or use a backend that accepts an upper bound"
            )
        return Exact(tuple(self._settled[row] for row in rows))

    def upper_bound(self, rows: Sequence[int]) -> UpperBound:
        """Return the settled length of each row plus its tokens in flight, clamped to the geometry's limit."""
        seen = (self._settled[self._request_row(row)] + self._in_flight[row] for row in rows)
        return UpperBound(tuple(min(length, self._bound) for length in seen))

    def unknown(self, rows: Sequence[int]) -> Unknown:
        """Return only the number of rows and the geometry's limit."""
        return Unknown(len(rows), self._bound)

    def _request_row(self, row: int) -> int:
        if type(row) is not int or not 0 <= row < self.first_null_row:
            raise LengthsError(
                f"row {row!r} is not a request row (0 … {self.first_null_row - 1}); null rows always have length 0"
            )
        return row


def check_advance(rows: object, by: object, device: torch.device) -> None:
    """Raise `LengthsError` unless `SequenceLengths.advance` gets integers ``[n]`` for each of n rows, on `device`."""
    for name, tensor in (("rows", rows), ("by", by)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1 or tensor.dtype.is_floating_point:
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise LengthsError(f"{name} is {got.removeprefix('torch.')}, but it must be integers [n]; pass a tensor")
        if tensor.device != device:
            raise LengthsError(f"{name} is on {tensor.device}, but the lengths are on {device}; move it there")
    assert isinstance(rows, torch.Tensor) and isinstance(by, torch.Tensor)
    if rows.dtype is not torch.int64:
        raise LengthsError(f"rows is {str(rows.dtype).removeprefix('torch.')}, but it must be int64; convert it")
    if rows.shape != by.shape:
        raise LengthsError(f"{len(rows)} rows advance by {len(by)} counts; pass one count for each row")
