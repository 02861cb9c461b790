"""The Hopper kernels of decode and verify equal the interpreted kernels, for every configuration of a shape."""

from __future__ import annotations

import pytest
import torch

from plugins.cuda_triton.tests import helpers

pytestmark = pytest.mark.device


@pytest.mark.parametrize(("tail", "window_left"), [("tree", -1), ("causal", -1), ("causal", 50), ("block", -1)])
@pytest.mark.parametrize(
    ("page", "dim", "kv_dtype"),
    [
        *((page, 128, torch.bfloat16) for page in (1, 12, 16, 64)),
        *((page, 64, torch.bfloat16) for page in (16, 64)),
        *((page, 128, torch.float8_e4m3fn) for page in (16, 64)),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_sm90_matches_interpreted_kernels(page, dim, tail, window_left, kv_dtype):
    """The outputs of `kernels_sm90` for a ragged batch match those of the interpreted kernels on the CPU."""
    from draftmark_cuda_triton.heuristics import common
    from draftmark_cuda_triton.launch import attention, metadata, operands

    heads, lens, block = (14, 2), (0, 40, 7, 300, 64, 5), tail == "block"

    def batch(longest):
        """Return the tensors, maximum rows and padded total rows of a batch with at most `longest` rows a request."""
        generator = torch.Generator().manual_seed(page)
        rows = [min(n, longest) for n in ((9,) * len(lens) if block else (5, 1, 0, 33, 1, 12))]
        max_rows, total = max(rows), sum(rows)
        padded_rows = total if block else total + 7
        width = -(-(max(lens) + max_rows) // page)
        table = (torch.randperm(len(lens) * width, generator=generator).view(len(lens), width) + 1).int()
        k, v = torch.randn(2, 1 + len(lens) * width, page, heads[1], dim, generator=generator).to(kv_dtype)
        q = torch.randn(padded_rows, heads[0], dim, generator=generator).bfloat16()
        nodes = [j for n in rows for j in range(n)] + [0] * (padded_rows - total)
        # A row's mask has two words. No row sees a slot after its own. Only row 32 sees a slot of the second word, its
        # own.
        mask = torch.tensor([[(1 << (j % 31 + 1)) - 1, j >= 32] for j in nodes]).int()
        depth = torch.arange(padded_rows, dtype=torch.int32) % 7
        starts = torch.tensor([0, *rows]).cumsum(0).int()
        return [q, k, v, torch.tensor(lens).int(), starts, table, mask, depth], max_rows, padded_rows

    def run(device, config, longest):
        tensors, max_rows, padded_rows = batch(longest)
        q, k, v, prefix, indptr, pages, mask, depth = (x.to(device) for x in tensors)
        shape = operands.AttentionParams(heads[1], 7, dim, page, dim**-0.5, 0.0, window_left, pdl=device == "cuda")
        extent = operands.BatchExtent(len(lens), max_rows, max_rows, padded_rows, not block)
        work = torch.full((10, 4), -7, dtype=torch.int32, device=device)
        slots, out = torch.zeros(padded_rows, dtype=torch.int64, device=device), torch.full_like(q, float("nan"))
        tiles = common.row_tiles(config, max_rows, 7 * config.kv_heads_per_tile) * heads[1] // config.kv_heads_per_tile
        parts = 2 * 5 * tiles * config.block_m
        metadata.write_metadata_decode_verify(shape, config, extent, 5, prefix, pages, slots, work, indptr)
        trees = (mask, depth) if tail == "tree" else (None, None)
        partials = operands.PartialResults(
            work,
            torch.full((parts, dim), float("nan"), device=device),
            torch.full((parts,), float("nan"), device=device),
        )
        given = operands.Operands(q, k, v, None, None, None, out, None, prefix, indptr, pages, *trees)
        attention.attend_decode_verify(shape, config, extent, 5, given, partials, block)
        return out.float().cpu()

    tiles = [
        common.KernelConfig(64 * m, n, 4, stages, 1, common.Kernel.SM90_GATHER if page % 8 else common.Kernel.SM90, m)
        for m, n, stages in ((1, 64, 3), (2, 128, 3), (2, 64, 6))
    ]
    if dim == 64:
        tiles = [
            common.KernelConfig(64, n, 4, 3, 2, common.Kernel.SM90, 1, kv_heads_per_tile=heads_per_tile)
            for n, heads_per_tile in ((128, 1), (64, 2), (128, 2))
        ]
        tiles.append(common.KernelConfig(128, 128, 8, 3, 1, common.Kernel.SM90, 2, kv_heads_per_tile=2))
    if kv_dtype is torch.float8_e4m3fn:
        tiles = [common.KernelConfig(m, 64, 4, 3, 2, common.Kernel.SM90_FP8, 1) for m in (16, 32, 64)]
        tiles.append(common.KernelConfig(128, 64, 8, 3, 1, common.Kernel.SM90, 2, num_fp8_stages=4))
    expected = {}
    for config in tiles:
        # With e4m3 upcast in registers, all rows of a request must fit into one row tile.
        longest = config.block_m // 7 if config.kernel is common.Kernel.SM90_FP8 else 33
        if longest not in expected:
            expected[longest] = run("cpu", common.KernelConfig(64, 64, 4, 2, 1), longest).double()
        assert helpers.error(run("cuda", config, longest), expected[longest]) < 5e-3
