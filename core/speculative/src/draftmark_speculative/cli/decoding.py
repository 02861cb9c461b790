"""Decoding of all prompts to the end, with the time taken and each prompt's tokens per round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftmark_tools.cli.progress import ProgressLine

from .. import Engine, EngineConfig, FinishReason, Generation, Progress, Statistics
from .. import decode as run_engine
from ..models import CausalLM


@dataclass(frozen=True)
class Decoded:
    """Outputs of one run.

    Attributes:
        outputs: output of each prompt.
        tokens_a_round: by prompt, kept tokens divided by rounds; the token from prefill is not counted.
        seconds: time of prefill and rounds, without loading and capture.
        interrupted: True if Ctrl-C ended the run; unfinished prompts are cancelled.
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
"""Callback with a prompt's index, its tokens so far, and True if they are complete."""


class _Watch:
    """Records each prompt's progress so far: tokens, rounds and finish reason."""

    def __init__(self, engine: Engine, num_prompts: int) -> None:
        self.engine = engine
        self.tokens: list[list[int]] = [[] for _ in range(num_prompts)]
        self.finish = [FinishReason.CANCELLED] * num_prompts
        self.kept, self.rounds = [0] * num_prompts, [0] * num_prompts
        self.done, self._rounds_seen, self._start = 0, 0, time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def take(self, progress: list[Progress]) -> bool:
        """Record the progress of a step; return True if a prompt ended in it."""
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
        """Return the text of the progress line."""
        s, pages = self.engine.statistics, self.engine.pages
        return (
            f"{s.tokens} tokens · {s.tokens / self.seconds:.1f} tokens/s · accepted {s.mean_accepted:.2f} · "
            f"{pages.in_use}/{pages.total} KV pages · {self.done}/{len(self.tokens)} done"
        )

    def decoded(self, interrupted: bool) -> Decoded:
        """Return the outputs recorded so far."""
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
    """Run one engine until every prompt is done. Ctrl-C ends the run and keeps the tokens so far.

    Args:
        what: name of the run on the progress line.
        show: called with the progress of each step.

    Raises:
        RequestError: the engine cannot serve a prompt; raised before any token.
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
