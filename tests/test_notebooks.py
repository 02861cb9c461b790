"""The notebooks run, and give what stands in them."""

from __future__ import annotations

import json

import pytest

from tools.docs import notebooks

pytest.importorskip("nbclient")
ALL = sorted(notebooks.FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_notebook_gives_what_it_shows(path):
    """Run in a process of its own, every cell gives what is stored: `python -m tools.docs.notebooks` stores it."""
    assert notebooks.executed(path)["cells"] == json.loads(path.read_text())["cells"]


def test_the_stale_replay_is_shown():
    """The stored run has the bug in it: equal at the captured lengths, wrong at others; the right graph is equal."""
    lines = notebooks.page(notebooks.FOLDER / "stale-replay.ipynb").splitlines()
    shown = [line for line in lines if line.startswith("(")]
    assert shown == [
        "(9, 14) right: equal stale: equal",
        "(10, 15) right: equal stale: WRONG",
        "(3, 2) right: equal stale: WRONG",
    ]


def test_the_tail_is_drawn():
    """The stored run has a picture, and the site's page shows it."""
    page = notebooks.page(notebooks.FOLDER / "tree-tail.ipynb")
    assert "<div><svg" in page and "mask words: ['00000001'" in page
