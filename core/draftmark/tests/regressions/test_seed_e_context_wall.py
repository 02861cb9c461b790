"""Regression tests of sglang#22778: the NPU graph's `block_tables` lacks `num_draft_tokens` after the context limit.

In SGLang the longest KV length had many definitions, one without the tail. A request near `max_context_len` wrote its
drafts after the last column. Here `Geometry.max_kv_len` is the only definition, and sets the page table's width.
"""

from __future__ import annotations

import numpy as np
import pytest

from draftmark import Geometry, Mode
from draftmark_testing.paged_scenes import random_paged_scene
from draftmark_testing.scene_attention import expected_attention
from draftmark_testing.scenes import Request, Scene, chain, tree

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def check_wall(make_geometry, open_reference):
    """Return a function that runs requests with the longest permitted prefix.

    It checks that each key has a page-table column, and that attention is correct.
    """

    def check(mode, overlap):
        geometry = make_geometry(
            num_draft_tokens=5, topk=3, num_steps=3, page_size=4, max_context_len=16, overlap=overlap, max_num_reqs=2
        )
        wall = 16 + (6 if overlap else 0)
        step, rows, tail = {
            Mode.DECODE: (0, 1, chain(1)),
            Mode.DRAFT: (1, 3, tree([None] * 3 + [2, 0, 0])),
            Mode.VERIFY: (0, 5, tree([None, 0, 0, 1, 3])),
            Mode.DRAFT_EXTEND: (0, 5, chain(5)),
        }[mode]
        requests = tuple(Request(n, tail, rows) for n in (wall, wall - 3))
        last = wall + len(tail) - 1
        assert geometry.max_pages_per_req * 4 > last, (
            f"position {last} is in column {last // 4}, the page table has {geometry.max_pages_per_req}"
        )
        causal = mode not in (Mode.DRAFT, Mode.VERIFY)
        scene = Scene(geometry, mode, requests, step=step, causal=causal)
        paged, q = random_paged_scene(scene)
        out = paged.run(open_reference(geometry)[0], q).numpy()
        np.testing.assert_allclose(out, expected_attention(scene, q, paged.k, paged.v), atol=1e-5, err_msg=str(scene))

    return check


MODES = [Mode.DECODE, Mode.DRAFT, Mode.VERIFY, Mode.DRAFT_EXTEND]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_a_request_at_the_context_limit_has_room_for_its_tail(check_wall, mode, overlap):
    """At the longest prefix (one step past the context limit with overlap) every mode's tail fits the page table."""
    check_wall(mode, overlap)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_without_the_tail_in_max_kv_len_the_check_fails(monkeypatch, check_wall, mode, overlap):
    """The check fails in every mode when the longest KV length is defined without its tail."""
    monkeypatch.setattr(Geometry, "max_kv_len", property(lambda self: self.max_prefix_len))
    if overlap:
        monkeypatch.setattr(Geometry, "max_prefix_len", property(lambda self: self.limits.max_context_len))
    with pytest.raises(AssertionError, match="the page table has"):
        check_wall(mode, overlap)
