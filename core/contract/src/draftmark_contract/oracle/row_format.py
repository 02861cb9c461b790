"""The oracle's own copy of rows of 656 bytes (`FP8_DS_MLA`): their numbers in float64, and how rows are made.

A row has 512 e4m3 numbers, four float32 scales, and 64 bfloat16 numbers. Number i of the value is e4m3 number i times
scale i // 128.
"""

from __future__ import annotations

import torch

VALUE, BLOCK, REST = 512, 128, 64
"""Numbers of the value, numbers that share a scale, and numbers of the rest."""
PARTS = {"numbers": slice(0, 512), "scales": slice(512, 528), "rest": slice(528, 656)}
"""Bytes of each part of a row."""
LARGEST = 448.0
"""Largest e4m3 number."""


def real_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the numbers of rows ``[..., 656]`` of one-byte elements in float64, ``[..., 576]``."""
    found = rows.view(torch.uint8)
    value, scales, rest = (found[..., part].contiguous() for part in PARTS.values())
    blocks = value.view(torch.float8_e4m3fn).double().view(*value.shape[:-1], VALUE // BLOCK, BLOCK)
    blocks = blocks * scales.view(torch.float32).double()[..., None]
    return torch.cat((blocks.flatten(-2), rest.view(torch.bfloat16).double()), -1)


def stored_rows(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers ``[..., 576]`` as an engine stores them, in bytes ``[..., 656]`` of dtype float8_e4m3fn.

    The scale of a block maps its largest number to the largest e4m3 number.
    """
    blocks = numbers[..., :VALUE].float().reshape(*numbers.shape[:-1], VALUE // BLOCK, BLOCK)
    scales = (blocks.abs().amax(-1) / LARGEST).clamp(min=2.0**-126)
    value = (blocks / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).flatten(-2)
    rest = numbers[..., VALUE:].to(torch.bfloat16).contiguous()
    parts = (value.contiguous(), scales.contiguous(), rest)
    return torch.cat([one.view(torch.uint8) for one in parts], -1).view(torch.float8_e4m3fn)


def drawn_rows(count: int, dice: torch.Generator) -> torch.Tensor:
    """Return random rows ``[count, 656]``: scales of neighbouring blocks and rows differ by factors of up to 32."""
    numbers = torch.randn(count, VALUE + REST, generator=dice)
    sizes = torch.exp2(4 * torch.rand(count, VALUE // BLOCK, generator=dice) - 3).repeat_interleave(BLOCK, -1)
    numbers[:, :VALUE] *= sizes
    return stored_rows(numbers)
