"""Tests of the builder without an engine, and of the memory reserved while vLLM measures. Needs vLLM."""

from __future__ import annotations

import sys
from dataclasses import replace
from operator import sub
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionMetadataBuilder

from draftmark import Mode, load
from draftmark_engines import warn_missing_hook
from draftmark_vllm.batch_runs import block_run, split_decodes_prefills
from draftmark_vllm.bound_backends import BoundBackends, arena_bytes
from draftmark_vllm.builder import DraftmarkBuilder, StepMetadata, warn_missing_hooks
from draftmark_vllm.pages import kv_cache
from draftmark_vllm.reservation import RESERVATION
from draftmark_vllm.step import Step, StepBuffers
from engines.vllm.tests.handmade import MAX_REQS, MAX_TOKENS, Request, StepData, bound_backends, random_problem

DECODES = (Request(17, 1), Request(4, 1), Request(95, 1))


def builder_of(ours: BoundBackends, **of_a_step: Any) -> DraftmarkBuilder:
    """Return a builder without an engine. `of_a_step` sets private attributes, such as `_debug`."""
    cpu, made = torch.device("cpu"), object.__new__(DraftmarkBuilder)
    usual = {
        "_host_lengths": False,
        "_exact": False,
        "_debug": False,
        "_chunk": None,
        "_tails": None,
        "_adaptive": False,
        "_verify_rows": 1,
        "_ragged": ours.any.ragged,
    }
    own = {"_bound": ours, "_buffers": StepBuffers(MAX_REQS, MAX_TOKENS, cpu), "device": cpu}
    vars(made).update(usual | own | {"layer_names": [], "_num_layers": 0} | of_a_step)
    made._graphs = made._new_graphs()
    return made


def metadata_of(step: Step) -> SimpleNamespace:
    """Convert a step to an object with the fields of vLLM's `CommonAttentionMetadata`."""
    return SimpleNamespace(
        causal=True,
        query_start_loc=step.query_start,
        query_start_loc_cpu=torch.tensor(step.query_start_host),
        seq_lens=step.seq_lens,
        block_table_tensor=step.page_table,
        slot_mapping=step.slots,
        num_actual_tokens=step.num_rows,
        seq_lens_cpu_upper_bound=None,
        max_query_len=max(map(sub, step.query_start_host[1:], step.query_start_host)),
    )


def decodes(seed: int = 0) -> StepData:
    """Return a step of decodes, for which vLLM captures a full CUDA graph."""
    problem = replace(random_problem(seed, page_size=16), requests=DECODES, verify_rows=1)
    return StepData(replace(problem, padding=0, surplus=0, loose=None))


@pytest.mark.parametrize(("worker", "threshold"), [("auto", None), ("draftmark_vllm.trees.worker.TreeWorker", 8)])
def test_steps_are_sorted_only_for_trees(worker: str, threshold: int | None) -> None:
    """The builder makes runner V1 sort requests by row count for trees only. Chains are served in any order."""
    made = object.__new__(DraftmarkBuilder)
    made.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(worker_cls=worker, decode_context_parallel_size=1),
        speculative_config=SimpleNamespace(num_speculative_tokens=7, parallel_drafting=False),
    )
    made._require_decodes_first()
    assert made.reorder_batch_threshold == threshold


def test_hooks_that_vllm_lacks_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The builder warns of a method that the installed vLLM never calls, and of no other."""
    warn_missing_hook.cache_clear()
    warn_missing_hooks(AttentionMetadataBuilder)
    assert not caplog.records
    warn_missing_hooks(type("Older", (), {"build_for_cudagraph_capture": None}))
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "vLLM does not call Older.update_draft_decode_metadata" in record.message


def test_captured_step_is_prepared_by_a_replay() -> None:
    """After a capture the builder only replays the metadata graph, which reads the current step's lengths."""
    made = decodes()
    ours = bound_backends(made.problem)
    builder, metadata = builder_of(ours), metadata_of(made.step)
    captured = builder.build_for_cudagraph_capture(metadata)
    made.step.seq_lens.sub_(3)
    with patch.object(BoundBackends, "write", side_effect=AssertionError("launched one by one")):
        found = builder.build(0, metadata)
    ((first, batch, backends),) = found.parts
    assert first == 0 and backends is ours.decode_verify
    assert batch is captured.parts[0][1]
    assert batch.prefix_lens.tolist() == [one.prefix - 3 for one in DECODES]
    assert found.seq_lens is metadata.seq_lens


def test_step_without_a_graph_is_launched() -> None:
    """Before a capture, and for tensors at other addresses, no graph fits, so the builder launches each operator."""
    made = decodes()
    builder, metadata = builder_of(bound_backends(made.problem)), metadata_of(made.step)
    (one,), (other,) = builder.build(0, metadata).parts, builder.build(0, metadata).parts
    assert one[1] is not other[1]
    builder.build_for_cudagraph_capture(metadata)
    metadata.seq_lens = metadata.seq_lens.clone() + 1
    ((_, batch, _),) = builder.build(0, metadata).parts
    assert batch.prefix_lens.tolist() == [one.prefix + 1 for one in DECODES]


@pytest.mark.parametrize(
    "more", [{"_host_lengths": True}, {"_debug": True}, {"_chunk": 64}, {"_tails": "trees"}], ids=str
)
def test_steps_with_host_inputs_are_never_replayed(more: dict[str, Any]) -> None:
    """Host lengths, debug checks, chunks and trees each disable the metadata graphs."""
    assert builder_of(bound_backends(random_problem(0)), **more)._graphs is None


@pytest.mark.parametrize("bounds", [True, False])
@pytest.mark.parametrize("may_join", [True, False])
def test_decodes_join_the_prompts_of_a_step(may_join: bool, bounds: bool) -> None:
    """A mixed step is one EXTEND part if its backend allows it and the host bounds its lengths, else two parts."""
    problem = replace(random_problem(0, page_size=16), verify_rows=1, padding=0, surplus=0, loose=None)
    made = StepData(replace(problem, requests=(*DECODES, Request(10, 30))))
    metadata = metadata_of(made.step)
    metadata.seq_lens_cpu_upper_bound = made.step.seq_lens.clone() if bounds else None
    found = builder_of(bound_backends(made.problem), _may_join=may_join).build(0, metadata)
    modes = [batch.mode for _, batch, _ in found.parts]
    assert modes == ([Mode.EXTEND] if may_join and bounds else [Mode.DECODE, Mode.EXTEND])
    cache, out = kv_cache(made.pages, problem.shape.num_kv_heads, None, None), torch.full_like(made.q, float("nan"))
    for call in ("write_kv", "attend"):
        for first, batch, backends in found.parts:
            one, rows = backends[problem.shape], slice(first, first + batch.num_rows)
            if call == "write_kv":
                one.write_kv(made.k[rows], made.v[rows], cache, batch)
            else:
                one.attend(made.q[rows], cache, batch, out[rows])
    assert (out.double() - made.wanted).abs().max() < 2e-5


@pytest.mark.parametrize("seed", range(8))
def test_draft_step_metadata_is_updated_on_the_device(seed: int) -> None:
    """`update_draft_decode_metadata` changes metadata that was built for shorter requests to this step's lengths.

    Attention then equals dense attention.
    """
    problem = replace(random_problem(seed, page_size=16), requests=DECODES, padding=0, surplus=0, loose=None)
    made, ours = StepData(problem), bound_backends(problem)
    (run,) = split_decodes_prefills(
        made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged
    )
    lens = made.step.seq_lens.clone()
    made.step.seq_lens.sub_(3)
    batch = StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu")).forward(made.step, run, ours.geometry(run.mode))
    ours.prepare(batch)
    metadata = StepMetadata(((0, batch, ours.of(run.mode)),), made.step.seq_lens)
    made.step.seq_lens.copy_(lens)
    DraftmarkBuilder.update_draft_decode_metadata(SimpleNamespace(), metadata)
    one, cache = ours.of(run.mode)[problem.shape], kv_cache(made.pages, problem.shape.num_kv_heads, None, None)
    out = torch.full_like(made.q, float("nan"))
    one.write_kv(made.k, made.v, cache, batch)
    one.attend(made.q, cache, batch, out)
    assert (out.double() - made.wanted).abs().max() < 2e-5


def test_block_metadata_is_updated_on_the_device() -> None:
    """A block drafter's graph updates its metadata too (vLLM 0.33): prefixes are vLLM's lengths without the block."""
    blocks = tuple(replace(one, rows=5) for one in DECODES)
    made = StepData(replace(random_problem(0, page_size=16), requests=blocks, verify_rows=5, padding=1, surplus=0))
    step, seen = replace(made.step, causal=False), []
    run = block_run((0, 5, 10, 15, 15), 20, 5)
    assert run is not None
    geometry = bound_backends(made.problem).geometry(Mode.VERIFY)
    batch = StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu")).forward(step, run, geometry)
    batch = replace(batch, page_table=batch.page_table.clone())  # as for a backend that reads a copy
    parts = ((0, batch, {made.problem.shape: SimpleNamespace(write_metadata=seen.append)}),)
    metadata = StepMetadata(parts, step.seq_lens, step.causal, step.page_table)
    step.page_table.add_(1)
    step.seq_lens.copy_(torch.tensor([one.prefix + 12 for one in blocks] + [0]))
    DraftmarkBuilder.update_draft_decode_metadata(SimpleNamespace(), metadata)
    assert batch.mode is Mode.DRAFT_BLOCK and seen == [batch]
    assert batch.prefix_lens.tolist() == [one.prefix + 7 for one in blocks] + [0]
    assert torch.equal(batch.page_table, step.page_table[:4])


def test_step_with_a_prompt_is_built_in_few_calls() -> None:
    """A mixed step takes at most 30 Python calls of the adapter, for which its first layer waits."""
    problem = replace(random_problem(0, page_size=16), requests=(*DECODES, Request(3, 40)), verify_rows=1)
    made = StepData(replace(problem, padding=0, surplus=0, loose=0))
    builder, metadata, calls = builder_of(bound_backends(made.problem), _may_join=True), metadata_of(made.step), []
    metadata.seq_lens_cpu_upper_bound = made.step.seq_lens

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("draftmark_vllm"):
            calls.append(frame.f_code.co_qualname)

    builder.build(0, metadata)
    sys.setprofile(note)
    try:
        ((_, batch, _),) = builder.build(0, metadata).parts
    finally:
        sys.setprofile(None)
    assert batch.mode is Mode.EXTEND and len(calls) <= 30, calls


def test_arena_bytes_are_reserved_during_measurement() -> None:
    """Each shape of layer reserves the buffers of both its geometries once. A builder's creation frees them."""
    problem = random_problem(0)
    made, device = bound_backends(problem).any, torch.device("meta")
    nbytes = arena_bytes(load("reference"), made)
    assert nbytes == sum(one.nbytes for geometry in made.each() for one in load("reference").buffers(geometry)) > 0
    try:
        for _ in range(2):
            RESERVATION.hold(problem.shape, nbytes, device)
        RESERVATION.hold(replace(problem.shape, window_left=3), nbytes, device)
        assert [one.nbytes for one in RESERVATION.held.values()] == [nbytes, nbytes]
    finally:
        RESERVATION.release()
    assert not RESERVATION.held
