"""Tests of vLLM's benchmark: the steps that a case times, and its profile."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.spans import covered
from benchmarks.vllm.engines import Engine
from benchmarks.vllm.profile import Functions, OnRanks, profiles
from benchmarks.vllm.ranks import Rank
from benchmarks.vllm.throughput import Case, _prompts, medians, run, token_bytes


class OneRequest:
    """Substitute for vLLM's engine loop with one request: each step runs a matrix product and adds one token."""

    def __init__(self) -> None:
        self.llm_engine, self._left, self._made, self.name, self.ended = self, 0, 0, "", []

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        """Accept a request."""
        self.name, self._left, self._made = name, sampling.max_tokens, 0

    def abort_request(self, names: list[str]) -> None:
        """End the request."""
        self.ended, self._left = names, 0

    def has_unfinished_requests(self) -> bool:
        """Return True if the request still needs tokens."""
        return self._left > 0

    def step(self) -> list[Any]:
        """Add one token."""
        self._left, self._made = self._left - 1, self._made + 1
        torch.ones(64, 64) @ torch.ones(64, 64)
        return [SimpleNamespace(request_id=self.name, outputs=[SimpleNamespace(token_ids=[0] * self._made)])]


class Serving:
    """Substitute for vLLM's engine loop: a step adds a token to each request; a late request needs more steps."""

    def __init__(self, steps_of_the_late: int) -> None:
        self.llm_engine, self._wait, self._has_begun = self, steps_of_the_late, False
        self._made: dict[str, int] = {}
        self.asked: dict[str, Any] = {}
        self.ended: list[str] = []

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        """Accept a request."""
        self._made[name] = 1 - self._wait if self._has_begun else 0
        self.asked[name] = prompt

    def abort_request(self, names: list[str]) -> None:
        """End the requests."""
        self.ended = names

    def has_unfinished_requests(self) -> bool:
        """Return True always."""
        return True

    def step(self) -> list[Any]:
        """Add one token to each request."""
        self._has_begun, outs = True, []
        for name in self.asked:
            self._made[name] += 1
            if self._made[name] > 0:
                outs.append(
                    SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * self._made[name])])
                )
        return outs


@pytest.mark.parametrize("steps", [0, 3])
def test_profile_covers_the_timed_steps(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile covers only the prefill step or the decode steps; both profilers find one matrix product per step."""
    monkeypatch.setattr(
        "benchmarks.vllm.throughput._sampling", lambda *given: SimpleNamespace(max_tokens=1 + given[0].steps)
    )
    found = profiles(Case(1, 1024, steps), OneRequest(), Engine("small-shape", "CUSTOM:reference", 16))
    calls = {row["name"]: row["calls"] for row in found["host_calls"]}
    functions = [row["calls"] for row in found["host_functions"] if row["name"].endswith(" step")]
    assert (found["steps"], calls["aten::mm"], functions) == (max(1, steps), 1.0, [1.0])
    assert found["torch_ms"] > 0 and found["functions_ms"] > 0
    assert (found["kernels"], found["device_busy_us"]) == ([], 0)  # empty without a GPU


def test_profile_of_ranks_is_the_first_ranks() -> None:
    """Each rank profiles itself when the engine calls it; the profile of the first rank is returned."""
    rank, called = Rank(), []

    def call(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        called.append(method)
        return [getattr(rank, method)(*args)]

    loop = OneRequest()
    loop.collective_rpc = call  # type: ignore[attr-defined]
    watch = OnRanks(Functions, loop)
    watch.begin()
    covered([])
    watch.end()
    functions = [row["name"] for row in watch.said(1)["host_functions"]]
    assert any(name.endswith(" covered") for name in functions)
    assert called == ["watch_begin", "watch_end", "watch_said"]


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace vLLM's module, and return a list that collects the sampling arguments of all requests."""
    found: list[dict[str, Any]] = []

    def sampling(**given: Any) -> SimpleNamespace:
        found.append(given)
        return SimpleNamespace(**given)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=sampling))
    monkeypatch.setitem(sys.modules, "benchmarks.vllm.connector", SimpleNamespace(there=lambda left: {"left": left}))
    return found


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("skip_prefill", [True, False])
def test_run_times_the_steps_of_the_case(skip_prefill: bool) -> None:
    """A run times exactly the case's steps. If it also computes prompts, it aborts its requests after those steps."""
    loop = OneRequest()
    engine = Engine("small-shape", "A", 16, skip_prefill=skip_prefill, max_num_batched_tokens=512)
    row = run(Case(1, 1024, 3), loop, engine)
    assert (row["steps"], row["tokens"]) == (3, 3)
    assert loop.ended == ([] if skip_prefill else [loop.name])


def test_prefill_after_a_context_computes_new_tokens(sampled: list[dict[str, Any]]) -> None:
    """In a case with a context, only the new prompt tokens count, and only engines that can skip the context run it."""
    case, engine = Case(1, 1024, new=64), Engine("small-shape", "A", 16, skip_prefill=True)
    row = run(case, OneRequest(), engine)
    assert (row["case"], row["phase"], row["tokens"]) == ("1x1k+64", "prefill", 64)
    assert sampled[0]["extra_args"] == {"left": 64} and sampled[0]["max_tokens"] == 1
    assert len(_prompts(case, engine)[0]["prompt_token_ids"]) == 1024 + 64
    assert case.asked_of(engine) and not case.asked_of(Engine("small-shape", "A", 16))


@pytest.mark.parametrize("drafts", [0, 4])
def test_mixed_steps_end_with_the_late_prompts_token(sampled: list[dict[str, Any]], drafts: int) -> None:
    """In a mixed case a prompt arrives during decode; its first token ends the timing, and its prompt tokens count."""
    case = Case(2, 1024, beside=2048)
    engine = Engine("small-shape", "A", 16, skip_prefill=True, max_num_batched_tokens=512, drafts=drafts)
    loop = Serving(steps_of_the_late=5)
    row = run(case, loop, engine)
    assert (row["case"], row["phase"], row["steps"]) == ("2x1k-beside-2k", "mixed", 5)
    assert row["tokens"] == 2048 + 2 * 5 and case.decodes and not case.is_long
    assert replace(case, beside=32768).is_long
    assert [len(one["prompt_token_ids"]) for one in loop.asked.values()] == [1024, 1024, 2048]
    *first, late = sampled
    assert all(one["extra_args"] == {"left": 1} and one["max_tokens"] > 5 for one in first)
    assert late["extra_args"] is None and late["max_tokens"] == 1
    assert loop.ended == list(loop.asked)
    assert case.asked_of(engine) and not case.asked_of(replace(engine, skip_prefill=False))
    assert not case.asked_of(replace(engine, kv_bytes=2 * 1024 * token_bytes(engine) + 1))


def test_overlapping_intervals_count_once() -> None:
    """Time with several kernels counts once, and time between kernels does not count."""
    assert covered([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (10.0, 11.0)]) == 6.0
    assert covered([]) == 0.0


def test_median_of_repetitions_counts() -> None:
    """A row has the median speed and keeps all speeds."""
    rows = [{"case": "1x1k", "tokens_per_s": speed} for speed in (3.0, 1.0, 2.0)]
    assert medians(rows) == {"case": "1x1k", "tokens_per_s": 2.0, "all": [3.0, 1.0, 2.0]}
