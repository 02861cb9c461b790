"""Nodes of a draft tree that the target accepts. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from .history import NO_PARENT


def kept_path(drafts: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> list[int]:
    """Return the accepted path: from the root, the first child with the target's token, and so on.

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
    """Return tokens, count and path of `draftmark.verdict.Verdict` for one request."""
    path = kept_path(drafts, parents, targets)
    beyond = range(len(path), len(drafts))
    return [*(targets[node] for node in path), *(-1 for _ in beyond)], len(path), [*path, *beyond]
