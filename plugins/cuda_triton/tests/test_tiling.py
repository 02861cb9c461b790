"""How work is cut for the interpreter: fewer and larger tiles, and still every path."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmark import AttentionShape, DeviceProfile
from draftmark_cuda_triton import tiling

TILE = tiling.Tile(block_m=16, block_n=64, num_warps=4, num_stages=3, programs_per_sm=2)
PIECES, Q_LEN = 132, 6


def shape(page_size: int) -> AttentionShape:
    """4/2 heads of 128."""
    return AttentionShape(4, 2, 128, page_size=page_size)


@pytest.mark.parametrize(("context", "pieces"), [(1024, 19), (4096, 33), (131072, 33)])
def test_a_short_decode_has_a_piece_for_each_tile(context, pieces):
    """One request of 32/8 heads: 17 tiles of 64 keys and the surplus make 19 pieces, and 33 are side by side."""
    device, attention = DeviceProfile("cuda", 90, 132), AttentionShape(32, 8, 128, 64)
    tile = tiling.choose(attention, device, 1)
    assert tiling.pieces(attention, device, tile, 1, 1, context + 1) == pieces


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
    ragged, _ = tiling.interpreted_ragged(shape(page_size), TILE, 700, 1)
    assert page_size % few.block_n == 0
    assert few.block_n == {64: 64, 128: 128, 192: 64, 1024: 256}[page_size]
    assert ragged.block_n == TILE.block_n


@pytest.mark.parametrize(
    "heads", [(32, 8), (28, 4), (40, 8), (48, 8), (64, 8), (96, 8), (24, 8), (32, 16), (40, 1), (71, 1)]
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_programs_of_many_row_tiles_fill_the_device(heads, dim):
    """In one round, or in two or three where that leaves more than a tenth of it idle and they leave less; row tiles of
    requests that are long, of trees of any size.
    """
    attention = AttentionShape(*heads, dim, 16, q_dtype="bfloat16", kv_dtype="bfloat16")
    device = DeviceProfile(kind="cuda", arch=90, num_sms=132)
    for nodes in (1, 8, 16, 60, 64, 96, 128, 192, 256):
        tile = tiling.choose(attention, device, nodes, num_reqs=16)
        rows = tiling.row_tiles(tile, nodes, attention.group_size * tile.heads)
        beside, programs = rows * heads[1] // tile.heads, 132 * tile.programs_per_sm
        pieces = tiling.pieces(attention, device, tile, nodes, 16, 131072)
        full = [n for n in (1, 2, 3) if 10 * (n * programs // beside) * beside >= 9 * n * programs]
        few = tiling.pieces(attention, device, tile, nodes, 3, 131072)
        assert few == max(1, programs // beside)
        assert pieces == max(1, (full or [1])[0] * programs // beside)
        assert tiling.partial_rows(attention, tile, pieces, nodes) <= 2 * 3 * max(programs, beside) * tile.block_m


@pytest.mark.parametrize("pieces", [1, 2, 132])
@pytest.mark.parametrize("max_kv_len", [40, 255, 2600])
@pytest.mark.parametrize("q_len", [1, 9, 70])
def test_joined_row_tiles_fit_the_partials_of_all_pieces(pieces, max_kv_len, q_len):
    """What sizing allocated for the GPU's cut holds the interpreter's."""
    tile, few = tiling.interpreted(shape(16), TILE, q_len, pieces, max_kv_len)
    room = tiling.partial_rows(shape(16), TILE, pieces, q_len)
    assert tiling.partial_rows(shape(16), tile, few, q_len) <= room
    assert few <= pieces


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 12, 20, 100])
@pytest.mark.parametrize("q_len", [1, 16, 64])
def test_pages_without_boxes_are_gathered_into_the_tile_of_pages_with(page_size, q_len):
    """Only who brings the keys differs, so that schedule, partials and folds are those of pages of 64."""
    device = DeviceProfile("cuda", 90, 132)
    boxed, gathered = (
        tiling.choose(AttentionShape(32, 8, 128, page), device, q_len, num_reqs=20) for page in (64, page_size)
    )
    assert (boxed.gather, gathered.gather) == (False, True)
    assert replace(gathered, gather=False) == boxed


def test_keys_are_gathered_on_hopper_only_and_as_wide_as_q():
    """e4m3 in such pages, float32, and other architectures are read by the kernels of every GPU."""
    hopper = DeviceProfile("cuda", 90, 132)
    for device, names in (
        (hopper, ("bfloat16", "float8_e4m3fn")),
        (hopper, ("float32", "float32")),
        (DeviceProfile("cuda", 80, 108), ("bfloat16", "bfloat16")),
        (DeviceProfile("cuda", 100, 148), ("bfloat16", "bfloat16")),
    ):
        tile = tiling.choose(AttentionShape(32, 8, 128, 1, *names), device, 1)
        assert (tile.members, tile.gather) == (0, False)


def test_a_cache_that_no_box_describes_is_not_gathered_either():
    """Both want addresses and strides of 16 bytes."""
    device, attention = DeviceProfile("cuda", 90, 132), AttentionShape(32, 8, 128, 1)
    tile = tiling.for_cache(attention, device, tiling.choose(attention, device, 1), True, False)
    assert (tile.members, tile.gather) == (0, False)


@pytest.mark.parametrize(
    ("dim", "window", "keys"),
    [(64, -1, 128), (64, 127, 64), (64, 1022, 64), (64, 4095, 128), (128, 127, 64), (128, 511, 128), (256, 4095, 64)],
)
def test_tiles_of_short_windows_have_fewer_keys(dim, window, keys):
    """As many keys as are faster for prefill and for trees; what sizing looks at is cut alike."""
    device, attention = DeviceProfile("cuda", 90, 132), AttentionShape(64, 8, dim, 64, window_left=window)
    tiles = [tiling.choose(attention, device, 4096, extend=True), tiling.choose(attention, device, 64)]
    assert [tile.block_n for tile in tiles] == [keys, keys]
    assert set(tiles) <= {*tiling.candidates(attention, device), *tiling.extend_candidates(attention, device)}
