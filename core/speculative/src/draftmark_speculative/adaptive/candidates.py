"""Choice of draft nodes for a row budget: acceptance probabilities, selected nodes, and expected tokens."""

from __future__ import annotations

import torch

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, VerifyResult

from ..ragged import Admitted
from ..state import DeviceState
from .calibration import Calibration
from .forecast import grid
from .survival import admit, compacted, expected, of_children, ranked, survival


class Candidates:
    """Holds the acceptance probabilities ("chances") of the draft nodes, and selects the nodes to verify.

    The tensors are static, and all methods are captured with the round.

    Attributes:
        chances: float32 ``[max_reqs, D]``, chance of each node once its parent is kept, before calibration; 0 for an
            unused node. Written before the round, by batch entry.
        levels: int64 ``[max_reqs, D]``, depth below the root; read only with a calibration.
        points: numbers of rows per request for which `report` has a value.
        report: float32 ``[len(points)]``, expected tokens per request in the latest round.

    Args:
        depth: depth of the deepest node.
        calibration: corrects chances by the acceptance so far; None uses chances unchanged.
    """

    def __init__(self, geometry: Geometry, state: DeviceState, depth: int, calibration: Calibration | None) -> None:
        self._state, self._depth, self._calibration = state, depth, calibration
        shape = state.tokens.shape
        self.chances = torch.zeros(shape, device=state.device)
        self.levels = torch.zeros(shape, dtype=torch.int64, device=state.device)
        self.points = grid(geometry.draft.num_draft_tokens)
        self._points = torch.tensor(self.points, device=state.device)
        self.report = torch.ones(len(self.points), device=state.device)
        self._admitted: Admitted | None = None

    def admit(self, batch: ForwardBatch) -> Admitted:
        """Return the likeliest nodes of the state's draft trees, up to the row budget of a RAGGED_VERIFY batch."""
        size = batch.padded_reqs
        rows, live = self._live(size)
        chances, parents = self.chances[:size], self._state.parents[:size]
        if self._calibration is not None:
            depth = (self.levels[:size] - 1).clamp(min=0)
            chances = chances * self._calibration.ratios(rows).gather(1, depth)
        order = ranked(survival(chances, parents, self._depth), live)
        self.report.copy_(expected(order, live, self._points))
        self._admitted = compacted(self._state.tokens[:size], parents, admit(order, batch.num_rows, size))
        return self._admitted

    def observe(self, result: VerifyResult) -> None:
        """Update the calibration with the verification result of the trees from the latest `admit`."""
        if self._calibration is None:
            return
        trees = self._admitted
        assert trees is not None, "a round admits before it observes"
        size = len(trees.tokens)
        rows, live = self._live(size)
        chances = self.chances[:size].nan_to_num(nan=0.0).gather(1, trees.nodes)
        chances = torch.where(trees.tokens >= 0, chances, 0)
        chances[:, 0].zero_()
        below = of_children(chances, trees.parents).clamp(max=1)
        step = torch.arange(self._depth, device=rows.device)
        kept = result.accept_lens[:, None]
        tried = torch.where(step < kept, below.gather(1, result.accept_index[:, : self._depth]), 0)
        self._calibration.update(rows, live, tried, ((step + 1 < kept) & (tried > 0)).float())

    def _live(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._state.rows[:size]
        return rows, rows < self._state.lengths.first_null_row
