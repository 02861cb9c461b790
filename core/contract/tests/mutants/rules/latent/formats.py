"""Mutants that checks of `latent_formats` kill: rows of 656 bytes with a scale for each 128 numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmark import PLAIN_ROWS
from draftmark.runtime import KVCache
from draftmark_contract.profiles import Profile

from ...designs.latent_designs import Composed, Flash, Lists, Split, latent_mutant, zeros_in
from ...designs.layouts import on_reference


class ScalesOfTheNextBlock(Flash):
    """Multiplies each block by the scale of the block after it."""

    def block_scales(self, rows: Tensor) -> Tensor:
        return super().block_scales(rows).roll(-1, -1)


class OneScaleForARow(Lists):
    """Multiplies all four blocks by the first scale."""

    def block_scales(self, rows: Tensor) -> Tensor:
        return super().block_scales(rows)[:, :1].expand(-1, 4)


class ScalesOfTheRowBefore(Composed):
    """Multiplies a row by the scales of the row before it."""

    def block_scales(self, rows: Tensor) -> Tensor:
        return super().block_scales(rows).roll(1, 0)


class ScalesOfTheTile(Split):
    """Multiplies every 16 rows by the scales of the first of them."""

    def block_scales(self, rows: Tensor) -> Tensor:
        return super().block_scales(rows)[torch.arange(len(rows), device=rows.device) // 16 * 16]


class RoundedScales(Flash):
    """Rounds scales down to powers of two."""

    def block_scales(self, rows: Tensor) -> Tensor:
        return super().block_scales(rows).log2().floor().exp2()


class RestInEightBits(Split):
    """Reads the rest as 64 e4m3 numbers."""

    def rest(self, rows: Tensor) -> Tensor:
        return rows[:, 528:592].contiguous().view(torch.float8_e4m3fn).float()


class RestBehindTheNumbers(Composed):
    """Reads the rest right after the value, where the scales are."""

    def rest(self, rows: Tensor) -> Tensor:
        return rows[:, 512:640].contiguous().view(torch.bfloat16).float()


class NumbersWithoutScales(Lists):
    """Takes the e4m3 numbers of the third and fourth block for real values."""

    def block_scales(self, rows: Tensor) -> Tensor:
        return torch.where(torch.arange(4, device=rows.device) < 2, super().block_scales(rows), 1.0)


class UnclearedScales(Flash):
    """Clears the numbers of unused rows, and multiplies them by unused scales."""

    def gathered(self, cache: KVCache, table: Tensor, end: Tensor) -> Tensor:
        found = super().gathered(cache, table, end)
        if self.shape.row_format == PLAIN_ROWS:
            return found
        rows = torch.cat([part[table].flatten(0, 1) for part in self.parts(cache)], -1)
        found[:, : self.value_dim] += 0.0 * self.block_scales(rows).repeat_interleave(128, -1)
        return found


MUTANTS = (
    latent_mutant("A53", "Multiplies a block by the scale of the next block", ScalesOfTheNextBlock),
    latent_mutant("A54", "Multiplies all blocks of a row by one scale", OneScaleForARow),
    latent_mutant("A55", "Multiplies a row by the scales of the row before it", ScalesOfTheRowBefore),
    latent_mutant("A56", "Multiplies 16 rows by the scales of one", ScalesOfTheTile),
    latent_mutant("A57", "Rounds scales to powers of two", RoundedScales),
    latent_mutant("A58", "Reads a bfloat16 rest as e4m3", RestInEightBits),
    latent_mutant("A59", "Reads the rest where the scales are", RestBehindTheNumbers),
    latent_mutant("A60", "Leaves the scales of two blocks out", NumbersWithoutScales),
    latent_mutant("A61", "Multiplies cleared numbers by unused scales", UnclearedScales, "vllm#43961"),
    on_reference("A62", "Writes zeros for rows of 656 bytes", zeros_in(Profile.FP8_DS_MLA)),
)
KILLER = {
    **dict.fromkeys(("A53", "A54", "A57", "A58", "A60"), "latent_formats.each_block_has_its_scale"),
    **dict.fromkeys(("A55", "A56", "A59", "A62"), "latent_formats.rows_of_656_bytes_are_exact"),
    "A61": "latent_formats.parts_of_unseen_rows_reach_no_output",
}
