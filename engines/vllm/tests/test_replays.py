"""Steps prepared by replays: over graphs that break by a device's rules, against dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from draftmark import Form
from draftmark_vllm.pages import kv_cache
from draftmark_vllm.replays import Replays
from draftmark_vllm.served import Served
from draftmark_vllm.spans import Span, spans
from draftmark_vllm.step import Step, StepBuffers
from engines.vllm.tests.handmade import MAX_REQS, MAX_TOKENS, Made, Problem, Request, random_problem, served

ROWS = 3
CAPTURED = (Request(0, ROWS),) * 4
"""A step as vLLM captures it: every request is live."""
LATER = ((31, 17, 0, 93), (5, 64, 40), (90,))
"""Prefixes of steps behind it; where requests are missing, padding stands for them."""
FORMS = (tuple(Form), (Form.ENGINE_SLOTS, Form.STRIDED_KV))


def spans_of(step: Step, ours: Served) -> tuple[Span, ...]:
    """How a builder cuts a step."""
    return spans(step.query_start_host, step.num_rows, ROWS, ours.any.ragged)


def problem_of(requests: tuple[Request, ...], seed: int, **attention: Any) -> Problem:
    """A step of uniform rows, padded to the captured size."""
    made = random_problem(seed, page_size=16, **attention)
    padding = len(CAPTURED) - len(requests)
    return replace(made, requests=requests, verify_rows=ROWS, padding=padding, surplus=0, loose=None)


class Engine:
    """What stays where it is between steps: vLLM's tensors, the builder's buffers, and its graphs."""

    def __init__(self, forms: tuple[Form, ...], **attention: Any) -> None:
        self.attention = attention
        made = Made(problem_of(CAPTURED, 1, **attention))
        self.step, self.ours = made.step, served(made.problem, forms=forms)
        geometry = self.ours.any.few
        columns = 0 if Form.ENGINE_TABLE in forms else geometry.max_pages_per_req
        self.buffers = StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"), columns)
        self.replays = Replays(self.ours, self.buffers, torch.device("cpu"))
        (span,) = spans_of(self.step, self.ours)
        assert self.replays.prepare(self.step, span) is None, "nothing was captured"
        batch = self.buffers.forward(self.step, span, geometry)
        self.ours.prepare(batch)
        for _ in range(2):  # vLLM warms a size up before it captures it
            self.replays.capture(self.step, span, batch)

    def bring(self, prefixes: tuple[int, ...], seed: int) -> Made:
        """A later step, in vLLM's tensors."""
        made = Made(problem_of(tuple(Request(one, ROWS) for one in prefixes), seed, **self.attention))
        for name in ("seq_lens", "page_table", "slots"):
            getattr(self.step, name).copy_(getattr(made.step, name))
        made.step = replace(
            made.step, **{name: getattr(self.step, name) for name in ("seq_lens", "page_table", "slots")}
        )
        return made


@pytest.fixture(params=FORMS, ids=["vLLM's table", "its own"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One that has captured its size."""
    yield Engine(request.param, window_left=19, num_kv_heads=2, softmax_scale=0.3, logits_soft_cap=5.0)


def test_later_steps_are_prepared_by_a_replay_and_match_dense_attention(engine: Engine) -> None:
    """Other lengths, pages, slots and numbers of live requests than what was captured."""
    for seed, prefixes in enumerate(LATER, 2):
        made = engine.bring(prefixes, seed)
        (span,) = spans_of(made.step, engine.ours)
        with patch.object(Served, "write", side_effect=AssertionError("launched one by one")):
            batch = engine.replays.prepare(made.step, span)
        assert batch is not None
        one = engine.ours.of(span.mode)[made.problem.shape]
        cache, out = (
            kv_cache(made.pages, made.problem.shape.num_kv_heads, None, None),
            torch.full_like(made.q, torch.nan),
        )
        one.write_kv(made.k, made.v, cache, batch)
        one.attend(made.q, cache, batch, out)
        assert (out[: len(made.wanted)].double() - made.wanted).abs().max() < 2e-5, prefixes
        assert out.isfinite().all()


def test_what_was_not_captured_is_launched(engine: Engine) -> None:
    """Other tensors, though alike; another size; another mode; requests behind others; uneven rows."""
    (span,) = spans_of(engine.step, engine.ours)
    for name in ("seq_lens", "page_table", "slots"):
        other = replace(engine.step, **{name: getattr(engine.step, name).clone()})
        assert engine.replays.prepare(other, span) is None, name
    narrow = replace(engine.step, page_table=engine.step.page_table[:, 1:])
    assert engine.replays.prepare(narrow, span) is None
    for lens in ((ROWS,) * 3, (1,) * 4, (ROWS, 1, ROWS), (9,)):
        starts = tuple(sum(lens[:i]) for i in range(len(lens) + 1))
        (other_span,) = spans_of(replace(engine.step, query_start_host=starts, num_rows=sum(lens)), engine.ours)
        assert engine.replays.prepare(engine.step, other_span) is None, lens
    assert engine.replays.prepare(engine.step, replace(span, first_req=1, first_row=ROWS)) is None


def test_sets_of_tensors_have_graphs_of_their_own(engine: Engine) -> None:
    """A draft model's steps, which the same builder prepares from others: each finds the batch of its own."""
    (span,) = spans_of(engine.step, engine.ours)
    drafts = replace(engine.step, seq_lens=engine.step.seq_lens.clone() + 1)
    batch = engine.buffers.forward(drafts, span, engine.ours.any.few)
    engine.ours.prepare(batch)
    engine.replays.capture(drafts, span, batch)
    assert engine.replays.prepare(drafts, span) is batch
    assert batch.prefix_lens.tolist() == [1] * len(CAPTURED)
    found = engine.replays.prepare(engine.step, span)
    assert found is not None and found is not batch
    assert found.prefix_lens.tolist() == [0] * len(CAPTURED)
