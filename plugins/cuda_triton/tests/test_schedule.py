"""The schedule covers every tile once, in equal pieces, and names the requests that they cut."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("pieces", [1, 2, 3, 33, 264])
@pytest.mark.parametrize(
    "lens", [(0,), (5, 0, 0), (700,), (64, 63, 65, 900), (800, 810, 640), tuple(range(0, 640, 37))]
)
def test_pieces_tile_the_line(bench, lens, pieces):
    """Walking every piece as the kernel does meets each tile of each request exactly once."""
    from draftmark_cuda_triton import launch
    from draftmark_cuda_triton.tiling import ITEM_COST, Tile

    tile, tail = Tile(16, 32, 4, 2, 2), 7
    table = torch.zeros(len(lens), 64, dtype=torch.int32, device=bench.device)
    work = bench.poison(2 * pieces, 4, dtype=torch.int32)
    launch.write_metadata(
        launch.Attention(2, 2, 64, 16, 1.0), tile, launch.Extent(len(lens), 3, tail, 3 * len(lens)), pieces,
        torch.tensor(lens, dtype=torch.int32, device=bench.device), table,
        bench.poison(3 * len(lens), dtype=torch.int64), work,
    )  # fmt: skip
    ends = [-(-(n + tail) // 32) for n in lens]
    met = []
    held: dict[int, list[tuple[int, int]]] = {}
    for number, (request, start, length, _) in enumerate(work[:pieces].tolist()):
        half = 0
        while length > 0:
            here = [(request, t) for t in range(start, min(start + length, ends[request]))]
            met += here
            if here:
                held.setdefault(request, []).append((number, half))
            length -= ends[request] + ITEM_COST - start
            request, start, half = request + 1, 0, 1
    assert met == [(r, t) for r, end in enumerate(ends) for t in range(end)]
    cuts = [(request, of[0][0], len(of), of[0][1]) for request, of in held.items() if len(of) > 1]
    told = work[pieces : pieces + min(pieces - 1, len(lens))].tolist()
    assert [tuple(one) for one in told[: len(cuts)]] == cuts
    assert not any(parts for _, _, parts, _ in told[len(cuts) :])
    lengths = [length for _, _, length, _ in work[:pieces].tolist() if length]
    assert max(lengths) - min(lengths) <= 1
