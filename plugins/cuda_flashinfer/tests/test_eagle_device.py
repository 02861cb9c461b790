"""A draft head on FlashInfer: its steps in one captured graph change nothing of the text, and they guess well."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from draftmark.errors import BackendRefusal
from draftmark.speculative import Eagle, Engine, EngineConfig, HostKind, generate
from draftmark.speculative.eagle import DraftHead, HeadConfig
from draftmark.speculative.models import wrap_model
from draftmark.speculative.models.tiny import tiny_hf_model

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
VOCAB, COUNT = 256, 24
SHAPES = {"chain": (1, 4, 5), "tree": (4, 3, 12), "wide": (8, 4, 33)}


@cache
def pair(dtype):
    """A model whose text depends on the last token above all, its float32 copy, and the head that knows so.

    `draftmark.speculative.eagle.tiny.tiny_pair` with heads of 64 in 16 bit, which FlashInfer serves.
    """
    fields = {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
              "max_position_embeddings": 1024}  # fmt: skip
    hf = tiny_hf_model("llama", **fields)
    for layer in hf.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data.mul_(0.01)
    width = int(hf.config.hidden_size)
    head = DraftHead(HeadConfig(width, VOCAB, 4, 2, 64, 96, (0, 1)))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.data.zero_()
    one = torch.eye(width)
    head.fc.weight.data.copy_(torch.cat((one, -one), 1))
    head.output_norm.weight.data.copy_(hf.model.norm.weight.data)
    kind = getattr(torch, dtype)
    exact = tiny_hf_model("llama", **fields).cuda()
    exact.load_state_dict(hf.state_dict())
    model = wrap_model(hf.to(kind).cuda(), name="tiny-markov-64")
    return model, exact, head.to(kind).cuda().requires_grad_(False).eval()


@cache
def prompts():
    """Six prompts, two of them long enough that FlashInfer cuts their keys."""
    dice = random.Random(3)
    return [[dice.randrange(VOCAB) for _ in range(n)] for n in (1, 5, 17, 40, 300, 620)]


def configure(speculate=None, **more):
    return EngineConfig(
        backend="cuda_flashinfer", speculate=speculate, page_size=16, max_num_reqs=4, max_context_len=700,
        max_extend_tokens=256, **more,
    )  # fmt: skip


def is_near_tie(model, exact, tokens):
    """Whether float32's two best logits behind `tokens` are closer than twice what rounding moves a logit by."""
    ids = torch.tensor([tokens], device="cuda")
    with torch.inference_mode():
        wanted, got = (one(ids).logits[0, -1].float() for one in (exact, model.hf))
    best = wanted.topk(2).values
    return float(best[0] - best[1]) < 2 * float((wanted - got).abs().max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("graph", [False, True])
def test_the_heads_drafts_change_nothing(dtype, shape, graph):
    """Plain decoding's text, near ties apart and not everywhere, and an accepted length that good guesses give.

    A head that reads a wrong plan drafts nonsense, which the text cannot show: the accepted length does.
    """
    model, exact, head = pair(dtype)
    plain, _ = generate(model, prompts(), COUNT, configure(graph=graph, guard=True))
    outs, engine = generate(model, prompts(), COUNT, configure(Eagle(head, *SHAPES[shape]), graph=graph, guard=True))
    differing = 0
    for prompt, out, want in zip(prompts(), outs, plain, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(out.tokens, want.tokens, strict=True)) if a != b), None)
        if at is not None:
            differing += 1
            assert is_near_tie(model, exact, [*prompt, *want.tokens[:at]]), (len(prompt), at)
    assert differing < len(plain), differing
    assert engine.pages.in_use == 0
    assert engine.statistics.mean_accepted > 1.4


def test_overlap_is_refused_by_name():
    """Plans need exact lengths: an engine that would run late is refused when it is made, with the remedy."""
    model, _, head = pair("bfloat16")
    with pytest.raises(BackendRefusal, match=r"cuda_flashinfer.*exact host lengths.*use overlap=False"):
        Engine(model, configure(Eagle(head, *SHAPES["tree"]), overlap=True, host_lengths=HostKind.UPPER_BOUND))
