"""A runner that calls a backend as an engine does, and returns what the backend wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from draftmark.batch import ForwardBatch
from draftmark.geometry import Geometry
from draftmark.requirements import HostLengthsNeed

from ..backend_under_test import BackendUnderTest
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..layouts import MetadataSpec
from ..oracle import formulas
from ..oracle.decode import Decoded, Shape, decode
from ..roles import Role
from .contents import fill
from .expected import Expected, answer_from_cache, expected_of, store, truth_of
from .old_memory import Fill, fill_buffers
from .pools import Pool
from .tensors import CaseTensors

KINDS = ("unknown", "upper_bound", "mixed_bound", "tight_bound", "exact")
"""Kinds of host lengths. Unknown lengths come with an upper bound too: the limit."""


class ForwardRunner:
    """Opens a backend and runs forwards on its tensors. Raises `Refused` if the backend refuses the geometry.

    Args:
        num_pages: pages of the pool, one null page included. Further null pages are added for unique slots.
        pool: pool of several layers for k and v; a new pool by default.

    Attributes:
        backend, arena: results of `BackendUnderTest.open`.
        tensors: all tensors that the backend receives.
        kernels: True when write_kv and attend run in this tier; otherwise `interpret` computes their results.
    """

    def __init__(self, subject: BackendUnderTest, geometry: Geometry, num_pages: int, pool: Pool | None = None) -> None:
        self.subject, self.geometry = subject, geometry
        self.backend, self.arena = subject.open(geometry)
        self.specs = subject.layouts(geometry)
        self.kernels = subject.kernels
        self.null_pages = formulas.null_pages(geometry, subject.backend.requirements(geometry).unique_slots)
        self.tensors = CaseTensors(geometry, subject.device, num_pages + self.null_pages - 1, pool)

    def reopen(self, fill: Fill | None = None) -> None:
        """Open the backend again, without guard words if `fill` writes the buffers' first contents."""
        if fill is None:
            self.backend, self.arena = self.subject.open(self.geometry)
            return
        before = partial(fill_buffers, fill=fill)
        self.backend, self.arena = self.subject.open(self.geometry, guard=False, before=before)

    @property
    def host(self) -> str:
        """Least exact kind of host lengths that the backend accepts, as an argument of `CaseTensors.set`."""
        kinds = {HostLengthsNeed.NONE: "unknown", HostLengthsNeed.UPPER_BOUND: "upper_bound"}
        return kinds.get(self.subject.backend.requirements(self.geometry).host_lengths, "exact")

    def spec(self, forward: ForwardCase) -> MetadataSpec:
        """Return the metadata declaration for a forward's mode."""
        return self.specs[forward.mode]

    def place(self, forward: ForwardCase) -> ForwardCase:
        """Return the forward with its padded requests on the number of null pages that this backend needs."""
        return forward if self.null_pages == forward.null_pages else forward.with_null_pages(self.null_pages)

    @property
    def bounded(self) -> bool:
        """True if the backend needs no exact host lengths, so that upper bounds are enough for plan()."""
        return self.subject.backend.requirements(self.geometry).host_lengths is not HostLengthsNeed.EXACT

    @property
    def host_kinds(self) -> tuple[str, ...]:
        """Kinds of host lengths that satisfy the need that the backend declares, the least exact kind first."""
        return KINDS if self.bounded else KINDS[-1:]

    def load(
        self, forward: ForwardCase, host: str | None = None, seed: int = 0, contents: Contents = Contents.USUAL
    ) -> ForwardBatch:
        """Fill the tensors with a forward: batch, rows and cache."""
        batch = self.set(forward, host)
        fill(self.tensors, forward, contents, seed)
        return batch

    def set(self, forward: ForwardCase, host: str | None = None) -> ForwardBatch:
        """Fill the batch tensors with a forward. Rows and cache stay as they are."""
        self.subject.current = forward
        return self.tensors.set(forward, host or self.host)

    def prepare(self, batch: ForwardBatch) -> None:
        """Run the part of a step that needs no attention kernels: plan(), then write_metadata()."""
        self.backend.plan(batch)
        self.backend.write_metadata(batch)

    def layer(self, forward: ForwardCase, batch: ForwardBatch, tensors: CaseTensors | None = None) -> None:
        """Store KV and attend, with the backend's kernels, or in the suite from the decoded metadata."""
        tensors = tensors or self.tensors
        q, k, v, out = tensors.rows(forward)
        if self.kernels:
            self.subject.attended = True
            if forward.is_stored:
                self.backend.write_kv(k, v, tensors.cache, batch)
            if not forward.attends:
                return
            lse = () if tensors.lse is None else (tensors.lse[: forward.num_rows],)
            self.backend.attend(q, tensors.cache, batch, out, *lse)
        else:
            self.interpret(forward, batch, tensors, self.buffers())

    def calls(
        self, forward: ForwardCase, batch: ForwardBatch, tensors: CaseTensors | None = None
    ) -> dict[str, Callable[[], None]]:
        """Return the calls of a forward that run in this tier, by name and in order."""
        tensors, backend = tensors or self.tensors, self.backend
        q, k, v, out = tensors.rows(forward)
        calls: dict[str, Callable[[], None]] = {
            "plan": lambda: backend.plan(batch),
            "write_metadata": lambda: backend.write_metadata(batch),
        }
        if self.kernels and forward.is_stored:
            calls["write_kv"] = lambda: backend.write_kv(k, v, tensors.cache, batch)
        if self.kernels and forward.attends:
            calls["attend"] = lambda: backend.attend(q, tensors.cache, batch, out)
        return calls

    def run(self, forward: ForwardCase, batch: ForwardBatch) -> torch.Tensor:
        """Run one eager forward, and return a copy of its output."""
        self.prepare(batch)
        self.layer(forward, batch)
        return self.tensors.rows(forward)[3].clone()

    def expected(
        self, forward: ForwardCase, tensors: CaseTensors | None = None, after: Expected | None = None
    ) -> Expected:
        """Return the expected result (`expected_of`) on these tensors, by default the runner's own."""
        return expected_of(forward, tensors or self.tensors, after)

    def decoded(
        self, forward: ForwardCase, batch: ForwardBatch, arena: Mapping[str, torch.Tensor] | None = None
    ) -> Decoded:
        """Return the decoded content of the backend's buffers, or of an earlier copy of them.

        Metadata of engine forms, and of modes outside the core, has no declared layout.
        """
        if not forward.declared:
            self.subject.opaque()
            return Decoded({}, None, opaque=True)
        a = self.geometry.attention
        staged = any(Role.QUERY_STAGING in level.buffers for one in self.specs.values() for level in one.levels)
        shape = Shape(a.page_size, a.window_left, staged)
        found = decode(self.spec(forward), arena or self.buffers(), batch, list(forward.requests), shape)
        if found.opaque:
            self.subject.opaque()
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the backend's buffers by name."""
        return {name: self.arena[name] for name in self.arena}

    def interpret(
        self, forward: ForwardCase, batch: ForwardBatch, tensors: CaseTensors, arena: Mapping[str, torch.Tensor]
    ) -> None:
        """Compute in the suite the KV and output that correct kernels would produce from the backend's metadata."""
        self.subject.interpreted()
        found, truth = self.decoded(forward, batch, arena), truth_of(forward)
        stored = forward.rows if forward.stores_padding else forward.rows[: forward.live_rows]
        writes = found.writes or truth.writes
        store([*tensors.stored.values()], {row: writes[row] for row in stored if row in writes}, forward, tensors)
        if not forward.attends:
            return
        visible = truth.visible if found.opaque else found.visible
        live = {row: slots for row, slots in visible.items() if forward.requests[row[0]].live}
        tensors.rows(forward)[3].copy_(answer_from_cache(forward, tensors, live).out)
