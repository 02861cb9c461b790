"""A span of a step as a `ForwardBatch`, over vLLM's own tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from draftmark import Form, Geometry, Mode
from draftmark.runtime import Causal, Exact, ForwardBatch, HostLengths, Unknown, UpperBound

from .spans import REMEMBERED, Span

CAUSAL = Causal()
UNIFORM = (Mode.DECODE, Mode.VERIFY)
"""Modes in which each request of a step has as many rows."""


@dataclass(frozen=True)
class Step:
    """What vLLM says of one step; it owns every tensor.

    Attributes:
        query_start: int32 ``[R + 1]``, first query row of each request. query_start_host: the same on the host.
        seq_lens: int32 ``[R]``, KV tokens of each request, those of this step included.
        page_table: int32 ``[R, columns]``, of vLLM's width.
        slots: int64 ``[rows]``, the KV slot of each row, -1 for a row that stores nothing.
        num_rows: query rows, padding included.
        seq_bounds: of each request what the host knows of `seq_lens`; None if it knows nothing.
        exact: `seq_bounds` are the lengths themselves.
    """

    query_start: torch.Tensor
    query_start_host: tuple[int, ...]
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    num_rows: int
    seq_bounds: tuple[int, ...] | None = None
    exact: bool = False


class StepBuffers:
    """Static tensors of a builder, so that a captured graph finds today's numbers where it was captured with others.

    Args:
        max_reqs, max_rows: of the largest step.
        table_columns: pages of a request in a table of the core's own width, for a backend that takes no other; 0 for
            one that takes vLLM's as it is.
    """

    def __init__(self, max_reqs: int, max_rows: int, device: torch.device, table_columns: int = 0) -> None:
        prefix_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # The same rows are asked for again and again, and a view costs more than to look it up.
        self._prefix_lens, self._positions = (
            lru_cache(REMEMBERED)(partial(part, one)) for one in (prefix_lens, positions)
        )
        self._query_start = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device)
        self._counts = torch.arange(max_reqs + 1, dtype=torch.int32, device=device)
        self._table = torch.zeros(max_reqs, table_columns, dtype=torch.int32, device=device)
        self._uniform: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, step: Step, span: Span, geometry: Geometry) -> ForwardBatch:
        """Give a span as a batch; launches at most five small kernels and waits for nothing."""
        first, reqs, row, rows = span.first_req, span.padded_reqs, span.first_row, span.num_rows
        batch = ForwardBatch(
            mode=span.mode,
            step=0,
            prefix_lens=self._prefix_lens(first, reqs),
            q_indptr=self._indptr(step, span),
            page_table=self._page_table(step, span),
            tail=CAUSAL,
            # Zeros: vLLM rotates q and k itself, tells positions in runner V1 alone, and there a draft model's first
            # step comes with the target's. A window counts L + depth, which a backend works out.
            positions=self._positions(0, rows),
            host=_host(step, span, geometry),
            num_reqs=span.num_reqs,
            q_lens=span.q_lens,
            tail_lens=span.q_lens,
            num_rows=rows,
            slots=part(step.slots, row, rows) if Form.ENGINE_SLOTS in geometry.forms else None,
        )
        self.fill(batch, step, span)
        return batch

    def fill(self, batch: ForwardBatch, step: Step, span: Span) -> None:
        """Work out on the device what a step's tensors say of a batch that was made of this span. Capturable."""
        first, reqs, columns = span.first_req, span.padded_reqs, self._table.shape[1]
        if columns:
            theirs = part(step.page_table, first, reqs)
            batch.page_table[:, : theirs.shape[1]].copy_(theirs[:, :columns])
        refresh(batch, part(step.seq_lens, first, reqs))

    def _page_table(self, step: Step, span: Span) -> torch.Tensor:
        """vLLM's table of a span; or a place for its first columns in memory of our own, where a graph finds it."""
        whole = self._table if self._table.shape[1] else step.page_table
        return part(whole, span.first_req, span.padded_reqs)

    def _indptr(self, step: Step, span: Span) -> torch.Tensor:
        if span.mode in UNIFORM:
            asked = span.q_lens[0], span.padded_reqs
            if asked not in self._uniform:
                self._uniform[asked] = self._counts[: span.padded_reqs + 1] * span.q_lens[0]
            return self._uniform[asked]
        starts = step.query_start[span.first_req : span.first_req + span.padded_reqs + 1]
        if not span.first_row:
            return starts
        return torch.sub(starts, span.first_row, out=self._query_start[: len(starts)])


def part(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """A tensor's rows from `first` on; the tensor itself where they are all, which saves the making of a view."""
    return tensor if not first and count == tensor.shape[0] else tensor[first : first + count]


def refresh(batch: ForwardBatch, seq_lens: torch.Tensor) -> None:
    """Work out the prefix lengths of a batch anew, on the device, in place. Capturable.

    Args:
        seq_lens: int32 ``[padded_reqs]``, KV tokens of each request, its rows of this batch included. Of a padding
            request it is 0, or whatever was there: a prefix is never negative.
    """
    rows: torch.Tensor | int = batch.q_lens[0] if batch.mode in UNIFORM else batch.q_indptr.diff()
    torch.sub(seq_lens, rows, out=batch.prefix_lens)
    batch.prefix_lens.clamp_(min=0)


def _host(step: Step, span: Span, geometry: Geometry) -> HostLengths:
    if step.seq_bounds is None:
        return Unknown(span.num_reqs, geometry.max_prefix_len)
    bounds = step.seq_bounds[span.first_req : span.first_req + span.num_reqs]
    # A bound that assumes every draft accepted may pass the wall, where vLLM trims drafts. The wall is worked out once:
    # it is a formula, and asked for each of 256 requests it took half a millisecond a step.
    wall = geometry.max_prefix_len
    lens = tuple([max(0, min(n - rows, wall)) for n, rows in zip(bounds, span.q_lens, strict=False)])
    return Exact(lens) if step.exact else UpperBound(lens)
