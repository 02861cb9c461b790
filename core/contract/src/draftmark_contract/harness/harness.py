"""Runs a backend on forwards, as an engine would, and hands out what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from draftmark.batch import ForwardBatch
from draftmark.buffers import Role
from draftmark.geometry import Geometry
from draftmark.requirements import HostLengthsNeed

from ..backend_under_test import BackendUnderTest
from ..cases.forwards import ForwardCase
from ..layouts import MetadataSpec
from ..oracle import attention
from ..oracle.decode import Decoded, Shape, decode
from ..oracle.history import Request
from ..oracle.truth import Row, Truth, enumerate_truth
from .tensors import CaseTensors, raw


@dataclass
class Expected:
    """Attributes:
    truth: of every request, padded ones included (whose visible set is only an example).
    k, v: the pool after the forward's rows were stored, ``[slots, kv_heads, head_dim]``.
    answer: of the live rows; padded ones are zero.
    """

    truth: Truth
    k: torch.Tensor
    v: torch.Tensor
    answer: attention.Answer


class Harness:
    """One opened backend with its tensors. Raises `Refused` if the backend refuses the geometry.

    `num_pages` counts one null page; a backend that needs unique slots gets the others on top.

    Attributes:
        kernels: write_kv and attend run here; else the interpreter takes their place.
    """

    def __init__(
        self, subject: BackendUnderTest, geometry: Geometry, num_pages: int, pool: torch.Tensor | None = None
    ) -> None:
        if subject.device == "cpu":
            # Tensors are tiny: threads only wait for each other, and sums would depend on their number.
            torch.set_num_threads(1)
        self.subject, self.geometry = subject, geometry
        self.backend, self.arena = subject.open(geometry)
        self.specs = subject.layouts(geometry)
        self.kernels = subject.kernels
        self.tensors = CaseTensors(geometry, subject.device, num_pages + null_pages(self) - 1, pool)
        if not self.kernels:
            subject.interpreted()

    @property
    def host(self) -> str:
        """The kind of host lengths that is enough for the backend, and no better."""
        return host_kind(self.subject.backend.requirements(self.geometry).host_lengths)

    def spec(self, forward: ForwardCase) -> MetadataSpec:
        """The declaration for a forward's mode."""
        return self.specs[forward.mode]

    def load(self, forward: ForwardCase, host: str | None = None, seed: int = 0) -> ForwardBatch:
        """Put a forward on the tensors: batch, rows, cache."""
        batch = self.tensors.set(forward, host or self.host)
        self.tensors.fill_rows(forward, seed)
        self.tensors.fill_cache(forward, seed)
        return batch

    def prepare(self, batch: ForwardBatch) -> None:
        """The part that needs no kernels: plan, then metadata."""
        self.backend.plan(batch)
        self.backend.write_metadata(batch)

    def layer(self, forward: ForwardCase, batch: ForwardBatch, tensors: CaseTensors | None = None) -> None:
        """Store and attend, by the backend's kernels or from its decoded metadata."""
        tensors = tensors or self.tensors
        q, k, v, out = tensors.rows(forward)
        if self.kernels:
            self.subject.attended = True
            self.backend.write_kv(k, v, tensors.cache, batch)
            self.backend.attend(q, tensors.cache, batch, out)
        else:
            self.interpret(forward, batch, tensors, self.buffers())

    def run(self, forward: ForwardCase, batch: ForwardBatch) -> torch.Tensor:
        """One eager forward; returns a copy of its output."""
        self.prepare(batch)
        self.layer(forward, batch)
        return self.tensors.rows(forward)[3].clone()

    def decoded(
        self, forward: ForwardCase, batch: ForwardBatch, arena: Mapping[str, torch.Tensor] | None = None
    ) -> Decoded:
        """What the backend's buffers say, now or as they were copied earlier."""
        a = self.geometry.attention
        staged = any(spec.role is Role.QUERY_STAGING for spec in self.arena.specs)
        shape = Shape(a.page_size, a.window_left, staged)
        found = decode(self.spec(forward), arena or self.buffers(), batch, list(forward.requests), shape)
        if found.opaque:
            self.subject.opaque()
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """The backend's buffers."""
        return {name: self.arena[name] for name in self.arena}

    def expected(
        self, forward: ForwardCase, tensors: CaseTensors | None = None, after: Expected | None = None
    ) -> Expected:
        """Brute force, from the forward and from what the tensors holds now; call before the backend runs.

        With `after`, the forward follows another one whose KV it finds in the pool.
        """
        truth, tensors = truth_of(forward), tensors or self.tensors
        q, k, v, _ = tensors.rows(forward)
        before = (after.k, after.v) if after else (tensors.cache.k, tensors.cache.v)
        pools = []
        for rows, pool, scale in ((k, before[0], tensors.cache.k_scale), (v, before[1], tensors.cache.v_scale)):
            flat = pool.reshape(-1, *pool.shape[-2:]).clone()
            for number, row in enumerate(forward.rows[: forward.live_rows]):
                raw(flat)[truth.writes[row]] = raw(stored(rows[number], scale, flat.dtype))
            pools.append(flat)
        live = {row: truth.visible[row] for row in forward.rows[: forward.live_rows]}
        answer = answer_for(forward, q, pools, live, tensors)
        return Expected(truth, pools[0], pools[1], answer)

    def interpret(
        self, forward: ForwardCase, batch: ForwardBatch, tensors: CaseTensors, arena: Mapping[str, torch.Tensor]
    ) -> None:
        """What correct kernels would make of the metadata."""
        q, k, v, out = tensors.rows(forward)
        found = self.decoded(forward, batch, arena)
        visible = truth_of(forward).visible if found.opaque else found.visible
        writes = found.writes or truth_of(forward).writes
        pools = [pool.view(-1, *pool.shape[2:]) for pool in (tensors.cache.k, tensors.cache.v)]
        for number, row in enumerate(forward.rows):
            for pool, rows, scale in zip(pools, (k, v), (tensors.cache.k_scale, tensors.cache.v_scale), strict=True):
                if row in writes:
                    raw(pool)[writes[row]] = raw(stored(rows[number], scale, pool.dtype))
        live = {row: slots for row, slots in visible.items() if forward.requests[row[0]].live}
        out.copy_(answer_for(forward, q, pools, live, tensors).out)


def stored(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What the cache holds for some rows: value / scale in kv_dtype."""
    return rows.to(dtype) if scale is None else (rows.float() / scale).to(dtype)


def answer_for(
    forward: ForwardCase,
    q: torch.Tensor,
    pools: list[torch.Tensor],
    live: dict[Row, tuple[int, ...]],
    tensors: CaseTensors,
) -> attention.Answer:
    """The oracle's attention over stored values, scales applied."""
    scales = (tensors.cache.k_scale, tensors.cache.v_scale)
    return attention.attend(q, pools[0], pools[1], live, forward.rows, forward.geometry.attention, scales)


def truth_of(forward: ForwardCase) -> Truth:
    """The oracle's sets for a forward; shared, so nobody changes them."""
    a = forward.geometry.attention
    return _truth(forward.requests, a.page_size, a.window_left)


@lru_cache(maxsize=64)
def _truth(requests: tuple[Request, ...], page_size: int, window_left: int) -> Truth:
    """A scenario asks for the same forward many times over."""
    return enumerate_truth(requests, page_size, window_left)


def host_kind(need: HostLengthsNeed) -> str:
    """Names of kinds as `CaseTensors.set` takes them."""
    kinds = {HostLengthsNeed.NONE: "unknown", HostLengthsNeed.UPPER_BOUND: "upper_bound"}
    return kinds.get(need, "exact")


def place(harness: Harness, forward: ForwardCase) -> ForwardCase:
    """The forward, with padded requests on the null pages that this backend asks for."""
    needed = null_pages(harness)
    return forward if needed == forward.null_pages else forward.with_null_pages(needed)


def null_pages(harness: Harness) -> int:
    """Null pages of the pool: one, or one set per request where slots must be unique."""
    g = harness.geometry
    if not harness.subject.backend.requirements(g).unique_slots:
        return 1
    requests = max(g.limits.max_num_reqs, *g.limits.capture_batch_sizes)
    tail = max(1, g.draft.num_draft_tokens, g.draft.topk * (g.draft.num_steps - 1))
    return requests * -(-tail // g.attention.page_size)


def pool_pages(geometry: Geometry) -> int:
    """Pages that hold any scene of a geometry."""
    from ..cases.forward_sets import all_forwards

    return max(forward.num_pages for forward in all_forwards(geometry))
