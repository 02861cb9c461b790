"""A mutant before the plugin's own tests: it is what they run, and whatever becomes of its process is a verdict."""

from __future__ import annotations

from typing import Any

import pytest

from . import own_tests, pool
from .journal import Journal
from .judge import Ended, Status
from .targets import TARGETS

TRITON = TARGETS["cuda_triton"]


def test_the_tests_run_on_the_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another height of a tile fails the test that names it, though the original was imported before."""
    import draftmark_cuda_triton.tiling as original

    (mutation,) = [one for one in TRITON.mutations() if one.module == "tiling" and one.after == "LEAST_ROWS = 17"]
    ((_, rows, code),) = pool.run(iter([("one", lambda say: own_tests.judge(TRITON, mutation, say))]), 1)
    one = own_tests.ended(mutation.id, rows, code)
    assert (one.status, code) == (Status.KILLED, 0), rows
    assert one.item.startswith("test_choices.py::test_hopper_takes_the_measured_tile") and one.met > 1
    assert original.LEAST_ROWS == 16


@pytest.mark.parametrize(
    ("rows", "code", "status"),
    [
        ([{"failed": "test_a.py::test_b", "ran": 3}], 0, Status.KILLED),
        ([{"failed": "", "ran": 9}], 0, Status.SURVIVED),
        ([], -9, Status.HUNG),
    ],
)
def test_how_a_mutant_ended(rows: list[dict[str, Any]], code: int, status: Status) -> None:
    """A process that ends without a word is killed, as by a crash of the interpreter."""
    assert own_tests.ended("m", rows, code).status is status


def test_what_was_decided_is_read_again(tmp_path: Any) -> None:
    """Line by line; of a mutant that was judged twice the last word counts."""
    rows = [Ended("a", Status.SURVIVED, met=2, of=2), Ended("a", Status.KILLED, "test_a.py::test_b")]
    journal = Journal(tmp_path, "j")
    for one in rows:
        journal.note(one.as_json())
    assert journal.ended() == {"a": rows[1]}
    assert Journal(tmp_path, "none").ended() == {}


def test_each_module_has_tests_that_speak_of_it(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come first, and all others after them."""
    monkeypatch.chdir(pytestconfig.rootpath)
    every = own_tests.files("nothing")
    for module, names in own_tests.FILES.items():
        found = own_tests.files(module)
        assert [f"plugins/cuda_triton/tests/test_{name}.py" for name in names] == found[: len(names)]
        assert sorted(found) == sorted(every)
