"""Streaming of texts to a terminal or a pipe, prompt after prompt in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from draftmark_tools.cli.rendering import shorten, show

INCOMPLETE = "\ufffd"
"""Replacement character that a tokenizer returns while the last bytes of a character are missing."""
HEADLINE = 90


class TextStream:
    """Writes a run's texts to stdout while they are decoded.

    Prompts are decoded together. The first unfinished prompt is written as it grows; later prompts wait for it. So the
    output equals the output of a run that writes everything at the end.

    Args:
        names: names of the prompts, for the headlines.
        text: converts tokens to text.
        begin: called before the first headline of each text, to clear the terminal's last line.
    """

    def __init__(
        self, names: Sequence[str], text: Callable[[Sequence[int]], str], begin: Callable[[], None] | None = None
    ) -> None:
        self._names, self._text, self._begin = names, text, begin
        self._tokens: list[Sequence[int]] = [()] * len(names)
        self._done = [False] * len(names)
        self._current, self._written, self._headed = 0, "", False

    def show(self, index: int, tokens: Sequence[int], done: bool) -> None:
        """Store the tokens of one prompt so far, and write all text that can be written."""
        self._tokens[index], self._done[index] = tokens, done
        while self._current < len(self._names):
            ended = self._done[self._current]
            self._write(ended)
            if not ended:
                break
            self._next()

    def finish(self) -> None:
        """Write the remaining texts; after Ctrl-C these are incomplete."""
        while self._current < len(self._names):
            if self._tokens[self._current]:
                self._write(ended=True)
                self._next()
            else:
                self._current += 1

    def _next(self) -> None:
        show()
        show()
        self._current, self._written, self._headed = self._current + 1, "", False

    def _write(self, ended: bool) -> None:
        """Write the part of the current text that later tokens cannot change."""
        tokens = self._tokens[self._current]
        if not tokens:
            return
        if not self._headed:
            if self._begin is not None:
                self._begin()
            show(f"── {self._current + 1} · {shorten(self._names[self._current], HEADLINE)}", "bold cyan")
            self._headed = True
        text = self._text(tokens).lstrip("\n")
        # Hold line ends back until other text follows: line ends at the end of a text are not written.
        text = text.rstrip("\n") if ended else text.rstrip("\n" + INCOMPLETE)
        if text.startswith(self._written):
            self._put(text[len(self._written) :])
        elif ended:  # the last tokens changed text that is already written, so write all of it again
            self._put("\n" + text)
        else:
            return
        self._written = text

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
