"""Correct attention over chosen keys in two designs other than the reference's, as base classes for mutants.

`ListFlash` loops over tiles of a row's list, and `ListSplit` merges shares of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Geometry
from draftmark.runtime import Chosen, ForwardBatch, KVCache

from ..mutant import ONLY, Mutant, around
from .latent_designs import Flash, Latent, LatentPlugin, Split, latent_plugin


class Listed(Latent):
    """Attention of one row after another over its list, in parts that a mutant replaces."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend row by row."""
        if not self.shape.chosen_width:
            super().attend(q, cache, batch, out, lse)
            return
        for row in range(self.num_rows(batch)):
            slots, listed = self.entries(batch, row)
            keys = self.cleared(self.rows_at(cache, self.read(slots, listed).long()), listed[:, None])
            seen = listed.expand(q.shape[1], -1)
            found, sums = self.packed(q[row].float(), keys, seen, listed.sum())
            out[row] = found.to(out.dtype)
            if lse is not None:
                lse[row] = self.log_sum(sums, listed)

    def num_rows(self, batch: ForwardBatch) -> int:
        """Return the number of rows to compute."""
        return batch.num_rows

    def entries(self, batch: ForwardBatch, row: int) -> tuple[Tensor, Tensor]:
        """Return the entries of a row's list, and bool where an entry names a key, ``[chosen_width]`` each."""
        slots, count = self.list_of(batch, row)
        entry = torch.arange(len(slots), device=slots.device)
        return slots, (entry < count) & (slots >= 0)

    def list_of(self, batch: ForwardBatch, row: int) -> tuple[Tensor, Tensor]:
        """Return the entries and the count of a row's list."""
        assert batch.chosen is not None
        return batch.chosen.slots[row], batch.chosen.counts[row]

    def read(self, slots: Tensor, listed: Tensor) -> Tensor:
        """Return the slots to read: slot 0 for an entry without a key."""
        return torch.where(listed, slots, 0)

    def rows_at(self, cache: KVCache, slots: Tensor) -> Tensor:
        """Return the rows ``[chosen_width, head_dim]`` of slots in float32."""
        size = self.shape.page_size
        at = self.page_of(slots), slots % size
        return self.joined([part[at] for part in self.parts(cache)])

    def page_of(self, slots: Tensor) -> Tensor:
        """Return the page ids of slots."""
        return slots // self.shape.page_size

    def log_sum(self, sums: Tensor, listed: Tensor) -> Tensor:
        """Return the log-sum-exps to store."""
        return sums


class ListFlash(Listed, Flash):
    """Loops over tiles of a list with a running maximum and sum."""


class ListSplit(Listed, Split):
    """Divides a list into shares, and merges their partial results."""


class ListedPlugin(LatentPlugin):
    """Plugin of a design with lists: latent rows in one buffer or two, all modes except RAGGED_VERIFY."""

    info = replace(LatentPlugin.info, chosen_keys=True)

    def supports(self, geometry: Geometry) -> list[str]:
        """Return the reasons of a latent design, and one for lists of layers with K and V apart."""
        a = geometry.attention
        apart = bool(a.chosen_width) and not a.latent
        reasons = super().supports(geometry)
        return reasons + ["chosen keys with K and V apart are not served: they need latent rows"] * apart


DESIGNS: dict[str, type[Listed]] = {"flash": ListFlash, "split": ListSplit}


def listed_plugin(design: type[Listed]) -> type[LatentPlugin]:
    """Return the plugin of a design or of a mutant of it."""
    return latent_plugin(design, ListedPlugin)


Entries = tuple[Tensor, Tensor]


def on_lists(change: Callable[[ForwardBatch, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Any], None]:
    """Return a patch that gives `attend` of layers with lists other slots and counts."""

    def patch(backend: Any) -> None:
        def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
            if backend.geometry.attention.chosen_width:
                found = change(batch, batch.chosen.slots, batch.chosen.counts)
                batch = replace(batch, chosen=Chosen(*found))
            original(q, cache, batch, out, *lse)

        around(backend, "attend", call)

    return patch


def chosen_mutant(name: str, what: str, backend: type[Listed], source: str = "") -> Mutant:
    return Mutant(name, what, source, layouts=("tutorial",), absent=ONLY, plugin=listed_plugin(backend))
