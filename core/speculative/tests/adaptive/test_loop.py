"""Adaptive drafting in the engine: it may change the speed, but never the text."""

from __future__ import annotations

import functools
import itertools

import pytest

from draftmark import BackendRefusal, GeometryError, Mode, RequestError
from draftmark_speculative import Adaptive, Eagle, Engine, EngineConfig, HostKind, Ngram, generate
from draftmark_speculative.drafts import Speculation
from draftmark_speculative.eagle.tiny import tiny_pair
from draftmark_testing.pairs import quick

FREE, SOME, DEAR = 0.0, 0.04, 5.0
"""Cost of a row in seconds: always draft; draft now and then; draft only in probes."""


@pytest.mark.parametrize(("shape", "graph"), [((1, 3, 4), False), ((2, 3, 6), True)])
def test_triton_kernels_decode_adaptive_rounds(markov, run, shape, graph):
    """The interpreted Triton kernels decode ragged chains and compacted trees, with a partly filled row budget."""
    model, head = markov(0.01)
    starts = [[5, 6, 7], [9, 8, 7, 6, 5], [4]]
    want, _ = run(model, None, 0, starts, count=8)
    got, engine = run(
        model, Eagle(head, *shape), FREE, starts, count=8, budgets=(4, 9), max_num_reqs=3, max_context_len=32,
        backend="cuda_triton", graph=graph, overlap=True, host_lengths=HostKind.UNKNOWN,
    )  # fmt: skip
    assert got == want
    assert engine.statistics.mean_accepted > 1.2


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_good_drafts_are_used_and_bad_ones_dropped(markov, prompts, run, strength):
    """Right drafts of a head give several tokens a round. With wrong drafts, the engine changes to plain decoding."""
    model, head = markov(strength)
    got, engine = run(model, Eagle(head, 1, 4, 5), SOME, prompts(4, 9, seed=2), count=50, graph=True)
    want, _ = run(model, None, 0, prompts(4, 9, seed=2), count=50)
    seen = engine.statistics
    assert got == want
    if strength == 1.0:
        assert seen.plain > 0.8 * seen.rounds
    else:
        free, always = run(model, Eagle(head, 1, 4, 5), FREE, prompts(4, 9, seed=2), count=50)
        assert free == want and always.statistics.mean_accepted > 3.5


def test_batch_beyond_graphs_and_budgets_decodes_plainly(markov, prompts, run):
    """Nine requests exceed graphs of two requests and budgets of eight rows, so they decode eagerly and plainly."""
    model, head = markov(0.0)
    starts = prompts(9, 12, seed=5)
    want, _ = run(model, None, 0, starts, max_num_reqs=9)
    got, engine = run(
        model, Eagle(head, 1, 4, 5), FREE, starts, budgets=(4, 8), max_num_reqs=9, graph=True,
        capture_batch_sizes=(1, 2), host_lengths=HostKind.UPPER_BOUND, overlap=True,
    )  # fmt: skip
    assert got == want
    assert engine.statistics.plain > 0


def test_request_without_drafts_uses_one_row(make_model, oracle, plain_text, prompts, table):
    """If one request of four has drafts, the budget is this request's rows and one root for each other request."""
    starts = prompts(4, 20, seed=6)
    want = [plain_text("llama", tuple(prompt), 24) for prompt in starts]

    class Lonely(type(oracle(1, 6, ()))):
        def begin(self, request_id, prompt):
            return super().begin(request_id, prompt) if request_id == 2 else None

    seen = []
    drafts = Lonely(1, 6, tuple(want))
    speculate = Adaptive(drafts, (9,), table(FREE))
    engine = Engine(make_model("llama"), EngineConfig(speculate=speculate, max_num_reqs=4, max_context_len=64))
    admit = engine._drafting._candidates.admit

    def watched(batch):
        trees = admit(batch)
        seen.append(trees.q_lens.tolist())
        return trees

    engine._drafting._candidates.admit = watched
    ids = [engine.submit(prompt, 24) for prompt in starts]
    while engine.busy:
        engine.step()
    assert [engine.output(i) for i in ids] == want
    assert any(max(rows) > 1 for rows in seen)
    assert all(sorted(rows[:4])[:3] == [1, 1, 1] for rows in seen if len(rows) >= 4 and sum(rows) > 4)


def test_ngram_drafts_only_on_repeating_text(markov, make_model, run):
    """A repeating text is decoded with n-gram drafts; a text without repetition is decoded plainly."""
    model, _ = markov(0.0)
    walk, _ = generate(model, [[3]], 150, EngineConfig(max_context_len=200))
    loop = [list(walk[0].tokens)]
    want, _ = run(model, None, 0, loop, max_context_len=256)
    got, engine = run(model, Ngram(2, 6, 3, 1), 0.02, loop, max_context_len=256, graph=True)
    assert got == want
    assert engine.statistics.mean_accepted > 2
    model = make_model("llama")
    fresh = [list(range(20))]
    want, _ = run(model, None, 0, fresh, count=6)
    got, engine = run(model, Ngram(1, 6, 4, 4), FREE, fresh, count=6)
    assert got == want
    assert engine.statistics.plain == engine.statistics.rounds


class Scripted:
    """Policy that returns the given budgets in order; None is a plain round."""

    def __init__(self, rounds, keeps=True):
        self.rounds, self.keeps = iter(rounds), keeps

    def start(self, load):
        return next(self.rounds)

    def decide(self, load, tokens, waiting):
        return next(self.rounds)

    def keeps_up(self, load, waiting):
        return self.keeps


@functools.cache
def _texts_and_trees(overlap, plain_rounds):
    """Repeat three rounds with drafts and `plain_rounds` without; return two texts, and trees by (request, length)."""
    model, head = tiny_pair(1.0)
    host = HostKind.UPPER_BOUND if overlap else HostKind.EXACT
    config = EngineConfig(
        speculate=Adaptive(Eagle(head, 2, 3, 6), (12,), _never()), max_num_reqs=2, max_context_len=128, page_size=4,
        overlap=overlap, host_lengths=host, max_extend_tokens=24, guard=True,
    )  # fmt: skip
    engine = Engine(model, config)
    drafting, state, trees = engine._drafting, engine._state, {}
    drafting._policy = Scripted(itertools.cycle([12] * 3 + [None] * plain_rounds))
    grow = drafting.grow

    def watched(padded, live, host):
        grow(padded, live, host)
        for i in range(live):
            at = int(state.requests[i]), int(state.lengths.device[state.rows[i]])
            trees[at] = state.tokens[i, 1:].tolist(), state.parents[i].tolist()

    drafting.grow = watched
    ids = [engine.submit([5, 6, 7], 100), engine.submit([9, 8, 7, 6, 5], 60)]
    while engine.busy:
        engine.step()
    return [engine.output(i) for i in ids], trees


@pytest.mark.parametrize(("overlap", "plain_rounds"), quick(itertools.product([False, True], [1, 7, 40]), together=1))
def test_head_catches_up_after_plain_rounds(overlap, plain_rounds):
    """Plain rounds do not change the trees that the head drafts afterwards."""
    text, never = _texts_and_trees(overlap, 0)
    rested_text, rested = _texts_and_trees(overlap, plain_rounds)
    assert text == rested_text
    both = never.keys() & rested.keys()
    assert len(both) > 3
    assert {at: never[at] for at in both} == {at: rested[at] for at in both}


@pytest.mark.parametrize("overlap", [False, True])
def test_lapsed_request_is_not_drafted_but_new_one_is(overlap):
    """A request with a dropped backlog is decoded without drafts; a new request is drafted."""
    model, head = tiny_pair(0.0)
    host = HostKind.UPPER_BOUND if overlap else HostKind.EXACT
    shared = {"max_num_reqs": 2, "max_context_len": 128, "page_size": 4, "overlap": overlap, "host_lengths": host}
    config = EngineConfig(**shared, speculate=Adaptive(Eagle(head, 2, 3, 6), (12,), _never()), max_extend_tokens=24)
    engine = Engine(model, config)
    drafting = engine._drafting
    room = drafting._backlog.room
    drafting._policy = Scripted(itertools.chain([None] * (room + 1), itertools.repeat(12)), keeps=False)
    old = engine.submit([5, 6, 7], 90)
    for _ in range(room + 8):
        engine.step()
    assert drafting._backlog.lapsed(engine._requests[old])
    assert engine.statistics.plain == engine.statistics.rounds, "no round drafts for the lapsed request"
    new = engine.submit([9, 8, 7, 6, 5], 30)
    while engine.busy:
        engine.step()
    assert engine.statistics.accepted > engine.statistics.rounds + 20, "the new request's drafts are accepted"
    plain, _ = generate(model, [[5, 6, 7]], 90, EngineConfig(**shared))
    also, _ = generate(model, [[9, 8, 7, 6, 5]], 30, EngineConfig(**shared))
    assert [engine.output(old), engine.output(new)] == [plain[0].tokens, also[0].tokens]


def _never():
    from draftmark_speculative.adaptive.costs import Cost, CostTable

    return CostTable({1: Cost(1.0)}, {1: Cost(1.0)})


@pytest.mark.parametrize(("graph", "host_drafts"), quick(itertools.product([True, False], [False, True]), together=1))
def test_measured_cost_table_gives_plain_text(markov, prompts, graph, host_drafts):
    """Without a cost table the engine measures one, eagerly or captured, and gives the text of plain decoding."""
    model, head = markov(0.01)
    starts, drafts = prompts(4, 12, seed=8), Ngram(2, 6) if host_drafts else Eagle(head, 2, 3, 6)
    want, _ = generate(model, starts, 20, EngineConfig(max_context_len=64))
    config = EngineConfig(speculate=Adaptive(drafts), max_context_len=64, max_num_reqs=3, graph=graph)
    got, engine = generate(model, starts, 20, config)
    assert got == want
    table = engine._drafting._policy.table
    assert set(table.plain) == ({1, 2, 3} if not graph else set(config.limits.capture_batch_sizes))
    assert bool(table.drafting) != host_drafts
    assert not graph or set(table.verify) == set(config.limits.row_budgets)
    assert int(engine._state.lengths.device.sum()) == 0, "the measurement leaves no lengths"


def test_speculate_accepts_the_word_adaptive():
    """speculate="adaptive" selects adaptive drafting; another word raises an error."""
    config = EngineConfig(speculate="adaptive")
    assert isinstance(config.speculation, Adaptive) and isinstance(config.speculation.drafts, Eagle)
    assert config.limits.row_budgets[0] == 2
    with pytest.raises(RequestError, match=r"speculate is 'adaptative', but it must be a Speculation, 'adaptive'"):
        EngineConfig(speculate="adaptative")


def test_backend_without_ragged_verify_is_rejected(make_model, monkeypatch):
    """An engine with adaptive drafting rejects a backend without RAGGED_VERIFY; the error names mode and remedy."""
    from draftmark.loaded import LoadedBackend

    monkeypatch.setattr(LoadedBackend, "info", None, raising=False)
    original = LoadedBackend.__init__

    def poorer(self, *arguments):
        original(self, *arguments)
        modes = tuple(mode for mode in self.info.modes if mode is not Mode.RAGGED_VERIFY)
        object.__setattr__(self, "info", _replace(self.info, modes))

    monkeypatch.setattr(LoadedBackend, "__init__", poorer)
    with pytest.raises(BackendRefusal, match=r"speculate=adaptive .* mode ragged_verify .* or fixed drafts .*Ngram"):
        Engine(make_model("llama"), EngineConfig(speculate=Adaptive(Ngram()), max_context_len=64))


def _replace(info, modes):
    from dataclasses import replace

    return replace(info, modes=modes)


def test_wrong_adaptive_settings_are_rejected(markov, make_model):
    """Adaptive rejects an invalid probe_share, drafts of one row, overlap with host drafts, and an unknown source."""
    _, head = markov(0.01)
    with pytest.raises(RequestError, match=r"probe_share is 1\.5"):
        Adaptive(Eagle(head), probe_share=1.5)
    with pytest.raises(GeometryError, match="num_draft_tokens"):
        Adaptive(Ngram(num_draft_tokens=1))
    late = EngineConfig(speculate=Adaptive(Ngram()), overlap=True, host_lengths="unknown", max_context_len=64)
    with pytest.raises(RequestError, match="overlap is on with drafts of Adaptive"):
        Engine(make_model("llama"), late)

    class Other(Speculation):
        topk, num_draft_tokens = 1, 4

    with pytest.raises(RequestError, match="adaptive drafting got Other"):
        Engine(make_model("llama"), EngineConfig(speculate=Adaptive(Other()), max_context_len=64))
