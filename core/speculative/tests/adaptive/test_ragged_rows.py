"""Tests of the rows of ragged trees: mask, depth and parents describe one tree per request."""

from __future__ import annotations

import torch

from draftmark import AttentionShape, DraftShape, Gate, Geometry, Limits, Mode, Recurrence, StateGeometry, StateShape
from draftmark.runtime import BatchBuffers, Exact, TorchTreeOps, validate
from draftmark_speculative.ragged import Admitted, RaggedRows

MODES = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY)
LIMITS, DRAFT = Limits(3, 64, row_budgets=(9,)), DraftShape(2, 3, 4)
SHAPE = StateShape(Recurrence.DELTA, Gate.HEAD, 2, 1, 4, 3, 8, 4, "float32")


def test_parents_are_written_by_row() -> None:
    """In a hybrid's ragged batch each row has its own parent, counted in its request's tail."""
    geometry = Geometry.create(AttentionShape(2, 1, 8, 16, "float32", "float32"), LIMITS, DRAFT, modes=MODES)
    state = StateGeometry.create(SHAPE, LIMITS, DRAFT)
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 0], [-1, 0, 1, 0]])
    trees = Admitted(torch.zeros(3, 4, dtype=torch.int64), parents, torch.tensor([4, 1, 3]), parents)
    batch = BatchBuffers(geometry, "cpu", state).ragged_verify(9, 3, Exact((5, 0, 2)), tree=True, padded_reqs=3)
    batch.prefix_lens.copy_(torch.tensor([5, 0, 2]))
    RaggedRows(geometry, torch.device("cpu")).write(batch, trees, TorchTreeOps(geometry))
    validate(batch, state)
    assert batch.tail.parents.tolist()[:8] == [-1, 0, 0, 1, -1, -1, 0, 1]
    assert batch.tail.depth.tolist()[:8] == [0, 1, 1, 2, 0, 0, 1, 2]
    assert batch.tail.mask[:8, 0].tolist() == [1, 3, 5, 11, 1, 1, 3, 7]
