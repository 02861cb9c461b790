"""Numbers of latent rows in `FP8_DS_MLA`, from their bytes.

    byte  0                        512            528                656
          | 512 e4m3 numbers       | 4 fp32 scales| 64 bf16 numbers  |

The value is number i times scale i // 128. The product of an e4m3 number and a float32 scale is rounded once, to
float32, in which the reference computes.
"""

from __future__ import annotations

import torch

SCALE_BLOCK = 128
"""Numbers that share a scale."""


def bytes_at(rows: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """Return a copy of indexed rows as bytes: torch cannot index fp8 tensors."""
    return rows.view(torch.uint8)[index]


def numbers(rows: torch.Tensor, value_dim: int) -> torch.Tensor:
    """Return the numbers of rows: value, then rest.

    Args:
        rows: bytes, uint8 ``[..., row_width]``, contiguous.
        value_dim: numbers of the value.

    Returns:
        float32 ``[..., head_dim]``.
    """
    scales_end = value_dim + 4 * (value_dim // SCALE_BLOCK)
    value = rows[..., :value_dim].view(torch.float8_e4m3fn).float()
    scales = rows[..., value_dim:scales_end].view(torch.float32).repeat_interleave(SCALE_BLOCK, -1)
    return torch.cat([value * scales, rows[..., scales_end:].view(torch.bfloat16).float()], -1)
