"""Computes which nodes of a draft tree the target model accepts, in plain Python without torch."""

from __future__ import annotations

from collections.abc import Sequence

from .history import NO_PARENT


def kept_path(drafts: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Return the accepted path: start at the root, and go to the first child with the target's token until none has it.

    Unused nodes have the token -1.
    """
    path = [0]
    while True:
        wanted = targets[path[-1]]
        agreeing = [n for n, p in enumerate(parents) if p == path[-1] and p != NO_PARENT and drafts[n] == wanted >= 0]
        if not agreeing:
            return path
        path.append(agreeing[0])


def verdict(drafts: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> tuple[list[int], int, list[int]]:
    """Return the accepted tokens, their count and their path for one request; see `draftmark.verdict.Verdict`."""
    path = kept_path(drafts, parents, targets)
    beyond = range(len(path), len(drafts))
    return [*(targets[node] for node in path), *(-1 for _ in beyond)], len(path), [*path, *beyond]
