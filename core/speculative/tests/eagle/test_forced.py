"""Forced acceptance keeps what its profile says, and nothing of it remains when it is off."""

from __future__ import annotations

import pytest

from draftmark_speculative import Eagle, EngineConfig, HostKind, generate

PROFILE = (0.9, 0.8, 0.7)


def accepted(make_model, random_head, prompts, shape, **more):
    """Tokens per request and round with random drafts."""
    config = EngineConfig(
        speculate=Eagle(random_head(), *shape), max_num_reqs=8, max_context_len=256, **more,
    )  # fmt: skip
    _, engine = generate(make_model("llama"), prompts(8, 20), 200, config)
    return engine.statistics.mean_accepted


@pytest.mark.parametrize("shape", [(1, 4, 5), (4, 4, 16)])
def test_the_profile_is_the_accepted_length(make_model, random_head, prompts, shape):
    """1 + p0 + p0·p1 + p0·p1·p2 = 3.124 tokens a round, within 0.15, for a chain and (its tree being deep enough)
    a little less for a tree whose likeliest path may be short."""
    length = accepted(
        make_model, random_head, prompts, shape, forced_acceptance=PROFILE, graph=True, overlap=True,
        host_lengths=HostKind.UPPER_BOUND,
    )  # fmt: skip
    assert 3.124 - (0.15 if shape[0] == 1 else 1.2) < length < 3.124 + 0.15


def test_zero_and_one(make_model, random_head, prompts):
    """A profile of ones keeps the whole chain; without a profile random drafts are hardly ever kept."""
    assert accepted(make_model, random_head, prompts, (1, 4, 5), forced_acceptance=(1.0,) * 4) == 5
    assert accepted(make_model, random_head, prompts, (1, 4, 5)) < 1.1
