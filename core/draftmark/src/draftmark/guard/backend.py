"""Wrapper of a backend that checks calls: their order, the batch's contents, and the tensors of each layer."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ..backend import AttentionBackend
from ..batch import ForwardBatch, validate
from ..batch.checks import check_kind, shown
from ..cache import KVCache, sinks_of
from ..errors import BatchError
from ..geometry import Geometry
from .contents import check_contents
from .switch import readable


class GuardedBackend:
    """The `AttentionBackend` that `LoadedBackend.bind` returns in guard mode. It checks each call, then passes it on.

    Args:
        inner: the plugin's backend.
        geometry: the geometry that it is bound to.
        null_pages: pages at the start of the pool that belong to no request.
    """

    def __init__(self, inner: AttentionBackend, geometry: Geometry, null_pages: int) -> None:
        self._inner, self._geometry, self._null_pages = inner, geometry, null_pages
        self._planned: set[Hashable] = set()
        self._current: Hashable = None
        self._written = False
        self._largest_page = 0

    def plan(self, batch: ForwardBatch) -> None:
        """Check the host numbers and shapes of the batch, then plan."""
        validate(batch, self._geometry)
        # Planned batches add up until one is written, because several DRAFT steps are planned before the first runs.
        if self._written:
            self._planned.clear()
            self._written = False
        self._planned.add(_key(batch))
        self._inner.plan(batch)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Check that the batch was planned, and its contents where the host may read them; then write."""
        check_kind("batch", batch, ForwardBatch, "a ForwardBatch", "take it from BatchBuffers or ragged")
        if _key(batch) not in self._planned:
            raise BatchError(
                f"write_metadata got a {batch.mode} batch that plan did not get; call plan(batch) on the host before "
                "each forward and before each replay"
            )
        if readable(batch.device):
            self._largest_page = check_contents(batch, self._geometry, self._null_pages)
        self._current, self._written = _key(batch), True
        self._inner.write_metadata(batch)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Check the rows and the cache, then write."""
        self._check_call("write_kv", cache, batch)
        for name, tensor in (("k", k), ("v", v)):
            self._check_rows(name, tensor, self._geometry.attention.num_kv_heads, batch)
        self._inner.write_kv(k, v, cache, batch)

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Check the rows, the output and the cache, then attend."""
        self._check_call("attend", cache, batch)
        for name, tensor in (("q", q), ("out", out)):
            self._check_rows(name, tensor, self._geometry.attention.num_qo_heads, batch)
        if not out.is_contiguous():
            raise BatchError(f"out has strides {list(out.stride())}, but it must be contiguous; use torch.empty")
        sinks_of(cache, self._geometry)
        self._inner.attend(q, cache, batch, out)

    def _check_call(self, call: str, cache: KVCache, batch: ForwardBatch) -> None:
        check_kind("batch", batch, ForwardBatch, "a ForwardBatch", "take it from BatchBuffers or ragged")
        if _key(batch) != self._current:
            raise BatchError(
                f"{call} got a {batch.mode} batch that write_metadata did not get last; call write_metadata(batch) "
                "before the layers of each forward"
            )
        check_kind("cache", cache, KVCache, "a KVCache", "take it from KVPool.layers")
        a = self._geometry.attention
        for name, pages in (("cache.k", cache.k), ("cache.v", cache.v)):
            want = (a.page_size, a.num_kv_heads, a.head_dim)
            if pages.dim() != 4 or pages.shape[1:] != want or pages.dtype != getattr(torch, a.kv_dtype):
                raise BatchError(
                    f"{name} is {shown(pages)}, but the geometry needs {a.kv_dtype} [num_pages, {want[0]}, {want[1]}, "
                    f"{want[2]}]; create the KVPool with this geometry"
                )
            if pages.device != batch.device:
                raise BatchError(f"{name} is on {pages.device}, but the batch is on {batch.device}; use one device")
            if self._largest_page >= pages.shape[0]:
                raise BatchError(
                    f"page_table has page {self._largest_page}, but {name} has {pages.shape[0]} pages; create the "
                    "KVPool with more pages, or hand out pages of this pool"
                )

    def _check_rows(self, name: str, tensor: torch.Tensor, heads: int, batch: ForwardBatch) -> None:
        a = self._geometry.attention
        want = (batch.num_rows, heads, a.head_dim)
        check_kind(name, tensor, torch.Tensor, "a tensor", f"pass {a.q_dtype} {list(want)}")
        if tensor.shape != want or tensor.dtype != getattr(torch, a.q_dtype):
            raise BatchError(
                f"{name} is {shown(tensor)}, but the batch has {want[0]} rows and needs {a.q_dtype} {list(want)}; pass "
                "the rows of this forward, in the geometry's dtype"
            )
        if tensor.device != batch.device:
            raise BatchError(f"{name} is on {tensor.device}, but the batch is on {batch.device}; move it there")
        if tensor.stride(-1) != 1 and tensor.numel():
            raise BatchError(f"{name} has strides {list(tensor.stride())}, but head_dim is contiguous; copy the tensor")


def _key(batch: ForwardBatch) -> Hashable:
    """Return an identifier of a forward: its host numbers, and the addresses of its tensors."""
    numbers = (batch.mode, batch.step, batch.num_reqs, batch.q_lens, batch.tail_lens, batch.num_rows, batch.host)
    return (*numbers, type(batch.tail), batch.prefix_lens.data_ptr(), batch.page_table.data_ptr())
