"""Scenes: forwards in plain Python, with a brute-force visibility that shares no code with the core."""

from __future__ import annotations

from dataclasses import dataclass

from draftmark import Geometry, Mode
from draftmark.lengths import Exact, HostLengths, Unknown, UpperBound


@dataclass(frozen=True)
class Slot:
    """A tail slot (KV position of a new or draft token): its depth, and the tail slots that its row sees."""

    depth: int
    sees: frozenset[int]


def chain(n: int) -> tuple[Slot, ...]:
    """Return a chain of n tokens; each sees itself and all earlier tokens."""
    return tuple(Slot(s, frozenset(range(s + 1))) for s in range(n))


def block(n: int) -> tuple[Slot, ...]:
    """Return a block of n tokens; each sees all n."""
    return tuple(Slot(s, frozenset(range(n))) for s in range(n))


def tree(parents: list[int | None]) -> tuple[Slot, ...]:
    """Return tree slots from the parent of each slot; each sees its ancestors and itself."""
    slots = []
    for slot, parent in enumerate(parents):
        path = [slot]
        while parent is not None:
            path.append(parent)
            parent = parents[parent]
        slots.append(Slot(len(path) - 1, frozenset(path)))
    return tuple(slots)


@dataclass(frozen=True)
class Request:
    """A live request: `prefix` committed tokens, then a tail of new or draft tokens.

    The last `rows` slots of the tail are query rows.
    """

    prefix: int
    tail: tuple[Slot, ...]
    rows: int

    @property
    def total(self) -> int:
        """KV length: prefix plus tail slots."""
        return self.prefix + len(self.tail)


@dataclass(frozen=True)
class Scene:
    """Description of one forward of several requests, in plain Python, without tensors.

    `host` is the kind of prefix lengths that the host has: exact, upper_bound or unknown.
    """

    geometry: Geometry
    mode: Mode
    requests: tuple[Request, ...]
    step: int = 0
    padded_reqs: int = 0
    causal: bool = True
    host: str = "exact"
    seed: int = 0

    def visible(self, request: int, row: int) -> list[int]:
        """Return the KV indices that a row sees, by a brute-force check of every key."""
        r = self.requests[request]
        window = self.geometry.attention.window_left
        own = len(r.tail) - r.rows + row
        seen = []
        for key in range(r.total):
            in_tail = key >= r.prefix
            if in_tail and (key - r.prefix) not in r.tail[own].sees:
                continue
            position = r.prefix + r.tail[key - r.prefix].depth if in_tail else key
            distance = r.prefix + r.tail[own].depth - position
            if window == -1 or distance <= window:
                seen.append(key)
        return seen

    def rows(self) -> list[tuple[int, int]]:
        """Return (request, row) of every live query row, in batch order."""
        return [(i, j) for i, r in enumerate(self.requests) for j in range(r.rows)]


def host_lengths(scene: Scene) -> HostLengths:
    """Return the host's view of the live prefix lengths, of the kind `scene.host`."""
    limit = scene.geometry.max_prefix_len
    true = tuple(r.prefix for r in scene.requests)
    if scene.host == "unknown":
        return Unknown(len(true), limit)
    if scene.host == "upper_bound":
        return UpperBound(tuple(min(n + scene.geometry.draft.num_draft_tokens, limit) for n in true))
    return Exact(true)
