"""Tensors of a forward of an attention layer: its batch, one layer of KV, and the rows of q, k, v and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftmark.cache import KVCache
from draftmark.geometry import FP8_DS_MLA, PLAIN_ROWS, AttentionShape, Form, Geometry

from ..cases.contents import CONTRAST, Contents, usual_sink
from ..cases.forwards import TRAPS, ForwardCase
from ..oracle.attention import Scales
from ..oracle.formulas import max_rows
from ..oracle.history import filled_slots
from ..oracle.row_format import drawn_rows
from .batch_tensors import BatchTensors
from .pools import LAYERS, SPARSE, Pool, raw
from .tensor_forms import EngineTable, KVForm, RowForm, TensorForm, kv_form_of, kv_pages, kv_widths

SCALES = (0.5, 2.0)
"""Scales of k and v in the first layer: the stored value times the scale is the real value. Each further layer doubles
the k scale and halves the v scale. Powers of two make quantisation round only once."""


GAPS = (1, 5, 2)
"""Heads of memory between two rows of q, k and v, where each of them is a view of its own memory."""


class CaseTensors(BatchTensors):
    """Holds all tensors that a backend receives, at fixed addresses. Parts that a forward does not use are stale.

    Attributes:
        cache: one layer's pages, with its own scales and sinks. They are a view of a pool of several layers.
        page_table: the static page table, or an engine's own one with Form.ENGINE_TABLE.
        q, k, v, out: rows of the largest forward. A forward uses the leading ones. v is None in a latent layer.
        lse: float32 ``[rows, num_qo_heads]`` if the check asks `attend` for it, else None.

    Args:
        pool: pool of the layer; by default a new one, in the geometry's form.
        layer: number of the layer in its model. It decides the scales, and the place in the pool.
        sibling: tensors of another layer of the model, in the same pools.
        room: layers of a new pool.
        draw: value from which the places of a model's layers in a new pool are drawn.
    """

    geometry: Geometry

    def __init__(
        self,
        geometry: Geometry,
        device: str,
        num_pages: int,
        pool: Pool | None = None,
        layer: int = 0,
        sibling: CaseTensors | None = None,
        room: int = LAYERS,
        draw: object = 0,
    ) -> None:
        a = geometry.attention
        super().__init__(geometry, device)
        self.page_table = self.buffers.page_table
        reqs, columns = self.page_table.shape
        self._table = EngineTable(reqs, columns, device) if Form.ENGINE_TABLE in geometry.forms else None
        form = kv_form_of(geometry, TensorForm().kv)
        self._pools: dict[KVForm, Pool] = {} if sibling is None else sibling._pools
        if pool is not None:
            self._pools[form] = pool
        self._num_pages, self._layer, self._room, self._draw = num_pages, layer, room, draw
        sinks = torch.zeros(a.num_qo_heads, dtype=torch.float32, device=device) if a.sinks else None
        self._use(self._pool(form).take(layer), _scales(a, device, layer), sinks)
        self.take(TensorForm())
        rows, dtype = max_rows(geometry), getattr(torch, a.q_dtype)
        self.q = torch.empty(rows, a.num_qo_heads, a.head_dim, dtype=dtype, device=device)
        self.k = torch.empty(rows, a.num_kv_heads, a.head_dim, dtype=dtype, device=device)
        self.v: torch.Tensor | None = None
        if not a.latent:
            self.v = self.k.new_empty(rows, a.num_kv_heads, a.value_width)
        self.out = self.q.new_empty(rows, a.num_qo_heads, a.value_width)
        self.lse: torch.Tensor | None = None
        self.dirty(num_pages - 1)

    def take(self, form: TensorForm) -> None:
        """Lay out the page table and the KV pages in this form, as far as the geometry has engine forms.

        The pages of a layout are made once, and stay at their address.
        """
        if self._table is not None:
            self.page_table = self._table.view(form.table)
        pages = self._pool(kv_form_of(self.geometry, form.kv)).take(self._layer)
        self._use(pages, (self.cache.k_scale, self.cache.v_scale), self.cache.sinks)

    def share_pages(self, other: CaseTensors) -> None:
        """Use the KV pages of other tensors. Scales and sinks stay separate."""
        self._pools, self._layer = other._pools, other._layer
        self._use([*other.stored.values()], (self.cache.k_scale, self.cache.v_scale), self.cache.sinks)

    def _use(self, pages: Sequence[torch.Tensor], scales: Scales, sinks: torch.Tensor | None) -> None:
        """Make the layer's cache of these pages, one tensor for each name of `kv_widths`."""
        if not self.geometry.attention.latent:
            self.cache = KVCache(pages[0], pages[1], *scales, sinks)
            return
        first, *rest = (one[:, :, 0] for one in pages)
        rows, value_dim = (first, rest[0]) if rest else first, self.geometry.attention.value_width
        self.cache = KVCache.latent(rows, scales[0], value_dim=value_dim, sinks=sinks)

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """Tensors ``[num_pages, P, kv_heads, width]`` that hold the layer's KV, by the names of `kv_widths`."""
        names = tuple(kv_widths(self.geometry))
        if names == ("k", "v"):
            return {"k": self.cache.k, "v": self.cache.v}
        pages = (self.cache.k,) if len(names) == 1 else tuple(one.unsqueeze(2) for one in self.cache.parts)
        return dict(zip(names, pages, strict=True))

    @property
    def num_pages(self) -> int:
        """Number of pages of the layer's KV."""
        return next(iter(self.stored.values())).shape[0]

    def stored_rows(self, forward: ForwardCase) -> list[torch.Tensor]:
        """Return a forward's new KV as each tensor of `stored` holds it, ``[rows, kv_heads, width]`` each."""
        _, k, v, _ = self.rows(forward)
        if v is not None:
            return [k, v]
        if self.geometry.attention.row_format != PLAIN_ROWS:
            return []  # The engine stores such rows itself.
        return list(torch.split(k, [*kv_widths(self.geometry).values()], dim=-1))

    @property
    def key_pages(self) -> list[torch.Tensor]:
        """Tensors of `stored` that hold the keys: K, or the rows of a latent layer in one tensor or two."""
        return [one for name, one in self.stored.items() if name != "v"]

    @property
    def value_pages(self) -> torch.Tensor:
        """View of the values, ``[num_pages, P, kv_heads, value_width]``."""
        first = next(iter(self.stored.values()))
        return self.stored.get("v", first[..., : self.geometry.attention.value_width])

    def value_rows(self, forward: ForwardCase) -> torch.Tensor:
        """Return a view of the values of a forward's rows, ``[rows, kv_heads, value_width]``."""
        _, k, v, _ = self.rows(forward)
        return k[..., : self.geometry.attention.value_width] if v is None else v

    @property
    def stored_scales(self) -> list[torch.Tensor | None]:
        """Scale of each tensor of `stored`."""
        return [self.cache.k_scale, self.cache.v_scale][: len(self.stored)]

    @property
    def changed_layers(self) -> list[int]:
        """Places of layers in the pools that no cache uses and that have changed."""
        return [layer for pool in self._pools.values() for layer in pool.changed()]

    def _pool(self, form: KVForm) -> Pool:
        if form not in self._pools:
            memory = kv_pages(self.geometry, self._num_pages, form, str(self.buffers.prefix_lens.device), self._room)
            self._pools[form] = Pool(memory, (self.geometry, form, self._draw))
        return self._pools[form]

    def set_row_form(self, form: RowForm) -> None:
        """Make q, k and v views of new memory in this layout. Each head is contiguous in every layout."""
        assert self.v is not None, "rows of a latent layer have forms of their own"
        heads = [self.q.shape[1], self.k.shape[1], self.v.shape[1]]
        rows, dim = self.q.shape[0], self.q.shape[2]
        fused = self.q.new_full((rows, sum(heads), dim), float("nan"))
        views = torch.split(fused, heads, dim=1)
        if form is RowForm.AFTER_ROPE:
            views = (*(view.contiguous() for view in views[:2]), views[2])
        if form is RowForm.OWN_STRIDES:
            wide = (self.q.new_full((rows, n + more, dim), float("nan")) for n, more in zip(heads, GAPS, strict=True))
            views = tuple(one[:, :n] for one, n in zip(wide, heads, strict=True))
        self.q, self.k, self.v = views

    def twin(self) -> CaseTensors:
        """Return other tensors for the same layer and its cache."""
        made = CaseTensors(self.geometry, str(self.q.device), 1)
        made.cache = self.cache
        return made

    def copy_to(self, other: Any) -> None:
        """Copy the batch and the rows to the tensors of `other`. Capturable."""
        super().copy_to(other)
        for name in ("q", "k", "v", "out"):
            getattr(other, name).copy_(getattr(self, name))

    def named(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a backend receives in addition to its batch, by name."""
        sinks = {} if self.cache.sinks is None else {"cache.sinks": self.cache.sinks}
        values = {} if self.v is None else {"v": self.v}
        cache = {f"cache.{name}": one for name, one in self.stored.items()}
        return {**cache, **sinks, "q": self.q, "k": self.k, **values, "out": self.out}

    def outputs(self, forward: ForwardCase) -> dict[str, torch.Tensor]:
        """Return the outputs of a forward's rows, and of the rows after them, by name."""
        return {"out": self.out[: forward.num_rows], "out after the batch": self.out[forward.num_rows :]}

    def clear(self) -> None:
        """Fill the outputs with NaN."""
        self.out.fill_(float("nan"))

    def place(self, forward: ForwardCase) -> torch.Tensor:
        """Fill the forward's part of the page table, and return it."""
        table, width = self.page_table[: len(forward.requests)], self.buffers.page_table.shape[1]
        table[:, :width] = torch.tensor(_table(forward, width), dtype=torch.int32)
        return table

    def empty(self) -> None:
        """Fill the static buffers with a batch of empty requests on null pages."""
        super().empty()
        self.page_table.zero_()

    def fill_rows(self, forward: ForwardCase, seed: int = 0, contrast: float = CONTRAST[Contents.USUAL]) -> None:
        """Fill the rows and sinks of a forward from a seed. `out`, and all rows after the forward's, become NaN."""
        dice = torch.Generator().manual_seed(seed)
        for tensor, scale in ((self.q, contrast), (self.k, 1.0), (self.v, 1.0)):
            if tensor is None:
                continue
            tensor.fill_(float("nan"))
            part = tensor[: forward.num_rows]
            part.copy_(torch.randn(part.shape, generator=dice) * scale)
        self.out.fill_(float("nan"))
        self.set_sinks(usual_sink(forward) + torch.randn(self.q.shape[1], generator=dice))

    def set_sinks(self, values: torch.Tensor) -> None:
        """Write the layer's sinks ``[num_qo_heads]`` in place, if the layer has sinks."""
        if self.cache.sinks is not None:
            self.cache.sinks.copy_(values)

    def fill_cache(self, forward: ForwardCase, seed: int = 0) -> None:
        """Fill the cache: random KV where earlier forwards stored KV, zeros in the null pages, NaN elsewhere."""
        dice = torch.Generator().manual_seed(seed + 1)
        size, used = self.geometry.attention.page_size, used_slots(forward)
        for pool in self.stored.values():
            if pool.numel() < SPARSE:
                raw(pool).fill_(-1)  # All bits set is NaN in every floating-point dtype.
            ints = raw(pool)
            ints[: forward.null_pages] = 0
            if self.geometry.attention.row_format == FP8_DS_MLA:
                values = drawn_rows(len(used), dice)[:, None]
            else:
                values = torch.randn((len(used), *pool.shape[2:]), generator=dice).to(pool.dtype)
            slots = torch.tensor(used, dtype=torch.int64, device=pool.device)
            ints[slots // size, slots % size] = raw(values).to(pool.device)

    def rows(self, forward: ForwardCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return q, k, v and out of a forward, padded rows included. v is None in a latent layer."""
        n = forward.num_rows
        return self.q[:n], self.k[:n], None if self.v is None else self.v[:n], self.out[:n]


def used_slots(forward: ForwardCase) -> list[int]:
    """Return the KV slots that are filled before a forward.

    They are the slots of committed tokens, of new tokens of earlier draft steps, and of rows that it does not store.
    """
    size, live = forward.geometry.attention.page_size, [one for one in forward.requests if one.live]
    kept = {forward.truth.writes[row] for row in forward.kept}
    return sorted(kept | {slot for one in live for slot in filled_slots(one, size)})


def _scales(attention: AttentionShape, device: str, layer: int) -> Scales:
    if attention.kv_dtype != "float8_e4m3fn" or attention.row_format != PLAIN_ROWS:
        return None, None
    values = SCALES[0] * 2**layer, SCALES[0] * 2**layer if attention.latent else SCALES[1] / 2**layer
    k, v = (torch.full((1,), scale, dtype=torch.float32, device=device) for scale in values)
    return k, v


def _table(forward: ForwardCase, columns: int) -> list[list[int]]:
    """Return each request's page ids, then filler: pages of NaN for a live request, null pages for a padded one."""
    rows = []
    for n, one in enumerate(forward.requests):
        rest = [forward.num_pages - 1 - (n + i) % TRAPS for i in range(columns - len(one.pages))]
        rows.append([*one.pages, *(rest if one.live else one.pages[:1] * len(rest))])
    return rows
