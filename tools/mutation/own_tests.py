"""Judges cuda_triton's source mutants by the plugin's own tests, and records the results.

    python -m tools.mutation.own_tests --backend cuda_triton.kernels --draw 60 --seed 23

The contract tests the values that a backend computes. Only the plugin's own tests check its choice of tile and its
speed. A mutant first runs the test files of its module (`FILES`), then all others, until one fails. Slow tests and
tests that need a device are left out. ``--journal`` keeps finished results.
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
    "heuristics/common": ("select_config", "split_configs", "heuristics", "sizing"),
    "heuristics/interpreted": ("interpreted_config", "heuristics", "sizing"),
    "heuristics/latent": ("latent", "sizing"),
    "heuristics/select": ("select_config", "adapt_to_cache", "heuristics", "sizing"),
    "heuristics/sm80": ("select_config", "adapt_to_cache", "heuristics", "sizing"),
    "heuristics/sm90": ("select_config", "adapt_to_cache", "split_configs", "heuristics", "sizing"),
    "heuristics/split_kv": ("split_configs", "adapt_to_cache", "heuristics", "sizing"),
    "heuristics/upcast": ("prefill_fp8", "sizing"),
    "decode_verify": ("decode_verify_ragged", "decode_verify"),
    "launch/attention": ("prefill", "decode_verify_ragged", "decode_verify", "tree_ops"),
    "launch/metadata": ("prefill", "decode_verify_ragged", "tile_schedule"),
    "launch/combine": ("combine", "decode_verify", "decode_verify_ragged"),
    "kv_write": ("kv_write", "decode_verify_ragged", "relaunch"),
    "kernels/tile": ("decode_verify", "prefill"),
    "kernels/mask": ("decode_verify", "prefill"),
    "kernels/softmax": ("decode_verify", "prefill"),
    "kernels/mainloop": ("decode_verify", "prefill"),
    "kernels/decode_verify": ("decode_verify", "decode_verify_ragged"),
    "kernels/latent": ("latent",),
    "kernels/tile_schedule": ("tile_schedule", "decode_verify_ragged"),
    "kernels/prefill_schedule": ("prefill",),
    "kernels/combine": ("combine", "decode_verify", "decode_verify_ragged"),
    "kernels/prefill": ("prefill",),
    "kernels/kv_write": ("kv_write", "decode_verify_ragged"),
    "kernels/compact_kv": ("tree_ops",),
    "kernels/convert": ("kv_write", "decode_verify"),
    "kernels/verify_tree": ("tree_ops",),
    "kernels/tree_tail": ("tree_ops",),
    "kernels/split_kv": ("decode_verify", "decode_verify_ragged"),
    "kernels/reduce": ("decode_verify",),
}
"""Module → names of the test files about it, ``test_NAME.py``; they run first."""
SUITE = "the plugin's own tests on a CPU, those about the mutated file first"
SECONDS = 300
"""CPU time limit of one mutant's tests, in seconds. On the unchanged plugin they take twenty."""


class _First:
    """A pytest plugin that records the first failing test and the number of tests that ran."""

    def __init__(self) -> None:
        self.failed, self.ran = "", 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test, and record it or its fixtures if they fail."""
        self.ran += report.when == "call"
        self._note(report.failed, report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a test file that cannot be imported."""
        self._note(report.failed, report.nodeid)

    def _note(self, failed: bool, name: str) -> None:
        if failed and not self.failed:
            self.failed = name.rpartition("/")[2]


def files(module: str) -> list[str]:
    """Return the paths of all test files, the files about a module first."""
    every = sorted(path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py"))
    return [str(TESTS / f"test_{name}.py") for name in dict.fromkeys([*FILES.get(module, ()), *every])]


def judge(target: Target, mutation: Mutation, send: pool.Send) -> None:
    """Run the tests on the plugin with one change. Works once per process, because it replaces imported modules."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))

    def change(module: str, tree: ast.Module) -> ast.Module | None:
        return mutation.apply(tree) if module == mutation.module else None

    for name, module in list(sys.modules.items()):  # so that the tests import the mutant, not the loaded original
        if f"{name}.".startswith(f"{target.package}.") or str(TESTS) in str(getattr(module, "__file__", "")):
            del sys.modules[name]
    run_changed(replace(target, alias=target.package, shared=()), change)
    first, silent = _First(), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not device"]
    code = pytest.main([*options, *files(mutation.module)], plugins=[first])
    send({"failed": first.failed or ("" if code == pytest.ExitCode.OK else f"exit code {code:d}"), "ran": first.ran})


def ended(mutation: str, rows: Sequence[dict[str, object]], code: int) -> Ended:
    """Return the result that the process of a mutant sent. If it sent none, report the exit code as a hang."""
    if not rows:
        return Ended(mutation, Status.HUNG, "process", f"the process ended with code {code}"[:SHOWN])
    failed, ran = str(rows[-1]["failed"]), int(str(rows[-1]["ran"]))
    return Ended(mutation, Status.KILLED if failed else Status.SURVIVED, failed, met=ran, of=ran)


def main() -> int:
    """Judge mutants, report and record their results, and return 1 if reviews and survivors do not match."""
    args = _arguments()
    target, name = TARGETS[args.backend], f"{args.backend} by its own tests"
    made = [one for one in target.mutations() if one.module.startswith(tuple(args.begins) or ("",))]
    every = drawn(made, args.draw, args.seed) if args.draw else made
    args.journal.mkdir(parents=True, exist_ok=True)
    journal = Journal(args.journal, f"{args.backend}.own")
    known = journal.ended()
    torch.set_num_threads(1)  # a fork of a process with several threads can hang

    def jobs() -> Iterator[tuple[str, pool.Work]]:
        for one in every:
            if one.id not in known and not args.write_only:
                yield one.id, _work(target, one)

    for job, rows, code in pool.run(jobs(), 1):
        known[job] = ended(job, rows, code)
        journal.note(known[job].as_json())
        print(known[job].status.value, job, known[job].item, flush=True)
    shown = {one.id: known[one.id] for one in every if one.id in known}
    reviewed = {mutant: review for mutant, review in reviews(name).items() if mutant in {one.id for one in every}}
    page.record(
        args.results,
        name,
        every,
        shown,
        reviewed,
        f"{SUITE}{', seed ' + str(args.seed) if args.draw else ''}",
        len(made),
    )
    page.write(args.page, args.results)
    whole, wrong = score(every, shown, reviewed), complaints(every, shown, reviewed)
    print(*wrong, f"{name}: {whole.killed} of {whole.judged} killed", sep="\n")
    return 1 if wrong else 0


def _work(target: Target, mutation: Mutation) -> Callable[[pool.Send], None]:
    return lambda send: judge(target, mutation, send)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("begins", nargs="*", help="beginnings of module names; all modules if none is given")
    parser.add_argument("--backend", choices=[name for name in TARGETS if name != "reference"], default="cuda_triton")
    parser.add_argument("--draw", type=int, default=0, help="mutants to judge, evenly over the files; 0 for all")
    parser.add_argument("--seed", type=int, default=SEED, help="with --draw: seed of the draw")
    parser.add_argument("--write-only", action="store_true", help="judge nothing; write the results of the journal")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="record of results")
    parser.add_argument("--page", type=Path, default=page.PAGE, help="page to write")
    parser.add_argument("--journal", type=Path, default=Path("build/source-mutants"), help="folder of the journals")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
