"""Reorders a step's requests as vLLM's runner does if the builder requires decodes first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from draftmark_contract.judge.step import Step
from draftmark_contract.oracle.history import Request


@dataclass(frozen=True)
class Ordered:
    """Holds a step with its requests in the order of vLLM's runner.

    Attributes:
        step: the reordered step.
        order: int64, for each row of `step` its row in the original step.
    """

    step: Step
    order: torch.Tensor

    def rows(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors with their rows in the runner's order. If the order is unchanged, return the tensors."""
        if torch.equal(self.order, torch.arange(len(self.order))):
            return tensors
        return tuple(tensor[self.order.to(tensor.device)] for tensor in tensors)

    def back(self, out: torch.Tensor) -> torch.Tensor:
        """Return the rows of `out`, which are in the runner's order, in the original order of the step."""
        found = torch.empty_like(out)
        found[self.order.to(out.device)] = out
        return found


def in_runner_order(step: Step, builder: Any) -> Ordered:
    """Return the step with its requests reordered, as `reorder_batch_to_split_decodes_and_prefills` does in vLLM.

    Decodes come first, then chunks with a context, then first chunks. Requests without rows are dropped, because the
    scheduler gives each request of a step at least one token. With an empty decode FlashInfer's planner raises a
    ValueError.
    """
    threshold = getattr(builder, "reorder_batch_threshold", None)
    requests = step.forward.requests
    numbers = [number for number, one in enumerate(requests) if one.rows]
    if threshold is not None:
        numbers.sort(key=lambda number: _region(requests[number], threshold))
    firsts = [sum(one.rows for one in requests[:number]) for number in numbers]
    rows = [first + row for first, number in zip(firsts, numbers, strict=True) for row in range(requests[number].rows)]
    rows += range(len(rows), step.num_rows)
    forward = replace(step.forward, requests=tuple(requests[number] for number in numbers))
    place = {number: n for n, number in enumerate(numbers)}
    unstored = frozenset((place[number], row) for number, row in step.unstored)
    return Ordered(replace(step, forward=forward, unstored=unstored), torch.tensor(rows, dtype=torch.int64))


def _region(request: Request, threshold: int) -> int:
    if request.prefix == 0:
        return 3
    return 0 if request.rows <= threshold else 2
