"""How work is cut for the interpreter: fewer and larger tiles, and still every path."""

from __future__ import annotations

import pytest

from draftmark import AttentionShape
from draftmark_cuda_triton import tiling

TILE = tiling.Tile(block_m=16, block_n=64, num_warps=4, num_stages=3, programs_per_sm=2)
PIECES, Q_LEN = 132, 6


def shape(page_size: int) -> AttentionShape:
    """4/2 heads of 128."""
    return AttentionShape(4, 2, 128, page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
def test_requests_of_several_tiles_are_cut_and_merged(page_size):
    """Where a request can have two tiles there are two pieces, whatever the page size."""
    tile, pieces = tiling.interpreted(shape(page_size), TILE, Q_LEN, PIECES, 700)
    assert (pieces, tile.block_n < 700) == (2, True)


@pytest.mark.parametrize(("page_size", "max_kv_len"), [(1, 90), (16, 255), (128, 120)])
def test_requests_of_one_tile_are_not_cut(page_size, max_kv_len):
    """A piece more would find no tile to begin in the middle of a request."""
    tile, pieces = tiling.interpreted(shape(page_size), TILE, Q_LEN, PIECES, max_kv_len)
    assert (pieces, tile.block_n >= max_kv_len) == (1, True)


@pytest.mark.parametrize("page_size", [64, 128, 192, 1024])
def test_pages_of_one_tile_and_of_several_are_run(page_size):
    """Few rows take the largest tile that lies in a page, EXTEND the kernels' own."""
    few, _ = tiling.interpreted(shape(page_size), TILE, Q_LEN, PIECES, 700)
    ragged = tiling.interpreted_ragged(shape(page_size), TILE, 700)
    assert page_size % few.block_n == 0
    assert few.block_n == {64: 64, 128: 128, 192: 64, 1024: 256}[page_size]
    assert ragged.block_n == TILE.block_n


@pytest.mark.parametrize("pieces", [1, 2, 132])
@pytest.mark.parametrize("max_kv_len", [40, 255, 2600])
@pytest.mark.parametrize("q_len", [1, 9, 70])
def test_joined_row_tiles_fit_the_partials_of_all_pieces(pieces, max_kv_len, q_len):
    """What sizing allocated for the GPU's cut holds the interpreter's."""
    tile, few = tiling.interpreted(shape(16), TILE, q_len, pieces, max_kv_len)
    room = tiling.partial_rows(shape(16), TILE, pieces, q_len)
    assert tiling.partial_rows(shape(16), tile, few, q_len) <= room
    assert few <= pieces
