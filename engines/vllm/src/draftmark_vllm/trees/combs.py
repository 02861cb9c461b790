"""Trees of an EAGLE head: at each step of vLLM's own chain the next best tokens too, as leaves beside it.

The head runs as often as for a chain of that many steps, in vLLM's own proposer, and never sees a leaf; a leaf that is
accepted ends the round with its token and one more. A tree whose branches go on would need draft steps of several rows
a request, which vLLM's proposer has no place for.
"""

from __future__ import annotations

from typing import Any

import torch

from draftmark_engines import EngineError

from .step_trees import Parents


def steps_of(drafts: int, branches: int) -> int:
    """Draft steps of a comb of so many drafts.

    Raises:
        EngineError: the last step would not be whole.
    """
    if drafts % branches:
        raise EngineError(
            f"num_speculative_tokens is {drafts}, but a comb has {branches} drafts a step; make it a multiple of "
            f"{branches}, or change draftmark.branches"
        )
    return drafts // branches


def comb(steps: int, branches: int) -> Parents:
    """Parents of a comb: the drafts of each step hang on the first of the step before."""
    found = [-1]
    for step in range(steps):
        found += [0 if step == 0 else 1 + (step - 1) * branches] * branches
    return tuple(found)


def combing(proposer: type) -> type:
    """Derive a proposer of combs from one of vLLM's that draft with a model, step by step."""

    class Combing(proposer):  # type: ignore[misc]
        """vLLM's own, but for which tokens it gives."""

        branches: int
        steps: int

        def propose(self, *given: Any, **more: Any) -> torch.Tensor:
            """Drafts ``[R, steps · branches]``, step by step."""
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
            """None: what is accepted is the target's own choice."""

    return Combing
