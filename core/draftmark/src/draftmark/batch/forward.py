"""ForwardBatch: inputs of one forward's attention, in one form for all modes.

Every query row of a request sees the request's whole prefix ``[0, L)``, limited by the sliding window. It also sees the
tail slots that the tail's mask selects. With T tail slots and q query rows, query row j is tail slot ``T - q + j``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..geometry import Mode
from ..lengths import HostLengths


@dataclass(frozen=True)
class Causal:
    """Causal tail: slot s has depth s, and a row sees its own slot and all earlier ones. Contains no tensors."""


@dataclass(frozen=True)
class Tree:
    """Tree tail: a row sees its own slot and its ancestors in a tree or forest. Parents have lower slots than children.

    Attributes:
        mask: int32 ``[num_rows, mask_words]``, packed bits. Bit j of a row (word j // 32, bit j % 32) is set when the
            row sees tail slot j. A row sees its own slot and no later slot. Bits at and above T are zero.
        depth: int32 ``[R, T]``; tail slot s has position L + depth[s]. In RAGGED_VERIFY int32 ``[num_rows]``, one depth
            per row, because every tail slot is a row.
        parents: int32 in the shape of `depth`, parent slot of each tail slot in the request's own tail; -1 for a slot
            after the committed tokens. It describes the same tree as `mask`. None in a batch without state layers.
    """

    mask: torch.Tensor
    depth: torch.Tensor
    parents: torch.Tensor | None = None


@dataclass(frozen=True)
class Block:
    """Block tail: every row sees every slot of its request's tail, also later slots. Contains no tensors.

    A draft model proposes the whole block in one forward (DFlash). A layer with causal blocks gets a
    `Causal` tail. Slot s has depth s. A sliding window still limits how far left a row sees.
    """


Tail = Causal | Tree | Block


@dataclass(frozen=True)
class Chosen:
    """Keys that an indexer chose for each query row: the row attends to these keys only.

    The lists of a batch are those of the layer that runs next. The engine rewrites them in place between `attend` calls
    and between replays, so a backend reads them in `attend` and nowhere else. A list is complete: the tail's mask is
    not applied to it. A tree needs no other form, since a row's list holds keys of the prefix and of its ancestors.

    Slots of a live row are distinct, in any order, and each is one that the row would see without lists. Rows of padded
    requests have count 0 or name slots of null pages. In RAGGED_VERIFY the lists of rows at and after ``q_indptr[R]``
    are undefined and not read. A row without keys has output 0 and log-sum-exp -inf.

    Attributes:
        slots: int32 ``[num_rows, chosen_width]`` on the device, contiguous: KV slots (page · P + offset); -1 anywhere
            is no key. All heads of a row share its list. Entries at and after the row's count hold anything.
        counts: int32 ``[num_rows]`` on the device, contiguous: entries of each row's list, 0 … chosen_width.
    """

    slots: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """Attention inputs of one forward, padded to R requests.

    The core owns the tensors, which are on the device. They are read-only for plugins and valid until the next batch is
    filled into the same buffers. Contents after the live part may be stale.

    Padded requests (index >= `num_reqs`) have prefix length 0, a page table of null pages, and see only themselves. The
    null page id is 0, unless the backend requires unique slots. In a ragged batch padded requests have no rows.

    In RAGGED_VERIFY the device decides the number of rows of each request: `q_indptr` is exact, `q_lens` is a bound.
    Rows from ``q_indptr[R]`` to the budget `num_rows` are padding rows: they store no KV, and their output is finite.

    With a sliding window, a column of `page_table` is left of the window if all its positions lie before
    ``L - window_left``. No row of the request sees them, so an engine may have given the page back. The column holds
    any page id of the pool: the null page, or a page that belongs to another request now. What that page contains (NaN
    too) does not influence any output. The column never holds -1 or an id past the pool's last page.

    Attributes:
        mode: kind of the forward.
        step: index of the DRAFT forward; 0 in other modes.
        prefix_lens: int32 ``[R]``, committed tokens L of each request.
        q_indptr: int32 ``[R + 1]``, first query row of each request.
        page_table: int32 ``[R, max_pages_per_req]`` or wider, page ids; position p is in page p // P at offset
            p % P. Its rows may have any pitch. Columns after position L + T - 1 hold anything.
        tail: `Causal`, `Tree` or `Block`.
        positions: int64 ``[num_rows]``, model positions L + depth, clamped to C - 1.
        host: the host's view of the live requests' prefix_lens.
        num_reqs: live requests; a host number, so a captured region must not use it.
        q_lens: query rows of each request, padded requests included; in RAGGED_VERIFY an upper bound.
        tail_lens: tail slots of each request, padded requests included; in RAGGED_VERIFY an upper bound.
        num_rows: query rows, padding included; in RAGGED_VERIFY the batch's budget.
        slots: int64 ``[num_rows]``, KV slot of each row for an engine that places tokens itself; -1 stores nothing.
            None: the backend computes slots from the page table.
        state_slots: int32 ``[R]``, slot of each request in a `StatePool`; a null slot for a padded request. Slots of
            live requests are distinct. Padded requests may share a null slot. None in a batch without state layers.
        chosen: lists of keys for layers with `AttentionShape.chosen_width`; None in a batch without such layers.
    """

    mode: Mode
    step: int
    prefix_lens: torch.Tensor
    q_indptr: torch.Tensor
    page_table: torch.Tensor
    tail: Tail
    positions: torch.Tensor
    host: HostLengths
    num_reqs: int
    q_lens: tuple[int, ...]
    tail_lens: tuple[int, ...]
    num_rows: int
    slots: torch.Tensor | None
    state_slots: torch.Tensor | None = None
    chosen: Chosen | None = None

    @property
    def padded_reqs(self) -> int:
        """Number of requests R, padding included."""
        return len(self.q_lens)

    @property
    def uniform(self) -> bool:
        """True if all requests have equal rows and tail slots; False in EXTEND and RAGGED_VERIFY, even if equal."""
        return self.mode not in (Mode.EXTEND, Mode.RAGGED_VERIFY)

    @property
    def device(self) -> torch.device:
        """Device of the batch's tensors."""
        return self.prefix_lens.device
