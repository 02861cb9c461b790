"""The reference backend's visibility mask: the keys that each row sees, read from its output, equal brute force.

With q = 0 all visible keys have equal weights, and V encodes its key as two one-hots: position and request. A row's
output then contains exactly the keys that the row sees, through all four methods and without private functions. The
contract tests numerics and the memory that each call writes (`numerics`, `purity`).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark import Mode
from draftmark_testing.paged_scenes import PagedScene, random_paged_scene
from draftmark_testing.scenes import Request, Scene, Slot, chain, tree
from draftmark_testing.strategies import scenes

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = {
    Mode.EXTEND: 600,
    Mode.DECODE: 500,
    Mode.DRAFT: 800,
    Mode.VERIFY: 1200,
    Mode.DRAFT_EXTEND: 500,
    Mode.RAGGED_VERIFY: 800,
    Mode.DRAFT_BLOCK: 300,
}
KEYS, REQUESTS = 144, 3
"""Larger than any position and any number of requests that `scenes` draws."""


def seen_keys(scene, backend, before_step=lambda: None):
    """Run the forward that `scene` describes, with q = 0 and V one-hot by position and request.

    Return the output ``[rows, KEYS + REQUESTS]`` and the scene's KV pages and batch.
    """
    names = []
    for i, request in enumerate(scene.requests):
        v = torch.zeros(request.total, 1, KEYS + REQUESTS)
        v[torch.arange(request.total), 0, torch.arange(request.total)] = 1.0
        v[:, 0, KEYS + i] = 1.0
        names.append(v)
    paged = PagedScene(scene, [torch.zeros_like(v) for v in names], names)
    before_step()
    out = paged.run(backend, torch.zeros(paged.batch.num_rows, 1, KEYS + REQUESTS))
    return out[:, 0], paged


def expected_keys(scene):
    """Return the output row that brute force expects for each live row: equal weights on its visible keys."""
    want = torch.zeros(len(scene.rows()), KEYS + REQUESTS)
    for row, (request, own) in zip(want, scene.rows(), strict=True):
        keys = scene.visible(request, own)
        row[keys] = 1.0 / len(keys)
        row[KEYS + request] = 1.0
    return want


def assert_sees(scene, out):
    """Assert that every live row saw exactly its keys, and that every row, padding included, is finite."""
    want = expected_keys(scene)
    live = out[: len(want)]
    wrong = (~torch.isclose(live, want, atol=1e-5)).any(1).nonzero().flatten().tolist()
    if wrong or not out.isfinite().all():
        request, row = scene.rows()[wrong[0]] if wrong else (len(scene.requests), 0)
        got = live[wrong[0]].nonzero().flatten().tolist() if wrong else "NaN in a padding row"
        brute = scene.visible(request, row) if wrong else "finite values"
        pytest.fail(f"request {request} row {row} saw keys {got}, brute force expects {brute}\nbatch: {scene}")


@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_rows_see_the_keys_of_brute_force(mode, share, open_reference):
    """In every mode a row's output contains exactly the visible keys of its own request."""
    shape = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": KEYS + REQUESTS}

    @settings(max_examples=CASES[mode] // share)
    @given(scene=scenes(mode, **shape))
    def check(scene):
        backend, arena = open_reference(scene.geometry)
        out, _ = seen_keys(scene, backend)
        arena.check()
        assert_sees(scene, out)

    check()


@settings(max_examples=60)
@given(data=st.data())
def test_a_step_does_not_depend_on_earlier_arena_contents(data, open_reference):
    """On one backend, forwards of different modes and sizes are correct, although the arena is poisoned before each."""
    shape = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": KEYS + REQUESTS}
    first = data.draw(scenes(Mode.VERIFY, **shape))
    backend, arena = open_reference(first.geometry)
    later = [first]
    for prefix in (0, first.geometry.limits.max_context_len - 1):
        small = Request(prefix, chain(1), 1)
        later.append(Scene(first.geometry, Mode.DECODE, (small,), host="unknown"))
        later.append(Scene(first.geometry, Mode.EXTEND, (small,), padded_reqs=first.geometry.max_reqs))
    for scene in [*later, first]:
        out, _ = seen_keys(scene, backend, before_step=arena.poison)
        arena.check()
        assert_sees(scene, out)


def test_mask_bits_31_and_32_are_different_slots(make_geometry, open_reference):
    """Mask bits 31 (the sign bit of the first word) and 32 (in the second word) select different tail slots."""
    slots = [Slot(s, frozenset({s, 31 if s % 2 else 32})) for s in range(40)]
    geometry = make_geometry(
        num_draft_tokens=40, num_qo_heads=1, num_kv_heads=1, head_dim=KEYS + REQUESTS, modes=(Mode.VERIFY,)
    )
    scene = Scene(geometry, Mode.VERIFY, (Request(5, tuple(slots), 40),), causal=False)
    backend, _ = open_reference(geometry)
    assert_sees(scene, seen_keys(scene, backend)[0])


def test_unused_tree_rows_see_prefix_root_and_themselves(make_geometry, open_reference):
    """Unused tree rows are children of the root at depth 1, and a sliding window applies to them as to other rows."""
    geometry = make_geometry(
        num_draft_tokens=6,
        window_left=3,
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=KEYS + REQUESTS,
        page_size=3,
        modes=(Mode.VERIFY,),
    )
    tail = tree([None, 0, 1, 0, 0, 0])
    scene = Scene(geometry, Mode.VERIFY, (Request(7, tail, 6),), causal=False)
    assert scene.visible(0, 5) == [5, 6, 7, 12], "by hand: with L=7, position 8, W=3 a row sees positions 5 … 8"
    backend, _ = open_reference(geometry)
    assert_sees(scene, seen_keys(scene, backend)[0])


@pytest.mark.parametrize("host", ["exact", "upper_bound", "unknown"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunk_up_to_the_context_limit_fits_the_page_table(make_geometry, open_reference, host, overlap):
    """A chunk that ends at the context limit fits, also if the host's upper bound plus the chunk exceeds the limit."""
    geometry = make_geometry(
        num_draft_tokens=2, overlap=overlap, num_qo_heads=1, num_kv_heads=1, head_dim=KEYS + REQUESTS, page_size=1
    )
    scene = Scene(geometry, Mode.EXTEND, (Request(20, chain(12), 12),), host=host)
    backend, _ = open_reference(geometry)
    assert_sees(scene, seen_keys(scene, backend)[0])


def test_assert_sees_detects_a_wrong_bit(make_geometry, open_reference):
    """The comparison fails when one mask bit, one depth or one page id is changed before the step."""
    geometry = make_geometry(
        num_draft_tokens=4, window_left=2, num_qo_heads=1, num_kv_heads=1, head_dim=KEYS + REQUESTS, page_size=3
    )
    tail = tree([None, 0, 0, 2])
    scene = Scene(geometry, Mode.VERIFY, (Request(7, tail, 4),), causal=False)
    backend, _ = open_reference(geometry)

    def flip(field):
        names = torch.zeros(11, 1, KEYS + REQUESTS)
        names[torch.arange(11), 0, torch.arange(11)] = names[:, 0, KEYS] = 1.0
        paged = PagedScene(scene, [torch.zeros_like(names)], [names])
        if field == "mask":
            paged.batch.tail.mask[3, 0] ^= 2
        elif field == "depth":
            paged.batch.tail.depth[0, 3] += 1
        elif field == "page":
            paged.batch.page_table[0, 2] = paged.num_pages - 1
        return paged.run(backend, torch.zeros(4, 1, KEYS + REQUESTS))[:, 0]

    assert_sees(scene, flip("nothing"))
    for field in ("mask", "depth", "page"):
        with pytest.raises(pytest.fail.Exception):
            assert_sees(scene, flip(field))


def test_a_first_token_without_prefix_returns_its_own_value(make_geometry, open_reference):
    """With prefix 0 and one row the softmax over one key is 1, so the output is that key's V in its group's heads."""
    geometry = make_geometry()
    scene = Scene(geometry, Mode.DECODE, (Request(0, chain(1), 1),))
    paged, q = random_paged_scene(scene)
    out = paged.run(open_reference(geometry)[0], q)
    assert torch.equal(out[0], paged.v[0][0].repeat_interleave(2, dim=0))


def test_an_empty_prefix_contributes_nothing(make_geometry, open_reference):
    """A request without prefix has the same output in a batch of one as next to a request with a long prefix."""
    geometry = make_geometry(num_draft_tokens=3)
    tail = tree([None, 0, 0])
    short, long = Request(0, tail, 3), Request(29, tail, 3)
    alone = Scene(geometry, Mode.VERIFY, (short,), causal=False)
    both = Scene(geometry, Mode.VERIFY, (short, long), causal=False)
    results = []
    for scene in (alone, both):
        k, v = ([torch.full((r.total, 2, 8), value) for r in scene.requests] for value in (0.5, 3.0))
        paged = PagedScene(scene, k, v)
        results.append(paged.run(open_reference(geometry)[0], torch.ones(paged.batch.num_rows, 4, 8))[:3])
    assert torch.equal(*results)
    assert torch.equal(results[0], torch.full((3, 4, 8), 3.0))
