"""Chosen keys: whole forwards of every mode against float64, split lists, and the sizes of partial results."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from draftmark import AttentionShape, DeviceProfile, DraftShape, Form, Geometry, Limits, Mode, load
from draftmark_cuda_triton import sizing
from draftmark_cuda_triton.heuristics import chosen
from plugins.cuda_triton.tests import helpers
from plugins.cuda_triton.tests.test_latent import assert_right, latent, run
from plugins.cuda_triton.tools.chosen_batches import draw_chosen
from plugins.cuda_triton.tools.latent_batches import Sizes


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("seed", range(3))
def test_every_mode_equals_float64(mode, seed):
    """A row attends to its list only: latent rows in one buffer and two, heads with K and V, and engine stores."""
    chance = random.Random(seed)
    page, width = chance.choice((1, 3, 16, 48, 64)), chance.choice((1, 7, 40, 300))
    if seed == 2:
        shape = AttentionShape(6, 2, 24, page, "float32", "float32", value_dim=chance.choice((24, 16)))
    else:
        value, rest = chance.choice(((24, 8), (32, 0), (16, 16), (40, 9)))
        shape = latent(chance.choice((1, 5, 20)), value, rest, page)
    forms = ((Form.LATENT_PARTS,) if seed and shape.latent and shape.head_dim != shape.value_dim else ()) + (
        (Form.ENGINE_STORES,) if seed == 2 else ()
    )
    shape = replace(shape, chosen_width=width)
    assert_right(draw_chosen(shape, mode, seed, helpers.DEVICE, Sizes(3, 90, 5), forms), helpers.DEVICE)


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({}, {}),
        ({"logits_soft_cap": 1.5}, {}),
        ({"sinks": True}, {}),
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "bfloat16", "kv": "float8_e4m3fn"}, {}),
        ({}, {"batch_invariant": True}),
    ],
    ids=["plain", "cap", "sinks", "bfloat16", "e4m3", "batch invariance"],
)
def test_split_lists_equal_float64(fields, limits):
    """Lists of hundreds of keys are split over CTAs and merged; caps, sinks and 8 bits count once."""
    shape = replace(latent(20, 32, 16, 16, **fields), chosen_width=600)
    problem = draw_chosen(shape, Mode.VERIFY, 3, helpers.DEVICE, Sizes(2, 700, 4), **limits)
    splits = chosen.num_splits(problem.geometry, Mode.VERIFY, problem.batch.num_rows)
    assert (splits > 1) is not bool(limits)
    assert_right(problem, helpers.DEVICE, 5e-2 if fields.get("kv") else None)


def test_a_replay_reads_the_lists_of_its_layer():
    """Lists that change between two `attend` calls, after one `write_metadata`, change the output."""
    problem = draw_chosen(replace(latent(), chosen_width=64), Mode.VERIFY, 5, helpers.DEVICE)
    first, _ = run(problem, helpers.DEVICE)
    problem.batch.chosen.counts.zero_()
    backend = load("cuda_triton").open(problem.geometry, helpers.DEVICE)
    backend.plan(problem.batch)
    backend.write_metadata(problem.batch)
    out, lse = problem.new_out()
    backend.attend(problem.q, problem.cache, problem.batch, out, lse)
    assert first.any() and not out.any() and (lse == float("-inf")).all()


@pytest.mark.parametrize("sms", [1, 20, 132])
@pytest.mark.parametrize("heads", [1, 20, 128])
def test_partial_results_of_any_batch_fit(sms, heads):
    """The declared rows are those of the largest batch, for every number of rows; few rows are split."""
    shape = replace(latent(heads, 512, 64, 64, "bfloat16"), chosen_width=2048)
    limits, device = Limits(16, 4096, 300), DeviceProfile("cuda", 90, sms)
    geometry = Geometry.create(shape, limits, DraftShape(2, 3, 8), device, tuple(Mode)[:5])
    sizes = {one.name: one for one in sizing.buffers(geometry)}
    used = [chosen.partial_rows(geometry, Mode.VERIFY, n) for n in range(1, int(geometry.max_rows(Mode.VERIFY)) + 1)]
    assert max(used) == sizes[sizing.PARTIAL_LSE].shape[0] == sizes[sizing.PARTIAL_OUT].shape[0]
    assert chosen.num_splits(geometry, Mode.DECODE, 1) > 1 == chosen.num_splits(geometry, Mode.EXTEND, 1)
    usage = sizing.chosen_usage(geometry, Mode.VERIFY, used.index(max(used)) + 1)
    assert usage == {name: sizes[name].nbytes for name in usage}
    invariant = replace(geometry, limits=replace(limits, batch_invariant=True))
    assert chosen.max_partial_rows(invariant) == 0


def test_explain_names_the_splits():
    """`draftmark explain` shows the kernel, its tile and the splits of a batch with lists."""
    from draftmark import BatchSize

    shape = replace(latent(16, 512, 64, 64, "bfloat16"), chosen_width=2048)
    geometry = Geometry.create(shape, Limits(4, 4096), device=DeviceProfile("cuda", 90, 132), modes=(Mode.DECODE,))
    choices = {one.subject: one for one in load("cuda_triton").explain(geometry, BatchSize(Mode.DECODE, 2, 1))}
    assert choices["splits of the keys"].chosen == "16" and "kernels.chosen.attend_chosen" in choices
