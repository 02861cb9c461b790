"""Drawn workloads: requests with an arrival time, a prompt of token ids and a number of new tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

PERIOD = 32
"""Tokens after which a repetitive prompt starts again."""
FIRST_ID = 3
"""Smallest token id of a prompt; the ids below it are special tokens of the `models`' tokenizer."""


@dataclass(frozen=True)
class Workload:
    """Distribution of a number of requests.

    Attributes:
        name: name in a record.
        seed: number that, with the other fields, determines every request.
        requests: number of requests.
        gap_s: mean seconds between two arrivals, which are exponentially distributed.
        prompt: smallest and largest number of prompt tokens; log-uniform between them.
        new: smallest and largest number of new tokens; uniform between them.
        at_once: largest number of requests that the client sends at a time. A later arrival waits, and its time to
            first token includes the wait.
        repetitive: probability that a prompt repeats `PERIOD` tokens, so that n-gram look-up finds drafts.
    """

    name: str
    seed: int
    requests: int = 48
    gap_s: float = 0.08
    prompt: tuple[int, int] = (200, 6000)
    new: tuple[int, int] = (64, 320)
    at_once: int = 48
    repetitive: float = 0.75


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        at_s: arrival, in seconds after the start of the workload.
        prompt: token ids.
        new_tokens: number of new tokens.
        repeats: the prompt repeats its first `PERIOD` tokens.
    """

    at_s: float
    prompt: tuple[int, ...]
    new_tokens: int
    repeats: bool


def draw(workload: Workload, vocabulary: int) -> list[Request]:
    """Return the requests of a workload in the order of their arrivals.

    Args:
        vocabulary: number of token ids of the model.
    """
    rng, at_s, found = random.Random(f"{workload.seed}"), 0.0, []
    for _ in range(workload.requests):
        at_s += rng.expovariate(1 / workload.gap_s)
        length = round(math.exp(rng.uniform(*map(math.log, workload.prompt))))
        repeats = rng.random() < workload.repetitive
        tokens = [rng.randrange(FIRST_ID, vocabulary) for _ in range(PERIOD if repeats else length)]
        prompt = (tokens * math.ceil(length / len(tokens)))[:length]
        found.append(Request(at_s, tuple(prompt), rng.randint(*workload.new), repeats))
    return found
