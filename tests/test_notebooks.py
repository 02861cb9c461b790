"""Tests of the notebooks: running them gives their stored output."""

from __future__ import annotations

import json

import pytest

from tools.docs import notebooks

pytest.importorskip("nbclient")
ALL = sorted(notebooks.FOLDER.glob("*.ipynb"))


QUICK = "stale-replay"


@pytest.mark.parametrize(
    "path", [pytest.param(one, id=one.stem, marks=[pytest.mark.long] * (one.stem != QUICK)) for one in ALL]
)
def test_notebook_gives_its_stored_output(path):
    """Every cell gives the output that `python -m tools.docs.notebooks` stored."""
    assert notebooks.executed(path)["cells"] == json.loads(path.read_text())["cells"]


def test_stale_replay_is_shown():
    """The notebook's stale graph is wrong at lengths other than the captured ones; its right graph never is."""
    lines = notebooks.page(notebooks.FOLDER / "stale-replay.ipynb").splitlines()
    shown = [line for line in lines if line.startswith("(")]
    assert shown == [
        "(9, 14) right: equal stale: equal",
        "(10, 15) right: equal stale: WRONG",
        "(3, 2) right: equal stale: WRONG",
    ]


def test_tail_is_drawn():
    """The notebook draws the tail (draft tree) as a picture, and the site's page shows it."""
    page = notebooks.page(notebooks.FOLDER / "tree-tail.ipynb")
    assert "<div><svg" in page and "mask words: ['00000001'" in page
