"""Length formulas of a batch that need no page: shared by the geometries of attention layers and state layers.

The formulas use `maximum`, `minimum` and `ceil_div` and never branch on a value, so they also run on symbolic integers.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property

from ..errors import GeometryError
from .arithmetic import ceil_div, maximum, minimum
from .shapes import DeviceProfile, DraftShape, Extent, Form, Limits, Mode


class BatchGeometry:
    """Base of `Geometry` and `StateGeometry`: the draft shape, limits and device that bound a batch.

    Layers of one model share these values, so they share one batch, its lengths and its rows.

    Attributes:
        draft: shape of the draft tree, chain or block.
        limits: batch sizes and lengths that the engine never exceeds.
        device: device type and number of SMs.
        modes: modes that the engine runs with this geometry.
        forms: engine-specific batch and cache forms that the engine uses.
    """

    draft: DraftShape
    limits: Limits
    device: DeviceProfile
    modes: tuple[Mode, ...]
    forms: tuple[Form, ...]

    # -- lengths, in tokens -------------------------------------------------------------------------------

    @property
    def max_tail(self) -> int:
        """Tail slots that one request can have in any forward: ``max(1, D + n - 1, k·(S-1), block_size)``."""
        return maximum(1, self.draft_extend_rows, self.max_draft_tail, self.draft.block_size)

    @property
    def draft_extend_rows(self) -> int:
        """Rows of one request in DRAFT_EXTEND: ``D + num_modules - 1``."""
        return self.draft.num_draft_tokens + self.draft.num_modules - 1

    @property
    def max_draft_tail(self) -> int:
        """Tail slots of the last DRAFT forward: ``k·(S-1)``; 0 when the draft model has no forward of its own."""
        return self.draft.topk * self.num_draft_steps

    @cached_property  # an engine reads it in every step
    def max_prefix_len(self) -> int:
        """Largest prefix length in any forward: max_context_len, plus one tail when lengths may overshoot."""
        return self.limits.max_context_len + self.max_tail * int(self.limits.overshoots)

    @property
    def max_kv_len(self) -> int:
        """KV positions of one request, with room for a tail after the longest prefix.

        sglang#22778 and sglang#19016 lacked this room. `Limits.max_kv_len` replaces the formula for an engine that
        trims tails at its own limit.
        """
        if self.limits.max_kv_len is not None:
            return self.limits.max_kv_len
        return self.max_prefix_len + self.max_tail

    # -- batch --------------------------------------------------------------------------------------------

    @property
    def max_reqs(self) -> int:
        """Requests of the largest batch; padding to a captured size may exceed max_num_reqs (sglang#25124)."""
        return maximum(self.limits.max_num_reqs, *self.limits.capture_batch_sizes)

    def extent(self, mode: Mode, step: int = 0) -> Extent:
        """Return rows and tail slots per request; for EXTEND and RAGGED_VERIFY the maximum of one request.

        Args:
            mode: mode of the forward.
            step: index of the DRAFT forward, 0 … num_steps - 2; ignored in other modes.
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
        if mode == Mode.DRAFT_EXTEND:
            return Extent(self.draft_extend_rows, self.draft_extend_rows)
        return Extent(d, d)

    def max_rows(self, mode: Mode) -> int:
        """Return the query rows of the largest forward in `mode`, padding included."""
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
        """Number of DRAFT forwards before each VERIFY: num_steps - 1."""
        return self.draft.num_steps - 1

    def last_step(self, mode: Mode) -> int:
        """Return the step of the largest forward of `mode`: num_steps - 2 in DRAFT (at least 0), 0 in other modes."""
        return maximum(0, self.num_draft_steps - 1) if mode == Mode.DRAFT else 0


def sorted_sizes(limits: Limits) -> Limits:
    """Return the limits with each captured size once, in ascending order."""
    return replace(
        limits,
        capture_batch_sizes=tuple(sorted(set(limits.capture_batch_sizes))),
        row_budgets=tuple(sorted(set(limits.row_budgets))),
    )


def check_shared_batch(geometry: BatchGeometry, state: BatchGeometry) -> None:
    """Raise `GeometryError` unless two layers of one model have the same draft shape and limits, so share a batch."""
    for name in ("draft", "limits"):
        mine, other = getattr(geometry, name), getattr(state, name)
        for field in (one.name for one in fields(mine)):
            value, said = getattr(other, field), getattr(mine, field)
            if value != said:
                remedy = "give all geometries of a model the same value: they share a batch"
                raise GeometryError(f"state.{name}.{field}", value, f"the other layers have {said!r}", remedy)
