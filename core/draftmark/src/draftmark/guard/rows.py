"""Checks of the tensors of a latent layer's cache."""

from __future__ import annotations

import torch

from ..batch.checks import shown
from ..errors import BatchError

ROWS = "[num_pages, page_size, head_dim]"


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
        remedy = "pass one such tensor, or a tuple of two"
        raise BatchError(f"rows are {shown(rows)}, but a latent cache has rows {ROWS}; {remedy}")
    if type(value_dim) is not int or not 1 <= value_dim <= rows.shape[-1]:
        raise BatchError(
            f"value_dim is {value_dim!r}, but the value is the first 1 … {rows.shape[-1]} elements of a row; pass "
            "AttentionShape.value_width"
        )


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
