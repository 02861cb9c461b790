"""EXTEND by itself: prefill and its chunks, from the batch's own lengths and page table. No plan, no host lengths."""

from __future__ import annotations

import torch

from draftmark import BatchError, Geometry, Mode
from draftmark.runtime import ForwardBatch, KVCache, record_call

from . import boxes, launch, tiling
from .again import Again
from .launch import Attention
from .remembered import layers_of

COPY_ALIGNMENT = 16
"""Bytes that the copy engine wants of an address and of a pitch."""
MOVING = (
    *("q", "k_source", "v_source", "k_scale", "v_scale", "sinks", "out"),
    *("prefix_lens", "q_indptr", "page_table"),
)
"""The kernel's parameters that another layer or step brings, in the order of `Extend._launch`."""
OTHERS = {"k_other": "k_source", "v_other": "v_source"}
"""Its further descriptors, which are of the same tensors (`boxes.describe`)."""


class Extend:
    """Ragged causal attention of one geometry, for any backend whose buffers hold slots and row tiles.

    Serves what `support.reasons_against` finds nothing against. On CPU tensors it runs in Triton's interpreter.

    Args:
        slots: int64 ``[max rows]``, the caller's; `write_metadata` writes the KV slot of each row.
        row_tiles: int32 ``[n, 2]``, the caller's; the agenda, then request and index of each row tile. n is at least
            `tiling.AGENDA_ROWS` + max_extend_tokens · group // b + max_reqs for tiles of b packed rows, and b is never
            under `tiling.LEAST_ROWS`, so that with b = LEAST_ROWS it always suffices. On Hopper a forward counts there
            what was taken, and leaves it as it was: one stream at a time attends with them.
    """

    def __init__(self, geometry: Geometry, slots: torch.Tensor, row_tiles: torch.Tensor) -> None:
        self._geometry, self._slots, self._row_tiles = geometry, slots, row_tiles
        self._shape = Attention.of(geometry, slots.is_cuda)
        a = geometry.attention
        tile = tiling.choose(a, geometry.device, geometry.extent(Mode.EXTEND).q_len, extend=True)
        self._again, self._layer = Again(MOVING, OTHERS), layers_of(geometry)
        self._tile = tile if slots.is_cuda else tiling.interpreted_ragged(a, tile, geometry.max_kv_len)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """The KV slot of every row and the row tiles, in one launch.

        Raises:
            BatchError: the batch needs more row tiles than there is room for.
        """
        count = tiling.ragged_tiles(self._tile, self._shape.group, batch.num_rows, batch.padded_reqs)
        slots, tiles = self._slots[: batch.num_rows], self._row_tiles
        room = tiles.shape[0] - tiling.AGENDA_ROWS
        if count > room:
            raise BatchError(
                f"EXTEND has {batch.num_rows} rows of {batch.padded_reqs} requests, up to {count} row tiles, but "
                f"{room} are allocated; raise max_num_reqs or max_extend_tokens"
            )
        record_call(
            launch.write_metadata_ragged, self._shape, self._tile, batch.num_rows, batch.prefix_lens,
            batch.q_indptr, batch.page_table, slots, tiles, batch.slots, mutates=(slots, tiles),
        )  # fmt: skip

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows in one launch; q and out ``[rows, query heads, head_dim]``, head_dim contiguous."""
        table, rows = batch.page_table, batch.num_rows
        cache_layout, sinks = self._layer(cache)
        tensors = (
            q, cache.k, cache.v, cache.k_scale, cache.v_scale, sinks, out, batch.prefix_lens, batch.q_indptr, table,
        )  # fmt: skip
        if not self._slots.is_cuda:
            check_rows(q, out)
            record_call(self._launch, rows, *tensors, self._row_tiles, mutates=(out,))
            return
        layout = (
            rows, batch.padded_reqs, table.stride(0), cache_layout, q.stride(), out.stride(), q.dtype, out.dtype,
        )  # fmt: skip
        self._again(layout, tensors, self._launch_own, rows)

    def _launch_own(self, num_rows: int, *tensors: torch.Tensor) -> None:
        check_rows(tensors[0], tensors[MOVING.index("out")])
        self._launch(num_rows, *tensors, self._row_tiles)  # type: ignore[call-arg]  # as MOVING names them

    def _launch(
        self,
        num_rows: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        prefix_lens: torch.Tensor,
        q_indptr: torch.Tensor,
        page_table: torch.Tensor,
        row_tiles: torch.Tensor,
    ) -> None:
        a, device = self._geometry.attention, self._geometry.device
        tile = tiling.for_cache(a, device, self._tile, has_one_pitch(k, v), has_boxes(k, v), has_heads_beside(k, v))
        launch.attend_extend(
            self._shape, tile, num_rows, q, k, v, k_scale, v_scale, prefix_lens, q_indptr, page_table, row_tiles, out,
            None, sinks,
        )  # fmt: skip


def check_rows(q: torch.Tensor, out: torch.Tensor) -> None:
    """Raise BatchError unless the kernels can read q and write out."""
    if q.stride(-1) != 1 or out.stride(-1) != 1:
        raise BatchError("q and out must have head_dim contiguous; call contiguous() on them")


def has_boxes(*caches: torch.Tensor, heads: int = 1) -> bool:
    """Whether `hopper` can read K and V, as many heads at a time, which lie beside each other."""
    told = all(one.is_cuda and boxes.describable(boxes.beside(one, heads)) for one in caches)
    return told and boxes.available()


def has_one_pitch(*caches: torch.Tensor) -> bool:
    """Whether K's tokens are rows of one pitch, and V's, as a copy box describes them: views of packed pages too."""
    return all(_one_pitch(one) for one in caches)


def has_heads_beside(*caches: torch.Tensor) -> bool:
    """Whether a token's heads lie beside each other, in K and in V."""
    return all(one.stride(2) == one.shape[3] for one in caches)


def _one_pitch(tensor: torch.Tensor) -> bool:
    pages, tokens, heads, last = tensor.stride()
    size, dim, unit = tensor.shape[1], tensor.shape[3], tensor.element_size()
    aligned = tokens * unit % COPY_ALIGNMENT == 0 and tensor.data_ptr() % COPY_ALIGNMENT == 0
    return pages == size * tokens and heads == dim and last == 1 and aligned
