"""Checks of KV slots and positions: arguments of `KVPool.move` and `slots_of`."""

from __future__ import annotations

import torch

from ..errors import BatchError
from .switch import guarding, readable


def check_slots_of_pool(source: object, target: object, pool: torch.Tensor) -> None:
    """Check the slots that `KVPool.move` gets: shape, dtype and device always; their range in guard mode only.

    Args:
        pool: ``[num_layers, num_pages, page_size, …]``.

    Raises:
        BatchError: the first list of slots that does not match.
    """
    for name, slots in (("source", source), ("target", target)):
        _check_integers(name, slots, 1, torch.int64, pool.device)
    assert isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor)
    if source.shape != target.shape:
        raise BatchError(f"source has {len(source)} slots, but target has {len(target)}; pass one target per source")
    count = pool.shape[1] * pool.shape[2]
    if guarding() and readable(pool.device):
        for name, slots in (("source", source), ("target", target)):
            wrong = slots[(slots < 0) | (slots >= count)]
            if len(wrong):
                raise BatchError(
                    f"{name} has slot {int(wrong[0])}, but the pool's slots are 0 … {count - 1}; check the page table"
                )


def check_positions(page_table: object, positions: object, page_size: object) -> None:
    """Check the arguments of `slots_of`: shapes and dtypes always; the range of positions in guard mode only.

    Raises:
        BatchError: the first argument that does not match.
    """
    _check_integers("page_table", page_table, 2, torch.int32, None)
    assert isinstance(page_table, torch.Tensor)
    _check_integers("positions", positions, 2, torch.int64, page_table.device)
    assert isinstance(positions, torch.Tensor)
    if type(page_size) is not int or page_size < 1:
        raise BatchError(f"page_size is {page_size!r}, but it must be an integer >= 1; take the geometry's")
    if len(positions) != len(page_table):
        raise BatchError(
            f"positions has {len(positions)} requests, but page_table has {len(page_table)}; pass one row a request"
        )
    limit = page_table.shape[1] * page_size
    if guarding() and readable(page_table.device):
        wrong = positions[(positions < 0) | (positions >= limit)]
        if len(wrong):
            raise BatchError(
                f"positions has {int(wrong[0])}, but the page table covers 0 … {limit - 1}; size it from the geometry"
            )


def _check_integers(name: str, tensor: object, dims: int, dtype: torch.dtype, device: torch.device | None) -> None:
    kind = str(dtype).removeprefix("torch.")
    shape = "[n]" if dims == 1 else "[R, n]"
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != dims or tensor.dtype != dtype:
        got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor)
        raise BatchError(f"{name} is {got.removeprefix('torch.')}, but it must be {kind} {shape}; convert it")
    if device is not None and tensor.device != device:
        raise BatchError(f"{name} is on {tensor.device}, but the pages are on {device}; move it there")
