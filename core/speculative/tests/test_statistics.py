"""Statistics count only the tokens that requests got, also if a request ends inside an accepted path."""

from __future__ import annotations

import pytest

from draftmark_speculative import Eagle, EngineConfig, FinishReason, HostKind, generate

PROMPT = [1, 2, 3]
LATE = {"overlap": True, "host_lengths": HostKind.UPPER_BOUND}


def decoded(markov, count, stop=(), **more):
    """Decode one prompt with drafts that are always right; return its output and the engine's statistics."""
    model, head = markov(0.0)
    how = Eagle(head, topk=2, num_steps=4, num_draft_tokens=8)
    [output], engine = generate(
        model, [PROMPT], count, EngineConfig(speculate=how, max_context_len=64, **more), stop=stop
    )
    return output, engine.statistics


@pytest.mark.parametrize("more", [{}, {"graph": True}, LATE], ids=["eager", "graph", "overlap"])
@pytest.mark.parametrize(("count", "kept", "rounds"), [(2, 1, 1), (8, 7, 3)])
def test_accepted_tokens_are_those_kept(markov, count, kept, rounds, more):
    """The statistics do not count accepted tokens after a request's max_new_tokens."""
    output, seen = decoded(markov, count, **more)
    assert len(output.tokens) == count == 1 + kept
    assert (seen.accepted, seen.verified) == (kept, rounds)
    assert seen.mean_accepted == pytest.approx(kept / rounds)


def test_tokens_after_a_stop_token_are_not_counted(markov):
    """If the first of three accepted tokens is a stop token, the statistics count one accepted token."""
    text, _ = decoded(markov, 8)
    output, seen = decoded(markov, 8, stop=[text.tokens[1]])
    assert output.finish is FinishReason.STOP and len(output.tokens) == 2
    assert (seen.accepted, seen.verified) == (1, 1)


def test_tokens_after_the_context_are_not_counted(markov):
    """The statistics do not count accepted tokens after max_context_len."""
    model, head = markov(0.0)
    config = EngineConfig(speculate=Eagle(head, 2, 4, 8), max_context_len=5)
    [output], engine = generate(model, [PROMPT], 60, config)
    assert output.finish is FinishReason.CONTEXT
    assert engine.statistics.accepted == len(output.tokens) - 1 == 1


def test_emitted_tokens_are_prefills_and_accepted(markov, prompts):
    """Over requests of many lengths, tokens emitted equal accepted tokens plus one a prompt."""
    model, head = markov(0.01)
    config = EngineConfig(speculate=Eagle(head, 2, 4, 8), max_num_reqs=3, max_context_len=64)
    outputs, engine = generate(model, prompts(7, 20), 11, config)
    assert engine.statistics.accepted == engine.statistics.tokens - len(outputs)


def test_drafting_learns_from_the_whole_run(markov, monkeypatch):
    """Drafting sees every token that the target verified, also tokens after the end of a request."""
    from draftmark_speculative.eagle.drafter import HeadDrafter

    seen = []
    monkeypatch.setattr(
        HeadDrafter, "learn", lambda self, sent, finished, report: seen.extend(len(one.tokens) for one in finished)
    )
    decoded(markov, 2)
    assert seen == [3]
