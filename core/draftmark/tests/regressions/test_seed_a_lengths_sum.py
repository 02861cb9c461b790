"""Regression tests of sglang#26753: verify accepts tokens, `seq_lens` grows, `seq_lens_sum` does not.

In SGLang the eager `kv_indices` had the size of the stale sum: too short, so a kernel read out of bounds. Here
`SequenceLengths` is the only owner of lengths. `advance` updates the device, `dispatched` and `settle` update the host,
and every bound (so every sum) is computed from them on request. Without one of these updates the check below fails.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftmark import Mode
from draftmark.lengths import Exact, SequenceLengths, UpperBound
from draftmark_testing.paged_scenes import random_paged_scene
from draftmark_testing.scene_attention import expected_attention
from draftmark_testing.scenes import Request, Scene, tree

pytestmark = pytest.mark.usefixtures("one_thread")

ACCEPTED = ([3, 1], [5, 2], [1, 4])
"""Tokens that two requests accept in three rounds; different numbers, at most 5."""


@pytest.fixture
def check_rounds(make_geometry, open_reference):
    """Return a function that runs three verify-and-accept steps.

    It checks that the host's length bounds cover the device's lengths, and that attention is correct.
    """
    geometry = make_geometry(num_draft_tokens=5, page_size=3, max_num_reqs=2)
    backend, _ = open_reference(geometry)

    def forward(lengths, true, host):
        planned, needed = sum(host.upper_bound()), sum(true)
        assert planned >= needed, f"kv indices sized for {planned} tokens, {needed} are read: {true}, {host}"
        requests = tuple(Request(n, tree([None, 0, 0, 1, 1]), 5) for n in true)
        scene = Scene(geometry, Mode.VERIFY, requests, causal=False)
        paged, q = random_paged_scene(scene)
        paged.batch = replace(paged.batch, prefix_lens=lengths.device[:2].clone(), host=host)
        out = paged.run(backend, q).numpy()
        np.testing.assert_allclose(out, expected_attention(scene, q, paged.k, paged.v), atol=1e-5, err_msg=str(scene))

    def check():
        lengths = SequenceLengths(geometry.max_reqs, geometry.max_prefix_len, "cpu")
        rows, true = [0, 1], [0, 0]
        for by in ACCEPTED:
            lengths.advance(torch.tensor(rows), torch.tensor(by, dtype=torch.int32))
            lengths.dispatched(rows, 5)
            true = [n + count for n, count in zip(true, by, strict=True)]
            assert lengths.device[:2].tolist() == true
            forward(lengths, true, lengths.upper_bound(rows))
            lengths.settle(rows, by, 5)
            assert lengths.exact(rows).lens == tuple(true)
            forward(lengths, true, lengths.exact(rows))

    return check


def test_every_host_view_bounds_the_accepted_tokens(check_rounds):
    """After each step, sizes computed from host lengths are large enough for the device, and attention is correct."""
    check_rounds()


def keep_first(method):
    """Return a method that computes the host's lengths once and then returns that stale copy, like SGLang's sum."""
    kept = {}
    return lambda self, rows: kept.setdefault(tuple(rows), method(self, rows))


REMOVED = {
    "the device is not advanced": {"advance": lambda self, rows, by: None},
    "the host is not updated": {"dispatched": lambda *_: None, "settle": lambda *_: None},
    "the host's bound is a stored copy": {"upper_bound": keep_first(SequenceLengths.upper_bound)},
    "the host's length is a stored copy": {"exact": keep_first(SequenceLengths.exact)},
    "the bound omits tokens in flight": {
        "upper_bound": lambda self, rows: UpperBound(tuple(self._settled[row] for row in rows))
    },
    "settle does not count tokens": {"exact": lambda self, rows: Exact((0,) * len(rows))},
}


@pytest.mark.parametrize("removed", REMOVED)
def test_without_one_of_the_updates_the_check_fails(monkeypatch, check_rounds, removed):
    """The check fails when any single update of the lengths is removed."""
    for name, method in REMOVED[removed].items():
        monkeypatch.setattr(SequenceLengths, name, method)
    with pytest.raises(AssertionError):
        check_rounds()
