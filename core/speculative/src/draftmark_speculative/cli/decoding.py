"""Decode all prompts to the end, with the time it took and what each prompt got from a round."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from draftmark.cli.progress import ProgressLine

from .. import Engine, EngineConfig, Generation, Progress, Statistics
from .. import decode as run_engine
from ..models import CausalLM


@dataclass(frozen=True)
class Decoded:
    """All outputs of one run.

    Attributes:
        outputs: by prompt.
        tokens_a_round: by prompt, tokens kept over rounds taken; the token that prefill gives is not counted.
        seconds: prefill and rounds; capture and loading are not counted.
    """

    outputs: list[Generation]
    tokens_a_round: list[float]
    statistics: Statistics
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over all prompts."""
        return self.statistics.tokens / self.seconds


def decode(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    config: EngineConfig,
    line: ProgressLine,
    what: str,
) -> Decoded:
    """Run one engine until every prompt is done; `what` names the run on the progress line.

    Raises:
        RequestError: a prompt that the engine cannot take, before any token.
    """
    engine = Engine(model, config)
    kept, rounds, done = Counter[int](), Counter[int](), Counter[bool]()
    seen, start = 0, time.perf_counter()

    def watch(progress: list[Progress]) -> None:
        nonlocal seen
        if engine.statistics.rounds > seen:
            seen = engine.statistics.rounds
            kept.update({p.request_id: len(p.tokens) for p in progress})
            rounds.update(p.request_id for p in progress)
        done.update(p.finish is not None for p in progress)
        line.say(f"{what}: {_stand(engine, time.perf_counter() - start)} · {done[True]}/{len(prompts)} done")

    outputs = run_engine(engine, prompts, max_new_tokens, watch=watch)
    seconds = time.perf_counter() - start
    tokens_a_round = [kept[i] / max(1, rounds[i]) for i in range(len(prompts))]
    return Decoded(outputs, tokens_a_round, engine.statistics, seconds)


def _stand(engine: Engine, seconds: float) -> str:
    s, pages = engine.statistics, engine.pages
    return (
        f"{s.tokens} tokens · {s.tokens / seconds:.1f} tokens/s · accepted {s.mean_accepted:.2f} · "
        f"{pages.in_use}/{pages.total} KV pages"
    )
