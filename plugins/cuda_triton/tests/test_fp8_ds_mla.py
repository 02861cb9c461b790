"""Latent rows of 656 bytes: whole forwards of every mode against float64, selection, and compilation."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import FP8_DS_MLA, AttentionShape, DeviceProfile, Form, Mode, load
from draftmark_cuda_triton.heuristics import latent as heuristics
from draftmark_cuda_triton.heuristics import select
from plugins.cuda_triton.tests import helpers
from plugins.cuda_triton.tests.test_latent import assert_right
from plugins.cuda_triton.tools.chosen_batches import draw_chosen
from plugins.cuda_triton.tools.latent_batches import Sizes, draw

STORED = (Form.ENGINE_STORES,)


def rows_of(heads: int, page: int, **fields) -> AttentionShape:
    """Return a layer with rows of 656 bytes."""
    return AttentionShape(
        heads, 1, 576, page, "bfloat16", "float8_e4m3fn", softmax_scale=192**-0.5, value_dim=512, latent=True,
        row_format=FP8_DS_MLA, **fields,
    )  # fmt: skip


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_every_mode_equals_float64(mode):
    """Outputs and lse of random batches are right on pages of any size; parts of unwritten rows are NaN."""
    for seed in range(3):
        chance = random.Random(seed)
        shape = rows_of(chance.choice((1, 5, 12, 20)), chance.choice((1, 16, 48, 64, 128)))
        assert_right(draw(shape, mode, seed, helpers.DEVICE, forms=STORED), helpers.DEVICE)


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.VERIFY, Mode.EXTEND], ids=lambda mode: mode.value)
@pytest.mark.parametrize("fields", [{"window_left": 20}, {"logits_soft_cap": 1.5}, {"sinks": True}], ids=str)
def test_windows_caps_and_sinks(mode, fields):
    """Rows of 656 bytes have windows, caps and sinks, also when a request is split."""
    assert_right(draw(rows_of(5, 16, **fields), mode, 1, helpers.DEVICE, Sizes(3, 400, 6), STORED), helpers.DEVICE)


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_chosen_keys_equal_float64(mode):
    """Rows with lists of keys are right for lists of any length, with holes and stale entries."""
    for seed in range(2):
        shape = rows_of((12, 5)[seed], (16, 1)[seed], chosen_width=(48, 33)[seed])
        problem = draw_chosen(shape, mode, seed, helpers.DEVICE, forms=STORED)
        backend = load("cuda_triton").open(problem.geometry, helpers.DEVICE, guard=helpers.DEVICE == "cpu")
        out, lse = problem.new_out()
        backend.plan(problem.batch)
        backend.write_metadata(problem.batch)
        backend.attend(problem.q, problem.cache, problem.batch, out, lse)
        expected, expected_lse = problem.expected()
        live = len(expected)
        assert (out[:live].cpu().double() - expected).norm() < 4e-3 * expected.norm() and out.isfinite().all()
        torch.testing.assert_close(lse[:live].cpu().double(), expected_lse, atol=2e-2, rtol=0)


def test_scales_are_not_rounded():
    """An output of one key is its value to q's precision, for scales that no 16-bit dtype has."""
    problem = draw(rows_of(3, 16), Mode.DECODE, 0, helpers.DEVICE, Sizes(1, 0, 1), STORED)
    backend = load("cuda_triton").open(problem.geometry, helpers.DEVICE)
    out, _ = problem.new_out()
    backend.plan(problem.batch)
    backend.write_metadata(problem.batch)
    backend.attend(problem.q, problem.cache, problem.batch, out)
    value = problem.stored()[1][problem.requests[0].slots(16)[0]]
    # p · scale is rounded to bfloat16 once, and the output once.
    assert ((out[0].cpu().double() - value).abs() <= value.abs() * 2 * 2**-8).all()


def test_rows_take_the_portable_kernel():
    """On sm_90 rows of 656 bytes take a portable tile, and the reason names the format."""
    shape, device = rows_of(16, 64), DeviceProfile("cuda", 90, 132)
    assert any("fp8_ds_mla" in one for one in heuristics.reasons_against_sm90(shape, device))
    assert select.select_config(shape, device, 4).num_consumer_wgs == 0
