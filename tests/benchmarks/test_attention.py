"""The attention benchmark's cases: what is asked of our plugins is what the float64 reference answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.attention.cases import Case, build, cleared, reference
from benchmarks.attention.grid import SUBSET, case, grid
from benchmarks.attention.models import Model
from benchmarks.attention.ours import batch_of, ours
from draftmark import Mode
from draftmark_contract.cli.measuring import relative_error

SMALL = Model(4, 2, 16, 16)
LENS = (40, 15, 64)


@pytest.mark.parametrize(
    ("kind", "rows", "mode"),
    [
        ("decode", 1, Mode.DECODE),
        ("chain", 5, Mode.VERIFY),
        ("uneven", 5, Mode.RAGGED_VERIFY),
        ("verify", 7, Mode.VERIFY),
        ("draft", 4, Mode.DRAFT),
        ("extend", 1, Mode.EXTEND),
    ],
)
def test_the_reference_answers_what_is_asked(kind: str, rows: int, mode: Mode) -> None:
    """A plugin that is right has the answer, and the mode is the one in which engines ask."""
    inputs = build(case(SMALL, kind, LENS, rows), "cpu", 1)
    assert batch_of(inputs)[1].mode is mode
    peer = ours("reference", inputs)
    peer.calls[0]()
    wanted = reference(inputs, tuple(cleared(one) for one in inputs.caches[0]))
    assert relative_error(peer.outs[0], wanted) < 1e-2
    assert not torch.allclose(wanted.float(), reference(inputs, inputs.caches[0], "none").nan_to_num().float())


@pytest.mark.parametrize("of", [lambda: SUBSET, grid], ids=["subset", "grid"])
def test_every_case_has_a_name_of_its_own(of: Callable[[], tuple[Case, ...]]) -> None:
    """And those of the subset are in the grid."""
    names = [one.name for one in of()]
    assert len(set(names)) == len(names)
    assert {one.name for one in SUBSET} <= {one.name for one in grid()}


def test_uneven_rows_are_the_same_in_every_run() -> None:
    """From 1 to the most, and not all alike."""
    one, again = (case(SMALL, "uneven", (100,) * 64, 5) for _ in range(2))
    assert one == again and set(one.q_lens) == {1, 2, 3, 4, 5} and one.q_lens == one.tail_lens
