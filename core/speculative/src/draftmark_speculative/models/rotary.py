"""Rotary positions that a kernel applies to the product of one row."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotary(NamedTuple):
    """Rotary positions of the leading heads of a product.

    Attributes:
        cos, sin: ``[head_dim]``, or ``[1, 1, head_dim]`` as `rotated` reads them, contiguous.
        heads: heads that are rotated; later heads are not.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    heads: int
