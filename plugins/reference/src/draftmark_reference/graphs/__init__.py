"""Graphs on the CPU, recorded from the operators that torch dispatches."""

from .recorded import RecordedGraph, RecordedGraphState

__all__ = ["RecordedGraph", "RecordedGraphState"]
