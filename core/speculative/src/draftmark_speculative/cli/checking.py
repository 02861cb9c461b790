"""Baselines for `--check`: the same prompts without speculation and through transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig

from draftmark_tools.cli.progress import ProgressLine

from .. import EngineConfig
from ..models import CausalLM
from ..models.quiet import quiet
from .decoding import decode

Tokens = tuple[int, ...]

PLAIN = "plain decoding"
TRANSFORMERS = "transformers' generate"


@dataclass(frozen=True)
class Baseline:
    """Output that the run's texts are compared with.

    Attributes:
        name: `PLAIN` or `TRANSFORMERS`.
        outputs: tokens of each prompt.
        tokens_per_second: over all prompts; transformers decodes one prompt at a time.
    """

    name: str
    outputs: list[Tokens]
    tokens_per_second: float


def baselines(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    config: EngineConfig,
    line: ProgressLine,
) -> list[Baseline]:
    """Decode the prompts without drafts in the same graph mode, and if greedy also by transformers' `generate`.

    Sampled text is not compared with transformers, because its random numbers differ. It is compared with draftmark's
    plain sampling: randomness is a function of (seed, request, position), so drafts cannot change the text.
    """
    plain = decode(model, prompts, max_new_tokens, replace(config, speculate=None), line, PLAIN)
    if plain.interrupted:
        raise KeyboardInterrupt
    found = [Baseline(PLAIN, [output.tokens for output in plain.outputs], plain.tokens_per_second)]
    if config.sampling.greedy:
        found.append(_transformers(model, prompts, max_new_tokens, config.max_context_len, line))
    return found


def _transformers(
    model: CausalLM, prompts: Sequence[Sequence[int]], max_new_tokens: int, max_context_len: int, line: ProgressLine
) -> Baseline:
    outputs, start = [], time.perf_counter()
    line.say(f"{TRANSFORMERS}: 0/{len(prompts)} done")
    for prompt in prompts:
        outputs.append(_generate(model, prompt, min(max_new_tokens, max_context_len - len(prompt))))
        line.milestone(f"{TRANSFORMERS}: {len(outputs)}/{len(prompts)} done")
    seconds = time.perf_counter() - start
    return Baseline(TRANSFORMERS, outputs, sum(map(len, outputs)) / seconds)


def _generate(model: CausalLM, prompt: Sequence[int], max_new_tokens: int) -> Tokens:
    stop = list(model.stop_token_ids)
    greedy = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=model.decodes_alike,
        eos_token_id=stop or None,
        pad_token_id=stop[0] if stop else 0,
    )
    ids = torch.tensor([list(prompt)], device=model.device)
    with quiet(), _generation_config(model.hf, greedy), torch.inference_mode():
        output = model.hf.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
    return tuple(output[0, len(prompt) :].tolist())


@contextmanager
def _generation_config(hf: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation configuration inside the context.

    transformers would fill unset fields, such as penalties, from the model's own configuration. draftmark's greedy
    decoding applies no penalties.
    """
    own = hf.generation_config
    hf.generation_config = config
    try:
        yield
    finally:
        hf.generation_config = own
