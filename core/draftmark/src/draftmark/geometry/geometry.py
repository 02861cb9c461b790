"""Shapes and limits of a model's attention, with every formula that depends on pages or heads.

This module contains integers only: no torch, no device. The same formulas run on Python ints at start-up, on a laptop
without the hardware, and on symbolic integers in a proof. The formulas here and the sizing code of plugins therefore
use `ceil_div`, `maximum` and `minimum` and never branch on a value.

Symbols: R requests, k topk, S num_steps, D num_draft_tokens, P page_size, C max_context_len, L committed
length of a request, T tail slots of a request (KV positions ``[L, L+T)`` that are not committed yet).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .arithmetic import ceil_div
from .batch_geometry import BatchGeometry, sorted_sizes
from .checks import check
from .shapes import DTYPE_BYTES, TARGET_MODES, AttentionShape, DeviceProfile, DraftShape, Form, Limits, Mode


@dataclass(frozen=True)
class Geometry(BatchGeometry):
    """Attention shape of a layer, with the draft shape, limits and device that bound its batches.

    Create an instance with `Geometry.create`, which validates all fields. The bare constructor does not validate, so
    that a proof can use symbolic integers.

    Attributes:
        attention: heads, head_dim, page size and dtypes of the layer.
        draft, limits, device, modes, forms: see `BatchGeometry`.
    """

    attention: AttentionShape
    draft: DraftShape
    limits: Limits
    device: DeviceProfile
    modes: tuple[Mode, ...] = TARGET_MODES
    forms: tuple[Form, ...] = ()

    @classmethod
    def create(
        cls,
        attention: AttentionShape,
        limits: Limits,
        draft: DraftShape | None = None,
        device: DeviceProfile | None = None,
        modes: tuple[Mode, ...] = TARGET_MODES,
        forms: tuple[Form, ...] = (),
    ) -> Geometry:
        """Validate the fields and return a geometry, with `softmax_scale` resolved and size tuples sorted.

        Args:
            attention, limits, draft, device, modes, forms: see the class. The default draft shape has no speculation;
                the default device is a CPU.

        Raises:
            GeometryError: the first field that is out of range, with its value, limit and remedy.
        """
        draft = DraftShape() if draft is None else draft
        device = DeviceProfile() if device is None else device
        check(cls(attention, draft, limits, device, modes, forms), attention, forms)
        if attention.softmax_scale is None:
            attention = replace(attention, softmax_scale=1.0 / math.sqrt(attention.head_dim))
        return cls(attention, draft, sorted_sizes(limits), device, tuple(modes), tuple(forms))

    # -- pages --------------------------------------------------------------------------------------------

    @property
    def max_pages_per_req(self) -> int:
        """Columns of the page table: ``ceil(max_kv_len / P)``."""
        return ceil_div(self.max_kv_len, self.attention.page_size)

    def pages_for(self, prefix_len: int, tail_len: int) -> int:
        """Return the number of pages for `prefix_len` committed tokens and `tail_len` tail slots."""
        return ceil_div(prefix_len + tail_len, self.attention.page_size)

    def null_pages(self, unique_slots: bool = False) -> int:
        """Return the number of null pages: pages at the start of the pool that no request owns. Padding writes there.

        The result is 1. With `unique_slots` each padded request gets its own pages, `null_pages_per_req` each.
        """
        return self.max_reqs * self.null_pages_per_req if unique_slots else 1

    @property
    def null_pages_per_req(self) -> int:
        """Number of null pages that one padded request gets for its tail, if the backend requires unique slots."""
        return ceil_div(self.max_tail, self.attention.page_size)

    # -- bytes --------------------------------------------------------------------------------------------

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's KV in one layer: K and V of every KV head, or one latent row."""
        a = self.attention
        return a.num_kv_heads * (a.row_width + a.value_width * int(not a.latent)) * DTYPE_BYTES[a.kv_dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page of one layer: ``P · row_bytes``."""
        return self.attention.page_size * self.row_bytes

    # -- elements -----------------------------------------------------------------------------------------

    @property
    def query_width(self) -> int:
        """Elements of one query row, all heads: ``num_qo_heads · head_dim``."""
        return self.attention.num_qo_heads * self.attention.head_dim

    @property
    def output_width(self) -> int:
        """Elements of one output row, all heads: ``num_qo_heads · value_width``."""
        return self.attention.num_qo_heads * self.attention.value_width
