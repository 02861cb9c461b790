"""Decode all prompts to the end, with the time it took and what each prompt got from a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftmark.cli.progress import ProgressLine

from .. import Engine, EngineConfig, FinishReason, Generation, Progress, Statistics
from .. import decode as run_engine
from ..models import CausalLM


@dataclass(frozen=True)
class Decoded:
    """All outputs of one run.

    Attributes:
        outputs: by prompt.
        tokens_a_round: by prompt, tokens kept over rounds taken; the token that prefill gives is not counted.
        seconds: prefill and rounds; capture and loading are not counted.
        interrupted: whether Ctrl-C ended it; prompts that were not done then are cancelled.
    """

    outputs: list[Generation]
    tokens_a_round: list[float]
    statistics: Statistics
    seconds: float
    interrupted: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over all prompts."""
        return self.statistics.tokens / self.seconds


Show = Callable[[int, Sequence[int], bool], None]
"""Takes a prompt's index, its tokens so far, and whether they are all."""


class _Watch:
    """What each prompt has so far."""

    def __init__(self, engine: Engine, num_prompts: int) -> None:
        self.engine = engine
        self.tokens: list[list[int]] = [[] for _ in range(num_prompts)]
        self.finish = [FinishReason.CANCELLED] * num_prompts
        self.kept, self.rounds = [0] * num_prompts, [0] * num_prompts
        self.done, self._rounds_seen, self._start = 0, 0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    def take(self, progress: list[Progress]) -> bool:
        """Note what a step gave; whether a prompt is done with it."""
        rounds, before = self.engine.statistics.rounds, self.done
        for p in progress:
            self.tokens[p.request_id] += p.tokens
            if rounds > self._rounds_seen:
                self.kept[p.request_id] += len(p.tokens)
                self.rounds[p.request_id] += 1
            if p.finish is not None:
                self.finish[p.request_id] = p.finish
                self.done += 1
        self._rounds_seen = rounds
        return self.done > before

    def stand(self) -> str:
        """For the progress line."""
        s, pages = self.engine.statistics, self.engine.pages
        return (
            f"{s.tokens} tokens · {s.tokens / self.seconds:.1f} tokens/s · accepted {s.mean_accepted:.2f} · "
            f"{pages.in_use}/{pages.total} KV pages · {self.done}/{len(self.tokens)} done"
        )

    def decoded(self, interrupted: bool) -> Decoded:
        """All of it."""
        outputs = [Generation(tuple(text), end) for text, end in zip(self.tokens, self.finish, strict=True)]
        tokens_a_round = [kept / max(1, rounds) for kept, rounds in zip(self.kept, self.rounds, strict=True)]
        return Decoded(outputs, tokens_a_round, self.engine.statistics, self.seconds, interrupted)


def decode(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    config: EngineConfig,
    line: ProgressLine,
    what: str,
    show: Show | None = None,
) -> Decoded:
    """Run one engine until every prompt is done, or until Ctrl-C, which keeps what is there.

    Args:
        what: names the run on the progress line.
        show: called with what each step gave.

    Raises:
        RequestError: a prompt that the engine cannot take, before any token.
    """
    engine = Engine(model, config)
    seen = _Watch(engine, len(prompts))

    def watch(progress: list[Progress]) -> None:
        ended = seen.take(progress)
        if show is not None:
            for p in progress:
                show(p.request_id, seen.tokens[p.request_id], p.finish is not None)
        (line.milestone if ended and show is None else line.say)(f"{what}: {seen.stand()}")

    try:
        run_engine(engine, prompts, max_new_tokens, watch=watch)
    except KeyboardInterrupt:
        return seen.decoded(interrupted=True)
    return seen.decoded(interrupted=False)
