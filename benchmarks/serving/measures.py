"""Measures of a pass: throughput, time to first token, and time between the chunks of an answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

SHARES = {"p50": 0.5, "p99": 0.99, "worst": 1.0}
"""Names of the percentiles of a record."""
LONGEST = 0.01
"""Share of the waits that `mean_of_longest` averages. It varies less than p99, which can lie between two steps."""


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def mean_of_longest(values: Iterable[float]) -> float:
    """Return the mean of the `LONGEST` share of all values, at least one."""
    ordered = sorted(values, reverse=True)
    return fmean(ordered[: max(1, math.ceil(LONGEST * len(ordered)))])


def measured(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the measures of a client's answers (see `client`).

    ``tokens_per_s`` counts new tokens from the first arrival to the last token. A chunk has the tokens of one step of
    the engine, so ``between_…_ms`` are times between two steps of a request, waits for other requests included;
    ``between_longest_ms`` is the mean of the longest 1 % of them.
    A request that failed or got fewer tokens than it requested is only counted.
    """
    good = [one for one in answers if _is_whole(one)]
    found: dict[str, Any] = {"requests": len(answers), "failed": len(answers) - len(good)}
    if len(good) < len(answers):
        bad = next(one for one in answers if not _is_whole(one))
        found["why"] = bad.get("failed", "an answer has fewer tokens than requested")
    if not good:
        return found
    tokens = sum(one["chunks"][-1][1] for one in good)
    seconds = max(one["chunks"][-1][0] for one in good) - min(one["at_s"] for one in answers)
    chunks = sum(len(one["chunks"]) for one in good)
    first = [1000 * (one["chunks"][0][0] - one["at_s"]) for one in good]
    between = [1000 * (late - early) for one in good for (early, _), (late, _) in pairwise(one["chunks"])]
    return {
        **found,
        "prompt_tokens": sum(one["prompt_tokens"] for one in good),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens_per_chunk": round(tokens / chunks, 3),
        **_percentiles("first_token", first),
        **_percentiles("between", between),
        **({"between_longest_ms": round(mean_of_longest(between), 2)} if between else {}),
    }


def _is_whole(answer: dict[str, Any]) -> bool:
    chunks = answer["chunks"]
    return "failed" not in answer and bool(chunks) and chunks[-1][1] >= answer["new_tokens"]


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_{short}_ms": round(percentile(values, share), 2) for short, share in SHARES.items()}
