"""Best-first tree over the tokens of one block (DDTree): every depth has its own candidates, and all paths cross."""

from __future__ import annotations

import torch

from ..eagle.tree_builder import best_nodes


def block_tree(scores: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` most probable nodes as a tree below the root, or all if there are fewer. Capturable.

    A block predicts each depth without knowing the tokens before it. So a node's probability is the product of the
    candidates on its path (DDTree, arXiv:2604.12989), and every candidate may follow every other. At most `count` nodes
    of a level are among the best of all levels, so each level keeps its `count` best nodes only, which loses nothing.

    Args:
        scores: float32 ``[R, depths, k]``, log-probability of each candidate; at most 0.
        tokens: int64 ``[R, depths, k]``.
        count: most nodes of a tree, root not included.

    Returns:
        tokens and parents, int64 ``[R, count]``; node i of a tree is entry i - 1, node 0 is the root. Parents come
        before children.
    """
    depths, k = tokens.shape[1:]
    total, level = scores[:, 0].topk(min(count, k), 1)
    found = [(total, tokens[:, 0].gather(1, level), torch.full_like(level, -1))]
    first = 0
    for depth in range(1, depths):
        width = total.shape[1]
        crossed = (total[:, :, None] + scores[:, depth, None]).flatten(1)
        total, level = crossed.topk(min(count, width * k), 1)
        found.append((total, tokens[:, depth].gather(1, level % k), first + level // k))
        first += width
    totals, nodes, above = (torch.cat(column, 1) for column in zip(*found, strict=True))
    chosen, parents, _ = best_nodes(totals, nodes, above, count)
    return chosen, parents
