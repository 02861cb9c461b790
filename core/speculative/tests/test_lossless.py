"""Speculation changes the speed, never the text: token for token as transformers' own greedy decoding, float32."""

import itertools

import pytest

from core.speculative.tests.pairs import quick
from draftmark_speculative import EngineConfig, HostKind, Ngram, generate
from draftmark_speculative.models.tiny import FAMILIES

COUNT = 20
SHAPES = {"none": None, "chain": (1, 5), "tree": (3, 7), "wide tree": (4, 33)}
SETTINGS = itertools.product(SHAPES, [1, 16, 64], [False, True], HostKind)


def decode(make_model, plain_text, oracle, prompts, family, shape, page_size, graph, host, **more):
    """Five ragged prompts, three at a time, prefilled in chunks of 20; (outputs, wanted, engine)."""
    starts = prompts(5, 30, seed=len(family))
    wanted = [plain_text(family, tuple(prompt), COUNT) for prompt in starts]
    speculate = oracle(*SHAPES[shape], tuple(wanted)) if SHAPES[shape] else None
    config = EngineConfig(
        speculate=speculate, page_size=page_size, graph=graph, host_lengths=host, max_num_reqs=3,
        max_context_len=64, max_extend_tokens=20, guard=True, **more,
    )  # fmt: skip
    outs, engine = generate(make_model(family), starts, COUNT, config)
    return [out.tokens for out in outs], wanted, engine


@pytest.mark.parametrize(("shape", "page_size", "graph", "host"), quick(SETTINGS))
def test_every_setting_gives_the_plain_text(make_model, plain_text, oracle, prompts, shape, page_size, graph, host):
    """Draft shapes x page sizes x eager and recorded graphs x host-length kinds, guards on: the same text."""
    got, wanted, engine = decode(make_model, plain_text, oracle, prompts, "llama", shape, page_size, graph, host)
    assert got == wanted
    assert engine.pages.in_use == 0
    if SHAPES[shape]:
        assert engine.statistics.mean_accepted > 1.5, "without accepted drafts this tests nothing"


@pytest.mark.parametrize(
    ("family", "shape", "graph"), quick(itertools.product(FAMILIES, ["chain", "tree"], [False, True]))
)
def test_every_family_gives_the_plain_text(make_model, plain_text, oracle, prompts, family, shape, graph):
    """Window, mixed windows, soft cap, odd head sizes: each family decodes trees as it decodes plainly."""
    got, wanted, _ = decode(make_model, plain_text, oracle, prompts, family, shape, 4, graph, HostKind.UPPER_BOUND)
    assert got == wanted


@pytest.mark.parametrize("graph", [False, True])
def test_preempted_requests_lose_nothing(make_model, plain_text, oracle, prompts, graph):
    """With pages for little more than one request, requests wait, are sent back, and still end with their text."""
    got, wanted, engine = decode(
        make_model, plain_text, oracle, prompts, "llama", "tree", 4, graph, HostKind.UPPER_BOUND, num_pages=24
    )
    assert got == wanted
    assert engine.statistics.preemptions > 0
    assert engine.pages.in_use == 0


def test_ngram_drafts_pay_on_a_repeating_text(make_model):
    """A model that loops is drafted well: more than two tokens a round, and the plain text."""
    model, prompt = make_model("llama"), [3, 1, 4, 1, 5] * 4
    plain, _ = generate(model, [prompt], 60, EngineConfig(max_context_len=100))
    loop = prompt + list(plain[0].tokens)
    longer = [loop * 2]
    want, _ = generate(model, longer, 40, EngineConfig(max_context_len=256))
    got, engine = generate(model, longer, 40, EngineConfig(speculate=Ngram(2, 6, 3, 1), max_context_len=256))
    assert got == want
    assert engine.statistics.rounds <= 40


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_decodes_and_drafts(oracle, prompts, dtype):
    """In bf16 and fp16 the loop runs, and every token, drafted or not, is one that rounding explains."""
    from draftmark_speculative.compare import compare
    from draftmark_speculative.models.tiny import tiny_model

    model, config = tiny_model("llama", dtype=dtype), EngineConfig(max_context_len=64)
    starts = prompts(4, 20, seed=3)
    plain, _ = generate(model, starts, COUNT, config)
    texts = tuple(out.tokens for out in plain)
    drafted, _ = generate(model, starts, COUNT, EngineConfig(max_context_len=64, speculate=oracle(3, 7, texts)))
    assert compare(model, starts, [out.tokens for out in drafted], {"plain": texts}, config).right
