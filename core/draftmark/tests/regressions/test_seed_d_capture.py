"""Regression tests of sglang#26521 and #26655: capture binds zeroed `cache_seq_lens`; replay keeps the captured slice.

In SGLang capture and replay ran different code. The captured run took a softmax over no keys (NaN), and a later replay
read the slice of the capture. Here one `write_metadata` serves eager mode, capture and replay, always inside the
captured region. The check compares the first replay after capture, then replays with other lengths.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftmark import Mode
from draftmark.arena import Arena
from draftmark.graphs import GraphKey, Program, graph_state_for, is_recording
from draftmark.lengths import Exact
from draftmark_reference.backend import ReferenceBackend
from draftmark_testing.paged_scenes import random_paged_scene
from draftmark_testing.scene_attention import expected_attention
from draftmark_testing.scenes import Request, Scene, tree

pytestmark = pytest.mark.usefixtures("one_thread")

BATCHES = {"longer": (27, 20, 24), "shorter": (1, 0, 3), "one live": (18,), "two live": (5, 30)}
"""Committed lengths of the live requests at each replay; the capture has (9, 0, 14)."""


@pytest.fixture
def check_graph(make_geometry, reference):
    """Return a function that compares warm-up, capture and replays with brute force, and poisons the arena between."""
    geometry = make_geometry(num_draft_tokens=4, page_size=3, max_num_reqs=3, capture_batch_sizes=(4,), head_dim=20)

    def scene_of(lens, seed):
        requests = tuple(Request(n, tree([None, 0, 0, 2]), 4) for n in lens)
        return random_paged_scene(
            Scene(geometry, Mode.VERIFY, requests, padded_reqs=4, causal=False, host="unknown", seed=seed)
        )

    def check(backend_class):
        arena = Arena.allocate(reference.buffers(geometry), "cpu", guard=True)
        backend = backend_class(geometry, arena)
        static, q = scene_of((9, 0, 14), 1)
        batch, out = static.batch, torch.full_like(q, float("nan"))
        k, v = static.own_rows(q.dtype)
        pages = 64
        cache = type(static.cache)(*(grow(t, pages) for t in (static.cache.k, static.cache.v)))

        def step():
            backend.write_metadata(batch)
            backend.write_kv(k, v, cache, batch)
            backend.attend(q, cache, batch, out)
            return out

        def assert_right(paged, queries, when):
            want = expected_attention(paged.scene, queries, paged.k, paged.v)
            assert out.isfinite().all(), f"{when}: a row is not finite\nbatch: {paged.scene}"
            np.testing.assert_allclose(out[: len(want)].numpy(), want, atol=1e-5, err_msg=f"{when}\n{paged.scene}")
            arena.check()

        key, graphs = GraphKey(Program.VERIFY, 4), graph_state_for(torch.device("cpu"))
        backend.plan(batch)
        step()
        assert_right(static, q, "warm-up")
        arena.poison()
        try:
            graphs.capture(key, step)
            out.fill_(float("nan"))
            graphs.replay(key)
            assert_right(static, q, "first replay, same contents as at capture")
            for seed, (when, lens) in enumerate(BATCHES.items(), 2):
                other, queries = scene_of(lens, seed)
                fill(static.batch, other.batch)
                q.copy_(queries)
                for mine, theirs in zip((k, v), other.own_rows(q.dtype), strict=True):
                    mine.copy_(theirs)
                for mine, theirs in ((cache.k, other.cache.k), (cache.v, other.cache.v)):
                    mine.copy_(grow(theirs, pages))
                arena.poison()
                out.fill_(float("nan"))
                graphs.replay(key)
                assert_right(other, queries, f"replay {when}")
        except (RuntimeError, IndexError) as error:
            raise AssertionError(f"capture or replay failed: {error}") from error

    return check


def grow(pages, total):
    """Pad the KV pages to a pool with a fixed number of pages; the added pages are NaN."""
    new = torch.full((total, *pages.shape[1:]), float("nan"), dtype=pages.dtype)
    new[: pages.shape[0]] = pages
    return new


def fill(static, batch):
    """Copy new contents into the static tensors, as before every replay."""
    for name in ("prefix_lens", "page_table", "positions"):
        getattr(static, name).copy_(getattr(batch, name))
    static.tail.mask.copy_(batch.tail.mask)
    static.tail.depth.copy_(batch.tail.depth)


def test_the_captured_run_and_every_replay_equal_brute_force(check_graph):
    """Warm-up, the first replay, and replays with longer, shorter and fewer requests are correct."""
    check_graph(ReferenceBackend)


class SkippedAtCapture(ReferenceBackend):
    """Writes metadata in eager mode, but not inside the captured region."""

    def write_metadata(self, batch):
        if not is_recording():
            super().write_metadata(batch)


class ZeroedAtCapture(ReferenceBackend):
    """Sets lengths to zero in the captured region (#26521)."""

    def write_metadata(self, batch):
        super().write_metadata(batch)
        if is_recording():
            self.arena["kv_lens"].zero_()


class FrozenLengths(ReferenceBackend):
    """Reads a copy of the warm-up's lengths in the captured region, not the static tensor (#26655)."""

    def write_metadata(self, batch):
        if not is_recording():
            self.kept = batch.prefix_lens.clone()
        super().write_metadata(replace(batch, prefix_lens=self.kept))


class FrozenSlots(ReferenceBackend):
    """Writes KV in every replay to the slots that the warm-up computed."""

    def write_metadata(self, batch):
        super().write_metadata(batch)
        if is_recording():
            self.arena["slot_mapping"].copy_(self.kept)
        else:
            self.kept = self.arena["slot_mapping"].clone()


class PlannedForTheCapturedBatch(ReferenceBackend):
    """Plans at capture for the lengths of the captured batch, although later replays may be longer."""

    def plan(self, batch):
        super().plan(replace(batch, host=Exact(tuple(batch.prefix_lens[: batch.num_reqs].tolist()))))


REMOVED = [SkippedAtCapture, ZeroedAtCapture, FrozenLengths, FrozenSlots, PlannedForTheCapturedBatch]


@pytest.mark.parametrize("backend", REMOVED)
def test_a_capture_with_different_code_fails_the_check(check_graph, backend):
    """The check fails when capture skips, zeroes or freezes the metadata."""
    with pytest.raises(AssertionError):
        check_graph(backend)


def test_one_write_metadata_serves_eager_and_capture(check_graph):
    """One write_metadata method runs in the warm-up and in the captured region, and never at replay."""
    calls = []

    class Counted(ReferenceBackend):
        def write_metadata(self, batch):
            calls.append(is_recording())
            super().write_metadata(batch)

    check_graph(Counted)
    assert calls == [False, True]
