"""Sampling: out-of-range settings, the uniform hash, top-p, and the target's distribution under speculation."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from scipy import stats

from draftmark.errors import RequestError
from draftmark_speculative import DraftTree, EngineConfig, Sampling, Speculation, generate
from draftmark_speculative.sampling import uniform


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"temperature": float("nan")}, "temperature is nan"), ({"temperature": -1.0}, "temperature is -1"),
     ({"temperature": float("inf")}, "temperature is inf"), ({"top_p": 0.0}, "top_p is 0.0"),
     ({"temperature": "hot"}, "temperature is 'hot'"), ({"top_p": None}, "top_p is None"),
     ({"seed": 1.5}, "seed is 1.5"),
     ({"top_p": 1.5}, "top_p is 1.5"), ({"top_p": float("nan")}, "top_p is nan")],
)  # fmt: skip
def test_settings_out_of_range_are_rejected(settings, named):
    """Sampling settings that are NaN, out of range or of a wrong type give an error with the value and the remedy."""
    with pytest.raises(RequestError, match=f"{named}.*; use"):
        Sampling(**settings)


def test_uniform_is_uniform_and_depends_on_everything():
    """`uniform` is uniform on [0, 1) (Kolmogorov-Smirnov) and depends on seed, request and position."""
    positions = torch.arange(20_000)
    draws = uniform(7, torch.zeros_like(positions), positions)
    assert draws.min() >= 0 and draws.max() < 1
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3
    by_request = uniform(7, positions, torch.zeros_like(positions))
    assert stats.kstest(by_request.numpy(), "uniform").pvalue > 1e-3
    assert stats.pearsonr(draws.numpy()[1:], draws.numpy()[:-1]).pvalue > 1e-3
    assert not torch.equal(draws, uniform(8, torch.zeros_like(positions), positions))


def test_top_p_keeps_the_smallest_sufficient_set():
    """Only the most likely tokens that together reach top_p are drawn, in proportion to their probability."""
    probs = torch.tensor([0.1, 0.5, 0.15, 0.25])
    rows = 20_000
    chosen = Sampling(temperature=1.0, top_p=0.7, seed=3).choose(
        probs.log().expand(rows, 4), torch.zeros(rows, dtype=torch.long), torch.arange(rows)
    )
    counts = Counter(chosen.tolist())
    assert set(counts) == {1, 3}
    assert stats.binomtest(counts[1], rows, 0.5 / 0.75).pvalue > 1e-3


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_last_bit_of_a_logit_changes_almost_no_choice(top_p):
    """A change in the last bit of the logits, as between two right forwards, changes almost no sampled token."""
    rows, generator = 20_000, torch.Generator().manual_seed(2)
    logits = torch.tensor([4.0] * 8 + [-9.0] * 24).expand(rows, 32)
    nudged = logits + 1e-6 * torch.randn(rows, 32, generator=generator)
    requests, positions = torch.zeros(rows, dtype=torch.long), torch.arange(rows)
    sampling = Sampling(0.8, top_p, seed=5)
    chosen, again = (sampling.choose(one, requests, positions) for one in (logits, nudged))
    assert len(chosen.unique()) >= 8
    assert (chosen != again).float().mean() < 1e-3


@pytest.mark.parametrize("temperature", [1e-30, 1e-307, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature):
    """At the smallest temperatures the best token is chosen, although logits / temperature overflows."""
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(3)) * 30
    rows = torch.arange(9)
    assert torch.equal(Sampling(temperature).choose(logits, rows, rows), logits.argmax(-1))


def test_temperature_scales_logits():
    """At temperature 2 the frequencies follow softmax(logits / 2)."""
    logits, rows = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64), 20_000
    chosen = Sampling(temperature=2.0, seed=1).choose(
        logits.expand(rows, 3), torch.zeros(rows, dtype=torch.long), torch.arange(rows)
    )
    want = (logits / 2).softmax(0) * rows
    counts = torch.bincount(chosen, minlength=3)
    assert stats.chisquare(counts.numpy(), want.numpy()).pvalue > 1e-3


@dataclass(frozen=True)
class Guess(Speculation):
    """Speculation that drafts the most likely continuations of a first sampled token."""

    topk: int
    texts: Counter
    num_draft_tokens: int = 5

    def begin(self, request_id, prompt):
        return Guesser(self, prompt[-1])


class Guesser:
    """Drafter that continues from the newest token and ignores the tokens before it."""

    def __init__(self, guess, last):
        self._guess, self._last = guess, last

    def extend(self, tokens):
        self._last = tokens[-1]

    def propose(self):
        tree = DraftTree([self._last])
        after = [text[1:] for text, _ in self._guess.texts.most_common() if text[0] == self._last]
        for path in after[: self._guess.topk]:
            tree.insert(path, self._guess.num_draft_tokens - len(tree))
        return tree


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_speculative_sampling_follows_the_target(topk, make_model):
    """Speculative sampling of three tokens has the model's joint distribution: chi-square over 4,000 requests."""
    samples, model = 4000, make_model("llama")
    sampling = Sampling(temperature=0.6, top_p=0.5, seed=11)
    joint = _joint(model, [5, 9, 40], sampling, 3)
    config = EngineConfig(
        speculate=Guess(topk, joint), sampling=sampling, max_num_reqs=1000, max_context_len=8, page_size=4
    )
    outs, engine = generate(model, [[5, 9, 40]] * samples, 3, config)
    assert engine.statistics.mean_accepted > 1.15, "the test needs accepted drafts"
    counts = Counter(out.tokens for out in outs)
    assert set(counts) <= set(joint)
    common = [text for text, p in joint.items() if p * samples >= 5]
    observed = [counts[text] for text in common]
    expected = [joint[text] * samples for text in common]
    rare = samples - sum(expected)
    if rare >= 5:
        observed.append(samples - sum(observed))
        expected.append(rare)
    assert len(common) >= 10
    expected = [e * sum(observed) / sum(expected) for e in expected]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def _joint(model, prompt, sampling, count):
    """Return the probability of each continuation of `count` tokens, from the model's own logits."""
    texts = {(): 1.0}
    for _ in range(count):
        ids = torch.tensor([prompt + list(text) for text in texts])
        with torch.no_grad():
            logits = model.hf(ids).logits[:, -1].double()
        probs, order = (logits / sampling.temperature).softmax(-1).sort(descending=True)
        probs = torch.where(probs.cumsum(-1) - probs < sampling.top_p, probs, 0)
        probs /= probs.sum(-1, keepdim=True)
        texts = {
            (*text, int(token)): p * float(q)
            for (text, p), tokens, row in zip(texts.items(), order, probs, strict=True)
            for token, q in zip(tokens, row, strict=True)
            if q > 0
        }
    return Counter(texts)
