"""Launches of the short convolution of a layer."""

from __future__ import annotations

import torch
import triton

from draftmark import StateShape
from draftmark.runtime import ForwardBatch, Tree

from ..heuristics.common import next_power_of_two
from ..kernel_variants import kernels, select_variant
from ..launch.launcher import launch_kernel
from .sizing import ROWS_PER_BLOCK

ONE_TENSORS = ("x", "weight", "bias", "conv", "slots", "prefix_lens", "out")
CONV_TENSORS = ("x", "weight", "bias", "conv", "slots", "prefix_lens", "q_indptr", "parents", "channels", "out")
"""Kernel parameters of the tensors of `launch_convolve_one` and `launch_convolve_rows`, in order."""
CHANNELS_OF_ONE, CHANNELS_OF_ROWS, CHANNELS_ON_CPU = 512, 128, 4096
"""Channels of one program: of one row, of several rows, and in the interpreter, where a program takes milliseconds."""


def parents_of(batch: ForwardBatch) -> torch.Tensor | None:
    """Return the parents of a batch's tail slots, or None for a chain."""
    return batch.tail.parents if isinstance(batch.tail, Tree) else None


def launch_convolve_one(
    shape: StateShape,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launch `kernels.state_convolve.convolve_one`: one row of each request, the window in place."""
    block = min(CHANNELS_OF_ONE if x.is_cuda else CHANNELS_ON_CPU, next_power_of_two(shape.conv_channels))
    launch_kernel(
        select_variant(kernels.state_convolve.convolve_one, x), (triton.cdiv(shape.conv_channels, block), len(slots)),
        x, weight, weight if bias is None else bias, conv, slots, prefix_lens, out, x.stride(0), *conv.stride(),
        int(bias is not None), **constants(shape), BLOCK=block, num_warps=4,
    )  # fmt: skip


def launch_convolve_rows(
    shape: StateShape,
    extend: bool,
    max_rows: int,
    first_entry: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv: torch.Tensor,
    slots: torch.Tensor,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    parents: torch.Tensor | None,
    channels: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Launch `kernels.state_convolve.convolve_rows`: rows of prompts, or of a verify.

    Args:
        extend: the rows are prompts.
        max_rows: the most rows of a request that the host allows.
        first_entry: layer · max_reqs.
        parents: of the tail slots; None for chains.
        channels: records ``[num_layers, max_reqs, D, conv_channels]``.
    """
    block = min(CHANNELS_OF_ROWS if x.is_cuda else CHANNELS_ON_CPU, next_power_of_two(shape.conv_channels))
    nodes = channels.shape[2]
    rows = ROWS_PER_BLOCK if extend else min(ROWS_PER_BLOCK, next_power_of_two(nodes))
    grid = triton.cdiv(max_rows, rows), triton.cdiv(shape.conv_channels, block), len(slots)
    launch_kernel(
        select_variant(kernels.state_convolve.convolve_rows, x), grid,
        x, weight, weight if bias is None else bias, conv, slots, prefix_lens, q_indptr,
        slots if parents is None else parents, channels, out, x.stride(0), *conv.stride(), len(x), first_entry,
        nodes, int(parents is not None), int(bias is not None), **constants(shape), EXTEND=extend, BLOCK_ROWS=rows,
        BLOCK=block, COLUMNS=next_power_of_two(shape.conv_kernel - 1), num_warps=4,
    )  # fmt: skip


def constants(shape: StateShape) -> dict[str, int | bool]:
    """Return the constants of both kernels."""
    return {"NUM_CHANNELS": shape.conv_channels, "TAPS": shape.conv_kernel, "SILU": shape.conv_silu}
