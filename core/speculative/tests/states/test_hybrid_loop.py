"""Models with recurrent state: with float32 states every text equals transformers' greedy decoding, token for token."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch

import draftmark_speculative.engine as engine_module
from benchmarks.decode import soak
from core.speculative.tests.states.conftest import COUNT, DRAFTS, STRENGTH, plain_text
from draftmark import LoadedBackend, RequestError
from draftmark_reference import ReferencePlugin
from draftmark_speculative import HostKind, decode
from draftmark_speculative.eagle.tiny import tiny_pair
from draftmark_speculative.states import StateLayers
from draftmark_testing.pairs import quick

FAMILIES = ("qwen3_5_text", "granitemoehybrid", "nemotron_h", "lfm2")
"""Gated DeltaNet, Mamba2 with and without MLPs between, and short convolutions without a recurrence."""
MEMORY = {
    "enough": {},
    "few pages": {"num_pages": 24},
    "cache": {"prefix_cache": True, "state_interval": 24},
    "cache, few pages": {"prefix_cache": True, "state_interval": 24, "num_pages": 24},
    "cache, few slots": {"prefix_cache": True, "state_interval": 24, "state_slots": 7},
}


def starts() -> list[list[int]]:
    """Return six prompts: three share 26 tokens, and one equals another."""
    common = [(one * 7) % 256 for one in range(26)]
    return [[*common, 5], [*common, 6, 7, 8], [3], common[:11], [9, 8, 7, *common[:20]], [*common, 5]]


def texts_of(family: str, way: str) -> list[tuple[int, ...]]:
    """Return transformers' texts for the prompts."""
    return [plain_text(family, DRAFTS[way][0] == "head", tuple(prompt)) for prompt in starts()]


def check_memory(engine) -> None:
    """Check that no page and no state slot is lost after all requests have ended, and that no guard was hit."""
    states, cache = engine._layers.states, engine._scheduler._cache
    pages, checkpoints = (0, 0) if cache is None else (cache.unused_pages, cache.checkpoints)
    assert engine.pages.in_use == pages
    slots = states.groups[0].pool
    assert states.slots.free == slots.num_slots - slots.null_slots - checkpoints
    states.check_guards()


def settings(memory) -> list[tuple]:
    """Return every possible combination of family, drafting method, graph, overlap and memory."""
    every = product(FAMILIES[:2], DRAFTS, [False, True], [False, True], memory)
    return [one for one in every if not (one[3] and DRAFTS[one[1]][0] == "known")]


QUICK = ("few pages", "cache, few pages")
SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in settings([one for one in MEMORY if one not in QUICK])]
OTHERS = [
    ("nemotron_h", "known tree", True, False, "cache, few pages"),
    ("nemotron_h", "tree", False, True, "few pages"),
    ("lfm2", "adaptive known tree", False, False, "cache, few pages"),
    ("lfm2", "chain", True, True, "enough"),
    ("granitemoehybrid", "none", True, False, "enough"),
    ("qwen3_5_text", "known chain", True, False, "cache, few slots"),
]


@pytest.mark.parametrize(("family", "way", "graph", "overlap", "memory"), [*quick(settings(QUICK)), *OTHERS, *SLOW])
def test_every_setting_gives_the_plain_text(engine_of, family, way, graph, overlap, memory):
    """Chains, trees, ragged rounds, graphs, overlap, preemption and prefix reuse give transformers' text."""
    texts = texts_of(family, way)
    host = HostKind.UPPER_BOUND if overlap else HostKind.EXACT
    more = {"graph": graph, "overlap": overlap, "host_lengths": host, **MEMORY[memory]}
    engine = engine_of(family, way, texts * 2, **more)
    for _ in range(2 if "cache" in memory else 1):
        assert [one.tokens for one in decode(engine, starts(), COUNT)] == texts
        check_memory(engine)
    seen = engine.statistics
    assert seen.mean_accepted > 1.1 or way == "none", "the test needs accepted drafts"
    assert engine.statistics.reused > 0 or memory in ("enough", "few pages", "cache, few slots")


@pytest.mark.parametrize("way", ["known tree", "tree"])
@pytest.mark.parametrize("cached", [False, True])
def test_preempted_requests_keep_their_text(engine_of, way, cached):
    """A request that gave up its slot and its pages is computed again, or resumes from a checkpoint."""
    family, settings = "qwen3_5_text", {"prefix_cache": cached, "state_interval": 24}
    texts = texts_of(family, way)
    engine = engine_of(family, way, texts, num_pages=26, graph=True, **settings)
    assert [one.tokens for one in decode(engine, starts(), COUNT)] == texts
    assert engine.statistics.preemptions > 0
    check_memory(engine)


@pytest.mark.parametrize(
    ("way", "graph"), [("known chain", False), ("known tree", True), ("tree", False), ("adaptive known tree", False)]
)
def test_uncommitted_states_change_the_text(monkeypatch, engine_of, way, graph):
    """If a round's end leaves the states out (sglang#26351), the comparison with plain decoding fails."""
    monkeypatch.setattr(StateLayers, "pairs", ())
    texts = texts_of("granitemoehybrid", way)
    engine = engine_of("granitemoehybrid", way, texts, graph=graph)
    assert [one.tokens for one in decode(engine, starts(), COUNT)] != texts


def test_wrong_checkpoints_change_the_text(monkeypatch, engine_of):
    """If a reused prefix resumes from another slot's state, the comparison with plain decoding fails."""
    texts = texts_of("qwen3_5_text", "none")
    engine = engine_of("qwen3_5_text", "none", prefix_cache=True, state_interval=12)
    assert [one.tokens for one in decode(engine, starts(), COUNT)] == texts
    resume = StateLayers.resume
    monkeypatch.setattr(StateLayers, "resume", lambda self, row, checkpoint: resume(self, row, 0))
    assert [one.tokens for one in decode(engine, starts(), COUNT)] != texts


@pytest.mark.parametrize("way", ["none", "known tree", "adaptive known tree", "tree"])
def test_checkpoints_hold_the_state_of_their_length(engine_of, way):
    """A checkpoint that a round or a prefill saved equals the state after a fresh prefill of its tokens."""
    family, interval = "qwen3_5_text", 24
    texts, prompts = texts_of(family, way), starts()
    engine = engine_of(family, way, texts, prefix_cache=True, state_interval=interval, graph=way == "known tree")
    decode(engine, prompts, COUNT)
    found = checkpoints(engine)
    wanted = {tuple([*prompt, *text][:interval]) for prompt, text in zip(prompts, texts, strict=True)}
    crossed = {one for one in wanted if len(one) == interval}
    assert crossed <= set(found), "each request that passes the interval leaves a checkpoint"
    pool = engine._layers.states.groups[0].pool
    for tokens, slot in found.items():
        fresh = engine_of(family, way, [()], max_extend_tokens=80)
        fresh.submit([*tokens, 1], 2)
        fresh._scheduler.admit()
        request = fresh._scheduler.prefilling[0]
        with torch.inference_mode():
            fresh._forwards.prefill([(request, len(tokens))], fresh._host.of([request.row]))
        own, at = fresh._layers.states.groups[0].pool, fresh._layers.states.slots.slot_of(request.row)
        torch.testing.assert_close(pool.state[:, slot], own.state[:, at], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pool.conv[:, slot], own.conv[:, at], rtol=1e-4, atol=1e-5)


def checkpoints(engine) -> dict[tuple[int, ...], int]:
    """Return the tokens and the slot of each checkpoint in the engine's prefix cache."""
    found, lookahead = {}, engine._scheduler._cache.lookahead
    size = engine.config.page_size
    for node in engine._scheduler._cache._checkpoints:
        tokens, up = (), node
        while up.parent is not None:
            tokens, up = (*up.key[:size], *tokens), up.parent
        found[tokens] = node.checkpoint
    assert lookahead in (0, 1)
    return found


def test_rounds_after_a_poisoned_slot_read_zeros(engine_of):
    """A slot that another request left, and that guard mode filled with NaN, is never read by the next owner."""
    texts = texts_of("qwen3_5_text", "known tree")
    engine = engine_of("qwen3_5_text", "known tree", texts * 3, max_num_reqs=1)
    pool = engine._layers.states.groups[0].pool
    for _ in range(3):
        pool.state.fill_(float("nan")), pool.conv.fill_(float("nan"))
        assert [one.tokens for one in decode(engine, starts(), COUNT)] == texts


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"state_slots": 2}, "state_slots is 2, but 3 requests need 3 (one each)"),
        ({"state_slots": 5, "prefix_cache": True, "state_interval": 24}, "need 6 (a slot and a spare one each)"),
        (
            {"prefix_cache": True, "state_interval": 6},
            "a checkpoint ends at a whole page of 4 tokens; use a multiple of page_size, such as 16",
        ),
        (
            {"prefix_cache": True, "state_interval": 8},
            "two rounds of 7 draft tokens may pass two checkpoints; use 16 or a larger multiple of page_size",
        ),
    ],
)
def test_settings_that_cannot_keep_states_are_refused(engine_of, settings, words):
    """Too few slots, and intervals that pages or drafts do not fit, are refused before the first token."""
    with pytest.raises(RequestError) as error:
        engine_of("lfm2", "known tree", **settings)
    assert words in str(error.value) and "; " in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid", "kimi_linear", "falcon_h1", "lfm2_moe"])
@pytest.mark.parametrize("way", ["known chain", "known tree", "adaptive known tree"])
def test_other_families_give_the_plain_text(engine_of, family, way):
    """Families with other gates, with attention and state in one layer, and with experts give transformers' text."""
    texts = texts_of(family, way)
    engine = engine_of(family, way, texts, graph=True)
    assert [one.tokens for one in decode(engine, starts(), COUNT)] == texts
    check_memory(engine)


LIVES = [seed if seed < 1 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(60)]


@pytest.mark.parametrize("seed", LIVES)
def test_random_request_lives(monkeypatch, seed):
    """Random settings, joins, stops, cancels and small pools change no text, and lose no page and no slot."""
    monkeypatch.setattr(soak, "REQUESTS", (4, 8))
    model, head = lively_pair(FAMILIES[seed % len(FAMILIES)])
    assert soak.one_life(seed, model, head, "reference", Counter()) == []


@cache
def lively_pair(family):
    """Return a model with the vocabulary of the soak, and its head."""
    return tiny_pair(STRENGTH, vocab_size=soak.VOCAB, family=family)


@pytest.mark.parametrize("way", ["known tree", "adaptive known tree"])
def test_snapshots_give_the_plain_text(monkeypatch, engine_of, way):
    """A backend that stores a state for each row gives the same texts and checkpoints as one that replays."""
    texts = texts_of("granitemoehybrid", way)
    monkeypatch.setattr(engine_module, "load", lambda name: LoadedBackend(name, ReferencePlugin("snapshots")))
    engine = engine_of("granitemoehybrid", way, texts * 2, graph=True, **MEMORY["cache, few pages"])
    assert any(one.name == "states" for one in engine._layers.states.groups[0].arena.specs)
    for _ in range(2):
        assert [one.tokens for one in decode(engine, starts(), COUNT)] == texts
    check_memory(engine)
