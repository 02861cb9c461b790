"""Number of KV splits of decode, verify and prefill batches, and the rows of their partial results."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from draftmark import AttentionShape, DeviceProfile, ceil_div, maximum, minimum

from .common import OVERHEAD_TILES, KernelConfig, row_tiles, visible_prefix
from .sm90 import base_config

MAX_WAVES = 3
"""Maximum waves of CTAs that `choose_num_splits` considers, if one wave leaves too many CTAs idle."""
MIN_REQUESTS_FOR_WAVES = 4
"""Minimum requests of a batch with more than one wave of CTAs."""
MIN_SPLIT_TILES = 3
"""Minimum average length of an EXTEND split, in KV tiles, OVERHEAD_TILES included."""
MAX_SPLIT_ROW_TILES = 128
"""Maximum row tiles, and maximum requests, of a split EXTEND batch. Schedule programs hold row tiles in one vector."""
TILE_COSTS = {2: 7, 3: 10}
"""Relative time of a KV tile of 128 keys and 81 to 96 columns, by the number of consumer warp groups."""
MIN_KEYS_PER_SM = 400
"""Keys of all KV heads for each SM, from which loading keys only once outweighs two CTAs an SM."""


def choose_num_splits(
    shape: AttentionShape, device: DeviceProfile, config: KernelConfig, q_len: Any, num_reqs: Any, max_kv_len: Any
) -> Any:
    """Return the number of splits of a decode or verify batch's sequence of KV tiles; at most the number of tiles.

    The splits of all row tiles and KV heads fill one wave of resident CTAs. If that leaves more than a tenth of the
    CTAs idle and the batch has MIN_REQUESTS_FOR_WAVES requests, the splits fill two waves, or three, if those leave at
    most a tenth idle. Few requests stay at one wave, because each split takes time to start.
    """
    has_many = minimum(1, num_reqs // MIN_REQUESTS_FOR_WAVES)
    tiles = num_reqs * (ceil_div(max_kv_len, config.block_n) + OVERHEAD_TILES)
    num_ctas, size = device.num_sms * config.ctas_per_sm, ctas_per_split(shape, config, q_len)
    chosen = num_ctas // size
    for waves in range(MAX_WAVES, 0, -1):
        found = waves * num_ctas // size
        fills_waves = minimum(1 if waves == 1 else has_many, 10 * found * size // (9 * waves * num_ctas))
        chosen = fills_waves * found + (1 - fills_waves) * chosen
    return maximum(1, minimum(chosen, tiles))


def even_splits(num_splits: int, num_reqs: int) -> int:
    """Return num_splits, or up to 5 % fewer splits if requests of equal length are then split less often.

    Example with 64 equal requests: 33 splits cut 32 requests, which must then be combined; 32 splits cut none. Example
    with 16 requests: each of 32 splits holds a part of one request; most of 33 splits hold parts of two.
    """
    even = (
        num_splits // num_reqs * num_reqs
        if num_splits > num_reqs
        else ceil_div(num_reqs, ceil_div(num_reqs, num_splits))
    )
    return even if 20 * even >= 19 * num_splits else num_splits


def partial_rows(shape: AttentionShape, config: KernelConfig, num_splits: Any, q_len: Any) -> Any:
    """Return the number of packed rows of partial results: two row tiles a CTA, in every split; 0 without splits."""
    unfinished = 2 * minimum(1, num_splits - 1)
    return unfinished * num_splits * ctas_per_split(shape, config, q_len) * config.block_m


def ctas_per_split(shape: AttentionShape, config: KernelConfig, q_len: Any) -> Any:
    """Return the number of CTAs that work on one split: row tiles times KV heads."""
    return row_tiles(config, q_len, shape.group_size * config.kv_heads_per_tile) * (
        shape.num_kv_heads // config.kv_heads_per_tile
    )


def prefill_splits(shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> Any:
    """Return the number of splits of each KV head's row tiles if EXTEND is split: resident CTAs / KV heads."""
    return maximum(1, device.num_sms * config.ctas_per_sm // shape.num_kv_heads)


def prefill_partial_rows(shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> Any:
    """Return the number of packed rows of EXTEND's partial results: two row tiles a split; 0 without splits."""
    num_splits = prefill_splits(shape, device, config)
    return 2 * minimum(1, num_splits - 1) * num_splits * shape.num_kv_heads * config.block_m


def split_config(
    shape: AttentionShape,
    device: DeviceProfile,
    config: KernelConfig,
    q_lens: tuple[int, ...],
    lens: tuple[int, ...] | None,
) -> KernelConfig | None:
    """Return the configuration of an EXTEND batch that can be split along the keys; None if it has too many row tiles.

    Requests of few rows use two CTAs an SM with 64 packed rows each (`with_two_ctas`). The limit is 64 packed rows, or
    112 if there is at most one (request, KV head) pair an SM. Above 64 packed rows, `config` with one CTA an SM is kept
    if few requests have many keys (`_one_cta_pays`): one row tile of 128 rows loads the keys once, but two row tiles of
    64 rows load them twice.

    Args:
        config: configuration of unsplit batches.
        q_lens: rows of each request, padding included.
        lens: upper bounds of the live requests' prefix lengths in tokens, or None.
    """
    if len(q_lens) > MAX_SPLIT_ROW_TILES:
        return None
    rows, request_heads = max(q_lens) * shape.group_size, len(q_lens) * shape.num_kv_heads
    if rows <= 64 or (
        rows <= 112 and request_heads <= device.num_sms and not _one_cta_pays(shape, device, request_heads, lens)
    ):
        config = split_configs(shape, config)[-1]
    count = _num_row_tiles(shape, config, q_lens)
    return config if count <= MAX_SPLIT_ROW_TILES and prefill_splits(shape, device, config) > 1 else None


def _one_cta_pays(
    shape: AttentionShape, device: DeviceProfile, request_heads: int, lens: tuple[int, ...] | None
) -> bool:
    """Check whether loading keys once saves more than a second CTA an SM: few requests see many prefix tokens."""
    if lens is None or 3 * request_heads > device.num_sms:
        return False
    return sum(visible_prefix(shape, n) for n in lens) * shape.num_kv_heads >= MIN_KEYS_PER_SM * device.num_sms


def split_configs(shape: AttentionShape, config: KernelConfig) -> tuple[KernelConfig, ...]:
    """Return the possible results of `split_config`: `config`, and one with two CTAs an SM for requests of few rows."""
    short = (
        replace(base_config(shape, 0), kernel=config.kernel)
        if config.num_consumer_wgs > 1 and not config.num_fp8_stages
        else config
    )
    return (config, short) if short.ctas_per_sm == 2 and short != config else (config,)


def fastest_config(
    shape: AttentionShape,
    device: DeviceProfile,
    configs: tuple[KernelConfig, ...],
    q_lens: tuple[int, ...],
    lens: tuple[int, ...] | None,
) -> KernelConfig:
    """Return the one of `configs` that is estimated to be the fastest for an EXTEND batch.

    Three consumer warp groups must be 3 % faster than two, since the estimate ignores padding in a row tile. They are
    not considered for requests of few rows, for which `split_config` can choose two CTAs an SM.

    Args:
        configs: those of `sm90.prefill_configs`.
        lens: upper bounds of the live requests' prefix lengths in tokens, or None.
    """
    if len(configs) == 1 or lens is None or max(q_lens) * shape.group_size <= 2 * 64:
        return configs[0]
    two, three = (TILE_COSTS[one.num_consumer_wgs] * _extend_time(shape, device, one, q_lens, lens) for one in configs)
    return configs[1] if 100 * three < 97 * two else configs[0]


def _extend_time(
    shape: AttentionShape,
    device: DeviceProfile,
    config: KernelConfig,
    q_lens: tuple[int, ...],
    lens: tuple[int, ...],
) -> int:
    """Return the estimated time of an EXTEND batch with its row tiles whole, or split if `splitting_pays`, in KV tiles.

    A split takes an eighth longer than its share of the KV tiles, and the combine as long as a few KV tiles.
    """
    num_ctas = device.num_sms * config.ctas_per_sm
    lengths = _row_tile_lengths(shape, config, q_lens, lens)
    share = ceil_div(sum(lengths) * shape.num_kv_heads, num_ctas)
    split = split_config(shape, device, config, q_lens, lens)
    if split is not None and splitting_pays(shape, device, split, q_lens, lens):
        return 9 * share // 8 + split_costs(shape.value_width)[0]
    return max(share, _unsplit_time(lengths, shape.num_kv_heads, num_ctas))


def splitting_pays(
    shape: AttentionShape,
    device: DeviceProfile,
    config: KernelConfig,
    q_lens: tuple[int, ...],
    lens: tuple[int, ...] | None,
) -> bool:
    """Check whether splitting an EXTEND batch's row tiles along the keys is estimated to be faster.

    With splits, each CTA takes an even share and pays for the combine (`split_costs`). Without splits, each CTA takes
    whole row tiles (`_unsplit_time`). `kernels.prefill_schedule.splitting_pays` repeats the estimate on the device for
    batches of at most one row tile a CTA.

    Args:
        lens: upper bounds of the live requests' prefix lengths in tokens. Without them (None), splitting is allowed if
            each CTA has at most one row tile, and the device decides.
    """
    num_ctas = device.num_sms * config.ctas_per_sm
    if lens is None:
        return _num_row_tiles(shape, config, q_lens) * shape.num_kv_heads <= num_ctas
    lengths = _row_tile_lengths(shape, config, q_lens, lens)
    count, total_tiles = len(lengths), sum(lengths)
    if total_tiles // MIN_SPLIT_TILES <= count:
        return False
    share = ceil_div(total_tiles * shape.num_kv_heads, num_ctas)
    combine_tiles, eighths, constant = split_costs(shape.value_width)
    one_tile_a_cta = count * shape.num_kv_heads <= num_ctas
    split_time = 3 * share // 2 + combine_tiles if one_tile_a_cta else eighths * share // 8 + constant
    return split_time < _unsplit_time(lengths, shape.num_kv_heads, num_ctas)


def _unsplit_time(lengths: tuple[int, ...], heads: int, num_ctas: int) -> int:
    """Return the estimated time of unsplit row tiles, in KV tiles. CTAs process row tiles in waves, longest first.

    A CTA that starts a row tile in wave n processes n row tiles of at least that tile's length. From the second wave
    on, the estimate adds one sixteenth, because CTAs do not finish at the same time.

    Args:
        lengths: length of each row tile of one KV head, in KV tiles.
    """
    longest_first = sorted(lengths, reverse=True)
    # The first row tile of a wave is its longest.
    first_of_wave = [longest_first[first // heads] for first in range(0, len(lengths) * heads, num_ctas)]
    return max(n if wave == 1 else 17 * wave * n // 16 for wave, n in enumerate(first_of_wave, 1))


def split_costs(value_dim: int) -> tuple[int, int, int]:
    """Return the cost parameters of split EXTEND row tiles: (combine_tiles, eighths, constant).

    A split's share is the number of KV tiles divided by the number of splits. With at most one row tile a CTA, a split
    costs 3/2 of its share plus `combine_tiles` KV tiles. With more row tiles, it costs eighths/8 of its share plus
    `constant` KV tiles. Above 128 columns the parameters are larger, because partial results have more bytes.
    """
    if value_dim <= 128:
        return 6, 10, 4
    combine_tiles = 3 + 3 * value_dim // 128
    return combine_tiles, 9, combine_tiles + 4


def _num_row_tiles(shape: AttentionShape, config: KernelConfig, q_lens: tuple[int, ...]) -> int:
    """Return the number of row tiles of an EXTEND batch, for each KV head."""
    group, block_m = shape.group_size, config.block_m
    return sum([-(-rows * group // block_m) for rows in q_lens])


def _row_tile_lengths(
    shape: AttentionShape, config: KernelConfig, q_lens: tuple[int, ...], lens: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the length of each row tile of an EXTEND batch for one KV head: KV tiles, and the fixed cost."""
    return _lengths(shape.group_size, shape.window_left, config.block_m, config.block_n, q_lens, lens)


@lru_cache(maxsize=8)
def _lengths(
    group: int, window: int, block_m: int, block_n: int, q_lens: tuple[int, ...], lens: tuple[int, ...]
) -> tuple[int, ...]:
    """Return `_row_tile_lengths`. The choices for one batch need the same lengths several times.

    The host computes this in every step with a prompt, so the loop calls no function of the package.
    """
    found: list[int] = []
    for rows, prefix in zip(q_lens, lens, strict=False):
        packed = rows * group
        if window < 0 and packed <= block_m:
            if packed:
                found.append((prefix + rows - 1 + block_n) // block_n + OVERHEAD_TILES)
            continue
        last = prefix + rows - 1
        for start in range(0, packed, block_m):
            stop = (min(prefix + (start + block_m - 1) // group, last) + block_n) // block_n
            first = 0 if window < 0 else max(prefix + start // group - window, 0) // block_n
            found.append(stop - first + OVERHEAD_TILES)
    return tuple(found)
