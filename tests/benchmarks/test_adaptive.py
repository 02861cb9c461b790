"""Tests of the adaptive benchmark: forced acceptance by rank (place among siblings), resumed runs, and the drawing."""

from __future__ import annotations

import json
import sys
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.decode.end_to_end import adaptive
from benchmarks.decode.end_to_end.forced import RankedAcceptance
from benchmarks.plots import speed_up
from draftmark.runtime import Tree, VerifyResult
from draftmark.tree import ancestors as reach_of
from draftmark.tree import depths, verify_tree


class Ops:
    """Tree operations with a real verify_tree and no write of tails, because these tests have no KV."""

    verify_tree = staticmethod(verify_tree)


def accepted(parents: list[int], shares, rounds: int = 400, other=None) -> float:
    """Verify one tree for eight requests in many rounds with forced acceptance; return the mean accepted length."""
    tree = torch.tensor([parents] * 8)
    drafts = torch.arange(len(parents)).expand(8, -1) + 10
    forced = RankedAcceptance(Ops(), shares, 0, torch.device("cpu"), 8)
    forced._tail = Tree(torch.zeros(1), depths(reach_of(tree)))
    if other is not None:
        forced.force(other)
    total = 0
    for _ in range(rounds):
        result: VerifyResult = forced.verify_tree(drafts, tree, torch.zeros_like(drafts))
        total += int(result.accept_lens.sum())
    return total / rounds / 8


def test_acceptance_is_by_rank_and_level():
    """The mean accepted length follows the acceptance probabilities (shares) of each rank and tree level."""
    shares = [[[0.5, 0.2]], [[0.4, 0.0]]]
    assert accepted([-1, 0, 0, 1], shares) == pytest.approx(1.9, abs=0.05)
    assert accepted([-1, 0, 1], shares) == pytest.approx(1.7, abs=0.05)
    assert accepted([-1, 0, 1, 2], shares) == pytest.approx(1.7, abs=0.05), "a node past the levels was accepted"


def test_shares_mix_and_may_change_later():
    """Each of two alternative tables of acceptance shares is drawn equally often; shares forced later replace both."""
    shares = [[[0.9, 0.0], [0.1, 0.4]], [[0.4, 0.0], [0.4, 0.0]]]
    assert accepted([-1, 0, 0, 1], shares) == pytest.approx(1.9, abs=0.05)
    assert accepted([-1, 0, 0, 1], shares, other=[[[0.2, 0.0]] * 2, [[0.0, 0.0]] * 2]) == pytest.approx(1.2, abs=0.05)
    assert accepted([-1, 0, 0, 1], shares, other=[[[1.0, 0.0]] * 2] * 2) == 3


def test_claimed_acceptance_matches_the_result():
    """Over many rounds a node is accepted as often as claims() predicts, and predictions differ between requests."""
    shares = [[[0.9, 0.0], [0.1, 0.4]], [[0.7, 0.0], [0.2, 0.0]]]
    tree, levels = torch.tensor([[-1, 0, 0, 1]] * 64), torch.tensor([[0, 1, 1, 2]] * 64)
    drafts = torch.arange(4).expand(64, -1) + 10
    forced = RankedAcceptance(Ops(), shares, 0, torch.device("cpu"), 64)
    forced._tail = Tree(torch.zeros(1), depths(reach_of(tree)))
    claimed, came, seen = torch.zeros(3), torch.zeros(3), set()
    for _ in range(60):
        claims = forced.claims(levels, tree)
        seen |= {round(value, 3) for value in claims[:, 1].tolist()}
        result = forced.verify_tree(drafts, tree, torch.zeros_like(drafts))
        path = result.accept_index.where(torch.arange(4) < result.accept_lens[:, None], -1)
        kept = torch.stack([(path == node).any(1) for node in (1, 2, 3)], 1)
        claimed += torch.stack((claims[:, 1], claims[:, 2], claims[:, 1] * claims[:, 3]), 1).sum(0)
        came += kept.sum(0)
    assert seen == {0.9, 0.1}
    torch.testing.assert_close(came / 3840, claimed / 3840, atol=0.03, rtol=0)


@pytest.mark.long
def test_resumed_run_measures_no_row_again(tmp_path, monkeypatch, capsys):
    """A run measures every row, a resumed run measures none and keeps the file, and the drawing has a point per row."""
    file, picture = tmp_path / "rows.json", tmp_path / "picture.svg"
    monkeypatch.setattr(adaptive, "TINY", [(2, 64)])
    other = {"model": "another benchmark's row", "speculate": "tree", "tokens_per_s": 1.0}
    file.write_text(json.dumps({"schema": 2, "timelines": [], "rows": [other]}))
    arguments = [
        "adaptive",
        "--tiny",
        "--backend",
        "reference",
        "--device",
        "cpu",
        "--json",
        str(file),
        "--tokens",
        "4",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    adaptive.main()
    result = json.loads(file.read_text())
    assert result["rows"][0] == other and result["timelines"] == []
    rows = result["rows"][1:]
    named = [(row["speculate"], row["topk"], row["profile"]) for row in rows]
    assert len(named) == len(set(named)) == 9
    assert all(row["tokens_per_s"] > 0 and row["accepted_len"] >= 1 for row in rows)
    assert all(row["costs_ms"]["verify"] for row in rows if row["speculate"] == "adaptive")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*arguments, "--resume"])
    adaptive.main()
    assert capsys.readouterr().out.count("\n") == 1, "a row was measured again"
    assert json.loads(file.read_text()) == result
    monkeypatch.setattr(sys, "argv", ["speed_up", "--json", str(file), "--svg", str(picture)])
    speed_up.main()
    circles = [one for one in ElementTree.parse(picture).iter() if one.tag.endswith("circle")]
    assert len(circles) == 8


def test_result_without_plain_rows_cannot_be_drawn():
    """Without a row of plain decoding there is no base for the speed-up, so drawing raises an error."""
    with pytest.raises(ValueError, match="0 rows with a plain row"):
        speed_up.draw({"rows": []})
