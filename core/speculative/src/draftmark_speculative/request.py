"""Requests: their tokens, their pages, and the conditions that end them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from draftmark import RequestError

from .arguments import integer
from .drafts import Drafter


class FinishReason(StrEnum):
    """Reason for the end of a request."""

    STOP = "stop"
    """The output ends with a stop token."""
    LENGTH = "length"
    """The output has max_new_tokens tokens."""
    CONTEXT = "context"
    """Prompt and output fill max_context_len exactly."""
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Progress:
    """Tokens that one step gave one request, and the reason if the request ended."""

    request_id: int
    tokens: tuple[int, ...]
    finish: FinishReason | None


@dataclass(eq=False)
class CachedPage:
    """One full KV page of a cached prefix.

    Attributes:
        key: tokens of the page, and the prefix cache's `lookahead` tokens after it.
        page: id of the KV page, owned by the cache; -1 for the root.
        parent: node of the page before it; None for the root.
        children: nodes of the pages that follow, by their keys.
        users: number of requests that share the page.
        checkpoint: slot with the recurrent state after this page, or None.
    """

    key: tuple[int, ...] = ()
    page: int = -1
    parent: CachedPage | None = None
    children: dict[tuple[int, ...], CachedPage] = field(default_factory=dict)
    users: int = 0
    checkpoint: int | None = None


@dataclass(eq=False)
class Request:
    """Sequence to decode. Two requests are never equal.

    Attributes:
        tokens: prompt and output so far. The last output token is pending: its KV is not stored yet.
        computed: number of tokens that prefill has stored as KV; undefined once the request runs.
        stop: token ids that end the request.
        drafter: guesses the next tokens on the host; None without host drafts.
        row: row in the engine's device state; None while waiting.
        assignment: number of times that the request got a row; tells results of an earlier row from the current row's.
        in_flight: number of forwards with results not on the host yet; each yields at least one token.
        pages: KV pages, in order of position; the first of them may belong to the prefix cache.
        prefilled: number of tokens that the last whole prefill stored; 0 while waiting or prefilling.
        shared: pages of the prefix cache that hold the request's first tokens.
        checkpoints: length and slot of each checkpoint of recurrent state that is not in the prefix cache yet.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    tokens: list[int]
    stop: frozenset[int] = frozenset()
    drafter: Drafter | None = None
    computed: int = 0
    row: int | None = None
    assignment: int = 0
    in_flight: int = 0
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    shared: list[CachedPage] = field(default_factory=list)
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def output(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        return tuple(self.tokens[len(self.prompt) :])

    def will_finish(self, max_context_len: int) -> bool:
        """Return True if one token from each forward in flight is enough to reach a length limit."""
        at_least = len(self.tokens) + self.in_flight
        return at_least >= min(max_context_len, len(self.prompt) + self.max_new_tokens)

    def accept(self, tokens: Sequence[int], max_context_len: int) -> tuple[int, ...]:
        """Append verified tokens up to the first one that ends the request; return the appended tokens."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self.tokens.append(token)
            self.finish = self._finished_by(token, max_context_len)
            if self.finish:
                break
        if self.drafter is not None:
            self.drafter.extend(kept)
        return tuple(kept)

    def _finished_by(self, token: int, max_context_len: int) -> FinishReason | None:
        if token in self.stop:
            return FinishReason.STOP
        if len(self.tokens) - len(self.prompt) == self.max_new_tokens:
            return FinishReason.LENGTH
        if len(self.tokens) == max_context_len:
            return FinishReason.CONTEXT
        return None


def checked_stop(stop: Iterable[int], vocab_size: int) -> frozenset[int]:
    """Return stop token ids as a set of integers.

    Raises:
        RequestError: a value is not an integer, or is a token that the vocabulary lacks and no output can contain.
    """
    try:
        tokens = frozenset(integer(token) for token in stop)
    except TypeError as error:
        raise RequestError(f"stop is {stop!r}, but it must be token ids: {error}; pass a list of integers") from None
    _check_vocabulary("stop", tokens, vocab_size)
    return tokens


def checked_request(
    prompt: Sequence[int], max_new_tokens: int, max_context_len: int, vocab_size: int
) -> tuple[list[int], int]:
    """Return prompt and max_new_tokens as integers; the prompt may be a list, an array or a tensor.

    Raises:
        RequestError: no engine with this context length and vocabulary can serve the request.
    """
    try:
        tokens, count = [integer(token) for token in prompt], integer(max_new_tokens)
    except TypeError as error:
        raise RequestError(
            f"the prompt or max_new_tokens ({max_new_tokens!r}) is not an integer: {error}; pass token ids"
        ) from None
    if not tokens:
        raise RequestError("the prompt has 0 tokens, but at least 1 is needed; give some text")
    if len(tokens) >= max_context_len:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, but max_context_len is {max_context_len} and one must be free for "
            "the answer; shorten the prompt or raise max_context_len"
        )
    if count < 1:
        raise RequestError(f"max_new_tokens is {count}, but it must be >= 1; ask for at least one token")
    _check_vocabulary("the prompt", tokens, vocab_size)
    return tokens, count


def _check_vocabulary(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"{name} has token {wrong}, but the vocabulary is 0 … {vocab_size - 1}; use this model's tokenizer"
        )
