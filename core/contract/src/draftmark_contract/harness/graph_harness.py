"""A captured program, driven as an engine drives it: fill static buffers, plan, replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from draftmark.batch import ForwardBatch
from draftmark.buffers import Memory
from draftmark.errors import DraftmarkError
from draftmark.geometry import Mode
from draftmark.graphs import GraphKey, GraphState

from ..cases.forwards import ForwardCase
from ..check import ContractViolation
from . import expect as verify
from .harness import Expected, Harness
from .tensors import CaseTensors


@dataclass
class Loaded:
    """A round that is on the stages: its forwards, batches, and what must come out."""

    forwards: list[ForwardCase]
    batches: list[ForwardBatch]
    expected: list[Expected]


class GraphHarness:
    """All programs of one harness. Each step of DRAFT has static buffers of its own; the KV pool is common.

    Attributes:
        state: the backend's graph state.
        copies: per key, copies of the metadata buffers after each step; each replay overwrites them.
        runs: how often a captured step ran as Python.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.copies: dict[GraphKey, list[dict[str, torch.Tensor]]] = {}
        self.runs = 0
        self.state: GraphState = harness.subject.graph_state(harness.geometry)
        steps = max(1, harness.geometry.draft.num_steps - 1) if Mode.DRAFT in harness.geometry.modes else 1
        pool = torch.stack((harness.tensors.cache.k, harness.tensors.cache.v))
        num_pages = pool.shape[1]
        # Host memory is plan()'s; copied inside a capture it would be a pageable copy.
        self._on_device = [one.name for one in harness.arena.specs if one.memory is Memory.DEVICE]
        self.stages = [CaseTensors(harness.geometry, harness.subject.device, num_pages, pool) for _ in range(steps)]
        harness.tensors = self.stages[0]

    @property
    def capture_host(self) -> str:
        """Host lengths at capture: unknown, so that the plan serves every replay, unless exact ones are needed."""
        return "exact" if self.harness.host == "exact" else "unknown"

    def replay_host(self, number: int) -> str:
        """Host lengths at a replay: each kind that the backend must cope with, in forward."""
        kinds = ("exact", "upper_bound", "unknown", "tight_bound")
        return "exact" if self.harness.host == "exact" else kinds[number % len(kinds)]

    def clear_outputs(self) -> None:
        """NaN in every output: what a warm-up wrote must not pass for a replay's."""
        for tensors in self.stages:
            tensors.out.fill_(float("nan"))

    def load(self, forward: ForwardCase, seed: int = 0, host: str | None = None) -> Loaded:
        """Fill the static buffers for a round; `forward` is its last step."""
        first = forward.at_step(0) if forward.mode is Mode.DRAFT else forward
        forwards = [forward.at_step(i) for i in range(forward.step + 1)] if forward.mode is Mode.DRAFT else [forward]
        batches: list[ForwardBatch] = []
        expected: list[Expected] = []
        self.stages[0].fill_cache(first, seed)
        for i, (one, tensors) in enumerate(zip(forwards, self.stages, strict=False)):
            batches.append(tensors.set(one, host or self.harness.host))
            tensors.fill_rows(one, seed + 10 * i)
            expected.append(self.harness.expected(one, tensors, expected[-1] if expected else None))
        return Loaded(forwards, batches, expected)

    def plan(self, loaded: Loaded) -> None:
        """The host half, before every run and every replay."""
        for batch in loaded.batches:
            self.harness.backend.plan(batch)

    def step(self, loaded: Loaded) -> list[dict[str, torch.Tensor]]:
        """The device half: every step's metadata and layer; returns copies of the metadata."""
        copies = []
        for forward, batch, tensors in zip(loaded.forwards, loaded.batches, self.stages, strict=False):
            self.harness.backend.write_metadata(batch)
            copies.append({name: self.harness.arena[name].clone() for name in self._on_device})
            if self.harness.kernels:
                self.harness.layer(forward, batch, tensors)
        return copies

    def capture(self, key: GraphKey, loaded: Loaded) -> list[dict[str, torch.Tensor]]:
        """Capture a round's step; the copies are filled by the first replay."""

        def step() -> list[dict[str, torch.Tensor]]:
            self.runs += 1
            return self.step(loaded)

        with _refusals(f"capturing {key}", loaded.forwards[-1]), no_sync(self.harness.subject.device):
            self.copies[key] = self.state.capture(key, step)
        return self.copies[key]

    def replay(self, key: GraphKey, loaded: Loaded) -> None:
        """Replay a round."""
        runs = self.runs
        with _refusals(f"replaying {key}", loaded.forwards[-1]), no_sync(self.harness.subject.device):
            outputs = self.state.replay(key)
        if self.runs != runs or outputs is not self.copies[key]:
            raise ContractViolation(
                f"replaying {key} is no replay",
                batch=loaded.forwards[-1],
                got="the step ran again, eagerly" if self.runs != runs else "other outputs than the capture's",
                expected="the captured work alone, and the very object that capture() returned",
                formula="draftmark.graphs.GraphState.replay",
                bug="sglang#36658",
            )

    def holds(self, loaded: Loaded, copies: list[dict[str, torch.Tensor]], what: str) -> None:
        """What must hold after a run or a replay of a round."""
        steps = zip(loaded.forwards, loaded.batches, self.stages, loaded.expected, copies, strict=False)
        for forward, batch, tensors, expected, copy in steps:
            found = verify.metadata(self.harness, forward, batch, copy)
            verify.padding(forward, found)
            if not self.harness.kernels:
                self.harness.interpret(forward, batch, tensors, copy)
            verify.output(forward, expected, tensors.rows(forward)[3], what)
        verify.stored(self.harness, loaded.forwards[-1], loaded.expected[-1])
        verify.guards(self.harness, loaded.forwards[-1])


@contextmanager
def _refusals(what: str, forward: ForwardCase) -> Iterator[None]:
    """ForwardCase what a graph state refuses into a violation."""
    try:
        yield
    except DraftmarkError as error:
        raise ContractViolation(
            f"{what} failed",
            batch=forward,
            got=error,
            expected="a captured region without host reads, pageable copies or re-allocated tensors",
            formula="design: write_metadata, write_kv and attend are captured",
            bug="sglang#3987, sglang#29413",
        ) from error


@contextmanager
def no_sync(device: str) -> Iterator[None]:
    """Make every hidden synchronisation an error, where the device can."""
    module: Any = getattr(torch, torch.device(device).type, None)
    if not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    before = module.get_sync_debug_mode()
    module.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise ContractViolation("the captured region waits for the device", got=error, bug="sglang#29413") from error
    finally:
        module.set_sync_debug_mode(before)
