"""Every family with recurrent state decodes to transformers' greedy text, with chains and trees of drafts.

`core/speculative/tests/states` tests all settings of the loop on four of these families.
"""

from __future__ import annotations

import random

import pytest
import torch

from core.speculative.tests.known import VOCAB, Oracle
from draftmark_speculative import EngineConfig, generate
from draftmark_speculative.models.tiny import tiny_model
from draftmark_speculative.models.tiny_hybrids import HYBRIDS

COUNT = 16
SHAPES = ((1, 5), (3, 7))
"""Shapes of draft trees: topk and nodes."""


def _prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in (1, 23, 9)]


def _own_text(hf: torch.nn.Module, prompt: list[int]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("number", range(len(HYBRIDS)), ids=list(HYBRIDS))
def test_every_family_gives_transformers_text(number: int) -> None:
    """Right and wrong drafts, prompts in chunks, and few pages give transformers' own text in float32."""
    family = list(HYBRIDS)[number]
    model, prompts = tiny_model(family, vocab_size=VOCAB), _prompts(number)
    texts = tuple(_own_text(model.hf, prompt) for prompt in prompts)
    config = EngineConfig(
        speculate=Oracle(*SHAPES[number % 2], texts, seed=number),
        page_size=4,
        max_num_reqs=2,
        max_context_len=48,
        max_extend_tokens=7,
        num_pages=16 if number % 3 else None,
        graph=number % 2 == 0,
        capture_batch_sizes=(2,) if number % 2 == 0 else (),
        guard=True,
    )
    outs, engine = generate(model, prompts, COUNT, config)
    assert tuple(out.tokens for out in outs) == texts
    assert engine.statistics.mean_accepted > 1.3, "the test needs accepted drafts"
