"""The builder's own methods, where they need no engine; needs vLLM. And the memory that is held while vLLM measures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("vllm")

from draftmark import load
from draftmark_vllm import reservation
from draftmark_vllm.builder import DraftmarkBuilder, StepMetadata
from draftmark_vllm.pages import kv_cache
from draftmark_vllm.served import Served, arena_bytes
from draftmark_vllm.spans import spans
from draftmark_vllm.step import Step, StepBuffers
from engines.vllm.tests.handmade import MAX_REQS, MAX_TOKENS, Made, Request, random_problem, served

DECODES = (Request(17, 1), Request(4, 1), Request(95, 1))


def builder_of(ours: Served, **of_a_step: Any) -> DraftmarkBuilder:
    """One without an engine. of_a_step: what steps bring beside their tensors."""
    cpu, made = torch.device("cpu"), object.__new__(DraftmarkBuilder)
    usual = {"_told": False, "_exact": False, "_debug": False, "_chunk": None, "_tails": None, "_verify_rows": 1}
    own = {"_served": ours, "_buffers": StepBuffers(MAX_REQS, MAX_TOKENS, cpu), "device": cpu}
    vars(made).update(usual | own | {"layer_names": [], "_num_layers": 0} | of_a_step)
    made._replays = made._new_replays()
    return made


def metadata_of(step: Step) -> SimpleNamespace:
    """A step as vLLM tells it."""
    return SimpleNamespace(
        causal=True,
        query_start_loc=step.query_start,
        query_start_loc_cpu=torch.tensor(step.query_start_host),
        seq_lens=step.seq_lens,
        block_table_tensor=step.page_table,
        slot_mapping=step.slots,
        num_actual_tokens=step.num_rows,
        seq_lens_cpu_upper_bound=None,
    )


def decodes(seed: int = 0) -> Made:
    """A step of decodes, of which vLLM has a whole graph."""
    problem = replace(random_problem(seed, page_size=16), requests=DECODES, verify_rows=1)
    return Made(replace(problem, padding=0, surplus=0, loose=None))


@pytest.mark.parametrize(("worker", "threshold"), [("auto", None), ("draftmark_vllm.trees.worker.TreeWorker", 8)])
def test_steps_are_sorted_for_trees_alone(worker: str, threshold: int | None) -> None:
    """By as many rows as a tree has; decodes and chains are served wherever they stand."""
    made = object.__new__(DraftmarkBuilder)
    made.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker, decode_context_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=7, parallel_drafting=False),
    )
    made._ask_for_order()
    assert made.reorder_batch_threshold == threshold


def test_a_step_that_vllm_captures_is_prepared_by_a_replay() -> None:
    """The builder captures beside vLLM, and then launches nothing itself: lengths are the later step's."""
    made = decodes()
    ours = served(made.problem)
    builder, said = builder_of(ours), metadata_of(made.step)
    captured = builder.build_for_cudagraph_capture(said)
    made.step.seq_lens.sub_(3)
    with patch.object(Served, "write", side_effect=AssertionError("launched one by one")):
        found = builder.build(0, said)
    ((first, batch, backends),) = found.parts
    assert first == 0 and backends is ours.few
    assert batch is captured.parts[0][1]
    assert batch.prefix_lens.tolist() == [one.prefix - 3 for one in DECODES]
    assert found.seq_lens is said.seq_lens


def test_a_step_that_was_not_captured_is_launched() -> None:
    """Neither before any capture nor in other tensors is anything replayed; building captures nothing."""
    made = decodes()
    builder, said = builder_of(served(made.problem)), metadata_of(made.step)
    (one,), (other,) = builder.build(0, said).parts, builder.build(0, said).parts
    assert one[1] is not other[1]
    builder.build_for_cudagraph_capture(said)
    said.seq_lens = said.seq_lens.clone() + 1
    ((_, batch, _),) = builder.build(0, said).parts
    assert batch.prefix_lens.tolist() == [one.prefix + 1 for one in DECODES]


@pytest.mark.parametrize("more", [{"_told": True}, {"_debug": True}, {"_chunk": 64}, {"_tails": "trees"}], ids=str)
def test_steps_that_bring_more_than_tensors_are_never_replayed(more: dict[str, Any]) -> None:
    """Lengths on the host, checks, chunks of positions, trees."""
    assert builder_of(served(random_problem(0)), **more)._replays is None


@pytest.mark.parametrize("seed", range(8))
def test_a_draft_step_is_worked_out_anew_on_the_device(seed: int) -> None:
    """`update_draft_decode_metadata`, which draft graphs record: metadata of shorter requests becomes this step's, and
    attention over it is dense attention."""
    problem = replace(random_problem(seed, page_size=16), requests=DECODES, padding=0, surplus=0, loose=None)
    made, ours = Made(problem), served(problem)
    (span,) = spans(made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged)
    lens = made.step.seq_lens.clone()
    made.step.seq_lens.sub_(3)
    batch = StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu")).forward(made.step, span, ours.geometry(span.mode))
    ours.prepare(batch)
    metadata = StepMetadata(((0, batch, ours.of(span.mode)),), made.step.seq_lens)
    made.step.seq_lens.copy_(lens)
    DraftmarkBuilder.update_draft_decode_metadata(SimpleNamespace(), metadata)
    one, cache = ours.of(span.mode)[problem.shape], kv_cache(made.pages, problem.shape.num_kv_heads, None, None)
    out = torch.full_like(made.q, float("nan"))
    one.write_kv(made.k, made.v, cache, batch)
    one.attend(made.q, cache, batch, out)
    assert (out.double() - made.wanted).abs().max() < 2e-5


def test_the_backends_bytes_are_held_while_vllm_measures() -> None:
    """As many as the buffers of both geometries have, once for each shape of layer, until a builder frees them."""
    problem = random_problem(0)
    made, device = served(problem).any, torch.device("meta")
    nbytes = arena_bytes(load("reference"), made)
    assert nbytes == sum(one.nbytes for geometry in made.each() for one in load("reference").buffers(geometry)) > 0
    try:
        for _ in range(2):
            reservation.hold(problem.shape, nbytes, device)
        reservation.hold(replace(problem.shape, window_left=3), nbytes, device)
        assert [one.nbytes for one in reservation._held.values()] == [nbytes, nbytes]
    finally:
        reservation.release()
    assert not reservation._held
