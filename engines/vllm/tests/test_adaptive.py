"""Tests of adaptive verification: the device decides the rows of each verify, and the host knows only their sum.

vLLM runs it on GPUs only, from 0.28 on. Here steps are made by hand, as its runner V2 makes them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

pytest.importorskip("vllm")

from draftmark import Mode
from draftmark_vllm.batch_runs import BatchRun, split_adaptive
from draftmark_vllm.step import StepBuffers, check_batch
from engines.vllm.tests.handmade import (
    MAX_REQS,
    MAX_TOKENS,
    Problem,
    Request,
    StepData,
    attention,
    bound_backends,
    random_problem,
)

VERIFY = 5


def spread(rows: list[int]) -> list[int]:
    """Return the rows that the host believes in: the same sum, spread evenly."""
    each, more = divmod(sum(rows), len(rows))
    return [each + (n < more) for n in range(len(rows))]


def adaptive_problem(seed: int) -> tuple[Problem, list[int]]:
    """Return a step of uneven verifies, in every third one with a prompt after them, and the host's rows."""
    rng = random.Random(seed)
    rows = [rng.randint(1, VERIFY) for _ in range(rng.randint(1, MAX_REQS - 2))]
    prompt = [rng.randint(VERIFY + 1, 30)] if seed % 3 == 0 else []
    requests = tuple(Request(rng.choice((0, rng.randint(1, 60))), n) for n in (*rows, *prompt))
    usual = random_problem(seed)
    padding = 0 if prompt else rng.randint(0, 1)
    surplus = 0 if prompt else rng.randint(0, 3)
    made = replace(usual, requests=requests, verify_rows=VERIFY, padding=padding, surplus=surplus, loose=None)
    return made, spread(rows) + prompt


@pytest.mark.parametrize("backend", ["reference", pytest.param("cuda_triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", range(12))
def test_the_device_decides_the_rows(seed: int, backend: str) -> None:
    """Each row equals dense attention over the device's rows, although the host's rows of each request are others."""
    problem, rows = adaptive_problem(seed)
    made, ours = StepData(problem), bound_backends(problem, backend)
    host = tuple(accumulate([*rows, *[0] * problem.padding], initial=0))
    assert host[len(problem.requests)] == sum(one.rows for one in problem.requests)
    runs = split_adaptive(host, made.num_rows, VERIFY)
    assert [one.mode for one in runs] == [Mode.RAGGED_VERIFY, *[Mode.EXTEND] * (seed % 3 == 0)]
    made.step = replace(made.step, query_start_host=host)
    buffers = StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"))
    batch = buffers.forward(made.step, runs[0], ours.geometry(Mode.RAGGED_VERIFY))
    check_batch(batch, ours.geometry(Mode.RAGGED_VERIFY), made.step.slots[: batch.num_rows])
    found = attention(made, ours, buffers, runs=runs)
    torch.testing.assert_close(found.double(), made.wanted, rtol=1e-4, atol=1e-4)


def test_captured_steps_have_the_runs_of_replays() -> None:
    """A captured step with one row for each request has the run of every replay: its bounds do not depend on rows."""
    captured = split_adaptive((0, 1, 2, 3, 4), 4, VERIFY)
    assert captured == (BatchRun(Mode.RAGGED_VERIFY, 0, 0, 4, (VERIFY,) * 4, 4),)
    (replayed,) = split_adaptive((0, 2, 3, 3, 3), 4, VERIFY)
    assert (replayed.q_lens, replayed.num_rows, replayed.num_reqs) == ((VERIFY,) * 4, 4, 2)
    assert split_adaptive((0, 0), 0, VERIFY) == ()


def test_host_bounds_do_not_rely_on_the_hosts_rows() -> None:
    """A backend that reads host bounds gets the length minus one row, because a request has at least one row."""
    problem, rows = adaptive_problem(1)
    made = StepData(replace(problem, loose=0, padding=0))
    geometry = bound_backends(made.problem).geometry(Mode.RAGGED_VERIFY)
    host = tuple(accumulate(rows, initial=0))
    (run,) = split_adaptive(host, made.num_rows, VERIFY)
    buffers = StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"))
    batch = buffers.forward(replace(made.step, query_start_host=host, exact=False), run, geometry)
    prefixes = [one.prefix for one in made.problem.requests]
    assert all(bound >= n for bound, n in zip(batch.host.upper_bound(), prefixes, strict=True))
