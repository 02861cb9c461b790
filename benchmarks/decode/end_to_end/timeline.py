"""Splits the time of a step: the host's share, and the device's share by kind of kernel, from torch's profiler."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.origin import RESULTS
from benchmarks.spans import covered
from draftmark.transfer import AsyncHostCopy
from draftmark_speculative import Engine

ATTENTION = RESULTS / "attention-h200.json"
KINDS = (
    ("attention", ("attend", "combine_splits", "fmha", "flash", "batchdecode", "batchprefill", "xqa", "mha")),
    ("matrix products", ("gemm", "gemv", "cutlass", "nvjet", "matmul", "splitk", "cublas")),
    ("choosing tokens", ("topk", "softmax", "sort", "argmax")),
    ("metadata, KV, tree", ("write_", "verify_tree", "compact", "schedule", "index", "gather", "scatter")),
)
"""Kinds of kernels and words in their names; the first match counts. The rest is "elementwise and others"."""


def timeline(engine: Engine, rounds: int = 12) -> dict[str, Any]:
    """Return a summary of some rounds of a running engine.

    host_us is the time inside `Engine.step` without waits for tokens. round_us is the round's length without the
    profiler. device_us is the union of all kernels' time spans, and by_kind_us the union for each kind. Sums would
    count some time twice, because the combine kernel is launched while the attention kernel still runs.
    """
    host, waited = _host(engine, rounds)
    torch.cuda.synchronize()  # wait for pending work, which is part of none of the rounds below
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(rounds):
            engine.step()
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    by_name: Counter[str] = Counter()
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in kernels:
        by_name[event.name] += event.time_range.elapsed_us()
        spans.setdefault(_kind(event.name), []).append((event.time_range.start, event.time_range.end))
    busy = covered([span for kind in spans.values() for span in kind])
    by_kind = Counter({kind: covered(found) for kind, found in spans.items()})
    return {
        "rounds": rounds, "overlap": engine.config.overlap, "round_us": round((host + waited) / rounds * 1e6, 1),
        "host_us": round(host / rounds * 1e6, 1), "waited_us": round(waited / rounds * 1e6, 1),
        "device_us": round(busy / rounds, 1), "kernels": len(kernels) // rounds,
        "by_kind_us": {kind: round(us / rounds, 1) for kind, us in by_kind.most_common()},
        "largest_us": {name[:100]: round(us / rounds, 1) for name, us in by_name.most_common(16)},
    }  # fmt: skip


def predicted_attention(
    backend: str, layers: int, shape: tuple[int, int, int], batch: int, context: int
) -> float | None:
    """Return the µs of attention in a round, computed from the attention benchmark; None if that lacks the case.

    It is one kernel time per forward: VERIFY (or DECODE) in every layer of the target, and S - 1 DRAFT steps and one
    DRAFT_EXTEND in the head's one layer. That benchmark measures DRAFT with 8 rows per request; here it has topk rows.
    DRAFT_EXTEND counts as a VERIFY of equal rows.
    """
    rows = json.loads(ATTENTION.read_text())["rows"]
    times = {row["case"]: row["us"] for row in rows if row["backend"] == backend}
    _, steps, nodes = shape
    try:
        if nodes == 1:
            return float(layers * times[f"decode-{batch}x{context}"])
        verify, draft = times[f"verify{nodes}-{batch}x{context}"], times[f"draft8-{batch}x{context}"]
        return float((layers + 1) * verify + (steps - 1) * draft)
    except (KeyError, TypeError):  # the benchmark has no such case, or no time for it
        return None


def _host(engine: Engine, rounds: int) -> tuple[float, float]:
    """Return two times of `rounds` steps, in seconds: outside of waits for tokens, and in these waits.

    The clock starts and stops right after a round's tokens arrive, so it covers whole rounds, even if tokens arrive one
    round late. With overlap, the first step after a pause finds tokens that had arrived before, so an additional step
    runs first.
    """
    for _ in range(2 if engine.config.overlap else 1):
        engine.step()
    waited, wait = 0.0, AsyncHostCopy.wait

    def timed(arrival: AsyncHostCopy) -> list[list[Any]]:
        nonlocal waited
        start = time.perf_counter()
        try:
            return wait(arrival)
        finally:
            waited += time.perf_counter() - start

    AsyncHostCopy.wait = timed  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        for _ in range(rounds):
            engine.step()
        total = time.perf_counter() - start
    finally:
        AsyncHostCopy.wait = wait  # type: ignore[method-assign]
    return total - waited, waited


def _kind(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS if any(word in lower for word in words)), "elementwise and others")
