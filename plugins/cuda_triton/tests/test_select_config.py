"""Selected kernel configurations, at every boundary between two of them. NOTES.md has the measured times.

The conformance suite cannot test this: in the interpreter every configuration gives equal results, and on a GPU a wrong
one is only slower, or needs more shared memory than exists.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark_cuda_triton import sizing
from draftmark_cuda_triton.heuristics import common, interpreted, select, sm80, sm90, split_kv
from draftmark_cuda_triton.heuristics.common import KernelConfig
from draftmark_cuda_triton.launch import tma
from draftmark_cuda_triton.prefill import has_adjacent_heads

A100, H200, B200 = (DeviceProfile("cuda", arch, 132) for arch in (80, 90, 100))
SOME = 200
"""Number of requests that is neither small nor large for one KV head on 132 SMs."""
BF16, FP32, E4M3 = ("bfloat16",) * 2, ("float32",) * 2, ("bfloat16", "float8_e4m3fn")


def shape(head_dim: int, dtypes: tuple[str, str] = BF16, page_size: int = 16) -> AttentionShape:
    """Return a shape with one query head for each KV head, so that a query row is one packed row."""
    return AttentionShape(1, 1, head_dim, page_size, *dtypes)


def described(config: KernelConfig) -> str:
    """Return a configuration as text, such as "64x64 4w 3s 2p 1m 2d".

    Fields: block_m x block_n, warps (w), stages (s), CTAs an SM (p), consumer warp groups (m), fp8 stages (d), KV heads
    a tile (h). The flags "swap_ab" and "gather" follow.
    """
    words = [
        f"{config.block_m}x{config.block_n}",
        f"{config.num_warps}w",
        f"{config.num_stages}s",
        f"{config.ctas_per_sm}p",
    ]
    words += [f"{config.num_consumer_wgs}m"] * bool(config.num_consumer_wgs) + [f"{config.num_fp8_stages}d"] * bool(
        config.num_fp8_stages
    )
    words += [f"{config.kv_heads_per_tile}h"] * (config.kv_heads_per_tile > 1)
    return " ".join([*words, *["swap_ab"] * config.fp8_swap_ab, *["gather"] * config.gather_kv])


@pytest.mark.parametrize(
    ("head_dim", "dtypes", "rows_16", "rows_17", "rows_64", "rows_65", "rows_193"),
    [
        (40, BF16, *["64x128 4w 3s 2p 1m gather"] * 3, "128x128 8w 6s 1p 2m gather", "128x128 8w 6s 1p 2m"),
        (64, BF16, *["64x128 4w 3s 2p 1m"] * 3, *["128x128 8w 6s 1p 2m"] * 2),
        (
            *(128, BF16, "64x64 4w 3s 2p 1m", "64x64 4w 3s 2p 1m", "64x128 4w 3s 1p 1m"),
            *("128x64 8w 6s 1p 2m", "128x128 8w 3s 1p 2m"),
        ),
        (256, BF16, *["64x64 4w 3s 1p 1m"] * 3, *["128x64 8w 2s 1p 2m"] * 2),
        (64, E4M3, *["64x128 4w 4s 1p 1m 2d"] * 3, *["128x128 8w 4s 1p 2m 4d"] * 2),
        (
            *(128, E4M3, "16x64 4w 3s 2p 1m swap_ab", "32x64 4w 3s 2p 1m swap_ab"),
            *("64x64 4w 3s 2p 1m swap_ab", *["128x128 8w 2s 1p 2m 2d"] * 2),
        ),
        (
            *(256, E4M3, "16x64 4w 3s 2p 1m swap_ab", "32x64 4w 2s 2p 1m swap_ab"),
            *["64x64 4w 1s 1p 1m 2d"] * 3,
        ),
    ],
)
def test_sm90_selects_the_measured_config(head_dim, dtypes, rows_16, rows_17, rows_64, rows_65, rows_193):
    """The configuration changes above 16, 64 and 128 packed rows (and 192, tested below), also with GQA groups."""
    found = {
        rows: described(select.select_config(shape(head_dim, dtypes), H200, rows, num_reqs=SOME))
        for rows in (1, 16, 17, 64, 65, 128, 193, 4096)
    }
    expected = {1: rows_16, 16: rows_16, 17: rows_17, 64: rows_64, 65: rows_65, 128: rows_65}
    assert found == expected | {193: rows_193, 4096: rows_193}
    # With 132 (request, KV head) pairs, each SM has exactly one.
    own = [described(select.select_config(shape(head_dim, dtypes), H200, rows, num_reqs=132)) for rows in (16, 17)]
    gathered = " gather" * (head_dim == 128)
    assert own == [rows_16, rows_64 + gathered if dtypes is BF16 else rows_17]
    grouped = AttentionShape(28, 7, head_dim, 16, *dtypes)
    assert described(select.select_config(grouped, H200, 4, num_reqs=20)) == rows_16
    assert described(select.select_config(grouped, H200, 5, num_reqs=20)) == rows_17
    assert described(select.select_config(grouped, H200, 17, num_reqs=SOME)) == rows_65


@pytest.mark.parametrize(
    ("head_dim", "dtypes"), [(40, BF16), (64, BF16), (80, BF16), (96, BF16), (128, BF16), (64, E4M3)]
)
def test_three_warp_groups_when_they_save_a_row_tile(head_dim, dtypes):
    """Three consumer warp groups serve 16-bit heads of up to 96 elements if a request then needs fewer row tiles."""
    found = {
        rows
        for rows in range(1, 1200)
        if select.select_config(shape(head_dim, dtypes), H200, rows, num_reqs=SOME).num_consumer_wgs == 3
    }
    expected = [*range(129, 193), *range(257, 385)] if head_dim <= 96 and dtypes is BF16 else []
    assert found == set(expected)


@pytest.mark.parametrize(
    ("head_dim", "padded", "dtypes"),
    [*((dim, 64, BF16) for dim in (40, 56)), *((dim, 128, BF16) for dim in (104, 112, 120)), (208, 256, BF16)]
    + [(dim, padded, E4M3) for dim, padded in ((40, 64), (80, 128), (96, 128), (136, 256), (192, 256))],
)
def test_head_dim_uses_the_config_of_its_power_of_two(head_dim, padded, dtypes):
    """A head_dim uses the next power of two's configuration if it is e4m3 or if two parts would not reduce padding."""
    for rows in (1, 16, 17, 33, 64, 65):
        config = select.select_config(shape(head_dim, dtypes), H200, rows)
        assert replace(config, gather_kv=False) == replace(
            select.select_config(shape(padded, dtypes), H200, rows), gather_kv=False
        )
        assert sm90.overlaps_softmax(config, head_dim) is sm90.overlaps_softmax(config, padded)


@pytest.mark.parametrize(
    ("head_dim", "size", "expected"),
    [
        *((dim, 2, (64, 0)) for dim in (40, 48, 64)),
        *((dim, 2, (64, 16)) for dim in (72, 80)),
        *((dim, 2, (64, 32)) for dim in (88, 96)),
        *((dim, 2, (128, 0)) for dim in (104, 128)),
        *((136, 2, (128, 16)), (144, 2, (128, 16)), (160, 2, (128, 32)), (168, 2, (128, 64)), (192, 2, (128, 64))),
        *((dim, 2, (256, 0)) for dim in (200, 256)),
        *((80, 1, (64, 32)), (96, 1, (64, 32)), (136, 1, (128, 32)), (192, 1, (128, 64)), (256, 1, (256, 0))),
    ],
)
def test_head_dim_is_split_when_it_saves_columns(head_dim, size, expected):
    """A head_dim is padded to one or two powers of two; each has at least 32 bytes a row, for the TMA swizzle."""
    assert sm90.split_head_dim(head_dim, size) == expected


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [
        (80, ["64x64 4w 5s 2p 1m", "64x128 4w 5s 1p 1m", "128x64 8w 6s 1p 2m", "128x128 8w 5s 1p 2m"]),
        (96, ["64x64 4w 4s 2p 1m", "64x128 4w 4s 1p 1m", "128x64 8w 6s 1p 2m", "128x128 8w 4s 1p 2m"]),
        (160, [*["64x64 4w 5s 1p 1m"] * 2, "128x64 8w 4s 1p 2m", "128x128 8w 2s 1p 2m"]),
        (192, [*["64x64 4w 4s 1p 1m"] * 2, *["128x64 8w 3s 1p 2m"] * 2]),
    ],
)
def test_split_head_dims_fill_shared_memory(head_dim, expected):
    """A head_dim with two column parts gets the number of stages that fills shared memory."""
    attention = shape(head_dim, page_size=64)
    assert [described(sm90.base_config(attention, above)) for above in sm90.ROW_THRESHOLDS] == expected


@pytest.mark.parametrize(
    ("head_dim", "expected"),
    [
        (64, "192x128 8w 6s 1p 3m"),
        (80, "192x128 8w 4s 1p 3m"),
        (96, "128x128 8w 4s 1p 2m"),
        (128, "128x128 8w 3s 1p 2m"),
    ],
)
def test_prefill_uses_three_warp_groups_for_small_heads(head_dim, expected):
    """EXTEND uses three consumer warp groups for heads of up to 80 elements, and all stages that then fit."""
    assert described(select.select_config(shape(head_dim), H200, 4096, prefill=True)) == expected


def test_fp8_block_sizes_fit_registers():
    """e4m3 is upcast in registers for 16, 32 or 64 rows at head_dim 128 and 16 or 32 at 256, never for EXTEND."""
    block_ms = {}
    for head_dim in (64, 128, 256):
        tiles = {rows: select.select_config(shape(head_dim, E4M3), H200, rows) for rows in (16, 17, 32, 33, 64, 65)}
        block_ms[head_dim] = {rows: config.block_m for rows, config in tiles.items() if config.fp8_swap_ab}
        assert not any(
            select.select_config(shape(head_dim, E4M3), H200, rows, prefill=True).fp8_swap_ab for rows in (16, 64)
        )
    assert block_ms == {64: {}, 128: {16: 16, 17: 32, 32: 32, 33: 64, 64: 64}, 256: {16: 16, 17: 32, 32: 32}}
    extend = described(select.select_config(shape(128, E4M3), H200, 64, prefill=True))
    assert extend == "64x128 4w 2s 1p 1m 2d"


@pytest.mark.parametrize(
    ("head_dim", "dtypes", "few", "many"),
    [
        (32, BF16, "16x64 4w 3s 2p", "64x64 4w 3s 2p"),
        (128, BF16, "16x64 4w 3s 2p", "64x64 4w 3s 2p"),
        (136, BF16, "16x32 4w 3s 2p", "64x32 8w 3s 1p"),
        (256, E4M3, "16x32 4w 3s 2p", "64x32 8w 3s 1p"),
        (64, FP32, "16x64 4w 3s 2p", "16x64 4w 3s 2p"),
        (128, FP32, "16x32 4w 3s 2p", "16x32 4w 3s 2p"),
        (256, FP32, "16x16 4w 3s 2p", "16x16 4w 3s 2p"),
        (128, ("float32", "float8_e4m3fn"), "16x32 4w 3s 2p", "16x32 4w 3s 2p"),
    ],
)
def test_other_devices_use_16_kib_tiles(head_dim, dtypes, few, many):
    """float32 always uses tiles of 16 rows. Devices with small shared memory have two stages instead of three."""
    for device in (A100, B200):
        found = [described(select.select_config(shape(head_dim, dtypes), device, rows)) for rows in (1, 16, 17, 4096)]
        assert found == [few, few, many, many]
    for arch in (86, 89, 120, 121):
        device = DeviceProfile("cuda", arch, 100)
        small = [described(select.select_config(shape(head_dim, dtypes), device, rows)) for rows in (16, 17)]
        assert small == [few.replace("3s", "2s"), many.replace("3s", "2s")]
    for arch in (87, 88, 103, 110, 119, 122):
        assert select.select_config(shape(head_dim, dtypes), DeviceProfile("cuda", arch, 100), 16).num_stages == 3


@pytest.mark.parametrize(
    ("attention", "device", "served"),
    [
        (shape(40), H200, True),
        (shape(256), H200, True),
        (shape(32), H200, False),
        (shape(264), H200, False),
        (shape(100), H200, False),
        (shape(128, E4M3), H200, True),
        (shape(128, ("bfloat16", "float16")), H200, False),
        (shape(128, FP32), H200, False),
        (shape(128, ("float32", "float8_e4m3fn")), H200, False),
        (shape(128), A100, False),
        (shape(128), B200, False),
        (shape(128), DeviceProfile("cpu", 90, 1), False),
    ],
)
def test_when_sm90_kernels_exist(attention, device, served):
    """Hopper kernels exist for sm_90, 16-bit q, KV of q's dtype or e4m3, and head_dim 40 to 256 in steps of 8."""
    assert sm90.has_sm90_kernels(attention, device) is served
    assert any(config.num_consumer_wgs for config in select.config_candidates(attention, device)) is served


@pytest.mark.parametrize(("page_size", "gather"), [(1, True), (4, True), (8, False), (12, True), (24, False)])
def test_pages_not_a_multiple_of_8_are_gathered(page_size, gather):
    """Pages of a size that is no multiple of 8 are gathered if KV has q's dtype; otherwise generic kernels read
    them."""
    for rows in (16, 33, 64, 129):
        boxed = select.select_config(shape(128), H200, rows, num_reqs=SOME)
        here = select.select_config(shape(128, page_size=page_size), H200, rows, num_reqs=SOME)
        assert here == replace(boxed, gather_kv=gather)
    here = described(select.select_config(shape(128, page_size=page_size), H200, 17, num_reqs=SOME))
    assert here == ("64x128 4w 3s 1p 1m gather" if gather else "64x64 4w 3s 2p 1m")  # 2p: two CTAs an SM need TMA pages
    assert not select.fallback_config(shape(128), replace(boxed, gather_kv=True)).gather_kv
    by_pointer = select.select_config(shape(128, E4M3, page_size), H200, 17)
    assert (described(by_pointer) == "64x64 4w 3s 2p") is gather
    assert described(select.select_config(shape(128, page_size=page_size), A100, 17)) == "64x64 4w 3s 2p"


@pytest.mark.parametrize(
    ("attention", "device", "expected"),
    [
        (shape(128), A100, {"16x64 4w 3s 2p", "64x64 4w 3s 2p"}),
        (shape(128, FP32), A100, {"16x32 4w 3s 2p"}),
        (shape(128, ("float32", "float8_e4m3fn")), A100, {"16x32 4w 3s 2p"}),
        (
            shape(128),
            H200,
            {
                *("16x64 4w 3s 2p", "64x64 4w 3s 2p", "64x64 4w 3s 2p 1m"),
                *("64x128 4w 3s 1p 1m", "128x64 8w 6s 1p 2m", "128x128 8w 3s 1p 2m"),
            },
        ),
        (
            shape(256, E4M3),
            H200,
            {
                *("16x32 4w 3s 2p", "64x32 8w 3s 1p", "64x64 4w 1s 1p 1m 2d"),
                *("16x64 4w 3s 2p 1m swap_ab", "32x64 4w 2s 2p 1m swap_ab"),
            },
        ),
    ],
)
def test_config_candidates_are_all_used(attention, device, expected):
    """`select_config` returns every sizing candidate for some batch; an unused candidate would only enlarge buffers."""
    found = select.config_candidates(attention, device)
    assert {described(config) for config in found} == expected and len(found) == len(expected)


@pytest.mark.parametrize(
    ("attention", "device", "block_n", "served"),
    [
        (shape(64, page_size=64), H200, 64, True),
        (shape(128, page_size=64), H200, 64, True),
        (shape(256, page_size=128), B200, 64, True),
        (shape(128, page_size=64), A100, 64, False),
        (shape(128, page_size=64), DeviceProfile("cuda", 89, 132), 64, False),
        (shape(128, page_size=64), DeviceProfile("cpu", 90, 1), 64, False),
        (shape(128, page_size=32), H200, 64, False),
        (shape(128, page_size=96), H200, 64, False),
        (shape(80, page_size=64), H200, 64, False),
        (shape(128, E4M3, page_size=64), H200, 64, False),
        (shape(128, FP32, page_size=64), H200, 64, False),
    ],
)
def test_when_generic_kernels_use_tma(attention, device, block_n, served):
    """Generic kernels use TMA from sm_90 on if a KV tile lies in one page, needs no conversion, and has no padding."""
    config = KernelConfig(128, block_n, 4, 3, 2)
    assert sm80.uses_tma(attention, device, config) is served
    for tma_boxes in (False, True):
        found = select.adapt_to_cache(attention, device, config, uniform_stride=True, tma_boxes=tma_boxes)
        assert found == replace(config, use_tma=served)
    assert not select.adapt_to_cache(attention, device, config, uniform_stride=False, tma_boxes=True).use_tma


def test_cache_without_tma_uses_the_fallback_config():
    """A cache that TMA cannot load keeps tile shape and splits, on which buffers depend, with at most two stages."""
    attention = shape(64, page_size=64)
    config = select.select_config(attention, H200, 65)
    assert select.adapt_to_cache(attention, H200, config, uniform_stride=True, tma_boxes=True) == config
    without = select.adapt_to_cache(attention, H200, config, uniform_stride=False, tma_boxes=False)
    assert without == replace(config, num_consumer_wgs=0, num_stages=2)
    fp8 = select.select_config(shape(256, E4M3), H200, 65)
    assert select.fallback_config(shape(256, E4M3), fp8).num_stages == 1
    swap_ab = select.select_config(shape(128, E4M3), H200, 16)
    assert not select.fallback_config(shape(128, E4M3), swap_ab).fp8_swap_ab
    two_parts = select.select_config(shape(160), H200, 129)
    padded = select.fallback_config(shape(160), two_parts)  # the Triton kernels pad 160 columns to 256
    assert (two_parts.num_stages, padded.num_stages) == (2, 1)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "rows", "slow", "fast"),
    [
        *((96, page, rows, True, True) for page in (16, 64) for rows in (1, 64)),
        *((96, page, rows, True, False) for page in (16, 64) for rows in (65, 128)),
        *((96, page, rows, True, True) for page in (1, 12) for rows in (1, 128)),
        *((96, 16, 129, False, False), (128, 16, 65, False, False), (128, 16, 1, False, False)),
        *((128, 1, rows, True, True) for rows in (1, 65, 129)),
    ],
)
def test_fast_memory_keeps_tma_for_two_warp_groups(head_dim, page_size, rows, slow, fast):
    """With fast memory, 65 to 128 packed rows are not gathered from pages that TMA can load; the tile is unchanged."""
    attention = shape(head_dim, BF16, page_size)
    config = select.select_config(attention, H200, rows, num_reqs=SOME)
    for adjacent in (True, False):
        found = [
            select.adapt_to_cache(attention, H200, config, True, True, adjacent, is_fast) for is_fast in (False, True)
        ]
        assert [one.gather_kv for one in found] == [slow, fast]
        assert {replace(one, gather_kv=False, box_full_head=False) for one in found} == {
            replace(config, gather_kv=False)
        }


def test_fast_memory_keeps_tma_for_merged_heads():
    """Two merged heads of 120 are gathered for up to 64 packed rows. For more rows TMA loads them if memory is fast."""
    attention = AttentionShape(32, 8, 120, 64)
    for rows, gather in ((8, True), (16, False)):
        config = select.select_config(attention, H200, rows, num_reqs=64)
        assert (config.kv_heads_per_tile, config.gather_kv) == (2, True)
        assert select.adapt_to_cache(attention, H200, config, True, True, True, True) == replace(
            config, gather_kv=gather
        )


@pytest.mark.parametrize(
    ("kilohertz", "bits", "fast"), [(3201000, 6144, True), (2619000, 5120, False), (0, 5120, False)]
)
def test_has_fast_memory(kilohertz, bits, fast, monkeypatch):
    """An H200's bandwidth counts as fast, an H100's does not, and unknown values do not."""
    options = SimpleNamespace(memory_clock_rate=kilohertz, memory_bus_width=bits)
    for one in (options, SimpleNamespace()):
        tma.has_fast_memory.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, one=one: one)
        assert tma.has_fast_memory(torch.device("cuda", 0)) is (fast and one is options)
    tma.has_fast_memory.cache_clear()


@pytest.mark.parametrize(
    ("head_dim", "dtypes", "rows", "gather"),
    [
        *((head_dim, BF16, rows, True) for head_dim in (40, 72, 96, 120, 136, 160, 248) for rows in (1, 17, 64, 128)),
        *((head_dim, BF16, rows, False) for head_dim in (64, 128, 192, 256) for rows in (1, 64, 128)),
        *((head_dim, BF16, 129, False) for head_dim in (40, 96, 160)),
        *((head_dim, E4M3, rows, False) for head_dim in (96, 160) for rows in (1, 64, 128)),
    ],
)
@pytest.mark.parametrize("page_size", [32, 64])
def test_partial_cache_line_heads_are_gathered(head_dim, dtypes, rows, gather, page_size):
    """Heads that do not fill cache lines are gathered up to 128 packed rows, except in EXTEND and over e4m3."""
    attention = shape(head_dim, dtypes, page_size)
    for num_reqs in (1, SOME):
        assert select.select_config(attention, H200, rows, num_reqs=num_reqs).gather_kv is gather
    assert not select.select_config(attention, H200, rows, num_reqs=SOME, prefill=True).gather_kv


@pytest.mark.parametrize(
    ("rows", "reqs", "ctas_per_sm"),
    [
        *((16, reqs, 2) for reqs in (66, 132, 380)),
        *((rows, 66, 2) for rows in (17, 32)),  # requests are split with one CTA an SM and with two
        *((rows, 125, 2) for rows in (17, 32)),
        *((rows, 126, 1) for rows in (17, 32, 64)),  # one CTA for each request
        *((rows, 132, 1) for rows in (17, 32, 64, 128)),
        *((rows, 133, 2) for rows in (17, 32)),
        *((rows, 250, 2) for rows in (17, 32)),
        *((64, reqs, 1) for reqs in (66, 133, 250)),
        *((rows, reqs, 2) for rows in (17, 64) for reqs in (251, 300, 512)),
        *((rows, reqs, 1) for rows in (17, 32, 64) for reqs in (380, 640)),  # each CTA: 3 or 5 whole requests
        *((rows, reqs, 2) for rows in (65, 112) for reqs in (66, 132)),
        *((rows, 125, 2) for rows in (113, 128)),
        *((rows, 126, 1) for rows in (113, 128)),
        *((rows, 133, 1) for rows in (65, 128)),
    ],
)
def test_ctas_per_sm(rows, reqs, ctas_per_sm):
    """Two CTAs share an SM unless only one CTA an SM avoids splits; above 64 rows they need few requests."""
    config = select.select_config(shape(128, page_size=64), H200, rows, num_reqs=reqs)
    assert config.ctas_per_sm == ctas_per_sm


@pytest.mark.parametrize(
    ("rows", "reqs", "page_size", "gather"),
    [
        *((rows, reqs, page, page < 32) for rows in (17, 64) for reqs in (126, 132) for page in (8, 16, 24, 32, 64)),
        *((64, reqs, 16, True) for reqs in (67, 100)),
        *((64, reqs, 16, False) for reqs in (66, 133, 251, 380)),  # two CTAs an SM, or more than one request a CTA
        *((32, reqs, 16, False) for reqs in (66, 133, 251, 380)),
        *((rows, 132, 16, False) for rows in (16, 65, 128, 129)),
    ],
)
def test_sole_cta_per_sm_gathers_small_pages(rows, reqs, page_size, gather):
    """With one CTA an SM and heads of 65 to 128, pages below 32 tokens are gathered; other fields are unchanged."""
    config = select.select_config(shape(128, page_size=page_size), H200, rows, num_reqs=reqs)
    assert config.gather_kv is gather
    if reqs > 66:
        assert replace(config, gather_kv=False) == select.select_config(
            shape(128, page_size=64), H200, rows, num_reqs=reqs
        )
    for head_dim, dtypes in ((64, BF16), (192, BF16), (256, BF16), (128, E4M3)):
        assert not select.select_config(shape(head_dim, dtypes, page_size), H200, rows, num_reqs=reqs).gather_kv


@pytest.mark.parametrize(
    ("head_dim", "dtypes", "page_size", "rows", "full_head"),
    [
        *((128, BF16, page, rows, True) for page in (8, 16, 64) for rows in (1, 16, 17, 64, 129)),
        (128, BF16, 64, 65, True),
        (128, ("float16",) * 2, 16, 1, True),
        *((head_dim, BF16, 16, 17, False) for head_dim in (64, 96, 120, 136, 256)),
        *((head_dim, E4M3, 16, rows, False) for head_dim in (128, 256) for rows in (1, 65)),
        (128, BF16, 4, 1, False),  # keys are gathered, not loaded by TMA
    ],
)
def test_box_has_a_full_head_of_256_bytes(head_dim, dtypes, page_size, rows, full_head):
    """A box holds one full head of 256 bytes or two merged heads of 128 bytes, if a token's heads are adjacent."""
    attention = shape(head_dim, dtypes, page_size)
    for is_prefill in (False, True):
        config = select.select_config(attention, H200, rows, prefill=is_prefill, num_reqs=SOME)
        found = select.adapt_to_cache(attention, H200, config, True, True)
        assert found == replace(config, box_full_head=full_head)
        assert not select.adapt_to_cache(attention, H200, config, True, True, adjacent_heads=False).box_full_head
        assert not select.fallback_config(attention, found).box_full_head
    two_heads = AttentionShape(8, 8, 64, 16)
    config = select.select_config(two_heads, H200, 1, num_reqs=SOME)
    assert config.kv_heads_per_tile == 2
    assert select.adapt_to_cache(two_heads, H200, config, True, True).box_full_head


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtypes", "page_size", "q_len", "num_reqs", "merged"),
    [
        *((8, head_dim, BF16, 16, 1, 64, True) for head_dim in (40, 48, 64, 72, 80, 96, 104, 120)),
        *((8, head_dim, BF16, 16, 1, 64, False) for head_dim in (128, 136, 160, 256)),
        (8, 64, ("float16",) * 2, 64, 4, 64, True),
        (8, 96, BF16, 64, 4, 64, True),
        (8, 64, BF16, 16, 5, 60, False),  # 40 packed rows of one head, 80 of both, more than a row tile of 64
        (7, 64, BF16, 16, 1, 64, False),
        (8, 64, E4M3, 16, 1, 64, True),
        (8, 96, E4M3, 16, 2, 64, True),
        (8, 96, E4M3, 16, 3, 64, False),  # 24 rows of one head, 48 of both; registers hold only 32
        (8, 128, E4M3, 16, 1, 64, False),
        (8, 64, BF16, 4, 1, 64, True),  # keys are gathered, not loaded by TMA
        (8, 96, BF16, 1, 1, 64, True),
        (8, 64, E4M3, 4, 1, 64, False),
        (8, 64, BF16, 16, 1, 4, False),
        (8, 64, BF16, 16, 1, 5, True),
    ],
)
def test_two_kv_heads_merge_for_few_rows(kv_heads, head_dim, dtypes, page_size, q_len, num_reqs, merged):
    """Two KV heads are processed as one with twice the head_dim, so a split has half the CTAs, and splits double.

    If a cache's heads are not adjacent, they are processed one by one in the same splits, and partial results fit.
    """
    attention = AttentionShape(8 * kv_heads, kv_heads, head_dim, page_size, *dtypes)
    config = select.select_config(attention, H200, q_len, num_reqs=num_reqs)
    assert (config.kv_heads_per_tile == 2) is merged
    assert select.select_config(attention, H200, q_len, prefill=True, num_reqs=num_reqs).kv_heads_per_tile == 1
    if not merged:
        return
    wide_shape = replace(attention, head_dim=2 * head_dim, num_kv_heads=kv_heads // 2)
    # control: one KV head, which cannot be merged
    single_head = AttentionShape(16, 1, 2 * head_dim, page_size, *dtypes)
    wide_config = select.select_config(single_head, H200, q_len if dtypes is E4M3 else 1, num_reqs=num_reqs)
    assert replace(config, kv_heads_per_tile=1) == wide_config
    num_splits = split_kv.choose_num_splits(attention, H200, config, q_len, num_reqs, 4096)
    assert num_splits == split_kv.choose_num_splits(wide_shape, H200, wide_config, q_len, num_reqs, 4096)
    unmerged = select.adapt_to_cache(attention, H200, config, True, True, adjacent_heads=False)
    assert (
        unmerged == sm90.unmerged_config(attention, config)
        and unmerged.kv_heads_per_tile == 1
        and unmerged.block_n == config.block_n
    )
    if dtypes is E4M3 and head_dim == 64:
        # A head of 64 e4m3 values is 32 elements of 16 bits, and upcasting in registers needs at least 64 of those. So
        # producer warps upcast (2d).
        assert described(unmerged) == "64x64 4w 4s 1p 1m 2d"
    else:
        assert unmerged == wide_config
    assert select.fallback_config(attention, config).kv_heads_per_tile == 1
    limits = Limits(num_reqs, 4095)
    geometry = Geometry.create(attention, limits, DraftShape(), H200, (Mode.DECODE,))
    assert split_kv.partial_rows(attention, unmerged, num_splits, 1) <= sizing.split_sizes(geometry, 1, num_reqs)[1]


@pytest.mark.parametrize(
    ("head_dim", "rows", "num_reqs", "expected"),
    [
        *((64, rows, 64, "128x64 8w 6s 1p 2m 2h") for rows in (9, 16)),
        (64, 16, 32, "128x64 8w 6s 1p 2m 2h"),
        (64, 16, 63, "128x64 8w 6s 1p 2m 2h"),
        (64, 16, 128, "128x64 8w 6s 1p 2m 2h"),
        *((64, 16, num_reqs, "64x128 4w 3s 2p 1m") for num_reqs in (1, 8, 31, 34, 40, 62, 100)),
        (64, 17, 64, "128x128 8w 6s 1p 2m"),
        (96, 16, 64, "128x64 8w 3s 1p 2m 2h"),
        (120, 16, 64, "128x64 8w 2s 1p 2m 2h gather"),
        (48, 16, 64, "128x64 8w 6s 1p 2m 2h gather"),
        *((head_dim, 16, 64, "64x64 4w 5s 2p 1m gather") for head_dim in (72, 80)),
        (88, 16, 64, "64x64 4w 4s 2p 1m gather"),
        (40, 16, 64, "64x128 4w 3s 2p 1m gather"),
        (64, 8, 64, "64x64 4w 3s 2p 1m 2h"),
    ],
)
def test_two_kv_heads_merge_when_requests_fill_ctas(head_dim, rows, num_reqs, expected):
    """Two KV heads with 65 to 128 rows in total merge if unsplit requests fill the SMs and padding is small."""
    attention = AttentionShape(32, 8, head_dim, 64)
    config = select.select_config(attention, H200, rows, num_reqs=num_reqs)
    assert described(config) == expected
    num_splits = split_kv.choose_num_splits(attention, H200, config, rows, num_reqs, 4096)
    geometry = Geometry.create(attention, Limits(num_reqs, 4000), DraftShape(4, 4, rows), H200, (Mode.VERIFY,))
    most, partials = sizing.split_sizes(geometry, rows, num_reqs)
    assert num_splits <= most
    for one in (config, sm90.unmerged_config(attention, config)):
        assert split_kv.partial_rows(attention, one, num_splits, rows) <= partials


def test_merge_heads_doubles_the_head_dim():
    """Heads that are adjacent within a token can be viewed as one, at any stride of tokens and pages."""
    kv = torch.arange(2 * 3 * 4 * 6 * 8).view(2, 3, 4, 6, 8)  # each page holds K and V
    k, v = kv[:, 1], kv[:, 2]
    assert has_adjacent_heads(k, v) and not has_adjacent_heads(k, v.transpose(1, 2).contiguous().transpose(1, 2))
    merged = tma.merge_heads(k, 2)
    assert merged.shape == (2, 4, 3, 16) and merged.data_ptr() == k.data_ptr()
    assert torch.equal(merged[1, 2, 1], torch.cat([k[1, 2, 2], k[1, 2, 3]]))
    assert tma.merge_heads(k, 1) is k


@pytest.mark.parametrize(
    ("head_dim", "dtypes", "rows", "served"),
    [
        *((head_dim, BF16, 65, True) for head_dim in (64, 128, 256)),
        *((head_dim, E4M3, 65, head_dim < 256) for head_dim in (64, 128, 256)),
        *((head_dim, BF16, 17, head_dim <= 128) for head_dim in (64, 128, 256)),
        *((head_dim, BF16, 16, head_dim <= 128) for head_dim in (64, 128, 256)),
        *((head_dim, E4M3, 16, False) for head_dim in (64, 128, 256)),
    ],
)
def test_softmax_overlaps_when_registers_suffice(head_dim, dtypes, rows, served):
    """Softmax overlaps MMAs with two consumer warp groups, with one for 16-bit heads up to 160, never with three."""
    config = select.select_config(shape(head_dim, dtypes), H200, rows)
    assert sm90.overlaps_softmax(config, head_dim) is served
    assert not sm90.overlaps_softmax(replace(config, num_consumer_wgs=3), head_dim)
    # With two CTAs an SM, four gathering warps leave each consumer thread 24 registers fewer, too few to overlap.
    gathered = replace(config, gather_kv=True)
    assert sm90.overlaps_softmax(gathered, head_dim) is (
        served and (config.num_consumer_wgs == 2 or config.ctas_per_sm == 1)
    )


@pytest.mark.parametrize(
    ("num_reqs", "kv_heads", "two_ctas"),
    [
        *((num_reqs, 8, num_reqs in (32, 64)) for num_reqs in (1, 16, 31, 32, 48, 64, 80)),
        *((num_reqs, 1, num_reqs == 251) for num_reqs in (250, 251, 380)),
    ],
)
def test_two_ctas_per_sm_for_many_requests(num_reqs, kv_heads, two_ctas):
    """Many requests use two CTAs an SM if unsplit (request, KV head) pairs fill 95 % of these CTAs.

    Other row counts, heads of 64 and 256, e4m3 and gathered keys have one configuration for any number of requests.
    """
    attention = AttentionShape(4 * kv_heads, kv_heads, 128, 64)
    one, many = (select.select_config(attention, H200, 16, num_reqs=count) for count in (1, num_reqs))
    assert described(one) == "64x128 4w 3s 1p 1m"
    assert many == (replace(one, block_n=64, ctas_per_sm=2) if two_ctas else one)
    most = split_kv.even_splits(split_kv.choose_num_splits(attention, H200, many, 16, num_reqs, 4096), num_reqs)
    assert not two_ctas or most <= num_reqs
    for rows, head_dim, dtypes, page in (
        (4, 128, BF16, 16), (16, 64, BF16, 16), (16, 256, BF16, 16), (16, 128, E4M3, 16),
        (16, 128, BF16, 1),
    ):  # fmt: skip
        other = AttentionShape(4, 1, head_dim, page, *dtypes)
        assert select.select_config(other, H200, rows, num_reqs=num_reqs) == select.select_config(
            other, H200, rows, num_reqs=SOME
        )


@pytest.mark.parametrize(
    ("rows", "num_reqs", "two_ctas"),
    [
        (5, 1, True),
        (8, 1, True),
        (8, 8, True),
        (8, 15, True),
        (5, 16, False),
        (5, 17, True),
        (9, 1, False),
        (16, 8, False),
    ],
)
def test_two_ctas_per_sm_for_few_requests_of_few_rows(rows, num_reqs, two_ctas):
    """Few requests of up to 32 packed rows use two CTAs an SM, unless one CTA an SM avoids all splits."""
    config = select.select_config(AttentionShape(32, 8, 128, 64), H200, rows, num_reqs=num_reqs)
    assert described(config) == ("64x64 4w 3s 2p 1m" if two_ctas else "64x128 4w 3s 1p 1m")


@pytest.mark.parametrize(
    ("rows", "num_reqs", "page_size", "two_ctas"),
    [
        *((rows, num_reqs, page, page < 64) for rows in (9, 16) for num_reqs in (1, 8) for page in (16, 32, 64, 128)),
        *((16, num_reqs, 16, False) for num_reqs in (9, 16, 31)),
        (16, 32, 16, True),
    ],
)
def test_two_ctas_per_sm_for_small_pages(rows, num_reqs, page_size, two_ctas):
    """With small pages, 33 to 64 rows use two CTAs an SM too, as long as each request has at least two splits."""
    config = select.select_config(AttentionShape(32, 8, 128, page_size), H200, rows, num_reqs=num_reqs)
    assert described(replace(config, gather_kv=False)) == ("64x64 4w 3s 2p 1m" if two_ctas else "64x128 4w 3s 1p 1m")


@pytest.mark.parametrize(
    ("heads", "rows", "num_reqs", "two_ctas"),
    [
        *((heads, rows, 1, True) for heads, rows in (((28, 4), 16), ((40, 8), 16), ((64, 8), 16), ((32, 8), 32))),
        *(((64, 8), 16, num_reqs, num_reqs <= 15) for num_reqs in (5, 15, 16)),
        *(((32, 8), rows, num_reqs, False) for rows in (33, 64) for num_reqs in (1, 64)),
        *(((28, 4), 16, num_reqs, num_reqs <= 33) for num_reqs in (33, 34)),
        *(((40, 8), 16, num_reqs, num_reqs <= 16) for num_reqs in (16, 17)),
        ((32, 8), 16, 9, False),
    ],
)
def test_two_ctas_of_64_rows_for_few_requests(heads, rows, num_reqs, two_ctas):
    """Few requests of 65 to 128 rows use two CTAs an SM: more requests if the second row tile has much padding.

    Other head_dims, e4m3 and gathered keys have one configuration for any number of requests.
    """
    few, many = (
        select.select_config(AttentionShape(*heads, 128, 16), H200, rows, num_reqs=count) for count in (num_reqs, 1000)
    )
    assert (described(few) == "64x64 4w 3s 2p 1m") is two_ctas
    assert two_ctas or few.block_m == many.block_m
    for head_dim, dtypes, page in ((64, BF16, 16), (256, BF16, 16), (128, E4M3, 16), (128, BF16, 1)):
        # control: one KV head, which cannot be merged
        other = AttentionShape(heads[0] // heads[1], 1, head_dim, page, *dtypes)
        assert select.select_config(other, H200, rows, num_reqs=num_reqs) == select.select_config(
            other, H200, rows, num_reqs=1000
        )


@pytest.mark.parametrize(
    ("head_dim", "dtypes", "page_size", "three_groups"),
    [
        *((head_dim, BF16, 16, head_dim <= 80) for head_dim in (40, 64, 72, 80, 88, 128, 256)),
        *((64, *rest, False) for rest in ((E4M3, 16), (BF16, 1), (FP32, 16))),
    ],
)
def test_prefill_uses_three_warp_groups_up_to_head_dim_80(head_dim, dtypes, page_size, three_groups):
    """EXTEND uses three consumer warp groups for 16-bit heads of up to 80 with TMA, and needs no more row tiles."""
    attention = shape(head_dim, dtypes, page_size)
    few, config = (select.select_config(attention, H200, 4096, prefill=extend) for extend in (False, True))
    assert config == (
        replace(few, block_m=192, num_consumer_wgs=3, num_stages=config.num_stages) if three_groups else few
    )
    assert common.max_row_tiles(config, 1, 4096, 3) <= common.max_row_tiles(few, 1, 4096, 3)


@pytest.mark.parametrize(
    ("heads", "rows", "lens", "num_groups"),
    [
        ((24, 8), 512, (32768,), 3), ((24, 8), 2048, (0,) * 8, 3), ((24, 8), 256, (4096,) * 8, 3),
        ((40, 8), 512, (32768,), 2), ((40, 8), 256, (4096,) * 8, 2), ((32, 32), 4096, (0,) * 4, 2),
        ((32, 8), 512, (32768,), 2), ((24, 8), 40, (8192,) * 4, 2), ((24, 8), 512, None, 2),
    ],
)  # fmt: skip
def test_prefill_of_heads_of_96_takes_the_faster_number_of_warp_groups(heads, rows, lens, num_groups):
    """EXTEND over heads of 96 uses three consumer warp groups where they were measured to be faster than two."""
    attention, q_lens = AttentionShape(*heads, 96, 16), (rows,) * (1 if lens is None else len(lens))
    usual = select.select_config(attention, H200, 4096, prefill=True)
    found = split_kv.fastest_config(attention, H200, usual, q_lens, lens)
    assert usual.num_consumer_wgs == 2 and found.num_consumer_wgs == num_groups
    assert found in sm90.prefill_configs(attention, usual)


@pytest.mark.parametrize(("head_dim", "window_left", "block_n"), [(64, -1, 128), (128, -1, 128), (128, 4096, 64)])
def test_e4m3_of_many_rows_has_tiles_of_128_keys_without_a_window(head_dim, window_left, block_n):
    """More than 64 rows over e4m3 have tiles of 128 keys; the masks of a window leave registers for 64."""
    attention = replace(shape(head_dim, E4M3, 16), window_left=window_left)
    for rows, prefill in ((65, False), (300, False), (4096, True)):
        config = select.select_config(attention, H200, rows, prefill=prefill)
        assert (config.block_m, config.block_n, config.num_consumer_wgs) == (128, block_n, 2)


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 48])
@pytest.mark.parametrize("dtypes", [BF16, E4M3, FP32])
@pytest.mark.parametrize("head_dim", [32, 64, 72, 80, 88, 96, 120, 128, 256])
def test_every_extend_batch_has_one_of_the_planned_configurations(head_dim, dtypes, page_size):
    """EXTEND chooses among `prefill_configs`, for which kernels are planned; the first of them is the usual one."""
    attention = shape(head_dim, dtypes, page_size)
    usual = select.select_config(attention, H200, 4096, prefill=True)
    planned = sm90.prefill_configs(attention, usual)
    assert planned[0] == usual
    for rows, lens in (((5, 1, 17), (0, 2, 1)), ((512,), (32768,)), ((256,) * 8, (4096,) * 8), ((512,), None)):
        assert split_kv.fastest_config(attention, H200, usual, rows, lens) in planned


@pytest.mark.parametrize("head_dim", [64, 80, 104, 128])
def test_other_heads_have_one_number_of_warp_groups(head_dim):
    """EXTEND over heads without 81 to 96 columns has one configuration, whatever the lengths."""
    attention = shape(head_dim, BF16, 16)
    usual = select.select_config(attention, H200, 4096, prefill=True)
    assert sm90.prefill_configs(attention, usual) == (usual,)
    assert split_kv.fastest_config(attention, H200, usual, (512,), (32768,)) is usual


@pytest.mark.parametrize(
    ("heads", "rows", "lens", "block_m"),
    [
        ((32, 8), 28, (8192,) * 8, 64), ((32, 8), 28, (8192,) * 5, 128), ((32, 8), 28, None, 64),
        ((32, 8), 16, (8192,) * 5, 64), ((32, 8), 29, (8192,) * 8, 128),
        ((28, 4), 16, (4096,) * 3, 64), ((28, 4), 16, (4400, 100, 8700), 128), ((28, 4), 16, (4096,) * 11, 128),
        ((28, 4), 16, (4096,) * 12, 64),
    ],
)  # fmt: skip
def test_few_chunks_load_many_keys_once(heads, rows, lens, block_m):
    """Few chunks of 65 to 112 rows keep one CTA an SM if the host's length bounds are large and there is no window."""
    attention, count = AttentionShape(*heads, 128, 16), 5 if lens is None else len(lens)
    unsplit = select.select_config(attention, H200, 4096, prefill=True)
    found = split_kv.split_config(attention, H200, unsplit, (rows,) * count, lens)
    assert (found.block_m, found.ctas_per_sm) == (block_m, 2 if block_m == 64 else 1)
    windowed = replace(attention, window_left=100)
    assert split_kv.split_config(windowed, H200, unsplit, (rows,) * count, lens).block_m == (64 if rows < 29 else 128)


@pytest.mark.parametrize(
    ("heads", "head_dim", "rows", "lens", "expected"),
    [
        ((16, 4), 256, 512, (0,), False), ((16, 4), 256, 1064, (0,), False), ((16, 8), 256, 2240, (0,), False),
        ((8, 2), 256, 2069, (0,), False), ((4, 2), 256, 2415, (0,) * 3, False), ((8, 1), 256, 543, (0,), False),
        ((16, 8), 192, 1453, (0,), False), ((8, 4), 192, 1810, (0,) * 2, False), ((4, 2), 192, 2355, (0,) * 3, False),
        ((16, 4), 256, 256, (8192,), True), ((16, 4), 256, 804, (7139,) * 4, True), ((8, 1), 256, 1482, (0,), True),
        ((8, 2), 192, 519, (293,), True), ((8, 2), 192, 945, (0,), True), ((16, 4), 256, 64, (8192,) * 8, True),
    ],
)  # fmt: skip
def test_large_heads_split_only_where_measured_faster(heads, head_dim, rows, lens, expected):
    """Batches with large heads are split only where splitting was measured to be faster.

    Partial results of many columns take long to store and combine. So prompts of little more than one row tile a CTA
    stay unsplit, while few row tiles after long prefixes are split.
    """
    attention, q_lens = AttentionShape(*heads, head_dim, 16), (rows,) * len(lens)
    config = split_kv.split_config(
        attention, H200, select.select_config(attention, H200, 4096, prefill=True), q_lens, lens
    )
    assert split_kv.splitting_pays(attention, H200, config, q_lens, lens) == expected


def test_row_tiles_splits_and_partials():
    """Row tiles, splits and partial rows equal values computed by hand, for 32/8 heads of 128 on 132 SMs."""
    attention, config = AttentionShape(32, 8, 128, 16), KernelConfig(64, 64, 4, 3, 2)
    assert [common.row_tiles(config, q_len, 4) for q_len in (1, 16, 17, 64)] == [1, 1, 2, 4]
    # Two CTAs on each of 132 SMs are 264 CTAs. A split has one CTA for each of 8 KV heads: 264 / 8 = 33 splits.

    assert split_kv.choose_num_splits(attention, H200, config, 1, 64, 4096) == 33
    # 17 rows are two row tiles, so a split has 16 CTAs.
    assert split_kv.choose_num_splits(attention, H200, config, 17, 64, 4096) == 16

    # 4096 keys are 64 tiles, so 33 splits of one request are possible. 512 keys are 8 tiles, plus two OVERHEAD_TILES.
    assert split_kv.choose_num_splits(attention, H200, config, 1, 1, 4096) == 33
    assert split_kv.choose_num_splits(attention, H200, config, 1, 1, 512) == 10
    assert split_kv.choose_num_splits(attention, H200, config, 1, 1, 448) == 9
    assert split_kv.choose_num_splits(attention, H200, config, 1, 2, 512) == 20
    assert split_kv.choose_num_splits(attention, H200, replace(config, block_m=16), 1, 1, 512) == 10
    assert split_kv.choose_num_splits(attention, H200, config, 10000, 1, 64) == 1
    # In each split at most two requests are cut, each with a row tile of 64 packed rows for each of 8 KV heads.
    assert split_kv.partial_rows(attention, config, 33, 1) == 2 * 33 * 8 * 64
    assert split_kv.partial_rows(attention, config, 16, 17) == 2 * 16 * 8 * 2 * 64
    assert split_kv.partial_rows(attention, config, 1, 17) == 0
    assert common.max_row_tiles(replace(config, block_n=32), 4, 100, 7) == 6 + 7


@pytest.mark.parametrize(
    ("num_splits", "num_reqs", "expected"),
    [
        (20, 19, 19),
        (20, 18, 20),
        (20, 21, 20),
        (20, 57, 19),
        (20, 58, 20),
        (19, 36, 19),
        (40, 76, 38),
        (39, 74, 39),
        (5, 5, 5),
    ],
)
def test_even_splits_drops_at_most_a_twentieth(num_splits, num_reqs, expected):
    """`even_splits` drops at most a twentieth of the splits, and only if requests of equal length then stay whole."""
    assert split_kv.even_splits(num_splits, num_reqs) == expected


@pytest.mark.parametrize(
    ("page_size", "block_n", "max_kv_len", "keys"),
    [
        (16, 64, 5, 16),
        (16, 64, 9, 16),
        (16, 64, 100, 128),
        (16, 64, 5000, 256),
        (64, 64, 5000, 64),
        (128, 64, 5000, 128),
        (1024, 64, 9, 256),
    ],
)
def test_block_n_of_an_interpreted_config(page_size, block_n, max_kv_len, keys):
    """block_n divides the page size if a tile lies in one page; else it covers the longest request, up to 256 keys."""
    config, _ = interpreted.interpreted_config(
        shape(128, page_size=page_size), KernelConfig(16, block_n, 4, 3, 2), 1, 9, max_kv_len
    )
    assert config.block_n == keys


@pytest.mark.parametrize(("max_kv_len", "num_splits"), [(128, 1), (256, 1), (257, 2)])
def test_request_of_one_tile_is_not_split(max_kv_len, num_splits):
    """A request of one tile has one split, since a second one would have no work."""
    assert interpreted.interpreted_config(shape(128), KernelConfig(16, 64, 4, 3, 2), 1, 9, max_kv_len)[1] == num_splits


def test_interpreted_row_tiles_grow_up_to_256_rows():
    """Row tiles grow while partial results fit the allocated rows, up to the rows of a request."""
    config = KernelConfig(16, 64, 4, 3, 2)
    found = {
        q_len: interpreted.interpreted_config(shape(128), config, q_len, 132, 700)[0].block_m
        for q_len in (1, 16, 17, 33, 1000)
    }
    assert found == {1: 16, 16: 16, 17: 32, 33: 64, 1000: 256}
    assert interpreted.interpreted_config(shape(128), config, 1000, 1, 700)[0].block_m == 256
    # Two splits of 1024 rows need no more partial rows than were allocated, so row tiles grow to 256.
    assert interpreted.interpreted_config(shape(128), config, 1024, 2, 700)[0].block_m == 256
    # 1000 rows are 63 tiles of 16 rows. 32 tiles of 32 rows would exceed the allocation by 16 rows.
    assert interpreted.interpreted_config(shape(128), config, 1000, 2, 700)[0].block_m == 16

    ragged, one = interpreted.interpreted_prefill_config(shape(128), config, 700, 1)
    assert (ragged.block_m, ragged.block_n, one) == (256, 256, 1)
    assert interpreted.interpreted_prefill_config(shape(128), replace(config, block_m=512), 700, 1)[0].block_m == 512
    assert interpreted.interpreted_prefill_config(shape(128, page_size=64), config, 9, 1)[0].block_n == 64
    # Two splits of 256 rows fit into the partial rows allocated for 32 splits of 16 rows, but not into those for 31.
    for num_splits, rows in ((32, 256), (31, 16)):
        ragged, few = interpreted.interpreted_prefill_config(shape(128), config, 700, num_splits)
        assert (ragged.block_m, few) == (rows, 2)


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_powers_of_two(n, power):
    """next_power_of_two returns the smallest power of two that is at least n."""
    assert common.next_power_of_two(n) == power
