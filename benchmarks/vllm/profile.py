"""Profiles of a prefill or of a step: device time by kernel, host time by call and by function."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterable
from typing import Any

from benchmarks.spans import covered

from .engines import Engine
from .throughput import Case, Watch, run

TOP = 20
NAME = 96
TIMES = 2
"""Runs under each profiler. The first run includes the profiler's set-up and is not kept."""


class Torch(Watch):
    """Runs torch's profiler on the host and the device while a case is timed."""

    def begin(self) -> None:
        """Wait for the device, then start recording."""
        import torch

        self._cuda = torch.cuda.is_available()
        self._wait()
        activities = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[activities.CPU, *([activities.CUDA] if self._cuda else [])])
        self._profile.__enter__()

    def end(self) -> None:
        """Wait for launched kernels, then stop recording."""
        self._wait()
        self._profile.__exit__(None, None, None)

    def _wait(self) -> None:
        import torch

        if self._cuda:
            torch.cuda.synchronize()

    def said(self, steps: int) -> dict[str, Any]:
        """Return kernels and host calls in microseconds a step, and the device's busy time and total span."""
        from torch.autograd import DeviceType

        events = self._profile.events()
        ranges = [(one.time_range.start, one.time_range.end) for one in events if one.device_type == DeviceType.CUDA]
        average = self._profile.key_averages()
        kernels = [
            (one.key, one.count, one.self_device_time_total) for one in average if one.device_type != DeviceType.CPU
        ]
        calls = [(one.key, one.count, one.self_cpu_time_total) for one in average if one.device_type == DeviceType.CPU]
        span = max((end for _, end in ranges), default=0) - min((start for start, _ in ranges), default=0)
        return {
            "device_busy_us": round(covered(ranges) / steps, 1),
            "device_span_us": round(span / steps, 1),
            "kernels": top(kernels, steps),
            "host_calls": top(calls, steps),
        }


class Functions(Watch):
    """Runs Python's profiler on the host. It slows down every call: compare the order of functions, not their times."""

    def begin(self) -> None:
        """Start recording."""
        self._profile = cProfile.Profile()
        self._profile.enable()

    def end(self) -> None:
        """Stop recording."""
        self._profile.disable()

    def said(self, steps: int) -> dict[str, Any]:
        """Return the Python functions with the most own time (without callees), in microseconds per step."""
        found = pstats.Stats(self._profile).stats  # type: ignore[attr-defined]  # missing in the type stubs only
        rows = [
            (f"{'/'.join(file.split('/')[-2:])}:{line} {name}", calls, 1e6 * own)
            for (file, line, name), (_, calls, own, _, _) in found.items()
        ]
        return {"host_functions": top(rows, steps)}


KINDS = (Torch, Functions)


class OnRanks(Watch):
    """Runs a profiler in each rank, because the engine's own process uses no device. It reports the first rank."""

    def __init__(self, kind: type[Watch], llm: Any) -> None:
        self._kind, self._call = kind.__name__, llm.llm_engine.collective_rpc

    def begin(self) -> None:
        """Start the profiler of every rank."""
        self._call("watch_begin", args=(self._kind,))

    def end(self) -> None:
        """Stop the profiler of every rank."""
        self._call("watch_end")

    def said(self, steps: int) -> dict[str, Any]:
        """Return the measurements of the first rank."""
        found: dict[str, Any] = self._call("watch_said", args=(steps,))[0]
        return found


def profiles(case: Case, llm: Any, engine: Engine) -> dict[str, Any]:
    """Run a case under each profiler in turn: a whole prefill, or only the steps of decode and verify."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        for _ in range(TIMES):
            watch = OnRanks(kind, llm) if engine.num_gpus > 1 else kind()
            row = run(case, llm, engine, watch)
        steps = max(1, row.get("steps", 1))
        # Time of the profiled run, which is longer than that of the timed row.
        watched = row["step_ms"] if case.decodes else 1000 * row["tokens"] / row["tokens_per_s"]
        found |= {f"{kind.__name__.lower()}_ms": round(watched, 3), "steps": steps, **watch.said(steps)}
    return found


def top(rows: Iterable[tuple[str, int, float]], steps: int) -> list[dict[str, Any]]:
    """Return the rows (name, count, microseconds) with the most time; counts and times are divided by the steps."""
    ordered = sorted(rows, key=lambda row: -row[2])[:TOP]
    return [
        {"name": name[:NAME], "calls": round(calls / steps, 1), "us": round(us / steps, 1)}
        for name, calls, us in ordered
    ]
