"""What a GPU does in a round: its kernels' time, summed by name, beside the wall clock."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch


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
        """µs a round: the wall clock, the GPU's busy time, and its longest kernels with how often each ran."""
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in self._profiler.events() or []:
            if "CUDA" in str(event.device_type):  # others are the host's calls
                spent = event.time_range.elapsed_us()
                times[event.name[:90]] += spent
                counts[event.name[:90]] += 1
        kernels = [
            [name, round(spent / rounds, 1), round(counts[name] / rounds, 1)] for name, spent in times.most_common(30)
        ]
        wall = (self._ended - self._began) / rounds * 1e6
        return dict(wall_us=round(wall, 1), gpu_us=round(sum(times.values()) / rounds, 1), kernels=kernels)


_CPU = torch.profiler.ProfilerActivity.CPU


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
