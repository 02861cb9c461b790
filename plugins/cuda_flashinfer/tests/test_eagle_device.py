"""GPU tests of a draft head on FlashInfer: output tokens stay equal, and enough drafts are accepted."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from draftmark.errors import BackendRefusal
from draftmark_speculative import Eagle, Engine, EngineConfig, HostKind, generate
from draftmark_speculative.compare import compare
from draftmark_speculative.eagle.tiny import tiny_pair

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
VOCAB, COUNT = 256, 24
SHAPES = {"chain": (1, 4, 5), "tree": (4, 3, 12), "wide": (8, 4, 33)}


@cache
def pair(dtype):
    """Return a target model that predicts mainly from the last token, and a draft head with similar predictions."""
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024}
    return tiny_pair(vocab_size=VOCAB, device="cuda", dtype=dtype, **fields)


@cache
def prompts():
    """Return six prompts; two are long enough that FlashInfer splits their keys."""
    dice = random.Random(3)
    return [[dice.randrange(VOCAB) for _ in range(n)] for n in (1, 5, 17, 40, 300, 620)]


def configure(speculate=None, **more):
    return EngineConfig(
        backend="cuda_flashinfer", speculate=speculate, page_size=16, max_num_reqs=4, max_context_len=700,
        max_extend_tokens=256, **more,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("graph", [False, True])
def test_head_drafts_do_not_change_tokens(dtype, shape, graph):
    """Drafting keeps plain decoding's tokens except after near ties, and accepts over 1.4 tokens per verify.

    A draft head that reads a wrong plan drafts wrong tokens. The output does not show that, but the accepted length
    does.
    """
    model, head = pair(dtype)
    plain, _ = generate(model, prompts(), COUNT, configure(graph=graph, guard=True))
    outs, engine = generate(model, prompts(), COUNT, configure(Eagle(head, *SHAPES[shape]), graph=graph, guard=True))
    texts, wanted = ([out.tokens for out in found] for found in (outs, plain))
    assert compare(model, prompts(), texts, {"plain": wanted}, configure()).right
    assert sum(text != other for text, other in zip(texts, wanted, strict=True)) <= 2
    assert engine.pages.in_use == 0
    assert engine.statistics.mean_accepted > 1.4


def test_overlap_is_refused():
    """An engine with overlap is refused at creation, because plans need exact lengths. The error has the remedy."""
    model, head = pair("bfloat16")
    with pytest.raises(BackendRefusal, match=r"cuda_flashinfer.*exact host lengths.*use overlap=False"):
        Engine(model, configure(Eagle(head, *SHAPES["tree"]), overlap=True, host_lengths=HostKind.UPPER_BOUND))
