"""Combine of partial results: sizes of its blocks, and its result for every size of a step."""

from __future__ import annotations

import pytest
import torch

from draftmark_cuda_triton.launch import combine, operands
from plugins.cuda_triton.tests import helpers

LN2 = 0.6931471805599453
"""Partial lse are base-2 logarithms; the kernel's result is a natural one."""


@pytest.mark.parametrize("value_width", [64, 80, 128, 256])
@pytest.mark.parametrize("most_rows", [1, 16, 512])
def test_three_kernels_serve_every_number_of_parts(value_width, most_rows):
    """Blocks follow the number of parts, without a compiled kernel of their own for each number."""
    shape = operands.AttentionParams(2, 4, value_width, 16, 1.0)
    found = {parts: combine.combine_grid(shape, parts, most_rows, most_rows, True) for parts in range(1, 265)}
    assert len({tuple(constants.items()) for _, _, constants in found.values()}) == 3
    for parts, (blocks, use_half, sizes) in found.items():
        kind, step = ("HALF", sizes["BLOCK_SPLITS"] // 2) if use_half else ("BLOCK", sizes["BLOCK_SPLITS"])
        rows, cols = sizes[f"{kind}_ROWS"], sizes[f"{kind}_COLS"]
        assert step == min(64, max(2, 1 << (parts - 1).bit_length()))
        assert rows * cols * step <= combine.COMBINE_CELLS[step] and blocks == -(-most_rows // rows) * -(
            -value_width // cols
        )


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 9, 17, 33, 70])
def test_combined_parts_equal_one_softmax(parts):
    """Parts of each row, weighted by their lse, sum to the output and the lse of all keys. A part can be empty."""
    generator = torch.Generator().manual_seed(parts)
    requests, heads, group, dim, padded = 3, 2, 3, 40, 16
    values = torch.randn(requests, parts, heads, padded, dim, generator=generator)
    weights = torch.randn(requests, parts, heads, padded, generator=generator)
    weights[:, 0, :, 1] = float("-inf")
    partials = operands.PartialResults(torch.zeros(4, dtype=torch.int32), values.flatten(0, 3), weights.flatten())
    natural = weights[..., :group] * LN2
    shares = torch.softmax(natural, 1).nan_to_num(0.0)
    q, out = torch.zeros(requests, heads * group, dim), helpers.poison(requests, heads * group, dim)
    lse = helpers.poison(requests, heads * group)
    indptr = torch.arange(requests + 1, dtype=torch.int32)
    t = operands.Operands(q, q, q, None, None, None, out, lse, indptr, indptr, indptr[None])
    combine.combine_splits(
        operands.AttentionParams(heads, group, dim, 16, 1.0), t, partials, indptr, items=requests, parts=parts, q_len=1,
        rows=group, most_rows=group, num_splits=parts, partial_rows=padded, every_request=True,
    )  # fmt: skip
    expected = (shares[..., None] * values[..., :group, :]).sum(1).flatten(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, torch.logsumexp(natural, 1).flatten(1, 2), rtol=1e-5, atol=1e-5)
