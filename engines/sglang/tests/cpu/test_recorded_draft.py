"""Test of SGLang's draft rounds in a graph that is captured once and emulated on a CPU."""

from __future__ import annotations

import pytest
from recorded import recorded
from scheduler import generate, in_a_fork

PROMPTS = [[3, 5, 7, 9, 11, 13, 15], [2, 4, 6], [9] * 20, [10, 20, 30]]


@pytest.mark.parametrize(("topk", "nodes", "page_size"), [(1, 5, 1), (4, 12, 16)], ids=["chain", "tree"])
def test_replayed_round_equals_eager(topk: int, nodes: int, page_size: int, target: str, eagle: str) -> None:
    """Replayed draft rounds equal eager rounds while lengths grow and requests finish (sglang#26521, #26655)."""
    drafts = dict(
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=eagle,
        speculative_eagle_topk=topk,
        speculative_num_steps=4,
        speculative_num_draft_tokens=nodes,
    )
    served = dict(model_path=target, attention_backend="draftmark", page_size=page_size)
    made = in_a_fork(recorded, PROMPTS, 24, **served, **drafts)
    plain = in_a_fork(generate, PROMPTS, 24, model_path=target, attention_backend="torch_native")
    assert made["texts"] == plain["texts"]
    assert made["rounds"] > 5 and len(made["requests"]) > 1, made
    assert made["different"] == 0, made
