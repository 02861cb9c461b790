"""Selected kernel configurations, at every boundary between two of them. NOTES.md has the measured times.

The conformance suite cannot test this: in the interpreter every configuration gives equal results, and on a GPU a wrong
one is only slower, or needs more shared memory than exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from draftmark import AttentionShape, DeviceProfile
from draftmark_cuda_triton.heuristics import select, sm90
from draftmark_cuda_triton.heuristics.common import Kernel
from plugins.cuda_triton.tests.shapes import A100, B200, BF16, E4M3, FP32, H200, SOME, described, shape, with_boxes

TABLE = Path(__file__).with_name("selected_configs.txt").read_text(encoding="utf-8")
"""Selected configurations by rule: a line with # has the rule, and each line below it cases of the rule."""
RULES = [one.partition("\n")[::2] for one in TABLE.split("\n# ")[1:]]


def cases(line: str) -> Iterator[tuple[AttentionShape, DeviceProfile, int, bool, int, str]]:
    """Yield shape, device, rows of a request, whether it is a prefill, requests, and the expected configuration."""
    *columns, batches, expected = (column.strip() for column in line.split("|"))
    for device, heads, dim, dtypes, page, window, kind in product(*(column.split(",") for column in columns)):
        (arch, sms), (queries, kvs) = (one.split(sign) for one, sign in ((device, ":"), (heads, "/")))
        q_dtype, _, kv_dtype = dtypes.partition("+")
        attention = AttentionShape(int(queries), int(kvs), int(dim), int(page), q_dtype, kv_dtype or q_dtype)
        if window != "-":
            attention = replace(attention, window_left=int(window))
        for batch in batches.split():
            for rows, reqs in product(*(one.split(",") for one in batch.split("@"))):
                yield attention, DeviceProfile("cuda", int(arch), int(sms)), int(rows), kind != "-", int(reqs), expected


@pytest.mark.parametrize(("rule", "lines"), RULES, ids=[rule[:40] for rule, _ in RULES])
def test_selected_configuration_is_the_measured_one(rule, lines):
    """Each case of the table of rules has the configuration in the table."""
    found = [one for line in lines.strip().splitlines() for one in cases(line)]
    wrong = [
        (one, chosen)
        for *one, expected in found
        for chosen in [described(select.select_config(*one[:3], prefill=one[3], num_reqs=one[4]))]
        if chosen != expected
    ]
    assert found and not wrong, rule


def test_table_has_every_case():
    """The table has all 1,091 cases, and no case with two results."""
    found = [one for _, lines in RULES for line in lines.strip().splitlines() for one in cases(line)]
    results = {}
    for *case, expected in found:
        assert results.setdefault(tuple(case), expected) == expected
    assert len(found) == 1091


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
        assert with_boxes(config) == with_boxes(select.select_config(shape(padded, dtypes), H200, rows))
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
    gathered = replace(config, kernel=Kernel.SM90_GATHER)
    assert sm90.overlaps_softmax(gathered, head_dim) is (
        served and (config.num_consumer_wgs == 2 or config.ctas_per_sm == 1)
    )
