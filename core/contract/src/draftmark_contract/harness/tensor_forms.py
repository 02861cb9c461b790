"""Memory layouts of the tensors that a backend receives: rows, page tables and KV pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import torch

from draftmark.geometry import PLAIN_ROWS, Form, Geometry

from ..oracle.row_format import PARTS
from .pools import LAYERS

Empty = Callable[..., torch.Tensor]
GAP = 64
"""Elements of memory between two latent rows in a strided layout by token."""
ROW_BYTES = PARTS["rest"].stop
"""Elements of a row of `FP8_DS_MLA`, of one byte each."""
NOWHERE = -1
"""Entry of a page table's surplus columns, and of the memory between its rows: no page."""


class RowForm(StrEnum):
    """Memory layout of the rows of q, k and v."""

    PROJECTED = "views of one projection"
    AFTER_ROPE = "q and k contiguous, v a view of the projection"
    """RoPE writes new q and k and leaves v in the projection, so that the three have different strides."""
    OWN_STRIDES = "each a view with a stride of its own"


class TableForm(NamedTuple):
    """Layout of an engine's page table: columns after the geometry's columns, and entries between two rows."""

    surplus: int = 3
    gap: int = 2


class KVForm(StrEnum):
    """Memory layout of k and v pages."""

    CONTIGUOUS = "k and v contiguous"
    BY_HEAD = "k and v of a page adjacent, heads before tokens"
    BY_TOKEN = "k and v of a token adjacent"
    BY_PAGE = "a page of all layers adjacent, with its heads before its tokens"
    UNLIKE = "k as heads before tokens in one pool, v as tokens before heads in another one"
    """K and V have different page, token and head strides."""


TABLES = (TableForm(), TableForm(0, 0), TableForm(11, 0), TableForm(0, 7))
"""Layouts of a page table that a history draws from. The first one is the layout of single forwards."""
KV_FORMS = (KVForm.BY_HEAD, KVForm.CONTIGUOUS, KVForm.BY_TOKEN, KVForm.UNLIKE, KVForm.BY_PAGE)
"""Layouts of KV pages that a history draws from. The first one is the layout of single forwards."""


@dataclass(frozen=True)
class TensorForm:
    """Layout of one forward's page table and KV pages, for a geometry with those engine forms."""

    table: TableForm = TABLES[0]
    kv: KVForm = KV_FORMS[0]


class EngineTable:
    """An engine's page table in memory of its own. Its width and pitch may change, its address does not."""

    def __init__(self, requests: int, columns: int, device: str) -> None:
        self._columns = columns
        most = columns + max(sum(one) for one in TABLES)
        self._memory = torch.full((requests, most), NOWHERE, dtype=torch.int32, device=device)

    def view(self, form: TableForm) -> torch.Tensor:
        """Return the whole table in this layout. No entry names a page."""
        width = self._columns + form.surplus
        self._memory.fill_(NOWHERE)
        return self._memory.as_strided((len(self._memory), width), (width + form.gap, 1))


def kv_form_of(geometry: Geometry, form: KVForm) -> KVForm:
    """Return the layout of KV pages: `form` for strided KV, else contiguous."""
    return form if Form.STRIDED_KV in geometry.forms else KVForm.CONTIGUOUS


def kv_widths(geometry: Geometry) -> dict[str, int]:
    """Return the elements of one head in each tensor that a layer's KV lies in, by the tensor's name.

    A latent layer stores one row per token, in one tensor or in two parts.
    """
    a = geometry.attention
    if not a.latent:
        return {"k": a.head_dim, "v": a.value_width}
    if Form.LATENT_PARTS in geometry.forms:
        return {"value_part": a.value_width, "rest": a.head_dim - a.value_width}
    return {"rows": a.head_dim if a.row_format == PLAIN_ROWS else ROW_BYTES}


def kv_pages(
    geometry: Geometry, num_pages: int, form: KVForm, device: str, layers: int = LAYERS, empty: Empty = torch.empty
) -> list[torch.Tensor]:
    """Return uninitialized pages of several layers in this layout, for each tensor that a layer's KV lies in.

    Args:
        empty: function (shape, dtype=, device=) that allocates the memory.

    Returns:
        ``[layers, num_pages, P, kv_heads, width]`` each, in the order of `kv_widths`.
    """
    a, widths = geometry.attention, tuple(kv_widths(geometry).values())
    heads, dim, size = a.num_kv_heads, a.head_dim, a.page_size
    if a.latent or widths != (dim, dim):
        return _apart(geometry, num_pages, form, device, layers, empty)
    if form is KVForm.UNLIKE:
        made = partial(empty, dtype=getattr(torch, a.kv_dtype), device=device)
        k, v = made((layers, num_pages, heads, size, dim)), made((num_pages, layers, size, heads, dim))
        return [k.transpose(2, 3), v.transpose(0, 1)]
    shape, order = {
        KVForm.CONTIGUOUS: ((2, layers, num_pages, size, heads, dim), (1, 0, 2, 3, 4, 5)),
        KVForm.BY_HEAD: ((layers, num_pages, 2, heads, size, dim), (0, 2, 1, 4, 3, 5)),
        KVForm.BY_TOKEN: ((layers, num_pages, size, heads, 2, dim), (0, 4, 1, 2, 3, 5)),
        KVForm.BY_PAGE: ((num_pages, layers, 2, heads, size, dim), (1, 2, 0, 4, 3, 5)),
    }[form]
    return list(empty(shape, dtype=getattr(torch, a.kv_dtype), device=device).permute(order).unbind(1))


def _apart(
    geometry: Geometry, num_pages: int, form: KVForm, device: str, layers: int, empty: Empty
) -> list[torch.Tensor]:
    """Return the pages of latent rows, or of values that are narrower than keys.

    In strided layouts the pages of all layers, or the values of a token and its key, are adjacent. A latent row then
    has `GAP` elements of memory after it. In `KVForm.UNLIKE` only the first tensor has adjacent pages of all layers.
    """
    a, widths = geometry.attention, tuple(kv_widths(geometry).values())
    dtype, size, heads = getattr(torch, a.kv_dtype), a.page_size, a.num_kv_heads
    by_page = form in (KVForm.BY_PAGE, KVForm.BY_HEAD)

    def made(width: int, by_page: bool = by_page) -> torch.Tensor:
        lead = (num_pages, layers) if by_page else (layers, num_pages)
        found = empty((*lead, size, heads, width), dtype=dtype, device=device)
        return found.transpose(0, 1) if by_page else found

    if form is KVForm.CONTIGUOUS or (a.latent and by_page):
        return [made(width) for width in widths]
    if form is KVForm.UNLIKE:
        return [made(width, number == 0) for number, width in enumerate(widths)]
    if a.latent:
        return [made(width + GAP)[..., :width] for width in widths]
    return list(torch.split(made(sum(widths)), list(widths), dim=-1))
