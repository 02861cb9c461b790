"""Kernel configuration and splits of layers with chosen keys, where a tile holds the heads of one query row."""

from __future__ import annotations

from dataclasses import replace

from draftmark import AttentionShape, DeviceProfile, Geometry, Mode, ceil_div

from .common import MIN_BLOCK_M, KernelConfig, next_power_of_two, row_tiles
from .interpreted import INTERPRETED_KEYS, INTERPRETED_ROWS, INTERPRETED_SPLITS
from .latent import MAX_BLOCK_N, fits, latent_config
from .sm80 import generic_config

MIN_SPLIT_KEYS = 128
"""Fewest entries of a list that a split reads when the list is full."""
MIN_CTAS = 8
"""CTAs that one launch fills on any device, so that few rows are also split on a device with one SM."""


def chosen_config(shape: AttentionShape, device: DeviceProfile) -> KernelConfig:
    """Return the configuration of every batch of a layer: it depends on the heads only, not on the number of rows.

    Latent rows have tiles of 64 keys in two stages where they fit. Gathered loads are long enough to hide one tile, and
    on an H200 such tiles have 0.99 to 1.30 times the speed of tiles of 32 keys in three stages (higher is faster).
    """
    if shape.latent:
        config = latent_config(shape, device, shape.group_size)
        wider = replace(config, block_n=MAX_BLOCK_N, num_stages=2)
        return wider if fits(shape, device, wider) else config
    few = shape.q_dtype == "float32" or shape.group_size <= MIN_BLOCK_M
    return generic_config(shape, device, few)


def num_splits(geometry: Geometry, mode: Mode, num_rows: int) -> int:
    """Return the parts into which each list of a batch is split: enough to fill the device, 1 with batch invariance.

    It depends on mode and rows only, which a CUDA graph fixes. EXTEND has enough rows to fill a device without splits.
    """
    if mode is Mode.EXTEND:
        return 1
    return _num_splits(geometry, num_rows * ctas_per_row(geometry), _resident(geometry))


def ctas_per_row(geometry: Geometry) -> int:
    """Return the CTAs of one query row in one split: head tiles times KV heads."""
    a = geometry.attention
    tiles: int = row_tiles(chosen_config(a, geometry.device), 1, a.group_size)
    return tiles * a.num_kv_heads


def partial_rows(geometry: Geometry, mode: Mode, num_rows: int) -> int:
    """Return the rows of partial results of a batch; 0 if its lists are not split."""
    ctas, splits = num_rows * ctas_per_row(geometry), num_splits(geometry, mode, num_rows)
    return 0 if splits == 1 else ctas * splits * chosen_config(geometry.attention, geometry.device).block_m


def max_partial_rows(geometry: Geometry) -> int:
    """Return the most rows of partial results of any batch. Only batches that do not fill the device split lists."""
    ctas, resident = ctas_per_row(geometry), _resident(geometry)
    most_rows = max((geometry.max_rows(mode) for mode in geometry.modes if mode is not Mode.EXTEND), default=0)
    batches = (rows * ctas for rows in range(1, min(most_rows, resident // ctas) + 1))
    used = ((size, _num_splits(geometry, size, resident)) for size in batches)
    most = max((size * splits for size, splits in used if splits > 1), default=0)
    return most * chosen_config(geometry.attention, geometry.device).block_m


def _num_splits(geometry: Geometry, ctas: int, resident: int) -> int:
    if geometry.limits.batch_invariant:
        return 1
    return max(1, min(resident // ctas, geometry.attention.chosen_width // MIN_SPLIT_KEYS))


def interpreted_chosen(shape: AttentionShape, config: KernelConfig, splits: int) -> tuple[KernelConfig, int]:
    """Return configuration and splits for Triton's interpreter: large tiles and few splits, in the same buffers."""
    block_m = next_power_of_two(row_tiles(config, 1, shape.group_size) * config.block_m)
    fits = block_m == row_tiles(config, 1, shape.group_size) * config.block_m and block_m <= INTERPRETED_ROWS
    block_n = min(INTERPRETED_KEYS, max(MIN_BLOCK_M, next_power_of_two(ceil_div(shape.chosen_width, 2))))
    larger = replace(config, block_m=block_m if fits else config.block_m, block_n=block_n)
    return larger, min(splits, INTERPRETED_SPLITS)


def _resident(geometry: Geometry) -> int:
    config = chosen_config(geometry.attention, geometry.device)
    return max(MIN_CTAS, geometry.device.num_sms * config.ctas_per_sm)
