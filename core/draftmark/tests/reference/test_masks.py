"""Which keys the reference shows to each row, read back from its output and compared with brute force.

With q = 0 every visible key weighs the same, and V names its key: a one-hot of the position and one of the
request. So the output of a row *is* the set of keys it saw, through all four methods and no private function.
Numbers, and that each call writes its own memory alone, are the contract's (`numerics`, `purity`).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark import Mode

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
"""More than any position and any request that `scenes` draws."""


def seen_keys(scene, scenery, backend, before_step=lambda: None):
    """Run a scene with keys that name themselves; returns out [live rows, KEYS + REQUESTS] and the stage."""
    names = []
    for i, request in enumerate(scene.requests):
        v = torch.zeros(request.total, 1, KEYS + REQUESTS)
        v[torch.arange(request.total), 0, torch.arange(request.total)] = 1.0
        v[:, 0, KEYS + i] = 1.0
        names.append(v)
    stage = scenery.Stage(scene, [torch.zeros_like(v) for v in names], names)
    before_step()
    out = stage.run(backend, torch.zeros(stage.batch.num_rows, 1, KEYS + REQUESTS))
    return out[:, 0], stage


def expected_keys(scene):
    """The same rows from brute force."""
    want = torch.zeros(len(scene.rows()), KEYS + REQUESTS)
    for row, (request, own) in zip(want, scene.rows(), strict=True):
        keys = scene.visible(request, own)
        row[keys] = 1.0 / len(keys)
        row[KEYS + request] = 1.0
    return want


def assert_sees(scene, out):
    """Every live row saw exactly its keys, and every row (padded ones too) is finite."""
    want = expected_keys(scene)
    live = out[: len(want)]
    wrong = (~torch.isclose(live, want, atol=1e-5)).any(1).nonzero().flatten().tolist()
    if wrong or not out.isfinite().all():
        request, row = scene.rows()[wrong[0]] if wrong else (len(scene.requests), 0)
        got = live[wrong[0]].nonzero().flatten().tolist() if wrong else "NaN in a padded row"
        brute = scene.visible(request, row) if wrong else "finite values"
        pytest.fail(f"request {request} row {row} saw keys {got}, brute force says {brute}\nbatch: {scene}")


@pytest.mark.parametrize("share", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_rows_see_exactly_the_keys_that_brute_force_names(mode, share, scenery, open_reference):
    """In every mode a row's output mixes the keys of its own request that the definition shows it, and no other."""
    shape = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": KEYS + REQUESTS}

    @settings(max_examples=CASES[mode] // share)
    @given(scene=scenery.scenes(mode, **shape))
    def check(scene):
        backend, arena = open_reference(scene.geometry)
        out, _ = seen_keys(scene, scenery, backend)
        arena.check()
        assert_sees(scene, out)

    check()


@settings(max_examples=60)
@given(data=st.data())
def test_a_step_does_not_depend_on_what_earlier_steps_left_in_the_arena(data, scenery, open_reference):
    """One backend runs forwards of changing mode and size, its arena poisoned between them, and each is right."""
    shape = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": KEYS + REQUESTS}
    first = data.draw(scenery.scenes(Mode.VERIFY, **shape))
    backend, arena = open_reference(first.geometry)
    later = [first]
    for prefix in (0, first.geometry.limits.max_context_len - 1):
        small = scenery.Request(prefix, scenery.chain(1), 1)
        later.append(scenery.Scene(first.geometry, Mode.DECODE, (small,), host="unknown"))
        later.append(scenery.Scene(first.geometry, Mode.EXTEND, (small,), padded_reqs=first.geometry.max_reqs))
    for scene in [*later, first]:
        out, _ = seen_keys(scene, scenery, backend, before_step=arena.poison)
        arena.check()
        assert_sees(scene, out)


def test_bit_31_and_bit_32_of_a_mask_row_are_two_different_slots(make_geometry, scenery, open_reference):
    """A 40-slot tree whose rows see only themselves and slots 31 or 32 reads the sign bit and the second word."""
    slots = [scenery.Slot(s, frozenset({s, 31 if s % 2 else 32})) for s in range(40)]
    geometry = make_geometry(
        num_draft_tokens=40, num_qo_heads=1, num_kv_heads=1, head_dim=KEYS + REQUESTS, modes=(Mode.VERIFY,)
    )
    scene = scenery.Scene(geometry, Mode.VERIFY, (scenery.Request(5, tuple(slots), 40),), causal=False)
    backend, _ = open_reference(geometry)
    assert_sees(scene, seen_keys(scene, scenery, backend)[0])


def test_unused_tree_rows_see_the_prefix_the_root_and_themselves(make_geometry, scenery, open_reference):
    """An n-gram miss leaves rows with parent root and depth 1; under a window they age like any depth-1 row."""
    geometry = make_geometry(
        num_draft_tokens=6,
        window_left=3,
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=KEYS + REQUESTS,
        page_size=3,
        modes=(Mode.VERIFY,),
    )
    tail = scenery.tree([None, 0, 1, 0, 0, 0])
    scene = scenery.Scene(geometry, Mode.VERIFY, (scenery.Request(7, tail, 6),), causal=False)
    assert scene.visible(0, 5) == [5, 6, 7, 12], "worked by hand: L=7, position 8, W=3 shows positions 5 … 8"
    backend, _ = open_reference(geometry)
    assert_sees(scene, seen_keys(scene, scenery, backend)[0])


@pytest.mark.parametrize("host", ["exact", "upper_bound", "unknown"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunk_that_ends_at_the_wall_needs_no_page_beyond_the_table(
    make_geometry, scenery, open_reference, host, overlap
):
    """EXTEND brings n tokens with L + n <= C; a host that knows only a bound on L must not ask for bound + n."""
    geometry = make_geometry(
        num_draft_tokens=2, overlap=overlap, num_qo_heads=1, num_kv_heads=1, head_dim=KEYS + REQUESTS, page_size=1
    )
    scene = scenery.Scene(geometry, Mode.EXTEND, (scenery.Request(20, scenery.chain(12), 12),), host=host)
    backend, _ = open_reference(geometry)
    assert_sees(scene, seen_keys(scene, scenery, backend)[0])


def test_a_wrong_bit_is_noticed(make_geometry, scenery, open_reference):
    """The comparison itself fails when one mask bit, one depth or one page id is flipped before the step."""
    geometry = make_geometry(
        num_draft_tokens=4, window_left=2, num_qo_heads=1, num_kv_heads=1, head_dim=KEYS + REQUESTS, page_size=3
    )
    tail = scenery.tree([None, 0, 0, 2])
    scene = scenery.Scene(geometry, Mode.VERIFY, (scenery.Request(7, tail, 4),), causal=False)
    backend, _ = open_reference(geometry)

    def flip(field):
        names = torch.zeros(11, 1, KEYS + REQUESTS)
        names[torch.arange(11), 0, torch.arange(11)] = names[:, 0, KEYS] = 1.0
        stage = scenery.Stage(scene, [torch.zeros_like(names)], [names])
        if field == "mask":
            stage.batch.tail.mask[3, 0] ^= 2
        elif field == "depth":
            stage.batch.tail.depth[0, 3] += 1
        elif field == "page":
            stage.batch.page_table[0, 2] = stage.num_pages - 1
        return stage.run(backend, torch.zeros(4, 1, KEYS + REQUESTS))[:, 0]

    assert_sees(scene, flip("nothing"))
    for field in ("mask", "depth", "page"):
        with pytest.raises(pytest.fail.Exception):
            assert_sees(scene, flip(field))


def test_a_first_token_without_prefix_returns_its_own_value(make_geometry, scenery, open_reference, random_stage):
    """Prefix 0, one row: the softmax over one key is 1, so the output is that key's V in its group's heads."""
    geometry = make_geometry()
    scene = scenery.Scene(geometry, Mode.DECODE, (scenery.Request(0, scenery.chain(1), 1),))
    stage, q = random_stage(scene)
    out = stage.run(open_reference(geometry)[0], q)
    assert torch.equal(out[0], stage.v[0][0].repeat_interleave(2, dim=0))


def test_a_live_row_takes_exactly_nothing_from_an_empty_prefix(make_geometry, scenery, open_reference):
    """Beside a request with a long prefix, a request with L = 0 gets the bits it gets alone."""
    geometry = make_geometry(num_draft_tokens=3)
    tail = scenery.tree([None, 0, 0])
    short, long = scenery.Request(0, tail, 3), scenery.Request(29, tail, 3)
    alone = scenery.Scene(geometry, Mode.VERIFY, (short,), causal=False)
    both = scenery.Scene(geometry, Mode.VERIFY, (short, long), causal=False)
    results = []
    for scene in (alone, both):
        k, v = ([torch.full((r.total, 2, 8), value) for r in scene.requests] for value in (0.5, 3.0))
        stage = scenery.Stage(scene, k, v)
        results.append(stage.run(open_reference(geometry)[0], torch.ones(stage.batch.num_rows, 4, 8))[:3])
    assert torch.equal(*results)
    assert torch.equal(results[0], torch.full((3, 4, 8), 3.0))
