"""The loop on an accelerator: the reference backend on CUDA, eagerly and in CUDA graphs, against the CPU's text."""

import itertools

import pytest
import torch

from draftmark_speculative import EngineConfig, HostKind, Sampling, generate
from draftmark_speculative.models import wrap_model
from draftmark_speculative.models.tiny import tiny_hf_model

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
FAMILIES = ["llama", "mistral", "gemma3_text"]


@pytest.fixture(scope="session")
def on_cuda():
    """Family → the tiny model of `make_model` on CUDA, as another copy."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = wrap_model(tiny_hf_model(family, vocab_size=256).cuda(), name=family)
        return made[family]

    return make


@pytest.mark.parametrize(
    ("family", "graph", "topk", "host"),
    list(itertools.product(FAMILIES, [False, True], [1, 3], [HostKind.EXACT, HostKind.UNKNOWN])),
)
def test_cuda_gives_the_text_of_the_cpu(make_model, plain_text, on_cuda, oracle, prompts, family, graph, topk, host):
    """Greedy, float32: eager and captured rounds on CUDA give transformers' CPU text, with guards on."""
    starts = prompts(5, 30, seed=5)
    wanted = [plain_text(family, tuple(p), 20) for p in starts]
    config = EngineConfig(
        speculate=oracle(topk, 7, tuple(wanted)), page_size=16, max_num_reqs=3, max_context_len=64,
        max_extend_tokens=20, graph=graph, host_lengths=host, guard=True,
    )  # fmt: skip
    outs, engine = generate(on_cuda(family), starts, 20, config)
    assert [out.tokens for out in outs] == wanted
    assert engine.statistics.mean_accepted > 1.5
    for group in engine._layers.groups:
        group.arena.check()


@pytest.mark.parametrize("graph", [False, True])
def test_cuda_samples_speculatively_what_it_samples_plainly(on_cuda, oracle, prompts, graph):
    """Sampling on CUDA: with one seed, drafts change nothing."""
    starts = prompts(4, 20)
    base = {"sampling": Sampling(1.0, 0.9, 5), "max_num_reqs": 4, "max_context_len": 64}
    plain, _ = generate(on_cuda("llama"), starts, 20, EngineConfig(**base))
    texts = tuple(out.tokens for out in plain)
    drafted, _ = generate(
        on_cuda("llama"), starts, 20, EngineConfig(**base, speculate=oracle(3, 6, texts), graph=graph)
    )
    assert [out.tokens for out in drafted] == list(texts)
