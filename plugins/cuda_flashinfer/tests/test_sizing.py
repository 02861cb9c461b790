"""Tests that workspace sizes are exact to the byte, and that the contract finds buffers that are too small."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from draftmark import DRAFT_MODES, TARGET_MODES, AttentionShape, Mode
from draftmark_contract.roles import with_roles
from draftmark_contract.sizing.batches import BatchShape, Group, limit_batches
from draftmark_contract.sizing.required_sizes import required_sizes_of
from draftmark_contract.sizing.usage import PlainBatch
from draftmark_cuda_flashinfer import contract, levels, partition, sizing, version
from draftmark_cuda_flashinfer.planning import Planner

HEADS = [AttentionShape(8, 2, 128, 64), AttentionShape(32, 8, 128, 16), AttentionShape(4, 4, 64, 1),
         AttentionShape(8, 1, 256, 128), AttentionShape(9, 3, 64, 3, window_left=100)]  # fmt: skip
DRAFTS = [(1, 1, 1), (3, 4, 7), (8, 5, 64), (1, 4, 4)]


def dimensions(geometry):
    a = geometry.attention
    return {"heads": a.num_qo_heads, "kv_heads": a.num_kv_heads, "dim": a.head_dim, "sms": geometry.device.num_sms}


def geometries(make_geometry):
    for shape, (k, s, d), modes in product(HEADS, DRAFTS, (TARGET_MODES, DRAFT_MODES)):
        fields = {"topk": k, "num_steps": s, "num_draft_tokens": d, "modes": modes, "max_num_reqs": 70}
        made = make_geometry(**fields, max_context_len=5000, capture_batch_sizes=(1, 2, 4, 8, 16, 33, 80))
        yield replace(made, attention=shape)


def library(plan, geometry, mode, lens, step=0):
    """Return (float bytes, int bytes, …) that FlashInfer would use for a uniform batch, with the plugin's arguments."""
    extent, a = geometry.extent(mode, step), geometry.attention
    pages = [levels.level_pages(geometry, mode, n, extent.tail_len) for n in lens]
    cut = partition.uniform(geometry, extent.q_len, len(lens))
    window = -1 if levels.is_masked(geometry, mode) else a.window_left
    return plan(
        [extent.q_len] * len(lens), pages, **dimensions(geometry), page_size=a.page_size, graph=cut.graph,
        q_len=extent.q_len, window=window, fixed=cut.chunk_pages,
    )  # fmt: skip


def test_usage_equals_the_librarys_use(make_geometry, library_plan):
    """The plugin's count of workspace bytes equals FlashInfer's for every captured size, mode and step."""
    dice, checked = random.Random(1), 0
    for geometry in geometries(make_geometry):
        for mode in geometry.modes:
            for step in range(max(1, geometry.num_draft_steps) if mode is Mode.DRAFT else 1):
                if mode is Mode.EXTEND or (mode is Mode.DRAFT and geometry.num_draft_steps == 0):
                    continue
                for count in geometry.limits.capture_batch_sizes:
                    lens = [dice.randrange(5000) for _ in range(count)]
                    floats, ints, _, _ = library(library_plan, geometry, mode, lens, step)
                    extent = geometry.extent(mode, step)
                    groups = tuple(Group(1, n, extent.q_len, extent.tail_len) for n in lens)
                    used = contract.usage(geometry, PlainBatch(BatchShape(mode, step, groups)))
                    ints += sizing.plan_offset(geometry, mode, step)
                    assert (used[sizing.FLOATS], used[sizing.INTS]) == (floats, ints), (geometry, mode, count)
                    checked += 1
    assert checked > 500


def test_planner_reads_host_numbers_only(make_geometry):
    """The planner computes the arguments of each uniform mode from counts and lengths only."""
    for geometry in geometries(make_geometry):
        planner = Planner(geometry, torch.empty(sizing.HOST_INDPTRS, geometry.max_reqs + 1, dtype=torch.int32))
        for mode in set(geometry.modes) - {Mode.EXTEND}:
            extent = geometry.extent(mode)
            groups = (Group(2, 100, extent.q_len, extent.tail_len),)
            paged, masked = planner.requests(PlainBatch(BatchShape(mode, 0, groups)))
            assert paged.rows == 2 * extent.q_len and (masked is not None) == levels.is_masked(geometry, mode)


def test_declared_workspaces_are_the_largest_use(make_geometry):
    """Each workspace has exactly the bytes that the largest batch uses."""
    for geometry in geometries(make_geometry):
        found: dict[str, int] = {}
        for mode, count in product((m for m in geometry.modes if m is not Mode.EXTEND), range(1, 81)):
            step = geometry.last_step(mode)
            extent = geometry.extent(mode, step)
            batch = PlainBatch(BatchShape(mode, step, (Group(count, 900, extent.q_len, extent.tail_len),)))
            for name, size in contract.usage(geometry, batch).items():
                found[name] = max(found.get(name, 0), size)
        specs = {spec.name: spec for spec in sizing.buffers(geometry)}
        assert specs[sizing.FLOATS].nbytes == found[sizing.FLOATS]
        extend = max(partition.int_bytes(n, 80, 256, graph=False, split=False)
                     for n in partition.extend_tiles(geometry.attention, 256, 80))  # fmt: skip
        assert specs[sizing.INTS].nbytes == max(found[sizing.INTS], extend)
        if sizing.TAIL_INTS in specs:
            assert specs[sizing.TAIL_INTS].nbytes == found[sizing.TAIL_INTS]


@pytest.mark.parametrize("release", ["0.7.0.post1", "0.7.4"])
def test_extend_fits_the_captured_modes_workspaces(make_geometry, library_plan, monkeypatch, release):
    """For random EXTEND batches, the plugin's bytes equal FlashInfer's and fit the captured modes' workspaces."""
    monkeypatch.setattr(version, "installed", lambda: release)
    dice, cut, shared = random.Random(2), 0, release == "0.7.4"
    for geometry in geometries(make_geometry):
        a = geometry.attention
        floats, (ints, _) = sizing.float_workspace(geometry), sizing.plan_bytes(geometry)
        for _ in range(40):
            count = dice.randint(1, 12)
            q_lens = [dice.choice((0, 1, 5, 20)) for _ in range(count)]
            pages = [-(-(dice.randrange(4900) + q) // a.page_size) for q in q_lens]
            mine = partition.extend(geometry, q_lens, pages, floats, ints)
            theirs = library_plan(q_lens, pages, **dimensions(geometry), page_size=a.page_size, graph=False,
                          window=a.window_left, fixed=mine.chunk_pages, shared=shared)  # fmt: skip
            assert (mine.float_bytes, mine.int_bytes) == theirs[:2], (q_lens, pages)
            assert mine.float_bytes <= floats and mine.int_bytes <= ints
            cut += mine.float_bytes > 0
    assert cut > 100


def test_no_workspace_grows_with_rows_times_context(make_geometry):
    """For 256 requests of 64 rows and context 131072, float and integer workspaces are small.

    FlashInfer's own wrapper would need 386 MiB and 256 MiB.
    """
    fields = {"num_draft_tokens": 64, "topk": 8, "num_steps": 5, "max_num_reqs": 256, "max_context_len": 131072}
    geometry = make_geometry(**fields, num_qo_heads=32, num_kv_heads=8, capture_batch_sizes=(256,))
    sizes = {spec.name: spec.nbytes for spec in sizing.buffers(geometry)}
    assert sizes[sizing.MASK] == 256 * 64 * 64 // 8
    assert sizes[sizing.FLOATS] < 17 << 20
    assert sizes[sizing.INTS] < 128 << 10


# -- known bug sglang#27338: a buffer's size lacks the factor topk ---------------------------------------------------


def shortage(geometry, specs):
    """Return a description of the first buffer that is too small for a batch at the limits, or an empty string."""
    metadata = contract.layouts(geometry)
    for batch in limit_batches(geometry):
        for spec in with_roles(specs, metadata, {}):
            named = {name for level in metadata[batch.mode].levels for name in level.buffers.values()}
            if spec.name in named:
                for need in required_sizes_of(spec, batch, geometry, metadata):
                    if need.needed > need.declared:
                        return f"{need.buffer}: {need.what} {need.needed} > {need.declared}, {need.why}"
    return ""


def draft_geometry(make_geometry):
    return make_geometry(topk=4, num_steps=5, num_draft_tokens=2, modes=DRAFT_MODES, max_extend_tokens=4)


def test_every_draft_batch_fits(make_geometry):
    """For topk 4 and pages of 64, all buffers are large enough for every draft step."""
    geometry = draft_geometry(make_geometry)
    assert shortage(geometry, sizing.buffers(geometry)) == ""


@pytest.mark.parametrize("name", [sizing.TAIL_SLOTS, sizing.MASK, sizing.SLOTS])
def test_buffer_without_topk_factor_is_found(make_geometry, name):
    """A buffer with 1/topk of its size, as in a known engine bug, is reported as too small."""
    geometry = draft_geometry(make_geometry)
    mutated = [replace(spec, shape=(spec.shape[0] // 4,)) if spec.name == name else spec
               for spec in sizing.buffers(geometry)]  # fmt: skip
    assert shortage(geometry, mutated).startswith(name)


def test_page_ids_do_not_depend_on_topk(make_geometry):
    """The buffer of page ids has the same size for every topk, because branches share the prefix's pages."""
    sizes = set()
    for topk in (1, 4, 8):
        geometry = make_geometry(topk=topk, num_steps=2, num_draft_tokens=64, modes=DRAFT_MODES)
        sizes |= {spec.numel for spec in sizing.buffers(geometry) if spec.name == sizing.PAGES}
    assert len(sizes) == 1


def test_staging_holds_two_rounds_of_plans(make_geometry):
    """Pinned staging has two slots for each draft step, with sizes that are multiples of 16 bytes."""
    geometry = make_geometry(modes=DRAFT_MODES, topk=4, num_steps=6)
    spec = next(one for one in sizing.buffers(geometry) if one.name == sizing.STAGING)
    assert spec.shape[0] == 10
    assert spec.shape[1] % 16 == 0


def test_modes_of_two_passes_declare_their_bound(make_geometry):
    """Outputs of trees may differ by 4 unit roundoffs, those of one pass by 3; a draft step of topk 1 is one pass."""
    two = {Mode.VERIFY, Mode.DRAFT}
    for topk, passes in ((4, two), (1, two - {Mode.DRAFT})):
        geometry = make_geometry(topk=topk, block_size=4, modes=tuple(Mode))
        assert {mode for mode in Mode if contract.roundoffs(geometry, mode) == 4} == passes
        assert {contract.roundoffs(geometry, mode) for mode in Mode} == {3, 4}
