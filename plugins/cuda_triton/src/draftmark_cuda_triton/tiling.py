"""Which tile a batch is cut into, and into how many pieces. Integers only, no torch.

Both are chosen from what cannot change between capture and replay: rows per request, group, head_dim, page size,
dtypes, device. Never from lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from draftmark import DTYPE_BYTES, AttentionShape, DeviceProfile, ceil_div, maximum, minimum

from .support import BOXED_PAGES, MAX_HEAD_DIM, gathers

ITEM_COST = 2
"""What a request costs a piece beside its tiles, in tiles: filling the pipeline, the masked tile, storing."""
LEAST_ROWS = 16
"""Packed rows of the smallest row tile: what `mma` takes at least."""
ROUNDS = 3
"""Programs one after the other on a multiprocessor at most, of a batch whose pieces do not fill one round."""
MANY_REQUESTS = 4
"""Of a batch that has more than one round at least."""
WIDE_ROWS = 192
"""Packed rows of the row tiles of three groups."""
LEAST_SHARE = 3
"""Tiles, with ITEM_COST, of a piece of EXTEND's row tiles at least, unless as many are there."""
CUT_TILES = 128
"""Row tiles, and requests, of a batch of EXTEND that may be cut: the schedule has all of them in a vector."""
INTERPRETED_KEYS = 256
"""Keys of a tile in the interpreter at most, where an operation costs about the same for 64 keys and for 256."""
INTERPRETED_ROWS = 256
"""Packed rows of a row tile in the interpreter at most: however few they are, a program costs milliseconds."""
INTERPRETED_PIECES = 2
"""Pieces in the interpreter where a request has several tiles: two still cut and merge."""
WIDE_PAGE = 128
"""Keys of a page of K and V that EXTEND has widened: a tile of keys, in one box."""
WIDE_BYTES = 128 << 20
"""What widened K and V take at most, of as many heads at a time as that has room for."""
WIDE_CELLS = 1 << 16
"""Cells of the page table of what is widened: requests times the pages of the longest."""
WIDENED_ROWS = 400
"""Packed rows that see a key, on average, from which on widening it once costs less than widening it in each row tile:
6 bytes of an element move at 4 TB/s, 1.5 ps, and a row's products of it take 4 fs less of K and V that are wide.
"""
WIDENING = 1 << 30
"""Rows times keys times elements of K of a token beyond those, that pay for one more launch: 4 us."""
MANY_KEYS = 400
"""Keys of a multiprocessor's share of a batch of few requests, from which on bringing them once is what counts."""
AGENDA_ROWS = 2
"""Rows of EXTEND's row tiles before the first one: how many were taken, how many there are, in which order."""
HOPPER = 90
"""The architecture that `hopper` is written for: wgmma and the copy engine; sm_100 has neither in that form."""
SMALL_PAGE = 64
"""Tokens of a page that is a tile's keys."""
GATHERED_PAGE = 32
"""Tokens of a page that comes as a box everywhere; of smaller ones there are too many to a tile of 128 keys."""
LINE = 128
"""Bytes that memory is read in."""
SHARED_MEMORY = 225 * 1024
"""What a multiprocessor of Hopper has for rows and stages, beside barriers and what the system keeps."""
MOST_STAGES = 6
"""Tiles of K and V in flight at most."""
LEAST_COLUMNS = 64
"""Columns of a tile of `hopper` at least."""
SHORT_WINDOWS = {80: 1024, 256: 256}
"""Positions to the left, below which a window's keys are so few tiles of 128 that those of 64 are faster, by the
columns up to which that is so.
"""
LEAST_BOX = 32
"""Bytes of a row of a box that it swizzles at least."""
ABOVE = (0, LEAST_ROWS, 64, 128)
"""Packed rows above which `hopper` has another tile."""
SMALL_SHARED_MEMORY = frozenset({86, 89, 120, 121})
"""Architectures with 99 KiB of shared memory for a block, where others have 163 or more."""


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work.

    Attributes:
        block_m: packed rows (query rows x group heads) of a row tile.
        block_n: keys of a tile.
        num_warps, num_stages: Triton's launch options; stages are tiles in flight.
        programs_per_sm: row tiles that one multiprocessor holds at a time.
        tma: tiles come through the copy engine; a tile of keys lies in one page of a contiguous cache.
        members: warp groups of 64 rows of a program of `hopper`, which then runs this tile; 0: `kernels` do.
        depth: there, tiles of narrow (e4m3) keys in flight before they are widened into the stages.
        narrow: there, narrow keys are widened in registers, by the program's only group, of block_m rows.
        gather: there, four warps gather keys from pages of any size, where one fetches boxes.
        heads: there, KV heads that lie beside each other and are worked on as one.
        whole: there, a box has all 256 bytes of a head, not 128.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    tma: bool = False
    members: int = 0
    depth: int = 0
    narrow: bool = False
    gather: bool = False
    heads: int = 1
    whole: bool = False


def choose(shape: AttentionShape, device: DeviceProfile, q_len: Any, extend: bool = False, num_reqs: Any = 1) -> Tile:
    """The tile for forwards of q_len rows a request. NOTES.md has the measurements.

    Args:
        extend: of EXTEND, whose longest request has q_len rows.
        num_reqs: requests of the forward, padding included.
    """
    rows = q_len * shape.group_size
    boxed = shape.page_size % BOXED_PAGES == 0
    if not has_hopper(shape, device) or not (boxed or gathers(shape)):
        return _kernels(shape, device, shape.q_dtype == "float32" or rows <= LEAST_ROWS)
    if not extend and _pays_pairs(shape, device, rows, num_reqs):
        tile = _paired(shape, rows)
        return tile if boxed else replace(tile, gather=True)
    heights = () if extend else _narrow_heights(shape)
    if heights and rows <= heights[-1]:
        return _narrow(shape, rows)
    tile = _hopper(shape, _above(rows))
    if not boxed:
        return replace(tile, gather=True)
    if extend:
        return _taller(shape, tile)
    if ceil_div(rows, WIDE_ROWS) < ceil_div(rows, 128) < 4:
        return _taller(shape, tile)
    lines = num_reqs * shape.num_kv_heads
    return _asked(shape, device, _shared(shape, device, tile, rows, lines), rows, lines)


def _above(rows: Any) -> int:
    """Which tile of `hopper` so many packed rows have, as `_hopper` takes it."""
    return next((above for above in ABOVE[:0:-1] if rows > above), 0)


def candidates(shape: AttentionShape, device: DeviceProfile) -> tuple[Tile, ...]:
    """Every tile that `choose` has for a head_dim and dtypes, whatever the page size and the rows: sizing takes the
    largest need among them, so that it branches on neither. A tile whose keys are gathered is cut as one of boxes.
    """
    tiles = [_kernels(shape, device, True)]
    if shape.q_dtype != "float32":
        tiles.append(_kernels(shape, device, False))
    if has_hopper(shape, device):
        tiles += [_hopper(shape, above) for above in ABOVE]
        tiles.append(_taller(shape, tiles[-1]))
        tiles += [_narrow(shape, height) for height in _narrow_heights(shape)]
        tiles += [_paired(shape, height // 2) for height in _pair_heights(shape)]
    return tuple(dict.fromkeys(tiles))


def extend_candidates(shape: AttentionShape, device: DeviceProfile) -> tuple[Tile, ...]:
    """Every tile that `choose` has for EXTEND, or one that asks for as much."""
    tiles = candidates(shape, device)
    return (*tiles, *(_taller(shape, tile) for tile in tiles if tile.members == 2))


def _kernels(shape: AttentionShape, device: DeviceProfile, few: bool) -> Tile:
    """A tile of `kernels`, for at most LEAST_ROWS packed rows, or for more.

    A tile of keys is 16 KiB, for K and for V, and three are in flight for each of two programs: that fills the
    memory pipe. 16 rows are what `mma` takes at least, 64 what `wgmma` does; more rows than that share a KV tile
    through L2, which beats one larger row tile whose warps wait for each other.
    """
    row_bytes = next_power_of_two(shape.head_dim) * DTYPE_BYTES[shape.q_dtype]
    wide = row_bytes > 256 and not few
    return Tile(
        block_m=LEAST_ROWS if few else 64,
        block_n=max(16, min(64, 16384 // row_bytes)),
        num_warps=8 if wide else 4,
        num_stages=2 if device.arch in SMALL_SHARED_MEMORY else 3,
        programs_per_sm=1 if wide else 2,
    )


def has_hopper(shape: AttentionShape, device: DeviceProfile) -> bool:
    """Whether `hopper` has kernels for a head_dim and dtypes, on this device, for pages in boxes or `gathers`."""
    return (
        device.kind == "cuda"
        and device.arch == HOPPER
        and shape.head_dim % 8 == 0
        and 32 < shape.head_dim <= 256
        and (shape.kv_dtype == shape.q_dtype or DTYPE_BYTES[shape.kv_dtype] == 1)
        and DTYPE_BYTES[shape.q_dtype] == 2
    )


def _hopper(shape: AttentionShape, above: int) -> Tile:
    """A tile of `hopper` for more than `above` packed rows, one of ABOVE.

    One warp group for up to 64 packed rows, two for more, which share each tile of keys.
    A multiprocessor has 227 KiB for rows and stages. Where the work is bytes (few rows) two programs of 64 keys
    share it, and one fetches while the other begins or ends a request; of more than 128 columns they would have too few
    tiles in flight, and one does. Else one program has tiles of 128 keys, of 64 where there is no room for two of
    those. A row tile alone (up to 128 rows) is work of bytes still, and what it waits for at either end of a request is
    shorter with tiles of 64 keys; with heads of 64, whose softmax is the work, it is not. Short windows leave tiles of
    128 keys half empty.
    """
    block_d = next_power_of_two(shape.head_dim)
    if DTYPE_BYTES[shape.kv_dtype] == 1:
        # Two groups that fold rows of 256, beside one that widens, have too few registers for one product.
        if above >= 64 and block_d < 256:
            return Tile(128, 64, 8, {64: 6, 128: 3}[block_d], 1, members=2, depth=4)
        return Tile(64, 64 if block_d == 256 else 128, 4, 256 // block_d, 1, members=1, depth=2)
    wide = sum(columns(shape.head_dim))
    if above >= 64:
        tile = Tile(128, 64 if wide > 160 or (wide > 64 and above == 64) else 128, 8, 0, 1, members=2)
    elif above == LEAST_ROWS and 64 < wide <= 128:
        tile = Tile(64, 128, 4, 0, 1, members=1)
    else:
        tile = Tile(64, 128 if wide == 64 else 64, 4, 0, 1 if wide > 128 else 2, members=1)
    if 0 <= shape.window_left < next(short for most, short in SHORT_WINDOWS.items() if wide <= most):
        tile = replace(tile, block_n=64)
    return replace(tile, num_stages=_stages(tile, wide))


def _stages(tile: Tile, wide: int) -> int:
    """Tiles of K and V of so many columns, of 16 bits, that a program has room for beside its rows."""
    room = SHARED_MEMORY // tile.programs_per_sm - tile.block_m * wide * 2
    return min(MOST_STAGES, room // (2 * tile.block_n * wide * 2))


def columns(head_dim: int, size: int = 2) -> tuple[int, int]:
    """Columns of a tile of `hopper`: a power of two, as registers and shared memory are; and beside them a smaller one,
    or 0, where that leaves less empty. Heads of 160 have 128 and 32, not 256.

    Args:
        size: bytes of an element of K and V.
    """
    first = max(LEAST_COLUMNS, next_power_of_two(head_dim + 1) // 2)
    if first >= head_dim:
        return first, 0
    rest = max(LEAST_BOX // size, next_power_of_two(head_dim - first))
    return (first, rest) if rest < first else (2 * first, 0)


def _taller(shape: AttentionShape, tile: Tile) -> Tile:
    """The same tile for EXTEND, and for few rows that have one row tile fewer so, of two or three. With heads of 64 or
    80 a row's softmax takes as long as its products, and three groups keep the tensor cores busier than two; of other
    rows they leave more of a row tile empty.
    """
    wide = sum(columns(shape.head_dim))
    if tile.members == 2 and tile.depth == 0 and wide <= 80:
        tile = replace(tile, block_m=WIDE_ROWS, members=3)
        return replace(tile, num_stages=_stages(tile, wide))
    return tile


def _shared(shape: AttentionShape, device: DeviceProfile, tile: Tile, rows: Any, lines: Any) -> Tile:
    """Where two programs share a multiprocessor, with tiles of 64 rows and 64 keys; heads of 65 to 128 have the choice.

    While one brings a request's rows, masks or stores, the other has work. They are twice as many pieces, and so they
    are not better where one program has its requests whole and two have not, nor, of more than 32 rows, where there are
    fewer requests than pieces. Where half of a row tile is empty, cutting costs less. Of small pages one program alone
    waits longer for a tile, and few requests have two. Of 65 to 128 rows keys pass from L2 twice as often, which few
    requests make up for; four times is too often.

    Args:
        lines: requests, each as often as there are KV heads.
    """
    if tile.depth or tile.programs_per_sm == 2 or next_power_of_two(shape.head_dim) != 128:
        return tile
    programs = device.num_sms
    if rows <= 64:
        many = rows <= 32 or 20 * lines >= 19 * 2 * programs
        small = rows > 32 and shape.page_size < SMALL_PAGE and 2 * lines <= programs
        better = small or (many and (_fills(lines, 2 * programs) or not _fills(lines, programs)))
    else:
        better = rows <= 128 and lines <= programs and (rows <= 112 or not _fills(lines, programs))
    return _hopper(shape, 0) if better else tile


def _fills(lines: Any, programs: Any) -> bool:
    """Whether so many programs have these lines whole, each as many as the others or nearly."""
    return bool(20 * lines >= 19 * programs * ceil_div(lines, programs))


def _asked(shape: AttentionShape, device: DeviceProfile, tile: Tile, rows: Any, lines: Any) -> Tile:
    """The same tile with its keys gathered where that takes less time than boxes do, up to 128 packed rows.

    Of heads that are no whole lines, boxes read lines that the next head's program reads too, and long after them;
    a thread's 16 bytes read less that is not theirs. Where products are the work, they lose more by the gathering warps
    (`for_cache`). A tile of 128 keys is eight boxes of 16, and a program that has a multiprocessor for itself, and no
    next request, waits for them.
    """
    if tile.depth or rows > 128:
        return tile
    alone = tile.members == 1 and tile.programs_per_sm == 1 and tile.block_n == 128
    waits = alone and shape.page_size < GATHERED_PAGE and lines <= device.num_sms
    return replace(tile, gather=waits or not _has_whole_lines(shape, 1))


def _has_whole_lines(shape: AttentionShape, heads: int) -> bool:
    """Whether so many KV heads beside each other are whole lines of memory, which no other head has a part of."""
    return heads * shape.head_dim * DTYPE_BYTES[shape.kv_dtype] % LINE == 0


def _pair(shape: AttentionShape) -> AttentionShape:
    """What a tile of two KV heads beside each other is like: of one head of twice the head_dim."""
    return replace(shape, head_dim=2 * shape.head_dim)


def _pair_heights(shape: AttentionShape) -> tuple[int, ...]:
    """Packed rows of both of the row tiles in which `hopper` works on two KV heads as on one of twice the head_dim;
    none where it does not: of an odd number of heads, and of heads of more than 64 elements that are whole lines. Where
    a quarter of a tile at most is padding, products of 128 rows leave the time for it.
    """
    pair = _pair(shape)
    is_better = shape.head_dim <= 64 or not _has_whole_lines(shape, 1)
    if shape.num_kv_heads % 2 or pair.head_dim > MAX_HEAD_DIM or not is_better:
        return ()
    is_full = 4 * pair.head_dim >= 3 * next_power_of_two(pair.head_dim)
    return _narrow_heights(pair) or ((64, 128) if is_full else (64,))


def _pays_pairs(shape: AttentionShape, device: DeviceProfile, rows: Any, num_reqs: Any) -> bool:
    """Whether pairs are faster. Of a token's keys a program then reads twice as many bytes together, which is what DRAM
    likes, and of a row tile it leaves less empty, unless both heads' rows are more than one. Few requests are cut into
    more pieces; of more than 64 rows, any.
    """
    heights, lines = _pair_heights(shape), num_reqs * shape.num_kv_heads
    if not heights or 2 * rows > heights[-1]:
        return False
    return bool(4 * lines >= device.num_sms) if 2 * rows <= 64 else _fills(lines // 2, device.num_sms)


def _paired(shape: AttentionShape, rows: Any) -> Tile:
    """A tile of `hopper` of two KV heads with so many packed rows each: as of one of twice the head_dim."""
    pair = _pair(shape)
    if _narrow_heights(pair):
        return replace(_narrow(pair, 2 * rows), heads=2)
    return replace(_hopper(pair, 64 if 2 * rows > 64 else 0), heads=2, gather=not _has_whole_lines(shape, 2))


def apart(shape: AttentionShape, tile: Tile) -> Tile:
    """The same cut of the work where two heads do not lie beside each other, and are worked on one by one."""
    if tile.heads == 1:
        return tile
    if tile.narrow and not _narrow_heights(shape):
        return replace(_hopper(shape, 0), block_n=tile.block_n)
    return replace(tile, heads=1)


def _narrow_heights(shape: AttentionShape) -> tuple[int, ...]:
    """Packed rows of the row tiles for which `hopper` widens e4m3 in registers; more rows than these leave none free.

    Two values side by side are one element there, and half of a head_dim is the 64 rows that wgmma takes at least.
    """
    if DTYPE_BYTES[shape.kv_dtype] != 1:
        return ()
    return {128: (16, 32, 64), 256: (16, 32)}.get(next_power_of_two(shape.head_dim), ())


def _narrow(shape: AttentionShape, rows: Any) -> Tile:
    """A tile of `hopper` that widens e4m3 in registers, for so many packed rows: two programs a multiprocessor."""
    height = next(height for height in _narrow_heights(shape) if rows <= height)
    stages = 2 if next_power_of_two(shape.head_dim) == 256 and height > LEAST_ROWS else 3
    return Tile(height, 64, 4, stages, 2, members=1, narrow=True)


def overlaps(tile: Tile, head_dim: int) -> bool:
    """Whether a warp group of `hopper` runs its softmax beside its own products too, or beside other programs' alone.

    It does where its registers hold the weights of two tiles: two groups, or one with heads of up to 128, unless four
    warps gather beside it for each of two programs.
    """
    one = tile.members == 1 and tile.depth == 0 and not tile.narrow and sum(columns(head_dim)) <= 160
    return tile.members == 2 or (one and not (tile.gather and tile.programs_per_sm == 2))


def without_hopper(shape: AttentionShape, tile: Tile) -> Tile:
    """The same cut of the work for `kernels`, whose launches take their stages for themselves, of one power of two."""
    row = 2 * next_power_of_two(shape.head_dim)
    fits = (tile.block_m + 2 * 2 * tile.block_n) * row <= SHARED_MEMORY
    stages = min(tile.num_stages, 2 if fits else 1)
    return replace(tile, members=0, narrow=False, gather=False, heads=1, whole=False, num_stages=stages)


def interpreted(shape: AttentionShape, tile: Tile, q_len: int, pieces: int, max_kv_len: int) -> tuple[Tile, int]:
    """The same work for the interpreter, where a program costs milliseconds: more keys and rows a tile, few pieces.

    Row tiles are joined as far as partial results then fit where those of all pieces did. Two pieces still cut and
    merge; one does where no request has two tiles, since nothing would be cut.
    """
    block_n = _keys_of_a_page(shape, tile) or _keys(max_kv_len)
    joined = replace(tile, block_m=min(tile.block_m, 128), block_n=block_n, heads=1)
    few = 1 if max_kv_len <= joined.block_n else min(pieces, INTERPRETED_PIECES)
    room = partial_rows(shape, tile, pieces, q_len)
    while row_tiles(joined, q_len, shape.group_size) > 1 and joined.block_m < INTERPRETED_ROWS:
        larger = replace(joined, block_m=2 * joined.block_m)
        if partial_rows(shape, larger, few, q_len) > room:
            break
        joined = larger
    return joined, few


def interpreted_ragged(shape: AttentionShape, tile: Tile, max_kv_len: int, pieces: int) -> tuple[Tile, int]:
    """The same tile of ragged rows for the interpreter: more keys, and more rows, so that row tiles are fewer; and few
    pieces, where there are more than one.

    Keys that lie in one page stay as many, so that a page of several tiles is run too. Rows are no more than partial
    results have room for.
    """
    block_n = tile.block_n if _keys_of_a_page(shape, tile) else _keys(max_kv_len)
    few = min(pieces, INTERPRETED_PIECES)
    has_room = pieces == 1 or few * INTERPRETED_ROWS <= pieces * tile.block_m
    rows = max(tile.block_m, INTERPRETED_ROWS) if has_room else tile.block_m
    return replace(tile, block_n=block_n, block_m=rows), few


def _keys_of_a_page(shape: AttentionShape, tile: Tile) -> int:
    """Keys of an interpreted tile that lies in one page, as the tile itself does; 0 where it does not."""
    keys = tile.block_n
    while shape.page_size % (2 * keys) == 0 and 2 * keys <= INTERPRETED_KEYS:
        keys *= 2
    return keys if shape.page_size % keys == 0 else 0


def _keys(max_kv_len: int) -> int:
    """Keys of an interpreted tile that lies in several pages: no more than any request has."""
    return min(INTERPRETED_KEYS, max(LEAST_ROWS, next_power_of_two(max_kv_len)))


def uses_tma(shape: AttentionShape, device: DeviceProfile, tile: Tile) -> bool:
    """Whether a tile of keys can come as one box: Hopper and newer, inside one page, nothing to convert or pad."""
    return (
        device.kind == "cuda"
        and device.arch >= 90
        and shape.page_size % tile.block_n == 0
        and shape.head_dim in (64, 128, 256)
        and shape.kv_dtype == shape.q_dtype
        and DTYPE_BYTES[shape.q_dtype] == 2
    )


def for_cache(
    shape: AttentionShape,
    device: DeviceProfile,
    tile: Tile,
    contiguous: bool,
    boxes: bool,
    beside: bool = True,
    fast: bool = False,
) -> Tile:
    """The same tile, through the copy engine where a box can describe the cache. No cut of the work depends on it.

    Args:
        contiguous: K's tokens are rows of one pitch, and V's.
        boxes: their strides are what a box may have, and Gluon is there.
        beside: a token's heads lie beside each other.
        fast: memory is so fast that of 65 packed rows and more products are the work, not bytes (`boxes.FAST_MEMORY`).
    """
    if tile.members:
        if boxes:
            tile = tile if beside else apart(shape, tile)
            boxed = fast and tile.members > 1 and shape.page_size % BOXED_PAGES == 0
            tile = replace(tile, gather=tile.gather and not boxed)
            return replace(tile, whole=beside and _has_whole_heads(shape, tile))
        tile = without_hopper(shape, tile)
    return replace(tile, tma=contiguous and uses_tma(shape, device, tile))


def _has_whole_heads(shape: AttentionShape, tile: Tile) -> bool:
    """Whether boxes have all of a head, or of two that are one: of 256 bytes, half as many boxes. Heads of 512 were not
    faster so.
    """
    wide = DTYPE_BYTES[shape.kv_dtype] == 2 and not tile.gather
    return wide and tile.heads * shape.head_dim * DTYPE_BYTES[shape.kv_dtype] == 256


def row_tiles(tile: Tile, q_len: Any, group: int) -> Any:
    """Row tiles that hold q_len rows x group heads, of all KV heads that are worked on as one."""
    return ceil_div(q_len * group, tile.block_m)


def pieces(shape: AttentionShape, device: DeviceProfile, tile: Tile, q_len: Any, num_reqs: Any, max_kv_len: Any) -> Any:
    """Into how many pieces the tiles of a batch are cut: what the device holds at a time, or what there is to cut.

    Where so many side by side leave more than a tenth of the device idle, 48 of 132 or 80, it is what the device holds
    in two rounds, or in three, if that leaves less; but of few requests, for a piece takes its time to begin.
    """
    has_many = minimum(1, num_reqs // MANY_REQUESTS)
    tiles = num_reqs * (ceil_div(max_kv_len, tile.block_n) + ITEM_COST)
    programs, beside = device.num_sms * tile.programs_per_sm, _side_by_side(shape, tile, q_len)
    chosen = programs // beside
    for rounds in range(ROUNDS, 0, -1):
        found = rounds * programs // beside
        is_full = minimum(1 if rounds == 1 else has_many, 10 * found * beside // (9 * rounds * programs))
        chosen = is_full * found + (1 - is_full) * chosen
    return maximum(1, minimum(chosen, tiles))


def whole(pieces: int, num_reqs: int) -> int:
    """As many pieces, or up to a twentieth fewer, that do not cut requests of one length more often than they must.

    33 pieces of 64 or of 32 equal requests leave 32 requests to be merged, 32 leave none. Of 16, 32 pieces have a part
    of one request each; of 33 most have parts of two.
    """
    even = pieces // num_reqs * num_reqs if pieces > num_reqs else ceil_div(num_reqs, ceil_div(num_reqs, pieces))
    return even if 20 * even >= 19 * pieces else pieces


def partial_rows(shape: AttentionShape, tile: Tile, pieces: Any, q_len: Any) -> Any:
    """Packed rows of partial results: two unfinished requests a piece, whatever the batch; a sole piece has none."""
    unfinished = 2 * minimum(1, pieces - 1)
    return unfinished * pieces * _side_by_side(shape, tile, q_len) * tile.block_m


def _side_by_side(shape: AttentionShape, tile: Tile, q_len: Any) -> Any:
    """Row tiles of all KV heads: programs that work on one piece."""
    return row_tiles(tile, q_len, shape.group_size * tile.heads) * (shape.num_kv_heads // tile.heads)


def shares(shape: AttentionShape, device: DeviceProfile, tile: Tile) -> Any:
    """Into how many pieces EXTEND's row tiles of a KV head are cut, where they are: programs that the device holds."""
    return maximum(1, device.num_sms * tile.programs_per_sm // shape.num_kv_heads)


def partial_rows_of_shares(shape: AttentionShape, device: DeviceProfile, tile: Tile) -> Any:
    """Packed rows of their partial results: two unfinished row tiles a piece; a sole piece has none."""
    pieces = shares(shape, device, tile)
    return 2 * minimum(1, pieces - 1) * pieces * shape.num_kv_heads * tile.block_m


def cut_tile(
    shape: AttentionShape, device: DeviceProfile, tile: Tile, q_lens: tuple[int, ...], lens: tuple[int, ...] | None
) -> Tile | None:
    """The tile of a batch of EXTEND whose row tiles may be cut by their keys, where they are few; None of many, which
    keep all programs busy.

    Of few rows a request two programs of 64 share a multiprocessor, as in `_shared`; but of 65 to 112 and so few
    requests that they are cut whatever their tile is, one of 128 brings many keys once, where two bring them twice.

    Args:
        tile: of batches that are not cut. q_lens: rows of each request, padding included. lens: of live requests, what
            the host knows of their prefixes, or None.
    """
    if len(q_lens) > CUT_TILES:
        return None
    rows, lines = max(q_lens) * shape.group_size, len(q_lens) * shape.num_kv_heads
    if rows <= 64 or (rows <= 112 and lines <= device.num_sms and not _brings_once(shape, device, lines, lens)):
        tile = cut_tiles(shape, tile)[-1]
    count = sum(row_tiles(tile, rows, shape.group_size) for rows in q_lens)
    return tile if count <= CUT_TILES and shares(shape, device, tile) > 1 else None


def _brings_once(shape: AttentionShape, device: DeviceProfile, lines: int, lens: tuple[int, ...] | None) -> bool:
    """Whether bringing keys once is what counts: requests are few, and their keys, as far as the host knows, many."""
    if lens is None or 3 * lines > device.num_sms:
        return False
    return sum(_in_reach(shape, n) for n in lens) * shape.num_kv_heads >= MANY_KEYS * device.num_sms


def cut_tiles(shape: AttentionShape, tile: Tile) -> tuple[Tile, ...]:
    """Those that batches of EXTEND which may be cut have: that of the others, and one of few rows."""
    short = replace(_hopper(shape, 0), gather=tile.gather) if tile.members > 1 and not tile.depth else tile
    return (tile, short) if short.programs_per_sm == 2 and short != tile else (tile,)


def pays_cutting(
    shape: AttentionShape, device: DeviceProfile, tile: Tile, q_lens: tuple[int, ...], lens: tuple[int, ...] | None
) -> bool:
    """Whether row tiles of EXTEND that are cut take less time than whole ones, one by one. Of those that have a program
    each, `kernels.schedule` says the same of what the device knows.

    A program has an even share, and a merge; and where fewer programs were as fast as memory, it gains less. Or it has
    whole row tiles (`_in_turn`).

    Args:
        lens: of live requests, what the host knows of their prefixes. None where it knows nothing: cutting may pay then
            if each program has one row tile at most.
    """
    programs = device.num_sms * tile.programs_per_sm
    if lens is None:
        items = sum(row_tiles(tile, rows, shape.group_size) for rows in q_lens) * shape.num_kv_heads
        return bool(items <= programs)
    lengths = [
        _keys_seen(shape, tile, rows, prefix, m) + ITEM_COST
        for rows, prefix in zip(q_lens, lens, strict=False)
        for m in range(row_tiles(tile, rows, shape.group_size))
    ]
    count, line = len(lengths), sum(lengths)
    if line // LEAST_SHARE <= count:
        return False
    share = ceil_div(line * shape.num_kv_heads, programs)
    once, eighths, more = cut_costs(shape.head_dim)
    is_one = count * shape.num_kv_heads <= programs
    cut = 3 * share // 2 + once if is_one else eighths * share // 8 + more
    return bool(cut < _in_turn(lengths, shape.num_kv_heads, programs))


def _in_turn(lengths: list[int], heads: int, programs: int) -> int:
    """What a program takes, in tiles, that has whole row tiles one after the other, the longest of all first.

    Somebody's n-th is the shortest of n. Those do not all end together, which is a sixteenth.

    Args:
        lengths: of the row tiles of a head.
    """
    turns = ((ceil_div((rank + 1) * heads, programs), n) for rank, n in enumerate(sorted(lengths, reverse=True)))
    return max(n if turn == 1 else 17 * turn * n // 16 for turn, n in turns)


def cut_costs(head_dim: int) -> tuple[int, int, int]:
    """What a program takes that has an even share, in tiles: half as much again and so many, where whole row tiles have
    a program each; or so many eighths of it, and so many. Of more than 128 columns partial results are more bytes.
    """
    if head_dim <= 128:
        return 6, 10, 4
    once = 3 + 3 * head_dim // 128
    return once, 9, once + 4


def _keys_seen(shape: AttentionShape, tile: Tile, rows: int, prefix: int, m: int) -> int:
    """Tiles of keys that row tile m of a causal request sees."""
    group, window = shape.group_size, shape.window_left
    highest = min((m * tile.block_m + tile.block_m - 1) // group, rows - 1)
    first = 0 if window < 0 else max(prefix + m * tile.block_m // group - window, 0) // tile.block_n
    return (prefix + highest + tile.block_n) // tile.block_n - first


def _in_reach(shape: AttentionShape, prefix: int) -> int:
    """Keys of a prefix that any row of its request sees."""
    return prefix if shape.window_left < 0 else min(prefix, shape.window_left)


def widens(shape: AttentionShape, device: DeviceProfile) -> bool:
    """Whether EXTEND may widen K and V before it attends: e4m3, where `hopper` has kernels for the rows."""
    return has_hopper(shape, device) and shape.kv_dtype != shape.q_dtype


def widened(shape: AttentionShape, parts: int = 1) -> AttentionShape:
    """The attention of rows over K and V that have been widened, of one of so many parts of the heads."""
    queries, heads = shape.num_qo_heads // parts, shape.num_kv_heads // parts
    return replace(shape, num_qo_heads=queries, num_kv_heads=heads, kv_dtype=shape.q_dtype, page_size=WIDE_PAGE)


def parts_of_heads(shape: AttentionShape) -> list[int]:
    """Into how many parts of as many KV heads a cache can be widened, one after the other."""
    return [parts for parts in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % parts == 0]


def wide_pages(shape: AttentionShape, num_reqs: Any, max_kv_len: Any) -> Any:
    """Pages of all heads that there is room to widen: of all requests, or as many as WIDE_BYTES hold."""
    page = 2 * WIDE_PAGE * shape.num_kv_heads * shape.head_dim * DTYPE_BYTES[shape.q_dtype]
    return minimum(num_reqs * ceil_div(max_kv_len, WIDE_PAGE), maximum(1, WIDE_BYTES // page))


def wide_cells(num_reqs: Any, max_kv_len: Any) -> Any:
    """Cells of the page table of what is widened, at most."""
    return minimum(num_reqs * ceil_div(max_kv_len, WIDE_PAGE), WIDE_CELLS)


def pages_widened(shape: AttentionShape, rows: int, prefix: int) -> int:
    """Pages that a request of so many rows takes, whose prefix is so long at most.

    Under a window they begin with a page, or with as many keys as `widen` rounds down to.
    """
    pages = ceil_div(prefix + rows, WIDE_PAGE)
    if shape.window_left >= 0:
        pages = min(pages, ceil_div(shape.window_left + rows, WIDE_PAGE) + ceil_div(INTERPRETED_KEYS, WIDE_PAGE))
    return pages if rows else 0


def wide_parts(shape: AttentionShape, pages: int, room: int) -> int:
    """Into how many parts of as many KV heads so many pages are widened, one after the other; 0 where one head alone
    has no room.
    """
    return next((parts for parts in parts_of_heads(shape) if pages <= room * parts), 0)


def pays_widening(shape: AttentionShape, q_lens: tuple[int, ...], lens: tuple[int, ...]) -> bool:
    """Whether K and V that are widened once take less time than those that each row tile widens for itself.

    Args:
        q_lens: rows of each live request. lens: tokens before them, at most.
    """
    seen, keys, window = 0, 0, shape.window_left
    for rows, n in zip(q_lens, lens, strict=True):
        before = _in_reach(shape, n)
        seen += rows * shape.group_size * (n + rows // 2 if window < 0 else min(n + rows // 2, window + 1))
        keys += rows + before if rows else 0
    return shape.num_kv_heads * shape.head_dim * (seen - WIDENED_ROWS * keys) >= WIDENING


def ragged_tiles(tile: Tile, group: int, num_rows: Any, num_reqs: Any) -> Any:
    """Row tiles that any split of num_rows over num_reqs requests needs at most."""
    return num_rows * group // tile.block_m + num_reqs


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()
