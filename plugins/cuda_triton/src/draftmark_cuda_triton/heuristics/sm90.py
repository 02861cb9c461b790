"""Kernel configurations of the Hopper kernels in `kernels_sm90`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark import DTYPE_BYTES, AttentionShape, DeviceProfile, ceil_div

from ..support import MAX_HEAD_DIM
from ..switches import KERNELS, uses_generic_kernels
from .common import MIN_BLOCK_M, Kernel, KernelConfig, next_power_of_two

BLOCK_M_3WG = 192
"""Packed rows of a row tile with three consumer warp groups, 64 rows each."""
SM90 = 90
"""Architecture of `kernels_sm90`, which use wgmma and TMA in a form that sm_100 does not have."""
SMALL_PAGE = 64
"""Page size in tokens below which a KV tile of 64 keys spans several pages."""
GATHER_BELOW_PAGE_SIZE = 32
"""Page size in tokens below which a tile of 128 keys needs too many TMA boxes for a CTA that has an SM to itself."""
CACHE_LINE_BYTES = 128
"""Granularity of memory reads in bytes."""
SMEM_BYTES = 225 * 1024
"""Shared memory of a Hopper SM for q rows and KV stages, in bytes, without barriers and the reserved part."""
MAX_STAGES = 6
"""Maximum KV stages in flight in a CTA; a stage holds one tile of K and one of V."""
MIN_BLOCK_D = 64
"""Minimum columns of a `kernels_sm90` tile."""
SHORT_WINDOWS = {80: 1024, 256: 256}
"""Window in tokens below which 64 keys a tile are faster than 128, by the largest number of tile columns."""
MIN_BOX_ROW_BYTES = 32
"""Smallest swizzle width of a TMA box row, in bytes."""
ROW_THRESHOLDS = (0, MIN_BLOCK_M, 64, 128)
"""Packed rows above which `base_config` returns the next configuration."""


def row_threshold(rows: Any) -> int:
    """Return the largest of ROW_THRESHOLDS below `rows` packed rows, or 0, for `base_config`'s min_rows."""
    return next((min_rows for min_rows in ROW_THRESHOLDS[:0:-1] if rows > min_rows), 0)


def has_sm90_kernels(shape: AttentionShape, device: DeviceProfile) -> bool:
    """Check whether `kernels_sm90` serves this head_dim and these dtypes on the device, for any page size."""
    return not reasons_against_sm90(shape, device)


def reasons_against_sm90(shape: AttentionShape, device: DeviceProfile) -> list[str]:
    """Return why `kernels_sm90` does not serve this head_dim and these dtypes on the device; empty if it does."""
    reasons = [f"{KERNELS} is generic"] if uses_generic_kernels() else []
    if device.kind != "cuda" or device.arch != SM90:
        reasons.append(f"they need sm_{SM90}, and the device is {device.kind} sm_{device.arch}")
    if shape.latent:
        reasons.append("they need K and V apart, and the rows are latent")
    elif shape.value_width != shape.head_dim:
        reasons.append(f"they need values as wide as keys, not {shape.value_width} elements for {shape.head_dim}")
    if shape.head_dim % 8 or not 32 < shape.head_dim <= 256:
        reasons.append(f"they need a head_dim from 40 to 256 in steps of 8, and it is {shape.head_dim}")
    if DTYPE_BYTES[shape.q_dtype] != 2 or not (shape.kv_dtype == shape.q_dtype or DTYPE_BYTES[shape.kv_dtype] == 1):
        reasons.append(f"they need 16-bit q and KV of q's dtype or 8 bits, not {shape.q_dtype} and {shape.kv_dtype}")
    return reasons


def base_config(shape: AttentionShape, min_rows: int) -> KernelConfig:
    """Return the `kernels_sm90` configuration for more than `min_rows` packed rows (0 or one of ROW_THRESHOLDS).

    * Up to 64 packed rows: one consumer warp group, and two CTAs an SM with tiles of 64 keys (128 keys if head_dim has
      64 columns). Memory bandwidth is the limit, and one CTA loads while the other starts or ends a request. Above 128
      columns only one CTA has enough stages.
    * 17 to 64 rows with 65 to 128 columns: one CTA an SM with tiles of 128 keys (see `with_two_ctas`).
    * More rows: two consumer warp groups share each KV tile of 128 keys, or of 64 if only one stage of 128 fits.
    * 65 to 128 rows: 64 keys, which shorten the waits at both ends of a request. Heads of 64 keep 128 keys, because
      their softmax is the limit.
    * Short windows (SHORT_WINDOWS): 64 keys, since tiles of 128 would be half empty.
    * e4m3: two consumer warp groups above 64 rows, except at 256 columns; producer warps upcast each tile. Tiles of 128
      keys read q from shared memory half as often as tiles of 64 keys, and shared memory is the limit.
    * `rounds`: above 64 rows, products of e4m3 by e4m3. Fewer rows are as fast exactly, because memory is the limit.
    """
    block_d = next_power_of_two(shape.head_dim)
    if min_rows >= 64 and rounds(shape):
        return rounded_config(shape)
    if DTYPE_BYTES[shape.kv_dtype] == 1:
        # At 256 columns, two consumer warp groups and the upcasting producer warps together leave too few registers for
        # one MMA.
        if min_rows >= 64 and block_d < 256:
            if shape.window_left >= 0:  # masks of a window and a tree would spill with 128 keys
                return KernelConfig(128, 64, 8, {64: 6, 128: 3}[block_d], 1, Kernel.SM90, 2, num_fp8_stages=4)
            stages = {64: 4, 128: 2}[block_d]
            return KernelConfig(128, 128, 8, stages, 1, Kernel.SM90, 2, num_fp8_stages=stages)
        return KernelConfig(64, 64 if block_d == 256 else 128, 4, 256 // block_d, 1, Kernel.SM90, 1, num_fp8_stages=2)
    num_columns = sum(split_head_dim(shape.head_dim))
    if min_rows >= 64:
        config = KernelConfig(
            128, 64 if num_columns > 160 or (num_columns > 64 and min_rows == 64) else 128, 8, 0, 1, Kernel.SM90, 2
        )
    elif min_rows == MIN_BLOCK_M and 64 < num_columns <= 128:
        config = KernelConfig(64, 128, 4, 0, 1, Kernel.SM90, 1)
    else:
        config = KernelConfig(64, 128 if num_columns == 64 else 64, 4, 0, 1 if num_columns > 128 else 2, Kernel.SM90, 1)
    if (
        0
        <= shape.window_left
        < next(short for max_block_d, short in SHORT_WINDOWS.items() if num_columns <= max_block_d)
    ):
        config = replace(config, block_n=64)
    return replace(config, num_stages=_num_stages(config, num_columns))


def rounds(shape: AttentionShape) -> bool:
    """Check whether there is a kernel that multiplies e4m3 by e4m3, and the layer allows its rounding."""
    columns, rest = split_head_dim(shape.head_dim, 1)
    return shape.round_to_e4m3 and not rest and columns <= 128


def rounded_config(shape: AttentionShape) -> KernelConfig:
    """Return the configuration that multiplies e4m3 by e4m3. A stage holds K, V as loaded and V transposed.

    Tiles have 64 keys under a window, because masks of a window and a tree would spill with 128.
    """
    block_n = 64 if shape.window_left >= 0 else 128
    stages = 4 if block_n * next_power_of_two(shape.head_dim) == 128 * 128 else MAX_STAGES
    return KernelConfig(128, block_n, 8, stages, 1, Kernel.SM90_ROUNDED, 2, num_fp8_stages=stages)


def _num_stages(config: KernelConfig, num_columns: int) -> int:
    """Return the number of 16-bit KV stages that fit into shared memory next to q, at most MAX_STAGES."""
    free_bytes = SMEM_BYTES // config.ctas_per_sm - config.block_m * num_columns * 2
    return min(MAX_STAGES, free_bytes // (2 * config.block_n * num_columns * 2))


def split_head_dim(head_dim: int, elem_bytes: int = 2) -> tuple[int, int]:
    """Return the columns of a tile's two parts, (block_d, block_d_rest), each a power of two.

    Two parts are used if they need less padding than one power of two: head_dim 160 gives (128, 32), not (256, 0).

    Args:
        elem_bytes: bytes of an element of K and V.
    """
    first = max(MIN_BLOCK_D, next_power_of_two(head_dim + 1) // 2)
    if first >= head_dim:
        return first, 0
    rest = max(MIN_BOX_ROW_BYTES // elem_bytes, next_power_of_two(head_dim - first))
    return (first, rest) if rest < first else (2 * first, 0)


def with_three_wgs(shape: AttentionShape, config: KernelConfig) -> KernelConfig:
    """Return `config` with three consumer warp groups if it has two and at most 96 columns; else `config`.

    Three groups are used for EXTEND (`prefill_configs`), and for other batches if that reduces the number of row tiles.
    With few columns a row's softmax takes as long as its MMAs, and three groups keep the tensor cores busier. In other
    batches, tiles of 192 rows hold more padding. e4m3 upcast by producer warps keeps two groups.
    """
    num_columns = sum(split_head_dim(shape.head_dim))
    if config.num_consumer_wgs == 2 and config.num_fp8_stages == 0 and num_columns <= 96:
        config = replace(config, block_m=BLOCK_M_3WG, num_consumer_wgs=3)
        return replace(config, num_stages=_num_stages(config, num_columns))
    return config


def prefill_configs(shape: AttentionShape, config: KernelConfig) -> tuple[KernelConfig, ...]:
    """Return the configurations of unsplit EXTEND batches; the first serves batches of unknown lengths.

    Up to 80 columns, three consumer warp groups are always faster than two. With 81 to 96 columns and 128 keys a tile,
    that depends on the number of row tiles (`split_kv.fastest_tiles`). Gathered keys have one configuration.
    """
    if config.kernel is Kernel.SM90_GATHER:
        return (config,)
    three_wgs = with_three_wgs(shape, config)
    if three_wgs == config or sum(split_head_dim(shape.head_dim)) <= 80:
        return (three_wgs,)
    return (config, three_wgs) if config.block_n == 128 else (config,)


def with_two_ctas(
    shape: AttentionShape, device: DeviceProfile, config: KernelConfig, rows: Any, request_heads: Any
) -> KernelConfig:
    """Return the configuration with two CTAs an SM, 64 packed rows and 64 keys each, if it is faster; else `config`.

    One CTA works while the other loads q, masks or stores. The rules apply to 16-bit KV with 65 to 128 columns. A batch
    "fills" CTAs if its (request, KV head) pairs keep them busy without splits (`_fills_ctas`):

    * Up to 32 rows: two CTAs an SM if the batch fills them, or if it does not even fill one CTA an SM.
    * 33 to 64 rows: the same rule, but the pairs must number at least 95 % of the CTAs. With small pages, two CTAs are
      also used if the batch has at most one pair for every two SMs, because a single CTA waits longer for small pages.
    * 65 to 128 rows: two CTAs an SM if the batch has at most one pair an SM. Above 112 rows, it must also not fill one
      CTA an SM. Each request then has two row tiles, and the second one reads the keys from L2.

    Args:
        rows: packed rows of a request.
        request_heads: (request, KV head) pairs of the batch.
    """
    if config.num_fp8_stages or config.ctas_per_sm == 2 or next_power_of_two(shape.head_dim) != 128:
        return config
    num_ctas = device.num_sms
    if rows <= 64:
        enough_pairs = rows <= 32 or 20 * request_heads >= 19 * 2 * num_ctas
        small_pages = rows > 32 and shape.page_size < SMALL_PAGE and 2 * request_heads <= num_ctas
        two_ctas_pay = small_pages or (
            enough_pairs and (_fills_ctas(request_heads, 2 * num_ctas) or not _fills_ctas(request_heads, num_ctas))
        )
    else:
        two_ctas_pay = (
            rows <= 128 and request_heads <= num_ctas and (rows <= 112 or not _fills_ctas(request_heads, num_ctas))
        )
    return base_config(shape, 0) if two_ctas_pay else config


def _fills_ctas(request_heads: Any, num_ctas: Any) -> bool:
    """Check whether unsplit (request, KV head) pairs keep at least 95 % of num_ctas CTAs busy in whole waves."""
    return bool(20 * request_heads >= 19 * num_ctas * ceil_div(request_heads, num_ctas))


def with_gather(
    shape: AttentionShape, device: DeviceProfile, config: KernelConfig, rows: Any, request_heads: Any
) -> KernelConfig:
    """Return `config` with gathered keys if cp.async is faster than TMA, for up to 128 packed rows; else `config`.

    Keys are gathered in two cases:

    * A head does not fill whole cache lines. TMA boxes then fetch whole lines, and the next head's CTA fetches the
      shared lines again much later. cp.async of 16 bytes a thread fetches fewer bytes of other heads.
    * Tiles have 128 keys, each SM has one CTA, and no CTA has a second request. Below GATHER_BELOW_PAGE_SIZE such a CTA
      would wait for eight or more boxes a tile.

    `adapt_to_cache` returns to TMA if MMA throughput, not memory, is the limit, because gathering warps slow the MMAs.
    """
    if config.num_fp8_stages or rows > 128:
        return config
    sole_cta = config.num_consumer_wgs == 1 and config.ctas_per_sm == 1 and config.block_n == 128
    waits_for_boxes = sole_cta and shape.page_size < GATHER_BELOW_PAGE_SIZE and request_heads <= device.num_sms
    return _gathered(config) if waits_for_boxes or not _has_full_cache_lines(shape, 1) else config


def _gathered(config: KernelConfig) -> KernelConfig:
    return replace(config, kernel=Kernel.SM90_GATHER)


def _has_full_cache_lines(shape: AttentionShape, heads: int) -> bool:
    """Check whether `heads` adjacent KV heads of a token fill whole cache lines, without bytes of other heads."""
    return heads * shape.head_dim * DTYPE_BYTES[shape.kv_dtype] % CACHE_LINE_BYTES == 0


def _merged_shape(shape: AttentionShape) -> AttentionShape:
    """Return the shape that treats two adjacent KV heads as one head of twice the head_dim."""
    return replace(shape, head_dim=2 * shape.head_dim)


def merged_block_ms(shape: AttentionShape) -> tuple[int, ...]:
    """Return the sizes of row tiles that process two KV heads as one, in packed rows; empty if heads are not merged.

    A packed row of either head counts as one. Heads are merged if three conditions hold: their number is even; the
    merged head_dim is at most MAX_HEAD_DIM; and a head has at most 64 elements or does not fill whole cache lines. Row
    tiles of 128 are included if at most a quarter of the columns is padding.
    """
    pair = _merged_shape(shape)
    is_better = shape.head_dim <= 64 or not _has_full_cache_lines(shape, 1)
    if shape.num_kv_heads % 2 or pair.head_dim > MAX_HEAD_DIM or not is_better:
        return ()
    is_full = 4 * pair.head_dim >= 3 * next_power_of_two(pair.head_dim)
    return fp8_block_ms(pair) or ((64, 128) if is_full else (64,))


def merging_heads_pays(shape: AttentionShape, device: DeviceProfile, rows: Any, num_reqs: Any) -> bool:
    """Check whether processing two KV heads as one is faster.

    A CTA then reads twice the adjacent bytes of a token, which suits DRAM, and a row tile holds less padding. The rows
    of both heads must fit into one row tile. Merging halves the number of work items. With up to 64 rows of both heads
    it still pays if the batch has at least one (request, KV head) pair for every four SMs. With more rows, the merged
    pairs must fill the SMs without splitting.
    """
    block_ms, request_heads = merged_block_ms(shape), num_reqs * shape.num_kv_heads
    if not block_ms or 2 * rows > block_ms[-1]:
        return False
    return (
        bool(4 * request_heads >= device.num_sms) if 2 * rows <= 64 else _fills_ctas(request_heads // 2, device.num_sms)
    )


def merged_config(shape: AttentionShape, rows: Any) -> KernelConfig:
    """Return the configuration that processes two KV heads as one, with `rows` packed rows for each head."""
    pair = _merged_shape(shape)
    if fp8_block_ms(pair):
        return replace(fp8_config(pair, 2 * rows), kv_heads_per_tile=2)
    config = replace(base_config(pair, 64 if 2 * rows > 64 else 0), kv_heads_per_tile=2)
    return config if _has_full_cache_lines(shape, 2) else _gathered(config)


def unmerged_config(shape: AttentionShape, config: KernelConfig) -> KernelConfig:
    """Return `config` for a cache with heads that are not adjacent: one head a tile, with equal block_n and splits."""
    if config.kv_heads_per_tile == 1:
        return config
    if config.kernel is Kernel.SM90_FP8 and not fp8_block_ms(shape):
        return replace(base_config(shape, 0), block_n=config.block_n)
    return replace(config, kv_heads_per_tile=1)


def fp8_block_ms(shape: AttentionShape) -> tuple[int, ...]:
    """Return the row tile sizes, in packed rows, for e4m3 upcast in registers; empty if there is no such kernel.

    Larger row tiles would need more registers than a thread has. Two adjacent e4m3 values form one 16-bit element, and
    head_dim / 2 elements must fill the 64 rows that wgmma needs. So this needs a head_dim above 64.
    """
    if DTYPE_BYTES[shape.kv_dtype] != 1:
        return ()
    return {128: (16, 32, 64), 256: (16, 32)}.get(next_power_of_two(shape.head_dim), ())


def fp8_config(shape: AttentionShape, rows: Any) -> KernelConfig:
    """Return the configuration that upcasts e4m3 in registers with swapped operands, two CTAs an SM."""
    block_m = next(block_m for block_m in fp8_block_ms(shape) if rows <= block_m)
    stages = 2 if next_power_of_two(shape.head_dim) == 256 and block_m > MIN_BLOCK_M else 3
    return KernelConfig(block_m, 64, 4, stages, 2, Kernel.SM90_FP8, 1)


def overlaps_softmax(config: KernelConfig, head_dim: int) -> bool:
    """Check whether a consumer warp group overlaps its softmax with its own MMAs (FA3's intra-warpgroup overlap).

    The registers must hold P (the softmax probabilities) of two tiles. Two consumer warp groups have room for them. One
    group has room with 16-bit KV and at most 160 columns. One group does not overlap if two CTAs an SM gather keys,
    because their producer warps need the registers. Without this overlap, the softmax overlaps only with MMAs of other
    warp groups or CTAs.
    """
    one = (
        config.num_consumer_wgs == 1
        and config.num_fp8_stages == 0
        and config.kernel is not Kernel.SM90_FP8
        and sum(split_head_dim(head_dim)) <= 160
    )
    gathers_twice = config.kernel is Kernel.SM90_GATHER and config.ctas_per_sm == 2
    return config.num_consumer_wgs == 2 or (one and not gathers_twice)


def box_fits_head(shape: AttentionShape, config: KernelConfig) -> bool:
    """Check whether one TMA box can load all 256 bytes of a head, or of two merged heads, instead of 128 bytes.

    This halves the number of boxes. Heads of 512 bytes keep boxes of 128 bytes, since larger ones were not faster.
    """
    is_16_bit = DTYPE_BYTES[shape.kv_dtype] == 2 and config.kernel is not Kernel.SM90_GATHER
    return is_16_bit and config.kv_heads_per_tile * shape.head_dim * DTYPE_BYTES[shape.kv_dtype] == 256
