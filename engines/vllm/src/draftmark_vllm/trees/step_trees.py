"""Draft trees of a step as tuples of parents, and a context manager that passes them from runner to builders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

Parents = tuple[int, ...]
"""Parent index of each node, parents before children; -1 for the root, which is node 0."""


@dataclass(frozen=True)
class StepTrees:
    """Holds the draft tree of each request in one step.

    Attributes:
        parents: the tree of each request, in vLLM's order; None for a prompt, a decode or a chain of drafts.
        starts: first row of each request, then the end of the last.
    """

    parents: tuple[Parents | None, ...]
    starts: tuple[int, ...]

    def depth_changes(self) -> tuple[list[int], list[int]]:
        """Return the rows at a lower depth than in a chain, and for each row depth minus chain depth (negative)."""
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
    """Return the parents of a chain of `rows` nodes."""
    return tuple(range(-1, rows - 1))


def trimmed(parents: Parents, nodes: int) -> Parents:
    """Return the first `nodes` nodes of a tree. Parents precede children, so every remaining node keeps its parent."""
    return parents[:nodes]


def depths_of(parents: Parents) -> list[int]:
    """Return the depth of each node: its number of steps from the root."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def starts_of(lens: Sequence[int]) -> tuple[int, ...]:
    """Return the first row of each request, from the numbers of rows, then the end of the last request."""
    found = [0]
    for rows in lens:
        found.append(found[-1] + rows)
    return tuple(found)


_CURRENT: ContextVar[StepTrees | None] = ContextVar("draftmark_vllm_trees", default=None)


@contextmanager
def set_current_trees(trees: StepTrees | None) -> Iterator[None]:
    """Let builders read a step's trees inside this context. vLLM's metadata has no field for them."""
    earlier = _CURRENT.set(trees)
    try:
        yield
    finally:
        _CURRENT.reset(earlier)


def current_trees() -> StepTrees | None:
    """Return the trees of the step that is being built; None if every request is a chain."""
    return _CURRENT.get()
