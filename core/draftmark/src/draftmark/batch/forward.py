"""ForwardBatch: what one forward's attention is given, in the one form that all modes share.

Every query row of a request sees its whole prefix ``[0, L)`` (within the window) and the tail slots that its
row of the tail names. Query row j of a request is tail slot ``T - q + j``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..geometry import Extent, Mode
from ..lengths import HostLengths


@dataclass(frozen=True)
class Causal:
    """Slot s of the tail has depth s, and a row sees the slots up to its own. Carries no tensors."""


@dataclass(frozen=True)
class Tree:
    """A tree or a forest: of the tail a row sees its own slot and its ancestors. Parents stand before children.

    Attributes:
        mask: int32 ``[num_rows, mask_words]``; bit j of a row (word j // 32, bit j % 32) is set when the row
            sees tail slot j. A row sees itself, and no slot behind its own. Bits at and above T are zero.
        depth: int32 ``[R, T]``; the position of tail slot s is L + depth[s]. In RAGGED_VERIFY, where the rows are the
            tail slots, ``[num_rows]``, by row.
    """

    mask: torch.Tensor
    depth: torch.Tensor


@dataclass(frozen=True)
class Block:
    """Every row sees every slot of its request's tail, later ones too; slot s has depth s. Carries no tensors.

    What a draft model proposes at one blow (DFlash). A window still bounds how far left a row sees.
    """


Tail = Causal | Tree | Block


@dataclass(frozen=True)
class ForwardBatch:
    """One forward, padded to R requests. Tensors are on the device, owned by the core, read-only for plugins,
    and valid until the next batch is filled into the same buffers. Memory behind the live part may be stale.

    Padded requests (index >= `num_reqs`) have prefix 0, a page table of null pages (id 0 unless the backend
    asked for unique slots) and see only themselves; in a ragged batch they own no rows.

    In RAGGED_VERIFY the device decides how many rows a request has: `q_indptr` is the fact, and `q_lens` bounds it.
    Rows at and behind ``q_indptr[R]``, up to the budget `num_rows`, belong to nobody: they store no KV, and their
    output is finite.

    Attributes:
        mode, step: what is run; `step` counts DRAFT forwards and is 0 otherwise.
        prefix_lens: int32 ``[R]``, committed tokens L of each request.
        q_indptr: int32 ``[R + 1]``, first query row of each request.
        page_table: int32 ``[R, max_pages_per_req]`` or wider, page ids; position p lies in page p // P at offset
            p % P. Its rows may have any pitch.
        tail: `Causal`, `Tree` or `Block`.
        positions: int64 ``[num_rows]``, model positions L + depth, clamped to C - 1.
        host: what the host knows of prefix_lens of the live requests.
        num_reqs: live requests; a host number, so a captured region must not use it.
        q_lens: query rows of each request, padded ones included; in RAGGED_VERIFY a bound for each.
        tail_lens: tail slots of each request, likewise.
        num_rows: query rows, padding included; in RAGGED_VERIFY the batch's budget.
        slots: int64 ``[num_rows]``, the KV slot of each row where the engine places tokens itself; -1 stores nothing.
            None: the backend derives them from the page table.
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

    @property
    def padded_reqs(self) -> int:
        """R: requests, padding included."""
        return len(self.q_lens)

    @property
    def uniform(self) -> Extent | None:
        """The extent that all requests share, or None for a ragged batch. EXTEND counts as ragged always."""
        if self.mode in (Mode.EXTEND, Mode.RAGGED_VERIFY):
            return None
        return Extent(self.q_lens[0], self.tail_lens[0])

    @property
    def device(self) -> torch.device:
        """Where the batch's tensors live."""
        return self.prefix_lens.device
