"""Where a step's time goes: the host's share, and the device's by kind of kernel, from torch's profiler."""

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
"""A kernel is of the first kind of which its name holds a word; the rest is "elementwise and others"."""


def timeline(engine: Engine, rounds: int = 12) -> dict[str, Any]:
    """A summary of some rounds of an engine in full swing.

    host_us is the time inside `Engine.step` that is not spent waiting for tokens; the round's length with the profiler
    off is round_us. device_us is the union of the times of all kernels, and by_kind_us of those of a kind: a merge of
    partial results is launched while the attention kernel before it still runs, so sums would count time twice.
    """
    host, waited = _host(engine, rounds)
    torch.cuda.synchronize()  # what is under way belongs to no round below
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
    """Microseconds of attention in a round, from the attention benchmark alone; None where it has no such case.

    A kernel's time for each forward: VERIFY (or DECODE) in every layer of the target; S - 1 DRAFT steps and one
    DRAFT_EXTEND in the head's one layer. DRAFT is measured there with 8 rows a request, here it has topk; DRAFT_EXTEND
    is taken for a VERIFY of as many rows.
    """
    rows = json.loads(ATTENTION.read_text())["rows"]
    times = {row["case"]: row["us"] for row in rows if row["backend"] == backend}
    _, steps, nodes = shape
    try:
        if nodes == 1:
            return float(layers * times[f"decode-{batch}x{context}"])
        verify, draft = times[f"verify{nodes}-{batch}x{context}"], times[f"draft8-{batch}x{context}"]
        return float((layers + 1) * verify + (steps - 1) * draft)
    except (KeyError, TypeError):  # no such case, or it was refused
        return None


def _host(engine: Engine, rounds: int) -> tuple[float, float]:
    """Seconds in `rounds` steps, without and in waits for tokens.

    The clock starts when a round's tokens have just come, and stops so: between the ends of two steps lies one round,
    whether its tokens come at once or a round late. With overlap the first step behind a pause finds tokens that were
    there already, so a count from there holds a round less than steps.
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
