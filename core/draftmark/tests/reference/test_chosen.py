"""The reference backend on rows with chosen keys: float64 attention over each row's own list."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from draftmark import Form, Mode
from draftmark_testing.paged_scenes import random_paged_scene
from draftmark_testing.scene_attention import expected_attention
from draftmark_testing.scenes import Scene
from draftmark_testing.strategies import scenes

pytestmark = pytest.mark.usefixtures("one_thread")

LATENT = {"num_qo_heads": 3, "num_kv_heads": 1, "head_dim": 10, "value_dim": 8, "latent": True, "softmax_scale": 0.4}
SHAPES = {
    "one buffer": LATENT,
    "two buffers": LATENT | {"forms": (Form.LATENT_PARTS,)},
    "heads": {},
    "narrow values": {"head_dim": 10, "value_dim": 6, "logits_soft_cap": 2.0},
    "batch invariance": LATENT | {"batch_invariant": True},
}
WIDTH = 7
ANYTHING = (-1, 2**31 - 1, -(2**31), 0)
"""Stale entries of lists."""


def with_lists(scene):
    """Return the scene with a list of at most `WIDTH` keys for each live row, some of them empty or full."""

    @dataclass(frozen=True)
    class ListedScene(Scene):
        lists: dict = field(default_factory=dict)

        def visible(self, request, row):
            return self.lists[request, row]

    shape = replace(scene.geometry.attention, window_left=-1, chosen_width=WIDTH)
    whole = replace(scene, geometry=replace(scene.geometry, attention=shape))
    rng = random.Random(scene.seed)
    lists = {}
    for request, row in whole.rows():
        seen = whole.visible(request, row)
        lists[request, row] = rng.sample(seen, min(len(seen), rng.choice((0, 1, 3, WIDTH))))
    return ListedScene(**vars(whole), lists=lists)


def fill(paged, rng):
    """Write the lists of a scene into its batch, with -1 between the keys and stale entries after them."""
    chosen, scene = paged.batch.chosen, paged.scene
    stale = [[rng.choice(ANYTHING) for _ in range(WIDTH)] for _ in range(paged.batch.num_rows)]
    chosen.slots.copy_(torch.tensor(stale))
    owned = int(paged.batch.q_indptr[-1])
    chosen.counts.fill_(2**31 - 1)
    chosen.counts[:owned] = 0
    for n, (request, row) in enumerate(scene.rows()):
        keys = scene.lists[request, row]
        slots = [int(paged.slots(request, [key])) for key in keys]
        while len(slots) < WIDTH and rng.random() < 0.5:
            slots.insert(rng.randrange(len(slots) + 1), -1)
        chosen.counts[n] = len(slots)
        chosen.slots[n, : len(slots)] = torch.tensor(slots, dtype=torch.int32)


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_lse_equal_float64(shape, mode, open_reference):
    """In every mode a row attends to the keys of its list only; without keys it is 0, with log-sum-exp -inf."""

    @settings(max_examples=6)
    @given(scene=scenes(mode, tails=(1, 2, 5, 33), **SHAPES[shape]))
    def check(scene):
        scene = with_lists(scene)
        backend, arena = open_reference(scene.geometry)
        paged, q = random_paged_scene(scene)
        fill(paged, random.Random(scene.seed))
        lse = torch.full(q.shape[:2], float("nan"))
        out = paged.run(backend, q, lse)
        arena.check()
        live = len(scene.rows())
        assert out.isfinite().all() and not lse.isnan().any()
        want = expected_attention(scene, q, paged.k, paged.v)
        np.testing.assert_allclose(out[:live], want, atol=2e-5, err_msg=str(scene))
        empty = torch.tensor([not scene.lists[row] for row in scene.rows()], dtype=torch.bool)
        assert (lse[:live][empty] == float("-inf")).all() and lse[:live][~empty].isfinite().all()

    check()


@pytest.mark.parametrize("shape", ["one buffer", "heads"])
def test_a_list_of_all_keys_gives_the_output_without_lists(shape, open_reference):
    """A tree is a list: prefix and ancestors of each row, in any order."""

    @settings(max_examples=6)
    @given(scene=scenes(Mode.VERIFY, tails=(5,), **SHAPES[shape]))
    def check(scene):
        plain = replace(scene.geometry.attention, window_left=-1)
        outs = []
        for width in (0, 64):
            attention = replace(plain, chosen_width=width)
            one = replace(scene, geometry=replace(scene.geometry, attention=attention))
            backend, _ = open_reference(one.geometry)
            paged, q = random_paged_scene(one)
            if width:
                paged.batch.chosen.counts.zero_()
                for n, (request, row) in enumerate(one.rows()):
                    slots = paged.slots(request, one.visible(request, row)).flip(0)
                    paged.batch.chosen.counts[n] = len(slots)
                    paged.batch.chosen.slots[n, : len(slots)] = slots.int()
            outs.append(paged.run(backend, q)[: len(one.rows())])
        torch.testing.assert_close(*outs, atol=2e-5, rtol=0)

    check()
