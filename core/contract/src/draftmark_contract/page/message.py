"""Splits a failed item's message into its parts: rule, sentence, labelled values, and the command that repeats it."""

from __future__ import annotations

import re
from dataclasses import dataclass

LABELS = "batch|got|expected|poison|formula|known from|remedy|bugs of this class|eagerly[^:]*|run it again"
LABELLED = re.compile(rf"  ({LABELS}): (.*)")
"""A line that begins a labelled value, as `ContractViolation`, `explanation` and `finding` write it."""
CONTINUED = " " * 3
"""Start of a line that continues a labelled value."""
HOW = "checked here as: "
"""Start of the line of `draftmark judge` about the way in which a rule is checked."""


@dataclass(frozen=True)
class Message:
    """Holds the parts of a message. A part that the message lacks is "".

    Attributes:
        rule: the rule, with its name and number.
        sentence: what is wrong.
        values: labelled values, e.g. ``"got"``; values of several lines keep their lines.
    """

    rule: str
    sentence: str
    values: dict[str, str]

    @property
    def command(self) -> str:
        """Command that runs only this item."""
        return self.values.get("run it again", "")


def read(text: str) -> Message:
    """Split a message into its parts. A message in another format becomes one sentence without a rule."""
    head: list[str] = []
    values: dict[str, str] = {}
    label = ""
    for line in text.splitlines():
        if found := LABELLED.fullmatch(line):
            label = found[1]
            values[label] = found[2]
        elif label and line.startswith(CONTINUED):
            values[label] += f"\n{line}"
        elif values:
            label = ""  # Skip a note without a label, e.g. of hypothesis. The full message still prints it.
        elif not line.startswith(HOW):
            head.append(line)
    rule, sentence = (head[0], head[1]) if len(head) > 1 else ("", head[0] if head else "")
    return Message(rule, sentence, values)
