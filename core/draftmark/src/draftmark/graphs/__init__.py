"""Graphs: capture a step once per key and replay it. Only CUDA's import torch; draftmark-reference has the CPU's."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from ..errors import GraphError
from .active import is_recording, mark_pinned, record_call
from .keyed import KeyedGraphState
from .state import GraphKey, GraphState, Program, padded_batch_size

if TYPE_CHECKING:
    import torch

RECORDED = "draftmark_reference.graphs:RecordedGraphState"
"""Class that records graphs without a device. Its package needs this one, and is optional here."""


def graph_state_for(device: torch.device) -> GraphState:
    """Return a new graph state for `device`: CUDA graphs on CUDA, recorded graphs on other devices.

    Raises:
        GraphError: draftmark-reference, which records graphs without a device, is not installed, or `device` is text.
    """
    if isinstance(device, str):
        raise GraphError(f"device is {device!r}, but it must be a torch.device; write torch.device({device!r})")
    if device.type == "cuda":
        from .cuda import CudaGraphState

        return CudaGraphState(device)
    try:
        recorded: type[GraphState] = resolve_name(RECORDED)
    except ModuleNotFoundError as error:
        if error.name != "draftmark_reference":
            raise
        raise GraphError(
            f"graphs on {device.type} are recorded by draftmark-reference, which is not installed; "
            "pip install draftmark-reference, or run the steps eagerly"
        ) from error
    return recorded()


__all__ = [
    "GraphKey",
    "GraphState",
    "KeyedGraphState",
    "Program",
    "graph_state_for",
    "is_recording",
    "mark_pinned",
    "padded_batch_size",
    "record_call",
]
