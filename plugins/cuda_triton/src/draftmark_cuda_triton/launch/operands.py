"""Operands that several launches share: tensors by name, attention parameters, batch extents and split buffers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from draftmark import FP8_DS_MLA, Geometry, Mode

from ..heuristics.common import next_power_of_two

L2_BYTES = 32 << 20
"""Bytes of L2 (50 MB on Hopper) that K and V of concurrently running CTAs may occupy."""
CAUSAL, TREE, BLOCK = 0, 1, 2
"""Kinds of tail visibility, equal to the constants of `kernels.tile`."""


class Operands(NamedTuple):
    """Holds the tensors of one attention call that change from layer to layer or step to step.

    The fields are kernel parameters, so `Operands._fields` names the tensors for `relaunch.RelaunchCache`. A repeated
    launch needs addresses only, so this object is made when launches are recorded, not in every call.

    Attributes:
        q, out: ``[rows, query heads, elements]``, the elements of a head contiguous.
        k_source, v_source: K and V ``[pages, P, KV heads, elements]``; of a latent layer both parts of the rows.
        k_scale, v_scale: float32 ``[1]``, scales of e4m3 K and V; None for 1.
        sinks: float32 ``[query heads]``, attention sinks, or None; see `KVCache`.
        lse: float32 ``[rows, query heads]``, output; None if it is not needed.
        prefix_lens, page_table: int32 ``[R]`` and ``[R, pages]``.
        q_indptr: int32 ``[R + 1]``, first row of each request; None for uniform batches.
        tail_mask, tail_depth: ancestor mask and depths of a draft tree; None if the new tokens are a chain or a block.
    """

    q: torch.Tensor
    k_source: torch.Tensor
    v_source: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    prefix_lens: torch.Tensor
    q_indptr: torch.Tensor | None
    page_table: torch.Tensor
    tail_mask: torch.Tensor | None = None
    tail_depth: torch.Tensor | None = None


class ChosenOperands(NamedTuple):
    """Holds the tensors of one attention call over chosen keys; the shared fields are those of `Operands`.

    Attributes:
        chosen_slots, chosen_counts: int32 ``[rows, chosen_width]`` and ``[rows]``, the lists.
        q_indptr: int32 ``[R + 1]``; rows from q_indptr[R] on have no keys.
    """

    q: torch.Tensor
    k_source: torch.Tensor
    v_source: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    chosen_slots: torch.Tensor
    chosen_counts: torch.Tensor
    q_indptr: torch.Tensor


class PartialResults(NamedTuple):
    """Holds the schedule and the partial results of split requests or row tiles.

    Attributes:
        work: int32 ``[2 · num_splits, 4]``, the schedule.
        out: float32 ``[partial rows, value width]``.
        lse: float32 ``[partial rows]``, base 2.
    """

    work: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class AttentionParams:
    """Holds the attention parameters that are equal in every launch of one geometry.

    Attributes:
        num_kv_heads, head_dim, page_size: attention shape.
        group: query heads of a KV head.
        scale: factor on q·k.
        cap: soft cap of the logits, 0 for none.
        window_left: tokens that a row sees to its left; -1 without a window, or if the window hides no token.
        pdl: launch attention and combine as programmatic dependents (sm_90 and newer). A dependent grid starts while
            the previous grid runs, and waits for its stores.
        l2_keys: number of keys of one KV head (K and V) that fit into L2_BYTES.
        kv_heads_per_tile: KV heads of the cache that count as one of `num_kv_heads`. `group` then counts the query
            heads of all of them (`merge_heads`).
        max_q_len: rows of the longest request in any mode except EXTEND. The combine's blocks follow it, not a batch.
        value_dim: elements of a value and of an output row; 0 for head_dim.
        latent: a token has one row, its key, and the value is the row's first value_dim elements.
        fp8_ds_mla: latent rows have 656 bytes, with a scale for each 128 e4m3 numbers (`FP8_DS_MLA`).
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
    max_q_len: int = 1 << 16
    value_dim: int = 0
    latent: bool = False
    fp8_ds_mla: bool = False

    @classmethod
    def from_geometry(cls, geometry: Geometry, on_gpu: bool) -> AttentionParams:
        """Return the parameters of `geometry`, which can describe a GPU although the tensors are on the CPU."""
        a = geometry.attention
        # A window that covers every page of a request hides nothing, so its code is not compiled in.
        hides = a.window_left < geometry.max_pages_per_req * a.page_size - 1
        q_lens = [geometry.extent(mode).q_len for mode in geometry.modes if mode is not Mode.EXTEND]
        return cls(
            num_kv_heads=a.num_kv_heads,
            group=a.group_size,
            head_dim=a.head_dim,
            page_size=a.page_size,
            scale=a.softmax_scale if a.softmax_scale is not None else a.head_dim**-0.5,
            cap=a.logits_soft_cap,
            window_left=a.window_left if hides else -1,
            pdl=on_gpu and geometry.device.arch >= 90,
            l2_keys=L2_BYTES // (geometry.row_bytes // a.num_kv_heads),
            max_q_len=max(q_lens, default=1),
            value_dim=a.value_width,
            latent=a.latent,
            fp8_ds_mla=a.row_format == FP8_DS_MLA,
        )

    def merge_heads(self, kv_heads_per_tile: int) -> AttentionParams:
        """Return the same attention with every `kv_heads_per_tile` adjacent KV heads merged into one."""
        return replace(
            self,
            num_kv_heads=self.num_kv_heads // kv_heads_per_tile,
            group=self.group * kv_heads_per_tile,
            kv_heads_per_tile=kv_heads_per_tile,
        )

    @property
    def value_width(self) -> int:
        """Elements of a value and of an output row."""
        return self.value_dim or self.head_dim

    @property
    def block_d(self) -> int:
        """Columns of a K tile, or of the rest of a latent row: a power of two. Padding is masked and never stored."""
        dim = self.head_dim - self.value_width if self.latent else self.kv_heads_per_tile * self.head_dim
        return max(16, next_power_of_two(dim))

    @property
    def block_v(self) -> int:
        """Columns of a V tile, or of the value part of a latent row: a power of two."""
        return max(16, next_power_of_two(self.kv_heads_per_tile * self.value_width))

    @property
    def window(self) -> bool:
        """True if a sliding window applies."""
        return self.window_left >= 0


@dataclass(frozen=True)
class BatchExtent:
    """Holds the size of a decode or verify batch.

    Attributes:
        num_reqs: requests, padding included.
        q_len, tail_len: rows and tail tokens (new tokens) of each request; in a ragged batch, their upper bounds.
        num_rows: rows of the batch, padding included.
        ragged: the number of rows of each request is read on the device.
        whole_requests: every split is one request, so no result depends on other requests (batch invariance).
    """

    num_reqs: int
    q_len: int
    tail_len: int
    num_rows: int
    ragged: bool = False
    whole_requests: bool = False

    @property
    def uniform_q_len(self) -> int:
        """Rows of each request as kernels take them: 0 in a ragged batch, where q_indptr has the row ranges."""
        return 0 if self.ragged else self.q_len


class SplitBuffers(NamedTuple):
    """Holds buffers for splitting EXTEND row tiles along the keys, which the device schedule does if estimated faster.

    Attributes:
        num_splits: splits of the row tiles of each KV head, 2 or more.
        num_ctas: CTAs that are resident on the device.
        partials: schedule of `prefill_schedule.write_metadata_prefill`, and ``2 · num_splits · KV heads · block_m``
            partial rows.
    """

    num_splits: int
    num_ctas: int
    partials: PartialResults


def or_placeholder(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or `other` as a placeholder pointer for an argument that the kernel does not read."""
    return other if tensor is None else tensor


def scaled(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> int:
    """Return the kernels' SCALED constant: bit 0 if K has a scale, bit 1 if V has one. A missing scale is 1."""
    return (k_scale is not None) + 2 * (v_scale is not None)
