"""Tests of the pool of forked jobs."""

from __future__ import annotations

import os
import signal

import pytest

from tools.mutation import pool


def test_results_of_jobs_that_end_differently() -> None:
    """The pool keeps the rows of a job that returns, raises, exits or is killed."""

    def returns(send: pool.Send) -> None:
        send({"row": "x" * 300_000})

    def raises(send: pool.Send) -> None:
        send({"row": 1})
        raise ValueError("as it should")

    def leaves(send: pool.Send) -> None:
        os._exit(7)

    def dies(send: pool.Send) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    jobs = {"returns": returns, "raises": raises, "leaves": leaves, "dies": dies}
    ended = {job: (rows, code) for job, rows, code in pool.run(iter(jobs.items()), 2)}
    assert ended == {
        "returns": ([{"row": "x" * 300_000}], 0),
        "raises": ([{"row": 1}], 1),
        "leaves": ([], 7),
        "dies": ([], -signal.SIGKILL),
    }


@pytest.mark.parametrize("bound", ["SILENT_S", "MEMORY"])
def test_a_job_over_a_limit_is_killed(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without output, or with too much memory, is killed, and the next job runs."""
    monkeypatch.setattr(pool, bound, 0)
    monkeypatch.setattr(pool, "LOOK_S", 0.01)

    def waits(send: pool.Send) -> None:
        signal.pause()

    assert [code for _, _, code in pool.run(iter([("a", waits), ("b", waits)]), 1)] == [-signal.SIGKILL] * 2


def test_a_job_starts_after_earlier_results_are_known() -> None:
    """The pool takes a job from the iterator only after an earlier job has ended."""
    order: list[str] = []

    def jobs() -> object:
        for name in "ab":
            order.append(f"take {name}")
            yield name, lambda send: None

    for job, _, _ in pool.run(jobs(), 1):  # type: ignore[arg-type]
        order.append(f"end {job}")
    assert order == ["take a", "end a", "take b", "end b"]
