"""Attention sinks in the loop: models with sinks give transformers' texts, and every layer's cache has its sinks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from draftmark import BackendRefusal
from draftmark.loaded import LoadedBackend
from draftmark_speculative import Adaptive, Eagle, Engine, EngineConfig, HostKind, Ngram, generate
from draftmark_speculative.compare import compare
from draftmark_speculative.models import wrap_model
from draftmark_speculative.models.tiny import tiny_hf_model, tiny_model
from draftmark_testing.pairs import quick

COUNT = 24
LATE = {"overlap": True, "host_lengths": HostKind.UPPER_BOUND}


@pytest.fixture(scope="module")
def texts(plain_text, prompts):
    """Prompts shorter and longer than the window, and transformers' own texts."""
    starts = prompts(4, 30, seed=2)
    return starts, [plain_text("gpt_oss", tuple(prompt), COUNT) for prompt in starts]


def drafting(way, texts, random_head, oracle, table):
    """Return the `Speculation` of a drafting method, and the engine settings that it needs."""
    return {
        "plain": lambda: (None, {}),
        "n-gram": lambda: (Ngram(2, 8), {}),
        "chain": lambda: (oracle(1, 5, tuple(texts)), {}),
        "tree": lambda: (oracle(3, 7, tuple(texts)), {}),
        "head": lambda: (Eagle(random_head(), 4, 3, 12), LATE),
        "adaptive": lambda: (Adaptive(oracle(3, 7, tuple(texts)), (4, 14, 21), table(0.0), 0.01), {}),
    }[way]()


@pytest.mark.parametrize(
    ("way", "page_size", "graph"),
    quick(product(["plain", "n-gram", "chain", "tree", "head", "adaptive"], [1, 16], [False, True])),
)
def test_gpt_oss_gives_transformers_text(make_model, texts, random_head, oracle, table, way, page_size, graph):
    """A model with sinks and alternating windows gives transformers' own text, for every drafting method."""
    starts, wanted = texts
    speculate, more = drafting(way, wanted, random_head, oracle, table)
    config = EngineConfig(
        speculate=speculate, page_size=page_size, max_num_reqs=3, max_context_len=64, graph=graph, guard=True, **more
    )
    outputs, engine = generate(make_model("gpt_oss"), starts, COUNT, config)
    assert [one.tokens for one in outputs] == wanted
    assert way not in ("chain", "tree") or engine.statistics.mean_accepted > 1.3, "the test needs accepted drafts"


def test_every_layer_has_its_own_sinks(make_model):
    """Each layer's cache contains that layer's own sinks, in layers with and without a window."""
    model = make_model("gpt_oss")
    layers = Engine(model, EngineConfig(max_context_len=32))._layers
    assert [one.window_left for one in model.layers] == [8, -1, 8, -1]
    for block, cache in zip(model.hf.model.layers, layers._caches, strict=True):
        assert torch.equal(cache.sinks, block.self_attn.sinks)
    assert len({cache.k.data_ptr() for cache in layers._caches}) == 4


def test_sinks_of_half_precision_are_read_in_float32(prompts):
    """A bfloat16 model's sinks become float32, and its texts are right up to rounding."""
    model = tiny_model("gpt_oss", dtype="bfloat16")
    assert {sinks.dtype for sinks in model.sinks} == {torch.float32}
    assert not any(sinks.is_inference() for sinks in model.sinks)
    starts, config = prompts(2, 12), EngineConfig(max_context_len=32)
    outputs, _ = generate(model, starts, 12, config)
    assert compare(model, starts, [one.tokens for one in outputs], {}, config).right


def test_sinks_of_an_unlisted_family_are_served(prompts):
    """A model type that no list contains is served with its sinks, because the probe reads them from the call."""
    hf = tiny_hf_model("gpt_oss")
    hf.config.model_type = "newcomer"
    model = wrap_model(hf)
    assert all(one.sinks for one in model.layers) and all(sinks is not None for sinks in model.sinks)


def test_backend_without_sinks_is_refused_by_name(make_model, monkeypatch):
    """A backend that does not declare sinks is refused in one sentence, before any token."""
    real = LoadedBackend.__init__

    def without_sinks(self, name, plugin):
        real(self, name, plugin)
        self.info = replace(self.info, sinks=False)

    monkeypatch.setattr(LoadedBackend, "__init__", without_sinks)
    with pytest.raises(BackendRefusal, match=r"backend 'reference' .*: attention sinks are not served") as refusal:
        Engine(make_model("gpt_oss"), EngineConfig(max_context_len=32))
    assert "\n" not in str(refusal.value)
    Engine(make_model("llama"), EngineConfig(max_context_len=32))


def test_layers_without_sinks_have_none(make_model):
    """A model without sinks has none in any layer or cache."""
    model = make_model("llama")
    assert model.sinks == (None, None)
    caches = Engine(model, EngineConfig(max_context_len=32))._layers._caches
    assert [cache.sinks for cache in caches] == [None, None]
