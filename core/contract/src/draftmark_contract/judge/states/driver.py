"""Interface between the items and an engine's layer with recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

import torch

from .layer import Layer, Rows, Weights

REQUESTS = 6
"""Requests for which a layer has slots."""


class Kind(StrEnum):
    """Kinds of a request's part in a round."""

    PREFILL = "prefill"
    """A prompt or a chunk of it. All rows are committed."""
    DECODE = "decode"
    """One row of an engine without drafts. It is committed."""
    VERIFY = "verify"
    """Draft rows, the newest token first. `StateDriver.commit` decides which rows remain."""


@dataclass(frozen=True)
class Part:
    """Rows of one request in a round.

    Attributes:
        request: number of the request.
        kind: kind of the rows.
        parents: parent of each row, -1 for the committed state. A chain has parents -1, 0, 1, …
    """

    request: int
    kind: Kind
    parents: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.parents)

    @property
    def chain(self) -> bool:
        """True if each row follows the row before it."""
        return self.parents == tuple(range(-1, self.rows - 1))

    def __str__(self) -> str:
        tree = "" if self.chain else f" with parents {list(self.parents)}"
        return f"request {self.request}: {self.kind} of {self.rows}{tree}"


@dataclass(frozen=True)
class Round:
    """One forward of the layer, and what the engine does before and after it.

    Attributes:
        geometry: the layer.
        parts: live requests, in the engine's order: verifies and decodes first, prefills after them.
        padding: number of padding requests after the live ones.
        starts: requests that begin before the forward, in slots with old contents.
        kept: (request, rows on its accepted path, the first row first) of each verify; () for no commit.
    """

    geometry: Layer
    parts: tuple[Part, ...]
    padding: int = 0
    starts: tuple[int, ...] = ()
    kept: tuple[tuple[int, tuple[int, ...]], ...] = ()
    num_pages = REQUESTS
    """Requests for which the layer has slots."""

    @property
    def rows(self) -> int:
        """Number of live rows."""
        return sum(part.rows for part in self.parts)

    def keeping(self, paths: Mapping[int, Sequence[int]]) -> Round:
        """Return the round with a commit of these paths."""
        return replace(self, kept=tuple((request, tuple(path)) for request, path in paths.items()))

    def __str__(self) -> str:
        more = f"; {self.padding} padding requests" if self.padding else ""
        return "; ".join(map(str, self.parts)) + more


class StateDriver(Protocol):
    """Runs one layer of an engine with its own slots, metadata and commit."""

    def start(self, request: int) -> None:
        """Give slots with old contents to a new request, and do what the engine does before its first forward."""

    def run(self, one: Round, rows: Rows) -> torch.Tensor:
        """Run a round and return its outputs, ``[live rows, heads, value_dim]``."""

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """End a round of verifies: keep the rows on a request's path. A path is never empty."""

    def state(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of what the request's next forward starts from.

        Returns:
            The state ``[heads, value_dim, key_dim]`` and the convolution's window ``[channels, window]``.
        """

    def others(self, requests: Sequence[int]) -> torch.Tensor:
        """Return a copy, as bytes, of every slot that belongs neither to these requests nor to padding."""


@dataclass(frozen=True)
class StateCapabilities:
    """Describes an engine's layer, which decides its items.

    Attributes:
        open: builds a driver from a layer, its weights, the most rows of a verify and the most requests; raises
            `Refused`.
        layers: layers to judge.
        drafts: largest number of rows of a verify.
        trees: True if a verify may be a tree.
        ragged: True if verifies of a round may have unequal numbers of rows.
        decodes: True if the layer also runs without speculation. `open` then gets 1 as the most rows of a verify.
        padded: True if the engine runs padding requests.
        mixed: True if prefills and verifies may share a round.
        read_only: True if a verify leaves the slot's state unchanged until the commit.
        rounded: largest relative error of a row or a state, by Euclidean norm.
    """

    open: Callable[[Layer, Weights, int, int], StateDriver]
    layers: Sequence[Layer]
    drafts: int = 4
    trees: bool = False
    ragged: bool = True
    decodes: bool = False
    padded: bool = True
    mixed: bool = False
    read_only: bool = False
    rounded: float = 1e-4

    @property
    def device(self) -> str:
        """Device on which the outputs are compared."""
        return "cpu"


def verify(request: int, rows: int = 0, parents: Sequence[int] = ()) -> Part:
    """Return a verify: a chain of `rows`, or a tree."""
    return Part(request, Kind.VERIFY, tuple(parents) or tuple(range(-1, rows - 1)))


def prefill(request: int, rows: int) -> Part:
    """Return a chunk of a prompt."""
    return Part(request, Kind.PREFILL, tuple(range(-1, rows - 1)))


def decode(request: int) -> Part:
    """Return a decode."""
    return Part(request, Kind.DECODE, (-1,))
