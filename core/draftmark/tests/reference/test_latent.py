"""The reference backend on latent layers and narrow values: float64 attention, log-sum-exp, and engine stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark import Form, Mode
from draftmark_testing.paged_scenes import random_paged_scene
from draftmark_testing.scene_attention import expected_attention
from draftmark_testing.scenes import Request, Scene, chain
from draftmark_testing.strategies import scenes

pytestmark = pytest.mark.usefixtures("one_thread")

LATENT = {"num_qo_heads": 3, "num_kv_heads": 1, "head_dim": 10, "value_dim": 8, "latent": True, "softmax_scale": 0.4}
SHAPES = {
    "one buffer": LATENT,
    "two buffers": LATENT | {"forms": (Form.LATENT_PARTS,)},
    "no rest": LATENT | {"head_dim": 8},
    "narrow values": {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 10, "value_dim": 6},
    "drawn shapes": {},
    "batch invariance": LATENT | {"batch_invariant": True},
}


def expected_lse(scene, q, k):
    """Return the natural log-sum-exp of each live row and head in float64, over the keys that the row sees."""
    a = scene.geometry.attention
    rows = []
    for row, (request, own) in enumerate(scene.rows()):
        for head in range(a.num_qo_heads):
            keys = k[request].double()[scene.visible(request, own), head * a.num_kv_heads // a.num_qo_heads]
            rows.append(torch.logsumexp(a.softmax_scale * (keys @ q[row, head].double()), 0))
    return torch.tensor(rows).view(-1, a.num_qo_heads)


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_lse_equal_float64(shape, mode, open_reference):
    """In every mode outputs and lse equal float64 attention, and every row is written, padding included."""

    @settings(max_examples=12)
    @given(scene=scenes(mode, **SHAPES[shape]))
    def check(scene):
        compare(scene)

    @settings(max_examples=25)
    @given(data=st.data())
    def check_drawn(data):
        value, rest = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 5))
        heads = data.draw(st.sampled_from((1, 2, 5, 12, 20)))
        widths = {"num_qo_heads": heads, "head_dim": value + rest, "value_dim": value}
        compare(data.draw(scenes(mode, **LATENT | widths)))

    def compare(scene):
        backend, arena = open_reference(scene.geometry)
        paged, q = random_paged_scene(scene)
        lse = torch.full(q.shape[:2], float("nan"))
        out = paged.run(backend, q, lse)
        arena.check()
        live = len(scene.rows())
        assert out.isfinite().all() and not lse.isnan().any()
        want = expected_attention(scene, q, paged.k, paged.v)
        np.testing.assert_allclose(out[:live], want, atol=2e-5, err_msg=str(scene))
        np.testing.assert_allclose(lse[:live], expected_lse(scene, q, paged.k), atol=2e-5, err_msg=str(scene))

    (check_drawn if shape == "drawn shapes" else check)()


def decode(make_geometry, **fields):
    """Return the scene of one decode with 9 committed tokens, its pages, and q."""
    geometry = make_geometry(**LATENT | fields, modes=(Mode.DECODE,))
    scene = Scene(geometry, Mode.DECODE, (Request(9, chain(1), 1),))
    return geometry, *random_paged_scene(scene)


def test_sinks_lower_the_output_and_leave_lse_alone(make_geometry, open_reference):
    """lse covers keys only: with a sink of the same weight the output halves, and lse stays."""
    geometry, paged, q = decode(make_geometry)
    lse = torch.empty(1, 3)
    out = paged.run(open_reference(geometry)[0], q, lse)
    with_sinks, paged, _ = decode(make_geometry, sinks=True)
    object.__setattr__(paged.cache, "sinks", lse[0].clone())
    again = torch.empty(1, 3)
    halved = paged.run(open_reference(with_sinks)[0], q, again)
    torch.testing.assert_close(halved, out / 2)
    assert torch.equal(again, lse)


def test_two_halves_merge_by_lse(make_geometry, open_reference):
    """Attention over two sets of keys, merged by exp(lse), equals attention over all of them."""
    geometry, paged, q = decode(make_geometry)
    backend, _ = open_reference(geometry)
    whole, lse = paged.run(backend, q, (sums := torch.empty(1, 3))), sums
    keys = paged.k[0][:, 0]
    outs, parts = [], []
    for some in (keys[:4], keys[4:]):
        logits = geometry.attention.softmax_scale * q[0] @ some.T
        outs.append(logits.softmax(-1) @ some[:, :8])
        parts.append(logits.logsumexp(-1))
    total = torch.logaddexp(*parts)
    torch.testing.assert_close(total, lse[0])
    merged = sum(out * (part - total).exp()[:, None] for out, part in zip(outs, parts, strict=True))
    torch.testing.assert_close(merged, whole[0])


def test_engine_stores_needs_no_write_kv(make_geometry, open_reference):
    """With ENGINE_STORES the engine writes the rows; `attend` without `write_kv` gives the same output."""
    geometry, paged, q = decode(make_geometry)
    want = paged.run(open_reference(geometry)[0], q)
    stores = make_geometry(**LATENT, modes=(Mode.DECODE,), forms=(Form.ENGINE_STORES,))
    backend, _ = open_reference(stores)
    k, v = paged.own_rows(q.dtype)
    assert v is None
    paged.cache.k.flatten(0, 1)[paged.slots(0, range(9, 10))] = k
    out = torch.empty_like(want)
    backend.plan(paged.batch)
    backend.write_metadata(paged.batch)
    before = paged.cache.k.clone()
    backend.attend(q, paged.cache, paged.batch, out)
    assert torch.equal(out, want) and torch.equal(paged.cache.k.nan_to_num(), before.nan_to_num())


def test_weights_come_from_the_whole_row_and_values_from_its_start(make_geometry, open_reference):
    """A key that differs only in its rest changes the weights; the rest never reaches the output."""
    geometry, paged, q = decode(make_geometry)
    backend, _ = open_reference(geometry)
    q[:, :, :8] = 0.0
    out = paged.run(backend, q)
    weights = (geometry.attention.softmax_scale * q[0, :, 8:] @ paged.k[0][:, 0, 8:].T).softmax(-1)
    torch.testing.assert_close(out[0], weights @ paged.k[0][:, 0, :8])
