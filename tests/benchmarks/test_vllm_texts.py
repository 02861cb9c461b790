"""Tests of vLLM's benchmark: texts are compared, and judged by a float model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.vllm import judged
from benchmarks.vllm.equality import compare
from benchmarks.vllm.judged import judge


def test_texts_part_at_the_first_difference() -> None:
    """The comparison of two texts has the index of the first token that differs."""
    assert compare([[1, 2, 3], [4, 5]], [[1, 2, 9], [4, 5]]) == {"texts": 2, "equal": 1, "part_at": [2]}


def test_text_that_is_not_the_models_is_found() -> None:
    """In bfloat16, a token far below the model's best one is a wrong text; the model's own text is right."""
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


def test_e4m3_texts_are_judged_with_an_e4m3_cache(tmp_path: Path) -> None:
    """A text made with an e4m3 cache is judged by a model that rounds K and V, and compared with such texts only."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=16
    )
    hf = LlamaForCausalLM(config).bfloat16().eval()
    for layer in hf.model.layers:  # larger values, so that e4m3's rounding changes tokens
        layer.self_attn.v_proj.weight.data *= 30
    hf.save_pretrained(tmp_path)
    prompts = [[n, n + 1, n + 2, n + 3] for n in range(8)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))

    def texts() -> list[list[int]]:
        batch = torch.tensor(prompts)
        return hf.generate(batch, max_new_tokens=24, do_sample=False, use_cache=False)[:, 4:].tolist()

    plain = {"backend": "CUSTOM", "dtype": "bfloat16", "part_at": [], "tokens": texts()}
    one = hf(torch.tensor([[7]])).logits
    judged.read_back(hf, torch.float8_e4m3fn)
    rounded = {**plain, "kv_dtype": "fp8", "tokens": texts()}
    with torch.inference_mode():
        assert not torch.equal(hf(torch.tensor([[7]])).logits, one)
        # A row that sees one token returns that token's V, so rounding V here gives the output of an e4m3 cache.
        for layer in hf.model.layers:
            layer.self_attn.v_proj.register_forward_hook(lambda _, __, v: v.to(torch.float8_e4m3fn).to(v.dtype))
        hf.set_attn_implementation("eager")
        expected = hf(torch.tensor([[7]])).logits
        judged.read_back(hf, torch.float8_e4m3fn)
        assert torch.equal(hf(torch.tensor([[7]])).logits, expected)
    assert plain["tokens"] != rounded["tokens"]
    right = judged.judge_all([plain, rounded], tmp_path)
    assert [(row["equal"], row["wrong_texts"]) for row in right] == [(8, []), (8, [])]
    (other,) = judged.judge_all([{**rounded, "tokens": plain["tokens"]}], tmp_path)
    assert other["furthest_below_best"] > right[1]["furthest_below_best"]


def test_read_back_rounds_keys_and_values() -> None:
    """The model that judges e4m3 texts rounds keys and values to e4m3, and leaves queries as they are."""
    pytest.importorskip("transformers")
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    hf = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1))
    judged.read_back(hf, torch.float8_e4m3fn)
    attend = AttentionInterface()[hf.config._attn_implementation]
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    found = attend(hf.model.layers[0].self_attn, q, k, v, None)[0].transpose(1, 2)

    def expected(rounds: str) -> torch.Tensor:
        named = zip("qkv", (q, k, v), strict=True)
        read = (x.to(torch.float8_e4m3fn).float() if name in rounds else x for name, x in named)
        return torch.nn.functional.scaled_dot_product_attention(*read, is_causal=True)

    assert torch.equal(found, expected("kv"))
    assert not any(torch.equal(found, expected(other)) for other in ("", "k", "v", "qkv"))


def test_sampled_texts_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sampled texts are compared with the first row of equal temperature; greedy texts are judged by the model."""
    (tmp_path / "prompts.json").write_text("[[1], [2]]")
    monkeypatch.setattr("draftmark_speculative.models.load_model", lambda folder, dtype: None)
    monkeypatch.setattr(judged, "judge", lambda row, *_: {**row, "wrong_texts": []})
    usual = {"backend": "CUSTOM", "dtype": "float32", "part_at": []}
    rows = [
        {**usual, "tokens": [[1, 2], [3]]},
        {**usual, "temperature": 1.0, "tokens": [[1, 2], [3]]},
        {**usual, "temperature": 1.0, "tokens": [[1, 2], [4]]},
        {**usual, "temperature": 0.5, "tokens": [[1, 5], [4]]},
    ]
    found = judged.judge_all(rows, tmp_path)
    assert [(one.get("equal"), one["wrong_texts"]) for one in found] == [(None, []), (2, []), (1, [1]), (2, [])]
    assert not any("tokens" in one and isinstance(one["tokens"], list) for one in found[1:])
