"""Configurations of the Hopper kernels in `kernels_sm90`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark import DTYPE_BYTES, AttentionShape, DeviceProfile, ceil_div

from ..support import MAX_HEAD_DIM
from .common import MIN_BLOCK_M, KernelConfig, next_power_of_two

BLOCK_M_3WG = 192
"""Packed rows of the row tiles of three groups."""
SM90 = 90
"""The architecture that `kernels_sm90` is written for: wgmma and the copy engine; sm_100 has neither in that form."""
SMALL_PAGE = 64
"""Tokens of a page that is a tile's keys."""
GATHER_BELOW_PAGE_SIZE = 32
"""Tokens of a page that comes as a box everywhere; of smaller ones there are too many to a tile of 128 keys."""
CACHE_LINE_BYTES = 128
"""Bytes that memory is read in."""
SMEM_BYTES = 225 * 1024
"""What a multiprocessor of Hopper has for rows and stages, beside barriers and what the system keeps."""
MAX_STAGES = 6
"""Tiles of K and V in flight at most."""
MIN_BLOCK_D = 64
"""Columns of a tile of `kernels_sm90` at least."""
SHORT_WINDOWS = {80: 1024, 256: 256}
"""Positions to the left, below which a window's keys are so few tiles of 128 that those of 64 are faster, by the
columns up to which that is so.
"""
MIN_BOX_ROW_BYTES = 32
"""Bytes of a row of a box that it swizzles at least."""
ROW_THRESHOLDS = (0, MIN_BLOCK_M, 64, 128)
"""Packed rows above which `kernels_sm90` has another tile."""


def row_threshold(rows: Any) -> int:
    """Which tile of `kernels_sm90` so many packed rows have, as `base_config` takes it."""
    return next((min_rows for min_rows in ROW_THRESHOLDS[:0:-1] if rows > min_rows), 0)


def has_sm90_kernels(shape: AttentionShape, device: DeviceProfile) -> bool:
    """Whether `kernels_sm90` serves a head_dim and dtypes on this device, for pages in boxes or `gathers_kv`."""
    return (
        device.kind == "cuda"
        and device.arch == SM90
        and shape.head_dim % 8 == 0
        and 32 < shape.head_dim <= 256
        and (shape.kv_dtype == shape.q_dtype or DTYPE_BYTES[shape.kv_dtype] == 1)
        and DTYPE_BYTES[shape.q_dtype] == 2
    )


def base_config(shape: AttentionShape, min_rows: int) -> KernelConfig:
    """A tile of `kernels_sm90` for more than `min_rows` packed rows, one of ROW_THRESHOLDS.

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
        if min_rows >= 64 and block_d < 256:
            return KernelConfig(128, 64, 8, {64: 6, 128: 3}[block_d], 1, num_consumer_wgs=2, num_fp8_stages=4)
        return KernelConfig(
            64, 64 if block_d == 256 else 128, 4, 256 // block_d, 1, num_consumer_wgs=1, num_fp8_stages=2
        )
    num_columns = sum(split_head_dim(shape.head_dim))
    if min_rows >= 64:
        config = KernelConfig(
            128, 64 if num_columns > 160 or (num_columns > 64 and min_rows == 64) else 128, 8, 0, 1, num_consumer_wgs=2
        )
    elif min_rows == MIN_BLOCK_M and 64 < num_columns <= 128:
        config = KernelConfig(64, 128, 4, 0, 1, num_consumer_wgs=1)
    else:
        config = KernelConfig(
            64, 128 if num_columns == 64 else 64, 4, 0, 1 if num_columns > 128 else 2, num_consumer_wgs=1
        )
    if (
        0
        <= shape.window_left
        < next(short for max_block_d, short in SHORT_WINDOWS.items() if num_columns <= max_block_d)
    ):
        config = replace(config, block_n=64)
    return replace(config, num_stages=_num_stages(config, num_columns))


def _num_stages(config: KernelConfig, num_columns: int) -> int:
    """Tiles of K and V of so many columns, of 16 bits, that a program has room for beside its rows."""
    room = SMEM_BYTES // config.ctas_per_sm - config.block_m * num_columns * 2
    return min(MAX_STAGES, room // (2 * config.block_n * num_columns * 2))


def split_head_dim(head_dim: int, elem_bytes: int = 2) -> tuple[int, int]:
    """Columns of a tile of `kernels_sm90`: a power of two, as registers and shared memory are; and beside them a
    smaller one, or 0, where that leaves less empty. Heads of 160 have 128 and 32, not 256.

    Args:
        elem_bytes: bytes of an element of K and V.
    """
    first = max(MIN_BLOCK_D, next_power_of_two(head_dim + 1) // 2)
    if first >= head_dim:
        return first, 0
    rest = max(MIN_BOX_ROW_BYTES // elem_bytes, next_power_of_two(head_dim - first))
    return (first, rest) if rest < first else (2 * first, 0)


def with_three_wgs(shape: AttentionShape, config: KernelConfig) -> KernelConfig:
    """The same tile for EXTEND, and for few rows that have one row tile fewer so, of two or three. With heads of 64 or
    80 a row's softmax takes as long as its products, and three groups keep the tensor cores busier than two; of other
    rows they leave more of a row tile empty.
    """
    num_columns = sum(split_head_dim(shape.head_dim))
    if config.num_consumer_wgs == 2 and config.num_fp8_stages == 0 and num_columns <= 80:
        config = replace(config, block_m=BLOCK_M_3WG, num_consumer_wgs=3)
        return replace(config, num_stages=_num_stages(config, num_columns))
    return config


def with_two_ctas(
    shape: AttentionShape, device: DeviceProfile, config: KernelConfig, rows: Any, request_heads: Any
) -> KernelConfig:
    """Where two programs share a multiprocessor, with tiles of 64 rows and 64 keys; heads of 65 to 128 have the choice.

    While one brings a request's rows, masks or stores, the other has work. They are twice as many pieces, and so they
    are not better where one program has its requests whole and two have not, nor, of more than 32 rows, where there are
    fewer requests than pieces. Where half of a row tile is empty, cutting costs less. Of small pages one program alone
    waits longer for a tile, and few requests have two. Of 65 to 128 rows keys pass from L2 twice as often, which few
    requests make up for; four times is too often.

    Args:
        request_heads: requests, each as often as there are KV heads.
    """
    if config.num_fp8_stages or config.ctas_per_sm == 2 or next_power_of_two(shape.head_dim) != 128:
        return config
    num_ctas = device.num_sms
    if rows <= 64:
        many = rows <= 32 or 20 * request_heads >= 19 * 2 * num_ctas
        small = rows > 32 and shape.page_size < SMALL_PAGE and 2 * request_heads <= num_ctas
        better = small or (
            many and (_fills_ctas(request_heads, 2 * num_ctas) or not _fills_ctas(request_heads, num_ctas))
        )
    else:
        better = rows <= 128 and request_heads <= num_ctas and (rows <= 112 or not _fills_ctas(request_heads, num_ctas))
    return base_config(shape, 0) if better else config


def _fills_ctas(request_heads: Any, num_ctas: Any) -> bool:
    """Whether so many programs have these lines whole, each as many as the others or nearly."""
    return bool(20 * request_heads >= 19 * num_ctas * ceil_div(request_heads, num_ctas))


def with_gather(
    shape: AttentionShape, device: DeviceProfile, config: KernelConfig, rows: Any, request_heads: Any
) -> KernelConfig:
    """The same tile with its keys gathered where that takes less time than boxes do, up to 128 packed rows.

    Of heads that are no whole lines, boxes read lines that the next head's program reads too, and long after them;
    a thread's 16 bytes read less that is not theirs. Where products are the work, they lose more by the gathering warps
    (`adapt_to_cache`). A tile of 128 keys is eight boxes of 16, and a program that has a multiprocessor for itself, and
    no next request, waits for them.
    """
    if config.num_fp8_stages or rows > 128:
        return config
    alone = config.num_consumer_wgs == 1 and config.ctas_per_sm == 1 and config.block_n == 128
    waits = alone and shape.page_size < GATHER_BELOW_PAGE_SIZE and request_heads <= device.num_sms
    return replace(config, gather_kv=waits or not _has_full_cache_lines(shape, 1))


def _has_full_cache_lines(shape: AttentionShape, heads: int) -> bool:
    """Whether so many KV heads beside each other are whole lines of memory, which no other head has a part of."""
    return heads * shape.head_dim * DTYPE_BYTES[shape.kv_dtype] % CACHE_LINE_BYTES == 0


def _merged_shape(shape: AttentionShape) -> AttentionShape:
    """What a tile of two KV heads beside each other is like: of one head of twice the head_dim."""
    return replace(shape, head_dim=2 * shape.head_dim)


def merged_block_ms(shape: AttentionShape) -> tuple[int, ...]:
    """Packed rows of both of the row tiles in which `kernels_sm90` works on two KV heads as on one of twice the
    head_dim; none where it does not: of an odd number of heads, and of heads of more than 64 elements that are whole
    lines. Where a quarter of a tile at most is padding, products of 128 rows leave the time for it.
    """
    pair = _merged_shape(shape)
    is_better = shape.head_dim <= 64 or not _has_full_cache_lines(shape, 1)
    if shape.num_kv_heads % 2 or pair.head_dim > MAX_HEAD_DIM or not is_better:
        return ()
    is_full = 4 * pair.head_dim >= 3 * next_power_of_two(pair.head_dim)
    return fp8_block_ms(pair) or ((64, 128) if is_full else (64,))


def merging_heads_pays(shape: AttentionShape, device: DeviceProfile, rows: Any, num_reqs: Any) -> bool:
    """Whether pairs are faster. Of a token's keys a program then reads twice as many bytes together, which is what DRAM
    likes, and of a row tile it leaves less empty, unless both heads' rows are more than one. Few requests are cut into
    more pieces; of more than 64 rows, any.
    """
    block_ms, request_heads = merged_block_ms(shape), num_reqs * shape.num_kv_heads
    if not block_ms or 2 * rows > block_ms[-1]:
        return False
    return (
        bool(4 * request_heads >= device.num_sms) if 2 * rows <= 64 else _fills_ctas(request_heads // 2, device.num_sms)
    )


def merged_config(shape: AttentionShape, rows: Any) -> KernelConfig:
    """A tile of `kernels_sm90` of two KV heads with so many packed rows each: as of one of twice the head_dim."""
    pair = _merged_shape(shape)
    if fp8_block_ms(pair):
        return replace(fp8_config(pair, 2 * rows), kv_heads_per_tile=2)
    return replace(
        base_config(pair, 64 if 2 * rows > 64 else 0),
        kv_heads_per_tile=2,
        gather_kv=not _has_full_cache_lines(shape, 2),
    )


def unmerged_config(shape: AttentionShape, config: KernelConfig) -> KernelConfig:
    """The same cut of the work where two heads do not lie beside each other, and are worked on one by one."""
    if config.kv_heads_per_tile == 1:
        return config
    if config.fp8_swap_ab and not fp8_block_ms(shape):
        return replace(base_config(shape, 0), block_n=config.block_n)
    return replace(config, kv_heads_per_tile=1)


def fp8_block_ms(shape: AttentionShape) -> tuple[int, ...]:
    """Packed rows of the row tiles for which `kernels_sm90` widens e4m3 in registers; more rows than these leave none
    free.

    Two values side by side are one element there, and half of a head_dim is the 64 rows that wgmma takes at least.
    """
    if DTYPE_BYTES[shape.kv_dtype] != 1:
        return ()
    return {128: (16, 32, 64), 256: (16, 32)}.get(next_power_of_two(shape.head_dim), ())


def fp8_config(shape: AttentionShape, rows: Any) -> KernelConfig:
    """A tile of `kernels_sm90` that upcasts e4m3 in registers, for so many packed rows: two CTAs per SM."""
    block_m = next(block_m for block_m in fp8_block_ms(shape) if rows <= block_m)
    stages = 2 if next_power_of_two(shape.head_dim) == 256 and block_m > MIN_BLOCK_M else 3
    return KernelConfig(block_m, 64, 4, stages, 2, num_consumer_wgs=1, fp8_swap_ab=True)


def overlaps_softmax(config: KernelConfig, head_dim: int) -> bool:
    """Whether a warp group of `kernels_sm90` runs its softmax beside its own products too, or beside other programs'
    alone.

    It does where its registers hold the weights of two tiles: two groups, or one with heads of up to 128, unless four
    warps gather beside it for each of two programs.
    """
    one = (
        config.num_consumer_wgs == 1
        and config.num_fp8_stages == 0
        and not config.fp8_swap_ab
        and sum(split_head_dim(head_dim)) <= 160
    )
    return config.num_consumer_wgs == 2 or (one and not (config.gather_kv and config.ctas_per_sm == 2))


def box_fits_head(shape: AttentionShape, config: KernelConfig) -> bool:
    """Whether boxes have all of a head, or of two that are one: of 256 bytes, half as many boxes. Heads of 512 were not
    faster so.
    """
    is_16_bit = DTYPE_BYTES[shape.kv_dtype] == 2 and not config.gather_kv
    return is_16_bit and config.kv_heads_per_tile * shape.head_dim * DTYPE_BYTES[shape.kv_dtype] == 256
