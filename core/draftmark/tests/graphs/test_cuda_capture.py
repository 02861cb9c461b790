"""Tests of `CudaGraph` over a fake torch.cuda; test_cuda_graph_device.py has those on a GPU."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from draftmark.graphs.cuda import CudaGraph


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch, enabled: bool, fails: bool) -> None:
    """Python's collector is off while the step is captured, and as before afterwards, also if the step raises."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **others: nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    seen: list[bool] = []

    def step() -> None:
        seen.append(gc.isenabled())
        if fails:
            raise KeyError("the step's own error")

    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError) if fails else nullcontext():
            CudaGraph(step, pool=None, stream=SimpleNamespace(device="cuda"))  # type: ignore[arg-type]
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if was else gc.disable)()
