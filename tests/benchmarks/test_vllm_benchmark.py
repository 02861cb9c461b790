"""What of the benchmark of vLLM needs neither vLLM nor a device: its plan, its shared memory, its judge of texts."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch

from benchmarks.vllm.engines import Engine
from benchmarks.vllm.equality import compare
from benchmarks.vllm.judged import judge
from benchmarks.vllm.memory import Memory, make
from benchmarks.vllm.throughput import Case, medians

PLAN = Path(__file__).parents[2] / "benchmarks" / "vllm" / "h200-plan.json"


def test_the_plan_is_of_engines_and_cases() -> None:
    """Every entry has fields that there are, and each engine that shares memory says how much KV it has."""
    plan = json.loads(PLAN.read_text())
    engines = [Engine(**one) for one in plan["throughput"] + plan["equality"]]
    cases = [Case(**one) for phase in plan["cases"].values() for one in phase]
    assert len({(one.backend, one.page_size, one.drafts) for one in engines[:10]}) == 10
    assert all(one.kv_bytes for one in engines)
    assert {one.name for one in cases} >= {"1x1k", "64x1k", "256x1k", "32x8k", "1x32k", "64x1k-uneven"}


def memory() -> Memory:
    """A small one."""
    weights, kv = make(4096, 8192, "cpu")
    return Memory(weights, kv, threading.Lock())


def test_two_models_have_the_same_weights() -> None:
    """Matrices are views of the shared tensor, one behind the other; norms are ones of the model's own."""
    held = memory()
    models = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)).bfloat16() for _ in range(2)]
    for model in models:
        Memory(held.weights, held.kv, held.lock).adopt(model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (one.data_ptr() == other.data_ptr()) is (one.dim() == 2)
        assert one.dim() == 2 or bool((one == 1).all())
    first, second = models[0][0].weight, models[0][1].weight
    assert second.data_ptr() >= first.data_ptr() + 2 * first.numel() and not torch.equal(first.T, second)


def test_kv_lies_in_the_shared_tensor_within_the_block_alone() -> None:
    """What vLLM asks for as bytes is a piece of it; other zeros are zeros."""
    held = memory()
    with held.pages():
        one, other = (torch.zeros(1024, dtype=torch.int8, device="cpu") for _ in range(2))
        rest = torch.zeros(4)
    assert one.data_ptr() == held.kv.data_ptr() and other.data_ptr() == one.data_ptr() + 1024
    assert not rest.any() and bool(one.any())
    assert not torch.zeros(1024, dtype=torch.int8).any()
    with held.pages(), pytest.raises(ValueError, match="the shared KV has 8192 bytes"):
        torch.zeros(8193, dtype=torch.int8, device="cpu")


def test_the_median_of_repetitions_counts() -> None:
    """And every one of them is kept."""
    rows = [{"case": "1x1k", "tokens_per_s": speed} for speed in (3.0, 1.0, 2.0)]
    assert medians(rows) == {"case": "1x1k", "tokens_per_s": 2.0, "all": [3.0, 1.0, 2.0]}


def test_texts_part_where_they_first_differ() -> None:
    """By the index of the token."""
    assert compare([[1, 2, 3], [4, 5]], [[1, 2, 9], [4, 5]]) == {"texts": 2, "equal": 1, "part_at": [2]}


def test_a_text_that_is_not_the_models_is_found() -> None:
    """In bfloat16 a token far below the best is wrong, whatever the first engine said; the model's own text is not."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftmark_speculative.models import wrap_model

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    )
    hf = LlamaForCausalLM(config).bfloat16().eval()
    prompt = [3, 4, 5, 6]
    right = hf.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :].tolist()
    model = wrap_model(hf)
    row = {"backend": "CUSTOM", "dtype": "bfloat16", "texts": 1, "part_at": []}
    good = judge({**row, "tokens": [right]}, model, [prompt], [right])
    assert (good["equal"], good["wrong_texts"], good["tokens"]) == (1, [], 6)
    with torch.inference_mode():
        worst = int(hf(torch.tensor([prompt])).logits[0, -1].argmin())
    bad = judge({**row, "tokens": [[worst, *right[1:]]]}, model, [prompt], [right])
    assert (bad["equal"], bad["wrong_texts"]) == (0, [0])
