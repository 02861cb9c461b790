"""Where a step's time goes on the device, by kernel."""

from __future__ import annotations

from typing import Any

from .engines import Engine
from .throughput import Case, run

TOP = 14
NAME = 96


def kernels(case: Case, llm: Any, engine: Engine) -> list[dict[str, Any]]:
    """Run a case under torch's profiler: the kernels that took most, with their calls and microseconds in all."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run(case, llm, engine)
        torch.cuda.synchronize()
    rows = [
        {"kernel": event.key[:NAME], "calls": event.count, "us": round(event.self_device_time_total)}
        for event in found.key_averages()
    ]
    return sorted(rows, key=lambda row: -int(str(row["us"])))[:TOP]
