"""The oracle's own copy of what a latent row is: its key is the whole row, its value the first elements of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftmark.geometry import FP8_DS_MLA, AttentionShape

from .row_format import real_rows


def keys_and_values(pools: Sequence[torch.Tensor], shape: AttentionShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of KV that is stored as K and V, as latent rows, or as value parts and rests of rows.

    The numbers of rows with scales of their own are returned in float64.

    Args:
        pools: the stored tensors, ``[slots, kv_heads, width]`` each.
    """
    if not shape.latent:
        return pools[0], pools[1]
    if shape.row_format == FP8_DS_MLA:
        keys = real_rows(pools[0])
        return keys, keys[..., : shape.value_dim]
    # torch cannot concatenate fp8 tensors, so their bytes are joined.
    rows = torch.cat([one.view(torch.int8) for one in pools], -1).view(pools[0].dtype) if pools[1:] else pools[0]
    return rows, rows[..., : shape.value_dim]
