"""Latent rows, narrow values and log-sum-exps: whole forwards of every mode against float64."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Form, Geometry, Limits, Mode, load
from draftmark.lengths import UpperBound
from draftmark.runtime import KVPool, VerifyResult
from draftmark_cuda_triton import sizing, support
from draftmark_cuda_triton.heuristics import select, upcast
from draftmark_cuda_triton.tree_ops import TritonTreeOps
from plugins.cuda_triton.tests import helpers
from plugins.cuda_triton.tools.latent_batches import Problem, Sizes, draw

ROUNDOFF = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 2e-6}
"""Largest relative error of outputs by norm, by dtype of q."""


def latent(heads=3, value=24, rest=8, page=16, dtype="float32", kv=None, **fields) -> AttentionShape:
    """Return a latent shape with a scale that no dimension implies."""
    return AttentionShape(
        heads, 1, value + rest, page, dtype, kv or dtype, softmax_scale=0.21, value_dim=value, latent=True, **fields
    )


def run(problem: Problem, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the four methods of the backend on a problem; return out and lse."""
    backend = load("cuda_triton").open(problem.geometry, device, guard=device == "cpu")
    out, lse = problem.new_out()
    backend.plan(problem.batch)
    backend.write_metadata(problem.batch)
    if Form.ENGINE_STORES not in problem.geometry.forms:
        backend.write_kv(problem.k, problem.v, problem.cache, problem.batch)
    backend.attend(problem.q, problem.cache, problem.batch, out, lse)
    return out.cpu(), lse.cpu()


def assert_right(problem: Problem, device: str, rounded: float | None = None) -> None:
    """Compare outputs, lse and stored rows of a problem with float64; padding rows are finite."""
    out, lse = run(problem, device)
    expected, expected_lse = problem.expected()
    live, a = len(expected), problem.geometry.attention
    error = ((out[:live].double() - expected).norm() / expected.norm()).item()
    assert error < (rounded or ROUNDOFF[a.q_dtype]), (error, problem)
    assert out.isfinite().all() and not lse.isnan().any()
    torch.testing.assert_close(lse[:live].double(), expected_lse, atol=2e-2 if a.q_dtype != "float32" else 2e-5, rtol=0)
    if Form.ENGINE_STORES not in problem.geometry.forms and a.kv_dtype == a.q_dtype:
        k, _ = problem.stored()
        assert torch.equal(k[problem.expected_slots()], problem.k[:live].cpu().double())


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("seed", range(6))
def test_every_mode_equals_float64(mode, seed):
    """Outputs, lse and stored rows of random batches are right, in one buffer, in two, and with engine stores."""
    chance = random.Random(seed)
    page = chance.choice((1, 2, 3, 16, 48, 64, 128))
    value, rest = chance.choice(((24, 8), (32, 0), (16, 16), (40, 9), (128, 32), (5, 2)))
    shape = latent(chance.choice((1, 3, 5, 12, 20)), value, rest, page)
    parts = (Form.LATENT_PARTS,) if rest and seed % 3 == 1 else ()
    forms = parts + ((Form.ENGINE_STORES,) if seed % 3 == 2 else ())
    assert_right(draw(shape, mode, seed, helpers.DEVICE, forms=forms), helpers.DEVICE)


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY, Mode.EXTEND], ids=lambda m: m.value)
@pytest.mark.parametrize("page", [1, 48, 64])
def test_split_requests_equal_float64(mode, page):
    """Requests that lie in several splits have right outputs and lse, for one row tile and for several."""
    shape = latent(20, 64, 16, page)
    problem = draw(shape, mode, page, helpers.DEVICE, Sizes(2, 700, 12))
    assert_right(problem, helpers.DEVICE)


@pytest.mark.parametrize("mode", [Mode.VERIFY, Mode.DRAFT, Mode.DRAFT_BLOCK, Mode.EXTEND], ids=lambda m: m.value)
@pytest.mark.parametrize("fields", [{"window_left": 20}, {"logits_soft_cap": 1.5}, {"sinks": True}], ids=str)
def test_windows_caps_and_sinks(mode, fields):
    """A window counts positions, a cap bounds logits, and a sink counts once and not in the lse, also when split."""
    shape = latent(5, 32, 16, 16, **fields)
    for seed in range(2):
        problem = draw(shape, mode, seed, helpers.DEVICE, Sizes(3, 400, 6))
        assert_right(problem, helpers.DEVICE, 1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17, 33])
@pytest.mark.parametrize("heads", [1, 5, 12, 96, 128])
def test_packed_rows_of_any_number(heads, rows):
    """Row tiles that hold several rows, or a part of one, have right outputs for any number of heads and rows."""
    assert_right(draw(latent(heads, 16, 16, 32), Mode.VERIFY, rows, helpers.DEVICE, Sizes(2, 60, rows)), helpers.DEVICE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("value", "rest"), [(512, 64), (512, 0), (256, 64), (128, 32)])
def test_rows_of_models(value, rest, dtype):
    """Rows of today's models give outputs within rounding, for decode, trees and prompts."""
    for mode in (Mode.DECODE, Mode.RAGGED_VERIFY, Mode.EXTEND):
        shape = AttentionShape(
            16, 1, value + rest, 64, dtype, dtype, softmax_scale=192**-0.5, value_dim=value, latent=True
        )
        assert_right(draw(shape, mode, value + rest, helpers.DEVICE, Sizes(3, 300, 4)), helpers.DEVICE)


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.VERIFY, Mode.EXTEND], ids=lambda m: m.value)
@pytest.mark.parametrize("forms", [(), (Form.LATENT_PARTS,)], ids=["one buffer", "two buffers"])
def test_e4m3_rows(mode, forms):
    """e4m3 rows with their one scale are widened exactly, and new rows are rounded to the nearest e4m3 value."""
    problem = draw(latent(12, 32, 16, 16, "bfloat16", "float8_e4m3fn"), mode, 3, helpers.DEVICE, forms=forms)
    assert_right(problem, helpers.DEVICE)
    k, _ = problem.stored()
    new = problem.k[: len(problem.expected_slots())].cpu().double()
    # The scale is 0.5, and e4m3 has three mantissa bits.
    assert ((k[problem.expected_slots()] - new).abs() <= new.abs() / 16 + 2**-10).all()


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_narrow_values(mode):
    """Values narrower than keys, each in its own tensor, give right outputs in every mode."""
    for seed, (dim, value) in enumerate(((24, 16), (40, 9), (192, 128))):
        shape = AttentionShape(6, 2, dim, 16, "float32", "float32", value_dim=value)
        assert_right(draw(shape, mode, seed, helpers.DEVICE), helpers.DEVICE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.RAGGED_VERIFY, Mode.EXTEND], ids=lambda m: m.value)
def test_lse_of_separate_k_and_v(mode, dtype):
    """Layers with K and V apart also write the lse, padding rows included, and with sinks it covers keys only."""
    for seed in range(3):
        shape = AttentionShape(4, 2, 128, (16, 1, 64)[seed], dtype, dtype, sinks=bool(seed % 2))
        assert_right(draw(shape, mode, seed, helpers.DEVICE, Sizes(3, 400, 5)), helpers.DEVICE)


def test_lse_of_e4m3_prompts_in_head_groups(monkeypatch):
    """EXTEND over e4m3 that upcasts groups of KV heads writes each group's lse to its own columns."""
    for name, value in (("UPCAST_MIN_ROWS", 0), ("UPCAST_LAUNCH_COST", 0), ("UPCAST_BYTES", 300_000)):
        monkeypatch.setattr(upcast, name, value)
    shape = AttentionShape(8, 4, 64, 16, "bfloat16", "float8_e4m3fn")
    problem = draw(shape, Mode.EXTEND, 5, helpers.DEVICE, Sizes(3, 300, 9))
    lens = tuple(one.prefix for one in problem.requests)
    object.__setattr__(problem.batch, "host", UpperBound(lens))
    found = sizing.plan_upcast(problem.geometry, problem.batch)
    assert found is not None and found.head_groups > 1
    assert_right(problem, helpers.DEVICE)


@pytest.mark.parametrize(("heads", "rows", "tile"), [(5, 1, 16), (16, 1, 16), (16, 2, 32), (12, 4, 64), (128, 1, 64)])
def test_row_tiles_follow_rows_times_heads(heads, rows, tile):
    """A request's rows times heads select the row tile; architectures with 99 KiB of shared memory have at most 32."""
    shape = latent(heads, 512, 64, 64, "bfloat16")
    for arch, most in ((80, 64), (100, 64), (120, 32)):
        assert select.select_config(shape, DeviceProfile("cuda", arch, 132), rows).block_m == min(tile, most)


def test_buffers_depend_on_rows_and_heads_only():
    """Partial results and schedules have the same size for any number of requests and any context length."""
    found = set()
    for requests, context in ((64, 8192), (256, 131072)):
        limits = Limits(requests, context)
        draft, device = DraftShape(4, 4, 16), DeviceProfile("cuda", 90, 132)
        geometry = Geometry.create(latent(128, 512, 64, 64, "bfloat16"), limits, draft, device, (Mode.VERIFY,))
        own = {one.name: tuple(map(int, one.shape)) for one in sizing.buffers(geometry)}
        found.add((own[sizing.WORK], own[sizing.PARTIAL_OUT], own[sizing.PARTIAL_LSE]))
    [(_, partial_out, _)] = found
    assert partial_out[1] == 512


@pytest.mark.parametrize(
    ("value", "rest", "reason"), [(640, 64, "value_dim 640 is not served"), (512, 320, "with value_dim 512 is not")]
)
def test_rows_that_do_not_fit_are_refused_by_name(value, rest, reason):
    """Rows with a wider value, or a wider rest, than the kernels hold are refused with their sizes."""
    geometry = Geometry.create(latent(16, value, rest, 64), Limits(4, 256))
    assert any(reason in one for one in support.reasons_against(geometry))


def test_compaction_moves_latent_rows():
    """Accepted rows of a tree move to the front of the tail, in one tensor of rows or in two parts."""
    for forms in ((), (Form.LATENT_PARTS,)):
        problem = draw(latent(2, 24, 8, 4), Mode.VERIFY, 4, helpers.DEVICE, Sizes(2, 30, 6), forms)
        geometry, batch = problem.geometry, problem.batch
        rows = batch.q_lens[0]
        assert rows > 2
        pool = KVPool(geometry, 2, int(batch.page_table.max()) + 1, 1, helpers.DEVICE)
        for one in pool.tensors:
            one.copy_(torch.arange(one.numel(), device=helpers.DEVICE).view(one.shape))
        before = [one.clone().flatten(1, 2) for one in pool.tensors]
        path = torch.zeros(batch.padded_reqs, rows, dtype=torch.int64, device=helpers.DEVICE)
        path[:, 1] = rows - 1
        counts = torch.full((batch.padded_reqs,), 2, dtype=torch.int64, device=helpers.DEVICE)
        TritonTreeOps(geometry).compact(pool, batch, VerifyResult(path, counts, path))
        slots = [one.slots(4) for one in problem.requests[: batch.num_reqs]]
        for tensor, old in zip(pool.tensors, before, strict=True):
            for one, own in zip(problem.requests, slots, strict=False):
                moved = tensor.flatten(1, 2)[:, own[one.prefix + 1]]
                assert torch.equal(moved, old[:, own[one.prefix + rows - 1]])
