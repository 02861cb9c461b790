"""Tests that the drafters OP1 … OP5 change the trees and not the text, and that the judge names each difference."""

from __future__ import annotations

import pytest
import torch

from core.speculative.tests.eagle.blind_drafters import DRAFTERS
from core.speculative.tests.eagle.test_trees import attentive, compare, texts
from core.speculative.tests.judging.test_judge_drafter import CONFIG, NEW_TOKENS
from draftmark_speculative import HostKind
from draftmark_speculative.judging import judge_drafter

SHAPE = (4, 4, 12)
HOST = {"host_lengths": HostKind.UPPER_BOUND}
"""With exact host lengths the guards refuse OP5, because its device lengths are not the host's."""


@pytest.fixture(scope="module")
def runs(make_model, random_head, prompts):
    """Model, head with strong attention, and prompts; the trees of the right drafter equal the dense trees."""
    found = make_model("llama"), attentive(random_head()), prompts(3, 20)
    wrong, trees, _ = compare(*found, SHAPE, **HOST)
    assert (wrong, trees > 20) == (0, True)
    return found


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda one: one.id)
@torch.no_grad()
def test_wrong_drafter_changes_trees_but_no_text(runs, drafter, monkeypatch):
    """Trees differ from the dense trees in several rounds, and every text equals the text without drafts."""
    plain = texts(runs[0], None, runs[2], SHAPE)
    monkeypatch.setattr(drafter.owner, drafter.name, drafter.change(getattr(drafter.owner, drafter.name)))
    wrong, trees, _ = compare(*runs, SHAPE, **HOST)
    assert wrong >= 4, f"{wrong} of {trees} trees differ"
    assert texts(*runs, SHAPE) == plain


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda one: one.id)
@torch.no_grad()
def test_judge_names_the_difference(make_model, prompts, drafter):
    """Every lost draft of a tree with two branches names the difference."""
    model = make_model("llama")
    lost = judge_drafter(model, CONFIG, prompts(4, 20), NEW_TOKENS, topk=2, attention=drafter.imitation)
    assert {one.difference for one in lost} == {drafter.difference}
