"""Graphs: capture a step once per key and replay it, on a device or, for tests, on the CPU.

The keys and protocols do not import torch; other names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .active import is_recording, late_device, mark_host, mark_pinned, record_call
from .keyed import KeyedGraphState, Recording
from .state import GraphKey, GraphState, Program, padded_batch_size

if TYPE_CHECKING:
    import torch

    from .cuda import CudaGraphState
    from .recorded import RecordedGraph, RecordedGraphState

_HOMES = {
    "CudaGraphState": "cuda",
    "RecordedGraph": "recorded",
    "RecordedGraphState": "recorded",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftmark.graphs' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def graph_state_for(device: torch.device) -> GraphState:
    """Return a new graph state for `device`: CUDA graphs on CUDA, recorded graphs on other devices."""
    if device.type == "cuda":
        from .cuda import CudaGraphState

        return CudaGraphState(device)
    from .recorded import RecordedGraphState

    return RecordedGraphState()


__all__ = [
    "CudaGraphState",
    "GraphKey",
    "GraphState",
    "KeyedGraphState",
    "Program",
    "RecordedGraph",
    "RecordedGraphState",
    "Recording",
    "graph_state_for",
    "is_recording",
    "late_device",
    "mark_host",
    "mark_pinned",
    "padded_batch_size",
    "record_call",
]
