"""Wrapper of a backend that checks calls: their order, the batch's contents, and the tensors of each layer."""

from __future__ import annotations

import inspect
from typing import cast

import torch

from draftmark.backend import AttentionBackend, BoundBackend
from draftmark.batch import ForwardBatch, validate
from draftmark.batch.checks import check_kind, require_tensor, shown
from draftmark.cache import KVCache, sinks_of
from draftmark.errors import BatchError
from draftmark.geometry import Form, Geometry
from draftmark.guard import readable

from .call_order import CallOrder
from .chosen import check_lists, check_pool, num_slots
from .contents import check_contents
from .layer_cache import check_cache


class GuardedBackend:
    """The `AttentionBackend` that `LoadedBackend.bind` returns in guard mode. It checks each call, then passes it on.

    Args:
        inner: the plugin's backend.
        geometry: the geometry that it is bound to.
        null_pages: pages at the start of the pool that belong to no request.
        lse: `BackendInfo.lse` of the plugin.
    """

    def __init__(self, inner: AttentionBackend, geometry: Geometry, null_pages: int, lse: bool = False) -> None:
        self._inner: BoundBackend = cast("BoundBackend", inner)
        self._geometry, self._null_pages, self._lse = geometry, null_pages, lse
        self._order = CallOrder()
        self._largest_page = 0

    def plan(self, batch: ForwardBatch) -> None:
        """Check the host numbers and shapes of the batch, then plan."""
        validate(batch, self._geometry)
        self._order.plan(batch)
        self._inner.plan(batch)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Check that the batch was planned, and its contents where the host may read them; then write."""
        self._order.require_planned(batch)
        if readable(batch.device):
            self._largest_page = check_contents(batch, self._geometry, self._null_pages)
        self._order.write(batch)
        self._inner.write_metadata(batch)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor | None, cache: KVCache, batch: ForwardBatch) -> None:
        """Check the rows and the cache, then write."""
        a = self._geometry.attention
        if Form.ENGINE_STORES in self._geometry.forms:
            raise BatchError(
                "write_kv is called, but the geometry has Form.ENGINE_STORES: the engine writes KV itself; remove the "
                "call, or the form"
            )
        self._check_call("write_kv", cache, batch)
        self._check_rows("k", k, (a.num_kv_heads, a.head_dim), batch)
        if not a.latent:
            self._check_rows("v", v, (a.num_kv_heads, a.value_width), batch)
        elif v is not None:
            raise BatchError(
                f"v is {shown(v)}, but a latent layer has no v: the value is the first {a.value_width} elements of k; "
                "pass None"
            )
        self._inner.write_kv(k, v, cache, batch)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        batch: ForwardBatch,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Check the rows, the outputs and the cache, then attend."""
        a = self._geometry.attention
        self._check_call("attend", cache, batch)
        self._check_rows("q", q, (a.num_qo_heads, a.head_dim), batch)
        self._check_rows("out", out, (a.num_qo_heads, a.value_width), batch)
        outputs = [("out", out)] if lse is None else [("out", out), ("lse", lse)]
        stored = cache.parts if Form.LATENT_PARTS in self._geometry.forms else (cache.k, cache.v)
        if lse is not None:
            self._check_lse(lse, batch)
        for name, output in outputs:
            if not output.is_contiguous():
                strides = list(output.stride())
                raise BatchError(f"{name} has strides {strides}, but it must be contiguous; use torch.empty")
            for other, tensor in (("q", q), *(("the cache", one) for one in stored)):
                if _overlap(output, tensor):
                    raise BatchError(
                        f"{name} shares memory with {other}, but kernels write one while they read the other; use "
                        "torch.empty"
                    )
        sinks_of(cache, self._geometry)
        if a.chosen_width and readable(batch.device):
            check_lists(batch, self._geometry, num_slots(cache, self._geometry))
        if lse is None:
            self._inner.attend(q, cache, batch, out)  # an old plugin has no argument lse
        else:
            self._inner.attend(q, cache, batch, out, lse)

    def _check_lse(self, lse: object, batch: ForwardBatch) -> None:
        if not self._lse:
            raise BatchError(
                f"lse is {shown(lse)}, but the backend does not write it: BackendInfo.lse is False; pass None"
            )
        shape = (batch.num_rows, self._geometry.attention.num_qo_heads)
        require_tensor("lse", lse, shape, torch.float32, batch.device)
        try:
            inspect.signature(self._inner.attend).bind(*[None] * 5)
        except TypeError as error:
            raise BatchError(
                "lse is given and BackendInfo.lse is True, but the backend's attend has no argument lse; fix the "
                "plugin, or pass None"
            ) from error

    def _check_call(self, call: str, cache: KVCache, batch: ForwardBatch) -> None:
        self._order.require_written(call, batch)
        check_kind("cache", cache, KVCache, "a KVCache", "take it from KVPool.layers")
        if self._geometry.attention.chosen_width:
            check_pool(cache, self._geometry)
        check_cache(cache, self._geometry, batch.device, self._largest_page)

    def _check_rows(self, name: str, tensor: object, head: tuple[int, int], batch: ForwardBatch) -> None:
        a = self._geometry.attention
        want = (batch.num_rows, *head)
        check_kind(name, tensor, torch.Tensor, "a tensor", f"pass {a.q_dtype} {list(want)}")
        assert isinstance(tensor, torch.Tensor)
        if tensor.shape != want or tensor.dtype != getattr(torch, a.q_dtype):
            raise BatchError(
                f"{name} is {shown(tensor)}, but the batch has {want[0]} rows and needs {a.q_dtype} {list(want)}; pass "
                "the rows of this forward, in the geometry's dtype"
            )
        if tensor.device != batch.device:
            raise BatchError(f"{name} is on {tensor.device}, but the batch is on {batch.device}; move it there")
        if tensor.stride(-1) != 1 and tensor.numel():
            raise BatchError(f"{name} has strides {list(tensor.stride())}, but a head is contiguous; copy the tensor")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors lie in overlapping ranges of one memory."""
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    (a, b), (c, d) = (_range(tensor) for tensor in (one, other))
    return a < d and c < b


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and the address after its last element."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
