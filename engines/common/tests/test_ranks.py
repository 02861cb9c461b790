"""Digests of a step: contents that change them, contents that do not, and the guard's error when ranks differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark import AttentionShape, DraftShape, Gate, Geometry, Limits, Mode, Recurrence, StateGeometry, StateShape
from draftmark.runtime import BatchBuffers, Exact, Tree
from draftmark_engines.ranks import PARTS, step_digest
from engines.common.tests.two_ranks import results_of_two_ranks

LIMITS, DRAFT = Limits(3, 32), DraftShape(2, 2, 4)
ATTENTION = Geometry.create(
    AttentionShape(4, 2, 8, 4, "float32", "float32"), LIMITS, DRAFT, modes=(Mode.VERIFY, Mode.RAGGED_VERIFY)
)
STATE = StateGeometry.create(
    StateShape(Recurrence.DELTA, Gate.HEAD, 2, 1, 4, 3, 8, 4, "float32", "float32", "float32"), LIMITS, DRAFT
)


@pytest.fixture
def filled():
    """Return a VERIFY and a RAGGED_VERIFY batch of two live requests and a padded one, with stale memory after them."""
    batches = {}
    for mode in (Mode.VERIFY, Mode.RAGGED_VERIFY):
        buffers = BatchBuffers(ATTENTION, "cpu", STATE)
        if mode is Mode.VERIFY:
            batch = buffers.uniform(mode, 0, 3, 2, Exact((5, 9)), tree=True)
        else:
            batch = buffers.ragged_verify(8, 2, Exact((5, 9)), tree=True, padded_reqs=3)
            batch.q_indptr.copy_(torch.tensor([0, 1, 5, 5]))
        batch.prefix_lens.copy_(torch.tensor([5, 9, 0]))
        batch.page_table.copy_(torch.arange(batch.page_table.numel()).view(batch.page_table.shape))
        batch.positions.copy_(torch.arange(batch.num_rows))
        batch.tail.mask.fill_(3)
        batch.tail.depth.fill_(1)
        batch.tail.parents.fill_(-1)
        batches[mode] = batch
    return batches


def changed(batch, of_batch):
    """Return the names of the parts with different digests in two batches."""
    first, second = (step_digest(one, 4).tolist() for one in (batch, of_batch))
    return [part for part, a, b in zip(PARTS, first, second, strict=True) if a != b]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda b: b.prefix_lens[1:2].add_(1), "prefix lengths"),
        (lambda b: b.page_table[0, 0].add_(1), "pages"),
        (lambda b: b.tail.mask[0].add_(1), "tail"),
        (lambda b: b.tail.depth.view(-1)[:1].add_(1), "tail"),
        (lambda b: b.tail.parents.view(-1)[:1].add_(1), "tail"),
        (lambda b: b.positions[:1].add_(1), "positions"),
    ],
)
@pytest.mark.parametrize("mode", [Mode.VERIFY, Mode.RAGGED_VERIFY], ids=str)
def test_every_part_changes_the_digest(filled, mode, change, part):
    """A changed number in a tensor changes the digest of that tensor's part."""
    before = step_digest(filled[mode], 4).clone()
    change(filled[mode])
    after = step_digest(filled[mode], 4)
    parts = [name for name, a, b in zip(PARTS, before.tolist(), after.tolist(), strict=True) if a != b]
    assert part in parts and set(parts) <= {part, "pages"}, parts


def test_swapped_values_change_the_digest(filled):
    """A digest depends on the index of each value, not only on the set of values."""
    batch = filled[Mode.VERIFY]
    swapped = replace(batch, prefix_lens=batch.prefix_lens[[1, 0, 2]])
    assert "prefix lengths" in changed(batch, swapped)


def test_stale_memory_does_not_change_the_digest(filled):
    """Pages after a request's last token and rows after the last request may differ between ranks."""
    batch = filled[Mode.RAGGED_VERIFY]
    before = step_digest(batch, 4).clone()
    batch.page_table[0, 3:] = 77
    batch.positions[5:] = 77
    batch.tail.mask[5:] = 77
    batch.tail.depth[5:] = 77
    batch.tail.parents[5:] = 77
    assert torch.equal(step_digest(batch, 4), before)


def test_state_slots_do_not_change_the_digest(filled):
    """Each rank gives out its own state slots."""
    batch = filled[Mode.VERIFY]
    before = step_digest(batch, 4).clone()
    batch.state_slots.add_(1)
    assert torch.equal(step_digest(batch, 4), before)


def test_another_mode_changes_the_digest(filled):
    """The digest includes the mode, so ranks with different kinds of forwards are detected."""
    batch = filled[Mode.VERIFY]
    assert changed(batch, replace(batch, mode=Mode.DRAFT_EXTEND)) == [PARTS[0]]
    assert isinstance(batch.tail, Tree)


def _observe(rank, results):
    from draftmark_engines.errors import RanksDisagree
    from draftmark_engines.ranks import RankGuard

    for differ in (False, True):
        guard = RankGuard()
        try:
            for step in range(4):
                digest = torch.arange(len(PARTS))
                if differ and rank == 1 and step == 2:
                    digest[3] = 99
                guard.observe(digest)
            guard.finish()
            results.put((differ, "agree"))
        except RanksDisagree as error:
            results.put((differ, str(error)))


@pytest.mark.long
def test_a_guard_names_the_rank_the_part_and_the_step():
    """Two processes raise nothing while their steps agree, and both raise an equal error when one step differs."""
    answers = sorted(results_of_two_ranks(_observe, each=2))
    assert answers[:2] == [(False, "agree")] * 2
    want = "ranks 1 differ from rank 0 in the pages of step 2"
    assert all(differ and answer.startswith(want) for differ, answer in answers[2:]), answers
