"""The loop decodes models with latent attention: every drafting method gives transformers' un-absorbed text."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from core.speculative.tests.known import Oracle
from draftmark_speculative import Adaptive, Eagle, Engine, EngineConfig, HostKind, Mtp, Ngram, Sampling, generate
from draftmark_speculative.judging import judge_drafter
from draftmark_speculative.judging.attention import DraftAttention
from draftmark_speculative.mtp.tiny import tiny_mtp_pair
from draftmark_testing.pairs import quick

COUNT = 16
SMALL = {"max_num_reqs": 3, "max_context_len": 64, "max_extend_tokens": 20, "guard": True}
SIZES = (1, 3)
WAYS = {
    "plain": (1.0, lambda give: None),
    "n-gram": (1.0, lambda give: Ngram(2, 8, 3, 1)),
    "chain": (1.3, lambda give: Oracle(1, 5, give.texts)),
    "tree": (1.3, lambda give: Oracle(3, 7, give.texts)),
    "wide tree": (1.3, lambda give: Oracle(4, 33, give.texts)),
    "head tree": (1.0, lambda give: Eagle(give.random_head(), 4, 3, 12)),
    "mtp chain": (1.2, lambda give: Mtp(give.head, 1, 3, 4)),
    "mtp tree": (1.2, lambda give: Mtp(give.head, 4, 3, 12)),
    "ragged mtp tree": (1.1, lambda give: Adaptive(Mtp(give.head, 4, 3, 12), (4, 24, 36), give.table(0.0), 0.01)),
    "ragged tree": (1.1, lambda give: Adaptive(Oracle(3, 7, give.texts), (4, 14, 21), give.table(0.0), 0.01)),
}
"""Drafting methods: least mean accepted length for a valid test, and how each is made."""
ON_THE_HOST = ("n-gram", "chain", "tree", "wide tree", "ragged tree")


class Given:
    """A tiny model and its MTP layer, prompts, and transformers' own texts."""

    def __init__(self, family, prompts, random_head, table):
        self.model, self.head = tiny_mtp_pair(family)
        self.random_head, self.table = random_head, table
        self.starts, texts = prompts(5, 30, seed=4), []
        for prompt in self.starts:
            ids = torch.tensor([prompt])
            out = self.model.hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
            )
            texts.append(tuple(out[0, len(prompt) :].tolist()))
        self.texts = tuple(texts)

    def decode(self, way, **more):
        """Decode the prompts; return the texts and the engine."""
        sizes = {"capture_batch_sizes": SIZES} if more.get("graph") else {}
        config = EngineConfig(**{**SMALL, **sizes, **more}, speculate=WAYS[way][1](self))
        outs, engine = generate(self.model, self.starts, COUNT, config)
        assert engine.pages.in_use == 0
        return tuple(out.tokens for out in outs), engine


@pytest.fixture(scope="session")
def given(prompts, random_head, table):
    """Return a function from a family to its `Given`."""
    return cache(lambda family: Given(family, prompts, random_head, table))


def settings(pages):
    """Return every possible combination of family, drafting method, page size, graph and overlap."""
    every = product(("deepseek_v3", "glm4_moe_lite"), WAYS, pages, (False, True), (False, True))
    return [one for one in every if not (one[4] and one[1] in ON_THE_HOST)]


OTHERS = [("deepseek_v3", "mtp tree", 16, True, True), ("glm4_moe_lite", "tree", 64, False, False)]
SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in settings((16, 64)) if one not in OTHERS]


@pytest.mark.parametrize(
    ("family", "way", "page_size", "graph", "overlap"), [*quick(settings((1, 48))), *OTHERS, *SLOW]
)
def test_every_drafting_method_gives_the_plain_text(given, family, way, page_size, graph, overlap):
    """Pages of 1, 16, 48 and 64 tokens, graphs and overlap give transformers' text with every drafting method."""
    give, host = given(family), HostKind.UPPER_BOUND if overlap else HostKind.EXACT
    texts, engine = give.decode(way, page_size=page_size, graph=graph, overlap=overlap, host_lengths=host)
    assert texts == give.texts
    assert engine.statistics.mean_accepted >= WAYS[way][0], "the test needs accepted drafts"


@pytest.mark.parametrize(("way", "num_pages"), [("tree", 20), ("mtp tree", 32), ("ragged mtp tree", 32)])
def test_preempted_requests_keep_their_text(given, way, num_pages):
    """With few pages, requests of a latent model wait and are preempted, and end with their own text."""
    give, late = given("deepseek_v3"), way != "tree"
    host = HostKind.UPPER_BOUND if late else HostKind.EXACT
    more = {"page_size": 4, "num_pages": num_pages, "graph": late, "overlap": late, "host_lengths": host}
    texts, engine = give.decode(way, **more)
    assert texts == give.texts
    assert engine.statistics.preemptions > 0


@pytest.mark.parametrize("way", ["tree", "mtp tree", "ragged mtp tree"])
def test_sampled_text_is_plain_sampling(given, way):
    """Sampling with drafts gives the tokens of plain sampling."""
    give, sampling = given("glm4_moe_lite"), Sampling(0.7, 0.95, 11)
    want, _ = give.decode("plain", sampling=sampling)
    assert give.decode(way, sampling=sampling, page_size=48)[0] == want


def test_mtp_layer_has_rows_of_its_own_under_the_same_page_ids(given):
    """The MTP layer's pool has the target's pages and row width, and other memory."""
    give = given("deepseek_v3")
    target, draft = Engine(give.model, EngineConfig(**SMALL, page_size=48, speculate=Mtp(give.head)))._models
    assert draft.geometry.attention == target.geometry.attention
    assert draft.pages == target.pages and len(draft._caches) == 1
    assert draft._caches[0].k.shape == target._caches[0].k.shape
    assert draft._caches[0].k.data_ptr() not in {cache.k.data_ptr() for cache in target._caches}


class Shifted(DraftAttention):
    """Drafter that reads every row one position too far."""

    def positions(self, batch):
        return batch.positions + 1


def test_a_latent_target_accepts_its_own_drafts(make_model, prompts):
    """The judge of drafters finds no lost draft of a latent target, and names a wrong position."""
    model, starts, config = make_model("deepseek_v3"), prompts(2, 12), EngineConfig(**SMALL, page_size=48)
    assert judge_drafter(model, config, starts, 12, drafts=3) == []
    lost = judge_drafter(model, config, starts, 12, drafts=3, attention=Shifted)
    assert lost and {one.difference for one in lost} == {"position"}


@pytest.mark.parametrize(
    ("family", "shape", "page_size", "graph"),
    [
        ("deepseek_v3", (4, 3, 12), 48, False),
        ("glm4_moe_lite", (1, 3, 4), 1, True),
        pytest.param("glm4_moe_lite", (4, 3, 12), 64, True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", (1, 3, 4), 16, True, marks=pytest.mark.slow),
    ],
)
def test_interpreted_triton_kernels_decode_latent_rows(given, family, shape, page_size, graph):
    """cuda_triton's latent kernels, interpreted, give transformers' text with MTP chains and trees."""
    give = given(family)
    config = EngineConfig(
        backend="cuda_triton", speculate=Mtp(give.head, *shape), page_size=page_size, graph=graph,
        overlap=True, host_lengths=HostKind.UNKNOWN, **SMALL,
    )  # fmt: skip
    outs, engine = generate(give.model, give.starts[:3], 8, config)
    assert [out.tokens for out in outs] == [text[:8] for text in give.texts[:3]]
    assert engine.statistics.mean_accepted > 1.2
