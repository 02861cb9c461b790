"""Tests of the index buffers by brute force, mainly for trees with a sliding window.

No contract check reads the buffers of that case.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from draftmark import DRAFT_MODES, Mode
from draftmark.arena import Arena
from draftmark.errors import BatchError
from draftmark.lengths import Unknown
from draftmark_cuda_flashinfer import levels, sizing
from draftmark_cuda_flashinfer.backend import FlashInferBackend
from draftmark_testing.pairs import quick


def opened(geometry):
    arena = Arena.allocate(sizing.buffers(geometry), "cpu", guard=True)
    return FlashInferBackend(geometry, arena), arena


def keys(arena, geometry, batch, r):
    """Return for each row of request r the KV slots that both attention passes read, sorted, with repetitions."""
    page = geometry.attention.page_size
    starts = arena[sizing.INDPTR].tolist()
    ids = arena[sizing.PAGES][starts[r] : starts[r + 1]].tolist()
    common = [one * page + i for one in ids for i in range(page)]
    if ids:
        common = common[: len(common) - page + int(arena[sizing.LAST_PAGE][r])]
    first, end = arena[sizing.TAIL_INDPTR][r : r + 2].tolist()
    slots = arena[sizing.TAIL_SLOTS][first:end].tolist()
    bits = arena[sizing.MASK][arena[sizing.MASK_INDPTR][r] :].tolist()
    rows = []
    for row in range(batch.q_lens[0]):
        at = [row * len(slots) + i for i in range(len(slots))]
        rows.append(sorted([*common, *(s for s, i in zip(slots, at, strict=True) if bits[i // 8] >> (i % 8) & 1)]))
    return rows


@pytest.mark.parametrize(("window", "page", "tree"), quick(product([-1, 0, 5, 19, 200], [1, 8, 16, 64], [True, False])))
def test_each_row_sees_the_defined_keys(make_geometry, make_batch, truth, window, page, tree):
    """In both passes together, each row sees each of its keys once and no other key."""
    geometry = make_geometry(page_size=page, window_left=window, max_context_len=150)
    backend, arena = opened(geometry)
    for seed, lens in enumerate([(0, 1, 7, 8, 9, 150), (64, 63, 65, 23, 24, 25)]):
        batch = make_batch(geometry, Mode.VERIFY, lens, padded=8, tree=tree, seed=seed)
        arena.poison()
        backend.plan(batch)
        backend.write_metadata(batch)
        for r in range(8):
            assert keys(arena, geometry, batch, r) == truth(geometry, batch, r), (r, lens)
        arena.check()


@pytest.mark.parametrize("window", [-1, 4, 21])
def test_draft_steps_see_their_ancestors(make_geometry, make_batch, truth, window):
    """In each step of a draft round, a row sees its ancestors and no other draft token."""
    geometry = make_geometry(page_size=8, window_left=window, max_context_len=60, modes=DRAFT_MODES)
    backend, arena = opened(geometry)
    for step in range(3):
        batch = make_batch(geometry, Mode.DRAFT, (0, 5, 8, 60), padded=4, step=step, seed=step)
        arena.poison()
        backend.plan(batch)
        backend.write_metadata(batch)
        for r in range(4):
            assert keys(arena, geometry, batch, r) == truth(geometry, batch, r), (step, r)


def test_masked_keys_are_stored_slots(make_geometry, make_batch):
    """All KV slots that the masked pass reads hold stored data, because NaN in a masked key's V reaches the output."""
    geometry = make_geometry(page_size=16, window_left=9, max_context_len=90)
    backend, arena = opened(geometry)
    lens = (0, 3, 17, 90)
    batch = make_batch(geometry, Mode.VERIFY, lens)
    backend.plan(batch)
    backend.write_metadata(batch)
    starts = arena[sizing.TAIL_INDPTR].tolist()
    for r, length in enumerate(lens):
        table = batch.page_table[r].tolist()
        stored = {table[p // 16] * 16 + p % 16 for p in range(length + 7)}
        assert set(arena[sizing.TAIL_SLOTS][starts[r] : starts[r + 1]].tolist()) <= stored


def test_causal_pass_reads_null_pages_left_of_the_window(make_geometry, make_batch):
    """FA2 also loads keys left of the window, so pages that the request may have given back are the null page 0."""
    geometry = make_geometry(page_size=16, window_left=9, max_context_len=90)
    backend, arena = opened(geometry)
    lens = (0, 25, 26, 90)
    batch = make_batch(geometry, Mode.DECODE, lens)
    backend.plan(batch)
    backend.write_metadata(batch)
    starts, ids = arena[sizing.INDPTR].tolist(), arena[sizing.PAGES].tolist()
    for r, length in enumerate(lens):
        hidden, table = max(0, length - 9) // 16, batch.page_table[r].tolist()
        assert ids[starts[r] : starts[r + 1]] == [0] * hidden + table[hidden : length // 16 + 1]


def test_host_page_counts_match_the_device(make_geometry, make_batch):
    """The page counts that the host passes to FlashInfer's plan equal the device's page counts for every length."""
    for window in (-1, 13, 70):
        geometry = make_geometry(page_size=16, window_left=window, max_context_len=150, max_num_reqs=151)
        backend, arena = opened(geometry)
        for lens in (tuple(range(75)), tuple(range(75, 151))):
            for mode in (Mode.VERIFY, Mode.DECODE):
                batch = make_batch(geometry, mode, lens)
                backend.write_metadata(batch)
                counted = [levels.level_pages(geometry, mode, n, batch.tail_lens[0]) for n in lens]
                assert torch.diff(arena[sizing.INDPTR][: len(lens) + 1]).tolist() == counted


def test_plan_with_unknown_lengths_raises(make_geometry, make_batch):
    """`plan` raises for unknown host lengths, and the error says that Exact lengths are needed."""
    from dataclasses import replace

    geometry = make_geometry()
    backend, _ = opened(geometry)
    batch = replace(make_batch(geometry, Mode.DECODE, (5, 6)), host=Unknown(2, geometry.max_prefix_len))
    with pytest.raises(BatchError, match="needs Exact lengths"):
        backend.plan(batch)
