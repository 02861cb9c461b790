"""Which node of its request's tree each row of a step is. Integers, and the channel from the runner to the builders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

Parents = tuple[int, ...]
"""Of each node its parent's index, parents before children; -1 for the root, which is node 0."""


@dataclass(frozen=True)
class StepTrees:
    """The trees of one step.

    Attributes:
        parents: of each request of the step in vLLM's order; None for one whose rows follow one another, as those of a
            prompt, of a decode, or of a chain of drafts.
        starts: first row of each request, and behind the last.
    """

    parents: tuple[Parents | None, ...]
    starts: tuple[int, ...]

    def depth_changes(self) -> tuple[list[int], list[int]]:
        """Rows whose node is less deep than a chain's, and by how much (negative)."""
        rows, changes = [], []
        for parents, first in zip(self.parents, self.starts, strict=False):
            if parents is None:
                continue
            for node, depth in enumerate(depths_of(parents)):
                if depth != node:
                    rows.append(first + node)
                    changes.append(depth - node)
        return rows, changes


def chain(rows: int) -> Parents:
    """Parents of rows that follow one another."""
    return tuple(range(-1, rows - 1))


def trimmed(parents: Parents, nodes: int) -> Parents:
    """The first nodes of a tree: a scheduler trims drafts from the end, which leaves every parent there."""
    return parents[:nodes]


def depths_of(parents: Parents) -> list[int]:
    """Generations between each node and the root."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def starts_of(lens: Sequence[int]) -> tuple[int, ...]:
    """First rows of runs of so many rows, and behind the last."""
    found = [0]
    for rows in lens:
        found.append(found[-1] + rows)
    return tuple(found)


_announced: list[StepTrees] = []


@contextmanager
def announced(trees: StepTrees | None) -> Iterator[None]:
    """Let the builders that vLLM calls meanwhile see a step's trees: its metadata has no field for them."""
    _announced[:] = [] if trees is None else [trees]
    try:
        yield
    finally:
        _announced.clear()


def current() -> StepTrees | None:
    """The trees of the step whose metadata is being built; None where every row follows the one before it."""
    return _announced[0] if _announced else None
