"""Handmade steps, run as the builder and the layers run them, against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftmark import BatchError, Form, Mode
from draftmark_engines import EngineError
from draftmark_vllm.checking import check_batch
from draftmark_vllm.pages import kv_cache
from draftmark_vllm.spans import spans
from draftmark_vllm.step import StepBuffers, refresh
from engines.vllm.tests.handmade import (
    MAX_REQS,
    MAX_TOKENS,
    Made,
    Problem,
    Request,
    apart,
    attention,
    random_problem,
    served,
)

DECODES = (Request(17, 1), Request(0, 1), Request(95, 1))


def buffers() -> StepBuffers:
    """Of every problem."""
    return StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"))


def assert_right(problem: Problem, backend: str = "reference", tolerance: float = 2e-5) -> None:
    """Every live row is what dense attention says, and every row's KV lies where vLLM wanted it."""
    made = Made(problem)
    found = attention(made, served(problem, backend), buffers())
    worst = (found.double() - made.wanted).abs().max().item()
    assert worst < tolerance, f"{worst} on\n{problem}"
    by_token = made.pages.transpose(1, 2).flatten(0, 1)
    for row, slot in enumerate(made.step.slots.tolist()):
        if slot >= 0:
            assert torch.equal(by_token[slot], torch.cat([made.k[row], made.v[row]])), f"row {row} of\n{problem}"


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_steps_of_any_kind_match_dense_attention(first: int) -> None:
    """Decodes, verifies, uneven rows, chunks, mixes, padded captures, windows, caps, unstored rows, loose bounds."""
    for seed in range(first, first + 50):
        assert_right(random_problem(seed))


@pytest.mark.parametrize("backend", ["reference", "cuda_triton"])
def test_layers_with_sinks_match_dense_attention(backend: str) -> None:
    """Steps of any kind, each query head with a sink, under windows and caps too."""
    if backend == "cuda_triton":
        pytest.importorskip("triton")
    for seed in range(30 if backend == "reference" else 5):
        assert_right(random_problem(seed, sinks=True, head_dim=32), backend)


@pytest.mark.parametrize("seed", range(60))
def test_a_backend_may_take_nothing_of_vllms_own(seed: int) -> None:
    """Its table has the core's width, it works slots out itself, and K lies apart from V: the same attention, and every
    row's KV where vLLM wanted it. With drafts it takes vLLM's slots."""
    problem = random_problem(seed)
    requests = tuple(replace(one, unstored=()) for one in problem.requests)
    problem = replace(problem, requests=requests, surplus=0, padding=0)
    forms = (Form.ENGINE_SLOTS,) if problem.verify_rows > 1 else ()
    made, ours = Made(problem), served(problem, forms=forms)
    geometry, heads = ours.any.few, problem.shape.num_kv_heads
    assert geometry.forms == forms
    pages = apart(made.pages, heads)
    cache = kv_cache(pages, heads, None, None)
    assert cache.k.is_contiguous() and cache.v.is_contiguous()
    held = StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"), geometry.max_pages_per_req)
    for span in spans(made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        of_span = ours.geometry(span.mode)
        check_batch(held.forward(made.step, span, of_span), of_span, made.step.slots[rows])
    found = attention(made, ours, held, cache)
    worst = (found.double() - made.wanted).abs().max().item()
    assert worst < 2e-5, f"{worst} on\n{problem}"
    for row, slot in enumerate(made.step.slots.tolist()):
        assert torch.equal(cache.k.flatten(0, 1)[slot], made.k[row]), f"row {row} of\n{problem}"
        assert torch.equal(cache.v.flatten(0, 1)[slot], made.v[row]), f"row {row} of\n{problem}"


def test_drafts_need_a_backend_that_takes_vllms_slots() -> None:
    """Of drafts at the longest context vLLM stores nothing, which a page table does not say."""
    problem = next(one for one in map(random_problem, range(99)) if one.verify_rows > 1)
    with pytest.raises(EngineError, match="backend reference works KV slots out itself"):
        served(problem, forms=(Form.ENGINE_TABLE, Form.STRIDED_KV))


@pytest.mark.parametrize("seed", range(12))
def test_triton_kernels_take_vllms_pages(seed: int) -> None:
    """The kernels of cuda_triton, interpreted, over pages of K heads beside V heads."""
    pytest.importorskip("triton")
    assert_right(random_problem(seed, head_dim=32), "cuda_triton")


@pytest.mark.parametrize("seed", range(6))
def test_fp8_pages_are_read_and_written_with_their_scales(seed: int) -> None:
    """e4m3 KV, typed as bytes: within its rounding of what float32 gives, and far from what a forgotten scale would."""
    pytest.importorskip("triton")
    problem = random_problem(seed, head_dim=32, window_left=-1, logits_soft_cap=0.0)
    made, scales = Made(problem), (torch.tensor(0.25), torch.tensor(0.5))
    heads = problem.shape.num_kv_heads
    by_head = torch.cat([torch.full((heads,), float(one)) for one in scales])[:, None, None]
    pages = (made.pages / by_head).transpose(1, 2).contiguous().to(torch.float8_e4m3fn).view(torch.uint8)
    shape = replace(problem.shape, kv_dtype="float8_e4m3fn")
    ours = served(replace(problem, shape=shape), "cuda_triton")
    cache = kv_cache(pages.transpose(1, 2), heads, *scales)
    found = attention(made, ours, buffers(), cache, shape)
    worst = (found.double() - made.wanted).abs().max().item()
    assert worst < 0.25, f"{worst} on\n{problem}"
    typical = (found.double() - made.wanted).abs().mean() / made.wanted.abs().mean()
    assert typical < 0.06, f"{typical} on\n{problem}"


class Launches(TorchDispatchMode):
    """Counts what is launched: every operator but those that only make a view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run it."""
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_an_even_step_is_two_launches_and_one_view() -> None:
    """The host waits for each launch in every step: lengths less rows, none below zero, and vLLM's own tensors else."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=0, surplus=0)
    made, ours, held = Made(problem), served(problem), buffers()
    (span,) = spans(made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged)
    held.forward(made.step, span, ours.geometry(span.mode))
    with Launches() as launched:
        batch = held.forward(made.step, span, ours.geometry(span.mode))
    assert launched.names == ["aten::sub.out", "aten::clamp_"]
    assert batch.page_table is made.step.page_table and batch.slots is made.step.slots


def test_a_refresh_on_the_device_is_a_build() -> None:
    """What a draft graph records gives the lengths that a build for the next step would give."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=2, surplus=0)
    made, ours = Made(problem), served(problem)
    (span,) = spans(made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged)
    batch = buffers().forward(made.step, span, ours.geometry(span.mode))
    assert batch.mode is Mode.DECODE and batch.prefix_lens.tolist() == [17, 0, 95, 0, 0]
    refresh(batch, made.step.seq_lens.add_(torch.tensor([1, 1, 0, 0, 0], dtype=torch.int32)))
    assert batch.prefix_lens.tolist() == [18, 1, 95, 0, 0]


def test_a_captured_batch_keeps_its_addresses() -> None:
    """Two steps of one padded size lie in the same memory, whatever their lengths."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=1, surplus=0)
    ours, kept = served(problem), buffers()
    batches = []
    for requests in (DECODES, (Request(3, 1), Request(9, 1), Request(1, 1))):
        made = Made(replace(problem, requests=requests))
        (span,) = spans(made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged)
        batches.append(kept.forward(made.step, span, ours.geometry(span.mode)))
    first, second = batches
    assert first.prefix_lens.data_ptr() == second.prefix_lens.data_ptr()
    assert first.q_indptr.data_ptr() == second.q_indptr.data_ptr()
    assert second.prefix_lens.tolist() == [3, 9, 1, 0]


@pytest.mark.parametrize("seed", range(40))
def test_the_debug_mode_accepts_vllms_slots(seed: int) -> None:
    """Each batch is valid, and vLLM's slots are those that follow from the page table."""
    problem = random_problem(seed)
    made, ours, kept = Made(problem), served(problem), buffers()
    for span in spans(made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged):
        geometry = ours.geometry(span.mode)
        rows = slice(span.first_row, span.first_row + span.num_rows)
        check_batch(kept.forward(made.step, span, geometry), geometry, made.step.slots[rows])


def test_the_debug_mode_finds_a_wrong_slot() -> None:
    """One slot that is not the page table's is named with its request."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=0, surplus=0)
    made, ours = Made(problem), served(problem)
    made.step.slots[1] += 1
    (span,) = spans(made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged)
    geometry = ours.geometry(span.mode)
    with pytest.raises(EngineError, match="request 1 of a decode batch stores"):
        check_batch(buffers().forward(made.step, span, geometry), geometry, made.step.slots)


def test_the_debug_mode_lets_vllms_dummies_pass() -> None:
    """Before a capture vLLM runs requests of null pages, whose slots are whatever was there."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=0, surplus=0)
    made, ours = Made(problem), served(problem)
    made.step.page_table.zero_()
    made.step.slots.fill_(0)
    (span,) = spans(made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged)
    geometry = ours.geometry(span.mode)
    check_batch(buffers().forward(made.step, span, geometry), geometry, made.step.slots)


def test_the_debug_mode_finds_a_narrow_page_table() -> None:
    """A table that could not hold a request at the wall is refused."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=0, surplus=0)
    made, ours = Made(problem), served(problem)
    step = replace(made.step, page_table=made.step.page_table[:, :2])
    (span,) = spans(step.query_start_host, step.num_rows, problem.verify_rows, ours.any.ragged)
    geometry = ours.geometry(span.mode)
    with pytest.raises(BatchError, match="page_table"):
        check_batch(buffers().forward(step, span, geometry), geometry, step.slots)


def test_a_request_may_read_pages_that_another_one_fills_in_the_same_step() -> None:
    """All rows are stored before any is attended: prefix caching hands out pages when they are scheduled."""
    problem = Problem(random_problem(0, page_size=16, window_left=-1).shape, (Request(16, 1), Request(0, 20)), 1)
    made, ours = Made(problem), served(problem)
    # Request 0, which decodes, has the first page of request 1, which fills it now.
    made.step.page_table[0, 0] = made.step.page_table[1, 0]
    made.history[0][:, :16] = made.history[1][:, :16]
    wanted = made._answer()
    assert torch.allclose(attention(made, ours, buffers()).double(), wanted, atol=2e-5)
