"""Graphs on the CPU, recorded from the operators that torch dispatches."""

from .host_memory import mark_host
from .recorded import RecordedGraph, RecordedGraphState

__all__ = ["RecordedGraph", "RecordedGraphState", "mark_host"]
