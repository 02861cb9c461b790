"""GPU time of a round: kernel times summed by name, with the wall-clock time."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from benchmarks.spans import Span, covered

ATTENTION = (
    *("attend_", "combine_splits", "write_kv_rows", "write_metadata_", "write_tree_tail"),
    *("merge_pieces", "write_rows", "write_uniform", "write_ragged", "write_tail"),  # names in older draftmark releases
    *("flash::", "_fused_metadata", "store_kvcache", "merge_attn_states"),
    *("BatchPrefill", "BatchDecode", "MergeStates"),
    *("_fwd_", "_kv_indices", "num_kv_splits"),
)
"""Parts of names that only attention kernels have: draftmark's, FA3's, FlashInfer's, and SGLang's Triton kernels."""


def is_attention(name: str) -> bool:
    """Return True if a kernel of this name computes attention, stores KV, or prepares one of them."""
    return any(part in name for part in ATTENTION)


def shares(kernels: list[tuple[str, Span]]) -> tuple[float, float]:
    """Return the time in which any kernel runs, and the time in which only attention kernels run.

    A round would be shorter by the second time without attention. Sums of kernel times would be wrong, because a kernel
    may start before its predecessor ends.
    """
    busy = covered(span for _, span in kernels)
    return busy, busy - covered(span for name, span in kernels if not is_attention(name))


class Profile:
    """A profiler for a part of a run. The device is idle when it starts and stops."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else _CPU]
        )
        self._began = self._ended = 0.0

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended:
            self.stop()

    def start(self) -> None:
        """Start the profiler after pending work has ended."""
        _settle()
        self._profiler.__enter__()
        self._began = time.perf_counter()

    def stop(self) -> None:
        """Stop the profiler after pending work has ended."""
        _settle()
        self._ended = time.perf_counter()
        self._profiler.__exit__(None, None, None)

    def summary(self, rounds: int) -> dict[str, Any]:
        """Return µs per round (wall clock, any kernel, only attention) and the longest kernels with their counts."""
        ran = [
            (event.name, (event.time_range.start, event.time_range.end))
            for event in self._profiler.events() or []
            if "CUDA" in str(event.device_type)  # events of other device types are host calls
        ]
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for name, (start, stop) in ran:
            times[name[:90]] += stop - start
            counts[name[:90]] += 1
        kernels = [
            [name, round(spent / rounds, 1), round(counts[name] / rounds, 1)] for name, spent in times.most_common(30)
        ]
        busy, attention = shares(ran)
        wall = (self._ended - self._began) * 1e6
        whole = dict(wall_us=wall, gpu_us=sum(times.values()), busy_us=busy, attention_us=attention)
        return {name: round(spent / rounds, 1) for name, spent in whole.items()} | dict(kernels=kernels)


_CPU = torch.profiler.ProfilerActivity.CPU


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
