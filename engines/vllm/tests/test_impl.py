"""Tests of attributes that vLLM sets after it has created a layer: its scale and linked KV. Needs vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from draftmark import AttentionShape
from draftmark_vllm.impl import DraftmarkImpl
from draftmark_vllm.pages import kv_cache, stores_in_one_launch
from draftmark_vllm.reservation import RESERVATION

SHAPE = AttentionShape(4, 2, 32, 16, "float32", "float32", softmax_scale=0.25)
ROWS = torch.ones(3, 4, 32)


def calls_of_the_backend(scale: float, reads_from: str | None = None) -> dict[str, Any]:
    """Run a layer, and return its arguments: keys of `write_kv` and queries of `attend`, by method name."""
    calls: dict[str, Any] = {}
    backend = SimpleNamespace(
        write_kv=lambda k, *rest: calls.update(write_kv=k), attend=lambda q, *rest: calls.update(attend=q)
    )
    layer = SimpleNamespace(kv_sharing_target_layer_name=reads_from)
    made = SimpleNamespace(scale=scale, _shape=SHAPE, _view=lambda layer, pages: None)
    step = SimpleNamespace(parts=((0, SimpleNamespace(num_rows=3), {SHAPE: backend}),))
    DraftmarkImpl.forward(made, layer, ROWS, ROWS, ROWS, ROWS, step, ROWS.clone())
    return calls


@pytest.mark.parametrize(("scale", "factor"), [(0.25, 1.0), (0.5, 2.0)])
def test_scale_set_after_creation_is_applied(scale: float, factor: float) -> None:
    """The layer applies a softmax scale that is set after its creation, as transformers' models do up to vLLM 0.29."""
    assert torch.equal(calls_of_the_backend(scale)["attend"], factor * ROWS)


def test_layer_linked_to_other_kv_stores_none() -> None:
    """A layer that reads another layer's KV stores no KV. In Gemma 4's assistant its own keys are invalid or absent."""
    assert set(calls_of_the_backend(0.25)) == {"write_kv", "attend"}
    assert set(calls_of_the_backend(0.25, "model.layers.2.self_attn.attn")) == {"attend"}


def test_only_the_first_forward_without_metadata_reserves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures graphs by forwards without metadata; those cost no sizing and take no memory."""
    asked: list[str] = []

    def geometries(dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        asked.append(device)
        return None, SHAPE, None

    monkeypatch.setattr("draftmark_vllm.impl.arena_bytes", lambda *_: 64)
    made = SimpleNamespace(_reserved=False, _geometries=geometries)
    made._reserve = lambda query: DraftmarkImpl._reserve(made, query)
    rows = torch.empty(3, 4, 32, device="meta")
    DraftmarkImpl.forward(made, None, rows, rows, rows, rows, None, torch.empty_like(rows))
    RESERVATION.release()
    DraftmarkImpl.forward(made, None, rows, rows, rows, rows, None, torch.empty_like(rows))
    assert asked == ["meta"] and not RESERVATION.held


def test_a_new_layer_has_its_kernels_compiled_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM creates layers before it loads and compiles the model. Kernels compile at the same time."""
    begun: list[tuple[Any, ...]] = []
    made = SimpleNamespace(each=lambda: ("decode and verify", "extend"))
    monkeypatch.setattr("draftmark_vllm.impl.get_current_vllm_config", lambda: None)
    monkeypatch.setattr("draftmark_vllm.impl.current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr("draftmark_vllm.impl.EARLY_KERNELS", SimpleNamespace(begin=lambda *given: begun.append(given)))
    monkeypatch.setattr(DraftmarkImpl, "_geometries", lambda impl, dtype, device: ("backend", SHAPE, made))
    DraftmarkImpl(4, 32, 0.25, 2)
    assert begun == [("backend", ("decode and verify", "extend"), "cuda")]


def test_rows_without_conversion_are_stored_by_vllms_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a block drafter's context takes one launch a layer. The kernel gets views that it can write in place."""
    from vllm import _custom_ops

    pages = torch.zeros(3, 16, 4, 32).transpose(1, 2)
    cache, slots, calls = kv_cache(pages, 2, None, None), torch.tensor([17, -1, 47]), []
    monkeypatch.setattr("draftmark_vllm.impl.stores_in_one_launch", lambda *_: True)
    monkeypatch.setattr(_custom_ops, "reshape_and_cache_flash", lambda *given: calls.append(given))
    layer = SimpleNamespace(_k_scale=torch.ones(()), _v_scale=torch.ones(()))
    key = torch.ones(3, 2, 32)
    made = SimpleNamespace(_view=lambda layer, pages: cache)
    DraftmarkImpl.do_kv_cache_update(made, layer, key, 2 * key, pages, slots)
    ((k, v, k_pages, v_pages, at, dtype, *scales),) = calls
    assert k is key and bool((v == 2).all()) and at is slots and dtype == "auto"
    assert scales[0] is layer._k_scale and scales[1] is layer._v_scale
    assert k_pages is cache.k and v_pages is cache.v
    # The kernel takes one stride of pages for both, and copies a token's heads at once if they are contiguous.
    assert k_pages.stride() == v_pages.stride() == (16 * 4 * 32, 4 * 32, 32, 1)


def test_rows_on_a_cpu_and_fp8_rows_are_stored_by_torch() -> None:
    """vLLM's kernel is not used on a CPU, which may lack it, nor for rows that are converted to e4m3."""
    cache = kv_cache(torch.zeros(3, 16, 4, 32).transpose(1, 2), 2, None, None)
    assert not stores_in_one_launch(cache, torch.ones(3, 2, 32))
    gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert not stores_in_one_launch(cache, gpu)
    assert stores_in_one_launch(cache, SimpleNamespace(is_cuda=True, dtype=torch.float32))
