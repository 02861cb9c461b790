"""KV cache of one layer, attention sinks, and the page pool of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .batch.checks import check_kind, shown
from .cache_checks import check_parts, check_positions, check_rows, check_slots_of_pool, is_leading
from .devices import present_device
from .errors import BatchError, BufferError
from .geometry import PLAIN_ROWS, Form, Geometry

APART = "{name} does not exist: the rows of this latent cache lie in two buffers; read KVCache.parts"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class KVCache:
    """KV pages of one layer, with its fp8 scales and attention sinks. The caller owns all tensors.

    `KVCache.latent` creates the cache of a latent layer.

    Attributes:
        k, v: ``[num_pages, page_size, num_kv_heads, head_dim]`` and ``[…, value_width]`` in kv_dtype, contiguous (NHD).
            KV slot s is offset s % page_size in page s // page_size. In a latent layer, v is a view of k's memory.
        k_scale, v_scale: float32 ``[1]`` on the device; real value = stored value · scale. Only for fp8 KV. None means
            a scale of 1; each may be None independently.
        sinks: float32 ``[num_qo_heads]`` on the device, contiguous: one extra logit per query head, in natural units.
            The sink has no value vector; each row's softmax adds exp(sink) to its denominator once. Scale and soft cap
            do not apply to it. -inf has no effect. A row without visible keys is 0, with or without a sink. Kernels
            read the tensor at every run and replay. None for a layer without sinks (`AttentionShape.sinks`).

    Raises:
        BatchError: k or v is no tensor, KV with a scale is not fp8, or a scale or sinks have a wrong dtype, shape or
            device.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        keys, values = self._tensors()
        for name, scale, pages in (("k", self.k_scale, keys), ("v", self.v_scale, values)):
            check_kind(name, pages, torch.Tensor, "a tensor", "allocate its pages, or use KVCache.latent for one row")
            if scale is not None and pages.element_size() != 1:
                raise BatchError(
                    f"{name}_scale is given for a cache of {pages.dtype}, but only fp8 caches have scales; set it to "
                    "None, or store float8_e4m3fn"
                )
            if scale is not None:
                _check_scale(f"{name}_scale", scale, pages.device)
        if self.sinks is not None:
            self._check_sinks(self.sinks, keys.device)

    @classmethod
    def latent(
        cls,
        rows: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        scale: torch.Tensor | None = None,
        *,
        value_dim: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> KVCache:
        """Return the cache of a latent layer, over one buffer of whole rows or over two buffers.

        With one buffer, `k` is the view ``[num_pages, page_size, 1, row_width]``, and `v` the view ``[…, :value_dim]``
        of the same memory. With two buffers (`Form.LATENT_PARTS`), reading `k` or `v` raises; `parts` has both buffers.

        Args:
            rows: ``[num_pages, page_size, row_width]`` in kv_dtype, or the pair of value parts
                ``[num_pages, page_size, value_dim]`` and rests ``[num_pages, page_size, head_dim - value_dim]``.
            scale: float32 ``[1]``, the one scale of fp8 rows, for keys and values. None for rows with scales of their
                own (`FP8_DS_MLA`).
            value_dim: leading elements of a row that are its value. Required for one buffer; two buffers imply it.
            sinks: as in the class.

        Raises:
            BatchError: a tensor has a wrong form, or `value_dim` does not fit the rows.
        """
        if isinstance(rows, tuple):
            check_parts(rows, value_dim)
            return _PartsCache(rows, scale, sinks)
        check_rows(rows, value_dim)
        k = rows.unsqueeze(2)
        return cls(k, k[..., :value_dim], scale, scale, sinks)

    @cached_property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Value parts and rests of a latent layer's rows: its two buffers, or two views of its one buffer.

        Each is ``[num_pages, page_size, elements]``; together they have head_dim elements, and the rests may have 0.
        The first use checks the cache and makes the views, which the cache keeps.

        Raises:
            BatchError: the cache is not one of a latent layer.
        """
        if not is_leading(self.v, self.k):
            raise BatchError("the cache has K and V apart, but only latent rows have parts; read k and v")
        rows, value_dim = self.k[:, :, 0], self.v.shape[-1]
        return rows[..., :value_dim], rows[..., value_dim:]

    @cached_property
    def part_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`parts` with the axis of the one KV head: ``[num_pages, page_size, 1, elements]``, as k and v have it.

        Raises:
            BatchError: the cache is not one of a latent layer.
        """
        values, rests = self.parts
        return values.unsqueeze(2), rests.unsqueeze(2)

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors with keys and with values; for rows in two buffers, the parts."""
        return self.k, self.v

    @staticmethod
    def _check_sinks(sinks: torch.Tensor, device: torch.device) -> None:
        check_kind("sinks", sinks, torch.Tensor, "a tensor", "pass float32 [num_qo_heads]")
        if sinks.dtype is not torch.float32 or sinks.dim() != 1 or not sinks.is_contiguous():
            raise BatchError(
                f"sinks are {str(sinks.dtype).removeprefix('torch.')} {list(sinks.shape)} with strides "
                f"{list(sinks.stride())}, but kernels read contiguous float32 [num_qo_heads]; convert them when the "
                "model is loaded"
            )
        if sinks.device != device:
            raise BatchError(f"sinks are on {sinks.device}, but the pages are on {device}; move the sinks there")


def _check_scale(name: str, scale: object, device: torch.device) -> None:
    if not isinstance(scale, torch.Tensor) or (scale.dtype, scale.shape) != (torch.float32, (1,)):
        raise BatchError(f"{name} is {shown(scale)}, but kernels read float32 [1]; pass such a tensor")
    if scale.device != device:
        raise BatchError(f"{name} is on {scale.device}, but the pages are on {device}; move the scale there")


class _PartsCache(KVCache):
    """Cache of a latent layer with value parts and rests in two buffers."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(
        self, parts: tuple[torch.Tensor, torch.Tensor], scale: torch.Tensor | None, sinks: torch.Tensor | None
    ) -> None:
        fields = {"parts": parts, "k_scale": scale, "v_scale": scale, "sinks": sinks}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __repr__(self) -> str:
        values, rest = self.parts
        return f"KVCache.latent(({values.dtype} {list(values.shape)}, {rest.dtype} {list(rest.shape)}))"

    @property
    def k(self) -> torch.Tensor:
        raise BatchError(APART.format(name="k"))

    @property
    def v(self) -> torch.Tensor:
        raise BatchError(APART.format(name="v"))

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.parts


def sinks_of(cache: KVCache, geometry: Geometry) -> torch.Tensor | None:
    """Return the sinks that `attend` must include, or None for a layer without sinks. No device read.

    A backend calls this function instead of reading ``cache.sinks``. A kernel that ignores sinks returns wrong outputs
    without an error; this function raises when geometry and cache disagree.

    Args:
        cache: KV pages of one layer, with sinks or without.
        geometry: the backend's geometry.

    Returns:
        float32 ``[num_qo_heads]`` on the device, owned by the caller, or None.

    Raises:
        BatchError: only one of `geometry` and `cache` has sinks, or their number is not num_qo_heads.
    """
    sinks, a = cache.sinks, geometry.attention
    if sinks is None:
        if a.sinks:
            raise BatchError(
                f"the layer has sinks, but KVCache.sinks is None; give its {a.num_qo_heads} logits, or create the "
                "geometry without sinks"
            )
        return None
    if not a.sinks:
        raise BatchError(
            "KVCache.sinks is given, but the geometry has no sinks; create it with AttentionShape(sinks=True), or set "
            "KVCache.sinks to None"
        )
    if sinks.shape[0] != a.num_qo_heads:
        raise BatchError(
            f"KVCache.sinks has {sinks.shape[0]} logits, but the layer has {a.num_qo_heads} query heads; give one "
            "logit per query head of this rank"
        )
    return sinks


class KVPool:
    """KV pages of all layers with one geometry. The pool owns the memory.

    The memory is one K and one V tensor; of a latent geometry it is one tensor of rows, or two with
    `Form.LATENT_PARTS`. The first `null_pages` pages belong to no request and start as zeros; all other pages are
    uninitialized.

    Attributes:
        k, v: ``[num_layers, num_pages, page_size, num_kv_heads, row_width]`` and ``[…, value_width]`` in kv_dtype, on
            the device. In a latent geometry v is a view of k's memory; with `Form.LATENT_PARTS` both are absent.
        layers: one `KVCache` view per layer.

    Raises:
        BufferError: a count is out of range, or `device` is not present.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_layers: int,
        num_pages: int,
        null_pages: int,
        device: torch.device | str,
    ) -> None:
        _check_pool(geometry, num_layers, num_pages, null_pages)
        device = present_device("a KVPool", device)
        a = geometry.attention
        self._latent, self._parts = a.latent, Form.LATENT_PARTS in geometry.forms
        shape, dtype = (num_layers, num_pages, a.page_size), getattr(torch, a.kv_dtype)

        def pages(*rest: int) -> torch.Tensor:
            tensor = torch.empty(*shape, *rest, dtype=dtype, device=device)
            _as_integers(tensor)[:, :null_pages] = 0  # filled as integers: an Ascend 910B cannot fill fp8 tensors
            return tensor

        scaled = a.kv_dtype == "float8_e4m3fn" and a.row_format == PLAIN_ROWS
        scale = torch.ones(1, dtype=torch.float32, device=device) if scaled else None
        value_dim = a.value_width
        if self._parts:
            self._rows = pages(value_dim), pages(a.head_dim - value_dim)
            self.layers = [KVCache.latent(parts, scale) for parts in zip(*self._rows, strict=True)]
        elif a.latent:
            self.k = pages(1, a.row_width)
            self.v = self.k[..., :value_dim]
            self.layers = [KVCache.latent(rows[:, :, 0], scale, value_dim=value_dim) for rows in self.k]
        else:
            self.k, self.v = pages(a.num_kv_heads, a.head_dim), pages(a.num_kv_heads, value_dim)
            self.layers = [KVCache(k, v, scale, scale) for k, v in zip(self.k, self.v, strict=True)]

    def __getattr__(self, name: str) -> torch.Tensor:
        if name in ("k", "v"):
            raise BufferError(f"the pool has no {name}: its rows lie in two parts; read KVPool.tensors")
        raise AttributeError(f"'KVPool' object has no attribute {name!r}")

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that hold the pool's KV, each ``[num_layers, num_pages, page_size, …]``; no two share memory."""
        if self._parts:
            return self._rows
        return (self.k,) if self._latent else (self.k, self.v)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy KV from slot source[i] to slot target[i] in every layer. Capturable.

        All reads happen before all writes, so the two lists may overlap.

        Args:
            source, target: int64 ``[n]`` KV slots. Target slots are distinct, except slots in null pages.

        Raises:
            BatchError: a tensor has a wrong form; with DRAFTMARK_GUARD=1 also a slot outside the pool.
        """
        tensors = self.tensors
        check_slots_of_pool(source, target, tensors[0])
        for pool in tensors:
            slots = _as_integers(pool).flatten(1, 2)  # as integers: torch cannot index fp8 tensors
            slots.index_copy_(1, target, slots.index_select(1, source))


def _check_pool(geometry: object, num_layers: object, num_pages: object, null_pages: object) -> None:
    if not isinstance(geometry, Geometry):
        raise BufferError(f"geometry is {geometry!r}, but it must be a Geometry; write Geometry.create(…)")
    counts = (("num_layers", num_layers, 1), ("num_pages", num_pages, 1), ("null_pages", null_pages, 0))
    for name, value, least in counts:
        if type(value) is not int or value < least:
            raise BufferError(f"{name} is {value!r}, but it must be an integer >= {least}; count them for this pool")
    slots = num_pages * geometry.attention.page_size  # type: ignore[operator]
    if geometry.attention.chosen_width and slots > 2**31:
        raise BufferError(
            f"num_pages is {num_pages}, but chosen keys are int32 slots, and {slots} slots do not fit; use at most "
            f"{2**31 // geometry.attention.page_size} pages"
        )
    if null_pages > num_pages:  # type: ignore[operator]
        raise BufferError(
            f"null_pages is {null_pages}, but the pool has {num_pages} pages; take Geometry.null_pages, and add them "
            "to the pages of the requests"
        )


def _as_integers(pool: torch.Tensor) -> torch.Tensor:
    """Return a view of the pool as integers of the element size, because some operations do not support fp8."""
    return pool.view(_INTEGERS[pool.element_size()])


def slots_of(page_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the KV slots of positions, for each request. No device read; capturable.

    Args:
        page_table: int32 ``[R, max_pages_per_req]``, page ids of each request.
        positions: int64 ``[R, n]``, each below max_pages_per_req · page_size.
        page_size: tokens of a page.

    Returns:
        int64 ``[R, n]``; 64-bit because page · page_size may exceed 2**31 (vllm#47671).

    Raises:
        BatchError: a tensor has a wrong form; with DRAFTMARK_GUARD=1 also a position outside the table.
    """
    check_positions(page_table, positions, page_size)
    pages = page_table.gather(1, positions // page_size).long()
    return pages * page_size + positions % page_size
