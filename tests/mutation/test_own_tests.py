"""Tests of `own_tests`: the plugin's own tests run on a mutant, and each way to end gives a result."""

from __future__ import annotations

from typing import Any

import pytest

from tools.mutation import own_tests, pool
from tools.mutation.journal import Journal
from tools.mutation.judge import Ended, Status
from tools.mutation.targets import TARGETS

TRITON = TARGETS["cuda_triton"]


@pytest.mark.long
def test_the_tests_run_on_the_mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant with another minimum tile height fails the tile test, even if the original was imported before."""
    import draftmark_cuda_triton.heuristics.common as original

    mutations = [one for one in TRITON.mutations() if one.module == "heuristics/common"]
    (mutation,) = [one for one in mutations if one.after == "MIN_BLOCK_M = 17"]
    ((_, rows, code),) = pool.run(iter([("one", lambda send: own_tests.judge(TRITON, mutation, send))]), 1)
    one = own_tests.ended(mutation.id, rows, code)
    assert (one.status, code) == (Status.KILLED, 0), rows
    assert one.item.startswith("test_select_config.py::test_selected_configuration_is_the_measured_one") and one.met
    assert original.MIN_BLOCK_M == 16


@pytest.mark.parametrize(
    ("rows", "code", "status"),
    [
        ([{"failed": "test_a.py::test_b", "ran": 3}], 0, Status.KILLED),
        ([{"failed": "", "ran": 9}], 0, Status.SURVIVED),
        ([], -9, Status.HUNG),
    ],
)
def test_the_result_of_a_process(rows: list[dict[str, Any]], code: int, status: Status) -> None:
    """A failing test kills a mutant. A mutant counts as hung if its process ends without a message."""
    assert own_tests.ended("m", rows, code).status is status


def test_the_journal_returns_the_last_result(tmp_path: Any) -> None:
    """The journal returns the last of several results of a mutant."""
    rows = [Ended("a", Status.SURVIVED, met=2, of=2), Ended("a", Status.KILLED, "test_a.py::test_b")]
    journal = Journal(tmp_path, "j")
    for one in rows:
        journal.note(one.as_json())
    assert journal.ended() == {"a": rows[1]}
    assert Journal(tmp_path, "none").ended() == {}


def test_tests_of_a_module_run_first(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test files of a module come first, and all other files after them."""
    monkeypatch.chdir(pytestconfig.rootpath)
    every = own_tests.files("nothing")
    for module, names in own_tests.FILES.items():
        found = own_tests.files(module)
        assert [f"plugins/cuda_triton/tests/test_{name}.py" for name in names] == found[: len(names)]
        assert sorted(found) == sorted(every)
