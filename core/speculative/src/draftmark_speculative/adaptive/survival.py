"""Probability that drafts are accepted, and selection of the likeliest drafts for a row budget. Torch, capturable.

A node's **survival** is the probability that verification keeps it: the product of the chances along its path. A
node's chance is the probability that it is kept once its parent is. No chance is above 1, so a child's survival
is at most its parent's. Parents come first among equals, so the best nodes of all requests include their parents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ragged import Admitted


def survival(chances: torch.Tensor, parents: torch.Tensor, levels: int) -> torch.Tensor:
    """Return each node's survival: the product of the chances (acceptance probabilities) along its path.

    Args:
        chances: float32 ``[R, D]``, chance of each node once its parent is kept; 0 for an unused node. The root's entry
            is not read. Siblings exclude each other, so a sum of siblings above 1 is scaled to 1.
        parents: int64 ``[R, D]``, parents[r, j] < j; -1 for the root.
        levels: number of levels below the root, at least the depth of the deepest used node.

    Returns:
        float32 ``[R, D]`` in [0, 1], 1 for the root, and monotone: no node is above its parent.
    """
    parent = parents.clamp(min=0)
    chances = chances.nan_to_num(nan=0.0).clamp(0, 1)
    chances[:, 0].zero_()  # `chances[:, 0] = 0` would copy the number from the host
    chances = chances / of_children(chances, parents).clamp(min=1).gather(1, parent)
    chances[:, 0].fill_(1)
    alive = torch.ones_like(chances)
    for _ in range(levels):
        alive = chances * alive.gather(1, parent)
    return alive


def of_children(values: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Sum values over each node's children, ``[R, D]`` → ``[R, D]``, bit-identical on equal devices.

    scatter_add is not used: its atomics add in any order, so tensor-parallel ranks could admit different nodes of a
    tie.
    """
    node = torch.arange(parents.shape[1], device=parents.device)
    return torch.where(parents[:, None] == node[:, None], values[:, None], 0).sum(-1)


class Ranked(NamedTuple):
    """Nodes of a batch in order of admission: roots, then by survival (probability of acceptance); sorting is stable.

    Attributes:
        values: float32 ``[R · D]``, survival in this order, descending; 0 for nodes that must not be admitted.
        places: int64 ``[R · D]``, index of each node in the flattened ``[R, D]``.
    """

    values: torch.Tensor
    places: torch.Tensor


def ranked(alive: torch.Tensor, live: torch.Tensor) -> Ranked:
    """Sort the nodes of all requests in order of admission.

    Args:
        alive: float32 ``[R, D]``, from `survival`.
        live: bool ``[R]``; nodes of padding requests get value 0.
    """
    keys = torch.where(live[:, None], alive, 0)
    keys[:, 0].copy_(live).mul_(2)
    ordered = keys.flatten().sort(descending=True, stable=True)
    return Ranked(ordered.values.clamp(max=1), ordered.indices)


def admit(order: Ranked, budget: int, requests: int) -> torch.Tensor:
    """Admit the likeliest nodes of all requests to one budget of rows.

    Args:
        budget: number of rows, at least the number of live requests.
        requests: R.

    Returns:
        bool ``[R, D]``: every live root and the likeliest other nodes of nonzero survival; closed under parents.
    """
    values, places = order.values[:budget], order.places[:budget]
    admitted = torch.zeros(len(order.places), dtype=torch.bool, device=places.device)
    return admitted.index_copy_(0, places, values > 0).view(requests, -1)


def expected(order: Ranked, live: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Return a round's expected tokens per live request, for each number of rows per request in `points`.

    Args:
        live: bool ``[R]``.
        points: float32 ``[n]``, numbers of rows per live request, each at least 1.

    Returns:
        float32 ``[n]``, the target's own token included; linear between whole rows.
    """
    count, total, last = live.sum().clamp(min=1), order.values.cumsum(0), len(order.values) - 1
    at = (points * count - 1).clamp(0, last)
    below = at.long()
    low, high = total.index_select(0, below), total.index_select(0, (below + 1).clamp(max=last))
    return (low + (high - low) * (at - below)) / count


def compacted(tokens: torch.Tensor, parents: torch.Tensor, admitted: torch.Tensor) -> Admitted:
    """Pack the admitted nodes of each tree to the front, in their order.

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
    # The root has parent -1 even in a request without rows: a kernel that climbs to the root would loop forever.
    above = torch.where(used, above, 0).index_fill(1, node[:1], -1)
    return Admitted(torch.where(used, tokens.gather(1, nodes), -1), above, q_lens, nodes)
