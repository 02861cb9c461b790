"""What a backend's metadata means: the declaration that the contract decodes and checks.

No torch import. A `MetadataSpec` says, for one mode, in which layouts the plugin names KV positions, whether
its lengths include the tail, and what it writes for padded requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Layout(StrEnum):
    """How one level names its KV positions. Closed within a contract major."""

    PAGE_TABLE = "page_table"
    """Page ids, a row per request; the batch's own table unless a `page_table` buffer is declared."""
    CSR_PAGES = "csr_pages"
    """Page ids concatenated by an indptr, with the tokens of each last page."""
    CSR_TOKENS = "csr_tokens"
    """Token slots concatenated by an indptr."""
    NONE = "none"
    """The level does not exist in this mode."""
    OPAQUE = "opaque"
    """Something else: only numerics can be checked, and the verdict says so."""


class LengthConvention(StrEnum):
    """What the lengths of a level count."""

    PREFIX = "prefix"
    PREFIX_PLUS_TAIL = "prefix_plus_tail"
    TAIL = "tail"


class HostLengthsNeed(StrEnum):
    """What `plan()` must know about prefix lengths on the host."""

    NONE = "none"
    UPPER_BOUND = "upper_bound"
    EXACT = "exact"

    @classmethod
    def strongest(cls, needs: Iterable[HostLengthsNeed]) -> HostLengthsNeed:
        """The need that covers all of `needs`."""
        return max(needs, key=tuple(cls).index)


@dataclass(frozen=True)
class Level:
    """One attention pass over part of the keys.

    Attributes:
        layout: how KV positions are named.
        lengths: what its lengths count.
        buffers: role value → buffer name, for the buffers that hold this level's metadata,
            e.g. ``{"kv_lens": "kv_lens"}``. A role not named is read from the batch itself.
        masked: the tail mask applies in this level.
    """

    layout: Layout
    lengths: LengthConvention
    buffers: dict[str, str] = field(default_factory=dict)
    masked: bool = False


@dataclass(frozen=True)
class MetadataSpec:
    """The meaning of a backend's metadata in one mode.

    Attributes:
        levels: one or two passes whose results merge.
        live_extent: ``"padded"`` when entries of padded requests are written too, ``"live"`` when only live ones are.
        pad_fill: the length written for a padded request, 0 or 1 (ahead of the tail where the convention counts it).
        unique_slots: no two rows of a batch, padded ones included, may write the same KV slot.
        mask_stride: words between mask rows; the core's `Geometry.mask_words` unless re-encoded.
        mask_dtype: dtype of the packed words.
        dummy_rows: where a request whose ``qo_indptr`` counts more rows than it has queries holds the surplus:
            ``"first"`` or ``"last"``.
        lse_base: ``"e"`` or ``"2"``, the base of the kernel's own log-sum-exp before it is converted.
        host_lengths: what `plan()` needs.
    """

    levels: tuple[Level, ...]
    live_extent: str = "padded"
    pad_fill: int = 0
    unique_slots: bool = False
    mask_stride: Any = 0
    mask_dtype: str = "int32"
    dummy_rows: str = "first"
    lse_base: str = "e"
    host_lengths: HostLengthsNeed = HostLengthsNeed.NONE
