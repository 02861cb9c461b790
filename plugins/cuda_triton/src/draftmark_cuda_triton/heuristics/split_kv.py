"""Number of KV splits of decode, verify and prefill batches, and the rows of their partial results."""

from __future__ import annotations

from dataclasses import replace
from operator import sub
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


def split_configs(shape: AttentionShape, config: KernelConfig) -> tuple[KernelConfig, ...]:
    """Return the configurations of split batches: `config`, and one with two CTAs an SM for requests of few rows."""
    short = (
        replace(base_config(shape, 0), kernel=config.kernel)
        if config.num_consumer_wgs > 1 and not config.num_fp8_stages
        else config
    )
    return (config, short) if short.ctas_per_sm == 2 and short != config else (config,)


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


class ExtendTiles:
    """Estimates the time of EXTEND batches with one kernel configuration. The unit is the time of a KV tile.

    The host estimates in every step with a prompt. What does not depend on the batch is therefore computed once, and
    the methods call few functions.

    The methods take q_lens, the rows of each request with padding, and lens, upper bounds of the live requests' prefix
    lengths in tokens, or None.

    Attributes:
        config: the kernel configuration.
        num_splits: splits of the row tiles of each KV head, if they are split; 1 if they never are.
        two_ctas: tiles of 64 packed rows with two CTAs an SM, for split requests of few rows; None if there are none.
    """

    def __init__(self, shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> None:
        self.config, self._shape, self._num_sms = config, shape, device.num_sms
        self._group, self._heads, self._window = shape.group_size, shape.num_kv_heads, shape.window_left
        self._num_ctas, self._costs = device.num_sms * config.ctas_per_sm, split_costs(shape.value_width)
        self.num_splits: int = prefill_splits(shape, device, config)
        *_, last = split_configs(shape, config)
        self.two_ctas = None if last == config else ExtendTiles(shape, device, last)
        self._last: tuple[object, object, list[int]] = (None, None, [])

    def when_split(self) -> list[ExtendTiles]:
        """Return the possible results of `split`."""
        return [self] if self.two_ctas is None else [self, self.two_ctas]

    def split(self, q_lens: tuple[int, ...], lens: tuple[int, ...] | None) -> ExtendTiles | None:
        """Return the tiles of a batch that can be split along the keys; None if it has too many row tiles.

        Requests of few rows use two CTAs an SM with 64 packed rows each (`with_two_ctas`). The limit is 64 packed rows,
        or 112 if there is at most one (request, KV head) pair an SM. Above 64 packed rows, one CTA an SM is kept if few
        requests have many keys (`_one_cta_pays`): one row tile of 128 rows loads the keys once, but two row tiles of 64
        rows load them twice.
        """
        if len(q_lens) > MAX_SPLIT_ROW_TILES:
            return None
        found, rows = self, max(q_lens) * self._group
        if rows <= 112 and self.two_ctas is not None and (rows <= 64 or not self._one_cta_pays(len(q_lens), lens)):
            found = self.two_ctas
        return found if found.num_splits > 1 and found._count(q_lens) <= MAX_SPLIT_ROW_TILES else None

    def splitting_pays(self, q_lens: tuple[int, ...], lens: tuple[int, ...] | None) -> bool:
        """Check whether splitting the row tiles along the keys is estimated to be faster.

        With splits, each CTA takes an even share and pays for the combine (`split_costs`). Without splits, each CTA
        takes whole row tiles (`_unsplit_time`). `kernels.prefill_schedule.splitting_pays` repeats the estimate on the
        device for batches of at most one row tile a CTA. Without lens, splitting is allowed if each CTA has at most one
        row tile, and the device decides.
        """
        heads, num_ctas = self._heads, self._num_ctas
        if lens is None:
            return self._count(q_lens) * heads <= num_ctas
        lengths = self._lengths(q_lens, lens)
        count, total_tiles = len(lengths), sum(lengths)
        if total_tiles // MIN_SPLIT_TILES <= count:
            return False
        share = -(-total_tiles * heads // num_ctas)
        combine_tiles, eighths, constant = self._costs
        one_tile_a_cta = count * heads <= num_ctas
        split_time = 3 * share // 2 + combine_tiles if one_tile_a_cta else eighths * share // 8 + constant
        return split_time < self._unsplit_time(lengths)

    def time(self, q_lens: tuple[int, ...], lens: tuple[int, ...]) -> int:
        """Return the estimated time of a batch with its row tiles whole, or split if `splitting_pays`.

        A split takes an eighth longer than its share of the KV tiles, and the combine as long as a few KV tiles.
        """
        lengths = self._lengths(q_lens, lens)
        share = -(-sum(lengths) * self._heads // self._num_ctas)
        split = self.split(q_lens, lens)
        if split is not None and split.splitting_pays(q_lens, lens):
            return 9 * share // 8 + self._costs[0]
        return max(share, self._unsplit_time(lengths))

    def _one_cta_pays(self, num_reqs: int, lens: tuple[int, ...] | None) -> bool:
        """Check whether requests of 65 to 112 packed rows keep one CTA an SM.

        They do if there are more (request, KV head) pairs than SMs, or if loading keys once saves more than a second
        CTA an SM: few requests see many prefix tokens.
        """
        pairs = num_reqs * self._heads
        if lens is None or 3 * pairs > self._num_sms:
            return pairs > self._num_sms
        keys = sum(visible_prefix(self._shape, n) for n in lens) * self._heads
        return keys >= MIN_KEYS_PER_SM * self._num_sms

    def _unsplit_time(self, lengths: list[int]) -> int:
        """Return the estimated time of unsplit row tiles of these lengths. CTAs process them in waves, longest first.

        A CTA that starts a row tile in wave n processes n row tiles of at least that tile's length. From the second
        wave on, the estimate adds one sixteenth, because CTAs do not finish at the same time.
        """
        heads, longest_first, found = self._heads, sorted(lengths, reverse=True), 0
        for wave, first in enumerate(range(0, len(lengths) * heads, self._num_ctas), 1):
            time = wave * longest_first[first // heads]  # the first row tile of a wave is its longest
            time = time if wave == 1 else 17 * time // 16
            found = time if time > found else found
        return found

    def _count(self, q_lens: tuple[int, ...]) -> int:
        """Return the number of row tiles of a batch, for each KV head."""
        group, block_m = self._group, self.config.block_m
        return sum([-(-rows * group // block_m) for rows in q_lens])

    def _lengths(self, q_lens: tuple[int, ...], lens: tuple[int, ...]) -> list[int]:
        """Return the length of each row tile of a batch for one KV head: KV tiles, and the fixed cost.

        The choices for one batch need the same lengths several times, so those of the last batch are kept.
        """
        last_q_lens, last_lens, found = self._last
        if last_q_lens is q_lens and last_lens is lens:
            return found
        group, window, block_m, block_n = self._group, self._window, self.config.block_m, self.config.block_n
        found = []
        for rows, prefix in zip(q_lens, lens, strict=False):
            packed, past = rows * group, prefix + block_n
            if packed > block_m:  # every row tile except the last one, which ends with the request
                ends = range(block_m - 1, packed - 1, block_m)
                found += [(past + end // group) // block_n + OVERHEAD_TILES for end in ends]
            if packed:
                found.append((past + rows - 1) // block_n + OVERHEAD_TILES)
            if packed and window >= 0:
                starts = range(0, packed, block_m)
                hidden = [max(prefix + start // group - window, 0) // block_n for start in starts]
                found[-len(hidden) :] = map(sub, found[-len(hidden) :], hidden)
        self._last = q_lens, lens, found
        return found


def fastest_tiles(candidates: list[ExtendTiles], q_lens: tuple[int, ...], lens: tuple[int, ...] | None) -> ExtendTiles:
    """Return the candidate that is estimated to be the fastest for an EXTEND batch.

    Three consumer warp groups must be 3 % faster than two, since the estimate ignores padding in a row tile. They are
    not considered for requests of few rows, for which `ExtendTiles.split` can choose two CTAs an SM.

    Args:
        candidates: one for each of `sm90.prefill_configs`.
        q_lens, lens: as in `ExtendTiles`.
    """
    usual = candidates[0]
    if len(candidates) == 1 or lens is None or max(q_lens) * usual._group <= 2 * 64:
        return usual
    two, three = (TILE_COSTS[one.config.num_consumer_wgs] * one.time(q_lens, lens) for one in candidates)
    return candidates[1] if 100 * three < 97 * two else usual
