"""The declaration of a backend's metadata, which the contract uses to decode and check its buffers.

A plugin's module ``contract`` returns a `MetadataSpec` for each mode. It declares the layouts that name KV positions,
whether lengths include the tail (new tokens), and the values for padded requests. A level is one attention pass: a
cascade has a prefix level and a tail level. Engines never read the declaration. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from draftmark import Geometry, Mode


class Layout(StrEnum):
    """Formats in which a level (attention pass) lists its KV positions. A new one needs a new contract major."""

    PAGE_TABLE = "page_table"
    """A row of page ids per request, from the batch's own table unless a `page_table` buffer is declared."""
    CSR_PAGES = "csr_pages"
    """Page ids of all requests, concatenated, with an indptr, and the tokens in each request's last page."""
    CSR_TOKENS = "csr_tokens"
    """Token slots of all requests, concatenated; an indptr separates them."""
    NONE = "none"
    """The level does not exist in this mode."""
    OPAQUE = "opaque"
    """Any other layout. Only outputs can be checked, and the verdict reports that."""


class LengthConvention(StrEnum):
    """Tokens that the KV lengths of a level (attention pass) count: prefix tokens, new tokens (the tail), or both."""

    PREFIX = "prefix"
    PREFIX_PLUS_TAIL = "prefix_plus_tail"
    TAIL = "tail"


@dataclass(frozen=True)
class Level:
    """Declares one attention pass over all or part of the keys.

    Attributes:
        layout: layout in which KV positions are named.
        lengths: tokens that are included in the level's KV lengths.
        buffers: role value → buffer name, for the buffers that contain this level's metadata,
            e.g. ``{"kv_lens": "kv_lens"}``. A role that is absent here is read from the batch itself.
        masked: True when the mask of the new tokens (tail) applies in this level.
    """

    layout: Layout
    lengths: LengthConvention
    buffers: dict[str, str] = field(default_factory=dict)
    masked: bool = False


@dataclass(frozen=True)
class MetadataSpec:
    """Declares the meaning of a backend's metadata buffers in one mode.

    Attributes:
        levels: one or two passes; their results are merged. Empty when the plugin declares nothing (`UNDECLARED`).
        live_extent: ``"padded"`` when the backend writes entries of padded requests too, ``"live"`` when it does not.
        pad_fill: prefix length that the backend writes for a padded request, 0 or 1. The number of new tokens
            (tail) is added if the length convention includes it.
        mask_stride: words between two mask rows: `Geometry.mask_words` unless the backend re-encodes the mask.
        mask_dtype: dtype of the packed mask words.
        dummy_rows: position of the surplus rows when ``qo_indptr`` counts more rows than the request has queries:
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
        """True when the suite cannot decode the layout of some level. Then only outputs show which keys a row sees."""
        return not self.levels or any(level.layout is Layout.OPAQUE for level in self.levels)


UNDECLARED = MetadataSpec(())
"""Declaration of a plugin without contract notes. The meaning of its metadata is not checked."""


def over_page_table(geometry: Geometry, **buffers: str) -> dict[Mode, MetadataSpec]:
    """Return the most common declaration for every mode: one attention pass, with mask, over the batch's page table.

    The lengths include the new tokens (the tail).

    Args:
        buffers: role → name of each buffer that the plugin writes, e.g. ``slot_mapping="slots"``.
    """
    level = Level(Layout.PAGE_TABLE, LengthConvention.PREFIX_PLUS_TAIL, buffers, masked=True)
    return dict.fromkeys(geometry.modes, MetadataSpec((level,), mask_stride=geometry.mask_words))
