"""Judges cuda_triton's source mutants by the plugin's own tests, and records the results.

    python -m core.contract.tests.source_mutants.own_tests --backend cuda_triton.kernels --draw 60 --seed 23

The contract sees what a backend computes; which tile it takes, and how fast, is for its own tests to hold. A mutant
meets the test files that speak of its file (`FILES`), then all others, until one fails; tests that are slow or need a
device are left out. What was decided is kept in ``--journal``.
"""

from __future__ import annotations

import argparse
import ast
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from . import page, pool
from .copies import run_changed
from .draw import SEED, drawn
from .journal import Journal
from .judge import SHOWN, Ended, Status
from .mutation import Mutation
from .review import reviews
from .score import complaints, score
from .targets import TARGETS, Target

TESTS = Path("plugins/cuda_triton/tests")
FILES = {
    "tiling": ("choices", "tiling", "sizing"),
    "few_rows": ("few_rows", "uniform"),
    "launch": ("extend", "few_rows", "uniform", "tree_ops"),
    "writing": ("kv_write", "few_rows", "again"),
    "kernels/tile": ("uniform", "extend"),
    "kernels/uniform": ("uniform", "few_rows"),
    "kernels/schedule": ("schedule", "few_rows", "extend"),
    "kernels/merge": ("uniform", "few_rows"),
    "kernels/extend": ("extend",),
    "kernels/kv_write": ("kv_write", "few_rows"),
    "kernels/compact": ("tree_ops",),
    "kernels/convert": ("kv_write", "operations", "uniform"),
    "kernels/walk": ("tree_ops",),
    "kernels/tail": ("tree_ops",),
    "kernels/split": ("uniform", "few_rows"),
    "kernels/reduce": ("uniform",),
}
"""Of a module, the tests that speak of it: ``test_NAME.py``."""
SUITE = "the plugin's own tests on a CPU, those that speak of the file first"
SECONDS = 300
"""CPU time of all tests of one mutant at most; on the unchanged plugin they take twenty."""


class _First:
    """A pytest plugin that keeps the first test that fails, and how many ran."""

    def __init__(self) -> None:
        self.failed, self.ran = "", 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Of each test and its fixtures."""
        self.ran += report.when == "call"
        self._note(report.failed, report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported."""
        self._note(report.failed, report.nodeid)

    def _note(self, failed: bool, name: str) -> None:
        if failed and not self.failed:
            self.failed = name.rpartition("/")[2]


def files(module: str) -> list[str]:
    """All test files, those that speak of a module first."""
    every = sorted(path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py"))
    return [str(TESTS / f"test_{name}.py") for name in dict.fromkeys([*FILES.get(module, ()), *every])]


def judge(target: Target, mutation: Mutation, say: pool.Say) -> None:
    """Run the tests on the plugin with one change. Once a process: its modules stand under their own names."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))

    def change(module: str, tree: ast.Module) -> ast.Module | None:
        return mutation.apply(tree) if module == mutation.module else None

    for name, module in list(sys.modules.items()):  # or the tests would find the original, or be those that did
        if f"{name}.".startswith(f"{target.package}.") or str(TESTS) in str(getattr(module, "__file__", "")):
            del sys.modules[name]
    run_changed(replace(target, alias=target.package, shared=()), change)
    first, silent = _First(), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not device"]
    code = pytest.main([*options, *files(mutation.module)], plugins=[first])
    say({"failed": first.failed or ("" if code == pytest.ExitCode.OK else f"exit code {code:d}"), "ran": first.ran})


def ended(mutation: str, rows: Sequence[dict[str, object]], code: int) -> Ended:
    """What the process of a mutant said, or how it ended."""
    if not rows:
        return Ended(mutation, Status.HUNG, "process", f"the process ended with code {code}"[:SHOWN])
    failed, ran = str(rows[-1]["failed"]), int(str(rows[-1]["ran"]))
    return Ended(mutation, Status.KILLED if failed else Status.SURVIVED, failed, met=ran, of=ran)


def main() -> int:
    """Judge, tell, write; 1 when a survivor is not reviewed or a review has no survivor."""
    asked = _asked()
    target, name = TARGETS[asked.backend], f"{asked.backend} by its own tests"
    made = [one for one in target.mutations() if one.module.startswith(tuple(asked.begins) or ("",))]
    every = drawn(made, asked.draw, asked.seed) if asked.draw else made
    asked.journal.mkdir(parents=True, exist_ok=True)
    journal = Journal(asked.journal, f"{asked.backend}.own")
    known = journal.ended()
    torch.set_num_threads(1)  # forks of a process with threads may hang

    def jobs() -> Iterator[tuple[str, pool.Work]]:
        for one in every:
            if one.id not in known and not asked.write_only:
                yield one.id, _work(target, one)

    for job, rows, code in pool.run(jobs(), 1):
        known[job] = ended(job, rows, code)
        journal.note(known[job].as_json())
        print(known[job].status.value, job, known[job].item, flush=True)
    shown = {one.id: known[one.id] for one in every if one.id in known}
    reviewed = {mutant: review for mutant, review in reviews(name).items() if mutant in {one.id for one in every}}
    page.record(
        asked.results,
        name,
        every,
        shown,
        reviewed,
        f"{SUITE}{', seed ' + str(asked.seed) if asked.draw else ''}",
        len(made),
    )
    page.write(asked.page, asked.results)
    whole, wrong = score(every, shown, reviewed), complaints(every, shown, reviewed)
    print(*wrong, f"{name}: {whole.killed} of {whole.judged} killed", sep="\n")
    return 1 if wrong else 0


def _work(target: Target, mutation: Mutation) -> Callable[[pool.Say], None]:
    return lambda say: judge(target, mutation, say)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("begins", nargs="*", help="beginnings of modules; all when none is given")
    parser.add_argument("--backend", choices=[name for name in TARGETS if name != "reference"], default="cuda_triton")
    parser.add_argument("--draw", type=int, default=0, help="mutants to judge, evenly over the files; 0 for all")
    parser.add_argument("--seed", type=int, default=SEED, help="with --draw: another draw")
    parser.add_argument("--write-only", action="store_true", help="judge nothing: write what the journal has")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="record of results")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="page to write")
    parser.add_argument("--journal", type=Path, default=Path("build/source-mutants"), help="folder of the journals")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
