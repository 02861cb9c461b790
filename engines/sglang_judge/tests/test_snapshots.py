"""Tests of the judge's items for SGLang's linear-attention backends, and of the stand-ins they use."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.check import Unjudged
from draftmark_contract.judge.layer import opening
from draftmark_contract.judge.states.questions import RULES
from draftmark_contract.runner.outcome import Outcome
from draftmark_contract.runner.run import RunOptions, run
from draftmark_sglang_judge.engine import ENGINE, RECURRENT
from draftmark_sglang_judge.states import target
from draftmark_sglang_judge.states.driver import _links
from draftmark_sglang_judge.states.pool import _overlapping
from draftmark_sglang_judge.states.stand_ins import Options, StandIn


def test_links_lead_back_to_the_parents() -> None:
    """First children and next siblings name every row's parent."""
    parents = (-1, 0, 0, 1, 2, 2, 0)
    child, sibling = _links(parents)
    found = [-1] * len(parents)
    for row, first in enumerate(child):
        while first >= 0:
            found[first], first = row, sibling[first]
    assert tuple(found) == parents


def test_windows_of_a_chain_overlap() -> None:
    """Row t's window begins one column after the window of row t - 1."""
    windows = _overlapping((5, 3), torch.float32, 4, 2)
    windows.copy_(torch.arange(4)[:, None, None] + torch.arange(3).expand(5, 3))
    assert windows[0, 1, 3, 2].tolist() == [3, 4, 5]


def test_a_stand_in_refuses_what_it_does_not_have() -> None:
    """An unknown attribute ends the item as `Unjudged`; a default of `getattr` still counts."""
    with pytest.raises(Unjudged, match="'ring'"):
        assert StandIn(size=1).ring
    assert getattr(StandIn(size=1), "ring", None) is None
    assert not Options(topk=2).features.enable_mis and Options(topk=2).topk == 2


@pytest.mark.parametrize("name", RECURRENT)
def test_item_ids_are_unique_and_cover_the_rules(name: str) -> None:
    """No two items share an id, and each rule of a layer has an item."""
    ids = [one.id for one in target.items(name)]
    assert len(set(ids)) == len(ids)
    assert {one.partition("[")[0] for one in ids} == set(RULES)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECURRENT)
def test_backend_is_right(name: str) -> None:
    """A tree, a commit and padding of SGLang's own backend agree with float64."""
    pytest.importorskip("sglang")
    shape = target.LAYERS[name].name
    items = [f"state.commit_keeps_the_path[{shape}-tree-fork]", f"state.padding_touches_no_slot[{shape}-verify-pad1]"]
    opened, options = opening(ENGINE, name, "cpu"), RunOptions(items=tuple(items))
    verdict = run(f"sglang:{name}", opened, options, "draftmark judge")
    found = {one.item: (one.outcome, one.message) for one in verdict.results}
    assert found == dict.fromkeys(items, (Outcome.PASSED, ""))
