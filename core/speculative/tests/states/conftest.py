"""Fixtures of the loop over models with recurrent state: tiny hybrids, their plain texts, and engines."""

from __future__ import annotations

from functools import cache

import pytest
import torch

COUNT, STRENGTH = 16, 0.01
SMALL = {"page_size": 4, "max_num_reqs": 3, "max_context_len": 80, "max_extend_tokens": 20, "guard": True}
DRAFTS = {
    "none": (None, (), False),
    "known chain": ("known", (1, 5), False),
    "known tree": ("known", (3, 7), False),
    "adaptive known tree": ("known", (3, 7), True),
    "chain": ("head", (1, 4, 5), False),
    "tree": ("head", (4, 3, 12), False),
    "adaptive tree": ("head", (4, 3, 12), True),
}
"""Drafting methods: source of the drafts, shape, and whether the device decides the rows (ragged rounds)."""


@cache
def _pair(family: str):
    from draftmark_speculative.eagle.tiny import tiny_pair

    return tiny_pair(STRENGTH, family=family)


@cache
def _hybrid(family: str):
    """Return a tiny model with strong layers: a wrong state changes the text at once."""
    from draftmark_speculative.models.tiny import tiny_model

    return tiny_model(family)


def model_of(family: str, way: str):
    """Return the model that a drafting method decodes: a head needs one that it can guess."""
    return _pair(family)[0] if DRAFTS[way][0] == "head" else _hybrid(family)


@cache
def plain_text(family: str, head: bool, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return transformers' own greedy continuation."""
    ids, model = torch.tensor([prompt]), (_pair(family)[0] if head else _hybrid(family)).hf
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.fixture(scope="session")
def engine_of(oracle, table):
    """Return a function (family, drafting method, texts, settings) → engine."""
    from draftmark_speculative import Adaptive, Eagle, Engine, EngineConfig

    def make(family, way, texts=(), **settings):
        source, shape, ragged = DRAFTS[way]
        drafts = {None: lambda: None, "head": lambda: Eagle(_pair(family)[1], *shape)}
        speculate = drafts.get(source, lambda: oracle(*shape, tuple(texts)))()
        if ragged:
            speculate = Adaptive(speculate, (4, 2 * shape[-1], 3 * shape[-1]), table(0.0), 0.01)
        sizes = {"capture_batch_sizes": (1, 3)} if settings.get("graph") else {}
        config = EngineConfig(**{**SMALL, **sizes, **settings}, speculate=speculate)
        return Engine(model_of(family, way), config)

    return make
