"""Checks of the tensors of KV caches, and of KV slots and positions: arguments of `KVPool.move` and `slots_of`."""

from __future__ import annotations

import torch

from .batch.checks import check_integer, shown
from .errors import BatchError
from .guard import value_checks


def is_leading(v: torch.Tensor, k: torch.Tensor) -> bool:
    """Return True if `v` is a view of the first elements of each row of `k`."""
    same_rows = v.shape[:-1] == k.shape[:-1] and v.stride() == k.stride() and v.dtype == k.dtype
    return same_rows and v.shape[-1] <= k.shape[-1] and v.data_ptr() == k.data_ptr()


def check_rows(rows: object, value_dim: object) -> None:
    """Check the one buffer of `KVCache.latent`.

    Raises:
        BatchError: the first argument that does not fit.
    """
    if not isinstance(rows, torch.Tensor) or rows.dim() != 3:
        raise BatchError(
            f"rows are {shown(rows)}, but a latent cache has rows [num_pages, page_size, head_dim]; pass one such "
            "tensor, or a tuple of two"
        )
    check_integer("value_dim", value_dim, 1, rows.shape[-1], "pass AttentionShape.value_width")


def check_parts(parts: tuple[object, ...], value_dim: object) -> None:
    """Check the two buffers of `KVCache.latent`.

    Raises:
        BatchError: the first argument that does not fit.
    """
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.dim() == 3]
    alike = {(part.dtype, part.device, part.shape[:-1]) for part in tensors}
    if len(parts) != 2 or len(tensors) != 2 or len(alike) != 1 or not all(part.shape[-1] for part in tensors):
        raise BatchError(
            f"rows are ({', '.join(map(shown, parts))}), but two buffers are value parts [num_pages, page_size, "
            "value_dim] and rests [num_pages, page_size, head_dim - value_dim] of one dtype and device; allocate both "
            "with the same pages"
        )
    width = tensors[0].shape[-1]
    if value_dim is not None and value_dim != width:
        raise BatchError(
            f"value_dim is {value_dim!r}, but the value parts have {width} elements; leave it out for two buffers"
        )


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
    if guard := value_checks(pool.device):
        guard.check_slots(source, target, pool.shape[1] * pool.shape[2])


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
    if guard := value_checks(page_table.device):
        guard.check_positions(positions, page_table.shape[1] * page_size)


def _check_integers(name: str, tensor: object, dims: int, dtype: torch.dtype, device: torch.device | None) -> None:
    want = f"{str(dtype).removeprefix('torch.')} {'[n]' if dims == 1 else '[R, n]'}"
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != dims or tensor.dtype != dtype:
        got = shown(tensor).removeprefix("a tensor ")
        raise BatchError(f"{name} is {got}, but it must be {want}; convert it")
    if device is not None and tensor.device != device:
        raise BatchError(f"{name} is on {tensor.device}, but the pages are on {device}; move it there")
