"""From SGLang's descriptions of draft trees to parents, the one description draftmark takes. Pure torch, capturable."""

from __future__ import annotations

import torch


def parents_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """Find each node's parent from who sees whom: the last of its ancestors.

    Args:
        mask: bool ``[R, D, D]``; [r, j, i] is set when node j sees node i. Nodes follow their ancestors, and a node
            sees all of them (EAGLE's trees and n-gram's alike). The diagonal and what lies above it are not read.

    Returns:
        int64 ``[R, D]``; -1 for a node without ancestors.
    """
    nodes = mask.shape[-1]
    index = torch.arange(nodes, device=mask.device)
    seen = mask & (index < index[:, None])
    return torch.where(seen, index, -1).amax(-1)


def parents_of_step(step: int, choice: torch.Tensor, topk: int) -> torch.Tensor:
    """Find the tail slot of each new branch's parent at a draft step.

    `select_top_k_tokens` picks topk of topk · topk candidates and reports candidate number c as c + topk² · (step -
    1) + topk (`tree_info[2]`): the place among all scores so far. Candidate c continues branch c // topk of the step
    before, whose token lies at tail slot topk · (step - 1) + that branch.

    Args:
        step: 1 and above; the tokens of step 0 continue the committed text.
        choice: int64 ``[R, topk]``, `tree_info[2]`.

    Returns:
        int64 ``[R, topk]``.
    """
    candidate = choice - (topk * topk * (step - 1) + topk)
    return topk * (step - 1) + torch.div(candidate, topk, rounding_mode="floor")


def parents_by_branch(step: int, requests: int, topk: int, device: torch.device) -> torch.Tensor:
    """The parents that SGLang's own backends assume: branch t of a step continues branch t of the step before."""
    return (topk * (step - 1) + torch.arange(topk, device=device)).expand(requests, -1)
