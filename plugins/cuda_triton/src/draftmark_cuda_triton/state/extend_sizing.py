"""Buffers of the recurrence of a prompt (EXTEND). No torch; accepts symbolic sizes."""

from __future__ import annotations

from draftmark import BufferSpec, StateGeometry


def extend_buffers(geometry: StateGeometry) -> list[BufferSpec]:
    """Return the scratch memory of `extend.Extend`; none, because it runs row by row."""
    return []
