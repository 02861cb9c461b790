"""A whole Hugging Face model forward in a recorded graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftmark_reference.graphs import RecordedGraph

transformers = pytest.importorskip("transformers")


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_llama_decodes_in_replays_like_eager(mode: Callable[[], Any]) -> None:
    """Greedy decoding over a static window of tokens gives eager mode's logits bit for bit in every replay."""
    model, length = tiny_llama(), 12
    tokens = torch.zeros(2, length, dtype=torch.int64)
    column = torch.zeros(1, dtype=torch.int64)
    positions = torch.arange(length).expand(2, -1).contiguous()
    mask = torch.full((2, 1, length, length), -torch.inf).triu(1)

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        newest = logits.index_select(1, column).argmax(-1)
        tokens.index_copy_(1, column.add_(1), newest)
        return logits

    with mode():
        graph = RecordedGraph(step)
        assert not tokens.any() and not column.any()
        for _ in range(length - 1):
            before = tokens.clone()
            graph.replay()
            after, moved = tokens.clone(), column.clone()
            tokens.copy_(before)
            column.sub_(1)
            expected = step()
            assert torch.equal(graph.outputs, expected)
            assert torch.equal(tokens, after) and torch.equal(column, moved)
    assert len(set(tokens.flatten().tolist())) > 4
