"""Where the time of a prefill or of a step goes: on the device by kernel, on the host by call and by function."""

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
"""Runs under each profiler: the first one pays for what a profiler sets up, and does not count."""


class Torch(Watch):
    """torch's profiler, of the host and the device."""

    def begin(self) -> None:
        """Wait for the device, then record."""
        import torch

        self._cuda = torch.cuda.is_available()
        self._wait()
        activities = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[activities.CPU, *([activities.CUDA] if self._cuda else [])])
        self._profile.__enter__()

    def end(self) -> None:
        """Let the device finish what was launched."""
        self._wait()
        self._profile.__exit__(None, None, None)

    def _wait(self) -> None:
        import torch

        if self._cuda:
            torch.cuda.synchronize()

    def said(self, steps: int) -> dict[str, Any]:
        """Kernels and the host's calls, microseconds a step; how long the device was busy of its span."""
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
    """Python's own profiler, of the host's functions; it makes each call slower, so it ranks more than it measures."""

    def begin(self) -> None:
        """Record."""
        self._profile = cProfile.Profile()
        self._profile.enable()

    def end(self) -> None:
        """Stop."""
        self._profile.disable()

    def said(self, steps: int) -> dict[str, Any]:
        """Functions by their own time, microseconds a step."""
        found = pstats.Stats(self._profile).stats  # type: ignore[attr-defined]  # there since Python 2.3
        rows = [
            (f"{'/'.join(file.split('/')[-2:])}:{line} {name}", calls, 1e6 * own)
            for (file, line, name), (_, calls, own, _, _) in found.items()
        ]
        return {"host_functions": top(rows, steps)}


KINDS = (Torch, Functions)


class OnRanks(Watch):
    """A watch of a kind in each rank, as the engine's own process touches no device; what the first rank saw."""

    def __init__(self, kind: type[Watch], llm: Any) -> None:
        self._kind, self._call = kind.__name__, llm.llm_engine.collective_rpc

    def begin(self) -> None:
        """All begin."""
        self._call("watch_begin", args=(self._kind,))

    def end(self) -> None:
        """All end."""
        self._call("watch_end")

    def said(self, steps: int) -> dict[str, Any]:
        """What the first has to say."""
        found: dict[str, Any] = self._call("watch_said", args=(steps,))[0]
        return found


def profiles(case: Case, llm: Any, engine: Engine) -> dict[str, Any]:
    """Run a case under each profiler in turn: a prefill as a whole, of a decode or verify the steps."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        for _ in range(TIMES):
            watch = OnRanks(kind, llm) if engine.num_gpus > 1 else kind()
            row = run(case, llm, engine, watch)
        steps = max(1, row.get("steps", 1))
        # How long it took while it was watched, which is longer than the row of `throughput` says.
        watched = row["step_ms"] if case.decodes else 1000 * row["tokens"] / row["tokens_per_s"]
        found |= {f"{kind.__name__.lower()}_ms": round(watched, 3), "steps": steps, **watch.said(steps)}
    return found


def top(rows: Iterable[tuple[str, int, float]], steps: int) -> list[dict[str, Any]]:
    """What took most, of rows of a name, a count and microseconds; each divided by the steps."""
    ordered = sorted(rows, key=lambda row: -row[2])[:TOP]
    return [
        {"name": name[:NAME], "calls": round(calls / steps, 1), "us": round(us / steps, 1)}
        for name, calls, us in ordered
    ]
