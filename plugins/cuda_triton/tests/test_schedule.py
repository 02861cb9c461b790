"""The schedule covers every tile once, in equal pieces, and names the requests that they cut."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("min_tiles", [1, 2])
@pytest.mark.parametrize("pieces", [1, 2, 3, 33, 264])
@pytest.mark.parametrize(
    "lens", [(0,), (5, 0, 0), (700,), (64, 63, 65, 900), (800, 810, 640), tuple(range(0, 640, 37))]
)
def test_pieces_tile_the_line(bench, lens, pieces, min_tiles):
    """Walking every piece as the kernel does meets each tile of each request exactly once."""
    from draftmark_cuda_triton import launch
    from draftmark_cuda_triton.tiling import ITEM_COST, Tile

    tile, tail = Tile(16, 32, 4, 2, 2, min_tiles=min_tiles), 7
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
    assert min(lengths) >= min_tiles or len(lengths) == 1


@pytest.mark.parametrize(("lens", "pieces"), [((4096,) * 3, 5), ((4095, 3), 10), ((9000, 10), 5), ((640, 0), 10)])
def test_long_requests_have_a_piece_a_multiprocessor(bench, lens, pieces):
    """Of ten pieces, two a multiprocessor, five are used where a request has 4096 keys on average."""
    from draftmark_cuda_triton import launch
    from draftmark_cuda_triton.tiling import Tile

    work = bench.poison(20, 4, dtype=torch.int32)
    launch.write_metadata(
        launch.Attention(2, 2, 64, 16, 1.0), Tile(64, 64, 4, 3, 2, members=1, min_tiles=1),
        launch.Extent(len(lens), 1, 1, len(lens)), 10, torch.tensor(lens, dtype=torch.int32, device=bench.device),
        torch.zeros(len(lens), 600, dtype=torch.int32, device=bench.device),
        bench.poison(len(lens), dtype=torch.int64), work,
    )  # fmt: skip
    assert sum(length > 0 for _, _, length, _ in work[:10].tolist()) == min(pieces, 10)
