"""Mutants that the checks of `repeats` kill."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmark.runtime import ForwardBatch, KVCache

from ..mutant import Mutant, after


def _noise(q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
    """Add one ulp to random output elements, as atomic additions in a varying order do."""
    up = (torch.rand_like(out.float()) < 0.5).to(out.dtype)
    out.add_(out * up * torch.finfo(out.dtype).eps)


MUTANTS = (
    Mutant("R15", "Returns outputs that differ from run to run",
           "sglang#10278", patch=lambda b: after(b, "attend", _noise)),
)  # fmt: skip
KILLER = dict.fromkeys(("R15",), "repeats.give_the_same_bits")
