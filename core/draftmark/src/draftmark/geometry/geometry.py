"""Geometry: every length formula of the attention layer, written once.

Integers only: no torch, no device. The same functions run on Python ints at start-up, on a laptop without
the hardware, and on symbolic integers inside a proof (which poses as ``int``); so formulas here, and the sizing code of
plugins, use `ceil_div`, `maximum` and `minimum` and never branch on a value.

Symbols: R requests, k topk, S num_steps, D num_draft_tokens, P page_size, C max_context_len, L committed
length of a request, T tail slots of a request (KV positions ``[L, L+T)`` that are not committed yet).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .arithmetic import ceil_div, maximum, minimum
from .checks import check
from .shapes import DTYPE_BYTES, TARGET_MODES, AttentionShape, DeviceProfile, DraftShape, Extent, Form, Limits, Mode


@dataclass(frozen=True)
class Geometry:
    """One attention shape with everything that bounds its batches.

    Build it with `Geometry.create`, which validates. The bare constructor does not, so that a proof can
    build one from symbolic integers.
    """

    attention: AttentionShape
    draft: DraftShape
    limits: Limits
    device: DeviceProfile
    modes: tuple[Mode, ...] = TARGET_MODES
    forms: tuple[Form, ...] = ()
    """What the engine's batches bring beside the core's own."""

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
        """Validate and build.

        Raises:
            GeometryError: for the first field out of range; it names the field, value, limit and remedy.
        """
        draft = DraftShape() if draft is None else draft
        device = DeviceProfile() if device is None else device
        check(cls(attention, draft, limits, device, modes, forms))
        if attention.softmax_scale is None:
            attention = replace(attention, softmax_scale=1.0 / math.sqrt(attention.head_dim))
        limits = replace(
            limits,
            capture_batch_sizes=tuple(sorted(set(limits.capture_batch_sizes))),
            row_budgets=tuple(sorted(set(limits.row_budgets))),
        )
        return cls(attention, draft, limits, device, tuple(modes), tuple(forms))

    # -- lengths, in tokens -------------------------------------------------------------------------------

    @property
    def max_tail(self) -> int:
        """Tail slots that any forward of a request can address: ``max(1, D, k·(S-1), block_size)``."""
        return maximum(1, self.draft.num_draft_tokens, self.max_draft_tail, self.draft.block_size)

    @property
    def max_draft_tail(self) -> int:
        """Tail slots of the last DRAFT forward: ``k·(S-1)``, 0 where the draft model makes no forward of its own."""
        return self.draft.topk * self.num_draft_steps

    @property
    def max_prefix_len(self) -> int:
        """Largest L a forward may meet: C, and one tail more with overshoot."""
        return self.limits.max_context_len + self.max_tail * int(self.limits.overshoots)

    @property
    def max_kv_len(self) -> int:
        """KV positions a request can address: a request at the context wall still has room for its tail.

        The headroom is what sglang#22778 and sglang#19016 lacked. An engine that trims tails says where it stops.
        """
        if self.limits.max_kv_len is not None:
            return self.limits.max_kv_len
        return self.max_prefix_len + self.max_tail

    # -- pages --------------------------------------------------------------------------------------------

    @property
    def max_pages_per_req(self) -> int:
        """Columns of the page table: ``ceil(max_kv_len / P)``."""
        return ceil_div(self.max_kv_len, self.attention.page_size)

    def pages_for(self, prefix_len: int, tail_len: int) -> int:
        """Pages that hold `prefix_len` committed tokens and `tail_len` tail slots."""
        return ceil_div(prefix_len + tail_len, self.attention.page_size)

    def null_pages(self, unique_slots: bool = False) -> int:
        """Pages at the start of the pool that no request ever owns; padded rows write there.

        One suffices unless the backend's scatter needs `unique_slots`: then each padded request has its own.
        """
        return self.max_reqs * self.null_pages_per_req if unique_slots else 1

    @property
    def null_pages_per_req(self) -> int:
        """Null pages of one padded request where slots are unique: they hold its tail."""
        return ceil_div(self.max_tail, self.attention.page_size)

    # -- batch --------------------------------------------------------------------------------------------

    @property
    def max_reqs(self) -> int:
        """Requests of the largest batch: padding to a captured size may exceed the live limit (sglang#25124)."""
        return maximum(self.limits.max_num_reqs, *self.limits.capture_batch_sizes)

    def extent(self, mode: Mode, step: int = 0) -> Extent:
        """Rows and tail slots per request; for EXTEND and RAGGED_VERIFY the largest that one request can have.

        `step` counts DRAFT forwards from 0 to S-2 and is ignored by the other modes.
        """
        k, d = self.draft.topk, self.draft.num_draft_tokens
        if mode == Mode.DRAFT:
            return Extent(k, k * (step + 1))
        if mode == Mode.DECODE:
            return Extent(1, 1)
        if mode == Mode.EXTEND:
            rows = minimum(self.limits.max_extend_tokens, self.limits.max_context_len)
            return Extent(rows, rows)
        if mode == Mode.DRAFT_BLOCK:
            return Extent(self.draft.block_size, self.draft.block_size)
        return Extent(d, d)

    def max_rows(self, mode: Mode) -> int:
        """Query rows of the largest forward in `mode`, padding included."""
        if mode == Mode.EXTEND:
            return self.limits.max_extend_tokens
        if mode == Mode.RAGGED_VERIFY and self.limits.row_budgets:
            return maximum(*self.limits.row_budgets)
        return self.max_reqs * self.extent(mode).q_len

    @property
    def max_rows_any(self) -> int:
        """Query rows of the largest forward in any of this geometry's modes."""
        return maximum(*(self.max_rows(mode) for mode in self.modes))

    @property
    def mask_words(self) -> int:
        """int32 words of one packed tail-mask row, in every mode: ``ceil(max_tail / 32)``."""
        return ceil_div(self.max_tail, 32)

    @property
    def num_draft_steps(self) -> int:
        """DRAFT forwards of one round: S - 1."""
        return self.draft.num_steps - 1

    def last_step(self, mode: Mode) -> int:
        """Step of the largest forward of `mode`: S - 2 in DRAFT (0 where there is none), 0 in the other modes."""
        return maximum(0, self.num_draft_steps - 1) if mode == Mode.DRAFT else 0

    # -- bytes --------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page of one layer, K and V together."""
        a = self.attention
        return 2 * a.page_size * a.num_kv_heads * a.head_dim * DTYPE_BYTES[a.kv_dtype]
