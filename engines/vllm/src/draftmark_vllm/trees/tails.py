"""Mask and depths of a batch whose requests bring trees, in static tensors, so that a graph finds today's there."""

from __future__ import annotations

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Tree, ancestors, depths
from draftmark.tree import pack_bits

from ..spans import Span
from .step_trees import Parents, StepTrees, chain


class TreeTails:
    """Tails of VERIFY and RAGGED_VERIFY batches of one geometry."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._nodes, self._words = geometry.draft.num_draft_tokens, geometry.mask_words
        rows = geometry.max_reqs * self._nodes
        self._mask = torch.zeros(rows, self._words, dtype=torch.int32, device=device)
        self._depth = torch.zeros(rows, dtype=torch.int32, device=device)

    def write(self, span: Span, trees: StepTrees | None) -> Tree:
        """Fill the tail of a span. Where no tree is told, as at capture, each request's rows are a chain.

        Args:
            span: VERIFY or RAGGED_VERIFY.
            trees: of the whole step.

        Returns:
            Views of static memory, valid until the next call.
        """
        parents = torch.tensor(self._padded(span, trees), dtype=torch.int64).to(self._mask.device)
        reach = ancestors(parents)
        mask, depth = pack_bits(reach.flatten(0, 1), self._words), depths(reach).flatten()
        uniform = span.mode is Mode.VERIFY
        if not uniform:
            nodes = [r * self._nodes + n for r, count in enumerate(span.q_lens) for n in range(count)]
            at = torch.tensor(nodes, dtype=torch.int64).to(self._mask.device)
            mask, depth = mask[at], depth[at]
        rows = len(mask)
        self._mask[:rows].copy_(mask)
        self._depth[:rows].copy_(depth)
        by_slot = self._depth[:rows].view(-1, self._nodes) if uniform else self._depth[:rows]
        return Tree(self._mask[:rows], by_slot)

    def _padded(self, span: Span, trees: StepTrees | None) -> list[list[int]]:
        """Parents of every request of a span; nodes that a request has not hang on its root, as unused ones do."""
        found = []
        for number, count in enumerate(span.q_lens):
            known: Parents | None = None
            if trees is not None and span.first_req + number < len(trees.parents):
                known = trees.parents[span.first_req + number]
            parents = chain(count) if known is None else known
            found.append([*parents, *([0] * (self._nodes - len(parents)))])
        return found
