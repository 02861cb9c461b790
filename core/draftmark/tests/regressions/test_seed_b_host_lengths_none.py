"""Seed (b), sglang#26738: on the sync-free path host lengths are None, and something reads them.

There `seq_lens_sum`, `extend_prefix_lens_cpu` or a draft backend's `needs_cpu_seq_lens` was None in one
combination that nobody ran. Here `HostLengths` is a sum type without None: a batch cannot be made without it,
`validate` refuses anything else, each kind gives an upper bound, and a backend that needs exact lengths is refused
under overlap when it is opened.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import draftmark
from draftmark import HostLengthsNeed, Mode
from draftmark.batch import ForwardBatch, validate
from draftmark.errors import BackendRefusal, BatchError
from draftmark.lengths import Exact, Unknown, UpperBound

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {
    "exact": lambda true, limit: Exact(true),
    "upper bound": lambda true, limit: UpperBound(tuple(min(n + 5, limit) for n in true)),
    "unknown": lambda true, limit: Unknown(len(true), limit),
}


@pytest.fixture
def check_host(make_geometry, scenery, open_reference, random_stage, truth):
    """Run a mode with a given kind of host lengths, in eager order, and compare with brute force."""

    def check(mode, host_of, overlap=True):
        geometry = make_geometry(
            num_draft_tokens=5, topk=2, num_steps=3, block_size=5, page_size=3, overlap=overlap, modes=tuple(Mode)
        )
        backend, _ = open_reference(geometry)
        true = (7, 0, 12)
        rows = {Mode.DECODE: 1, Mode.EXTEND: 4, Mode.DRAFT: 2}.get(mode, 5)
        tree = scenery.tree([None] * 2 if mode is Mode.DRAFT else [None, 0, 0, 1, 1])
        causal = mode not in (Mode.DRAFT, Mode.VERIFY, Mode.RAGGED_VERIFY)
        tail = scenery.chain(rows) if causal else tree
        if mode is Mode.DRAFT_BLOCK:
            tail = scenery.block(rows)
        requests = tuple(scenery.Request(n, tail, rows) for n in true)
        scene = scenery.Scene(geometry, mode, requests, causal=causal)
        stage, q = random_stage(scene)
        host = host_of(true, geometry.max_prefix_len)
        assert isinstance(host, Exact | UpperBound | Unknown), f"host lengths are {host!r}, which nobody can bound"
        bounds = host.upper_bound()
        assert len(bounds) == len(true) and all(b >= n for b, n in zip(bounds, true, strict=True)), (host, true)
        stage.batch = validate(replace(stage.batch, host=host), geometry)
        out = stage.run(backend, q)[: len(scene.rows())].numpy()
        np.testing.assert_allclose(out, truth(scene, q, stage.k, stage.v), atol=1e-5, err_msg=str(scene))

    return check


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_every_mode_runs_with_every_kind_of_host_lengths(check_host, mode, kind):
    """All combinations plan, run and are right: none of them was left to be None."""
    check_host(mode, KINDS[kind])


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "host_of",
    [
        lambda true, limit: None,
        lambda true, limit: UpperBound(()),
        lambda true, limit: UpperBound((0,) * len(true)),
        lambda true, limit: Unknown(len(true), 0),
    ],
    ids=["None", "for nobody", "not a bound", "unknown without a limit"],
)
def test_a_host_that_cannot_bound_the_lengths_fails_the_check(check_host, mode, host_of):
    """Take the mechanism away (None, or a bound that is none), and the same check is red in every mode."""
    with pytest.raises(AssertionError):
        check_host(mode, host_of)


def test_a_batch_without_host_lengths_cannot_be_made(make_geometry, scenery, random_stage):
    """Leaving `host` out is a TypeError where the batch is built; there is no default to forget."""
    stage, _ = random_stage(scenery.Scene(make_geometry(), Mode.DECODE, (scenery.Request(3, scenery.chain(1), 1),)))
    kept = {name: getattr(stage.batch, name) for name in ForwardBatch.__dataclass_fields__ if name != "host"}
    with pytest.raises(TypeError, match="host"):
        ForwardBatch(**kept)


def test_validate_refuses_none_in_words(make_geometry, scenery, random_stage):
    """A None that slips past the type checker is one BatchError sentence, not an AttributeError later."""
    geometry = make_geometry()
    stage, _ = random_stage(scenery.Scene(geometry, Mode.DECODE, (scenery.Request(3, scenery.chain(1), 1),)))
    with pytest.raises(BatchError, match="host"):
        validate(replace(stage.batch, host=None), geometry)


@pytest.mark.parametrize("kind", [kind for kind in HostLengthsNeed if kind is not HostLengthsNeed.EXACT])
def test_backends_that_need_less_than_exact_open_under_overlap(distribution, make_geometry, kind):
    """`none` and `upper_bound` are always available."""
    needy(distribution, kind).open(make_geometry(overlap=True), "cpu")


def test_a_backend_that_needs_exact_lengths_is_refused_under_overlap(distribution, make_geometry):
    """It is refused at open, with the remedy, instead of reading a None at some step."""
    backend = needy(distribution, HostLengthsNeed.EXACT)
    backend.open(make_geometry(), "cpu")
    with pytest.raises(BackendRefusal, match=r"exact host lengths.*overlap=False"):
        backend.open(make_geometry(overlap=True), "cpu")


def needy(distribution, need):
    """A backend that declares one need of host lengths in all its modes."""
    distribution(
        "needy",
        extra="from draftmark import HostLengthsNeed, Requirements\n@hookimpl\ndef draftmark_requirements(geometry):\n"
        f"    return Requirements(HostLengthsNeed({need.value!r}))\n",
    )
    return draftmark.load("needy")
