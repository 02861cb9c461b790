"""Tests of the choice of draft nodes: within the budget, together with their parents, likeliest nodes first."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark.tree import verify_tree
from draftmark_speculative.adaptive.calibration import PRIOR, Calibration
from draftmark_speculative.adaptive.survival import admit, compacted, expected, ranked, survival


@st.composite
def batches(draw):
    """Draw acceptance probabilities, parents and live flags of requests; ties, zeros, ones and NaN are likely."""
    requests, nodes = draw(st.integers(1, 5)), draw(st.integers(2, 9))
    value = st.sampled_from([0.0, 0.25, 0.5, 1.0, float("nan"), 1e-30]) | st.floats(0, 2, width=32)
    chances = [[draw(value) for _ in range(nodes)] for _ in range(requests)]
    parents = [[-1] + [draw(st.integers(0, j - 1)) for j in range(1, nodes)] for _ in range(requests)]
    live = draw(st.lists(st.booleans(), min_size=requests, max_size=requests))
    return torch.tensor(chances, dtype=torch.float32), torch.tensor(parents), torch.tensor(live)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(batch=batches(), spare=st.integers(0, 50))
def test_admission_keeps_budget_and_parents(batch, spare):
    """Admission takes all live roots, keeps to the budget, includes parents, and skips padding and impossible nodes."""
    chances, parents, live = batch
    alive = survival(chances, parents, chances.shape[1])
    budget = int(live.sum()) + spare
    admitted = admit(ranked(alive, live), budget, len(live))
    assert int(admitted.sum()) <= budget
    assert torch.equal(admitted[:, 0], live)
    for r, j in admitted.nonzero().tolist():
        assert j == 0 or admitted[r, parents[r, j]]
        assert alive[r, j] > 0
    left_out = alive.masked_fill(admitted, 0)[live]
    if int(admitted.sum()) < budget:
        assert not left_out.any(), "while rows are left, every node with a chance is admitted"
    elif left_out.numel():
        inner = alive[:, 1:][admitted[:, 1:]]
        assert not len(inner) or inner.min() >= left_out.max()


@settings(derandomize=True, deadline=None, max_examples=200)
@given(batch=batches())
def test_survival_decreases_along_a_path(batch):
    """Neither a node nor all siblings together have a higher survival than their parent."""
    chances, parents, _ = batch
    alive = survival(chances.clone(), parents, chances.shape[1])
    assert (alive[:, 0] == 1).all()
    assert (alive <= alive.gather(1, parents.clamp(min=0))).all()
    inner = alive.clone()
    inner[:, 0] = 0
    children = torch.zeros_like(alive).scatter_add_(1, parents.clamp(min=0), inner)
    assert (children <= alive * (1 + 1e-5)).all()


def test_survival_is_the_product_of_chances():
    """Survival of a root, its two children and a grandchild equals the products computed by hand."""
    alive = survival(torch.tensor([[0.3, 0.5, 0.25, 0.4]]), torch.tensor([[-1, 0, 0, 2]]), 2)
    torch.testing.assert_close(alive, torch.tensor([[1.0, 0.5, 0.25, 0.1]]))


def test_drafts_compete_over_all_requests():
    """A request with likely drafts gets rows that a request with unlikely drafts would have had."""
    alive = torch.tensor([[1.0, 0.9, 0.8, 0.7], [1.0, 0.3, 0.2, 0.1]])
    order = ranked(alive, torch.tensor([True, True]))
    assert admit(order, 5, 2).tolist() == [[True] * 4, [True, False, False, False]]
    assert admit(order, 6, 2).sum(1).tolist() == [4, 2]


def test_equal_nodes_are_admitted_parents_first():
    """Among nodes of equal survival, parents and earlier nodes are admitted first."""
    order = ranked(torch.ones(2, 4), torch.tensor([True, True]))
    assert admit(order, 5, 2).tolist() == [[True] * 4, [True, False, False, False]]


def test_expected_tokens_by_rows():
    """Expected tokens are a mean over live requests, linear between whole rows, and constant beyond all nodes."""
    alive = torch.tensor([[1.0, 0.8, 0.4], [1.0, 0.6, 0.2], [1.0, 1.0, 1.0]])
    order = ranked(alive, torch.tensor([True, True, False]))
    found = expected(order, torch.tensor([True, True, False]), torch.tensor([1.0, 1.25, 1.5, 2.0, 3.0]))
    torch.testing.assert_close(found, torch.tensor([2.0, 2.4, 2.8, 3.4, 4.0]) / 2)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(batch=batches(), spare=st.integers(0, 12), seed=st.integers(0, 1000))
def test_compaction_keeps_tokens_paths_and_order(batch, spare, seed):
    """Compaction keeps each admitted node's token, parent and order; unused entries have token -1 and no children."""
    chances, parents, live = batch
    tokens = torch.randint(0, 9, parents.shape, generator=torch.Generator().manual_seed(seed))
    alive = survival(chances, parents, chances.shape[1])
    admitted = admit(ranked(alive, live), int(live.sum()) + spare, len(live))
    trees = compacted(tokens, parents, admitted)
    for r in range(len(live)):
        kept = admitted[r].nonzero()[:, 0].tolist()
        count = len(kept)
        assert trees.q_lens[r] == count
        assert trees.nodes[r, :count].tolist() == kept
        assert trees.tokens[r].tolist() == tokens[r, kept].tolist() + [-1] * (tokens.shape[1] - count)
        wanted = [-1 if j == 0 else kept.index(int(parents[r, j])) for j in kept]
        assert trees.parents[r].tolist() == (wanted or [-1]) + [0] * (tokens.shape[1] - max(1, count))


def test_compacted_tree_verifies_like_the_full_tree():
    """Verification of a compacted tree accepts the full tree's path up to the first node that was not admitted."""
    tokens, parents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, 0, 1, 2]])
    admitted = torch.tensor([[True, True, True, False]])
    trees = compacted(tokens, parents, admitted)
    targets = torch.tensor([[6, 7, 8, 9]])
    assert verify_tree(tokens, parents, targets).accept_lens.tolist() == [4]
    assert verify_tree(trees.tokens, trees.parents, targets).tokens.tolist() == [[6, 7, 8, -1]]


def test_calibration_learns_by_depth_and_by_request():
    """Calibration learns a ratio for each depth and request, decays it, and falls back to the batch's ratio."""
    found = Calibration(3, 2, torch.device("cpu"))
    rows, live = torch.tensor([0, 1, 2]), torch.tensor([True, True, False])
    for _ in range(60):
        expected_ = torch.tensor([[0.5, 0.5], [0.5, 0.0], [0.5, 0.5]])
        found.update(rows, live, expected_, torch.tensor([[1.0, 0.5], [0.0, 0.0], [1.0, 1.0]]))
    good, bad, null = found.ratios(rows)
    assert good[0] > 1.6 and bad[0] < 0.5 and abs(good[1] - 1) < 0.05
    assert torch.equal(null, found.ratios(torch.tensor([2]))[0]), "a null row adds no evidence"
    found.forget(torch.tensor([0]))
    assert found.ratios(rows)[0, 0] < good[0], "a new request starts with the batch's ratio"
    before = found.ratios(rows)[1, 0]
    found.age(100)
    assert before < found.ratios(rows)[1, 0] < 1, "old evidence decays but is not cleared"
    found.forget()
    found.update(rows[:1], live[:1], torch.tensor([[40.0, 0.0]]), torch.tensor([[80.0, 0.0]]))
    assert found.ratios(rows)[1, 1] > 1.8, "a depth without evidence has the ratio of the depth above"
    for _ in range(200):
        found.update(rows[:1], live[:1], torch.tensor([[10.0, 0.0]]), torch.tensor([[10.0, 0.0]]))
    found.update(rows[:1], live[:1], torch.tensor([[0.0, 40.0]]), torch.tensor([[0.0, 10.0]]))
    deep = found.ratios(rows)[0, 1]
    for _ in range(200):
        found.update(rows[:1], live[:1], torch.tensor([[10.0, 0.0]]), torch.tensor([[10.0, 0.0]]))
    assert abs(found.ratios(rows)[0, 1] - deep) < 0.01 < deep < 0.5, "a depth outside the budget keeps its ratio"
    found.forget()
    assert (found.ratios(rows) == 1).all() and PRIOR > 0
