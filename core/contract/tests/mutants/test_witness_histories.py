"""Tests that the mutants OA…, OD… and OE… are wrong, and that the backends that they change are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftmark import Form, Geometry, Mode
from draftmark.errors import DraftmarkError
from draftmark.loaded import LoadedBackend
from draftmark.runtime import AttentionBackend, GraphKey, Program

from . import catalog
from .mutant import Mutant
from .witness_world import CLOSE, Forward, geometry, pools, requests, right, worst

CPU = torch.device("cpu")
EVERY = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK)


def opened(loaded: LoadedBackend, shape: Geometry) -> AttentionBackend:
    return loaded.open(shape, "cpu", guard=False)


def verify_then_ragged(loaded: LoadedBackend) -> float:
    """VERIFY of three requests, then RAGGED_VERIFY with a budget of 12 rows, which is VERIFY's number of rows."""
    shape = geometry(nodes=4, budgets=(12,), modes=EVERY, block=4)
    backend, caches = opened(loaded, shape), pools(shape, 40)
    first = Forward(shape, Mode.VERIFY, requests(shape, (9, 5, 12), 4), caches).run(backend)
    rows = requests(shape, (9, 5, 12), (1, 4, 2))
    return max(first, Forward(shape, Mode.RAGGED_VERIFY, rows, caches, budget=12).run(backend))


def ragged_then_block(loaded: LoadedBackend) -> float:
    """RAGGED_VERIFY with few live rows, then a draft block with more rows."""
    shape = geometry(nodes=4, budgets=(12,), modes=EVERY, block=4)
    backend, caches = opened(loaded, shape), pools(shape, 40)
    few = Forward(shape, Mode.RAGGED_VERIFY, requests(shape, (9, 5), (1, 2)), caches, budget=12).run(backend)
    return max(few, Forward(shape, Mode.DRAFT_BLOCK, requests(shape, (9, 5), 4), caches).run(backend))


def chain_tree_chain(loaded: LoadedBackend) -> float:
    """A chain, a tree and a chain again, of equal sizes."""
    shape = geometry(nodes=4)
    backend, caches, live = opened(loaded, shape), pools(shape, 40), requests(shape, (9, 5), 4)
    trees = (None, (-1, 0, 0, 1), None)
    return max(Forward(shape, Mode.VERIFY, live, caches, one).run(backend) for one in trees)


def slots_in_place(loaded: LoadedBackend) -> float:
    """Two decodes over one set of static tensors; the engine's slots change in place."""
    shape = geometry(modes=EVERY, budgets=(12,), block=4, forms=(Form.ENGINE_SLOTS,))
    backend, caches, live = opened(loaded, shape), pools(shape, 40), requests(shape, (9, 5))
    forward = Forward(shape, Mode.DECODE, live, caches)
    first = forward.run(backend)
    forward.refill([replace(one, prefix=one.prefix + 1) for one in live])
    return max(first, forward.run(backend))


def captured_again(loaded: LoadedBackend) -> float:
    """Capture and replay, then capture the same step in a new graph state and replay it for other requests."""
    shape = geometry(capture=(2,))
    backend, caches = opened(loaded, shape), pools(shape, 60)
    forward = Forward(shape, Mode.DECODE, requests(shape, (3, 4)), caches, host=worst(2, shape))
    found, key = 0.0, GraphKey(Program.DECODE, 2)
    for prefixes, first in (((20, 9), 1), ((7, 33), 21)):
        state = loaded.graph_state(shape, CPU)
        backend.plan(replace(forward.batch, host=worst(2, shape)))
        state.capture(key, forward.captured(backend))
        forward.refill(requests(shape, prefixes, first=first))
        backend.plan(forward.batch)
        forward.note()
        state.replay(key)
        found = max(found, forward.error())
    return found


def right_after_refused(loaded: LoadedBackend) -> float:
    """A short batch that attend refuses because of sinks, then a batch longer than the window."""
    shape = geometry(window_left=8)
    backend, caches, live = opened(loaded, shape), pools(shape, 40), requests(shape, (5, 2))
    wrong = replace(caches[0], sinks=torch.zeros(shape.attention.num_qo_heads))
    with pytest.raises(DraftmarkError):
        Forward(shape, Mode.DECODE, live, [wrong]).run(backend)
    return Forward(shape, Mode.DECODE, requests(shape, (30, 21)), caches).run(backend)


def after_failed_step(loaded: LoadedBackend) -> float:
    """A step that fails between metadata and attention, then another step."""
    shape = geometry()
    backend, caches = opened(loaded, shape), pools(shape, 40)
    failed = Forward(shape, Mode.DECODE, requests(shape, (5, 2)), caches)
    backend.plan(failed.batch)
    backend.write_metadata(failed.batch)
    return Forward(shape, Mode.DECODE, requests(shape, (30, 21)), caches).run(backend)


def capture_repeated(loaded: LoadedBackend) -> float:
    """A capture that fails because of a host read, and the same capture without it."""
    shape = geometry(capture=(2,))
    backend, caches = opened(loaded, shape), pools(shape, 60)
    forward = Forward(shape, Mode.DECODE, requests(shape, (20, 9)), caches, host=worst(2, shape))
    state, key = loaded.graph_state(shape, CPU), GraphKey(Program.DECODE, 2)
    step = forward.captured(backend)
    backend.plan(forward.batch)
    with pytest.raises(DraftmarkError):
        state.capture(key, lambda: (step(), forward.rows[0][3][0, 0, 0].item()))
    try:
        state.capture(key, step)
    except DraftmarkError:
        return float("inf")
    forward.note()
    state.replay(key)
    return forward.error()


def three_alive(loaded: LoadedBackend) -> float:
    """Full, windowed and draft geometry in one step: all are planned, then all attend."""
    shapes = [geometry(), geometry(window_left=6), geometry((2, 2), 8, softmax_scale=0.7)]
    found = []
    backends = [opened(loaded, one) for one in shapes]
    forwards = [
        Forward(one, Mode.DECODE, requests(one, lens), pools(one, 60), seed=seed)
        for seed, (one, lens) in enumerate(zip(shapes, ((40, 33), (21, 9), (3, 2)), strict=True))
    ]
    for backend, forward in zip(backends, forwards, strict=True):
        backend.plan(forward.batch)
        backend.write_metadata(forward.batch)
    for backend, forward in zip(backends, forwards, strict=True):
        forward.attend(backend)
        found.append(forward.error())
    return max(found)


WITNESSES: dict[str, Callable[[LoadedBackend], float]] = {
    "OA1": verify_then_ragged,
    "OA2": ragged_then_block,
    "OA3": chain_tree_chain,
    "OA4": slots_in_place,
    "OD1": captured_again,
    "OD2": right_after_refused,
    "OD3": after_failed_step,
    "OD4": capture_repeated,
    **dict.fromkeys(("OE1", "OE2", "OE3"), three_alive),
}
"""For each mutant the sequence that shows it; the result is the largest difference from float64."""


@pytest.mark.parametrize("mutant", catalog.named(WITNESSES), ids=lambda one: one.id)
def test_history_differs_from_float64_only_on_the_mutant(mutant: Mutant) -> None:
    """The sequence gives a wrong result on the mutant and a right one on the backend without the defect."""
    witness = WITNESSES[mutant.id]
    for layout in mutant.layouts:
        assert witness(right(layout)) < CLOSE
        assert witness(mutant.build(layout)) > CLOSE
