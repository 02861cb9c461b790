"""Batches as integers, without torch: groups of equal requests, and the batches at the limits of a geometry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from draftmark.geometry import Geometry, Mode, StateGeometry

from ..oracle.formulas import draft_steps, max_prefix, max_requests, rows_and_tail


@dataclass(frozen=True)
class Group:
    """A group of `count` equal requests: each has prefix length L = `prefix`, `rows` query rows, `tail` new tokens."""

    count: Any
    prefix: Any
    rows: Any
    tail: Any


@dataclass(frozen=True)
class BatchShape:
    """Describes a forward batch, padding included, by all the integers that buffer sizes depend on.

    Attributes:
        mode, step: mode and draft step.
        groups: groups of equal requests.
        given_requests, given_rows: totals for proofs that bound only the totals; None to add up the groups.
    """

    mode: Mode
    step: Any
    groups: tuple[Group, ...]
    given_requests: Any = None
    given_rows: Any = None

    @property
    def requests(self) -> Any:
        """Number of requests, padding included."""
        if self.given_requests is not None:
            return self.given_requests
        return total(group.count for group in self.groups)

    @property
    def rows(self) -> Any:
        """Number of query rows."""
        if self.given_rows is not None:
            return self.given_rows
        return total(group.count * group.rows for group in self.groups)

    @property
    def _shown(self) -> list[Group]:
        # Compare only ints: a count may be a symbol of a proof, and comparing a symbol would fork the run.
        return [group for group in self.groups if not (isinstance(group.count, int) and group.count == 0)]

    def __str__(self) -> str:
        groups = ", ".join(f"{g.count} x (L={g.prefix}, q={g.rows}, T={g.tail})" for g in self._shown)
        sums = "" if self.given_rows is None else f"; total {self.requests} requests, {self.rows} rows"
        step = f" step {self.step}" if self.mode is Mode.DRAFT else ""
        return f"{self.mode.value}{step}: {groups}{sums}"


def total(values: Iterable[Any]) -> Any:
    """Return the sum of ints or symbolic ints."""
    found: Any = 0
    for value in values:
        found = found + value
    return found


def brief(geometry: Geometry | StateGeometry) -> str:
    """Return a geometry in one line, for messages."""
    if isinstance(geometry, StateGeometry):
        return f"{geometry.state} {geometry.draft} {geometry.limits} on {geometry.device}"
    a, d, m = geometry.attention, geometry.draft, geometry.limits
    scale = "default" if a.softmax_scale is None else f"{a.softmax_scale:.6g}"
    return (
        f"k={d.topk} S={d.num_steps} D={d.num_draft_tokens} {f'n={d.num_modules} ' * (d.num_modules > 1)}"
        f"P={a.page_size} C={m.max_context_len} "
        f"max_num_reqs={m.max_num_reqs} capture={list(m.capture_batch_sizes)} extend={m.max_extend_tokens} "
        f"overlap={m.overlap} heads={a.num_qo_heads}/{a.num_kv_heads}x{a.head_dim} {a.q_dtype}/{a.kv_dtype} "
        f"{f'chosen_width={a.chosen_width} ' * bool(a.chosen_width)}"
        f"{'latent ' * a.latent}{f'value_dim={a.value_width} ' * (a.value_width != a.head_dim)}"
        f"scale={scale} window={a.window_left} cap={a.logits_soft_cap} "
        f"modes={'+'.join(mode.value for mode in geometry.modes)}"
    )


def limit_batches(geometry: Geometry, counts: Sequence[int] = ()) -> Sequence[BatchShape]:
    """Return batches at a geometry's limits: every mode and step, most and fewest requests, edge values of prefix L.

    Args:
        geometry: concrete geometry.
        counts: further numbers of requests, for batches with the longest prefix.
    """
    found = []
    for mode in geometry.modes:
        last = draft_steps(geometry) - 1
        steps = sorted({step for step in (0, last // 2, last) if 0 <= step <= last}) if mode is Mode.DRAFT else [0]
        found += [batch for step in steps for batch in _limits(geometry, mode, step, counts)]
    return found


def _limits(geometry: Geometry, mode: Mode, step: int, extra: Sequence[int]) -> list[BatchShape]:
    limits, page = geometry.limits, geometry.attention.page_size
    most = max_requests(geometry)
    if mode is Mode.EXTEND:
        return _extend_limits(limits.max_extend_tokens, limits.max_context_len, most)
    rows, tail = rows_and_tail(geometry, mode, step)
    wall = max_prefix(geometry)
    edges = sorted({0, 1, wall, max(0, wall - 1), wall // page * page, max(0, wall // page * page - tail)})
    # Test a single request too: a workspace may need more bytes for one request than for many (TRT-LLM#16319).
    counts = [(most, edge) for edge in edges] + [(1, edge) for edge in (0, wall) if most > 1]
    counts += [(count, wall) for count in extra]
    batches = [BatchShape(mode, step, (Group(r, edge, rows, tail),)) for r, edge in counts]
    padded = (Group(1, wall, rows, tail), Group(most - 1, 0, rows, tail))
    return [*batches, BatchShape(mode, step, padded)]


def _extend_limits(tokens: int, context: int, most: int) -> list[BatchShape]:
    one = min(tokens, context)
    live = min(most, tokens)
    spread = (Group(live, context - 1, 1, 1), Group(most - live, 0, 0, 0))
    full = min(live, max(1, tokens // one))
    chunks = (Group(full, context - one, one, one), Group(most - full, 0, 0, 0))
    # One row with the longest context: kernels use the most KV splits when there are few rows (TRT-LLM#16319).
    single = (Group(1, context - 1, 1, 1),)
    return [BatchShape(Mode.EXTEND, 0, groups) for groups in (spread, chunks, (Group(1, 0, one, one),), single)]
