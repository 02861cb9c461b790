"""A case on draftmark's state backend: every layer's `recur`, and one `commit` of all layers after a verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from draftmark import DraftShape, Limits, Mode, StateGeometry, load
from draftmark.runtime import (
    BatchBuffers,
    Exact,
    ForwardBatch,
    StatePool,
    VerifyResult,
    device_profile,
    ragged,
    write_tail,
)

from .cases import Case
from .inputs import DEVICE, PREFIX_LEN, Inputs

MODES = {"decode": Mode.DECODE, "chain": Mode.VERIFY, "tree": Mode.VERIFY, "extend": Mode.EXTEND}
STATES_MOVED = {"decode": 2, "chain": 3, "tree": 3, "extend": 2}
"""Passes over all states in each mode: a verify reads them, and its commit reads and writes them."""


@dataclass
class Runner:
    """A case on one backend.

    Attributes:
        call: runs every layer once, and the commit. Capturable.
        out: output of the first layer.
        states: slots of the first layer ``[requests + 1, heads, value_dim, key_dim]`` after the case, if one slot of
            each request holds its state then; else None.
        moved: passes over all states that the backend's scheme takes.
        held_bytes: bytes of one layer that speculation holds next to the slots.
        reset: restores the slots.
        note: anything that a reader of the row must know.
    """

    call: Callable[[], None]
    out: Callable[[], torch.Tensor]
    states: Callable[[], torch.Tensor] | None
    moved: float
    held_bytes: int
    reset: Callable[[], None]
    note: str = ""


def accepted_of(case: Case) -> VerifyResult:
    """Return the verification's result: every request accepts the case's path."""
    index = torch.arange(case.nodes, device=DEVICE).repeat(case.requests, 1)
    index[:, : len(case.path)] = torch.tensor(case.path, device=DEVICE)
    counts = torch.full((case.requests,), len(case.path), device=DEVICE)
    return VerifyResult(torch.full_like(index, -1), counts, index)


def ours(case: Case, layers: list[Inputs]) -> Runner:
    """Return the case on the plugin `cuda_triton`."""
    mode, requests = MODES[case.mode], case.requests
    limits = Limits(requests, 1 << 20, max(sum(case.rows), 64))
    draft = DraftShape(1, max(1, case.nodes - 1), max(2, case.nodes))
    if case.mode == "tree":
        draft = DraftShape(8, case.nodes, case.nodes)
    geometry = StateGeometry.create(
        case.layer.shape, limits, draft, device_profile(DEVICE), (mode,), num_layers=len(layers)
    )
    backend = load("cuda_triton").open_state(geometry, DEVICE)
    pool = StatePool(geometry, requests + 1, 1, DEVICE)
    batch = _batch(case, geometry, mode)
    backend.plan(batch)
    outs = [torch.full_like(one.v, float("nan")) for one in layers]
    accepted = accepted_of(case) if mode is Mode.VERIFY else None

    def call() -> None:
        backend.write_metadata(batch)
        for one, cache, out in zip(layers, pool.layers, outs, strict=True):
            backend.recur(one.q, one.k, one.v, one.log_decay, one.beta, cache, batch, out)
        if accepted is not None:
            backend.commit(pool, batch, accepted)

    def reset() -> None:
        for one, cache in zip(layers, pool.layers, strict=True):
            cache.state.copy_(one.state)

    specs = load("cuda_triton").state_buffers(geometry)
    held = sum(prod(map(int, one.shape)) * getattr(torch, one.dtype).itemsize for one in specs)
    return Runner(
        call, lambda: outs[0], lambda: pool.layers[0].state, STATES_MOVED[case.mode], held // len(layers), reset
    )


def _batch(case: Case, geometry: StateGeometry, mode: Mode) -> ForwardBatch:
    """Return the batch; request r has slot r + 1."""
    requests = case.requests
    slots = torch.arange(1, requests + 1, dtype=torch.int32, device=DEVICE)
    host = Exact((PREFIX_LEN,) * requests)
    if mode is Mode.EXTEND:
        prefixes = torch.full((requests,), PREFIX_LEN, dtype=torch.int32, device=DEVICE)
        table = torch.zeros(requests, 0, dtype=torch.int32, device=DEVICE)
        return ragged(geometry, prefixes, table, case.rows, host, state_slots=slots)
    tree = case.mode == "tree"
    batch = BatchBuffers(geometry, DEVICE).uniform(mode, 0, requests, requests, host, tree=tree)
    batch.prefix_lens.fill_(PREFIX_LEN)
    assert batch.state_slots is not None
    batch.state_slots.copy_(slots)
    parents = torch.tensor(case.parents, device=DEVICE).repeat(requests, 1) if tree else None
    write_tail(batch, geometry, parents)  # type: ignore[arg-type]  # it reads what both geometries have
    return batch
