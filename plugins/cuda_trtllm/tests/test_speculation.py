"""GPU tests of the speculative loop: n-gram chains and trees, eager and captured, give plain decoding's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark_speculative import EngineConfig, HostKind, Ngram, generate
from draftmark_speculative.compare import compare

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.fixture(scope="module")
def models():
    """Return a function from head_dim to a tiny random Llama on CUDA in bf16."""
    from draftmark_speculative.models import wrap_model
    from draftmark_speculative.models.tiny import tiny_hf_model

    made = {}

    def make(head_dim):
        if head_dim not in made:
            fields = {
                "vocab_size": 64, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": head_dim,
            }  # fmt: skip
            made[head_dim] = wrap_model(tiny_hf_model("llama", dtype="bfloat16", **fields).cuda(), name="llama")
        return made[head_dim]

    return make


PROMPTS = [[5, 6, 7, 8] * 5 + [5, 6], [9] * 17, list(range(40)), [1, 2, 3, 1, 2, 3, 1, 2], [33]]


def decode(model, **settings):
    config = EngineConfig(
        backend="cuda_trtllm", page_size=16, max_num_reqs=3, max_context_len=128, max_extend_tokens=48, guard=True,
        **settings,
    )  # fmt: skip
    outs, engine = generate(model, PROMPTS, 40, config)
    return [out.tokens for out in outs], engine.statistics.mean_accepted


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("topk", [1, 3])
def test_drafts_do_not_change_tokens(models, head_dim, graph, topk):
    """Greedy decoding in bf16 gives equal tokens with and without drafts, and some drafts are accepted."""
    model = models(head_dim)
    plain, _ = decode(model)
    drafted, accepted = decode(model, speculate=Ngram(topk, 7, 2, 1), graph=graph, host_lengths=HostKind.UNKNOWN)
    assert drafted == plain
    assert accepted > 1.0


@pytest.mark.parametrize("graph", [False, True])
def test_differs_from_reference_only_at_near_ties(models, graph):
    """XQA and the reference backend generate equal tokens, except after a near tie of two logits."""
    model = models(64)
    config = EngineConfig(backend="reference", page_size=16, max_num_reqs=3, max_context_len=128, max_extend_tokens=48)
    outs, _ = generate(model, PROMPTS, 40, config)
    ours, _ = decode(model, graph=graph)
    theirs = {"reference": [out.tokens for out in outs]}
    assert compare(model, PROMPTS, ours, theirs, replace(config, backend="cuda_trtllm")).right
