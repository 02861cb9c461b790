"""Decoding of a list of prompts to the end in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .arguments import check_kind
from .config import EngineConfig
from .engine import Engine
from .models import CausalLM
from .request import FinishReason, Progress


@dataclass(frozen=True)
class Generation:
    """The output of one prompt."""

    tokens: tuple[int, ...]
    finish: FinishReason


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop: Sequence[int] = (),
    watch: Callable[[list[Progress]], None] | None = None,
) -> list[Generation]:
    """Decode all prompts together on an idle engine, then release them.

    Args:
        prompts: token ids of each prompt.
        stop: token ids that end a prompt's output, besides the model's own.
        watch: called with the progress of each step, for a progress line.

    Returns:
        One `Generation` per prompt, in order.

    Raises:
        RequestError, CacheExhausted: the engine cannot serve a prompt. No token was generated for any prompt.
    """
    check_kind("prompts", prompts, Iterable, "a list of prompts", "write [[1, 2, 3]] for one")
    ids: list[int] = []
    try:
        for prompt in prompts:
            ids.append(engine.submit(prompt, max_new_tokens, stop))
    except Exception:
        for submitted in ids:
            engine.release(submitted)
        raise
    finish: dict[int, FinishReason] = {}
    while engine.busy:
        progress = engine.step()
        finish.update({p.request_id: p.finish for p in progress if p.finish is not None})
        if watch is not None:
            watch(progress)
    found = [Generation(engine.output(i), finish[i]) for i in ids]
    for done in ids:
        engine.release(done)
    return found


def generate(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    config: EngineConfig,
    *,
    stop: Sequence[int] = (),
) -> tuple[list[Generation], Engine]:
    """Call `decode` on a new engine; return the engine too, for its statistics."""
    engine = Engine(model, config)
    return decode(engine, prompts, max_new_tokens, stop=stop), engine
