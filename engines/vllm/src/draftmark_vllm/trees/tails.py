"""Writes the masks and depths of draft trees to static tensors, which captured graphs read."""

from __future__ import annotations

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Tree, ancestors, depths
from draftmark.tree import pack_bits

from ..batch_runs import BatchRun
from .step_trees import Parents, StepTrees, chain

CACHE_SIZE = 256
"""Number of cached tails. The combs of a head repeat in every step, and a copy is faster than a new computation."""


class TreeTails:
    """Builds the tail (mask and depths of the draft trees) of VERIFY and RAGGED_VERIFY batches of one geometry."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._nodes, self._words = geometry.draft.num_draft_tokens, geometry.mask_words
        rows = geometry.max_reqs * self._nodes
        self._mask = torch.zeros(rows, self._words, dtype=torch.int32, device=device)
        self._depth = torch.zeros(rows, dtype=torch.int32, device=device)
        self._known: dict[tuple[bool, tuple[int, ...], tuple[Parents, ...]], tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, run: BatchRun, trees: StepTrees | None) -> Tree:
        """Write the mask and depths of a run's trees. A request without a tree is a chain, as is each one in a capture.

        Args:
            run: run of mode VERIFY or RAGGED_VERIFY.
            trees: trees of the whole step.

        Returns:
            Views of static memory, valid until the next call.
        """
        key = run.mode is Mode.VERIFY, run.q_lens, self._padded(run, trees)
        if key not in self._known:
            if len(self._known) >= CACHE_SIZE:
                self._known.clear()
            self._known[key] = self._tail(*key)
        mask, depth = self._known[key]
        rows, uniform = len(mask), key[0]
        self._mask[:rows].copy_(mask)
        self._depth[:rows].copy_(depth)
        by_slot = self._depth[:rows].view(-1, self._nodes) if uniform else self._depth[:rows]
        return Tree(self._mask[:rows], by_slot)

    def _tail(
        self, uniform: bool, q_lens: tuple[int, ...], each: tuple[Parents, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute mask and depths of the rows of requests with these trees, given as parents."""
        reach = ancestors(torch.tensor(each, dtype=torch.int64))
        mask, depth = pack_bits(reach.flatten(0, 1), self._words), depths(reach).flatten()
        if not uniform:
            at = torch.tensor([r * self._nodes + n for r, count in enumerate(q_lens) for n in range(count)])
            mask, depth = mask[at], depth[at]
        return mask.to(self._mask.device), depth.to(self._depth.device)

    def _padded(self, run: BatchRun, trees: StepTrees | None) -> tuple[Parents, ...]:
        """Return each request's tree, as parents, padded to the maximum node count with unused children of the root."""
        found: list[Parents] = []
        for number, count in enumerate(run.q_lens):
            known: Parents | None = None
            if trees is not None and run.first_req + number < len(trees.parents):
                known = trees.parents[run.first_req + number]
            parents = chain(count) if known is None else known
            found.append((*parents, *([0] * (self._nodes - len(parents)))))
        return tuple(found)
