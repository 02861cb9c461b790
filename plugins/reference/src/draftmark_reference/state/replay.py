"""Rollback by replay: a verify in the masked form, the inputs of its rows, and a commit that runs them again."""

from __future__ import annotations

import torch

from draftmark import Gate, Recurrence

from .backend import ReferenceState
from .gathers import along, columns_after
from .layout import Layout
from .recurrence import Rows, masked, rows_of, step


class ReplayState(ReferenceState):
    """Keeps the inputs of each row of a verify, and runs the accepted rows again."""

    def _verify(self, state: torch.Tensor, rows: Rows, layout: Layout, layer: int) -> torch.Tensor:
        return masked(state, rows, layout.seen)[0]

    def _keep_channels(self, tail: torch.Tensor, history: torch.Tensor, layout: Layout, layer: int) -> None:
        self.arena["channels"][layer, : len(tail), : tail.shape[1]].copy_(tail)

    def _keep_rows(self, rows: tuple[torch.Tensor | None, ...], layer: int) -> None:
        for name, values in zip(("keys", "values", "decays", "betas"), rows, strict=True):
            if values is None:
                continue
            kept = self.arena[name][layer]
            constant = values.dim() == 1  # one decay per head, for all rows
            (kept if constant else kept[: len(values), : values.shape[1]]).copy_(values)

    def _after(
        self, committed: tuple[torch.Tensor, torch.Tensor], path: torch.Tensor, count: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state, window = committed
        if state.numel():
            rows = self._rows(path, layer)
            for i in range(path.shape[1]):
                moved, _ = step(state, rows.at(slice(i, i + 1)))
                state = torch.where((i < count)[:, None, None, None], moved, state)
        if window.numel():
            channels = along(self.arena["channels"][layer], path).to(window.dtype)
            return state, columns_after(torch.cat((window, channels), 1), count, self.geometry.window)
        return state, window.transpose(1, 2)

    def _rows(self, path: torch.Tensor, layer: int) -> Rows:
        """Return the kept rows in the order of each request's path."""
        shape = self.geometry.state
        keys, values = (along(self.arena[name][layer], path) for name in ("keys", "values"))
        decays = self.arena["decays"][layer]
        decay = decays if shape.gate is Gate.CONSTANT else along(decays, path)
        delta = shape.recurrence is Recurrence.DELTA
        beta = along(self.arena["betas"][layer], path) if delta else None
        return rows_of(keys, keys, values, decay, beta, shape)
