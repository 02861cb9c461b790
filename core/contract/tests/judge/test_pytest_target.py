"""Tests of the judge's pytest form on the fake engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def vendor(tmp_path: Path) -> Run:
    """Return a function that runs pytest in a vendor's folder, with the fake engine on its path."""
    info = tmp_path / "path" / "fake_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[draftmark.judges]\nfake = fake_engine:ENGINE\n")
    folder = tmp_path / "vendor"
    folder.mkdir()
    (folder / "conftest.py").write_text('pytest_plugins = ["draftmark_contract.judge.pytest_target"]\n')
    (folder / "test_own.py").write_text("def test_own():\n    pass\n")
    path = [str(info.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTEST_ADDOPTS": ""}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    return run


def test_items_are_tests_of_the_vendors_suite(vendor: Run) -> None:
    """Right items pass, wrong ones fail with the judge's message, others are skipped with their reasons."""
    said = vendor("--judge-target", "fake:MIXED")
    assert said.returncode == 1 and "4 failed, 3 passed, 2 skipped" in said.stdout, said.stdout
    for part in (
        "numerics.match_float64 (rule 22): Every live output row",
        "run it again: draftmark judge fake:MIXED --item 'numerics.match_float64[verify]'",
        "refused: head_size not supported",
        "unjudged: there is no graph on a CPU",
        "fake:MIXED does not conform to draftmark contract 1.5: 2 passed, 1 refused, 0 declared, 1 unjudged, 4 failed",
    ):
        assert part in said.stdout, part
    assert "Traceback" not in said.stdout


@pytest.mark.long
def test_selected_items_run_alone(vendor: Run) -> None:
    """``-k`` selects items, ``-x`` ends at the first wrong one, and without the option nothing is judged."""
    said = vendor("--judge-target", "fake:MIXED", "-x", "-k", "match_float64")
    assert said.returncode == 1 and "1 failed, 1 passed" in said.stdout, said.stdout
    assert "1 passed" in vendor().stdout


PART = ("--judge-target", "fake:package.Two", "-k", "bits[a] or own")


def test_session_with_some_items_gives_no_verdict(vendor: Run) -> None:
    """A session in which some items ran and none failed ends with 2."""
    said = vendor(*PART)
    assert said.returncode == 2 and "2 passed" in said.stdout, said.stdout
    assert "fake:package.Two has no verdict on draftmark contract 1.5, because only 1 of 2 items ran" in said.stdout


@pytest.mark.long
def test_session_without_a_judged_part_ends_as_pytest_does(vendor: Run) -> None:
    """A part ends with 0 if the option allows it. So does a session without items, and one with all of them."""
    assert vendor(*PART, "--judge-allow-part").returncode == 0
    assert vendor(*PART[:3], "own").returncode == 0
    whole = vendor(*PART[:2])
    assert whole.returncode == 0 and "1 rule of fake:package.Two conforms to draftmark contract" in whole.stdout


@pytest.mark.long
def test_items_in_several_processes_give_no_verdict(vendor: Run) -> None:
    """With pytest-xdist the tests pass, one sentence says why there is no verdict, and the exit code is 2."""
    several = ("-n", "2", "--judge-target", "fake:package.Two")
    said = vendor(*several, "-k", "bits")
    assert said.returncode == 2 and "2 passed" in said.stdout, said.stdout
    assert (
        "fake:package.Two has no verdict, because its items ran in 2 processes of pytest-xdist; "
        "run its tests with -n 0" in said.stdout
    ), said.stdout


@pytest.mark.long
def test_one_process_of_several_can_give_a_verdict(vendor: Run) -> None:
    """With pytest-xdist the exit code is that of the verdict if one process ran all items; the option gives 0."""
    target = ("--judge-target", "fake:package.Two")
    assert vendor("-n", "2", "--dist", "loadfile", *target).returncode == 0
    assert vendor("-n", "2", *target, "-k", "bits", "--judge-allow-part").returncode == 0
    part = vendor("-n", "1", *target, "-k", "bits[a]")
    assert part.returncode == 2 and "because only 1 of 2 items ran" in part.stdout, part.stdout
    wrong = vendor("-n", "2", "--judge-target", "fake:MIXED")
    assert wrong.returncode in (1, 2) and "4 failed" in wrong.stdout, wrong.stdout


@pytest.mark.long
def test_session_in_which_nothing_ran_fails(vendor: Run) -> None:
    """A backend that refuses every item fails the session, and an unknown target is one sentence."""
    said = vendor("--judge-target", "fake:package.Refuses")
    assert said.returncode == 1 and "has no verdict, because none of the items could run here" in said.stdout, (
        said.stdout
    )
    wrong = vendor("--judge-target", "fake:RIGHT_")
    assert wrong.returncode == 4 and "did you mean fake:RIGHT?" in wrong.stderr, wrong
