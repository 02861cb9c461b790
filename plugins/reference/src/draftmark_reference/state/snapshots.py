"""Rollback by snapshots: the state and the window after each row of a verify, and a commit that copies them."""

from __future__ import annotations

import torch

from .backend import ReferenceState
from .gathers import ancestors_in
from .layout import Layout
from .recurrence import Rows, step


class SnapshotState(ReferenceState):
    """Keeps the state and the window after each row of a verify."""

    def _verify(self, state: torch.Tensor, rows: Rows, layout: Layout, layer: int) -> torch.Tensor:
        kept, found = self.arena["states"][layer, : len(state)], []
        entry = torch.arange(len(state), device=state.device)
        for t in range(rows.q.shape[2]):
            parent = layout.parents[:, t]
            before = torch.where((parent >= 0)[:, None, None, None], kept[entry, parent.clamp(min=0)], state)
            after, out = step(before, rows.at(slice(t, t + 1)))
            kept[:, t] = after
            found.append(out)
        return torch.cat(found, 2)

    def _keep_channels(self, tail: torch.Tensor, history: torch.Tensor, layout: Layout, layer: int) -> None:
        kept, window = self.arena["windows"][layer, : len(tail), : tail.shape[1]], self.geometry.window
        for taps, at in enumerate(ancestors_in(layout.parents, window)[:window]):
            kept[..., window - 1 - taps] = history.gather(1, at[..., None].expand_as(tail)).to(kept.dtype)

    def _keep_rows(self, rows: tuple[torch.Tensor | None, ...], layer: int) -> None:
        """Keep nothing: the states are kept already."""

    def _after(
        self, committed: tuple[torch.Tensor, torch.Tensor], path: torch.Tensor, count: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entry = torch.arange(len(path), device=path.device)
        leaf = path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        state, window = committed
        if state.numel():
            state = self.arena["states"][layer][entry, leaf]
        if window.numel():
            return state, self.arena["windows"][layer][entry, leaf]
        return state, window.transpose(1, 2)
