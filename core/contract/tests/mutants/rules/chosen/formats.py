"""Mutants that checks of `chosen` kill: listed rows of 656 bytes with a scale for each 128 numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ...designs.chosen_designs import ListFlash, ListSplit, chosen_mutant


class ScalesByEntry(ListFlash):
    """Multiplies a listed row by the scales of the next entry's row."""

    def block_scales(self, rows: Tensor) -> Tensor:
        return super().block_scales(rows).roll(-1, 0)


class ListedRestsInEightBits(ListSplit):
    """Reads the rest of a listed row as 64 e4m3 numbers, from its last bytes."""

    def rest(self, rows: Tensor) -> Tensor:
        return rows[:, -64:].contiguous().view(torch.float8_e4m3fn).float().nan_to_num(0.0)


MUTANTS = (
    chosen_mutant("C44", "Multiplies a listed row by the scales of the next entry", ScalesByEntry),
    chosen_mutant("C45", "Reads the rest of a listed row as e4m3", ListedRestsInEightBits),
)
KILLER = dict.fromkeys(("C44", "C45"), "chosen.lists_name_rows_of_656_bytes")
