"""Decode a list of prompts to the end: the engine's loop in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .config import EngineConfig
from .engine import Engine
from .models import CausalLM
from .request import FinishReason, Progress


@dataclass(frozen=True)
class Generation:
    """The output of one prompt."""

    tokens: tuple[int, ...]
    finish: FinishReason


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    config: EngineConfig,
    *,
    stop: Sequence[int] = (),
    watch: Callable[[Engine, list[Progress]], None] | None = None,
) -> tuple[list[Generation], Engine]:
    """Decode all prompts together.

    Args:
        prompts: token ids of each prompt.
        watch: called after every step, for a progress line.

    Returns:
        One `Generation` per prompt, in order, and the engine (for its statistics).
    """
    engine = Engine(model, config)
    ids = [engine.submit(prompt, max_new_tokens, stop) for prompt in prompts]
    finish: dict[int, FinishReason] = {}
    while engine.busy:
        progress = engine.step()
        finish.update({p.request_id: p.finish for p in progress if p.finish is not None})
        if watch is not None:
            watch(engine, progress)
    return [Generation(engine.output(i), finish[i]) for i in ids], engine
