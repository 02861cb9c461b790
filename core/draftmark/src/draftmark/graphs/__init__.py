"""Graphs: capture a step once by key, replay it by key, on a device or (to check correctness) on the CPU.

Keys and the protocol need no torch; the rest is imported when first used.
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
    """A fresh graph state that torch itself can offer for `device`: CUDA graphs on CUDA, recorded graphs elsewhere."""
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
