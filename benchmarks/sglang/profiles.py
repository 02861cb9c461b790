"""What a GPU does in a round: its kernels' time, summed by name, beside the wall clock."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from benchmarks.spans import Span, covered

ATTENTION = (
    *("attend_", "combine_splits", "write_kv_rows", "write_metadata_", "write_tree_tail"),
    *("merge_pieces", "write_rows", "write_uniform", "write_ragged", "write_tail"),  # the same kernels in older records
    *("flash::", "_fused_metadata", "store_kvcache", "merge_attn_states"),
    *("BatchPrefill", "BatchDecode", "MergeStates"),
    *("_fwd_", "_kv_indices", "num_kv_splits"),
)
"""Parts of the names of kernels that are attention's alone: draftmark's, FA3's, FlashInfer's, SGLang's Triton ones."""


def is_attention(name: str) -> bool:
    """Whether a kernel of this name computes attention, stores KV or prepares either."""
    return any(part in name for part in ATTENTION)


def shares(kernels: list[tuple[str, Span]]) -> tuple[float, float]:
    """How long any kernel runs, and how long attention's alone do: what a round would be shorter without them.

    A kernel may start before the one it waits for has ended, so that sums of kernels' times count that twice.
    """
    busy = covered(span for _, span in kernels)
    return busy, busy - covered(span for name, span in kernels if not is_attention(name))


class Profile:
    """A profiler between two moments of a run, both with the device idle."""

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
        """Begin, once what is in flight has ended."""
        _settle()
        self._profiler.__enter__()
        self._began = time.perf_counter()

    def stop(self) -> None:
        """End, once what is in flight has ended."""
        _settle()
        self._ended = time.perf_counter()
        self._profiler.__exit__(None, None, None)

    def summary(self, rounds: int) -> dict[str, Any]:
        """µs a round: wall clock, any kernel, attention's alone; and the longest kernels, with how often each ran."""
        ran = [
            (event.name, (event.time_range.start, event.time_range.end))
            for event in self._profiler.events() or []
            if "CUDA" in str(event.device_type)  # others are the host's calls
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
