"""Seed (a), sglang#26753: verify accepts tokens, `seq_lens` grows, `seq_lens_sum` does not.

There the eager `kv_indices` were sized by the stale sum: too short, illegal memory access. Here `SequenceLengths`
is the only owner of lengths: `advance` moves the device, `dispatched` and `settle` move the host, and every bound
(so every sum) is derived from them when asked for. Without one of the moves the check below fails.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftmark import Mode
from draftmark.lengths import Exact, SequenceLengths, UpperBound

pytestmark = pytest.mark.usefixtures("one_thread")

ACCEPTED = ([3, 1], [5, 2], [1, 4])
"""Tokens that two requests accept in three rounds, not uniform, of at most 5."""


@pytest.fixture
def check_rounds(make_geometry, scenery, open_reference, random_stage, truth):
    """Three rounds of accept-and-verify; every host view covers what the device holds, and attention is right."""
    geometry = make_geometry(num_draft_tokens=5, page_size=3, max_num_reqs=2)
    backend, _ = open_reference(geometry)

    def forward(lengths, true, host):
        planned, needed = sum(host.upper_bound()), sum(true)
        assert planned >= needed, f"kv indices sized for {planned} tokens, {needed} are read: {true}, {host}"
        requests = tuple(scenery.Request(n, scenery.tree([None, 0, 0, 1, 1]), 5) for n in true)
        scene = scenery.Scene(geometry, Mode.VERIFY, requests, causal=False)
        stage, q = random_stage(scene)
        stage.batch = replace(stage.batch, prefix_lens=lengths.device[:2].clone(), host=host)
        out = stage.run(backend, q).numpy()
        np.testing.assert_allclose(out, truth(scene, q, stage.k, stage.v), atol=1e-5, err_msg=str(scene))

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


def test_every_host_view_covers_what_verify_accepted(check_rounds):
    """After each accept, sizes derived from the host's view cover the device, and attention is right."""
    check_rounds()


def keep_first(method):
    """A host view computed once and kept, as the engine kept its sum."""
    kept = {}
    return lambda self, rows: kept.setdefault(tuple(rows), method(self, rows))


REMOVED = {
    "the device half does not move": {"advance": lambda self, rows, by: None},
    "the host half is not told": {"dispatched": lambda *_: None, "settle": lambda *_: None},
    "the host's bound is a kept copy": {"upper_bound": keep_first(SequenceLengths.upper_bound)},
    "the host's length is a kept copy": {"exact": keep_first(SequenceLengths.exact)},
    "the host forgets what is in flight": {
        "upper_bound": lambda self, rows: UpperBound(tuple(self._settled[row] for row in rows))
    },
    "the host settles but counts nothing": {"exact": lambda self, rows: Exact((0,) * len(rows))},
}


@pytest.mark.parametrize("removed", REMOVED)
def test_without_one_of_the_moves_the_check_fails(monkeypatch, check_rounds, removed):
    """Take away any one move of any one copy of the fact, and the same check is red."""
    for name, method in REMOVED[removed].items():
        monkeypatch.setattr(SequenceLengths, name, method)
    with pytest.raises(AssertionError):
        check_rounds()
