"""ForwardBatch: what one forward's attention is told, in the one form that all five modes share.

Every query row of a request sees its whole prefix ``[0, L)`` (within the window) and the tail slots that its
row of the tail names. Query row j of a request is tail slot ``T - q + j``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from .errors import BatchError
from .geometry import Extent, Geometry, Mode
from .lengths import HostLengths


@dataclass(frozen=True)
class Causal:
    """Slot s of the tail has depth s, and a row sees the slots up to its own. Carries no tensors."""


@dataclass(frozen=True)
class Tree:
    """An arbitrary tail.

    Attributes:
        mask: int32 ``[num_rows, mask_words]``; bit j of a row (word j // 32, bit j % 32) is set when the row
            sees tail slot j. A row sees itself. Bits at and above T are zero.
        depth: int32 ``[R, T]``; the position of tail slot s is L + depth[s].
    """

    mask: torch.Tensor
    depth: torch.Tensor


Tail = Causal | Tree


@dataclass(frozen=True)
class ForwardBatch:
    """One forward, padded to R requests. Tensors are on the device, owned by the core, read-only for plugins,
    and valid until the next batch is filled into the same buffers. Memory behind the live part may be stale.

    Padded requests (index >= `num_reqs`) have prefix 0, a page table of null pages (id 0 unless the backend
    asked for unique slots) and see only themselves; in a ragged batch they own no rows.

    Attributes:
        mode, step: what is run; `step` counts DRAFT forwards and is 0 otherwise.
        prefix_lens: int32 ``[R]``, committed tokens L of each request.
        q_indptr: int32 ``[R + 1]``, first query row of each request.
        page_table: int32 ``[R, max_pages_per_req]``, page ids; position p lies in page p // P at offset p % P.
        tail: `Causal` or `Tree`.
        positions: int64 ``[num_rows]``, model positions L + depth, clamped to C - 1.
        host: what the host knows of prefix_lens of the live requests.
        num_reqs: live requests; a host number, so a captured region must not use it.
        q_lens: query rows of each request, padded ones included. Always known on the host.
        tail_lens: tail slots of each request, likewise.
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

    @property
    def padded_reqs(self) -> int:
        """R: requests, padding included."""
        return len(self.q_lens)

    @property
    def num_rows(self) -> int:
        """Query rows, padding included."""
        return int(self.positions.shape[0])

    @property
    def uniform(self) -> Extent | None:
        """The extent that all requests share, or None for a ragged batch. EXTEND counts as ragged always."""
        if self.mode is Mode.EXTEND:
            return None
        return Extent(self.q_lens[0], self.tail_lens[0])

    @property
    def device(self) -> torch.device:
        """Where the batch's tensors live."""
        return self.prefix_lens.device


def validate(batch: ForwardBatch, geometry: Geometry) -> ForwardBatch:
    """Check shapes, dtypes and host numbers of a batch against its geometry; no device read.

    Raises:
        BatchError: the first contradiction, with what was got, the limit and the remedy.
    """
    if batch.mode not in geometry.modes:
        modes = ", ".join(mode.value for mode in geometry.modes)
        raise BatchError(f"mode is {batch.mode.value}, but the geometry serves {modes}; create it with that mode")
    _check_requests(batch, geometry)
    _check_extent(batch, geometry)
    r, rows = batch.padded_reqs, sum(batch.q_lens)
    _shape("prefix_lens", batch.prefix_lens, (r,), torch.int32)
    _shape("q_indptr", batch.q_indptr, (r + 1,), torch.int32)
    _shape("page_table", batch.page_table, (r, geometry.max_pages_per_req), torch.int32)
    _shape("positions", batch.positions, (rows,), torch.int64)
    if isinstance(batch.tail, Tree):
        _shape("tail.mask", batch.tail.mask, (rows, geometry.mask_words), torch.int32)
        _shape("tail.depth", batch.tail.depth, (r, max(batch.tail_lens)), torch.int32)
    return batch


def _check_requests(batch: ForwardBatch, geometry: Geometry) -> None:
    r = batch.padded_reqs
    if r > geometry.max_reqs and batch.mode is not Mode.EXTEND:
        raise BatchError(
            f"the batch is padded to {r} requests, but max_reqs is {geometry.max_reqs}; "
            "raise max_num_reqs or capture a larger batch"
        )
    if not 0 <= batch.num_reqs <= r:
        raise BatchError(f"num_reqs is {batch.num_reqs}, but the batch is padded to {r}; pad to at least num_reqs")
    if not isinstance(batch.host, HostLengths):
        raise BatchError(
            f"host is {batch.host!r}, but it is Exact, UpperBound or Unknown, never absent; "
            "take it from SequenceLengths"
        )
    bounds = batch.host.upper_bound()
    if len(bounds) != batch.num_reqs:
        raise BatchError(
            f"host lengths cover {len(bounds)} requests, but {batch.num_reqs} are live; "
            "take them from SequenceLengths for the same rows"
        )
    wrong = next((n for n in bounds if not 0 <= n <= geometry.max_prefix_len), None)
    if wrong is not None:
        raise BatchError(
            f"a host length is {wrong}, but prefixes are 0 … {geometry.max_prefix_len}; take them from SequenceLengths"
        )


def _check_extent(batch: ForwardBatch, geometry: Geometry) -> None:
    if batch.mode is Mode.EXTEND:
        if batch.tail_lens != batch.q_lens or min(batch.q_lens, default=0) < 0:
            raise BatchError(
                f"EXTEND has q_lens {batch.q_lens} and tail_lens {batch.tail_lens}, but every new token is a row and "
                "a tail slot, and counts are >= 0; build it with draftmark.batch.ragged"
            )
        return
    if not 0 <= batch.step < max(1, geometry.num_draft_steps):
        raise BatchError(
            f"step is {batch.step}, but num_steps {geometry.draft.num_steps} has DRAFT steps 0 … "
            f"{geometry.num_draft_steps - 1}; raise num_steps or stop drafting"
        )
    extent = geometry.extent(batch.mode, batch.step)
    if set(batch.q_lens) != {extent.q_len} or set(batch.tail_lens) != {extent.tail_len}:
        raise BatchError(
            f"{batch.mode.value} has {extent.q_len} rows and {extent.tail_len} tail slots a request, "
            f"got q_lens {batch.q_lens} and tail_lens {batch.tail_lens}; take them from Geometry.extent"
        )
    if batch.mode is Mode.DRAFT and extent.q_len > 1 and isinstance(batch.tail, Causal):
        raise BatchError(
            f"tail is Causal(), but the {extent.q_len} branches of a draft step see their own ancestors only; "
            "pass a Tree"
        )


def _shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        want = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise BatchError(f"{name} is {got}, but this batch needs {want}; size it from the geometry")


class BatchBuffers:
    """The core's static batch tensors for one engine: filled before a replay, never moved.

    `uniform(mode, step, padded_reqs, …)` returns a batch whose tensors are the leading part of these buffers, so
    two batches of one padded size share addresses, and a captured graph keeps reading what is filled next.
    """

    def __init__(self, geometry: Geometry, device: torch.device | str) -> None:
        r, rows = geometry.max_reqs, geometry.max_rows_any
        self.geometry = geometry
        self.prefix_lens = torch.zeros(r, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(r, geometry.max_pages_per_req, dtype=torch.int32, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.mask = torch.zeros(rows, geometry.mask_words, dtype=torch.int32, device=device)
        self.depth = torch.zeros(r * geometry.max_tail, dtype=torch.int32, device=device)
        self._indptr: dict[int, torch.Tensor] = {}

    def uniform(
        self, mode: Mode, step: int, padded_reqs: int, num_reqs: int, host: HostLengths, *, tree: bool
    ) -> ForwardBatch:
        """A batch of `padded_reqs` requests of equal extent over the static buffers; contents are the caller's."""
        extent: Extent = self.geometry.extent(mode, step)
        rows, slots = padded_reqs * extent.q_len, padded_reqs * extent.tail_len
        tail = Tree(self.mask[:rows], self.depth[:slots].view(padded_reqs, extent.tail_len)) if tree else Causal()
        return ForwardBatch(
            mode,
            step,
            self.prefix_lens[:padded_reqs],
            self._uniform_indptr(extent.q_len)[: padded_reqs + 1],
            self.page_table[:padded_reqs],
            tail,
            self.positions[:rows],
            host,
            num_reqs,
            (extent.q_len,) * padded_reqs,
            (extent.tail_len,) * padded_reqs,
        )

    def _uniform_indptr(self, q_len: int) -> torch.Tensor:
        if q_len not in self._indptr:
            counts = torch.arange(self.geometry.max_reqs + 1, dtype=torch.int32, device=self.prefix_lens.device)
            self._indptr[q_len] = counts * q_len
        return self._indptr[q_len]


def ragged(
    geometry: Geometry,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    q_lens: tuple[int, ...],
    host: HostLengths,
    num_reqs: int | None = None,
) -> ForwardBatch:
    """An EXTEND batch: request r brings q_lens[r] new tokens behind its prefix, causal.

    Args:
        prefix_lens: int32 ``[R]`` on the device.
        page_table: int32 ``[R, max_pages_per_req]``.
        q_lens: new tokens of each request; 0 for a padded one.
        num_reqs: live requests, R by default.

    Raises:
        BatchError: more rows than `Limits.max_extend_tokens`.
    """
    rows = sum(q_lens)
    if min(q_lens, default=0) < 0:
        raise BatchError(f"q_lens is {q_lens}, but a request brings at least 0 tokens; give the chunk of each prompt")
    if rows > geometry.limits.max_extend_tokens:
        raise BatchError(
            f"EXTEND brings {rows} tokens, but max_extend_tokens is {geometry.limits.max_extend_tokens}; "
            "split the prompts into chunks"
        )
    device = prefix_lens.device
    indptr = torch.tensor(list(accumulate(q_lens, initial=0)), dtype=torch.int32).to(device)
    lens = torch.tensor(q_lens, dtype=torch.int64).to(device)
    offset = torch.arange(rows, device=device) - indptr[:-1].long().repeat_interleave(lens, output_size=rows)
    positions = prefix_lens.long().repeat_interleave(lens, output_size=rows) + offset
    live = len(q_lens) if num_reqs is None else num_reqs
    return ForwardBatch(
        Mode.EXTEND,
        0,
        prefix_lens,
        indptr,
        page_table,
        Causal(),
        positions.clamp(max=geometry.limits.max_context_len - 1),
        host,
        live,
        q_lens,
        q_lens,
    )
