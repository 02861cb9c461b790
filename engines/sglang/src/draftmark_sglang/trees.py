"""From SGLang's descriptions of draft trees to parents, the one description draftmark takes. Pure torch, capturable."""

from __future__ import annotations

from typing import Any

import torch

from draftmark.runtime import ForwardBatch

from .phases import live_requests


class TreeMasks:
    """Who sees whom in each request's tree: copies, since SGLang may write the next round's while a graph waits.

    Nodes follow their ancestors, and a node sees all of them (EAGLE's trees and n-gram's alike).

    Attributes:
        cells: bool ``[max_reqs, D, D]``; [r, j, i] is set when node j sees node i. The diagonal and what lies above it
            are not read.
    """

    def __init__(self, max_reqs: int, nodes: int, device: torch.device | str) -> None:
        self.cells = torch.ones(max_reqs, nodes, nodes, dtype=torch.bool, device=device)
        index = torch.arange(nodes, device=device)
        self._earlier = torch.where(index < index[:, None], index, -1)  # [D, D]: i where node i comes before node j

    def copy(self, batch: ForwardBatch, forward: Any) -> None:
        """Keep the live requests' masks. SGLang's `spec_info` is not padded: padded requests get roots alone."""
        live = live_requests(forward, batch.padded_reqs)
        given = forward.spec_info.custom_mask[: self.cells[:live].numel()]
        self.cells[:live].copy_(given.view(self.cells[:live].shape))
        if live < batch.padded_reqs:
            self.cells[live : batch.padded_reqs].zero_()

    def parents(self, requests: int) -> torch.Tensor:
        """Find each node's parent: the last of its ancestors.

        Returns:
            int64 ``[requests, D]``; -1 for a node without ancestors.
        """
        return torch.where(self.cells[:requests], self._earlier, -1).amax(-1)


def write_parents_of_step(out: torch.Tensor, choice: torch.Tensor, topk: int) -> None:
    """Write the tail slot of each new branch's parent at a draft step behind the first.

    At step s `select_top_k_tokens` picks topk of topk · topk candidates and reports candidate c as c + topk² · (s - 1)
    + topk (`tree_info[2]`): its place among all scores so far. It continues branch c // topk of the step before, whose
    token lies at tail slot topk · (s - 1) + that branch: what is reported, divided by topk, less one.

    Args:
        out: int64 ``[R, topk]``, written whole.
        choice: int64 ``[R, topk]``, `tree_info[2]`.
    """
    torch.div(choice, topk, rounding_mode="floor", out=out).sub_(1)


def write_parents_by_branch(out: torch.Tensor, step: int) -> None:
    """Write the parents that SGLang's own backends assume: branch t of a step continues branch t of the step before.

    Args:
        out: int64 ``[R, topk]``, written whole.
    """
    topk = out.shape[1]
    out.copy_(topk * (step - 1) + torch.arange(topk, device=out.device))
