"""Draft trees of an EAGLE head, in the shape of a comb: a chain, with each step's next best tokens as leaves.

vLLM's own proposer runs the head as often as for a chain of that length. The head never reads a leaf: a verify step
that accepts a leaf emits its token, then the target's next token, and ends. Deeper branches would need draft steps with
several rows per request, which vLLM's proposer cannot run.
"""

from __future__ import annotations

from typing import Any

import torch

from draftmark_engines import EngineError

from .step_trees import Parents


def steps_of(drafts: int, branches: int) -> int:
    """Return the number of draft steps of a comb (a chain with leaves) of `drafts` draft tokens.

    Raises:
        EngineError: `drafts` is not a multiple of `branches`.
    """
    if drafts % branches:
        raise EngineError(
            f"num_speculative_tokens is {drafts}, but a comb has {branches} drafts a step; make it a multiple of "
            f"{branches}, or change draftmark.branches"
        )
    return drafts // branches


def comb(steps: int, branches: int) -> Parents:
    """Return each node's parent in a comb. A step's drafts are children of the previous step's first draft."""
    found = [-1]
    for step in range(steps):
        found += [0 if step == 0 else 1 + (step - 1) * branches] * branches
    return tuple(found)


def comb_proposer(proposer: type) -> type:
    """Return a subclass of a vLLM proposer that drafts combs. The proposer must run a draft model step by step."""

    class CombProposer(proposer):  # type: ignore[misc]
        """vLLM's proposer, changed to return the tokens of a comb (a chain with leaves).

        Attributes:
            branches: drafts of each step.
            steps: draft steps of one proposal.
        """

        branches: int
        steps: int

        def propose(self, *given: Any, **more: Any) -> torch.Tensor:
            """Return drafts ``[R, steps · branches]``, ordered by step."""
            self._best: list[torch.Tensor] = []
            if "num_speculative_tokens" in more:
                more["num_speculative_tokens"] = self.steps
            else:
                given = (self.steps, *given[1:])
            super().propose(*given, **more)
            return torch.stack(self._best, 1).flatten(1)

        def _sample_draft_tokens(self, hidden_states: torch.Tensor, *given: Any) -> tuple[torch.Tensor, None]:
            best = self.model.compute_logits(hidden_states).topk(self.branches).indices
            self._best.append(best)
            return best[:, 0], None

        def take_last_draft_probs(self) -> None:
            """Return None: vLLM needs no draft probabilities, because acceptance compares sampled tokens."""

    return CombProposer
