"""Operands that several launches share: attention parameters, batch extents and split buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from draftmark import DTYPE_BYTES, Geometry

from ..heuristics.common import next_power_of_two

L2_BYTES = 32 << 20
"""What K and V may take of L2 (50 MB on Hopper) that programs beside each other read."""
CAUSAL, TREE, BLOCK = 0, 1, 2
"""Tails as the kernels name them; see `kernels.tile`."""


@dataclass(frozen=True)
class AttentionParams:
    """What one geometry fixes for every launch.

    Attributes:
        num_kv_heads, group, head_dim, page_size: the attention shape.
        scale: factor on q·k. cap: logits soft cap, 0 for none. window_left: -1 for none, or none that hides anything.
        pdl: attention of few rows and its merge are launched as programmatic dependents (sm_90 and newer): a grid takes
            its place while the one before it runs, and waits for that one's stores.
        kv_heads_per_tile: KV heads of the cache that are one of `num_kv_heads`; `group` is then that of all of them
            (`merge_heads`).
    """

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    scale: float
    cap: float = 0.0
    window_left: int = -1
    pdl: bool = False
    l2_keys: int = 1 << 30
    kv_heads_per_tile: int = 1

    @classmethod
    def from_geometry(cls, geometry: Geometry, on_gpu: bool) -> AttentionParams:
        """What `geometry` fixes. It may describe a GPU while the tensors are on the CPU, interpreted."""
        a = geometry.attention
        # Where all that a page table can name fits into a window, it hides nothing, and its code is not compiled in.
        hides = a.window_left < geometry.max_pages_per_req * a.page_size - 1
        return cls(
            num_kv_heads=a.num_kv_heads,
            group=a.group_size,
            head_dim=a.head_dim,
            page_size=a.page_size,
            scale=a.softmax_scale if a.softmax_scale is not None else a.head_dim**-0.5,
            cap=a.logits_soft_cap,
            window_left=a.window_left if hides else -1,
            pdl=on_gpu and geometry.device.arch >= 90,
            l2_keys=L2_BYTES // (2 * a.head_dim * DTYPE_BYTES[a.kv_dtype]),
        )

    def merge_heads(self, kv_heads_per_tile: int) -> AttentionParams:
        """The same attention, of KV heads that are each as many of these, side by side."""
        return replace(
            self,
            num_kv_heads=self.num_kv_heads // kv_heads_per_tile,
            group=self.group * kv_heads_per_tile,
            kv_heads_per_tile=kv_heads_per_tile,
        )

    @property
    def block_d(self) -> int:
        """Columns of a tile: head_dim padded to a power of two; the padding is masked, never stored."""
        return max(16, next_power_of_two(self.kv_heads_per_tile * self.head_dim))

    @property
    def window(self) -> bool:
        """Whether a window applies."""
        return self.window_left >= 0


@dataclass(frozen=True)
class BatchExtent:
    """The extent of a batch of few rows a request.

    Attributes:
        num_reqs: R. q_len, tail_len: rows and tail slots of each request; of a ragged batch, the most of any.
        num_rows: rows of the batch, padding included.
        ragged: the device says how many rows each request has.
    """

    num_reqs: int
    q_len: int
    tail_len: int
    num_rows: int
    ragged: bool = False


class SplitBuffers(NamedTuple):
    """How row tiles of EXTEND are cut by their keys, where the schedule finds that faster.

    Attributes:
        num_splits: of the line of row tiles of each KV head, 2 or more. num_ctas: that the device holds at a time.
        work: int32 ``[2 · pieces, 4]``; see `tile_schedule.write_metadata_prefill`.
        partial_out, partial_lse: float32 ``[2 · pieces · KV heads · block_m, head_dim]``, and without head_dim.
    """

    num_splits: int
    num_ctas: int
    work: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
