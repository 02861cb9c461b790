"""Launches of the plugin's two Triton kernels: compiled on a GPU, in Triton's interpreter on CPU tensors.

The host computes with integers from shapes, which a capture freezes. No function reads the device or allocates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton

from . import kernels, levels
from .sizing import INDPTR, LAST_PAGE, MASK, MASK_INDPTR, PAGES, SLOTS, TAIL_INDPTR, TAIL_LAST_PAGE, TAIL_SLOTS

BLOCK = 256
BLOCK_BYTES = 128
LANES = 1 << 16
"""Elements of the interpreter's largest tile: one operation then takes a few milliseconds and a few MiB."""


@dataclass(frozen=True)
class Forward:
    """Holds the integers of one forward. They are launch arguments, so a captured graph keeps their values.

    Attributes:
        page_size: tokens per page.
        window_left: keys that a row sees to its left; -1 for all.
        longest: rows of the request with the most rows.
        tail_len: tail slots (new tokens, draft tokens included) of each request; 0 in a ragged batch, in which a
            request's tail is its rows.
        head_len: prefix tokens in the masked pass.
        ragged: true for EXTEND.
        masked: true for a forward in two passes.
    """

    page_size: int
    window_left: int
    longest: int
    tail_len: int
    head_len: int
    ragged: bool
    masked: bool


def write_indices(
    forward: Forward,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    mask: torch.Tensor | None,
    depth: torch.Tensor | None,
    buffers: dict[str, torch.Tensor],
) -> None:
    """Write every index buffer of one forward, in one launch. See `kernels.write_indices`.

    Args:
        mask: masks of the draft trees; None for chains.
        depth: depths of the draft trees' nodes; None for chains.
        buffers: the buffers that this forward writes, by name.
    """
    compiled, requests = prefix_lens.is_cuda, prefix_lens.shape[0]
    tokens = forward.head_len + forward.tail_len
    widest = max(page_table.shape[1], forward.longest, tokens)
    widest_bytes = levels.mask_bytes(forward.longest, tokens) if forward.masked else 1
    group, block, block_bytes = (1, BLOCK, BLOCK_BYTES) if compiled else _large_blocks(requests, widest, widest_bytes)
    blocks = max(-(-widest // block), -(-widest_bytes // block_bytes))
    idle = buffers[SLOTS]
    kernel(kernels, "write_indices", compiled)[(-(-requests // group), blocks)](
        (prefix_lens, q_indptr, page_table),
        (prefix_lens if mask is None else mask, prefix_lens if depth is None else depth),
        buffers[SLOTS], tuple(buffers[name] for name in (INDPTR, PAGES, LAST_PAGE)),
        tuple(buffers.get(name, idle) for name in (TAIL_INDPTR, TAIL_SLOTS, TAIL_LAST_PAGE, MASK, MASK_INDPTR)),
        requests, forward.tail_len, forward.head_len, forward.window_left, page_table.stride(0),
        0 if mask is None else mask.stride(0),
        PAGE=forward.page_size, RAGGED=forward.ragged, MASKED=forward.masked, TREE=mask is not None,
        WINDOW=forward.window_left >= 0, BLOCK_R=max(16, triton.next_power_of_2(requests)), REQS=group,
        BLOCK=block, BLOCK_BYTES=block_bytes,
    )  # fmt: skip


def _large_blocks(requests: int, widest: int, widest_bytes: int) -> tuple[int, int, int]:
    """Return (requests, elements, mask bytes) of one program in Triton's interpreter, where large programs are fast."""
    block = min(triton.next_power_of_2(widest), LANES)
    block_bytes = min(triton.next_power_of_2(widest_bytes), LANES // 8)
    room = LANES // max(block, 8 * block_bytes)
    return min(triton.next_power_of_2(requests), max(1, room)), block, block_bytes


def write_rows(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store new keys and values at their slots. See `kernels.write_rows`."""
    rows, heads, dim = k.shape
    kernel(kernels, "write_rows", k.is_cuda)[(rows,)](
        k, v, k_cache, v_cache, slots, *k.stride()[:2], *v.stride()[:2],
        NUM_HEADS=heads, HEAD_DIM=dim, BLOCK=triton.next_power_of_2(heads * dim),
    )  # fmt: skip


@cache
def kernel(module: ModuleType, name: str, compiled: bool) -> Any:
    """Return a kernel of a module of plain functions: compiled for a GPU, or in Triton's interpreter."""
    function: Callable[..., Any] = getattr(module, name)
    if not compiled:
        from triton.runtime.interpreter import InterpretedFunction

        return InterpretedFunction(function)
    # The strides of latent rows are equal in every call, and Triton makes wide loads only for strides that it knows.
    varying = ("num_", "stride_") if module is kernels else ("num_", "stride_table", "stride_mask")
    numbers = [
        one for one in inspect.signature(function).parameters
        if one.startswith(varying) or one in ("tail_len", "head_len", "window_left")
    ]  # fmt: skip
    # By default Triton compiles a kernel again when an integer is 1 or a multiple of 16, here during serving.
    return triton.jit(function, do_not_specialize=numbers)
