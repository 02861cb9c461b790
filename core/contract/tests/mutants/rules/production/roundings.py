"""Mutants that checks of `production` kill: fp8 KV at length, with and without roundings that the layer allows."""

from __future__ import annotations

import torch
from torch import Tensor

from draftmark import AttentionShape
from draftmark_contract.profiles import FP8_DTYPE

from ...designs.layouts import CSR, in_layouts
from ...designs.plain_attention import Parts, attending, right_weights

FIRST = 1024
"""First key of a request that the defects concern."""


def _in_e4m3(scores: Tensor, shape: AttentionShape) -> Tensor:
    """Round the weights of keys from `FIRST` on to e4m3, relative to the largest one, without permission."""
    weights = right_weights(scores, shape)
    if shape.kv_dtype != FP8_DTYPE or shape.round_to_e4m3:
        return weights
    top = weights.amax(-1, keepdim=True).clamp(min=1e-30)
    rounded = (weights[..., FIRST:] / top).to(torch.float8_e4m3fn).float() * top
    return torch.cat((weights[..., :FIRST], rounded), -1)


def _first_keys(seen: Tensor, prefix: Tensor, shape: AttentionShape) -> Tensor:
    """Leave out keys where q and weights may be rounded."""
    return seen & (torch.arange(seen.shape[-1]) < FIRST) if shape.round_to_e4m3 else seen


MUTANTS = (
    in_layouts("F22", "Rounds weights over fp8 KV to e4m3 from the 1,024th key on", CSR,
               attending(Parts(weights=_in_e4m3)), "products of e4m3 where only the long part of a context has them"),
    in_layouts("F23", "Leaves out keys from the 1,024th on where q and weights may be rounded to e4m3", CSR,
               attending(Parts(seen=_first_keys)), "flashinfer#3864"),
)  # fmt: skip
KILLER = dict.fromkeys(("F22", "F23"), "production.a_crowd_is_right")
