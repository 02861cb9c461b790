"""Sampled text has the target's distribution: chi-square tests over 20,000 samples with fixed seeds."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from benchmarks.decode.end_to_end.forced import ForcedAcceptance
from draftmark_speculative import DraftHead, Eagle, Engine, EngineConfig, HostKind, Sampling, decode
from draftmark_speculative.eagle import HeadConfig
from draftmark_speculative.models.tiny import tiny_model

pytestmark = pytest.mark.slow

VOCAB, COUNT, SAMPLES = 5, 3, 20_000
PROMPT = [3, 1, 4]
LEVEL = 1e-3
SHAPES = {"chain": (1, 3, 4), "tree": (3, 3, 8)}


@pytest.fixture(scope="module")
def model():
    """Tiny model of five tokens with a distribution that is neither flat nor peaked."""
    return tiny_model("llama", vocab_size=VOCAB, initializer_range=0.15)


@pytest.fixture(scope="module")
def head():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return DraftHead(HeadConfig(48, VOCAB, 4, 2, 12, 96, (1, 2)))


@pytest.fixture(scope="module")
def exact(model):
    """Probability of each text of COUNT tokens at temperature 1, computed by transformers."""
    texts = list(product(range(VOCAB), repeat=COUNT))
    ids = torch.tensor([PROMPT + list(text) for text in texts])
    with torch.no_grad():
        logits = model.hf(ids).logits[:, len(PROMPT) - 1 : -1].double()
    steps = logits.log_softmax(-1).gather(2, ids[:, len(PROMPT) :, None])[:, :, 0]
    return dict(zip(texts, steps.sum(1).exp().tolist(), strict=True))


def sample(model, speculate, seed, wrap_tree_ops=None, **more):
    """Return how often each text occurred in SAMPLES requests, and the tokens a round."""
    config = EngineConfig(
        speculate=speculate, sampling=Sampling(1.0, 1.0, seed), max_num_reqs=500, max_context_len=16,
        max_extend_tokens=1500, page_size=8, **more,
    )  # fmt: skip
    engine = Engine(model, config, wrap_tree_ops=wrap_tree_ops)
    outs = decode(engine, [PROMPT] * SAMPLES, COUNT)
    return Counter(out.tokens for out in outs), engine.statistics.mean_accepted


def likelihood(counts, exact):
    """Return the p-value of the counts under the exact distribution; rare texts are pooled."""
    common = [text for text, p in exact.items() if p * SAMPLES >= 5]
    expected = [exact[text] * SAMPLES for text in common]
    observed = [counts[text] for text in common]
    rest = SAMPLES - sum(expected)
    if rest >= 5:
        expected.append(rest)
        observed.append(SAMPLES - sum(observed))
    else:
        observed[-1] += SAMPLES - sum(observed)
        expected[-1] += rest
    return chisquare(observed, expected).pvalue


def same(one, other):
    """Return the p-value of the hypothesis that two samples have one distribution; rare texts are pooled."""
    common = [text for text in one | other if one[text] + other[text] >= 10]
    table = [[counts[text] for text in common] for counts in (one, other)]
    rest = [SAMPLES - sum(row) for row in table]
    if sum(rest) >= 10:
        table = [[*row, left] for row, left in zip(table, rest, strict=True)]
    return chi2_contingency(table).pvalue


@pytest.fixture(scope="module")
def plain(model):
    """Number of times that plain sampling drew each text, with a separate seed."""
    return sample(model, None, 17)[0]


def test_plain_sampling_has_the_exact_distribution(plain, exact):
    """Texts sampled without drafts have the distribution that transformers computes."""
    assert likelihood(plain, exact) > LEVEL


@pytest.mark.parametrize(("shape", "overlap", "seed"), [("chain", False, 4), ("tree", True, 5)])
def test_speculative_sampling_has_the_exact_distribution(model, head, plain, exact, shape, overlap, seed):
    """Sampling with chains and trees of a head, with and without overlap, has the exact distribution."""
    host = HostKind.UPPER_BOUND if overlap else HostKind.EXACT
    counts, accepted = sample(model, Eagle(head, *SHAPES[shape]), seed, overlap=overlap, host_lengths=host)
    assert accepted > 1.15, "the test needs accepted drafts"
    assert likelihood(counts, exact) > LEVEL
    assert same(counts, plain) > LEVEL


def test_biased_loop_is_detected(model, head, plain, exact):
    """Both chi-square tests (exact and two-sample) detect a loop that accepts one draft in ten against the target."""
    forced = partial(ForcedAcceptance, profile=(1 / 10,), seed=4, device=model.device)
    counts, _ = sample(model, Eagle(head, *SHAPES["chain"]), 4, forced)
    assert likelihood(counts, exact) < 1e-6
    assert same(counts, plain) < LEVEL
