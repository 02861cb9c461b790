"""Meaning of a backend's buffers, which only this suite reads.

The first of these rules that fits gives a buffer its role:

1. ``roles`` of the plugin's contract notes, by the buffer's name;
2. a level of the plugin's layouts that names the buffer;
3. a name that is a role, e.g. ``kv_lens``;
4. a recurrent layer's buffer keeps records of rows; other host memory stages plans; the rest is a workspace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from draftmark import BufferSpec, Mode

from .layouts import Layout, MetadataSpec


class Role(StrEnum):
    """Meaning of a buffer's contents.

    For index roles (indptr, indices, lengths, page table) the suite computes the size and contents that a batch needs.
    """

    KV_INDPTR = "kv_indptr"
    """Start of each row's KV entries; R + 1 (or rows + 1) entries, monotone, [0] = 0."""
    KV_INDICES = "kv_indices"
    """Page ids or token slots, concatenated in the order of `kv_indptr`."""
    KV_LAST_PAGE_LEN = "kv_last_page_len"
    """Tokens in each request's last page, 1 … P."""
    KV_LENS = "kv_lens"
    """KV length of each request: prefix, tail or both; its level says which."""
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
    """Opaque to the suite; `formula` names the vendor function or page that specifies the size."""


OWN_ROLES = frozenset({Role.SPLIT_SCHEDULE, Role.PARTIAL_OUT, Role.PARTIAL_LSE, Role.WORKSPACE})
"""Roles with sizes that only the plugin can compute; `usage` in its contract notes returns the size for one batch."""

USAGE_ROLES = OWN_ROLES | {Role.HOST_STAGING}
"""Roles with sizes that only the plugin's `usage()` can compute."""


@dataclass(frozen=True)
class Buffer(BufferSpec):
    """Specification of a buffer, with the meaning of its contents.

    Attributes:
        role: meaning of the contents.
        by_token: True if the indices in the buffer count tokens, False if they count pages.
    """

    role: Role = Role.WORKSPACE
    by_token: bool = True


def with_roles(
    specs: Iterable[BufferSpec], metadata: Mapping[Mode, MetadataSpec], said: Mapping[str, Role], *, state: bool = False
) -> list[Buffer]:
    """Return the buffers with their roles.

    Args:
        metadata: the plugin's layouts, by mode.
        said: ``roles`` of the plugin's contract notes.
        state: the buffers belong to recurrent layers.
    """
    levels = [level for meta in metadata.values() for level in meta.levels]
    named = {name: role for level in reversed(levels) for role, name in level.buffers.items() if role in _VALUES}
    pages = {name for level in levels if level.layout is Layout.CSR_PAGES for name in level.buffers.values()}
    found = []
    for spec in specs:
        role = said.get(spec.name) or named.get(spec.name) or (spec.name if spec.name in _VALUES else "")
        rest = Role.STATE_RECORDS if state else Role.WORKSPACE if not spec.pinned else Role.HOST_STAGING
        found.append(Buffer(**vars(spec), role=Role(role) if role else rest, by_token=spec.name not in pages))
    return found


_VALUES = frozenset(Role)
