"""A pool outlives its jobs."""

from __future__ import annotations

import os
import signal

import pytest

from . import pool


def test_jobs_end_as_they_end() -> None:
    """What a job said is kept, whether it returns, raises, leaves or is killed."""

    def returns(say: pool.Say) -> None:
        say({"said": "x" * 300_000})

    def raises(say: pool.Say) -> None:
        say({"said": 1})
        raise ValueError("as it should")

    def leaves(say: pool.Say) -> None:
        os._exit(7)

    def dies(say: pool.Say) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    jobs = {"returns": returns, "raises": raises, "leaves": leaves, "dies": dies}
    ended = {job: (rows, code) for job, rows, code in pool.run(iter(jobs.items()), 2)}
    assert ended == {
        "returns": ([{"said": "x" * 300_000}], 0),
        "raises": ([{"said": 1}], 1),
        "leaves": ([], 7),
        "dies": ([], -signal.SIGKILL),
    }


@pytest.mark.parametrize("bound", ["SILENT_S", "MEMORY"])
def test_a_job_that_takes_too_much_is_ended(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent or a huge process is killed, and the next job has its turn."""
    monkeypatch.setattr(pool, bound, 0)
    monkeypatch.setattr(pool, "LOOK_S", 0.01)

    def waits(say: pool.Say) -> None:
        signal.pause()

    assert [code for _, _, code in pool.run(iter([("a", waits), ("b", waits)]), 1)] == [-signal.SIGKILL] * 2


def test_a_job_is_taken_when_there_is_room_for_it() -> None:
    """What the end of one job teaches can shape the next."""
    order: list[str] = []

    def jobs() -> object:
        for name in "ab":
            order.append(f"take {name}")
            yield name, lambda say: None

    for job, _, _ in pool.run(jobs(), 1):  # type: ignore[arg-type]
        order.append(f"end {job}")
    assert order == ["take a", "end a", "take b", "end b"]
