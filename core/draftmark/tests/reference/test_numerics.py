"""What the reference computes, against a float64 loop over rows, heads and keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark import Mode

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = [(4, 4), (8, 2), (6, 1)]
"""MHA, GQA, MQA."""
EPS = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}
"""Half a unit of the output's last place, relative; the arithmetic itself is float32."""


def assert_close(scene, out, want):
    """Within half a unit in the last place of the output, plus float32 noise."""
    eps = EPS[scene.geometry.attention.q_dtype]
    got = out[: len(want)].double().numpy()
    error = np.abs(got - want) - (eps * np.abs(want) + 4e-6)
    assert out.isfinite().all(), f"a row is not finite\nbatch: {scene}"
    assert error.max() <= 0, (
        f"row {np.unravel_index(error.argmax(), error.shape)} is off by {error.max()}\nbatch: {scene}"
    )


@pytest.mark.parametrize("dtype", list(EPS))
def test_attention_equals_a_float64_loop(dtype, scenery, open_reference, random_stage, truth):
    """All modes, MHA, GQA and MQA, head_dim 20, 64 and 80, soft cap and own scale, NaN in every unused KV slot."""

    @settings(max_examples=50)
    @given(data=st.data())
    def check(data):
        heads, kv_heads = data.draw(st.sampled_from(HEADS))
        scene = data.draw(
            scenery.scenes(
                data.draw(st.sampled_from(list(Mode))),
                tails=(1, 2, 3, 5, 8),
                num_qo_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=data.draw(st.sampled_from((20, 64, 80))),
                q_dtype=dtype,
                kv_dtype=dtype,
                softmax_scale=data.draw(st.sampled_from((None, 0.3))),
                logits_soft_cap=data.draw(st.sampled_from((0.0, 0.0, 2.0))),
            )
        )
        stage, q = random_stage(scene)
        backend, arena = open_reference(scene.geometry)
        out = stage.run(backend, q)
        arena.check()
        assert_close(scene, out, truth(scene, q, stage.k, stage.v))

    check()


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_only_the_slots_of_live_rows_and_the_null_page_change(mode, scenery, open_reference, random_stage):
    """Every byte of the pool but the forward's own slots is the same before and after, padded requests or not."""

    @settings(max_examples=20)
    @given(scene=scenery.scenes(mode))
    def check(scene):
        stage, q = random_stage(scene)
        size = scene.geometry.attention.page_size
        pools = [t.flatten(0, 1).view(torch.uint8) for t in (stage.cache.k, stage.cache.v)]
        before = [pool.clone() for pool in pools]
        stage.run(open_reference(scene.geometry)[0], q)
        for pool, old in zip(pools, before, strict=True):
            changed = {slot for slot in (pool != old).flatten(1).any(1).nonzero().flatten().tolist() if slot >= size}
            own = {int(slot) for slot in stage.own_slots()}
            assert changed <= own, f"slots {sorted(changed - own)} belong to nobody in this forward\nbatch: {scene}"

    check()


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_the_batch_is_read_only(mode, scenery, open_reference, random_stage):
    """No method of the reference changes a tensor of the batch, the query, or the keys it is given."""

    @settings(max_examples=15)
    @given(scene=scenery.scenes(mode))
    def check(scene):
        stage, q = random_stage(scene)
        batch = stage.batch
        inputs = [batch.prefix_lens, batch.q_indptr, batch.page_table, batch.positions, q]
        if not scene.causal:
            inputs += [batch.tail.mask, batch.tail.depth]
        before = [tensor.clone() for tensor in inputs]
        stage.run(open_reference(scene.geometry)[0], q)
        assert all(torch.equal(now, old) for now, old in zip(inputs, before, strict=True)), f"batch: {scene}"

    check()


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
