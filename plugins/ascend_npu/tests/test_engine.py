"""Tests of the speculative decoding loop on an NPU: a tiny Llama generates the reference backend's text."""

import pytest

from draftmark_speculative import EngineConfig, Ngram, generate

pytestmark = pytest.mark.device
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [1, 2, 3, 4] * 5, [9, 9, 9]]
TOKENS = 40
SETTINGS = {"page_size": 128, "max_context_len": 256, "max_num_reqs": 2}


def tiny_llama(device, dtype):
    """Return a Llama of two layers with 4/2 heads of 128 and random weights."""
    pytest.importorskip("transformers")
    from draftmark_speculative.models import wrap_model
    from draftmark_speculative.models.tiny import tiny_hf_model

    shape = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    model = tiny_hf_model("llama", dtype=dtype, **shape)
    model.set_attn_implementation("eager")
    return wrap_model(model.to(device), name="tiny-llama-128")


@pytest.fixture(scope="module")
def texts():
    """Return the texts that the reference backend generates on the CPU without drafts, one token per step."""
    config = EngineConfig(backend="reference", **SETTINGS)
    found, _ = generate(tiny_llama("cpu", "float16"), PROMPTS, TOKENS, config)
    # N-gram drafts need repeated text. But a text that repeats one token would not show a wrong key.
    assert len({token for out in found for token in out.tokens}) > 10
    return [out.tokens for out in found]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "NPUGraph"])
@pytest.mark.parametrize("speculate", [None, Ngram(1, 4), Ngram(3, 8)], ids=["plain", "chain", "tree"])
def test_text_equals_the_references(texts, graph, speculate):
    """Greedy float16 texts equal the reference backend's. Two requests run together, and a third joins late."""
    config = EngineConfig(backend="ascend_npu", speculate=speculate, graph=graph, guard=True, **SETTINGS)
    found, engine = generate(tiny_llama("npu", "float16"), PROMPTS, TOKENS, config)
    assert [out.tokens for out in found] == texts
    assert (engine.statistics.mean_accepted > 1.5) == (speculate is not None)


def test_inexact_host_lengths_are_refused():
    """Without overlap the engine refuses host length bounds before the first token: the operator needs exact ones."""
    from draftmark.errors import BackendRefusal
    from draftmark_speculative import HostKind

    config = EngineConfig(backend="ascend_npu", host_lengths=HostKind.UPPER_BOUND, **SETTINGS)
    with pytest.raises(BackendRefusal, match="exact host lengths"):
        generate(tiny_llama("npu", "float16"), PROMPTS, 4, config)
