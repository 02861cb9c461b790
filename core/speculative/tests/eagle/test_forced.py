"""Forced acceptance, which the benchmarks use: accepted lengths follow a profile of probabilities by depth."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.decode.end_to_end.forced import ForcedAcceptance
from draftmark import RequestError
from draftmark_speculative import Eagle, Engine, EngineConfig, HostKind, decode

PROFILE = (0.9, 0.8, 0.7)


def accepted(make_model, random_head, prompts, shape, profile, **more):
    """Return the mean tokens per request and round, with random drafts and acceptance forced to `profile`."""
    model, speculate = make_model("llama"), Eagle(random_head(), *shape)
    config = EngineConfig(speculate=speculate, max_num_reqs=8, max_context_len=256, **more)
    wrap = partial(ForcedAcceptance, profile=profile, seed=0, device=model.device) if profile else None
    engine = Engine(model, config, wrap_tree_ops=wrap)
    decode(engine, prompts(8, 20), 121)  # of 121 tokens a request, prefill gives one
    return engine.statistics.mean_accepted


@pytest.mark.parametrize("shape", [(1, 4, 5), (4, 4, 16)])
def test_accepted_length_equals_the_profile(make_model, random_head, prompts, shape):
    """The mean accepted length follows the profile p: 1 + p0 + p0·p1 + p0·p1·p2 = 3.124 tokens a round.

    The tolerance is 0.15. A tree may give less, because its likeliest path may be short.
    """
    late = {"overlap": True, "host_lengths": HostKind.UPPER_BOUND}
    length = accepted(make_model, random_head, prompts, shape, PROFILE, graph=True, **late)
    assert 3.124 - (0.15 if shape[0] == 1 else 1.2) < length < 3.124 + 0.15


def test_profile_of_ones_and_no_profile(make_model, random_head, prompts):
    """With an acceptance profile of ones the whole chain is accepted; without a profile, almost no random draft is."""
    assert accepted(make_model, random_head, prompts, (1, 4, 5), (1.0,) * 4) == 5
    assert accepted(make_model, random_head, prompts, (1, 4, 5), ()) < 1.1


def test_invalid_profile_is_rejected(make_model, random_head, prompts):
    """An acceptance profile with a probability above 1 raises an error that names the profile."""
    with pytest.raises(RequestError, match=r"the profile is \(0\.5, 1\.5\)"):
        accepted(make_model, random_head, prompts, (1, 4, 5), (0.5, 1.5))
