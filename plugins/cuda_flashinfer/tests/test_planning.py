"""Draft steps are planned ahead of one replay: what each step's kernels read afterwards is its own plan."""

from __future__ import annotations

import pytest
import torch

from draftmark import DRAFT_MODES, Mode, load
from draftmark.arena import Arena
from draftmark.cache import KVCache
from draftmark.errors import BackendRefusal
from draftmark_cuda_flashinfer import contract, library, sizing
from draftmark_cuda_flashinfer.backend import FlashInferBackend
from draftmark_cuda_flashinfer.staging import Staging

CASES = {
    "tree-window": {"topk": 4, "num_steps": 4, "window_left": 700, "page_size": 16},
    "chain": {"topk": 1, "num_steps": 5, "page_size": 16},
    "tree": {"topk": 4, "num_steps": 4, "page_size": 16},
}
LENS = (900, 62, 5)


class PassedFence:
    """Of a device that is never late."""

    def record(self):
        pass

    def synchronize(self):
        pass


class Copying:
    """In FlashInfer's place: a plan is rows and page offsets, and a run reads whatever its workspace holds."""

    def __init__(self):
        self.wrote, self.read = [], []

    def plan(self, asked, floats, ints, pinned):
        plan = torch.cat([torch.tensor([asked.rows], dtype=torch.int32), asked.kv_indptr])
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
    """A geometry of draft modes, and its backend with `Copying` in FlashInfer's place."""
    geometry = make_geometry(**CASES[case], modes=DRAFT_MODES, num_draft_tokens=7)
    arena = Arena.allocate(sizing.buffers(geometry), "cpu", guard=True)
    backend = FlashInferBackend(geometry, arena)
    backend._vendor = Copying()
    backend._staging = Staging(arena[sizing.STAGING], PassedFence)
    return geometry, backend, arena


def plan_all_then_run_all(geometry, backend, make_batch):
    """As an engine does a round: every step's plan, then every step; what was written, and what was read."""
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
    """All plans of a round are laid before any step runs; none is lost to a later one."""
    geometry, backend, arena = drafting(make_geometry, case)
    wrote, read = plan_all_then_run_all(geometry, backend, make_batch)
    assert read == wrote
    differ = len({tuple(plan) for plan in wrote}) > 1
    assert differ == (case != "tree"), "the case must be one whose steps differ"
    arena.check()


@pytest.mark.parametrize("case", ["tree-window", "chain"])
def test_with_one_place_for_all_steps_a_round_reads_the_last_plan(make_geometry, make_batch, monkeypatch, case):
    """The mutant: the first steps run by the last step's pages."""
    monkeypatch.setattr(sizing, "plan_offset", lambda geometry, mode, step: 0)
    geometry, backend, _ = drafting(make_geometry, case)
    wrote, read = plan_all_then_run_all(geometry, backend, make_batch)
    assert read == [wrote[-1]] * len(wrote) != wrote


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_head_may_be_planned_in_full_before_it_is_captured(make_geometry, make_batch, monkeypatch, case, apart):
    """DRAFT_EXTEND is planned before the draft steps and run before them: its plan is still there, or the mutant's."""
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
def test_plans_that_live_together_do_not_overlap(make_geometry, case):
    """Where steps differ, each one's largest plan ends before the next one's place, and the last in the buffer."""
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


def test_staging_holds_a_slot_for_every_plan_of_two_rounds(make_geometry):
    """Pinned memory is apart by plan, not by step: two rounds of draft plans are in flight before one is waited for."""
    geometry, _, arena = drafting(make_geometry, "chain")
    assert len(arena[sizing.STAGING]) == 2 * geometry.num_draft_steps


def test_overlap_is_refused_when_a_draft_model_is_opened(make_geometry):
    """Plans need exact lengths; the refusal says so, before any buffer is made."""
    geometry = make_geometry(modes=DRAFT_MODES, topk=4, num_steps=4, overlap=True)
    with pytest.raises(BackendRefusal, match="exact host lengths, but the host lags behind the device"):
        load("cuda_flashinfer").allocate(geometry, "cpu")


def test_without_the_device_usage_is_the_plugins_own_count(make_geometry, make_batch):
    """FlashInfer counts on the GPU that a geometry names; where it is absent nothing of it is asked."""
    geometry = make_geometry()
    batch = make_batch(geometry, Mode.VERIFY, (900, 3))
    if not library.answers_for(geometry.device):
        assert library.usage(geometry, batch) == {}
    assert contract.usage(geometry, batch) == contract.counted(geometry, batch)


def test_the_librarys_count_takes_the_place_of_the_plugins(make_geometry, make_batch, monkeypatch):
    """What the library says is what the contract sees, by buffer, a draft step's place added."""

    class Counting:
        def __init__(self, *shape, **kinds):
            pass

        def workspace_size(self, asked, device):
            return (11, 7) if asked.page_size > 1 else (0, 3)

    from draftmark_cuda_flashinfer import planning

    geometry = make_geometry(**CASES["tree-window"], modes=DRAFT_MODES, num_draft_tokens=7)
    host = torch.empty(2, geometry.max_reqs + 1, dtype=torch.int32)
    monkeypatch.setattr(library, "answers_for", lambda device: True)
    monkeypatch.setattr(library, "_asked", lambda one: (planning.Planner(one, host), Counting(), host))
    batch = make_batch(geometry, Mode.DRAFT, LENS, padded=4, step=2)
    used = contract.usage(geometry, batch)
    place = sizing.plan_offset(geometry, Mode.DRAFT, 2)
    assert (used[sizing.FLOATS], used[sizing.INTS], used[sizing.TAIL_INTS]) == (11, place + 7, 3)
    assert used[sizing.TAIL_OUT] == contract.counted(geometry, batch)[sizing.TAIL_OUT] > 0
