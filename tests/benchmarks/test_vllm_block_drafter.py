"""Tests of the small block drafter of the vLLM benchmark, and of the weights with which a random one is sure."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.vllm.block_drafter import DRAFTS, HIDDEN, READ, drafts, parameters, write
from benchmarks.vllm.confident import Verified, make_confident, measure_again, settle
from benchmarks.vllm.engines import Engine, block_head, head
from benchmarks.vllm.memorizer import SHAPE
from benchmarks.vllm.shapes import SHAPES
from benchmarks.vllm.throughput import Case, token_bytes

LENGTH, ANCHORS = 12, [[3, 7]]
LLAMA = Engine("Llama-3-8B-shape", "CUSTOM:cuda_triton", 16, drafts=7, drafter="dflash", acceptance=0.8)


def test_a_block_sees_the_features_before_it_and_all_its_rows() -> None:
    """A feature counts for the blocks after it. The first row of a block sees the last, so a block is not causal."""
    torch.manual_seed(0)
    weights = parameters(0, "cpu")
    features, block = torch.randn(1, LENGTH, len(READ) * HIDDEN), torch.randn(1, 2, 1 + DRAFTS, HIDDEN)
    anchors = torch.tensor(ANCHORS)
    with torch.no_grad():
        before = drafts(weights, features, block, anchors)
        assert before.shape == (1, 2, DRAFTS, HIDDEN)
        changed = features.clone()
        changed[0, 3:] += 1  # not before the first block
        after = drafts(weights, changed, block, anchors)
        assert torch.equal(after[0, 0], before[0, 0]) and not torch.allclose(after[0, 1], before[0, 1])
        last = block.clone()
        last[0, 0, -1] += 1
        after = drafts(weights, features, last, anchors)
        assert not torch.allclose(after[0, 0, 0], before[0, 0, 0]) and torch.equal(after[0, 1], before[0, 1])


def test_a_drafter_is_written_for_vllm(tmp_path: Path) -> None:
    """The folder has all tensors of the drafter in bfloat16, and a configuration with the target's sizes."""
    from safetensors.torch import load_file

    weights = parameters(1, "cpu")
    write(tmp_path / "head", weights)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert set(stored) == set(weights) and {one.dtype for one in stored.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["vocab_size"] == SHAPE["vocab_size"] and config["dflash_config"]["causal"] is False


def test_engines_of_a_block_drafter(tmp_path: Path) -> None:
    """Its head reads inner layers, its KV has five layers more, and the rows of adaptive verification have a name."""
    shape = SHAPES[LLAMA.shape]
    config = json.loads((head(tmp_path, LLAMA) / "config.json").read_text())
    assert head(tmp_path, LLAMA) == block_head(tmp_path, LLAMA)
    read = config["dflash_config"]["target_layer_ids"]
    assert len(set(read)) == config["num_hidden_layers"] == 5 and 0 < min(read) <= max(read) < 31
    assert token_bytes(LLAMA) * shape["num_hidden_layers"] == token_bytes(Engine(LLAMA.shape, "x", 16)) * 37
    adaptive = Engine(**vars(LLAMA) | {"adaptive": True})
    assert LLAMA.unusual == {"drafter": "dflash"} and adaptive.unusual == {"drafter": "dflash, adaptive"}
    config = adaptive._speculative(tmp_path, "CUSTOM")
    assert config["enable_adaptive_verification"] and config["attention_backend"] == "CUSTOM"
    assert "enable_adaptive_verification" not in LLAMA._speculative(tmp_path, "CUSTOM")
    assert Case(64, 1024, steps=4).asked_of(adaptive) and not Case(16, 1024, steps=4, uneven=True).asked_of(adaptive)


def test_a_random_head_becomes_sure() -> None:
    """Norms become ones; the output matrix, which target and drafter share, gets large numbers in its own memory."""
    target = torch.nn.Module()
    target.norm, target.lm_head = torch.nn.LayerNorm(64), torch.nn.Linear(64, 512, bias=False)
    target.norm.weight.data.fill_(1e-3)
    drafter = torch.nn.Module()
    drafter.lm_head, drafter.inner = target.lm_head, torch.nn.Linear(4, 4, bias=False)
    kept, at = drafter.inner.weight.clone(), target.lm_head.weight.data_ptr()
    make_confident(
        SimpleNamespace(model_runner=SimpleNamespace(model=target, speculator=SimpleNamespace(model=drafter)))
    )
    assert torch.equal(target.norm.weight, torch.ones(64)) and torch.equal(drafter.inner.weight, kept)
    assert target.lm_head.weight.data_ptr() == at and 0.14 < target.lm_head.weight.std().item() < 0.16


class Manager:
    """Stands in for vLLM's manager of adaptive verification: it verifies half of the scheduled drafts."""

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(max_num_batched_tokens=4)
        self.curves: list[list[tuple[int, float]]] = []

    def set_cost_curves(self, draft: list[tuple[int, float]], verify: list[tuple[int, float]]) -> None:
        """Keep the curves."""
        self.curves = [draft, verify]

    def get_num_tokens(self, rows: dict[str, int], drafts: dict[str, list[int]]) -> int:
        """Return the rows without half of the drafts."""
        return sum(rows.values()) - sum(map(len, drafts.values())) // 2


def test_verified_drafts_are_counted_and_a_row_can_have_a_cost() -> None:
    """`settle` counts drafts from then on, and replaces vLLM's costs: 1 for a step, and `row_cost` for each row."""
    manager = Manager()
    worker = SimpleNamespace(model_runner=SimpleNamespace(adaptive_verification=manager))
    llm = SimpleNamespace(collective_rpc=lambda work, args=(): [work(worker, *args)])
    engine = Engine(**vars(LLAMA) | {"adaptive": True, "row_cost": 0.5})
    settle(llm, engine)
    assert manager.curves == [[(1, 0.0)], [(1, 1.5), (2, 2.0), (3, 2.5), (4, 3.0)]]
    assert measure_again(llm, engine) == {} == Verified(llm, LLAMA).share()
    assert engine.unusual["row_cost"] == 0.5
    manager.get_num_tokens({"a": 8}, {"a": [1] * 7})
    verified = Verified(llm, engine)
    assert verified.share() == {}
    assert manager.get_num_tokens({"a": 8, "b": 5, "prompt": 30}, {"a": [1] * 7, "b": [1] * 4}) == 38
    assert verified.share() == {"verified": round(6 / 11, 3)}


def test_costs_stay_those_of_the_start_if_they_cannot_be_measured_again() -> None:
    """The benchmark reports the error, and the engine keeps the costs that vLLM measured at its start."""
    llm = SimpleNamespace(collective_rpc=lambda work: [work(SimpleNamespace(model_runner=runner))])
    runner = SimpleNamespace(adaptive_verification=Manager(), step_timing=SimpleNamespace())
    found = measure_again(llm, Engine(**vars(LLAMA) | {"adaptive": True}))
    assert found["costs"].startswith("AttributeError: ")
