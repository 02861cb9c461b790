"""Texts as they come: prompt after prompt in order, each from its first token on, in a pipe too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from draftmark.cli.rendering import shorten, show

INCOMPLETE = "\ufffd"
"""What a tokenizer makes of a character whose last bytes are still to come."""
HEADLINE = 90


class TextStream:
    """Writes to stdout what a run decodes.

    Prompts are decoded together; the first one that is not done is written as it grows, and those behind it when their
    turn comes. So the output is the same as if it were written at the end.

    Args:
        names: of the prompts, for the headlines.
        text: tokens → text.
        begin: called before the first word, to clear the terminal's last line.
    """

    def __init__(
        self, names: Sequence[str], text: Callable[[Sequence[int]], str], begin: Callable[[], None] | None = None
    ) -> None:
        self._names, self._text, self._begin = names, text, begin
        self._tokens: list[Sequence[int]] = [()] * len(names)
        self._done = [False] * len(names)
        self._current, self._written, self._headed = 0, "", False

    def show(self, index: int, tokens: Sequence[int], done: bool) -> None:
        """Take the tokens of one prompt so far, and write what can be written."""
        self._tokens[index], self._done[index] = tokens, done
        while self._current < len(self._names):
            ended = self._done[self._current]
            self._write(ended)
            if not ended:
                break
            self._next()

    def finish(self) -> None:
        """Write what is left: after Ctrl-C, the texts that are not whole."""
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
        """Write the part of the current text that no later token changes."""
        tokens = self._tokens[self._current]
        if not tokens:
            return
        if not self._headed:
            if self._begin is not None:
                self._begin()
            show(f"── {self._current + 1} · {shorten(self._names[self._current], HEADLINE)}", "bold cyan")
            self._headed = True
        text = self._text(tokens).lstrip("\n")
        # Line ends wait for what follows them: those at a text's end are not written.
        text = text.rstrip("\n") if ended else text.rstrip("\n" + INCOMPLETE)
        if text.startswith(self._written):
            self._put(text[len(self._written) :])
        elif ended:  # the tokenizer has changed its mind about a text that is out already
            self._put("\n" + text)
        else:
            return
        self._written = text

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
