"""Tests of steps, run as the builder and the layers run them, against dense attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftmark import BatchError, Form, Mode
from draftmark_engines import EngineError
from draftmark_vllm.batch_runs import split_decodes_prefills
from draftmark_vllm.pages import kv_cache
from draftmark_vllm.step import StepBuffers, check_batch, refresh
from engines.vllm.tests.handmade import (
    MAX_REQS,
    MAX_TOKENS,
    Problem,
    Request,
    StepData,
    attention,
    bound_backends,
    random_problem,
    separate_halves,
)

DECODES = (Request(17, 1), Request(0, 1), Request(95, 1))


def buffers() -> StepBuffers:
    """Return static buffers that are large enough for every problem."""
    return StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"))


def assert_right(problem: Problem, backend: str = "reference", tolerance: float = 2e-5) -> None:
    """Check that live rows equal dense attention, and that each row's KV is at its slot."""
    made = StepData(problem)
    found = attention(made, bound_backends(problem, backend), buffers())
    worst = (found.double() - made.wanted).abs().max().item()
    assert worst < tolerance, f"{worst} on\n{problem}"
    by_token = made.pages.transpose(1, 2).flatten(0, 1)
    for row, slot in enumerate(made.step.slots.tolist()):
        if slot >= 0:
            assert torch.equal(by_token[slot], torch.cat([made.k[row], made.v[row]])), f"row {row} of\n{problem}"


@pytest.mark.parametrize(
    "first", [one if one < 150 else pytest.param(one, marks=pytest.mark.slow) for one in range(0, 400, 50)]
)
def test_steps_of_any_kind_match_dense_attention(first: int) -> None:
    """Attention is right for steps of any kind: mixes, padding, windows, caps, unstored rows and loose bounds."""
    for seed in range(first, first + 50):
        assert_right(random_problem(seed))


@pytest.mark.parametrize("backend", ["reference", "cuda_triton"])
def test_layers_with_sinks_match_dense_attention(backend: str) -> None:
    """Attention is right if each query head has a sink, in steps of any kind, with and without windows and caps."""
    if backend == "cuda_triton":
        pytest.importorskip("triton")
    for seed in range(30 if backend == "reference" else 5):
        assert_right(random_problem(seed, sinks=True, head_dim=32), backend)


@pytest.mark.parametrize("seed", range(60))
def test_backend_without_engine_forms_is_served(seed: int) -> None:
    """A backend that accepts none of vLLM's input formats gives right outputs, and stores KV at vLLM's slots.

    The page table has draftmark's width, the backend derives slots itself, and K and V are separate. With drafts the
    backend takes vLLM's slots.
    """
    problem = random_problem(seed)
    requests = tuple(replace(one, unstored=()) for one in problem.requests)
    problem = replace(problem, requests=requests, surplus=0, padding=0)
    forms = (Form.ENGINE_SLOTS,) if problem.verify_rows > 1 else ()
    made, ours = StepData(problem), bound_backends(problem, forms=forms)
    geometry, heads = ours.any.decode_verify, problem.shape.num_kv_heads
    assert geometry.forms == forms
    pages = separate_halves(made.pages, heads)
    cache = kv_cache(pages, heads, None, None)
    assert cache.k.is_contiguous() and cache.v.is_contiguous()
    held = StepBuffers(MAX_REQS, MAX_TOKENS, torch.device("cpu"), geometry.max_pages_per_req)
    for run in split_decodes_prefills(
        made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged
    ):
        rows = slice(run.first_row, run.first_row + run.num_rows)
        of_run = ours.geometry(run.mode)
        check_batch(held.forward(made.step, run, of_run), of_run, made.step.slots[rows])
    found = attention(made, ours, held, cache)
    worst = (found.double() - made.wanted).abs().max().item()
    assert worst < 2e-5, f"{worst} on\n{problem}"
    for row, slot in enumerate(made.step.slots.tolist()):
        assert torch.equal(cache.k.flatten(0, 1)[slot], made.k[row]), f"row {row} of\n{problem}"
        assert torch.equal(cache.v.flatten(0, 1)[slot], made.v[row]), f"row {row} of\n{problem}"


def test_drafts_need_engine_slots() -> None:
    """With drafts a backend must accept vLLM's slots: only they mark drafts past the longest context as not stored."""
    problem = next(one for one in map(random_problem, range(99)) if one.verify_rows > 1)
    with pytest.raises(EngineError, match="backend reference derives KV slots itself"):
        bound_backends(problem, forms=(Form.ENGINE_TABLE, Form.STRIDED_KV))


@pytest.mark.parametrize("seed", range(12))
def test_triton_kernels_read_vllms_pages(seed: int) -> None:
    """cuda_triton's kernels, in Triton's interpreter, read pages with K heads next to V heads."""
    pytest.importorskip("triton")
    assert_right(random_problem(seed, head_dim=32), "cuda_triton")


@pytest.mark.parametrize("seed", range(6))
def test_fp8_pages_are_read_and_written_with_their_scales(seed: int) -> None:
    """e4m3 KV in uint8 pages gives the float32 output up to rounding. A missing scale would exceed the tolerance."""
    pytest.importorskip("triton")
    problem = random_problem(seed, head_dim=32, window_left=-1, logits_soft_cap=0.0)
    made, scales = StepData(problem), (torch.tensor(0.25), torch.tensor(0.5))
    heads = problem.shape.num_kv_heads
    by_head = torch.cat([torch.full((heads,), float(one)) for one in scales])[:, None, None]
    pages = (made.pages / by_head).transpose(1, 2).contiguous().to(torch.float8_e4m3fn).view(torch.uint8)
    shape = replace(problem.shape, kv_dtype="float8_e4m3fn")
    ours = bound_backends(replace(problem, shape=shape), "cuda_triton")
    cache = kv_cache(pages.transpose(1, 2), heads, *scales)
    found = attention(made, ours, buffers(), cache, shape)
    worst = (found.double() - made.wanted).abs().max().item()
    assert worst < 0.25, f"{worst} on\n{problem}"
    typical = (found.double() - made.wanted).abs().mean() / made.wanted.abs().mean()
    assert typical < 0.06, f"{typical} on\n{problem}"


class Launches(TorchDispatchMode):
    """Records the name of every launched operator. Operators that only make a view are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and record its name unless it only makes a view."""
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_uniform_step_launches_two_operators() -> None:
    """A step of decodes launches only a subtraction and a clamp. It uses vLLM's page table and slots themselves."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=0, surplus=0)
    made, ours, held = StepData(problem), bound_backends(problem), buffers()
    (run,) = split_decodes_prefills(
        made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged
    )
    held.forward(made.step, run, ours.geometry(run.mode))
    with Launches() as launched:
        batch = held.forward(made.step, run, ours.geometry(run.mode))
    assert launched.names == ["aten::sub.out", "aten::clamp_"]
    assert batch.page_table is made.step.page_table and batch.slots is made.step.slots


def test_prompt_after_decodes_launches_three_operators() -> None:
    """Prompts of a mixed step launch one operator for their row offsets and two for their prefixes."""
    problem = replace(random_problem(0, page_size=16), requests=(*DECODES, Request(40, 30)), padding=0, surplus=0)
    made, ours, held = StepData(problem), bound_backends(problem), buffers()
    runs = split_decodes_prefills(made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged)
    assert runs[-1].mode is Mode.EXTEND and runs[-1].first_row
    with Launches() as launched:
        batch = held.forward(made.step, runs[-1], ours.geometry(Mode.EXTEND))
    assert launched.names == ["aten::sub.out", "aten::sub.out", "aten::add_.Tensor"]
    assert batch.prefix_lens.tolist() == [40] and batch.q_indptr.tolist() == [0, 30]


def test_device_refresh_equals_a_build() -> None:
    """`refresh` on the device computes the lengths that a new build for the next step computes."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=2, surplus=0)
    made, ours = StepData(problem), bound_backends(problem)
    (run,) = split_decodes_prefills(
        made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged
    )
    batch = buffers().forward(made.step, run, ours.geometry(run.mode))
    assert batch.mode is Mode.DECODE and batch.prefix_lens.tolist() == [17, 0, 95, 0, 0]
    refresh(batch, made.step.seq_lens.add_(torch.tensor([1, 1, 0, 0, 0], dtype=torch.int32)))
    assert batch.prefix_lens.tolist() == [18, 1, 95, 0, 0]


def test_a_captured_batch_keeps_its_addresses() -> None:
    """The batches of two steps with equal padded size have their tensors at the same addresses."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=1, surplus=0)
    ours, kept = bound_backends(problem), buffers()
    batches = []
    for requests in (DECODES, (Request(3, 1), Request(9, 1), Request(1, 1))):
        made = StepData(replace(problem, requests=requests))
        (run,) = split_decodes_prefills(
            made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged
        )
        batches.append(kept.forward(made.step, run, ours.geometry(run.mode)))
    first, second = batches
    assert first.prefix_lens.data_ptr() == second.prefix_lens.data_ptr()
    assert first.q_indptr.data_ptr() == second.q_indptr.data_ptr()
    assert second.prefix_lens.tolist() == [3, 9, 1, 0]


@pytest.mark.parametrize("seed", range(40))
def test_the_debug_mode_accepts_vllms_slots(seed: int) -> None:
    """The debug checks accept steps of any kind: vLLM's slots equal the slots derived from the page table."""
    problem = random_problem(seed)
    made, ours, kept = StepData(problem), bound_backends(problem), buffers()
    for run in split_decodes_prefills(
        made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged
    ):
        geometry = ours.geometry(run.mode)
        rows = slice(run.first_row, run.first_row + run.num_rows)
        check_batch(kept.forward(made.step, run, geometry), geometry, made.step.slots[rows])


def test_the_debug_mode_finds_a_wrong_slot() -> None:
    """If a slot contradicts the page table, the debug checks raise an error that names the request."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=0, surplus=0)
    made, ours = StepData(problem), bound_backends(problem)
    made.step.slots[1] += 1
    (run,) = split_decodes_prefills(
        made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged
    )
    geometry = ours.geometry(run.mode)
    with pytest.raises(EngineError, match="request 1 of a decode batch stores"):
        check_batch(buffers().forward(made.step, run, geometry), geometry, made.step.slots)


def test_the_debug_mode_accepts_dummy_requests() -> None:
    """The debug checks accept vLLM's dummy requests, which have null pages and arbitrary slots before a capture."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=0, surplus=0)
    made, ours = StepData(problem), bound_backends(problem)
    made.step.page_table.zero_()
    made.step.slots.fill_(0)
    (run,) = split_decodes_prefills(
        made.step.query_start_host, made.step.num_rows, problem.verify_rows, ours.any.ragged
    )
    geometry = ours.geometry(run.mode)
    check_batch(buffers().forward(made.step, run, geometry), geometry, made.step.slots)


def test_the_debug_mode_finds_a_narrow_page_table() -> None:
    """The debug checks reject a page table that is too narrow for a request of maximum length."""
    problem = replace(random_problem(0, page_size=16), requests=DECODES, padding=0, surplus=0)
    made, ours = StepData(problem), bound_backends(problem)
    step = replace(made.step, page_table=made.step.page_table[:, :2])
    (run,) = split_decodes_prefills(step.query_start_host, step.num_rows, problem.verify_rows, ours.any.ragged)
    geometry = ours.geometry(run.mode)
    with pytest.raises(BatchError, match="page_table"):
        check_batch(buffers().forward(step, run, geometry), geometry, step.slots)


def test_request_reads_pages_filled_in_the_same_step() -> None:
    """A request can read a page that another request fills in the same step, as prefix caching shares pages at once."""
    problem = Problem(random_problem(0, page_size=16, window_left=-1).shape, (Request(16, 1), Request(0, 20)), 1)
    made, ours = StepData(problem), bound_backends(problem)
    # Request 0, a decode, reads the first page of request 1, which fills that page in this step.
    made.step.page_table[0, 0] = made.step.page_table[1, 0]
    made.history[0][:, :16] = made.history[1][:, :16]
    wanted = made._answer()
    assert torch.allclose(attention(made, ours, buffers()).double(), wanted, atol=2e-5)
