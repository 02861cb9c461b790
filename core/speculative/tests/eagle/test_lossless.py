"""A head changes the speed, never the text: chains and trees, eager and captured, in step and a round late."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.speculative.tests.pairs import quick
from draftmark_speculative import Eagle, Engine, EngineConfig, FinishReason, HostKind, Sampling, generate
from draftmark_speculative.compare import compare
from draftmark_speculative.models.tiny import FAMILIES, tiny_model

COUNT = 20
SHAPES = {"none": None, "chain": (1, 4, 5), "tree": (4, 3, 12), "wide": (8, 4, 33), "one level": (4, 1, 5)}
STRENGTH = 0.01


def run(model, head, shape, starts, **more):
    """(outputs, engine), with three requests at a time and prefill in chunks of 20."""
    speculate = Eagle(head, *SHAPES[shape]) if SHAPES[shape] else None
    config = EngineConfig(
        **{"page_size": 4, "max_num_reqs": 3, "max_context_len": 64, "max_extend_tokens": 20, "guard": True, **more},
        speculate=speculate,
    )
    outs, engine = generate(model, starts, COUNT, config)
    assert engine.pages.in_use == 0
    return [out.tokens for out in outs], engine


@pytest.fixture(scope="session")
def plain(markov, prompts):
    """(strength) → prompts and transformers' own greedy text of the near-Markov model."""
    model, _ = markov(STRENGTH)
    starts = prompts(5, 30, seed=1)
    import torch

    texts = []
    for prompt in starts:
        ids = torch.tensor([prompt])
        out = model.hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
        )
        texts.append(tuple(out[0, len(prompt) :].tolist()))
    return starts, texts


SETTINGS = itertools.product(SHAPES, [1, 16], [False, True], [False, True], HostKind)
"""Shape, page size, graph, overlap and host lengths, which overlap does not have exactly."""


@pytest.mark.parametrize(
    ("shape", "page_size", "graph", "overlap", "host"),
    quick(one for one in SETTINGS if one[-2:] != (True, HostKind.EXACT)),
)
def test_every_setting_gives_the_plain_text(markov, plain, shape, page_size, graph, overlap, host):
    """Draft shapes x page sizes x eager and recorded graphs x host kinds x overlap, guards on: transformers' text."""
    model, head = markov(STRENGTH)
    starts, texts = plain
    got, engine = run(model, head, shape, starts, page_size=page_size, graph=graph, overlap=overlap, host_lengths=host)
    assert got == texts
    if SHAPES[shape]:
        assert engine.statistics.mean_accepted > 1.5, "without accepted drafts this tests nothing"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("overlap", "host"), [pytest.param(False, HostKind.EXACT, marks=pytest.mark.slow), (True, HostKind.UPPER_BOUND)]
)
def test_a_random_head_is_lossless_on_every_family(make_model, plain_text, random_head, prompts, family, overlap, host):
    """Windows, soft caps, scaled embeddings: a head that guesses wrong costs nothing but time."""
    starts = prompts(4, 30, seed=2)
    got, _ = run(make_model(family), random_head(), "tree", starts, overlap=overlap, host_lengths=host, graph=True)
    assert got == [plain_text(family, tuple(prompt), COUNT) for prompt in starts]


@pytest.mark.parametrize("shape", ["none", "chain", "tree"])
@pytest.mark.parametrize("overlap", [False, True])
def test_sampling_gives_the_tokens_of_plain_sampling(markov, prompts, shape, overlap):
    """Randomness is a function of seed, request and position: with a head, and a round late, the same tokens."""
    model, head = markov(STRENGTH)
    starts, sampling = prompts(5, 20, seed=3), Sampling(0.7, 0.95, 11)
    host = HostKind.UPPER_BOUND if overlap else HostKind.EXACT
    want, _ = run(model, None, "none", starts, sampling=sampling)
    got, engine = run(model, head, shape, starts, sampling=sampling, overlap=overlap, host_lengths=host, graph=True)
    assert got == want
    if shape != "none":
        assert engine.statistics.mean_accepted > 1.1


@pytest.mark.parametrize(
    ("shape", "overlap", "page_size"),
    quick(itertools.product(["none", "chain", "tree"], [False, True], [1, 7, 16])),
)
def test_the_context_wall(markov, prompts, shape, overlap, page_size):
    """Requests end exactly at max_context_len, though trees, and rounds already sent, reach past it."""
    model, head = markov(STRENGTH)
    starts = prompts(4, 20, seed=9)
    config = {"page_size": page_size, "max_num_reqs": 4, "max_context_len": 40, "guard": True}
    want, _ = generate(model, starts, 1000, EngineConfig(**config))
    speculate = Eagle(head, *SHAPES[shape]) if SHAPES[shape] else None
    host = HostKind.UNKNOWN if overlap else HostKind.EXACT
    outs, _ = generate(
        model, starts, 1000, EngineConfig(**config, speculate=speculate, overlap=overlap, host_lengths=host, graph=True)
    )
    assert outs == want
    assert {out.finish for out in outs} == {FinishReason.CONTEXT}


@pytest.mark.parametrize("shape", ["none", "tree"])
def test_a_stop_token_found_a_round_late_is_the_last(markov, plain, shape):
    """The round that was under way when the stop token came gives nothing more."""
    model, head = markov(STRENGTH)
    starts, texts = plain
    speculate = Eagle(head, *SHAPES[shape]) if SHAPES[shape] else None
    config = EngineConfig(speculate=speculate, max_context_len=64, overlap=True, host_lengths=HostKind.UPPER_BOUND)
    stop = texts[0][7]
    outs, engine = generate(model, starts, COUNT, config, stop=[stop])
    for out, text in zip(outs, texts, strict=True):
        cut = text.index(stop) + 1 if stop in text else COUNT
        assert out.tokens == text[:cut]
        assert (out.finish is FinishReason.STOP) == (stop in text)
    assert engine.statistics.late > 0, "no round was under way: this tests nothing"


def test_no_round_is_sent_for_a_request_that_ends_with_what_is_under_way(markov, prompts):
    """Plain decoding of 8 tokens takes 7 rounds with overlap too: the host counts what must come."""
    model, _ = markov(STRENGTH)
    config = EngineConfig(max_context_len=32, overlap=True, host_lengths=HostKind.UNKNOWN)
    _, engine = generate(model, prompts(1, 9), 8, config)
    assert (engine.statistics.rounds, engine.statistics.late, engine.statistics.host_syncs) == (7, 0, 8)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_random_joins_cancels_and_exhaustion(seed, markov, plain_of):
    """Under random submissions, cancels and a small pool, in step or a round late, every text is a plain one."""
    draw = random.Random(seed)
    model, head = markov(STRENGTH)
    starts = [[draw.randrange(256) for _ in range(draw.randint(1, 12))] for _ in range(draw.randint(1, 5))]
    wanted = [plain_of(tuple(prompt)) for prompt in starts]
    limits = [draw.randint(1, 16) for _ in starts]
    overlap = draw.random() < 0.7
    kinds = list(HostKind)[1:] if overlap else list(HostKind)
    shape = SHAPES[draw.choice(["none", "chain", "tree"])]
    config = EngineConfig(
        speculate=Eagle(head, *shape) if shape else None, page_size=draw.choice([1, 4]), overlap=overlap,
        max_num_reqs=draw.randint(1, 3), max_context_len=32, max_extend_tokens=draw.randint(1, 9),
        host_lengths=draw.choice(kinds), guard=True, num_pages=draw.choice([None, 70]),
    )  # fmt: skip
    engine = Engine(model, config)
    joined, cancelled = 0, {}
    given_out = [()] * len(starts)
    while joined < len(starts) or engine.busy:
        if joined < len(starts) and draw.random() < 0.5:
            assert engine.submit(starts[joined], limits[joined]) == joined
            joined += 1
        for progress in engine.step():
            assert progress.tokens
            assert progress.request_id not in cancelled, "a cancelled request gives nothing more"
            given_out[progress.request_id] += progress.tokens
        held = [page for request in everybody(engine) for page in request.pages]
        assert len(held) == len(set(held)) == engine.pages.in_use
        live = [r for r in range(joined) if engine._requests[r].finish is None]
        if live and draw.random() < 0.07:
            one = draw.choice(live)
            engine.cancel(one)
            cancelled[one] = engine.output(one)
    for request, prompt in enumerate(starts):
        text = engine.output(request)
        assert text == given_out[request] == wanted[request][: len(text)], (seed, config)
        if request in cancelled:
            assert text == cancelled[request]
        else:
            assert len(text) == min(limits[request], 32 - len(prompt)), (seed, config)
    assert engine.pages.in_use == 0


def everybody(engine):
    """Requests in every place of the scheduler."""
    scheduler = engine._scheduler
    return [*scheduler.waiting, *scheduler.prefilling, *scheduler.running]


@pytest.fixture(scope="session")
def plain_of(markov):
    """prompt → 16 tokens of plain decoding, cached."""
    model, _ = markov(STRENGTH)
    cache = {}

    def text(prompt):
        if prompt not in cache:
            outs, _ = generate(model, [prompt], 16, EngineConfig(max_context_len=32))
            cache[prompt] = outs[0].tokens
        return cache[prompt]

    return text


@pytest.mark.parametrize(("overlap", "graph"), quick(itertools.product([False, True], [False, True]), together=1))
def test_preempted_requests_lose_nothing(markov, plain, overlap, graph):
    """With pages for little more than one request, what was in flight when a request was sent back is kept."""
    model, head = markov(STRENGTH)
    starts, texts = plain
    host = HostKind.UPPER_BOUND
    got, engine = run(model, head, "tree", starts, num_pages=32, overlap=overlap, host_lengths=host, graph=graph)
    assert got == texts
    assert engine.statistics.preemptions > 0


def test_drafting_costs_no_wait_of_its_own(markov, prompts):
    """One wait a round and one a prefill that ends a prompt, with a head as without."""
    model, head = markov(STRENGTH)
    _, engine = generate(model, prompts(1, 9), 8, EngineConfig(speculate=Eagle(head, 2, 3, 6), max_context_len=32))
    assert engine.statistics.host_syncs == engine.statistics.rounds + 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(prompts, random_head, dtype):
    """The head follows the model's dtype; graphs and overlap run, and every token is one that rounding explains."""
    model, starts = tiny_model("llama", dtype=dtype), prompts(3, 20)
    outs, engine = run(model, random_head(), "tree", starts, graph=True, overlap=True, host_lengths=HostKind.UNKNOWN)
    assert all(len(out) == COUNT for out in outs)
    assert compare(model, starts, outs, {}, engine.config).right
