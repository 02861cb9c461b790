"""Mutants that checks of `graphs` kill: order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry, HostLengthsNeed, Requirements
from draftmark.runtime import ForwardBatch, Unknown, is_recording

from ...designs.changes import live_only, on_indptr, on_prefix
from ...designs.declared import graph_states
from ...designs.layouts import of_tutorial
from ...designs.tutorial import Backend
from ...designs.tutorial_plans import Planned, plugin, schedule, schedule_usage
from ...mutant import Mutant, after, around, on_batch


def _pageable(backend: Any) -> None:
    after(backend, "write_metadata", lambda batch: backend.arena["slot_mapping"][:1].add_(torch.tensor([0, 0])[:1]))


def _sentinel_at_capture(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    return -batch.q_indptr if is_recording() else batch.q_indptr


def _live_at_capture(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Write metadata only for the requests that are live at capture, also in every replay; eager forwards write all."""
    return live_only(backend, batch) if is_recording() else batch


def _baked_padding(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Keep prefix length 0 in every replay for requests that were padding when the graph was captured."""
    if not is_recording():
        return batch
    live = torch.arange(batch.padded_reqs, dtype=torch.int32, device=batch.device) < batch.num_reqs
    return replace(batch, prefix_lens=batch.prefix_lens * live)


def _dodges(geometry: Geometry, found: Requirements) -> Requirements:
    need = HostLengthsNeed.NONE if geometry.limits.overlap else HostLengthsNeed.EXACT
    return replace(found, host_lengths=need)


def _eager(state: Any) -> None:
    """Make a replay call the step again and copy its results to the outputs."""
    from torch.utils._pytree import tree_map

    steps: dict[Any, Any] = {}
    original = state.capture

    def capture(key: Any, step: Any) -> Any:
        steps[key] = (step, original(key, step))
        return steps[key][1]

    def replay(key: Any) -> Any:
        if key not in steps:
            return type(state).replay(state, key)
        step, outputs = steps[key]
        tree_map(lambda old, new: old.copy_(new), outputs, step())
        return outputs

    state.capture, state.replay = capture, replay


def _copies(state: Any) -> None:
    from torch.utils._pytree import tree_map

    original = state.replay
    state.replay = lambda key: tree_map(lambda one: one.clone(), original(key))


def _skips_in_graph(backend: Any) -> None:
    around(backend, "write_kv", lambda original, *args: None if is_recording() else original(*args))


def _pads_out(backend: Any) -> None:
    """Zero the output of padded rows, located by the host's number of live requests."""

    def call(q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        out[sum(batch.q_lens[: batch.num_reqs]) :] = 0

    after(backend, "attend", call)


def _stores_live(backend: Any) -> None:
    """Store only live rows; the host's number of live requests decides which ones."""

    def call(original: Any, k: Any, v: Any, cache: Any, batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"][: batch.num_rows].clone()
        live = sum(batch.q_lens[: batch.num_reqs])
        backend.arena["slot_mapping"][live : batch.num_rows] = 0
        original(k, v, cache, batch)
        backend.arena["slot_mapping"][: batch.num_rows] = slots

    around(backend, "write_kv", call)


def _plan_by_lengths(backend: Any) -> None:
    planned: list[tuple[int, ...]] = []

    def call(original: Any, batch: ForwardBatch) -> None:
        if planned != [batch.host.upper_bound()]:
            original(batch)
        planned[:] = [batch.host.upper_bound()]

    around(backend, "plan", call)


_STATES: dict[str, Any] = {}


def _zero_indptr(backend: Any) -> None:
    after(backend, "attend", lambda q, cache, batch, out: batch.q_indptr.mul_(0 if is_recording() else 1))


def _drop_odd_key(geometry: Any, state: Any) -> Any:
    original = state.capture

    def capture(key: Any, step: Any) -> Any:
        if key.batch_size == max(geometry.limits.capture_batch_sizes):
            return step()
        return original(key, step)

    state.capture = capture
    return state


class WorstCaseOnce(Planned):
    """Sends the constant plan for Unknown host lengths only once, although a batch of Exact lengths overwrites it."""

    sent = -1

    def plan(self, batch: ForwardBatch) -> None:
        if not isinstance(batch.host, Unknown):
            super().plan(batch)
        elif self.sent < batch.padded_reqs:
            self.send((batch.host.bound,) * batch.padded_reqs)
            self.sent = batch.padded_reqs


POSITIONS: dict[tuple[int, torch.device], torch.Tensor] = {}


class CapturedConstant(Backend):
    """Caches key positions by width in a module; if a capture creates them, they live in that graph's memory pool."""

    def _visible(
        self, batch: ForwardBatch, request: int, rows: slice, prefix: torch.Tensor, tail_len: int
    ) -> torch.Tensor:
        at = (self.width, prefix.device)
        if at not in POSITIONS:
            POSITIONS[at] = torch.arange(self.width, device=prefix.device)
        seen = super()._visible(batch, request, rows, prefix, tail_len)
        return seen & (POSITIONS[at] < prefix + tail_len)


def _zeroes_padding(backend: Any) -> None:
    """Set the slots of padded rows to 0, located by the host's number of live requests."""

    def call(batch: ForwardBatch) -> None:
        if batch.num_reqs < batch.padded_reqs:
            backend.arena["slot_mapping"][sum(batch.q_lens[: batch.num_reqs]) : batch.num_rows] = 0

    after(backend, "write_metadata", call)


def _not_in_graph(backend: Any) -> None:
    around(backend, "write_metadata", lambda original, batch: None if is_recording() else original(batch))


MUTANTS = (
    Mutant(
        "M09",
        "Uses lengths of zero at capture",
        "sglang#26521",
        patch=on_prefix(lambda b, x: torch.zeros_like(x.prefix_lens) if is_recording() else x.prefix_lens),
    ),
    Mutant("M13", "Negates the row offsets at capture", "sglang#31367", patch=on_indptr(_sentinel_at_capture)),
    Mutant("M31", "Never captures the largest key", "sglang#40396", {"graph_state": _drop_odd_key}),
    Mutant(
        "M31b",
        "Shares one graph state among all geometries",
        "vllm-ascend#3892",
        {"graph_state": lambda g, state: _STATES.setdefault("one", state)},
    ),
    Mutant("M33", "Zeroes q_indptr in place at capture", "vllm#53821", patch=_zero_indptr),
    Mutant("R16", "Skips the plan while lengths are unchanged, even if the mode changes", "–", patch=_plan_by_lengths),
    of_tutorial(
        "S34",
        "Sends the worst-case plan for Unknown lengths once, though an Exact batch overwrites it",
        "an Exact prefill between decodes with Unknown lengths",
        plugin(WorstCaseOnce, schedule),
        schedule_usage,
    ),
    of_tutorial(
        "S42",
        "Caches a constant per module that the first captured graph may allocate",
        "lru_cache on a helper that creates a tensor; its first use is in a capture",
        plugin(CapturedConstant),
    ),
    Mutant("V30", "Copies from pageable memory in the captured region", "sglang#29415", patch=_pageable),
    Mutant("V40", "Does not store KV at capture", "ROCm/ATOM#2267", patch=_skips_in_graph),
    Mutant("V57", "Zeroes padded outputs by the num_reqs of the capture", "TRT-LLM#17110", patch=_pads_out),
    Mutant("V72", "Stores live rows by the num_reqs of the capture", "TRT-LLM#17110", patch=_stores_live),
    Mutant("W51", "Requires exact lengths only when overlap is off", "sglang#30217", {"requirements": _dodges}),
    Mutant("W56", "Runs the step eagerly in a replay", "sglang#36658", graph_states(_eager)),
    Mutant("W57", "Returns other output tensors from a replay than from the capture", "vllm#53658",
           graph_states(_copies)),
    Mutant("W68", "Zeroes padded slots by the num_reqs of the capture", "TRT-LLM#17110", patch=_zeroes_padding),
    Mutant("W87", "Does not write metadata at capture", "sglang#26521", patch=_not_in_graph),
    Mutant("Z01", "Captures metadata only for the requests that are live at capture", "sglang#29262",
           patch=on_batch(_live_at_capture, "write_metadata")),
    Mutant("Z02", "Treats requests that were padding at capture as padding in every replay", "TRT-LLM#17110",
           patch=on_batch(_baked_padding, "write_metadata", "attend")),
)  # fmt: skip
KILLER = {
    "R16": "graphs.programs_do_not_disturb_each_other",
    "S34": "graphs.capture_order_does_not_matter",
    "S42": "graphs.a_capture_may_come_first",
}
