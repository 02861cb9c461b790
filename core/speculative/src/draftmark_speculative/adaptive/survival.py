"""How likely each draft is to be accepted, and which drafts a budget admits. Torch, on the device, capturable.

A node's **survival** is the probability that verification keeps it: the product of the chances of the nodes on its
path, each the chance to be kept once its parent is. No factor is above 1, so a child never survives likelier than its
parent. So the best nodes of all requests, parents first among equals, are closed under parents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def survival(chances: torch.Tensor, parents: torch.Tensor, levels: int) -> torch.Tensor:
    """Multiply chances along each path.

    Args:
        chances: float32 ``[R, D]``, of each node once its parent is kept; 0 for an unused row; the root's is not read.
            Siblings exclude each other, so chances that sum to more than 1 are scaled down to that.
        parents: int64 ``[R, D]``, parents[r, j] < j; -1 for the root.
        levels: generations below the root, at least those of the deepest node that is used.

    Returns:
        float32 ``[R, D]`` in [0, 1], 1 for the root, and monotone: no node is above its parent.
    """
    parent = parents.clamp(min=0)
    chances = chances.nan_to_num(nan=0.0).clamp(0, 1)
    chances[:, 0].zero_()  # an assignment would copy the number from the host
    chances = chances / of_children(chances, parents).clamp(min=1).gather(1, parent)
    chances[:, 0].fill_(1)
    alive = torch.ones_like(chances)
    for _ in range(levels):
        alive = chances * alive.gather(1, parent)
    return alive


def of_children(values: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Sum over each node's children, the same bits on every device of a kind: ``[R, D]`` → ``[R, D]``.

    Not by scatter_add, whose atomics add in any order: tensor-parallel ranks would admit different nodes of a tie.
    """
    node = torch.arange(parents.shape[1], device=parents.device)
    return torch.where(parents[:, None] == node[:, None], values[:, None], 0).sum(-1)


class Ranked(NamedTuple):
    """All nodes of a batch: roots first, then by survival; among equals as they stand, so parents before children.

    Attributes:
        values: float32 ``[R · D]``, survival in that order, descending; 0 for what must not be admitted.
        places: int64 ``[R · D]``, place of each in ``[R, D]``.
    """

    values: torch.Tensor
    places: torch.Tensor


def ranked(alive: torch.Tensor, live: torch.Tensor) -> Ranked:
    """Order the nodes of all requests.

    Args:
        alive: float32 ``[R, D]``, of `survival`.
        live: bool ``[R]``; nothing of the others may be admitted.
    """
    keys = torch.where(live[:, None], alive, 0)
    keys[:, 0].copy_(live).mul_(2)
    ordered = keys.flatten().sort(descending=True, stable=True)
    return Ranked(ordered.values.clamp(max=1), ordered.indices)


def admit(order: Ranked, budget: int, requests: int) -> torch.Tensor:
    """Admit the likeliest nodes of all requests to one budget of rows.

    Args:
        budget: rows, at least as many as live requests.
        requests: R.

    Returns:
        bool ``[R, D]``: every live root, and the best of the rest that may survive at all; closed under parents.
    """
    values, places = order.values[:budget], order.places[:budget]
    admitted = torch.zeros(len(order.places), dtype=torch.bool, device=places.device)
    return admitted.index_copy_(0, places, values > 0).view(requests, -1)


def expected(order: Ranked, live: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Tokens a live request that a round is expected to yield, by its rows.

    Args:
        live: bool ``[R]``.
        points: float32 ``[n]``, rows a live request, each at least 1.

    Returns:
        float32 ``[n]``; the target's own token included. Between whole rows a straight line.
    """
    count, total, last = live.sum().clamp(min=1), order.values.cumsum(0), len(order.values) - 1
    at = (points * count - 1).clamp(0, last)
    below = at.long()
    low, high = total.index_select(0, below), total.index_select(0, (below + 1).clamp(max=last))
    return (low + (high - low) * (at - below)) / count


class Admitted(NamedTuple):
    """Trees of admitted nodes only, each in its first rows.

    Attributes:
        tokens: int64 ``[R, D]``; -1 behind a request's rows.
        parents: int64 ``[R, D]``; -1 for the root, 0 for the others behind a request's rows.
        q_lens: int64 ``[R]``, rows of each request; 0 for one that is not live.
        nodes: int64 ``[R, D]``, the node that each row was before.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    q_lens: torch.Tensor
    nodes: torch.Tensor


def compacted(tokens: torch.Tensor, parents: torch.Tensor, admitted: torch.Tensor) -> Admitted:
    """Close the gaps that nodes left behind which were not admitted; the order stays.

    Args:
        tokens, parents: int64 ``[R, D]``.
        admitted: bool ``[R, D]``, closed under parents.
    """
    node = torch.arange(tokens.shape[1], device=tokens.device)
    q_lens, rank = admitted.sum(1), admitted.cumsum(1) - 1
    nodes = torch.where(admitted, node, node + len(node)).sort(1).indices
    used = node < q_lens[:, None]
    above = parents.gather(1, nodes)
    above = torch.where(above < 0, -1, rank.gather(1, above.clamp(min=0)))
    # A root has parent -1 in a request without rows too: whoever climbs to it would climb for ever (a kernel hung so).
    above = torch.where(used, above, 0).index_fill(1, node[:1], -1)
    return Admitted(torch.where(used, tokens.gather(1, nodes), -1), above, q_lens, nodes)
