"""GPU tests of workspace sizes, pinned staging and CUDA graphs."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import DRAFT_MODES, TARGET_MODES, AttentionShape, Mode, load
from draftmark.arena import Arena
from draftmark.cache import KVCache
from draftmark.devices import device_profile
from draftmark.graphs import GraphKey, Program
from draftmark_contract.sizing.batches import BatchShape, Group
from draftmark_contract.sizing.usage import PlainBatch
from draftmark_cuda_flashinfer import contract, levels, sizing
from draftmark_cuda_flashinfer.backend import FlashInferBackend
from draftmark_cuda_flashinfer.staging import Staging
from plugins.cuda_flashinfer.tests.library_count import library_count

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def opened(geometry, **kinds):
    arena = Arena.allocate(sizing.buffers(geometry), "cuda", guard=True)
    return kinds.get("kind", FlashInferBackend)(geometry, arena), arena


def stage(geometry, batch, seed):
    """Return random queries, and a KV pool with NaN in unused slots."""
    a, dice = geometry.attention, torch.Generator().manual_seed(seed)
    pages = 1 + int(batch.page_table.max())
    k, v = (torch.randn(pages, a.page_size, a.num_kv_heads, a.head_dim, generator=dice) for _ in range(2))
    for r in range(batch.padded_reqs):
        used = int(batch.prefix_lens[r]) + batch.tail_lens[0]
        table = batch.page_table[r].tolist()
        for position in range(used, min(used + 2 * a.page_size, len(table) * a.page_size)):
            if table[position // a.page_size]:
                k[table[position // a.page_size], position % a.page_size] = float("nan")
                v[table[position // a.page_size], position % a.page_size] = float("nan")
    q = torch.randn(batch.num_rows, a.num_qo_heads, a.head_dim, generator=dice)
    kind = getattr(torch, a.q_dtype)
    return q.to(kind).cuda(), KVCache(k.to(kind).cuda(), v.to(kind).cuda())


def answer(truth, geometry, batch, q, cache):
    """Return attention in float64 over the KV slots that each row sees according to mask and window."""
    a = geometry.attention
    k, v = (one.flatten(0, 1).double() for one in (cache.k, cache.v))
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for r in range(batch.num_reqs):
        for row, slots in enumerate(truth(geometry, batch, r)):
            at = torch.tensor(slots, device=q.device)
            keys, values = (one[at].repeat_interleave(a.group_size, 1) for one in (k, v))
            number = r * batch.q_lens[0] + row
            scores = torch.einsum("hd,shd->hs", q[number].double(), keys) * a.head_dim**-0.5
            out[number] = torch.einsum("hs,shd->hd", scores.softmax(-1), values)
    return out[: batch.num_reqs * batch.q_lens[0]]


def close(out, wanted):
    got = out[: len(wanted)].double()
    return bool(got.isfinite().all()) and float((got - wanted).norm() / wanted.norm()) < 1e-2


def shapes(make_geometry):
    small = {"max_context_len": 3000, "capture_batch_sizes": (1, 2, 4, 8, 16, 33, 64, 80), "max_num_reqs": 70}
    for attention in (AttentionShape(8, 2, 128, 64), AttentionShape(32, 8, 128, 16), AttentionShape(4, 2, 64, 1)):
        for modes in (TARGET_MODES, DRAFT_MODES):
            made = make_geometry(**small, topk=8, num_steps=3, num_draft_tokens=33, modes=modes)
            yield type(made).create(attention, made.limits, made.draft, device_profile("cuda"), modes)


def test_workspaces_equal_the_librarys_count(make_geometry, make_batch):
    """FlashInfer's `workspace_size()` and the plugin's formulas agree for every captured size, mode and step."""
    checked = 0
    for geometry in shapes(make_geometry):
        for mode in geometry.modes:
            if mode is Mode.EXTEND:
                continue
            for step in range(geometry.num_draft_steps if mode is Mode.DRAFT else 1):
                for count in geometry.limits.capture_batch_sizes:
                    dice = random.Random(count)
                    live = min(count, geometry.limits.max_num_reqs)
                    lens = tuple(dice.randrange(3000) for _ in range(live))
                    batch = make_batch(geometry, mode, lens, padded=count, step=step)
                    by_library, used = library_count(geometry, batch), contract.usage(geometry, batch)
                    names = set(WORKSPACES) - ({sizing.TAIL_INTS} if one_pass(geometry, mode) else set())
                    assert set(by_library) == names
                    assert used | by_library == used, (mode, step, count)
                    checked += 1
    assert checked > 100


WORKSPACES = (sizing.FLOATS, sizing.INTS, sizing.TAIL_INTS)


def one_pass(geometry, mode):
    return not levels.is_masked(geometry, mode)


def test_extend_workspaces_equal_the_librarys_count(make_geometry):
    """FlashInfer's `workspace_size()` and the plugin's formulas agree for EXTEND batches with split keys."""
    dice, cut = random.Random(5), 0
    for geometry in shapes(make_geometry):
        for _ in range(20):
            count = dice.randint(1, 12)
            groups = [Group(1, dice.randrange(2900), rows, rows) for rows in dice.choices((1, 5, 20), k=count)]
            batch = PlainBatch(BatchShape(Mode.EXTEND, 0, tuple(groups)))
            used = contract.usage(geometry, batch)
            assert used | library_count(geometry, batch) == used, groups
            cut += used[sizing.FLOATS] > 0
    assert cut > 20


def test_plan_and_kernels_write_within_usage(make_geometry, make_batch):
    """A plan and its kernels change no byte of a workspace after the bytes that the plugin counts for the batch."""
    geometry = next(iter(shapes(make_geometry)))
    backend, arena = opened(geometry)
    for count, mode in ((1, Mode.VERIFY), (4, Mode.VERIFY), (64, Mode.VERIFY), (2, Mode.DECODE), (64, Mode.DECODE)):
        batch = make_batch(geometry, mode, (2000, *[77] * (count - 1)), device="cuda")
        q, cache = stage(geometry, batch, 1)
        arena.poison()
        backend.plan(batch)
        backend.write_metadata(batch)
        backend.attend(q, cache, batch, torch.empty_like(q))
        used = contract.usage(geometry, batch)
        for name in (sizing.FLOATS, sizing.INTS, sizing.TAIL_INTS):
            touched = (arena[name] != 0xFF).nonzero()
            assert touched.numel() == 0 or int(touched[-1]) < used[name], (mode, count, name)
        arena.check()


@pytest.mark.parametrize("fenced", [True, False])
def test_late_device_reads_each_plan(make_geometry, make_batch, truth, monkeypatch, fenced):
    """Plans that are made before the device runs give right outputs, but wrong outputs without the staging fence."""
    if not fenced:
        monkeypatch.setattr(Staging, "wait", lambda self, index: None)
    geometry = make_geometry(num_qo_heads=8, num_kv_heads=2, max_context_len=3000, max_num_reqs=4)
    geometry = type(geometry).create(
        geometry.attention, geometry.limits, geometry.draft, device_profile("cuda"), geometry.modes
    )
    backend, _ = opened(geometry)
    cases = []
    for seed, lens in enumerate([(2900, 5, 9, 1), (3, 2800, 2, 7), (1, 1, 2950, 3), (700, 700, 700, 700)]):
        batch = make_batch(geometry, Mode.VERIFY, lens, seed=seed, device="cuda")
        q, cache = stage(geometry, batch, seed)
        cases.append((batch, q, cache, torch.full_like(q, float("nan"))))
    for batch, q, cache, out in cases:  # compiles and loads all kernels, so that later calls do not wait
        backend.plan(batch)
        backend.write_metadata(batch)
        backend.attend(q, cache, batch, out)
        out.fill_(float("nan"))
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for batch, q, cache, out in cases:
        backend.plan(batch)
        backend.write_metadata(batch)
        backend.attend(q, cache, batch, out)
    torch.cuda.synchronize()
    right = [close(out, answer(truth, geometry, batch, q, cache)) for batch, q, cache, out in cases]
    assert all(right) == fenced, right


@pytest.mark.parametrize("kept", [True, False])
def test_pinned_memory_outlives_its_copies(make_geometry, make_batch, monkeypatch, kept):
    """After a backend is deleted, its pinned memory is not reused until the device has copied the plan from it."""
    from draftmark_cuda_flashinfer import staging

    if not kept:
        monkeypatch.setattr(staging, "_drain", lambda fences, memory: None)
    geometry = make_geometry(max_context_len=3000, max_num_reqs=4)
    geometry = type(geometry).create(
        geometry.attention, geometry.limits, geometry.draft, device_profile("cuda"), geometry.modes
    )
    batch = make_batch(geometry, Mode.VERIFY, (2900, 5, 9, 1), device="cuda")
    seen = 0
    for late in (False, True):  # the first iteration only compiles and loads kernels
        backend, arena = opened(geometry)
        device_ints = arena[sizing.INTS]
        if late:
            torch.cuda._sleep(200_000_000)
        backend.plan(batch)
        del backend, arena
        torch.full((sizing_rows(geometry),), 0xFF, dtype=torch.uint8, pin_memory=True)
        torch.cuda.synchronize()
        seen = int((device_ints != 0xFF).sum())
    assert (seen > 0) == kept


def sizing_rows(geometry):
    """Return the bytes of pinned staging with guard words. PyTorch reuses the block for a tensor of this size."""
    (spec,) = (one for one in sizing.buffers(geometry) if one.name == sizing.STAGING)
    return spec.nbytes + 1024


# -- known bug sglang#26521 and #26655: capture with zeroed lengths ------------------------------------------------


class PlansOnce(FlashInferBackend):
    """Backend with a known engine bug: every replay uses the plan that was made at capture for empty requests."""

    planned = False

    def plan(self, batch):
        if not self.planned:
            super().plan(batch)
        self.planned = True


class KeepsLengths(FlashInferBackend):
    """Backend with a defect: it writes the index buffers before the capture, so a replay does not update them."""

    def write_metadata(self, batch):
        if not torch.cuda.is_current_stream_capturing():
            super().write_metadata(batch)


@pytest.mark.parametrize("kind", [FlashInferBackend, PlansOnce, KeepsLengths])
def test_graph_captured_on_empty_requests_serves_long_ones(make_geometry, make_batch, truth, kind):
    """A graph captured with lengths of zero gives right output for long requests, but not with either defect."""
    geometry = make_geometry(max_context_len=3000, max_num_reqs=4, capture_batch_sizes=(4,))
    geometry = type(geometry).create(
        geometry.attention, geometry.limits, geometry.draft, device_profile("cuda"), geometry.modes
    )
    backend, _ = opened(geometry, kind=kind)
    static = make_batch(geometry, Mode.VERIFY, (0, 0, 0, 0), device="cuda")
    static.page_table.copy_(make_batch(geometry, Mode.VERIFY, (1, 1, 1, 1), device="cuda").page_table)
    q, cache = stage(geometry, static, 0)
    cache.k.nan_to_num_(0.5), cache.v.nan_to_num_(0.5)
    out = torch.empty_like(q)

    def step():
        backend.write_metadata(static)
        backend.attend(q, cache, static, out)

    graphs = load("cuda_flashinfer").graph_state(geometry, torch.device("cuda"))
    backend.plan(static)
    graphs.capture(GraphKey(Program.VERIFY, 4), step)
    right = []
    for seed, lens in enumerate([(2900, 1500, 3, 64), (1, 0, 2999, 65), (9, 8, 7, 6)], 1):
        batch = make_batch(geometry, Mode.VERIFY, lens, seed=seed, device="cuda")
        for mine, theirs in ((static.prefix_lens, batch.prefix_lens), (static.page_table, batch.page_table),
                             (static.tail.mask, batch.tail.mask), (static.tail.depth, batch.tail.depth)):  # fmt: skip
            mine.copy_(theirs)
        out.fill_(float("nan"))
        backend.plan(batch)
        graphs.replay(GraphKey(Program.VERIFY, 4))
        right.append(close(out, answer(truth, geometry, batch, q, cache)))
    assert all(right) == (kind is FlashInferBackend), right


# -- draft rounds: all steps are planned before one graph, which contains all steps, is replayed ---------------------

DRAFTING = {
    "tree": {"topk": 4, "num_steps": 4},
    # With this window the steps need different plans: for 2900 tokens the first step reads 41 pages, which FlashInfer
    # splits into six chunks, and the last step reads 40 pages in five chunks.
    "tree-window": {"topk": 4, "num_steps": 4, "window_left": 650},
    "chain": {"topk": 1, "num_steps": 5},
}


@pytest.mark.parametrize(("case", "apart"), [*((case, True) for case in DRAFTING), ("tree-window", False)])
def test_draft_graph_steps_use_their_own_plans(make_geometry, make_batch, truth, monkeypatch, case, apart):
    """A graph of all draft steps gives right output, but wrong output if all steps' plans have the same offset."""
    if not apart:
        monkeypatch.setattr(sizing, "plan_offset", lambda geometry, mode, step: 0)
    fields = {"max_context_len": 3000, "max_num_reqs": 2, "capture_batch_sizes": (2,), "page_size": 16}
    made = make_geometry(**fields, **DRAFTING[case], modes=DRAFT_MODES)
    geometry = type(made).create(made.attention, made.limits, made.draft, device_profile("cuda"), made.modes)
    backend, arena = opened(geometry)
    tree, graphs = geometry.draft.topk > 1, load("cuda_flashinfer").graph_state(geometry, torch.device("cuda"))
    lens, steps = (2900, 703), range(geometry.num_draft_steps)
    batches = [make_batch(geometry, Mode.DRAFT, lens, step=i, tree=tree, seed=i, device="cuda") for i in steps]
    staged = [stage(geometry, batch, i) for i, batch in enumerate(batches)]
    for _, cache in staged:
        cache.k.nan_to_num_(0.5), cache.v.nan_to_num_(0.5)
    outs = [torch.empty_like(q) for q, _ in staged]

    def program():
        for batch, (q, cache), out in zip(batches, staged, outs, strict=True):
            backend.write_metadata(batch)
            backend.attend(q, cache, batch, out)

    empty = [make_batch(geometry, Mode.DRAFT, (0, 0), step=i, tree=tree, device="cuda") for i in steps]
    for batch in empty:
        backend.plan(batch)
    graphs.capture(GraphKey(Program.DRAFT, 2), program)
    for out in outs:
        out.fill_(float("nan"))
    for batch in batches:
        backend.plan(batch)
    graphs.replay(GraphKey(Program.DRAFT, 2))
    right = [close(out, answer(truth, geometry, batch, q, cache))
             for out, batch, (q, cache) in zip(outs, batches, staged, strict=True)]  # fmt: skip
    assert all(right) == apart, right
    arena.check()
