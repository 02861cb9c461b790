"""Kernel configurations for latent rows (MLA), where a row of hundreds of elements serves all query heads.

Hopper: `sm90_config`, for `kernels_sm90.latent` and `latent_rs`, and `swap_ab_config`. The rest of this page is about
the portable kernels.

A KV tile of 32 keys of 576 bfloat16 elements has 36 KiB, and the query rows of a row tile stay next to it in shared
memory. So shared memory limits the keys of a tile and the tiles in flight, and the accumulator (packed rows x value
elements in fp32) limits the packed rows.
"""

from __future__ import annotations

from dataclasses import replace

from draftmark import DTYPE_BYTES, PLAIN_ROWS, AttentionShape, DeviceProfile

from ..support import TMA_PAGE_MULTIPLE
from ..switches import KERNELS, uses_generic_kernels
from .common import MIN_BLOCK_M, Kernel, KernelConfig, next_power_of_two
from .sm80 import SMALL_SMEM_ARCHS
from .sm90 import SM90

TILE_BYTES = 36 << 10
"""Maximum bytes of a KV tile of more than MIN_BLOCK_N keys."""
MIN_BLOCK_N, MAX_BLOCK_N = 16, 64
"""Bounds of the keys of a tile: the smallest K extent of `mma`, and where larger tiles have no advantage."""
SCRATCH_BYTES = 6 << 10
"""Shared memory for the exchange of scores and sums between warps, in bytes."""
SMEM_BYTES = {80: 163 << 10, 87: 163 << 10}
"""Shared memory of a CTA in bytes, by architecture; 227 KiB for others, and 99 KiB for SMALL_SMEM_ARCHS."""
RESERVED_BYTES = 1 << 10
"""Shared memory that the driver reserves for each CTA."""

SM90_VALUE_DIMS, SM90_REST_DIMS = (128, 256, 512), (0, 32, 64)
"""Elements of both parts of a row for which `kernels_sm90.latent` is written."""
SM90_BLOCK_M, SM90_BLOCK_N = 64, 64
"""Packed rows of a row tile, and keys of a KV tile, of `kernels_sm90.latent`."""
SM90_WIDE_BLOCK_N, SM90_WIDE_VALUE_DIM = 128, 256
"""Keys of a wide KV tile, and value columns of the rows that can have it (`sm90_block_n`)."""
SM90_PARTITIONS = 3
"""Consumer warp groups of `kernels_sm90.latent`: one for the softmax, two for the values."""
SM90_RESERVED_BYTES = 2 << 10
"""Shared memory for barriers, factors of rows and alignment."""
SM90_MAX_STAGES = 4
RS_RESERVED_BYTES = 768
"""Shared memory for barriers and factors of rows in `kernels_sm90.latent_rs`."""
RS_QUERY_COLUMNS = {512: 80}
"""Value columns of q in shared memory in `kernels_sm90.latent_rs`, by the value columns of a row; others have none
(`latent_rs_config.query_pieces`)."""
RS_RAW_CHUNKS = 3
"""Chunks of each half of e4m3 tiles in flight. The memory bandwidth of an SM needs about 32 KiB in flight."""
RS_E4M3_STAGES = 2
"""Stages of e4m3 rows after they are upcast, for the value part and for the rest (`latent_rs_upcast`)."""
SWAP_AB_BLOCK_MS, SWAP_AB_VALUE_DIM = (16, 32), 512
"""Sizes of row tiles of `kernels_sm90.latent_swap_ab` in packed rows, and the value columns that it serves. With 64
packed rows it is slower than `latent_rs`."""
SWAP_AB_SMEM_BYTES = 216 << 10
"""Shared memory for tiles, q and p in `kernels_sm90.latent_swap_ab`; reductions and masks take the rest."""
E4M3 = "float8_e4m3fn"


def decode_config(shape: AttentionShape, device: DeviceProfile, rows: int, num_reqs: int) -> KernelConfig:
    """Return the configuration of a decode or verify batch: a Hopper kernel's where one serves the shape."""
    if reasons_against_sm90(shape, device):
        return latent_config(shape, device, rows)
    if block_ms := [block_m for block_m in _swap_ab_block_ms(shape) if rows <= block_m]:
        return swap_ab_config(shape, block_ms[0])
    return sm90_config(shape, rs_pays(shape, device, rows, num_reqs), sm90_block_n(shape, rows))


def _swap_ab_block_ms(shape: AttentionShape) -> tuple[int, ...]:
    """Return the sizes of row tiles of `kernels_sm90.latent_swap_ab`; none if it does not serve this shape."""
    return SWAP_AB_BLOCK_MS if shape.kv_dtype == E4M3 and shape.value_width == SWAP_AB_VALUE_DIM else ()


def swap_ab_config(shape: AttentionShape, block_m: int) -> KernelConfig:
    """Return the configuration of `kernels_sm90.latent_swap_ab`: stages next to q and two messages with p."""
    fixed = 2 * block_m * (shape.head_dim + 2 * SM90_BLOCK_N)
    stages = min(SM90_MAX_STAGES, (SWAP_AB_SMEM_BYTES - fixed) // (SM90_BLOCK_N * shape.head_dim))
    return KernelConfig(block_m, SM90_BLOCK_N, 4, stages, 1, Kernel.SM90_LATENT_SWAP_AB, SM90_PARTITIONS)


def rs_pays(shape: AttentionShape, device: DeviceProfile, rows: int, num_reqs: int) -> bool:
    """Return True if rows in q's dtype take `kernels_sm90.latent_rs`: requests of two row tiles or more, narrow values.

    One row tile a request is bound by bytes, and `kernels_sm90.latent` begins each split sooner, unless there are so
    many requests that splits are long. With narrow values, `latent_rs` holds p in registers.
    """
    many = rows > SM90_BLOCK_M or 10 * num_reqs >= 9 * device.num_sms
    return many or shape.value_width <= SM90_WIDE_VALUE_DIM


def sm90_block_n(shape: AttentionShape, rows: int) -> int:
    """Return the keys of a KV tile for requests of `rows` packed rows.

    The products of a tile of 64 keys of 256 + 64 elements take less time than its softmax and messages. With one row
    tile a request bytes take more time than both.
    """
    return max(_block_ns(shape)) if rows > SM90_BLOCK_M else SM90_BLOCK_N


def _block_ns(shape: AttentionShape) -> tuple[int, ...]:
    """Return the keys of a KV tile of a Hopper kernel, for any number of rows."""
    wide = shape.value_width == SM90_WIDE_VALUE_DIM and shape.kv_dtype == shape.q_dtype
    return (SM90_BLOCK_N, SM90_WIDE_BLOCK_N) if wide else (SM90_BLOCK_N,)


def reasons_against_sm90(shape: AttentionShape, device: DeviceProfile) -> list[str]:
    """Return why `kernels_sm90.latent` does not serve decode and verify batches of latent rows; empty if it does."""
    reasons, rest = [f"{KERNELS} is generic"] if uses_generic_kernels() else [], shape.head_dim - shape.value_width
    if device.kind != "cuda" or device.arch != SM90:
        reasons.append(f"they need sm_{SM90}, and the device is {device.kind} sm_{device.arch}")
    if shape.value_width not in SM90_VALUE_DIMS or rest not in SM90_REST_DIMS:
        values, rests = (", ".join(map(str, dims)) for dims in (SM90_VALUE_DIMS, SM90_REST_DIMS))
        reasons.append(f"they need values of {values} and a rest of {rests} elements, not {shape.value_width} + {rest}")
    if DTYPE_BYTES[shape.q_dtype] != 2 or shape.kv_dtype not in (shape.q_dtype, E4M3):
        reasons.append(f"they need 16-bit q and rows of q's dtype or e4m3, not {shape.q_dtype} and {shape.kv_dtype}")
    if shape.row_format != PLAIN_ROWS:
        reasons.append(f"they read plain rows, not {shape.row_format}")
    if shape.page_size % TMA_PAGE_MULTIPLE:
        reasons.append(f"latent rows need pages of a multiple of {TMA_PAGE_MULTIPLE} tokens, not {shape.page_size}")
    return reasons


def sm90_candidates(shape: AttentionShape) -> tuple[KernelConfig, ...]:
    """Return every configuration of a Hopper kernel that `decode_config` and `adapt_to_cache` can return."""
    few = (swap_ab_config(shape, block_m) for block_m in _swap_ab_block_ms(shape))
    return (*few, *(sm90_config(shape, rs, block_n) for block_n in _block_ns(shape) for rs in (False, True)))


def sm90_config(shape: AttentionShape, rs: bool = False, block_n: int = SM90_BLOCK_N) -> KernelConfig:
    """Return the configuration of a Hopper kernel, with the stages that fit in shared memory next to q and p.

    Args:
        rs: `kernels_sm90.latent_rs`, which e4m3 rows always take, instead of `latent`.
    """
    if rs or shape.kv_dtype == E4M3:
        return _rs_config(shape, block_n)
    row = 2 * shape.head_dim
    free = smem_bytes_of(SM90) - SM90_RESERVED_BYTES - SM90_BLOCK_M * (row + 2 * block_n)
    stages = min(SM90_MAX_STAGES, free // (block_n * row))
    return KernelConfig(SM90_BLOCK_M, block_n, 4, stages, 1, Kernel.SM90_LATENT, SM90_PARTITIONS)


def _rs_config(shape: AttentionShape, block_n: int) -> KernelConfig:
    """Return the configuration of `kernels_sm90.latent_rs`: stages in q's dtype next to q, p, and e4m3 chunks."""
    width, rest, raw, chunks = shape.value_width, shape.head_dim - shape.value_width, 0, 0
    if shape.kv_dtype == E4M3:
        chunks = RS_RAW_CHUNKS
        raw = block_n * 2 * (chunks * min(128, width // 2) + rest)
    queries = RS_QUERY_COLUMNS.get(width, 0) + (rest if block_n == SM90_BLOCK_N else 0)
    fixed = 2 * SM90_BLOCK_M * (queries + block_n) + 2 * block_n * rest * rs_rest_stages(width, block_n, chunks)
    free = smem_bytes_of(SM90) - RS_RESERVED_BYTES - fixed - raw
    stages = min(RS_E4M3_STAGES if chunks else SM90_MAX_STAGES, free // (2 * block_n * width))
    return KernelConfig(
        SM90_BLOCK_M, block_n, 4, stages, 1, Kernel.SM90_LATENT_RS, SM90_PARTITIONS, num_fp8_stages=chunks
    )


def rs_rest_stages(value_width: int, block_n: int, raw_chunks: int) -> int:
    """Return the stages of the rests of key tiles in `kernels_sm90.latent_rs`."""
    if raw_chunks:
        return RS_E4M3_STAGES
    return 1 if value_width > 256 or block_n > SM90_BLOCK_N else 2


def portable_config(shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> KernelConfig:
    """Return the portable kernel's configuration with the tile shape of `config`, for tensors that TMA cannot load."""
    row, stages = row_bytes(shape), 3
    while stages > 1 and _used_bytes(device, config.block_m, config.block_n, stages, row) > smem_bytes(device):
        stages -= 1
    return replace(config, num_warps=8, num_stages=stages, kernel=Kernel.POINTERS, num_consumer_wgs=0)


def latent_config(shape: AttentionShape, device: DeviceProfile, rows: int) -> KernelConfig:
    """Return the configuration for requests of `rows` packed rows (query rows times heads): 16, 32 or 64 a tile.

    Tiles of 64 rows read each key a quarter as often as tiles of 16, and use wgmma or tcgen05 where the GPU has them.
    Few rows take tiles without padding: their batches are bound by bytes. float32 has no tensor-core products, so its
    tiles have 16 rows.
    """
    tiles = latent_candidates(shape, device)
    return next((one for one in tiles if rows <= one.block_m), tiles[-1])


def latent_candidates(shape: AttentionShape, device: DeviceProfile) -> tuple[KernelConfig, ...]:
    """Return every configuration that `latent_config` can return, by ascending packed rows of a tile."""
    tiles = [KernelConfig(MIN_BLOCK_M, 0, 4, 3, 1)]
    if shape.q_dtype != "float32":
        tiles.append(KernelConfig(32, 0, 8, 3, 1))
        if device.arch not in SMALL_SMEM_ARCHS:
            tiles.append(KernelConfig(64, 0, 8, 3, 1))
    return tuple(_fitted(shape, device, one) for one in tiles)


def _fitted(shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> KernelConfig:
    """Return `config` with the most keys and stages that shared memory holds, and two CTAs an SM if they fit."""
    row, limit = row_bytes(shape), smem_bytes(device)
    block_n = MAX_BLOCK_N
    while block_n > MIN_BLOCK_N and (
        block_n * row > TILE_BYTES or _used_bytes(device, config.block_m, block_n, config.num_stages, row) > limit
    ):
        block_n //= 2
    stages = config.num_stages
    while stages > 1 and _used_bytes(device, config.block_m, block_n, stages, row) > limit:
        stages -= 1
    used = _used_bytes(device, config.block_m, block_n, stages, row) + RESERVED_BYTES
    two = config.num_warps == 4 and 2 * used <= limit + RESERVED_BYTES
    return replace(config, block_n=block_n, num_stages=stages, ctas_per_sm=2 if two else 1)


def fits(shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> bool:
    """Return True if a configuration's tiles fit in shared memory, for each of its CTAs on an SM."""
    used = _used_bytes(device, config.block_m, config.block_n, config.num_stages, row_bytes(shape)) + RESERVED_BYTES
    return config.ctas_per_sm * used <= smem_bytes(device) + RESERVED_BYTES


def row_bytes(shape: AttentionShape) -> int:
    """Return the bytes of a row in q's dtype with both parts padded to powers of two."""
    rest = shape.head_dim - shape.value_width
    columns = max(16, next_power_of_two(shape.value_width)) + (max(16, next_power_of_two(rest)) if rest else 0)
    return columns * DTYPE_BYTES[shape.q_dtype]


def smem_bytes(device: DeviceProfile) -> int:
    """Return the shared memory of a CTA in bytes."""
    return smem_bytes_of(device.arch)


def smem_bytes_of(arch: int) -> int:
    """Return the shared memory of a CTA of an architecture in bytes."""
    return (99 << 10) if arch in SMALL_SMEM_ARCHS else SMEM_BYTES.get(arch, 227 << 10)


def _used_bytes(device: DeviceProfile, block_m: int, block_n: int, stages: int, row: int) -> int:
    """Return the shared memory of a row tile in bytes: its query rows, and the KV tiles in flight.

    The products of Hopper and newer read a tile after the next load has been issued, so they need one tile more.
    """
    reads_late = block_m >= 64 and device.arch >= 90
    return (block_m + (stages if reads_late else max(1, stages - 1)) * block_n) * row + SCRATCH_BYTES
