"""Buffer specifications: what must exist before capture and never move.

A plugin names dimensions; the core multiplies, allocates and checks. No torch import here: `draftmark size`
prints the table on a machine that has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from .errors import BufferError
from .geometry import DTYPE_BYTES


class Role(StrEnum):
    """What a buffer means. For every index role the core knows what a batch needs and what the content says."""

    KV_INDPTR = "kv_indptr"
    """Start of each row's KV entries; R + 1 (or rows + 1) of them, monotone, [0] = 0."""
    KV_INDICES = "kv_indices"
    """Page ids or token slots, concatenated by `kv_indptr`."""
    KV_LAST_PAGE_LEN = "kv_last_page_len"
    """Tokens in each request's last page, 1 … P."""
    KV_LENS = "kv_lens"
    """KV length of each request: of its prefix, of its tail, or of both, as the plugin's contract notes say."""
    QO_INDPTR = "qo_indptr"
    """Start of each request's query rows; R + 1."""
    PAGE_TABLE = "page_table"
    """Page ids by request and page number; only for a backend that must re-encode the batch's own."""
    TAIL_MASK = "tail_mask"
    """Packed visibility of tail slots by query row."""
    MASK_INDPTR = "mask_indptr"
    """Start of each request's mask, in the unit of the buffer it points into."""
    SLOT_MAPPING = "slot_mapping"
    """KV slot (page · P + offset) that each query row writes."""
    TAIL_DEPTH = "tail_depth"
    """Depth of each tail slot in its draft tree; its position is L + depth."""
    POSITIONS = "positions"
    """Model position of each query row, L + depth."""
    QUERY_STAGING = "query_staging"
    """Query rows in the order or padding a kernel wants."""
    OUTPUT_STAGING = "output_staging"
    """Output rows in the order or padding a kernel wants."""
    HOST_STAGING = "host_staging"
    """Host memory from which a plan is copied to the device."""
    SPLIT_SCHEDULE = "split_schedule"
    """The plugin's own partition of work."""
    PARTIAL_OUT = "partial_out"
    """Outputs of the parts, before the merge."""
    PARTIAL_LSE = "partial_lse"
    """Log-sum-exp of the parts, before the merge."""
    WORKSPACE = "workspace"
    """Opaque to the core; `formula` names the vendor query or page it comes from."""


OWN_ROLES = frozenset({Role.SPLIT_SCHEDULE, Role.PARTIAL_OUT, Role.PARTIAL_LSE, Role.WORKSPACE})
"""Roles whose need only the plugin knows; `usage` in its contract notes says how much one batch takes."""


class Unit(StrEnum):
    """What one step along the leading extent counts."""

    ROWS = "rows"
    TOKENS = "tokens"
    PAGES = "pages"
    WORDS = "words"
    BYTES = "bytes"


class Memory(StrEnum):
    """Where a buffer lives."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"


class Init(StrEnum):
    """What a buffer holds before its first use."""

    EMPTY = "empty"
    ZEROS = "zeros"


@dataclass(frozen=True)
class BufferSpec:
    """One buffer.

    Attributes:
        name: unique within a backend, e.g. ``"slot_mapping"``.
        role: what the content means.
        shape: extents, outermost first.
        dtype: torch dtype name, e.g. ``"int32"``.
        unit: what the entries count.
        formula: where the shape comes from, for readers: ``"max_rows"`` or a vendor page.
        memory, init: where it lives, and what it holds before its first use.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    unit: Unit
    formula: str
    memory: Memory = Memory.DEVICE
    init: Init = Init.EMPTY

    @property
    def numel(self) -> int:
        """Entries, as the product of the shape."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, guard words not counted."""
        return self.numel * DTYPE_BYTES[self.dtype]


def validate_specs(specs: list[BufferSpec]) -> None:
    """Refuse what cannot be allocated: a name given twice, an unknown dtype, an extent that is no count."""
    seen: set[str] = set()
    for spec in specs:
        if not isinstance(spec, BufferSpec):
            raise BufferError(f"buffers() must return BufferSpec objects, got {spec!r}; see draftmark.buffers")
        if spec.name in seen:
            raise BufferError(f"buffer {spec.name!r} is declared twice; names are unique within a backend")
        seen.add(spec.name)
        if spec.dtype not in DTYPE_BYTES:
            raise BufferError(
                f"buffer {spec.name!r} has dtype {spec.dtype!r}, but only {', '.join(DTYPE_BYTES)} exist; "
                "use the torch dtype's name"
            )
        _check_kinds(spec)
        for extent in spec.shape:
            if not isinstance(extent, int) or isinstance(extent, bool) or extent < 0:
                raise BufferError(
                    f"buffer {spec.name!r} has shape {spec.shape!r}, but extents are integers >= 0; "
                    "check its formula in sizing.py"
                )


def _check_kinds(spec: BufferSpec) -> None:
    """A plain string where an enum is meant compares equal to it, and would then fail the first `is`."""
    kinds = (("role", Role), ("unit", Unit), ("memory", Memory), ("init", Init))
    for name, kind in (*kinds, ("shape", tuple)):
        value = getattr(spec, name)
        if not isinstance(value, kind):
            raise BufferError(
                f"buffer {spec.name!r} has {name} {value!r}, but it must be a {kind.__name__}; "
                "see the fields of draftmark.BufferSpec"
            )
