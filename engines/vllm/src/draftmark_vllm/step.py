"""Converts a run of a vLLM step to a `ForwardBatch` over vLLM's own tensors, and checks it in the debug mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from operator import sub
from typing import Any

import torch

from draftmark import Form, Geometry, Mode
from draftmark.runtime import Block, Causal, Exact, ForwardBatch, HostLengths, Unknown, UpperBound, slots_of, validate
from draftmark_engines import EngineError

from .batch_runs import CACHE_SIZE, BatchRun

CAUSAL, BLOCK = Causal(), Block()
UNIFORM = (Mode.DECODE, Mode.VERIFY, Mode.DRAFT_BLOCK)
"""Modes in which every request of a step has the same number of rows."""


@dataclass(slots=True)  # not frozen: a frozen object takes twice as long to create, in every step
class Step:
    """Holds vLLM's metadata of one step. Its fields must not be reassigned. vLLM owns every tensor.

    Attributes:
        query_start: int32 ``[R + 1]``, first query row of each request. query_start_host: its copy on the host.
        seq_lens: int32 ``[R]``, KV tokens of each request, including rows of this step.
        page_table: int32 ``[R, columns]``, in vLLM's width.
        slots: int64 ``[rows]``, the KV slot of each row, -1 for a row that stores nothing.
        num_rows: query rows, padding included.
        seq_bounds: the host's upper bounds of `seq_lens`, one for each request; None if the host has none.
        exact: whether `seq_bounds` are the exact lengths.
        causal: False in a block drafter's step, in which the rows of a request see one another.
    """

    query_start: torch.Tensor
    query_start_host: tuple[int, ...]
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    slots: torch.Tensor
    num_rows: int
    seq_bounds: tuple[int, ...] | None = None
    exact: bool = False
    causal: bool = True


class StepBatch(ForwardBatch):
    """Batch of a run over vLLM's tensors, which is made in every step.

    A frozen dataclass sets each field by a call; this class sets all fields at once. It creates `positions` at first
    read, because draftmark's own backends do not read them.

    Args:
        zeros: int64, at least one zero for each row; None if `fields` has positions.
        fields: the fields of `ForwardBatch`.
    """

    def __init__(self, zeros: torch.Tensor | None = None, **fields: Any) -> None:
        vars(self).update(fields, _zeros=zeros)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Zeros: vLLM applies rotary embedding itself.

        Its positions are not used, because only runner V1 passes them, and in a draft model's first step they are the
        target's. For windows a backend adds depth to prefix length.
        """
        zeros: torch.Tensor = vars(self)["_zeros"]
        return zeros[: self.num_rows]


class StepBuffers:
    """Holds a builder's static tensors. Each step is written into them, and captured graphs read their fixed addresses.

    Args:
        max_reqs, max_rows: requests and rows of the largest step.
        table_columns: pages of a request in a copy of the page table, for a backend without ENGINE_TABLE; 0 for a
            backend that takes vLLM's table.
    """

    def __init__(self, max_reqs: int, max_rows: int, device: torch.device, table_columns: int = 0) -> None:
        prefix_lens = torch.zeros(max_reqs, dtype=torch.int32, device=device)
        # Views are cached by (first, count): many steps need equal views, and a look-up is cheaper than a new view.
        self._prefix_lens = lru_cache(CACHE_SIZE)(partial(part, prefix_lens))
        self._zeros = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._query_start = torch.zeros(max_reqs + 1, dtype=torch.int32, device=device)
        self._counts = torch.arange(max_reqs + 1, dtype=torch.int32, device=device)
        self._table = torch.zeros(max_reqs, table_columns, dtype=torch.int32, device=device)
        self._columns = table_columns
        self._uniform: dict[tuple[int, int], torch.Tensor] = {}

    def forward(self, step: Step, run: BatchRun, geometry: Geometry) -> ForwardBatch:
        """Convert a run to a batch. This launches at most five small kernels, and does not wait for the device."""
        batch = self.batch(step, run, geometry)
        self.fill(batch, step, run)
        return batch

    def batch(self, step: Step, run: BatchRun, geometry: Geometry) -> ForwardBatch:
        """Return the batch of a run. Call `fill` next, which computes the step-dependent tensors."""
        mode, first, row, rows, q_lens = run.mode, run.first_req, run.first_row, run.num_rows, run.q_lens
        reqs, table = len(q_lens), self._table if self._columns else step.page_table
        is_whole = not first and reqs + 1 == len(step.query_start_host)  # true in most steps with a prompt
        return StepBatch(
            self._zeros,
            mode=mode,
            step=0,
            prefix_lens=self._prefix_lens(first, reqs),
            q_indptr=step.query_start if is_whole and mode not in UNIFORM else self._indptr(step, run),
            page_table=part(table, first, reqs),  # without ENGINE_TABLE, `fill` copies the table into static memory
            tail=CAUSAL if step.causal else BLOCK,
            host=_host(step, run, geometry),
            num_reqs=run.num_reqs,
            q_lens=q_lens,
            tail_lens=q_lens,
            num_rows=rows,
            slots=part(step.slots, row, rows) if Form.ENGINE_SLOTS in geometry.forms else None,
        )

    def fill(self, batch: ForwardBatch, step: Step, run: BatchRun) -> None:
        """Compute the batch's step-dependent tensors on the device. A CUDA graph can capture this call."""
        first, reqs, columns = run.first_req, run.padded_reqs, self._columns
        if columns:
            theirs = part(step.page_table, first, reqs)
            batch.page_table[:, : theirs.shape[1]].copy_(theirs[:, :columns])
        refresh(batch, part(step.seq_lens, first, reqs))

    def prefixes(self, step: Step) -> Callable[[], object] | None:
        """Return a function that computes the prefix lengths of an EXTEND run of any step in the same memory of vLLM.

        A step's tensors are the first elements of longer tensors. The function reads all elements, so it computes a
        prefix length for the maximum number of requests. Those past the step's requests are undefined. A CUDA graph
        can capture a call.

        Returns:
            None if vLLM's tensors are shorter than the maximum number of requests, or if `fill` also copies the page
            table.
        """
        reqs = len(self._counts) - 1
        starts, seq_lens = step.query_start, step.seq_lens
        if self._columns or _elements(starts) <= reqs or _elements(seq_lens) < reqs:
            return None
        at, found = starts.storage_offset(), self._prefix_lens(0, reqs)
        first, after = (starts.as_strided((reqs,), (1,), offset) for offset in (at, at + 1))
        lens = seq_lens.as_strided((reqs,), (1,))

        def compute() -> None:
            torch.sub(first, after, out=found)
            found.add_(lens)

        return compute

    def _indptr(self, step: Step, run: BatchRun) -> torch.Tensor:
        if run.mode in UNIFORM:
            key = run.q_lens[0], run.padded_reqs
            if key not in self._uniform:
                self._uniform[key] = self._counts[: run.padded_reqs + 1] * run.q_lens[0]
            return self._uniform[key]
        starts = part(step.query_start, run.first_req, run.padded_reqs + 1)
        if not run.first_row:
            return starts
        return torch.sub(starts, run.first_row, out=self._query_start[: len(starts)])


def part(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return `count` rows from row `first`. If the tensor has no other rows, return the tensor itself, not a view."""
    return tensor if not first and count == tensor.shape[0] else tensor[first : first + count]


def _elements(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first one to the end of its memory; 0 if it is not contiguous."""
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    return int(whole - tensor.storage_offset()) if tensor.is_contiguous() else 0


def refresh(batch: ForwardBatch, seq_lens: torch.Tensor) -> None:
    """Recompute the prefix lengths of a batch in place, on the device. A CUDA graph can capture this call.

    Args:
        seq_lens: int32 ``[padded_reqs]``, KV tokens of each request, including its rows of this batch. For a padding
            request this is 0 or a stale value, so prefixes are clamped at 0.
    """
    prefix_lens, starts = batch.prefix_lens, batch.q_indptr
    if batch.mode in UNIFORM:
        torch.sub(seq_lens, batch.q_lens[0], out=prefix_lens)
        prefix_lens.clamp_(min=0)
        return
    torch.sub(starts[:-1], starts[1:], out=prefix_lens)
    prefix_lens.add_(seq_lens)
    if batch.padded_reqs > batch.num_reqs:
        prefix_lens.clamp_(min=0)


def _host(step: Step, run: BatchRun, geometry: Geometry) -> HostLengths:
    if step.seq_bounds is None:
        return Unknown(run.num_reqs, geometry.max_prefix_len)
    bounds = step.seq_bounds[run.first_req : run.first_req + run.num_reqs]
    least = run.q_lens if run.budget is None else (1,) * run.num_reqs  # a bound of rows gives no bound of the prefix
    lens, longest = tuple(map(sub, bounds, least)), geometry.max_prefix_len
    # vLLM's bounds assume that every draft is accepted, so they can exceed the maximum prefix, at which vLLM trims
    # drafts. Comparisons, because `min` and `max` of each request take three times as long.
    if lens and (min(lens) < 0 or max(lens) > longest):
        lens = tuple([0 if n < 0 else longest if n > longest else n for n in lens])
    return Exact(lens) if step.exact else UpperBound(lens)


def check_batch(batch: ForwardBatch, geometry: Geometry, slots: torch.Tensor) -> None:
    """Check a batch against its geometry, and vLLM's KV slots against slots derived from its page table.

    This is the debug mode: it copies tensors to the host.

    Args:
        slots: int64 ``[rows of the batch]``, vLLM's slots, also for a backend that derives them itself.

    Raises:
        BatchError: a tensor contradicts the geometry.
        EngineError: vLLM's slot of a live row differs from the derived slot.
    """
    validate(batch, geometry)
    starts, prefixes = batch.q_indptr.tolist(), batch.prefix_lens.tolist()
    for request in range(batch.num_reqs):
        first, rows = starts[request], starts[request + 1] - starts[request]
        given = slots[first : first + rows]
        if not len(given) or int(given.max()) < 0 or _is_dummy(batch, request, prefixes[request], geometry):
            continue
        positions = torch.arange(prefixes[request], prefixes[request] + rows, device=batch.device)
        # vLLM stores no drafts past the maximum length (slot -1), and the request may have no page there.
        there = given >= 0
        derived = slots_of(
            batch.page_table[request : request + 1], positions[there][None], geometry.attention.page_size
        )
        if not torch.equal(derived[0], given[there]):
            raise EngineError(
                f"request {request} of a {batch.mode.value} batch stores rows {first} to {first + rows - 1} at slots "
                f"{given.tolist()}, but its page table and prefix {prefixes[request]} give {derived[0].tolist()}; "
                "report this as a bug, with vLLM's version and arguments"
            )


def _is_dummy(batch: ForwardBatch, request: int, prefix: int, geometry: Geometry) -> bool:
    """Return True for a dummy request of vLLM's warm-up: its pages are the null page, which no live request has."""
    return int(batch.page_table[request, prefix // geometry.attention.page_size]) == 0
