"""Where batches come from: static buffers for uniform modes, fresh tensors for the ragged EXTEND."""

from __future__ import annotations

from itertools import accumulate

import torch

from ..batch_tensors import batch_tensors
from ..errors import BatchError
from ..geometry import Extent, Geometry, Mode
from ..lengths import HostLengths
from ..transfer import to_device
from .forward import Block, Causal, ForwardBatch, Tail, Tree


class BatchBuffers:
    """The core's static batch tensors for one engine: filled before a replay, never moved.

    `uniform(mode, step, padded_reqs, …)` returns a batch whose tensors are the leading part of these buffers, so
    two batches of one padded size share addresses, and a captured graph keeps reading what is filled next.
    """

    def __init__(self, geometry: Geometry, device: torch.device | str) -> None:
        self.geometry = geometry
        made = {
            one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype), device=device)
            for one in batch_tensors(geometry)
        }
        self.prefix_lens, self.page_table = made["prefix_lens"], made["page_table"]
        self.positions, self.mask, self.depth = made["positions"], made["mask"], made["depth"]
        self.q_indptr, self.slots = made.get("q_indptr"), made.get("slots")
        self._indptr: dict[int, torch.Tensor] = {}

    def uniform(
        self, mode: Mode, step: int, padded_reqs: int, num_reqs: int, host: HostLengths, *, tree: bool
    ) -> ForwardBatch:
        """A batch of `padded_reqs` requests of equal extent over the static buffers; contents are the caller's."""
        extent: Extent = self.geometry.extent(mode, step)
        rows, slots = padded_reqs * extent.q_len, padded_reqs * extent.tail_len
        tail: Tail = Block() if mode is Mode.DRAFT_BLOCK else Causal()
        if tree:
            tail = Tree(self.mask[:rows], self.depth[:slots].view(padded_reqs, extent.tail_len))
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
            rows,
            self._slots(rows),
        )

    def ragged_verify(
        self,
        budget: int,
        num_reqs: int,
        host: HostLengths,
        *,
        tree: bool,
        padded_reqs: int | None = None,
        q_bounds: tuple[int, ...] | None = None,
    ) -> ForwardBatch:
        """A RAGGED_VERIFY batch of `budget` rows over the static buffers; contents, `q_indptr` too, are the caller's.

        Args:
            padded_reqs: requests that the graph has room for; as many as the budget has rows, at most max_reqs.
            q_bounds: the most rows of each request, padded ones included; num_draft_tokens unless the host knows less.
        """
        geometry = self.geometry
        assert self.q_indptr is not None, "the geometry serves RAGGED_VERIFY"
        padded = min(geometry.max_reqs, budget) if padded_reqs is None else padded_reqs
        bounds = q_bounds or (geometry.draft.num_draft_tokens,) * padded
        return ForwardBatch(
            Mode.RAGGED_VERIFY,
            0,
            self.prefix_lens[:padded],
            self.q_indptr[: padded + 1],
            self.page_table[:padded],
            Tree(self.mask[:budget], self.depth[:budget]) if tree else Causal(),
            self.positions[:budget],
            host,
            num_reqs,
            bounds,
            bounds,
            budget,
            self._slots(budget),
        )

    def _slots(self, rows: int) -> torch.Tensor | None:
        return None if self.slots is None else self.slots[:rows]

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
    slots: torch.Tensor | None = None,
) -> ForwardBatch:
    """An EXTEND batch: request r brings q_lens[r] new tokens behind its prefix, causal.

    Args:
        prefix_lens: int32 ``[R]`` on the device.
        page_table: int32 ``[R, max_pages_per_req]``.
        q_lens: new tokens of each request; 0 for a padded one.
        num_reqs: live requests, R by default.
        slots: int64 ``[rows]``, the KV slot of each row where the engine places tokens itself.

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
    indptr = to_device(list(accumulate(q_lens, initial=0)), device, torch.int32)
    lens = to_device(q_lens, device)
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
        rows,
        slots,
    )
