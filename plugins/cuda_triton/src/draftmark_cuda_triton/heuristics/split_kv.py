"""Number of KV splits of decode, verify and prefill batches, and the rows of their partial results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark import AttentionShape, DeviceProfile, ceil_div, maximum, minimum

from .common import OVERHEAD_TILES, KernelConfig, row_tiles, visible_prefix
from .sm90 import base_config

MAX_WAVES = 3
"""Programs one after the other on a multiprocessor at most, of a batch whose pieces do not fill one round."""
MIN_REQUESTS_FOR_WAVES = 4
"""Of a batch that has more than one round at least."""
MIN_SPLIT_TILES = 3
"""Tiles, with OVERHEAD_TILES, of a piece of EXTEND's row tiles at least, unless as many are there."""
MAX_SPLIT_ROW_TILES = 128
"""Row tiles, and requests, of a batch of EXTEND that may be cut: the schedule has all of them in a vector."""
MIN_KEYS_PER_SM = 400
"""Keys of a multiprocessor's share of a batch of few requests, from which on bringing them once is what counts."""


def choose_num_splits(
    shape: AttentionShape, device: DeviceProfile, config: KernelConfig, q_len: Any, num_reqs: Any, max_kv_len: Any
) -> Any:
    """Into how many pieces the tiles of a batch are cut: what the device holds at a time, or what there is to cut.

    Where so many side by side leave more than a tenth of the device idle, 48 of 132 or 80, it is what the device holds
    in two rounds, or in three, if that leaves less; but of few requests, for a piece takes its time to begin.
    """
    has_many = minimum(1, num_reqs // MIN_REQUESTS_FOR_WAVES)
    tiles = num_reqs * (ceil_div(max_kv_len, config.block_n) + OVERHEAD_TILES)
    num_ctas, ctas_per_split = device.num_sms * config.ctas_per_sm, _ctas_per_split(shape, config, q_len)
    chosen = num_ctas // ctas_per_split
    for rounds in range(MAX_WAVES, 0, -1):
        found = rounds * num_ctas // ctas_per_split
        is_full = minimum(1 if rounds == 1 else has_many, 10 * found * ctas_per_split // (9 * rounds * num_ctas))
        chosen = is_full * found + (1 - is_full) * chosen
    return maximum(1, minimum(chosen, tiles))


def even_splits(num_splits: int, num_reqs: int) -> int:
    """As many pieces, or up to a twentieth fewer, that do not cut requests of one length more often than they must.

    33 pieces of 64 or of 32 equal requests leave 32 requests to be merged, 32 leave none. Of 16, 32 pieces have a part
    of one request each; of 33 most have parts of two.
    """
    even = (
        num_splits // num_reqs * num_reqs
        if num_splits > num_reqs
        else ceil_div(num_reqs, ceil_div(num_reqs, num_splits))
    )
    return even if 20 * even >= 19 * num_splits else num_splits


def partial_rows(shape: AttentionShape, config: KernelConfig, num_splits: Any, q_len: Any) -> Any:
    """Packed rows of partial results: two unfinished requests a piece, whatever the batch; a sole piece has none."""
    unfinished = 2 * minimum(1, num_splits - 1)
    return unfinished * num_splits * _ctas_per_split(shape, config, q_len) * config.block_m


def _ctas_per_split(shape: AttentionShape, config: KernelConfig, q_len: Any) -> Any:
    """Row tiles of all KV heads: programs that work on one piece."""
    return row_tiles(config, q_len, shape.group_size * config.kv_heads_per_tile) * (
        shape.num_kv_heads // config.kv_heads_per_tile
    )


def prefill_splits(shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> Any:
    """Into how many pieces EXTEND's row tiles of a KV head are cut, where they are: programs that the device holds."""
    return maximum(1, device.num_sms * config.ctas_per_sm // shape.num_kv_heads)


def prefill_partial_rows(shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> Any:
    """Packed rows of their partial results: two unfinished row tiles a piece; a sole piece has none."""
    num_splits = prefill_splits(shape, device, config)
    return 2 * minimum(1, num_splits - 1) * num_splits * shape.num_kv_heads * config.block_m


def split_config(
    shape: AttentionShape,
    device: DeviceProfile,
    config: KernelConfig,
    q_lens: tuple[int, ...],
    lens: tuple[int, ...] | None,
) -> KernelConfig | None:
    """The tile of a batch of EXTEND whose row tiles may be cut by their keys, where they are few; None of many, which
    keep all programs busy.

    Of few rows a request two programs of 64 share a multiprocessor, as in `with_two_ctas`; but of 65 to 112 and so few
    requests that they are cut whatever their tile is, one of 128 brings many keys once, where two bring them twice.

    Args:
        config: of batches that are not cut. q_lens: rows of each request, padding included. lens: of live requests,
            what the host knows of their prefixes, or None.
    """
    if len(q_lens) > MAX_SPLIT_ROW_TILES:
        return None
    rows, request_heads = max(q_lens) * shape.group_size, len(q_lens) * shape.num_kv_heads
    if rows <= 64 or (
        rows <= 112 and request_heads <= device.num_sms and not _one_cta_pays(shape, device, request_heads, lens)
    ):
        config = split_configs(shape, config)[-1]
    count = sum(row_tiles(config, rows, shape.group_size) for rows in q_lens)
    return config if count <= MAX_SPLIT_ROW_TILES and prefill_splits(shape, device, config) > 1 else None


def _one_cta_pays(
    shape: AttentionShape, device: DeviceProfile, request_heads: int, lens: tuple[int, ...] | None
) -> bool:
    """Whether bringing keys once is what counts: requests are few, and their keys, as far as the host knows, many."""
    if lens is None or 3 * request_heads > device.num_sms:
        return False
    return sum(visible_prefix(shape, n) for n in lens) * shape.num_kv_heads >= MIN_KEYS_PER_SM * device.num_sms


def split_configs(shape: AttentionShape, config: KernelConfig) -> tuple[KernelConfig, ...]:
    """Those that batches of EXTEND which may be cut have: that of the others, and one of few rows."""
    short = (
        replace(base_config(shape, 0), gather_kv=config.gather_kv)
        if config.num_consumer_wgs > 1 and not config.num_fp8_stages
        else config
    )
    return (config, short) if short.ctas_per_sm == 2 and short != config else (config,)


def splitting_pays(
    shape: AttentionShape,
    device: DeviceProfile,
    config: KernelConfig,
    q_lens: tuple[int, ...],
    lens: tuple[int, ...] | None,
) -> bool:
    """Whether row tiles of EXTEND that are cut take less time than whole ones, one by one. Of those that have a program
    each, `kernels.tile_schedule` says the same of what the device knows.

    A program has an even share, and a merge; and where fewer programs were as fast as memory, it gains less. Or it has
    whole row tiles (`_unsplit_time`).

    Args:
        lens: of live requests, what the host knows of their prefixes. None where it knows nothing: cutting may pay then
            if each program has one row tile at most.
    """
    num_ctas = device.num_sms * config.ctas_per_sm
    if lens is None:
        items = sum(row_tiles(config, rows, shape.group_size) for rows in q_lens) * shape.num_kv_heads
        return bool(items <= num_ctas)
    lengths = [
        _kv_tiles_seen(shape, config, rows, prefix, m) + OVERHEAD_TILES
        for rows, prefix in zip(q_lens, lens, strict=False)
        for m in range(row_tiles(config, rows, shape.group_size))
    ]
    count, total_tiles = len(lengths), sum(lengths)
    if total_tiles // MIN_SPLIT_TILES <= count:
        return False
    share = ceil_div(total_tiles * shape.num_kv_heads, num_ctas)
    once, eighths, more = split_costs(shape.head_dim)
    is_one = count * shape.num_kv_heads <= num_ctas
    split_time = 3 * share // 2 + once if is_one else eighths * share // 8 + more
    return bool(split_time < _unsplit_time(lengths, shape.num_kv_heads, num_ctas))


def _unsplit_time(lengths: list[int], heads: int, num_ctas: int) -> int:
    """What a program takes, in tiles, that has whole row tiles one after the other, the longest of all first.

    Somebody's n-th is the shortest of n. Those do not all end together, which is a sixteenth.

    Args:
        lengths: of the row tiles of a head.
    """
    turns = ((ceil_div((rank + 1) * heads, num_ctas), n) for rank, n in enumerate(sorted(lengths, reverse=True)))
    return max(n if turn == 1 else 17 * turn * n // 16 for turn, n in turns)


def split_costs(head_dim: int) -> tuple[int, int, int]:
    """What a program takes that has an even share, in tiles: half as much again and so many, where whole row tiles have
    a program each; or so many eighths of it, and so many. Of more than 128 columns partial results are more bytes.
    """
    if head_dim <= 128:
        return 6, 10, 4
    once = 3 + 3 * head_dim // 128
    return once, 9, once + 4


def _kv_tiles_seen(shape: AttentionShape, config: KernelConfig, rows: int, prefix: int, m: int) -> int:
    """Tiles of keys that row tile m of a causal request sees."""
    group, window = shape.group_size, shape.window_left
    highest = min((m * config.block_m + config.block_m - 1) // group, rows - 1)
    first = 0 if window < 0 else max(prefix + m * config.block_m // group - window, 0) // config.block_n
    return (prefix + highest + config.block_n) // config.block_n - first
