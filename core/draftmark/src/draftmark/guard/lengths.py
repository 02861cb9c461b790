"""Checks of the arguments of `SequenceLengths.advance`."""

from __future__ import annotations

import torch

from ..errors import LengthsError
from .switch import guarding, readable


def check_advance(lengths: torch.Tensor, request_rows: int, limit: int, rows: object, by: object) -> None:
    """Check rows and token counts: shape, dtype and device always; their values in guard mode only.

    Args:
        lengths: int32 ``[2 · request_rows]``, the committed lengths before the advance.
        limit: the largest length.

    Raises:
        LengthsError: the first argument that does not match.
    """
    for name, tensor in (("rows", rows), ("by", by)):
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1 or tensor.dtype.is_floating_point:
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise LengthsError(f"{name} is {got.removeprefix('torch.')}, but it must be integers [n]; pass a tensor")
        if tensor.device != lengths.device:
            raise LengthsError(f"{name} is on {tensor.device}, but the lengths are on {lengths.device}; move it there")
    assert isinstance(rows, torch.Tensor) and isinstance(by, torch.Tensor)
    if rows.dtype is not torch.int64:
        raise LengthsError(f"rows is {str(rows.dtype).removeprefix('torch.')}, but it must be int64; convert it")
    if rows.shape != by.shape:
        raise LengthsError(f"{len(rows)} rows advance by {len(by)} counts; pass one count for each row")
    if guarding() and readable(lengths.device):
        _check_values(lengths.tolist(), request_rows, limit, rows.tolist(), by.tolist())


def _check_values(lengths: list[int], request_rows: int, limit: int, rows: list[int], by: list[int]) -> None:
    seen: set[int] = set()
    for row, count in zip(rows, by, strict=True):
        if not 0 <= row < len(lengths):
            raise LengthsError(f"rows has {row}, but rows are 0 … {len(lengths) - 1}; take them from this object")
        if row >= request_rows:
            continue
        if row in seen:
            raise LengthsError(f"rows has {row} twice, but request rows are distinct; advance each row once")
        seen.add(row)
        if not 0 <= count <= limit - lengths[row]:
            raise LengthsError(
                f"row {row} advances by {count} from {lengths[row]}, but lengths are 0 … {limit} and never shrink; "
                "advance by the tokens that the round committed"
            )
