"""Regression tests of sglang#26738: without host synchronization host lengths are None, and some code reads them.

In SGLang `seq_lens_sum`, `extend_prefix_lens_cpu` or a draft backend's `needs_cpu_seq_lens` was None in one untested
combination. Here `HostLengths` is a sum type without None. A batch cannot be created without it, `validate` refuses
other values, and each kind has an upper bound. A backend that needs exact lengths is refused at open with overlap.
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
from draftmark_testing.paged_scenes import random_paged_scene
from draftmark_testing.scene_attention import expected_attention
from draftmark_testing.scenes import Request, Scene, block, chain, tree

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {
    "exact": lambda true, limit: Exact(true),
    "upper bound": lambda true, limit: UpperBound(tuple(min(n + 5, limit) for n in true)),
    "unknown": lambda true, limit: Unknown(len(true), limit),
}


@pytest.fixture
def check_host(make_geometry, open_reference):
    """Return a function that runs one mode eagerly with one kind of host lengths and compares with brute force."""

    def check(mode, host_of, overlap=True):
        geometry = make_geometry(
            num_draft_tokens=5, topk=2, num_steps=3, block_size=5, page_size=3, overlap=overlap, modes=tuple(Mode)
        )
        backend, _ = open_reference(geometry)
        true = (7, 0, 12)
        rows = {Mode.DECODE: 1, Mode.EXTEND: 4, Mode.DRAFT: 2}.get(mode, 5)
        branches = tree([None] * 2 if mode is Mode.DRAFT else [None, 0, 0, 1, 1])
        causal = mode not in (Mode.DRAFT, Mode.VERIFY, Mode.RAGGED_VERIFY)
        tail = chain(rows) if causal else branches
        if mode is Mode.DRAFT_BLOCK:
            tail = block(rows)
        requests = tuple(Request(n, tail, rows) for n in true)
        scene = Scene(geometry, mode, requests, causal=causal)
        paged, q = random_paged_scene(scene)
        host = host_of(true, geometry.max_prefix_len)
        assert isinstance(host, Exact | UpperBound | Unknown), f"host lengths are {host!r}, which have no upper bound"
        bounds = host.upper_bound()
        assert len(bounds) == len(true) and all(b >= n for b, n in zip(bounds, true, strict=True)), (host, true)
        paged.batch = validate(replace(paged.batch, host=host), geometry)
        out = paged.run(backend, q)[: len(scene.rows())].numpy()
        np.testing.assert_allclose(out, expected_attention(scene, q, paged.k, paged.v), atol=1e-5, err_msg=str(scene))

    return check


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_every_mode_runs_with_every_kind_of_host_lengths(check_host, mode, kind):
    """Attention is correct in every mode with every kind of host lengths (exact, upper bound, unknown)."""
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
    ids=["None", "no requests", "below the lengths", "unknown without a limit"],
)
def test_host_lengths_without_a_valid_bound_fail_the_check(check_host, mode, host_of):
    """The check fails in every mode for None and for bounds below the real lengths."""
    with pytest.raises(AssertionError):
        check_host(mode, host_of)


def test_a_batch_without_host_lengths_cannot_be_made(make_geometry):
    """A batch without `host` raises TypeError at construction; the field has no default."""
    paged, _ = random_paged_scene(Scene(make_geometry(), Mode.DECODE, (Request(3, chain(1), 1),)))
    kept = {name: getattr(paged.batch, name) for name in ForwardBatch.__dataclass_fields__ if name != "host"}
    with pytest.raises(TypeError, match="host"):
        ForwardBatch(**kept)


def test_validate_refuses_none(make_geometry):
    """host=None raises a BatchError in validate(), not an AttributeError later."""
    geometry = make_geometry()
    paged, _ = random_paged_scene(Scene(geometry, Mode.DECODE, (Request(3, chain(1), 1),)))
    with pytest.raises(BatchError, match="host"):
        validate(replace(paged.batch, host=None), geometry)


@pytest.mark.parametrize("kind", [kind for kind in HostLengthsNeed if kind is not HostLengthsNeed.EXACT])
def test_backends_without_exact_lengths_open_with_overlap(distribution, make_geometry, kind):
    """Backends that need no exact host lengths open with overlap."""
    needy(distribution, kind).open(make_geometry(overlap=True), "cpu")


def test_a_backend_with_exact_lengths_is_refused_with_overlap(distribution, make_geometry):
    """A backend that needs exact host lengths is refused at open, with the remedy."""
    backend = needy(distribution, HostLengthsNeed.EXACT)
    backend.open(make_geometry(), "cpu")
    with pytest.raises(BackendRefusal, match=r"exact host lengths.*overlap=False"):
        backend.open(make_geometry(overlap=True), "cpu")


def needy(distribution, need):
    """Load a backend that declares the host-lengths need `need` for every geometry."""
    distribution(
        "needy",
        extra="from draftmark import HostLengthsNeed, Requirements\n@hookimpl\ndef draftmark_requirements(geometry):\n"
        f"    return Requirements(HostLengthsNeed({need.value!r}))\n",
    )
    return draftmark.load("needy")
