"""Runs forwards with an engine's own KV slots, page tables and KV layouts, and checks the cache and the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from draftmark.batch import BatchBuffers, ForwardBatch, Tree
from draftmark.batch import ragged as ragged_batch
from draftmark.cache import KVCache
from draftmark.geometry import Form, Mode
from draftmark.graphs import GraphKey
from draftmark.lengths import HostLengths
from draftmark.requirements import HostLengthsNeed

from ..backend_under_test import BackendUnderTest
from ..cases.engine_forwards import EngineForward
from ..cases.forwards import TRAPS, ForwardCase
from ..check import ContractViolation
from ..failing_batch import Wrong
from ..oracle import formulas
from ..oracle.attention import Answer, attend
from ..oracle.history import Request, kv_slots
from ..sizing.usage import judged_own_buffers
from . import assertions
from .graph_harness import no_sync
from .tensors import host_lengths, mask_words, raw

SURPLUS, PITCH = 3, 5
"""Columns of an engine's page table after the geometry's columns, and columns from there to the next row."""
NOWHERE = -1
"""Entry of those columns: no page."""
SINK = 3.0
"""Mean of the random sinks: the logarithm of about twenty keys."""


@dataclass(frozen=True)
class Loaded:
    """Holds a forward with inputs already in the harness's tensors, and its expected result.

    Attributes:
        case: the forward.
        batch: the batch that the backend receives.
        pools: expected k and v ``[slots, kv_heads, head_dim]`` after the forward.
        answer: expected output of the live rows.
    """

    case: EngineForward
    batch: ForwardBatch
    pools: list[torch.Tensor]
    answer: Answer


class EngineHarness:
    """Opens a backend, and runs forwards of one geometry, one mode and one number of rows on fixed tensors.

    Raises `Refused` if the backend refuses the geometry.
    """

    def __init__(self, subject: BackendUnderTest, *cases: EngineForward) -> None:
        self.subject, self.geometry = subject, cases[0].geometry
        self.backend, self.arena = subject.open(self.geometry)
        needs = subject.backend.requirements(self.geometry)
        self.null_pages = formulas.null_pages(self.geometry, needs.unique_slots)
        kinds = {HostLengthsNeed.NONE: "unknown", HostLengthsNeed.UPPER_BOUND: "upper_bound"}
        self._kind = kinds.get(needs.host_lengths, "exact")
        self.buffers = BatchBuffers(self.geometry, subject.device)
        reqs = max(len(case.forward.requests) for case in cases)
        self.table = self._own_table(reqs)
        a, rows = self.geometry.attention, max(case.num_rows for case in cases)
        dtype = getattr(torch, a.q_dtype)
        self.q = torch.empty(rows, a.num_qo_heads, a.head_dim, dtype=dtype, device=subject.device)
        self.k = torch.empty(rows, a.num_kv_heads, a.head_dim, dtype=dtype, device=subject.device)
        self.v, self.out = torch.empty_like(self.k), torch.empty_like(self.q)
        self._sinks = torch.zeros(a.num_qo_heads, device=subject.device) if a.sinks else None
        self.cache = self._own_cache(max(case.forward.num_pages for case in cases) + self.null_pages - 1)
        self._dirty()

    def _own_table(self, reqs: int) -> torch.Tensor:
        """Return the static page table, or an engine's wider table with its own row pitch, filled with `NOWHERE`."""
        width = self.buffers.page_table.shape[1]
        if Form.ENGINE_TABLE not in self.geometry.forms:
            return self.buffers.page_table
        whole = torch.full((reqs, width + PITCH), NOWHERE, dtype=torch.int32, device=self.subject.device)
        return whole[:, : width + SURPLUS]

    def _own_cache(self, pages: int) -> KVCache:
        """Return a contiguous pool, or views of packed pages (k and v of a page adjacent, heads before tokens)."""
        a, device = self.geometry.attention, self.subject.device
        dtype = getattr(torch, a.kv_dtype)
        if Form.STRIDED_KV in self.geometry.forms:
            packed = torch.empty(pages, 2, a.num_kv_heads, a.page_size, a.head_dim, dtype=dtype, device=device)
            return KVCache(packed[:, 0].transpose(1, 2), packed[:, 1].transpose(1, 2), sinks=self._sinks)
        kv = torch.empty(2, pages, a.page_size, a.num_kv_heads, a.head_dim, dtype=dtype, device=device)
        return KVCache(kv[0], kv[1], sinks=self._sinks)

    def _dirty(self) -> None:
        """Fill the static buffers with stale values, as an earlier and longer batch leaves them."""
        b, limits = self.buffers, self.geometry.limits
        b.prefix_lens.fill_(limits.max_context_len)
        b.page_table.fill_(len(self.cache.k) - 1)
        b.positions.fill_(limits.max_context_len - 1)
        b.mask.fill_(-1)
        b.depth.fill_(3)
        if b.q_indptr is not None:
            b.q_indptr.fill_(b.positions.numel())
        if b.slots is not None:
            b.slots.fill_(-1)

    # -- steps that an engine runs: load, step, capture ---------------------------------------------------

    def load(self, case: EngineForward, seed: int = 0, host: str = "") -> Loaded:
        """Put a forward on the tensors: batch, rows, and a pool with the KV of earlier forwards.

        Args:
            seed: seed of the random rows and KV.
            host: kind of host lengths, see `host_lengths`; by default the least exact kind that the backend accepts.
        """
        if self.null_pages > 1:
            case = replace(case, forward=case.forward.with_null_pages(self.null_pages))
        self.subject.current = case
        self._fill_rows(seed)
        self._fill_cache(case, seed)
        pools = [pool.reshape(-1, *pool.shape[2:]).clone() for pool in (self.cache.k, self.cache.v)]
        stored = [(number, row) for number, row in enumerate(case.forward.rows) if row in case.truth.writes]
        for number, row in stored:
            if row not in case.unstored:
                for pool, rows in zip(pools, (self.k, self.v), strict=True):
                    pool[case.truth.writes[row]] = rows[number].to(pool.dtype)
        live = self.q[: len(case.forward.rows)]
        a, scales = self.geometry.attention, (None, None)
        answer = attend(live, pools[0], pools[1], case.truth.visible, case.forward.rows, a, scales, self._sinks)
        return Loaded(case, self._batch(case, host or self._kind), pools, answer)

    def step(self, loaded: Loaded) -> None:
        """Run the device part of a forward: write_metadata, then write_kv and attend if kernels run in this tier."""
        self.backend.write_metadata(loaded.batch)
        if not self.subject.kernels:
            self.subject.interpreted()
            return
        self.subject.attended = True
        n = loaded.case.num_rows
        self.backend.write_kv(self.k[:n], self.v[:n], self.cache, loaded.batch)
        self.backend.attend(self.q[:n], self.cache, loaded.batch, self.out[:n])

    def run(self, case: EngineForward) -> None:
        """Run a forward eagerly and check it, with the least exact host lengths that suffice and with exact ones."""
        for seed, host in enumerate(dict.fromkeys((self._kind, "exact"))):
            loaded = self.load(case, seed, host)
            self.backend.plan(loaded.batch)
            self.step(loaded)
            self.assert_loaded(loaded)

    def assert_within_usage(self, case: EngineForward) -> None:
        """Run a forward on poisoned buffers, and check that no byte after the size declared by `usage()` changes."""
        own = judged_own_buffers(self.subject, self.arena.specs)
        loaded = self.load(case)
        self.arena.poison()
        bytes_past_usage = assertions.BytesPastUsage(self.arena, self.subject.usage(self.geometry, loaded.batch, own))
        self.backend.plan(loaded.batch)
        self.step(loaded)
        self.assert_loaded(loaded)
        bytes_past_usage.assert_unchanged(case)

    def capture(self, key: GraphKey, case: EngineForward) -> Callable[[EngineForward, int], None]:
        """Capture a forward. Return a function that replays the graph on another forward and checks the result."""
        state = self.subject.graph_state(self.geometry)
        loaded = self.load(case)
        self.backend.plan(loaded.batch)
        self.step(loaded)  # Run the step once before the capture, as an engine's warm-up does.
        with no_sync(self.subject.device):
            state.capture(key, lambda: self.step(loaded))

        def replay(other: EngineForward, seed: int) -> None:
            again = self.load(other, seed)
            self.backend.plan(again.batch)
            with no_sync(self.subject.device):
                state.replay(key)
            self.assert_loaded(again)

        return replay

    def assert_loaded(self, loaded: Loaded) -> None:
        """Check the cache, the output, and the bytes around the buffers after a forward.

        Raises:
            ContractViolation: the cache, the output or a guard byte is wrong.
        """
        if self.subject.kernels:
            self._assert_cache(loaded)
            case = loaded.case
            out = self.out[: case.num_rows]
            assertions.assert_output(out, loaded.answer, self.geometry.attention, case.forward, case)
        assertions.assert_guards(self.arena, loaded.case)

    # -- helpers that fill the static tensors -------------------------------------------------------------

    def _fill_rows(self, seed: int) -> None:
        """Fill all rows with random numbers, padding rows too, as in an engine's buffers. `out` becomes NaN."""
        dice = torch.Generator().manual_seed(seed)
        for rows in (self.q, self.k, self.v):
            rows.copy_(torch.randn(rows.shape, generator=dice))
        self.out.fill_(float("nan"))
        if self._sinks is not None:
            self._sinks.copy_(SINK + torch.randn(self._sinks.shape, generator=dice))

    def _fill_cache(self, case: EngineForward, seed: int) -> None:
        """Fill the cache: random KV where earlier forwards stored some, zeros in the null pages, NaN elsewhere."""
        dice, size = torch.Generator().manual_seed(seed + 1), self.geometry.attention.page_size
        filled = [case.truth.writes[row] for row in sorted(case.unstored)]
        for one in case.forward.requests:
            filled += kv_slots(one, size)[: one.prefix + one.tail - one.rows] if one.live else []
        slots = torch.tensor(filled, dtype=torch.int64, device=self.subject.device)
        for pool in (self.cache.k, self.cache.v):
            pool.fill_(float("nan"))
            pool[: self.null_pages] = 0
            values = torch.randn((len(slots), *pool.shape[2:]), generator=dice).to(pool.dtype)
            pool[slots // size, slots % size] = values.to(pool.device)

    def _batch(self, case: EngineForward, kind: str) -> ForwardBatch:
        """Return the forward's batch as an engine passes it: over static buffers, in the geometry's forms."""
        forward, b, reqs = case.forward, self.buffers, len(case.forward.requests)
        b.prefix_lens[:reqs] = torch.tensor([one.prefix for one in forward.requests], dtype=torch.int32)
        self._fill_table(case)
        host, slots = host_lengths(forward, kind), None
        if b.slots is not None:
            slots = b.slots[: case.num_rows]
            slots.copy_(torch.tensor([*map(case.slot, forward.rows), *[-1] * (case.num_rows - len(forward.rows))]))
        if forward.mode is Mode.EXTEND:
            q_lens = tuple(one.rows for one in forward.requests)
            lens = b.prefix_lens[:reqs]
            return ragged_batch(self.geometry, lens, self.table[:reqs], q_lens, host, forward.live, slots=slots)
        batch = replace(self._static(case, host), page_table=self.table[:reqs])
        positions = [self._position(forward.requests[n], row) for n, row in forward.rows]
        batch.positions[: len(positions)].copy_(torch.tensor(positions, dtype=torch.int64))
        if isinstance(batch.tail, Tree):
            self._fill_tree(forward, batch.tail)
        return batch

    def _static(self, case: EngineForward, host: HostLengths) -> ForwardBatch:
        forward, b, reqs = case.forward, self.buffers, len(case.forward.requests)
        tree = not forward.causal and forward.mode is not Mode.DRAFT_BLOCK
        if forward.mode is not Mode.RAGGED_VERIFY:
            return b.uniform(forward.mode, forward.step, reqs, forward.live, host, tree=tree)
        assert b.q_indptr is not None
        counts = torch.tensor([0, *(one.rows for one in forward.requests)])
        b.q_indptr[: reqs + 1] = counts.cumsum(0).int()
        bounds = case.bounds and (*case.bounds, *[0] * (reqs - len(case.bounds)))
        return b.ragged_verify(case.budget, forward.live, host, tree=tree, padded_reqs=reqs, q_bounds=bounds or None)

    def _position(self, request: Request, row: int) -> int:
        return min(request.prefix + request.depth(request.own_slot(row)), self.geometry.limits.max_context_len - 1)

    def _fill_table(self, case: EngineForward) -> None:
        """Fill the page table: each request's own pages first, then pages that contain NaN."""
        width, last = self.buffers.page_table.shape[1], len(self.cache.k) - 1
        for n, one in enumerate(case.forward.requests):
            trap = last - n % TRAPS if one.live else 0
            ids = [*one.pages, *[trap] * (width - len(one.pages))]
            self.table[n, :width] = torch.tensor(ids, dtype=torch.int32)

    def _fill_tree(self, forward: ForwardCase, tail: Tree) -> None:
        """Write the ancestor mask of each row, and the depths of each request (of each row in RAGGED_VERIFY)."""
        by_row = forward.mode is Mode.RAGGED_VERIFY
        for number, (n, row) in enumerate(forward.rows):
            one = forward.requests[n]
            tail.mask[number] = torch.tensor(mask_words(one, row, tail.mask.shape[1]), dtype=torch.int32)
            if by_row:
                tail.depth[number] = one.depth(row)
        if not by_row:
            depths = [[one.depth(s) if one.live else 0 for s in range(one.tail)] for one in forward.requests]
            tail.depth.copy_(torch.tensor(depths, dtype=torch.int32))

    # -- assertions about the results of a forward --------------------------------------------------------

    def _assert_cache(self, loaded: Loaded) -> None:
        case = loaded.case
        start = 0 if self._stores_in_no_null_page(case) else self.null_pages * self.geometry.attention.page_size
        for name, pool, want in zip("kv", (self.cache.k, self.cache.v), loaded.pools, strict=True):
            got = pool.reshape(-1, *pool.shape[2:])
            wrong = (raw(got[start:]) != raw(want[start:])).flatten(1).any(1).nonzero().flatten() + start
            if wrong.numel():
                slots = wrong[:8].tolist()
                owners = [row for row, slot in case.truth.writes.items() if slot in slots]
                raise ContractViolation(
                    f"the {name} cache differs from the expected one, in which a row with a slot is stored at its slot",
                    batch=case,
                    got=f"differences at slots {slots}",
                    expected=f"no difference; rows {owners} own some of these slots",
                    formula="the batch's own slots where it has them, else the slot of token L + T - q + j",
                    wrong=Wrong("store", owners),
                )
            if not bool(got[:start].float().isfinite().all()):
                raise ContractViolation(f"a null page of {name} is not finite", batch=case, got="NaN or infinity")

    def _stores_in_no_null_page(self, case: EngineForward) -> bool:
        """Return True when padded requests have no rows, or when the engine passes no slots for them."""
        return case.forward.mode is Mode.RAGGED_VERIFY or Form.ENGINE_SLOTS in self.geometry.forms
