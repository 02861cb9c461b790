"""Tests of draft rounds: all steps are planned before one replay, and each step's kernels read their own plan."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from draftmark import DRAFT_MODES, Mode, load
from draftmark.arena import Arena
from draftmark.cache import KVCache
from draftmark.errors import BackendRefusal
from draftmark.runtime import Causal
from draftmark_cuda_flashinfer import contract, sizing
from draftmark_cuda_flashinfer.backend import FlashInferBackend
from draftmark_cuda_flashinfer.staging import Staging

CASES = {
    "tree-window": {"topk": 4, "num_steps": 4, "window_left": 700, "page_size": 16},
    "chain": {"topk": 1, "num_steps": 5, "page_size": 16},
    "tree": {"topk": 4, "num_steps": 4, "page_size": 16},
}
LENS = (900, 62, 5)


class PassedFence:
    """Stands in for a fence that has always passed already."""

    def record(self):
        pass

    def synchronize(self):
        pass


class Copying:
    """Stands in for FlashInfer: `plan` writes rows and page offsets, `run` records the workspace that it would read."""

    def __init__(self):
        self.wrote, self.read = [], []

    def plan(self, request, floats, ints, pinned):
        plan = torch.cat([torch.tensor([request.rows], dtype=torch.int32), request.kv_indptr])
        size = 4 * plan.numel()
        pinned[:size].view(torch.int32).copy_(plan)
        ints[:size].copy_(pinned[:size])
        self.wrote.append(plan.tolist())
        return [size]

    def run(self, plan, floats, ints, *rest, **more):
        self.read.append(ints[: plan[0]].view(torch.int32).tolist())

    def merge(self, *states):
        pass


def drafting(make_geometry, case):
    """Return (geometry, backend, arena) of a draft model, with `Copying` instead of FlashInfer."""
    geometry = make_geometry(**CASES[case], modes=DRAFT_MODES, num_draft_tokens=7)
    arena = Arena.allocate(sizing.buffers(geometry), "cpu", guard=True)
    backend = FlashInferBackend(geometry, arena)
    backend._vendor = Copying()
    backend._staging = Staging(arena[sizing.STAGING], PassedFence)
    return geometry, backend, arena


def plan_all_then_run_all(geometry, backend, make_batch):
    """Plan every step, then run every step, as an engine does. Return the plans that were written and read."""
    tree = geometry.draft.topk > 1
    batches = [make_batch(geometry, Mode.DRAFT, LENS, padded=4, step=i, tree=tree)
               for i in range(geometry.num_draft_steps)]  # fmt: skip
    for batch in batches:
        backend.plan(batch)
    for batch in batches:
        run(backend, geometry, batch)
    passes, vendor = 2 if tree else 1, backend._vendor
    return vendor.wrote[::passes], vendor.read[::passes]


def run(backend, geometry, batch):
    a = geometry.attention
    q = torch.zeros(batch.num_rows, a.num_qo_heads, a.head_dim, dtype=torch.bfloat16)
    pool = torch.zeros(2, a.page_size, a.num_kv_heads, a.head_dim, dtype=torch.bfloat16)
    backend.attend(q, KVCache(pool, pool), batch, torch.empty_like(q))


@pytest.mark.parametrize("case", CASES)
def test_each_draft_step_reads_its_own_plan(make_geometry, make_batch, case):
    """All plans of a round are written before any step runs, and each step reads its own plan."""
    geometry, backend, arena = drafting(make_geometry, case)
    wrote, read = plan_all_then_run_all(geometry, backend, make_batch)
    assert read == wrote
    differ = len({tuple(plan) for plan in wrote}) > 1
    assert differ == (case != "tree"), "the steps of this case must have different plans"
    arena.check()


@pytest.mark.parametrize("case", ["tree-window", "chain"])
def test_steps_with_one_offset_read_the_last_plan(make_geometry, make_batch, monkeypatch, case):
    """If all steps' plans had the same offset, every step would read the last step's plan."""
    monkeypatch.setattr(sizing, "plan_offset", lambda geometry, mode, step: 0)
    geometry, backend, _ = drafting(make_geometry, case)
    wrote, read = plan_all_then_run_all(geometry, backend, make_batch)
    assert read == [wrote[-1]] * len(wrote) != wrote


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_draft_extend_plan_survives_draft_plans(make_geometry, make_batch, monkeypatch, case, apart):
    """DRAFT_EXTEND reads its own plan, even if draft steps are planned before it runs; with one offset it does not."""
    if not apart:
        monkeypatch.setattr(sizing, "plan_offset", lambda geometry, mode, step: 0)
    geometry, backend, _ = drafting(make_geometry, case)
    extension = make_batch(geometry, Mode.DRAFT_EXTEND, LENS, padded=4, tree=False)
    backend.plan(extension)
    steps = [make_batch(geometry, Mode.DRAFT, LENS, padded=4, step=i, tree=geometry.draft.topk > 1)
             for i in range(geometry.num_draft_steps)]  # fmt: skip
    for batch in steps:
        backend.plan(batch)
    run(backend, geometry, extension)
    vendor = backend._vendor
    assert (vendor.read[0] == vendor.wrote[0]) == apart


@pytest.mark.parametrize("case", CASES)
def test_plans_of_one_round_do_not_overlap(make_geometry, case):
    """Each step's largest plan ends before the next step's offset, and the last plan ends within the buffer."""
    geometry, _, arena = drafting(make_geometry, case)
    steps = range(geometry.num_draft_steps)
    places = [sizing.plan_offset(geometry, Mode.DRAFT, step) for step in steps]
    if case == "tree":
        assert places == [0] * len(places)
        return
    largest = max(sizing._uniform_plans(geometry, Mode.DRAFT))
    after = sizing.plan_offset(geometry, Mode.DRAFT_EXTEND, 0)
    assert all(place + largest <= later for place, later in zip(places, [*places[1:], after], strict=True))
    assert after + max(sizing._uniform_plans(geometry, Mode.DRAFT_EXTEND)) <= arena[sizing.INTS].numel()


def test_staging_has_slots_for_two_rounds(make_geometry):
    """Pinned staging has a slot for every draft plan of two rounds, because two rounds can be in flight."""
    geometry, _, arena = drafting(make_geometry, "chain")
    assert len(arena[sizing.STAGING]) == 2 * geometry.num_draft_steps


def test_overlap_is_refused_when_a_draft_model_opens(make_geometry):
    """A geometry with overlap is refused before any buffer is allocated, because plans need exact lengths."""
    geometry = make_geometry(modes=DRAFT_MODES, topk=4, num_steps=4, overlap=True)
    with pytest.raises(BackendRefusal, match="exact host lengths, but the host lags behind the device"):
        load("cuda_flashinfer").allocate(geometry, "cpu")


def test_usage_needs_no_library(make_geometry, make_batch, monkeypatch):
    """`contract.usage` counts without FlashInfer and without a GPU, so its numbers are the same in every process."""
    geometry = make_geometry(**CASES["tree-window"], modes=DRAFT_MODES, num_draft_tokens=7)
    batch = make_batch(geometry, Mode.DRAFT, LENS, padded=4, step=2)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("usage() asks for a GPU"))
    used = contract.usage(geometry, batch)
    assert used[sizing.INTS] > sizing.plan_offset(geometry, Mode.DRAFT, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_run_one_pass_without_a_mask(make_geometry, make_batch, causal):
    """DRAFT_BLOCK plans and runs one pass over prefix and block, causal only if the batch's tail is."""
    geometry = make_geometry(modes=(Mode.DRAFT_BLOCK,), block_size=4, page_size=16)
    arena = Arena.allocate(sizing.buffers(geometry), "cpu", guard=True)
    backend, passes = FlashInferBackend(geometry, arena), []

    class Watching(Copying):
        def plan(self, request, *rest):
            passes.append(("plan", request.causal, request.kv_indptr.tolist()))
            return super().plan(request, *rest)

        def run(self, *given, causal, **more):
            passes.append(("run", causal, given[7] if len(given) > 7 else None))

    backend._vendor, backend._staging = Watching(), Staging(arena[sizing.STAGING], PassedFence)
    batch, a = make_batch(geometry, Mode.DRAFT_BLOCK, (30, 13), tree=False), geometry.attention
    batch = replace(batch, tail=Causal()) if causal else batch
    q = torch.zeros(batch.num_rows, a.num_qo_heads, a.head_dim, dtype=torch.bfloat16)
    k = torch.zeros(1 + int(batch.page_table.max()), 16, a.num_kv_heads, a.head_dim, dtype=torch.bfloat16)
    backend.plan(batch)
    backend.write_metadata(batch)
    backend.attend(q, KVCache(k, k.clone()), batch, torch.empty_like(q))
    assert [one[:2] for one in passes] == [("plan", causal), ("run", causal)]
    assert passes[0][2] == [0, 3, 5]
    assert arena[sizing.INDPTR][:3].tolist() == [0, 3, 5]
