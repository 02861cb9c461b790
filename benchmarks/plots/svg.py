"""What the drawings share."""

from __future__ import annotations


def text(x: float, y: float, told: str, kind: str, anchor: str = "start") -> str:
    """One line of text with its middle at height y; `kind` names CSS classes of the drawing."""
    safe = told.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}" dominant-baseline="middle">{safe}</text>'
    )
