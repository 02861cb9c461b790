"""Shares of a total: one stacked bar on a terminal, and one line for each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .rendering import console, human_bytes

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta", "bright_yellow")
"""Colours of the parts, used in turn."""
SMALLEST = 0.01
"""Parts with a smaller share of the total are summed up in one line."""
WIDEST = 72
"""Maximum number of characters of a bar."""


@dataclass(frozen=True)
class Part:
    """A named part of a total, in bytes."""

    name: str
    bytes: int


def show_shares(parts: Sequence[Part]) -> None:
    """Print the parts from the largest to the smallest, each with its share; nothing for a total of 0.

    A terminal shows one stacked bar, and the lines are its legend. In a pipe each line has its own bar of ``#``.
    """
    parts = _largest_first(parts)
    total = sum(part.bytes for part in parts)
    out = console()
    if not total:
        return
    if not out.is_terminal:
        print("\n".join(_plain(parts, total)))
        return
    from rich.text import Text

    widths = _widths(parts, min(WIDEST, out.width))
    bar, colours = Text(), [COLOURS[at % len(COLOURS)] for at in range(len(parts))]
    for width, colour in zip(widths, colours, strict=True):
        bar.append("█" * width, colour)
    out.print(bar, no_wrap=True)
    for line, colour in zip(_lines(parts, total), colours, strict=True):
        out.print(Text.assemble(("█ ", colour), line), no_wrap=True, overflow="ellipsis")


def _largest_first(parts: Sequence[Part]) -> list[Part]:
    """Return the parts by size, with all parts below `SMALLEST` of the total as one part at the end."""
    total = sum(part.bytes for part in parts)
    ordered = sorted(parts, key=lambda part: -part.bytes)
    small = [part for part in ordered if part.bytes < SMALLEST * total]
    if len(small) < 2:
        return ordered
    rest = Part(f"{len(small)} others", sum(part.bytes for part in small))
    return [*ordered[: len(ordered) - len(small)], rest]


def _widths(parts: Sequence[Part], width: int) -> list[int]:
    """Return the bar length of each part in characters; the lengths add up to `width` exactly."""
    total, ends, before = sum(part.bytes for part in parts), [0], 0
    for part in parts:
        before += part.bytes
        ends.append(round(before * width / total))
    return [end - start for start, end in pairwise(ends)]


def _lines(parts: Sequence[Part], total: int) -> list[str]:
    """Return one line of text for each part: its name, its share in percent, and its size."""
    longest = max(len(part.name) for part in parts)
    return [
        f"{part.name:<{longest}}  {100 * part.bytes / total:5.1f} %  {human_bytes(part.bytes):>10}" for part in parts
    ]


def _plain(parts: Sequence[Part], total: int) -> list[str]:
    bars = ["#" * max(bool(part.bytes), round(part.bytes * WIDEST // 2 / total)) for part in parts]
    return [f"{line}  {bar}".rstrip() for line, bar in zip(_lines(parts, total), bars, strict=True)]
