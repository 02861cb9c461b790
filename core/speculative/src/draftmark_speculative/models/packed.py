"""Linear layers of one input as one matrix product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Packed:
    """``[layer(x) for layer in linears]`` side by side, in one product.

    The layers' own parameters become views of the packed ones: nothing is stored twice, what is written to them in
    place is seen here, and moving them (`Module.to`) ends that, so pack last.

    Args:
        linears: all with a bias, or all without.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        self._weight = _pack(linears, "weight")
        self._bias = _pack(linears, "bias") if linears[0].bias is not None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[…, in]`` → ``[…, sum of the layers' out]``."""
        return nn.functional.linear(x, self._weight, self._bias)


def _pack(linears: Sequence[nn.Linear], name: str) -> torch.Tensor:
    own = [getattr(linear, name) for linear in linears]
    packed = torch.cat([parameter.detach() for parameter in own])
    parts = torch.split(packed, [len(parameter) for parameter in own])
    for linear, parameter, part in zip(linears, own, parts, strict=True):
        setattr(linear, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    return packed
