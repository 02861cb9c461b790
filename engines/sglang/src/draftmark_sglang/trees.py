"""Conversion of SGLang's draft trees to parent indices, in pure torch that a CUDA graph can capture."""

from __future__ import annotations

from typing import Any

import torch

from draftmark.runtime import ForwardBatch

from .phases import live_requests


class TreeMasks:
    """Holds the visibility masks of the requests' draft trees, copied from SGLang's buffer.

    The copy is necessary, because SGLang can write the next round's masks before a graph reads this round's. In EAGLE
    and n-gram trees, nodes come after their ancestors, and a node sees all of its ancestors.

    Attributes:
        cells: bool ``[max_reqs, D, D]``; ``[r, j, i]`` is set when node j sees node i. Only cells with i < j are read.
    """

    def __init__(self, max_reqs: int, nodes: int, device: torch.device | str) -> None:
        self.cells = torch.ones(max_reqs, nodes, nodes, dtype=torch.bool, device=device)
        index = torch.arange(nodes, device=device)
        self._earlier = torch.where(index < index[:, None], index, -1)  # [D, D]: element (j, i) is i if i < j, else -1

    def copy(self, batch: ForwardBatch, forward: Any) -> None:
        """Copy the live requests' tree masks from SGLang's `spec_info`.

        `spec_info` has no masks of padding requests, so each of their nodes becomes a root (it sees only itself).
        """
        live = live_requests(forward, batch.padded_reqs)
        mask = forward.spec_info.custom_mask[: self.cells[:live].numel()]
        self.cells[:live].copy_(mask.view(self.cells[:live].shape))
        if live < batch.padded_reqs:
            self.cells[live : batch.padded_reqs].zero_()

    def parents(self, requests: int) -> torch.Tensor:
        """Return each node's parent: the last node that it sees among the earlier ones.

        Returns:
            int64 ``[requests, D]``; -1 for a node without ancestors.
        """
        return torch.where(self.cells[:requests], self._earlier, -1).amax(-1)


def write_parents_of_step(out: torch.Tensor, choice: torch.Tensor, topk: int) -> None:
    """Write the parent of each new branch at a draft step after the first.

    A parent is written as a tail slot, which is its index among the round's draft tokens.

    At step s `select_top_k_tokens` selects topk of topk · topk candidates. It reports candidate c as
    c + topk² · (s - 1) + topk (`tree_info[2]`), its index among all scores so far. Candidate c continues branch
    c // topk of step s - 1, and that branch's token is at tail slot topk · (s - 1) + c // topk. So the slot is the
    reported number, divided by topk, minus 1.

    Args:
        out: int64 ``[R, topk]``; every element is written.
        choice: int64 ``[R, topk]``, `tree_info[2]`.
    """
    torch.div(choice, topk, rounding_mode="floor", out=out).sub_(1)


def write_parents_by_branch(out: torch.Tensor, step: int) -> None:
    """Write the parents that SGLang's own backends assume: branch t continues branch t of the previous step.

    Args:
        out: int64 ``[R, topk]``; every element is written.
        step: draft step, at least 1.
    """
    topk = out.shape[1]
    out.copy_(topk * (step - 1) + torch.arange(topk, device=out.device))
