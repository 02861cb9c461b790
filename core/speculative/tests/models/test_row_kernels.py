"""Products of one row: the kernel equals torch's operators. On a CPU Triton's interpreter runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from draftmark_speculative.models.elementwise import rotated
from draftmark_speculative.models.rotary import Rotary
from draftmark_speculative.models.row_kernels import Tile, row_product

SHAPES = ((64, 24), (100, 10))
"""(elements of a row, columns): whole tiles, and neither a multiple of a tile."""
HEADS = (3, 2, 6)
"""(query heads, KV heads, head_dim) of the rotated product: 21 pairs, no multiple of a tile."""


def check(device: str, dtype: torch.dtype, tile: Tile, bound: float) -> None:
    """Compare each variant with torch's operators, in poisoned outputs."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for (elements, columns), normed, biased in product(SHAPES, (False, True), (False, True)):
        x, weight = random(1, elements), random(columns, elements) / elements**0.5
        norm, bias = random(elements) if normed else None, random(columns) if biased else None
        given = {"bias": bias, "norm": norm, "eps": 1e-3, "tile": tile}
        want = F.linear(x if norm is None else F.rms_norm(x, norm.shape, norm, 1e-3), weight, bias)
        poisoned, hidden = torch.full_like(want, torch.nan), random(1, columns)
        torch.testing.assert_close(row_product(x, weight, poisoned, **given), want, rtol=bound, atol=bound)
        added = row_product(x, weight, hidden.clone(), add=True, **given)
        torch.testing.assert_close(added, want + hidden, rtol=bound, atol=bound)
        gate, up = want.chunk(2, -1)
        gated = row_product(x, weight, torch.full_like(gate, torch.nan).contiguous(), gated=True, **given)
        torch.testing.assert_close(gated, F.silu(gate) * up, rtol=bound, atol=bound)

        num_q, num_kv, head_dim = HEADS
        weight = random((num_q + 2 * num_kv) * head_dim, elements) / elements**0.5
        given["bias"] = random(len(weight)) if biased else None
        cos, sin = random(1, 1, head_dim), random(1, 1, head_dim)
        want = F.linear(x if norm is None else F.rms_norm(x, norm.shape, norm, 1e-3), weight, given["bias"])
        poisoned, heads = torch.full_like(want, torch.nan), want.view(1, -1, head_dim)
        q, k = rotated(heads, num_q, num_kv, cos, sin)
        got = row_product(x, weight, poisoned, rotary=Rotary(cos, sin, num_q + num_kv), **given)
        torch.testing.assert_close(
            got.view_as(heads), torch.cat((q, k, heads[:, num_q + num_kv :]), 1), rtol=bound, atol=bound
        )


@pytest.mark.long
def test_products_equal_torch_in_the_interpreter() -> None:
    """Norm, bias, residual and SwiGLU around a product equal torch's operators in float32."""
    code = "import torch; from core.speculative.tests.models import test_row_kernels as t; "
    code += "t.check('cpu', torch.float32, t.Tile(4, 32, 4), 1e-5)"
    root = Path(__file__).parents[4]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is compiled for CUDA")
@pytest.mark.parametrize("tile", [Tile(), Tile(2, 256, 2)], ids=str)
def test_products_equal_torch_on_a_device(tile: Tile) -> None:
    """The same in bfloat16 on the device."""
    check("cuda", torch.bfloat16, tile, 2e-2)
