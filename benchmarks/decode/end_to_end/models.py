"""Models of the end-to-end benchmark: SmolLM2 with its trained head, and the shape of Llama-3-8B.

The Llama shape has random weights. Its text is meaningless and its drafts would never be accepted, so acceptance is
forced, and contexts are random KV instead of computed KV. It measures the cost of the loop at a given accepted length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftmark_speculative import Engine
from draftmark_speculative.drafts import DraftTree
from draftmark_speculative.eagle import DraftHead, HeadConfig
from draftmark_speculative.eagle.installed import installed_head
from draftmark_speculative.models import CausalLM, load_model, wrap_model
from draftmark_speculative.ngram import Ngram, NgramIndex

SMOLLM2, LLAMA, SMOLLM2_SHAPE = "SmolLM2-135M-Instruct", "Llama-3-8B-shape", "SmolLM2-135M-shape"
PEAK = 5.0
"""Factor on a random head's last norm. Its best token then has about half of the probability, as with a trained head.
A flat head would grow trees that are wide and one level deep."""


@dataclass(frozen=True)
class Subject:
    """A model and its draft head. With random weights, also the acceptance to force.

    Attributes:
        head: None for a model that is only measured without a head.
        forced: kind of drafts → profile of `ForcedAcceptance`.
    """

    name: str
    model: CausalLM
    head: DraftHead | None
    forced: dict[str, tuple[float, ...]]


def smollm2(path: str | None, head: str | None, dtype: str, device: str) -> Subject:
    """Return the bundled model with its draft head, from the folder `head` or from the installed package."""
    model = load_model(path, dtype=dtype, device=device)
    loaded = DraftHead.load(head or installed_head(model.name))
    return Subject(SMOLLM2, model, loaded, {})


def llama(profiles: dict[str, tuple[float, ...]], device: str, tiny: bool) -> Subject:
    """Return the Llama shape with random weights, made on the device. `tiny` is for tests of the benchmark itself."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    sizes: dict[str, Any] = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    }  # fmt: skip
    if tiny:
        sizes = {**sizes, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    drawn = _random(sizes, 500000.0, dtype, device)
    with torch.device(device), torch.inference_mode():
        layers = sizes["num_hidden_layers"]
        head = DraftHead(
            HeadConfig(
                sizes["hidden_size"], sizes["vocab_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"],
                sizes["hidden_size"] // sizes["num_attention_heads"], sizes["intermediate_size"],
                (1, layers // 2, layers), min(32000, sizes["vocab_size"]), 500000.0, target=LLAMA,
            )
        ).to(dtype)  # fmt: skip
        head.output_norm.weight.fill_(PEAK)
    # Outside of the context: compiled kernels of the model would be compiled again after it ends.
    with torch.inference_mode():
        model = wrap_model(drawn, name=LLAMA)
    return Subject(LLAMA, model, head, profiles)


def smollm2_shape(device: str) -> Subject:
    """Return SmolLM2's shape with random weights, for speeds that depend on no text."""
    sizes = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152,
    }  # fmt: skip
    drawn = _random(sizes, 100000.0, torch.float32 if device == "cpu" else torch.bfloat16, device)
    with torch.inference_mode():
        return Subject(SMOLLM2_SHAPE, wrap_model(drawn, name=SMOLLM2_SHAPE), None, {})


def _random(sizes: dict[str, Any], theta: float, dtype: torch.dtype, device: str) -> Any:
    """Return transformers' Llama of these sizes with random weights. Weights are drawn on the device."""
    config = LlamaConfig(
        **sizes, max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device), torch.inference_mode():
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


@torch.inference_mode()
def seat(engine: Engine, requests: int, context: int) -> None:
    """Add requests with `context` tokens that count as stored, without the forwards that would store them.

    The KV pools are filled with random numbers. A prefill of half a million tokens of the 8B shape would take longer
    than the whole measurement.
    """
    for layers in engine._models:
        for group in layers.groups:
            for cache in group.pool.layers:
                for tensor in (cache.k, cache.v):
                    tensor[engine._layers.pages.null :].normal_()
    vocab, state = engine.model.vocab_size, engine._state
    for first in range(requests):
        prompt = [(first + i * 7919) % vocab for i in range(context)]
        engine.submit(prompt, engine.config.max_context_len)
    engine._scheduler.admit()
    for request in list(engine._scheduler.prefilling):
        state.resume(request.row, context)
        state.pending[request.row] = request.tokens[-1]
        request.computed = context
        engine._scheduler.prefilled(request)
        engine._give(request, [request.tokens[-1]])


@dataclass(frozen=True)
class FindingNgram(Ngram):
    """Prompt look-up that continues with old text if it finds no match.

    Random text never repeats, so a real look-up would draft nothing. The search still runs, so its time is measured.
    """

    def begin(self, request_id: int, prompt: Any) -> Any:
        """Return an n-gram look-up for one request that always finds a draft."""
        return _FindingIndex(self, prompt)


class _FindingIndex(NgramIndex):
    def propose(self) -> DraftTree:
        tree = super().propose()
        if len(tree) == 1:
            tree.insert(self._tokens[: self._settings.num_draft_tokens - 1], self._settings.num_draft_tokens - 1)
        return tree
