"""The builder's own methods, where they need no engine; needs vLLM. And the memory that is held while vLLM measures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from draftmark import load
from draftmark_vllm import reservation
from draftmark_vllm.builder import DraftmarkBuilder, StepMetadata
from draftmark_vllm.pages import kv_cache
from draftmark_vllm.served import arena_bytes
from draftmark_vllm.spans import spans
from draftmark_vllm.step import StepBuffers
from engines.vllm.tests.handmade import MAX_REQS, MAX_TOKENS, Made, Request, random_problem, served

DECODES = (Request(17, 1), Request(4, 1), Request(95, 1))


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
