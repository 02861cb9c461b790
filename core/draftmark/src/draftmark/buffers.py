"""Specifications of a backend's buffers, which must exist before capture and never move.

A plugin declares shapes; the core computes sizes, allocates and checks. This module does not import torch, so
`draftmark size` prints the buffer table on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from .errors import BufferError
from .geometry import DTYPE_BYTES


class Role(StrEnum):
    """Meaning of a buffer's contents.

    For index roles (indptr, indices, lengths, page table) the core computes the size and contents that a batch needs.
    """

    KV_INDPTR = "kv_indptr"
    """Start of each row's KV entries; R + 1 (or rows + 1) entries, monotone, [0] = 0."""
    KV_INDICES = "kv_indices"
    """Page ids or token slots, concatenated in the order of `kv_indptr`."""
    KV_LAST_PAGE_LEN = "kv_last_page_len"
    """Tokens in each request's last page, 1 … P."""
    KV_LENS = "kv_lens"
    """KV length of each request: prefix, tail or both; the plugin's contract notes specify it."""
    QO_INDPTR = "qo_indptr"
    """Start of each request's query rows; R + 1 entries."""
    PAGE_TABLE = "page_table"
    """Page ids by request and page number; only for a backend that re-encodes the batch's page table."""
    TAIL_MASK = "tail_mask"
    """Packed bits: tail slots that each query row sees."""
    MASK_INDPTR = "mask_indptr"
    """Start of each request's mask, in the unit of the mask buffer."""
    SLOT_MAPPING = "slot_mapping"
    """KV slot (page · P + offset) that each query row writes."""
    TAIL_DEPTH = "tail_depth"
    """Depth of each tail slot in its draft tree; its position is L + depth."""
    TAIL_PARENTS = "tail_parents"
    """Parent slot of each tail slot in its draft tree; -1 for a committed parent."""
    CHOSEN_SLOTS = "chosen_slots"
    """KV slots that each query row attends to in a layer with chosen keys; chosen_width entries per row."""
    CHOSEN_COUNTS = "chosen_counts"
    """Entries of each query row's list of chosen keys."""
    STATE_SLOTS = "state_slots"
    """Slot of each request's recurrent state."""
    POSITIONS = "positions"
    """Model position of each query row, L + depth."""
    QUERY_STAGING = "query_staging"
    """Query rows in the order or padding that a kernel needs."""
    OUTPUT_STAGING = "output_staging"
    """Output rows in the order or padding that a kernel needs."""
    HOST_STAGING = "host_staging"
    """Host memory from which a plan is copied to the device."""
    SPLIT_SCHEDULE = "split_schedule"
    """The plugin's own split of work between CTAs."""
    PARTIAL_OUT = "partial_out"
    """Partial outputs of split-KV, before the combine."""
    PARTIAL_LSE = "partial_lse"
    """Log-sum-exp of the partial outputs, before the combine."""
    STATE_ROWS = "state_rows"
    """States and windows after rows that are not committed yet (snapshots), by layer and batch entry."""
    STATE_RECORDS = "state_records"
    """Inputs of rows that a commit repeats (replay): k, v, decay, β and channels, by layer and batch entry."""
    WORKSPACE = "workspace"
    """Opaque to the core; `formula` names the vendor function or page that specifies the size."""


OWN_ROLES = frozenset({Role.SPLIT_SCHEDULE, Role.PARTIAL_OUT, Role.PARTIAL_LSE, Role.WORKSPACE})
"""Roles with sizes that only the plugin can compute; `usage` in its contract notes returns the size for one batch."""


class Unit(StrEnum):
    """Unit of a buffer's entries."""

    ROWS = "rows"
    TOKENS = "tokens"
    PAGES = "pages"
    SLOTS = "slots"
    ELEMENTS = "elements"
    WORDS = "words"
    BYTES = "bytes"


class Memory(StrEnum):
    """Memory that contains a buffer."""

    DEVICE = "device"
    PINNED = "pinned"
    HOST = "host"


class Init(StrEnum):
    """Contents of a buffer before its first use."""

    EMPTY = "empty"
    ZEROS = "zeros"


@dataclass(frozen=True)
class BufferSpec:
    """Name, shape, dtype and memory of one buffer.

    Attributes:
        name: unique within a backend, e.g. ``"slot_mapping"``.
        role: meaning of the contents.
        shape: extents, outermost first.
        dtype: torch dtype name, e.g. ``"int32"``.
        unit: unit of the entries.
        formula: source of the shape, for readers: ``"max_rows"`` or a vendor page.
        memory: device, pinned host or pageable host memory.
        init: contents before the first use: undefined or zeros.
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
        """Number of entries: the product of the shape."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, without guard words."""
        return self.numel * DTYPE_BYTES[self.dtype]


def validate_specs(specs: list[BufferSpec]) -> None:
    """Raise `BufferError` for a duplicate name, an unknown dtype, a wrong field type or an invalid extent."""
    seen: set[str] = set()
    if not isinstance(specs, (list, tuple)):
        raise BufferError(f"the specifications are {specs!r}, but they must be a list of BufferSpec; write [spec]")
    for spec in specs:
        if not isinstance(spec, BufferSpec):
            raise BufferError(f"buffers() must return BufferSpec objects, got {spec!r}; see draftmark.buffers")
        if spec.name in seen:
            raise BufferError(f"buffer {spec.name!r} is declared twice; names are unique within a backend")
        seen.add(spec.name)
        if spec.dtype not in DTYPE_BYTES:
            raise BufferError(
                f"buffer {spec.name!r} has dtype {spec.dtype!r}, but only {', '.join(DTYPE_BYTES)} exist; "
                "use a torch dtype name"
            )
        _check_kinds(spec)
        for extent in spec.shape:
            if not isinstance(extent, int) or isinstance(extent, bool) or extent < 0:
                raise BufferError(
                    f"buffer {spec.name!r} has shape {spec.shape!r}, but extents must be integers >= 0; "
                    "check the formula of this buffer"
                )


def _check_kinds(spec: BufferSpec) -> None:
    """Raise unless enum fields hold enum members: an equal plain string would pass `==` and fail `is` later."""
    kinds = (("role", Role), ("unit", Unit), ("memory", Memory), ("init", Init))
    for name, kind in (*kinds, ("shape", tuple)):
        value = getattr(spec, name)
        if not isinstance(value, kind):
            raise BufferError(
                f"buffer {spec.name!r} has {name} {value!r}, but it must be a {kind.__name__}; "
                "see the fields of draftmark.BufferSpec"
            )
