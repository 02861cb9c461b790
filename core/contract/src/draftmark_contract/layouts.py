"""What a backend's metadata means: the declaration that the contract decodes and checks.

A plugin's module ``contract`` gives a `MetadataSpec` for each mode: in which layouts it names KV positions, whether its
lengths include the tail, and what it writes for padded requests. Engines never read it. No torch import.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from draftmark import Geometry, Mode


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
        levels: one or two passes whose results merge; none where the plugin does not say (see `UNSAID`).
        live_extent: ``"padded"`` when entries of padded requests are written too, ``"live"`` when only live ones are.
        pad_fill: the length written for a padded request, 0 or 1 (ahead of the tail where the convention counts it).
        mask_stride: words between mask rows; the core's `Geometry.mask_words` unless re-encoded.
        mask_dtype: dtype of the packed words.
        dummy_rows: where a request whose ``qo_indptr`` counts more rows than it has queries holds the surplus:
            ``"first"`` or ``"last"``.
    """

    levels: tuple[Level, ...]
    live_extent: str = "padded"
    pad_fill: int = 0
    mask_stride: Any = 0
    mask_dtype: str = "int32"
    dummy_rows: str = "first"

    @property
    def opaque(self) -> bool:
        """Whether some level cannot be decoded, so that numerics alone can judge what rows see."""
        return not self.levels or any(level.layout is Layout.OPAQUE for level in self.levels)


UNSAID = MetadataSpec(())
"""Of a plugin without contract notes: what its metadata means is not judged."""


def over_page_table(geometry: Geometry, **buffers: str) -> dict[Mode, MetadataSpec]:
    """The commonest form, in every mode: one masked level over the batch's own page table, lengths including the tail.

    Args:
        buffers: role → buffer name, of the buffers that the plugin writes, e.g. ``slot_mapping="slots"``.
    """
    level = Level(Layout.PAGE_TABLE, LengthConvention.PREFIX_PLUS_TAIL, buffers, masked=True)
    return dict.fromkeys(geometry.modes, MetadataSpec((level,), mask_stride=geometry.mask_words))
