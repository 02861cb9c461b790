"""Steps prepared by graph replays, compared with dense attention in float64. The CPU graphs follow a device's rules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from draftmark import LAYOUT_FORMS, Form
from draftmark_vllm.batch_runs import BatchRun, split_decodes_prefills
from draftmark_vllm.bound_backends import BoundBackends
from draftmark_vllm.metadata_graphs import MetadataGraphs
from draftmark_vllm.pages import kv_cache
from draftmark_vllm.step import Step, StepBuffers, check_batch
from engines.vllm.tests.handmade import MAX_REQS, MAX_TOKENS, Problem, Request, StepData, bound_backends, random_problem

ROWS = 3
CAPTURED = (Request(0, ROWS),) * 4
"""A step as vLLM captures it, in which every request is live."""
LATER = ((31, 17, 0, 93), (5, 64, 40), (90,))
"""Prefixes of later steps. Padding fills up missing requests."""
FORMS = (LAYOUT_FORMS, (Form.ENGINE_SLOTS, Form.STRIDED_KV))


def runs_of(step: Step, ours: BoundBackends) -> tuple[BatchRun, ...]:
    """Split a step into runs, as the builder does."""
    return split_decodes_prefills(step.query_start_host, step.num_rows, ROWS, ours.any.ragged)


def problem_of(requests: tuple[Request, ...], seed: int, **attention: Any) -> Problem:
    """Return a step with equal rows per request, padded to the captured number of requests."""
    made = random_problem(seed, page_size=16, **attention)
    padding = len(CAPTURED) - len(requests)
    return replace(made, requests=requests, verify_rows=ROWS, padding=padding, surplus=0, loose=None)


class Engine:
    """Holds the state that persists between steps: vLLM's tensors, the builder's buffers and its metadata graphs."""

    def __init__(self, forms: tuple[Form, ...], **attention: Any) -> None:
        self.attention = attention
        made = StepData(problem_of(CAPTURED, 1, **attention))
        self.ours = bound_backends(made.problem, forms=forms)
        # As in vLLM, a step has the first elements of tensors with an element for each possible request.
        names = "seq_lens", "query_start"
        self.memory = {name: torch.zeros(MAX_REQS + 1, dtype=torch.int32) for name in names}
        views = {name: one[: len(getattr(made.step, name))] for name, one in self.memory.items()}
        self.step = replace(made.step, **{n: one.copy_(getattr(made.step, n)) for n, one in views.items()})
        self.replays = Form.ENGINE_TABLE in forms
        geometry = self.ours.any.decode_verify
        columns = 0 if Form.ENGINE_TABLE in forms else geometry.max_pages_per_req
        self.buffers = StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"), columns)
        self.graphs = MetadataGraphs(self.ours, self.buffers, torch.device("cpu"))
        (run,) = runs_of(self.step, self.ours)
        assert self.graphs.prepare(self.step, run) is None, "nothing was captured"
        batch = self.buffers.forward(self.step, run, geometry)
        self.ours.prepare(batch)
        for _ in range(2):  # vLLM builds each size twice: for a warm-up run and for the capture
            self.graphs.capture(self.step, run, batch)

    def bring(self, prefixes: tuple[int, ...], seed: int) -> StepData:
        """Make a later step with these prefix lengths, and write it into vLLM's tensors."""
        made = StepData(problem_of(tuple(Request(one, ROWS) for one in prefixes), seed, **self.attention))
        for name in ("seq_lens", "page_table", "slots"):
            getattr(self.step, name).copy_(getattr(made.step, name))
        made.step = replace(
            made.step, **{name: getattr(self.step, name) for name in ("seq_lens", "page_table", "slots")}
        )
        return made


@pytest.fixture(params=FORMS, ids=["vLLM's table", "its own"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Yield an engine that has captured the metadata graph of one batch size."""
    yield Engine(request.param, window_left=19, num_kv_heads=2, softmax_scale=0.3, logits_soft_cap=5.0)


def test_replayed_steps_match_dense_attention(engine: Engine) -> None:
    """A replay writes right metadata for each step's lengths, pages, slots and number of live requests."""
    for seed, prefixes in enumerate(LATER, 2):
        made = engine.bring(prefixes, seed)
        (run,) = runs_of(made.step, engine.ours)
        with patch.object(BoundBackends, "write", side_effect=AssertionError("launched one by one")):
            batch = engine.graphs.prepare(made.step, run)
        assert batch is not None
        one = engine.ours.of(run.mode)[made.problem.shape]
        cache, out = (
            kv_cache(made.pages, made.problem.shape.num_kv_heads, None, None),
            torch.full_like(made.q, torch.nan),
        )
        one.write_kv(made.k, made.v, cache, batch)
        one.attend(made.q, cache, batch, out)
        assert (out[: len(made.wanted)].double() - made.wanted).abs().max() < 2e-5, prefixes
        assert out.isfinite().all()


def test_other_sizes_and_tensors_are_not_replayed(engine: Engine) -> None:
    """`prepare` returns None for other tensors, batch sizes and modes, uneven rows, and a step's second run."""
    (run,) = runs_of(engine.step, engine.ours)
    for name in ("seq_lens", "page_table", "slots"):
        other = replace(engine.step, **{name: getattr(engine.step, name).clone()})
        assert engine.graphs.prepare(other, run) is None, name
    narrow = replace(engine.step, page_table=engine.step.page_table[:, 1:])
    assert engine.graphs.prepare(narrow, run) is None
    for lens in ((ROWS,) * 3, (1,) * 4, (ROWS, 1, ROWS), (9,)):
        starts = tuple(sum(lens[:i]) for i in range(len(lens) + 1))
        (other_run,) = runs_of(replace(engine.step, query_start_host=starts, num_rows=sum(lens)), engine.ours)
        assert engine.graphs.prepare(engine.step, other_run) is None, lens
    assert engine.graphs.prepare(engine.step, replace(run, first_req=1, first_row=ROWS)) is None


def test_each_set_of_tensors_has_its_own_graphs(engine: Engine) -> None:
    """Each set of tensors has its own graphs and batches, because a draft model's steps use other tensors."""
    (run,) = runs_of(engine.step, engine.ours)
    drafts = replace(engine.step, seq_lens=engine.step.seq_lens.clone() + 1)
    batch = engine.buffers.forward(drafts, run, engine.ours.any.decode_verify)
    engine.ours.prepare(batch)
    engine.graphs.capture(drafts, run, batch)
    assert engine.graphs.prepare(drafts, run) is batch
    assert batch.prefix_lens.tolist() == [1] * len(CAPTURED)
    found = engine.graphs.prepare(engine.step, run)
    assert found is not None and found is not batch
    assert found.prefix_lens.tolist() == [0] * len(CAPTURED)


def prompts(engine: Engine, seed: int) -> StepData:
    """Make a step of decodes and prompts in the memory of the engine's lengths and first rows."""
    chance = random.Random(seed)
    requests = tuple(Request(chance.randrange(90), chance.choice((1, ROWS, 20))) for _ in range(chance.randint(1, 5)))
    made = StepData(replace(problem_of((), seed, **engine.attention), requests=(*requests, Request(7, 30)), padding=0))
    for name in ("seq_lens", "query_start"):
        whole, lens = engine.memory[name], getattr(made.step, name)
        whole.fill_(2**30)
        made.step = replace(made.step, **{name: whole[: len(lens)].copy_(lens)})
    return made


@pytest.mark.parametrize("seed", range(6))
def test_replay_computes_prefixes_of_prompts(engine: Engine, seed: int) -> None:
    """In memory that was captured, a replay computes the prefix lengths of steps of any size, in any run."""
    made = prompts(engine, seed)
    (head, *_), ours = runs_of(made.step, engine.ours), engine.ours
    run = runs_of(made.step, ours)[-1]
    batch = engine.buffers.batch(made.step, run, ours.any.extend)
    with patch.object(StepBuffers, "fill", side_effect=AssertionError("launched")) if engine.replays else nullcontext():
        engine.graphs.fill(batch, made.step, run)
    wanted = [one.prefix for one in made.problem.requests[run.first_req :]]
    assert batch.prefix_lens.tolist() == wanted and head.first_req == 0
    check_batch(batch, ours.any.extend, made.step.slots[:0])
    other = replace(made.step, seq_lens=made.step.seq_lens + 1)
    engine.graphs.fill(batch, other, run)
    assert batch.prefix_lens.tolist() == [one + 1 for one in wanted]


def test_short_memory_is_not_captured(engine: Engine) -> None:
    """Tensors without an element for each possible request get no graph: nothing is read past their end."""
    made = prompts(engine, 0)
    assert (engine.buffers.prefixes(made.step) is not None) == engine.replays
    for name in ("seq_lens", "query_start"):
        assert engine.buffers.prefixes(replace(made.step, **{name: getattr(made.step, name).clone()})) is None
