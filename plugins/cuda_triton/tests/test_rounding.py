"""Layers that let attention round q and weights to e4m3: which batches use that, and what it changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmark import AttentionShape, DraftShape, Geometry, Limits
from draftmark_cuda_triton import sizing
from draftmark_cuda_triton.heuristics import select, upcast
from draftmark_cuda_triton.heuristics.common import Kernel
from plugins.cuda_triton.tests.shapes import B200, H200

ROUNDS = AttentionShape(32, 8, 128, 16, kv_dtype="float8_e4m3fn", round_to_e4m3=True)


@pytest.mark.parametrize(
    ("changes", "rows", "prefill", "expected"),
    [
        ({}, 1, False, Kernel.SM90_FP8), ({}, 16, False, Kernel.SM90_FP8), ({}, 17, False, Kernel.SM90_ROUNDED),
        ({}, 256, False, Kernel.SM90_ROUNDED), ({}, 4096, True, Kernel.SM90_ROUNDED),
        ({"head_dim": 64, "num_kv_heads": 1}, 3, False, Kernel.SM90_ROUNDED),
        ({"head_dim": 96}, 64, False, Kernel.SM90), ({"head_dim": 256}, 64, False, Kernel.SM90),
        ({"round_to_e4m3": False}, 64, False, Kernel.SM90),
        ({"window_left": 100}, 64, False, Kernel.SM90_ROUNDED),
    ],
)  # fmt: skip
def test_batches_above_64_packed_rows_round(changes, rows, prefill, expected):
    """More than 64 packed rows are multiplied in e4m3 where the layer allows it and the kernel has the columns."""
    shape = replace(ROUNDS, **changes)
    assert select.select_config(shape, H200, rows, prefill=prefill, num_reqs=16).kernel is expected


def test_other_gpus_never_round():
    """The permission changes nothing on a GPU without the kernel."""
    exact = replace(ROUNDS, round_to_e4m3=False)
    assert select.select_config(ROUNDS, B200, 64) == select.select_config(exact, B200, 64)


def test_keys_are_not_upcast_for_rounded_prompts():
    """A layer that rounds has no buffers for upcast K and V, and its splits fit the buffers that it has."""
    limits = Limits(4, 4096)
    rounded, exact = (
        Geometry.create(shape, limits, DraftShape(), H200) for shape in (ROUNDS, replace(ROUNDS, round_to_e4m3=False))
    )
    assert not upcast.upcasts(rounded.attention, H200) and upcast.upcasts(exact.attention, H200)
    names, more = ({one.name for one in sizing.buffers(geometry)} for geometry in (rounded, exact))
    assert more - names == {sizing.UPCAST_K, sizing.UPCAST_V, sizing.UPCAST_TABLE}
