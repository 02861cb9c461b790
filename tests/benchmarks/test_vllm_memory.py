"""Tests of vLLM's benchmark: weights and KV in memory that engines share."""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path

import pytest
import torch

from benchmarks.vllm import ranks
from benchmarks.vllm.engines import Engine
from benchmarks.vllm.fleet import _kv_dtype
from benchmarks.vllm.memory import HANDLES, Mapped, Memory, make
from benchmarks.vllm.plan import same
from benchmarks.vllm.throughput import Case, _row, token_bytes


def memory() -> Memory:
    """Return small shared tensors of weights and KV."""
    weights, kv = make(4096, 8192, "cpu")
    return Memory(weights, kv)


def test_two_models_have_equal_weights() -> None:
    """The matrices of both models are equal views of the shared tensor; each model has its own norms, set to ones."""
    held = memory()
    models = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)).bfloat16() for _ in range(2)]
    for model in models:
        Memory(held.weights, held.kv).adopt(model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (one.data_ptr() == other.data_ptr()) is (one.dim() == 2)
        assert one.dim() == 2 or bool((one == 1).all())
    first, second = models[0][0].weight, models[0][1].weight
    assert second.data_ptr() >= first.data_ptr() + 2 * first.numel() and not torch.equal(first.T, second)


def test_head_is_a_second_model() -> None:
    """A draft head's weights begin at the shared tensor's start; it has own output rows and a token map of zeros."""
    held = memory()
    model = torch.nn.Linear(8, 16, bias=False).bfloat16()
    one = torch.nn.Linear(8, 16, bias=False).bfloat16()
    one.draft_id_to_target_id = torch.nn.Parameter(torch.ones(16, dtype=torch.long), requires_grad=False)
    held.adopt(model)
    held.adopt(one)
    assert one.weight.data_ptr() == model.weight.data_ptr() and one.has_own_lm_head
    assert not one.draft_id_to_target_id.any() and not hasattr(model, "has_own_lm_head")


def test_matrices_use_the_shared_tensor_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `matrices()`, torch.empty returns shared memory for matrices of its dtype that are large and fit into it."""
    monkeypatch.setattr("benchmarks.vllm.memory.MATRIX", 64)
    held, ours = memory(), {"dtype": torch.bfloat16}
    there = held.weights.data_ptr()
    usual = torch.empty
    with held.matrices():
        assert torch.empty is usual, "torch's compiler would not recognise a replaced function"
        assert torch.empty(8, 16, **ours).data_ptr() == torch.empty((4, 32), **ours).data_ptr() == there
        assert torch.empty(8, 16, **ours).shape == (8, 16)
        others = torch.empty(128, **ours), torch.empty(2, 4, **ours), torch.empty(64, 128, **ours), torch.empty(8, 16)
        assert all(one.data_ptr() != there for one in others)
    assert torch.empty(8, 16, **ours).data_ptr() != there


def test_rank_maps_the_memory_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank maps its device's memory at the first use, after it has selected the device, and only once."""
    handles = [pickle.dumps((torch.full((4,), n), torch.zeros(1))) for n in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("the device was read too early"))
    mapped = Mapped(handles)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert mapped.memory().weights.tolist() == [1] * 4 and mapped.memory() is mapped.memory()


def test_kv_uses_the_shared_tensor_in_the_block() -> None:
    """In `pages()`, torch.zeros returns consecutive parts of the shared KV for int8, and zeros for other dtypes."""
    held = memory()
    with held.pages():
        one, other = (torch.zeros(1024, dtype=torch.int8, device="cpu") for _ in range(2))
        rest = torch.zeros(4)
    assert one.data_ptr() == held.kv.data_ptr() and other.data_ptr() == one.data_ptr() + 1024
    assert not rest.any() and bool(one.any())
    assert not torch.zeros(1024, dtype=torch.int8).any()
    with held.pages(), pytest.raises(ValueError, match="the shared KV has 8192 bytes"):
        torch.zeros(8193, dtype=torch.int8, device="cpu")


def test_pages_are_random_in_their_dtype() -> None:
    """KV pages hold random numbers of their own dtype; random bfloat16 bytes, read as e4m3, would often be NaN."""
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        _, pages = make(8, 8192, "cpu", kind)
        numbers = pages.view(kind).float()
        assert pages.numel() == 8192 and bool(numbers.isfinite().all()) and 0.9 < float(numbers.std()) < 1.1


def test_engines_that_share_pages_have_one_kv_dtype() -> None:
    """Engines that share KV pages but differ in KV dtype raise an error, because pages are random in one dtype."""
    narrow, wide, apart = (
        Engine("small-shape", "A", 16, kv_dtype=kind, shared=shared)
        for kind, shared in (("fp8", True), ("auto", True), ("auto", False))
    )
    assert _kv_dtype([narrow, apart]) == "fp8" and _kv_dtype([wide]) == "auto"
    with pytest.raises(ValueError, match="kv_dtype is auto and fp8; write a plan for each"):
        _kv_dtype([narrow, wide])


def test_row_names_a_kv_dtype_that_differs(tmp_path: Path) -> None:
    """An fp8 engine passes its KV dtype to vLLM, needs half the bytes per token, and has its own rows in the record."""
    usual, narrow = (Engine("small-shape", "A", 16, kv_dtype=kind) for kind in ("auto", "fp8"))
    assert narrow.arguments(tmp_path)["kv_cache_dtype"] == "fp8"
    assert "kv_cache_dtype" not in usual.arguments(tmp_path)
    assert token_bytes(usual) == 2 * token_bytes(narrow)
    case = Case(1, 1024, 4)
    row = _row(case, narrow, 0.0, 1.0, 2.0, 4, 4)
    assert row["kv_dtype"] == "fp8" and same(row, "decode", case, narrow) and not same(row, "decode", case, usual)


def test_restarted_rank_finds_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At import, a rank registers the shared memory from the file that an environment variable names."""
    kept, found = tmp_path / "handles", []
    kept.write_bytes(pickle.dumps([pickle.dumps((torch.ones(4), torch.zeros(1)))]))
    monkeypatch.setenv(HANDLES, str(kept))
    monkeypatch.setattr("benchmarks.vllm.memory.register", found.append)
    importlib.reload(ranks)
    assert found[0].memory().weights.tolist() == [1.0] * 4
