"""Builds the page section "What to fix first": failed items in groups. The most basic group is first and open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ..failing_batch import Drawing
from .batch import figure
from .document import folded
from .message import Message, read

ALSO = 40
"""Maximum number of further cases of a group that are named."""
LISTED = 8
"""Number of groups that are listed at once; the others are folded into one section."""
VALUES = ("got", "expected", "poison", "remedy")
"""Labelled values of a message that are shown; the batch is drawn, and the full message has the others."""
COLOURS = {"got": "bad", "expected": "good"}


@dataclass(frozen=True)
class Failures:
    """Holds the failed items of one rule. The page shows the first of them.

    Attributes:
        name: name of the rule.
        rule: the rule as a sentence.
        message: message of the first item.
        drawing: batch of the first item, or None.
        cases: ids of the failed cases, in the order of the run.
        ran: number of items of this rule that ran, failed or not.
    """

    name: str
    rule: str
    message: str
    drawing: Drawing | None
    cases: Sequence[str]
    ran: int


def what_to_fix(groups: Sequence[Failures]) -> str:
    """Return one folded section per group. The first is open; groups after the first `LISTED` share one section."""
    found = [_group(number, group) for number, group in enumerate(groups, 1)]
    rest = "".join(found[LISTED:])
    first = "<p>Begin with the first one: later failures are often the same mistake.</p>" if len(found) > 1 else ""
    return first + "".join(found[:LISTED]) + (folded(f"{len(found) - LISTED} more rules fail", rest) if rest else "")


def _group(number: int, group: Failures) -> str:
    message = read(group.message)
    count = f"{len(group.cases):,} of {group.ran:,} items: {message.sentence}"
    body = "".join((_rule(group), _values(message), _picture(group), _command(message), _rest(group)))
    return folded(count, body, shown=number == 1, strong=f"{number}. {group.name}")


def _rule(group: Failures) -> str:
    return f'<p class="soft">The rule: {escape(group.rule)}</p>' if group.rule else ""


def _values(message: Message) -> str:
    """Return the two values, the remedy and the eager result. The drawing and the full message show the rest."""
    labels = [label for label in message.values if label in VALUES or label.startswith("eagerly")]
    lines = "".join(
        f'<dt>{escape(label)}</dt><dd class="{COLOURS.get(label, "")}">{escape(message.values[label])}</dd>'
        for label in labels
    )
    return f"<dl>{lines}</dl>" if lines else ""


def _picture(group: Failures) -> str:
    return f"<p>First case: <code>{escape(group.cases[0])}</code></p>{figure(group.drawing) if group.drawing else ''}"


def _command(message: Message) -> str:
    return f'<p>Run this item again:</p><pre class="run">{escape(message.command)}</pre>' if message.command else ""


def _rest(group: Failures) -> str:
    others = group.cases[1:]
    also = ", ".join(others[:ALSO]) + (f" and {len(others) - ALSO:,} more" if len(others) > ALSO else "")
    more = folded(f"other failed cases: {len(others):,}", f"<p>{escape(also)}</p>") if others else ""
    return folded("the full message, for a bug report", f"<pre>{escape(group.message)}</pre>") + more
