"""Drafts change the speed, never the text: float32 texts equal transformers' greedy decoding, token for token.

Every test runs several drafting methods: known texts mixed with wrong guesses, a head, and adaptive rounds of either.
Adaptive rounds are plain if drafts do not pay.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch

from benchmarks.decode import soak
from draftmark_speculative import Adaptive, Eagle, EngineConfig, FinishReason, HostKind, Ngram, generate
from draftmark_speculative.compare import compare
from draftmark_speculative.models.tiny import FAMILIES, tiny_model
from draftmark_speculative.sampling import Sampling
from draftmark_testing.pairs import quick

COUNT, STRENGTH = 20, 0.01
SMALL = {"page_size": 4, "max_num_reqs": 3, "max_context_len": 64, "max_extend_tokens": 20, "guard": True}
SIZES = (1, 3)
"""Captured batch sizes: a batch of two requests is padded to three."""
FREE, SOME, DEAR = 0.0, 0.04, 5.0
"""Cost of a row in adaptive rounds, in seconds: always draft; draft now and then; draft only in probes."""
WAYS = {
    "none": (None, (), None, 1.0),
    "known chain": ("known", (1, 5), None, 1.5),
    "known tree": ("known", (3, 7), None, 1.5),
    "known wide tree": ("known", (4, 33), None, 1.5),
    "chain": ("head", (1, 4, 5), None, 1.5),
    "tree": ("head", (4, 3, 12), None, 1.5),
    "wide tree": ("head", (8, 4, 33), None, 1.5),
    "one level": ("head", (4, 1, 5), None, 1.5),
    "adaptive chain": ("head", (1, 4, 5), FREE, 1.3),
    "adaptive tree": ("head", (4, 3, 12), SOME, 1.0),
    "adaptive wide tree": ("head", (8, 4, 33), FREE, 1.3),
    "adaptive two rows": ("head", (1, 3, 2), FREE, 1.1),
    "adaptive dear tree": ("head", (4, 3, 12), DEAR, 1.0),
    "adaptive known tree": ("known", (3, 7), FREE, 1.2),
}
"""Drafting methods: source, shape, cost of a row (None: not adaptive), least mean accepted length for a valid test."""
KNOWN = [way for way in WAYS if WAYS[way][0] == "known"]


def late_is_possible(way: str, overlap: bool, host: HostKind = HostKind.UNKNOWN) -> bool:
    """Return False for overlap with exact host lengths or with host drafts: the engine rejects these settings."""
    return not overlap or (way not in KNOWN and host is not HostKind.EXACT)


@pytest.fixture(scope="session")
def decode(markov, oracle, table):
    """Return a function (drafting method, prompts, known texts, …) → (outputs, engine)."""

    def of(way, starts, texts=(), *, model=None, head=None, count=COUNT, stop=(), **more):
        who, shape, row_s, _ = WAYS[way]
        drafts = {None: lambda: None, "head": lambda: Eagle(head or markov(STRENGTH)[1], *shape)}
        speculate = drafts.get(who, lambda: oracle(*shape, tuple(texts)))()
        if row_s is not None:
            nodes = shape[-1]
            # Three row budgets capture three graphs, the default up to thirteen. test_policy.py tests the default.
            speculate = Adaptive(speculate, (4, 2 * nodes, 3 * nodes), table(row_s), 0.01)
        sizes = {"capture_batch_sizes": SIZES} if more.get("graph") else {}
        config = EngineConfig(**{**SMALL, **sizes, **more}, speculate=speculate)
        outs, engine = generate(model or markov(STRENGTH)[0], starts, count, config, stop=stop)
        assert engine.pages.in_use == 0
        for group in engine._layers.groups:
            group.arena.check()
        return outs, engine

    return of


def texts_of(outs):
    return [out.tokens for out in outs]


@pytest.fixture(scope="session")
def plain(markov, prompts):
    """Prompts, and the greedy texts that transformers itself generates with the tiny test model."""
    model, _ = markov(STRENGTH)
    starts, texts = prompts(5, 30, seed=1), []
    for prompt in starts:
        ids = torch.tensor([prompt])
        out = model.hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
        )
        texts.append(tuple(out[0, len(prompt) :].tolist()))
    return starts, texts


SETTINGS = product(WAYS, [1, 16, 64], [False, True], [False, True], HostKind)


@pytest.mark.parametrize(
    ("way", "page_size", "graph", "overlap", "host"),
    quick(one for one in SETTINGS if late_is_possible(one[0], one[3], one[4])),
)
def test_every_setting_gives_the_plain_text(decode, plain, way, page_size, graph, overlap, host):
    """All drafting methods, page sizes, graph modes, overlap and host-length kinds give transformers' text."""
    starts, texts = plain
    more = {"page_size": page_size, "graph": graph, "overlap": overlap, "host_lengths": host}
    outs, engine = decode(way, starts, texts, **more)
    assert texts_of(outs) == texts
    seen, (_, _, row_s, least) = engine.statistics, WAYS[way]
    assert seen.mean_accepted >= least, "the test needs accepted drafts"
    assert row_s != FREE or seen.plain == 0
    assert row_s != DEAR or seen.plain > seen.rounds / 2


SLOW = product(FAMILIES, ["known tree", "adaptive known tree"], [False, True])


@pytest.mark.parametrize(
    ("family", "way", "graph"),
    [
        *quick(product(FAMILIES, ["known chain", "tree"], [False, True])),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
    ],
)
def test_every_family_gives_the_plain_text(decode, make_model, plain_text, random_head, prompts, family, way, graph):
    """Families with windows, soft caps and odd head sizes give the plain text, with right and with wrong drafts."""
    starts = prompts(5, 30, seed=len(family))
    texts = [plain_text(family, tuple(prompt), COUNT) for prompt in starts]
    more = {"overlap": way == "tree", "host_lengths": HostKind.UPPER_BOUND, "graph": graph}
    outs, _ = decode(way, starts, texts, model=make_model(family), head=random_head(), **more)
    assert texts_of(outs) == texts


@pytest.fixture(scope="module")
def sampled(decode, prompts):
    """Prompts, sampling, and the outputs of plain sampling."""
    starts, sampling = prompts(5, 20, seed=3), Sampling(0.7, 0.95, 11)
    return starts, sampling, decode("none", starts, sampling=sampling)[0]


SAMPLED = ["none", "known chain", "known tree", "chain", "tree", "adaptive chain", "adaptive tree"]


@pytest.mark.parametrize(
    ("way", "overlap"), quick((one for one in product(SAMPLED, [False, True]) if late_is_possible(*one)), together=1)
)
def test_sampling_gives_the_tokens_of_plain_sampling(decode, sampled, way, overlap):
    """Sampling with any drafting method, with and without overlap, gives the tokens of plain sampling."""
    starts, sampling, want = sampled
    host = HostKind.UPPER_BOUND if overlap else HostKind.EXACT
    more = {"sampling": sampling, "overlap": overlap, "host_lengths": host, "graph": True}
    outs, engine = decode(way, starts, texts_of(want), **more)
    assert outs == want
    assert engine.statistics.mean_accepted > 1.1 or WAYS[way][3] == 1.0


TO_THE_WALL = {"max_num_reqs": 4, "max_context_len": 40, "count": 1000}


@pytest.fixture(scope="module")
def to_the_wall(decode, prompts):
    """Prompts, and the outputs of plain decoding up to max_context_len."""
    starts = prompts(4, 20, seed=9)
    return starts, decode("none", starts, **TO_THE_WALL)[0]


WALLS = product(["none", "known chain", "known tree", "chain", "tree"], [1, 7, 16], [False, True], [False, True])


@pytest.mark.parametrize(
    ("way", "page_size", "graph", "overlap"), quick(one for one in WALLS if late_is_possible(one[0], one[3]))
)
def test_requests_end_at_max_context_len(decode, to_the_wall, way, page_size, graph, overlap):
    """Requests end exactly at max_context_len, although trees and rounds in flight reach past it."""
    starts, want = to_the_wall
    small = {"page_size": page_size, **TO_THE_WALL}
    host = HostKind.UNKNOWN if overlap else HostKind.EXACT
    past = [(*text, *(1,) * 9) for text in texts_of(want)]
    outs, _ = decode(way, starts, past, **small, graph=graph, overlap=overlap, host_lengths=host)
    assert outs == want
    assert {out.finish for out in outs} == {FinishReason.CONTEXT}
    assert all(len(prompt) + len(out.tokens) == 40 for prompt, out in zip(starts, outs, strict=True))


@pytest.mark.parametrize(("way", "overlap"), [("known tree", False), ("none", True), ("tree", True)])
def test_stop_token_ends_the_text(decode, plain, way, overlap):
    """A stop token inside an accepted path, or found one round late, ends the text and is part of it."""
    starts, texts = plain
    stop, host = texts[0][7], HostKind.UPPER_BOUND if overlap else HostKind.EXACT
    outs, engine = decode(way, starts, texts, stop=[stop], overlap=overlap, host_lengths=host)
    for out, text in zip(outs, texts, strict=True):
        assert out.tokens == text[: text.index(stop) + 1 if stop in text else COUNT]
        assert (out.finish is FinishReason.STOP) == (stop in text)
    assert not overlap or engine.statistics.late > 0, "the test needs a round in flight at the end"


@pytest.mark.parametrize(
    ("way", "num_pages", "graph", "overlap"),
    [
        ("known tree", 24, False, False),
        pytest.param("known tree", 24, True, False, marks=pytest.mark.slow),
        pytest.param("tree", 32, False, False, marks=pytest.mark.slow),
        ("tree", 32, True, True),
        ("adaptive tree", 32, True, True),
        pytest.param("adaptive chain", 32, False, False, marks=pytest.mark.slow),
        pytest.param("adaptive dear tree", 32, True, True, marks=pytest.mark.slow),
    ],
)
def test_preempted_requests_keep_their_text(decode, plain, way, num_pages, graph, overlap):
    """With few pages, requests wait and are preempted, and still end with their own text."""
    starts, texts = plain
    more = {"num_pages": num_pages, "graph": graph, "overlap": overlap, "host_lengths": HostKind.UPPER_BOUND}
    outs, engine = decode(way, starts, texts, **more)
    assert texts_of(outs) == texts
    assert engine.statistics.preemptions > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", ["known tree", "tree"])
def test_half_precision_decodes_and_drafts(decode, random_head, prompts, way, dtype):
    """In half precision the head has the model's dtype, and rounding explains every token."""
    model, starts, late = tiny_model("llama", dtype=dtype), prompts(4, 20, seed=3), way == "tree"
    texts = texts_of(decode("none", starts, model=model)[0])
    more = {"graph": late, "overlap": late, "host_lengths": HostKind.UNKNOWN}
    outs, engine = decode(way, starts, texts, model=model, head=random_head(), **more)
    assert compare(model, starts, texts_of(outs), {"plain": texts}, engine.config).right


def test_ngram_drafts_give_the_plain_repeating_text(make_model):
    """N-gram drafts on a repeating text give the plain text."""
    model, prompt = make_model("llama"), [3, 1, 4, 1, 5] * 4
    outs, _ = generate(model, [prompt], 60, EngineConfig(max_context_len=100))
    loop = prompt + list(outs[0].tokens)
    longer = [loop * 2]
    want, _ = generate(model, longer, 40, EngineConfig(max_context_len=256))
    got, engine = generate(model, longer, 40, EngineConfig(speculate=Ngram(2, 6, 3, 1), max_context_len=256))
    assert got == want
    assert engine.statistics.rounds <= 40


LIVES = [seed if seed < 2 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(100)]


@pytest.mark.parametrize("seed", LIVES)
def test_random_request_lives(monkeypatch, markov, seed):
    """Random settings, joins, stops, cancels, context limits and small pools never change the texts."""
    monkeypatch.setattr(soak, "REQUESTS", (4, 8))
    model, head = markov(STRENGTH, vocab_size=soak.VOCAB)
    assert soak.one_life(seed, model, head, "reference", Counter()) == []
