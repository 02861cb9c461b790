"""Drafting by prompt look-up: propose the tokens that followed the text's newest n-gram at an earlier place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftmark import RequestError

from .arguments import check_count
from .drafts import DraftTree, Speculation

LONGEST_NGRAM = 64
"""Largest max_ngram. Each token of a text is indexed under one key per n-gram size."""


@dataclass(frozen=True)
class Ngram(Speculation):
    """Drafts by prompt look-up (Saxena 2023): copy the tokens that followed the newest n-gram at an earlier place.

    Attributes:
        topk: branches of the draft tree; 1 is a chain.
        num_draft_tokens: rows verified per request, root included.
        max_ngram, min_ngram: number of recent tokens that must match; the longest match is tried first.

    Raises:
        RequestError: max_ngram or min_ngram is out of range. The geometry checks the other counts.
    """

    topk: int = 1
    num_draft_tokens: int = 8
    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self) -> None:
        for name in ("max_ngram", "min_ngram"):
            check_count(name, getattr(self, name), 1, LONGEST_NGRAM, "4 and 2 suit most texts")
        if self.min_ngram > self.max_ngram:
            raise RequestError(
                f"min_ngram is {self.min_ngram}, but it must be at most max_ngram, which is {self.max_ngram}; "
                "lower min_ngram"
            )

    def __str__(self) -> str:
        return f"n-gram drafts (topk {self.topk}, {self.num_draft_tokens} tokens)"

    def begin(self, request_id: int, prompt: Sequence[int]) -> NgramIndex:
        """Return an index that starts with the prompt."""
        return NgramIndex(self, prompt)


class NgramIndex:
    """Stores the positions at which each n-gram of one request's prompt and output ended, and drafts from them."""

    def __init__(self, settings: Ngram, tokens: Sequence[int]) -> None:
        self._settings = settings
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._sizes = range(settings.max_ngram, settings.min_ngram - 1, -1)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the history."""
        for token in tokens:
            self._tokens.append(token)
            end = len(self._tokens)
            for size in self._sizes:
                if size <= end:
                    self._ends.setdefault(tuple(self._tokens[end - size :]), []).append(end)

    def propose(self) -> DraftTree:
        """Return a tree of up to num_draft_tokens nodes with up to topk branches from the root.

        Longer matches come first, then more recent matches. The branches share the nodes evenly.
        """
        tree = DraftTree([self._tokens[-1]])
        budget = self._settings.num_draft_tokens - 1
        paths = self._distinct_paths(self._settings.topk, budget)
        for rank, (path, matched) in enumerate(paths.items()):
            share = -(-budget // (len(paths) - rank))
            budget -= tree.insert(path, share, matched)
        return tree

    def _distinct_paths(self, topk: int, length: int) -> dict[tuple[int, ...], int]:
        """Return distinct continuations, best first, each with the number of tokens that matched."""
        paths: dict[tuple[int, ...], int] = {}
        for end, matched in self._matches():
            paths.setdefault(tuple(self._continuation(end, length)), matched)
            if len(paths) == topk:
                break
        return paths

    def _continuation(self, end: int, length: int) -> list[int]:
        """Return the `length` tokens after `end`. Past the newest token, repeat the copied tokens (as LZ77 does)."""
        lag = len(self._tokens) - end
        path = self._tokens[end : end + length]
        while len(path) < length:
            path.append(path[len(path) - lag])
        return path

    def _matches(self) -> Iterator[tuple[int, int]]:
        """Yield (end of an earlier occurrence of the newest n-gram, length of the n-gram), best match first."""
        end = len(self._tokens)
        for size in self._sizes:
            if size <= end:
                ends = self._ends.get(tuple(self._tokens[end - size :]), [])
                yield from ((earlier, size) for earlier in reversed(ends) if earlier < end)
