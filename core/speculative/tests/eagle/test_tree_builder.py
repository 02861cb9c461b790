"""Tests of `DraftTreeBuilder`: it selects the most probable nodes and their parents; beams can change parents."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark.batch import BatchBuffers
from draftmark.geometry import DRAFT_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.lengths import Unknown
from draftmark.tree import TorchTreeOps
from draftmark_speculative.eagle.tree_builder import DraftTreeBuilder, best_tokens


def grow(seed, requests, topk, steps, levels=(-4, -3, -2, -1, 0)):
    """Grow a tree over random scores with many ties; return it with each step's beams as (token path, slots)."""
    draw = random.Random(seed)

    def scores(*shape):
        return torch.tensor([draw.choice(levels) for _ in range(torch.Size(shape).numel())]).float().view(shape)

    tokens = torch.arange(topk).expand(requests, -1)
    growth = DraftTreeBuilder(scores(requests, topk), tokens)
    placed, history = [], [[((b,), ()) for b in range(topk)] for _ in range(requests)]
    for step in range(steps - 1):
        slots = growth.place()
        seen = [[(path, (*slot, topk * step + b)) for b, (path, slot) in enumerate(row)] for row in history]
        placed.append((slots, seen))
        found = torch.arange(topk).expand(requests, topk, -1)
        growth.extend(scores(requests, topk, topk), found)
        history = [
            [(row[p][0] + (t,), row[p][1]) for p, t in zip(parents, tokens, strict=True)]
            for row, parents, tokens in zip(seen, growth.parents.tolist(), growth.tokens.tolist(), strict=True)
        ]
    return growth, placed


@settings(derandomize=True, deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), topk=st.integers(1, 5), steps=st.integers(2, 5), requests=st.integers(1, 3))
def test_draft_step_mask_has_the_true_ancestors(seed, topk, steps, requests):
    """A draft step's tail mask has exactly the slots of the tokens on each beam's own path."""
    _, placed = grow(seed, requests, topk, steps)
    geometry = Geometry.create(
        AttentionShape(1, 1, 8, 4), Limits(requests, 64), DraftShape(topk, steps, 4), modes=DRAFT_MODES
    )
    buffers, ops = BatchBuffers(geometry, "cpu"), TorchTreeOps(geometry)
    for step, (slots, seen) in enumerate(placed):
        host = Unknown(requests, geometry.max_prefix_len)
        batch = buffers.uniform(Mode.DRAFT, step, requests, requests, host, tree=True)
        batch.prefix_lens.copy_(torch.arange(requests))
        ops.write_tail(batch, slots)
        words = (batch.tail.mask.long() & 0xFFFFFFFF).view(requests, topk, -1).tolist()
        for row, wanted in zip(words, seen, strict=True):
            bits = [{32 * w + j for w, word in enumerate(one) for j in range(32) if word >> j & 1} for one in row]
            assert bits == [set(slot) for _, slot in wanted]
        assert batch.tail.depth.tolist() == [[s // topk for s in range(topk * (step + 1))]] * requests
        assert batch.positions.view(requests, topk).tolist() == [[r + step] * topk for r in range(requests)]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32), topk=st.integers(1, 5), steps=st.integers(1, 5), nodes=st.integers(1, 70),
    requests=st.integers(1, 3),
)  # fmt: skip
def test_the_best_nodes_are_a_tree(seed, topk, steps, nodes, requests):
    """The best nodes form a tree: parents stand before children, siblings differ, and no better node is left out."""
    growth, _ = grow(seed, requests, topk, steps)
    tokens, parents = growth.best(nodes)
    total = topk + (steps - 1) * topk * topk
    assert tokens.shape == parents.shape == (requests, min(nodes, total))
    scores = torch.cat([found[0] for found in growth._found], 1).sort(1, descending=True).values
    for row in range(requests):
        kept = list(zip(parents[row].tolist(), tokens[row].tolist(), strict=True))
        assert all(parent < node + 1 for node, (parent, _) in enumerate(kept))
        assert len(set(kept)) == len(kept)
        depth = [0]
        for parent, _ in kept:
            depth.append(depth[parent] + 1)
        assert max(depth) <= steps
    everything = growth.best(total)
    assert torch.equal(everything[0][:, : tokens.shape[1]], tokens)
    assert scores.shape[1] == total


def test_nodes_are_chosen_by_score():
    """The second-best first token is left out when deeper nodes below the best token are more probable."""
    growth = DraftTreeBuilder(torch.tensor([[-0.1, -2.0]]), torch.tensor([[10, 20]]))
    growth.place()
    growth.extend(torch.tensor([[[-0.2, -3.0], [-0.1, -0.3]]]), torch.tensor([[[11, 12], [21, 22]]]))
    assert growth.tokens.tolist() == [[11, 21]]
    assert growth.parents.tolist() == [[0, 1]]
    assert growth.place().tolist() == [[-1, -1, 0, 1]]
    growth.extend(torch.tensor([[[-0.3, -0.4], [-5.0, -6.0]]]), torch.tensor([[[13, 14], [23, 24]]]))
    assert growth.parents.tolist() == [[0, 0]]
    assert growth.place().tolist() == [[-1, -1, 0, 1, 2, 2]]
    tokens, parents = growth.best(5)
    assert tokens.tolist() == [[10, 11, 13, 14, 20]]
    assert parents.tolist() == [[0, 1, 2, 2, 0]]


@pytest.mark.parametrize(("vocab", "topk"), [(16384, 4), (1024, 8), (1000, 4), (256, 4), (512, 300)])
def test_chunked_topk_finds_the_best_tokens(vocab, topk):
    """The chunked search finds the best tokens of the whole row and their scores, for any vocabulary size."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab))
    scores, tokens = best_tokens(logits, topk)
    order = scores.argsort(1, descending=True)
    want = logits.log_softmax(-1).topk(topk, -1)
    assert torch.equal(tokens.gather(1, order), want.indices)
    torch.testing.assert_close(scores.gather(1, order), want.values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_logits_still_give_a_valid_tree(bad):
    """NaN and infinite logits give bad drafts, but valid token indices and a valid tree."""
    logits = torch.zeros(2, 6)
    logits[0] = bad
    logits[1, 2] = bad
    scores, tokens = best_tokens(logits, 3)
    assert bool((scores <= 0).all())
    assert bool((tokens >= 0).all() and (tokens < 6).all())
    growth = DraftTreeBuilder(scores, tokens)
    growth.place()
    growth.extend(scores[:, None].expand(-1, 3, -1), tokens[:, None].expand(-1, 3, -1))
    _, parents = growth.best(12)
    assert bool((parents <= torch.arange(12)).all())
