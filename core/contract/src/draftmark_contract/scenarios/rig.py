"""Runs a backend on turns, as an engine would, and hands out what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from draftmark.batch import ForwardBatch
from draftmark.buffers import Role
from draftmark.geometry import Geometry
from draftmark.metadata import HostLengthsNeed, MetadataSpec

from ..oracle import attention
from ..oracle.decode import Decoded, Shape, decode
from ..oracle.history import Request
from ..oracle.truth import Row, Truth, enumerate_truth
from ..subject import Subject
from .stage import Stage, raw
from .turns import Turn


@dataclass
class Expected:
    """Attributes:
    truth: of every request, padded ones included (whose visible set is only an example).
    k, v: the pool after the turn's rows were stored, ``[slots, kv_heads, head_dim]``.
    answer: of the live rows; padded ones are zero.
    """

    truth: Truth
    k: torch.Tensor
    v: torch.Tensor
    answer: attention.Answer


class Rig:
    """One opened backend with its stage. Raises `Refused` if the backend refuses the geometry.

    `num_pages` counts one null page; a backend that needs unique slots gets the others on top.

    Attributes:
        kernels: write_kv and attend run here; else the interpreter takes their place.
    """

    def __init__(self, subject: Subject, geometry: Geometry, num_pages: int, pool: torch.Tensor | None = None) -> None:
        if subject.device == "cpu":
            # Tensors are tiny: threads only wait for each other, and sums would depend on their number.
            torch.set_num_threads(1)
        self.subject, self.geometry = subject, geometry
        self.backend, self.arena = subject.open(geometry)
        self.specs = subject.backend.metadata(geometry)
        self.kernels = subject.kernels
        self.stage = Stage(geometry, subject.device, num_pages + null_pages(self) - 1, pool)
        if not self.kernels:
            subject.interpreted()

    @property
    def host(self) -> str:
        """The kind of host lengths that is enough for the backend, and no better."""
        return host_kind(self.subject.backend.host_lengths(self.geometry))

    def spec(self, turn: Turn) -> MetadataSpec:
        """The declaration for a turn's mode."""
        return self.specs[turn.mode]

    def load(self, turn: Turn, host: str | None = None, seed: int = 0) -> ForwardBatch:
        """Put a turn on the stage: batch, rows, cache."""
        batch = self.stage.set(turn, host or self.host)
        self.stage.fill_rows(turn, seed)
        self.stage.fill_cache(turn, seed)
        return batch

    def prepare(self, batch: ForwardBatch) -> None:
        """The part that needs no kernels: plan, then metadata."""
        self.backend.plan(batch)
        self.backend.write_metadata(batch)

    def layer(self, turn: Turn, batch: ForwardBatch, stage: Stage | None = None) -> None:
        """Store and attend, by the backend's kernels or from its decoded metadata."""
        stage = stage or self.stage
        q, k, v, out = stage.rows(turn)
        if self.kernels:
            self.subject.attended = True
            self.backend.write_kv(k, v, stage.cache, batch)
            self.backend.attend(q, stage.cache, batch, out)
        else:
            self.interpret(turn, batch, stage, self.buffers())

    def run(self, turn: Turn, batch: ForwardBatch) -> torch.Tensor:
        """One eager forward; returns a copy of its output."""
        self.prepare(batch)
        self.layer(turn, batch)
        return self.stage.rows(turn)[3].clone()

    def decoded(self, turn: Turn, batch: ForwardBatch, arena: Mapping[str, torch.Tensor] | None = None) -> Decoded:
        """What the backend's buffers say, now or as they were copied earlier."""
        a = self.geometry.attention
        staged = any(spec.role is Role.QUERY_STAGING for spec in self.arena.specs)
        shape = Shape(a.page_size, a.window_left, staged)
        found = decode(self.spec(turn), arena or self.buffers(), batch, list(turn.requests), shape)
        if found.opaque:
            self.subject.opaque()
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        """The backend's buffers."""
        return {name: self.arena[name] for name in self.arena}

    def expected(self, turn: Turn, stage: Stage | None = None, after: Expected | None = None) -> Expected:
        """Brute force, from the turn and from what the stage holds now; call before the backend runs.

        With `after`, the turn follows another one whose KV it finds in the pool.
        """
        truth, stage = truth_of(turn), stage or self.stage
        q, k, v, _ = stage.rows(turn)
        before = (after.k, after.v) if after else (stage.cache.k, stage.cache.v)
        pools = []
        for rows, pool, scale in ((k, before[0], stage.cache.k_scale), (v, before[1], stage.cache.v_scale)):
            flat = pool.reshape(-1, *pool.shape[-2:]).clone()
            for number, row in enumerate(turn.rows[: turn.live_rows]):
                raw(flat)[truth.writes[row]] = raw(stored(rows[number], scale, flat.dtype))
            pools.append(flat)
        live = {row: truth.visible[row] for row in turn.rows[: turn.live_rows]}
        answer = answer_for(turn, q, pools, live, stage)
        return Expected(truth, pools[0], pools[1], answer)

    def interpret(self, turn: Turn, batch: ForwardBatch, stage: Stage, arena: Mapping[str, torch.Tensor]) -> None:
        """What correct kernels would make of the metadata."""
        q, k, v, out = stage.rows(turn)
        found = self.decoded(turn, batch, arena)
        visible = truth_of(turn).visible if found.opaque else found.visible
        writes = found.writes or truth_of(turn).writes
        pools = [pool.view(-1, *pool.shape[2:]) for pool in (stage.cache.k, stage.cache.v)]
        for number, row in enumerate(turn.rows):
            for pool, rows, scale in zip(pools, (k, v), (stage.cache.k_scale, stage.cache.v_scale), strict=True):
                if row in writes:
                    raw(pool)[writes[row]] = raw(stored(rows[number], scale, pool.dtype))
        live = {row: slots for row, slots in visible.items() if turn.requests[row[0]].live}
        out.copy_(answer_for(turn, q, pools, live, stage).out)


def stored(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What the cache holds for some rows: value / scale in kv_dtype."""
    return rows.to(dtype) if scale is None else (rows.float() / scale).to(dtype)


def answer_for(
    turn: Turn, q: torch.Tensor, pools: list[torch.Tensor], live: dict[Row, tuple[int, ...]], stage: Stage
) -> attention.Answer:
    """The oracle's attention over stored values, scales applied."""
    scales = (stage.cache.k_scale, stage.cache.v_scale)
    return attention.attend(q, pools[0], pools[1], live, turn.rows, turn.geometry.attention, scales)


def truth_of(turn: Turn) -> Truth:
    """The oracle's sets for a turn; shared, so nobody changes them."""
    a = turn.geometry.attention
    return _truth(turn.requests, a.page_size, a.window_left)


@lru_cache(maxsize=64)
def _truth(requests: tuple[Request, ...], page_size: int, window_left: int) -> Truth:
    """A scenario asks for the same turn many times over."""
    return enumerate_truth(requests, page_size, window_left)


def host_kind(need: HostLengthsNeed) -> str:
    """Names of kinds as `Stage.set` takes them."""
    kinds = {HostLengthsNeed.NONE: "unknown", HostLengthsNeed.UPPER_BOUND: "upper_bound"}
    return kinds.get(need, "exact")


def place(rig: Rig, turn: Turn) -> Turn:
    """The turn, with padded requests on the null pages that this backend asks for."""
    needed = null_pages(rig)
    return turn if needed == turn.null_pages else turn.with_null_pages(needed)


def null_pages(rig: Rig) -> int:
    """Null pages of the pool: one, or one set per request where slots must be unique."""
    g = rig.geometry
    if not rig.subject.backend.unique_slots(g):
        return 1
    requests = max(g.limits.max_num_reqs, *g.limits.capture_batch_sizes)
    tail = max(1, g.draft.num_draft_tokens, g.draft.topk * (g.draft.num_steps - 1))
    return requests * -(-tail // g.attention.page_size)


def pool_pages(geometry: Geometry) -> int:
    """Pages that hold any scene of a geometry."""
    from .scenes import scenes

    return max(turn.num_pages for turn in scenes(geometry))
