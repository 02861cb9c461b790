"""Wrong calls around latent layers that no kernel would notice: memory, scales, plugins and pairs of geometries."""

from __future__ import annotations

import pytest
import torch

import draftmark
from core.draftmark.tests.bad_calls import Rig
from core.draftmark.tests.latent_shapes import LATENT, LatentRig, plugin_with
from draftmark import AttentionShape, BatchError, Form, Geometry, GeometryError
from draftmark.runtime import Arena, KVCache, KVPool

PARTS, STRIDED = (Form.LATENT_PARTS,), (Form.STRIDED_KV,)
FP8 = torch.zeros(2, 4, 12).to(torch.float8_e4m3fn)
WIDE = torch.zeros(32, 4, 16)


class NarrowRig(LatentRig):
    """Holds a correct forward of a layer with one KV head, keys of 12 elements, and values of `value_dim` elements."""

    def __init__(self, value_dim: int, forms: tuple[Form, ...] = ()) -> None:
        super().__init__()
        shape = AttentionShape(4, 1, 12, 4, "float32", "float32", value_dim=value_dim)
        old = self.geometry
        self.geometry = Geometry.create(shape, old.limits, old.draft, modes=old.modes, forms=forms)
        self.backend = self.loaded.open(self.geometry, "cpu", guard=True)
        self.cache = KVPool(self.geometry, 1, 32, 1, "cpu").layers[0]
        self.v, self.out = torch.randn(8, 1, value_dim), torch.empty(8, 4, value_dim)


@pytest.mark.parametrize(
    ("forms", "cache", "words"),
    [
        ((), lambda: KVCache.latent(WIDE[..., :12], value_dim=8), r"cache.k has strides \[64, 16, .*; give the tensor"),
        (PARTS, lambda: KVCache.latent(WIDE[..., :12].contiguous(), value_dim=8), r"cache.parts\[0\] has strides"),
        (PARTS, lambda: KVCache.latent((WIDE[..., :8], WIDE[..., 8:12])), "contiguous without Form.STRIDED_KV"),
        (
            STRIDED,
            lambda: KVCache.latent(torch.zeros(32, 12, 4).transpose(1, 2), value_dim=8),
            "elements of a head are contiguous",
        ),
    ],
    ids=["pitch", "one buffer", "views of one buffer", "transposed"],
)
def test_guard_mode_refuses_strides_that_the_geometry_does_not_announce(forms, cache, words):
    """A kernel of contiguous pages would read other rows without an error (flashinfer#1341)."""
    rig = LatentRig(forms)
    rig.forward()
    with pytest.raises(BatchError, match=words):
        rig.forward(cache=cache())


@pytest.mark.parametrize("forms", [(*STRIDED, *PARTS), STRIDED], ids=["parts", "rows"])
def test_announced_strides_pass(forms):
    """With STRIDED_KV, rows and parts may be views of wider rows; the output has the same bits."""
    torch.manual_seed(0)
    rig, rows = LatentRig(forms), WIDE.clone()[..., :12]
    want = rig.forward().clone()
    views = (rows[..., :8], rows[..., 8:]) if Form.LATENT_PARTS in forms else rows
    assert torch.equal(rig.forward(cache=KVCache.latent(views, value_dim=8)), want)


@pytest.mark.parametrize("value_dim", [8, 12])
def test_guard_mode_refuses_shared_rows_of_a_layer_that_is_not_latent(value_dim):
    """Without `latent`, write_kv stores keys and values apart, so the values would overwrite keys of a shared row."""
    rig = NarrowRig(value_dim)
    rig.forward()
    shared = KVCache.latent(torch.zeros(32, 4, 12), value_dim=value_dim)
    with pytest.raises(BatchError, match=r"a view of cache.k, but the layer is not latent, .*; give V its own memory"):
        rig.forward(cache=shared)


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (1.0, "k_scale is 1.0, but kernels read float32"),
        (torch.ones(2), r"k_scale is a tensor float32 \[2\]"),
        (torch.ones(1).double(), r"k_scale is a tensor float64 \[1\]"),
        ((torch.ones(1), torch.ones(1)), "k_scale is .*; pass such a tensor"),
        (torch.ones(1, device="meta"), "k_scale is on meta, but the pages are on cpu; move"),
    ],
    ids=["number", "two", "float64", "pair", "device"],
)
def test_a_scale_is_one_float32_on_the_device_of_the_rows(scale, words):
    """The cache refuses another scale when it is created, in one buffer and in two."""
    for rows, value_dim in ((FP8, 8), ((FP8[..., :8], FP8[..., 8:]), None)):
        with pytest.raises(BatchError, match=words):
            KVCache.latent(rows, scale, value_dim=value_dim)


def test_pages_and_sinks_are_tensors():
    """A cache without V, as `write_kv` of a latent layer has it, and a list of logits are refused at once."""
    with pytest.raises(BatchError, match=r"v is None, but it must be a tensor; .* use KVCache.latent"):
        KVCache(torch.zeros(2, 4, 1, 12), None)
    with pytest.raises(BatchError, match=r"sinks is .*, but it must be a tensor; pass float32"):
        KVCache.latent(torch.zeros(2, 4, 12), value_dim=8, sinks=[0.0] * 4)


def test_the_remedy_for_a_wrong_scale_fits_a_latent_layer(make_geometry):
    """A latent layer's scale is not head_dim ** -0.5, so the error names `latent_shape`."""
    for latent, words in ((LATENT, "use draftmark_tools.models.latent_shape"), ({}, r"use head_dim \*\* -0.5")):
        with pytest.raises(GeometryError, match=words):
            make_geometry(**latent | {"softmax_scale": -1.0})


def test_bind_refuses_rows_that_a_plugin_does_not_claim(make_geometry):
    """An arena that was allocated without the core's checks does not open a latent layer of an old plugin."""
    old = draftmark.LoadedBackend("old", plugin_with("old"))
    for fields, word in ((LATENT, "latent"), ({"head_dim": 12, "value_dim": 8}, "narrow_values")):
        geometry = make_geometry(**fields)
        arena = Arena.allocate(old.buffers(geometry), "cpu")
        with pytest.raises(draftmark.BackendRefusal, match=rf"BackendInfo.{word} is False"):
            old.bind(geometry, arena)


def test_bind_refuses_a_form_that_a_plugin_does_not_claim(make_geometry):
    """An arena that was allocated without the core's checks does not open a geometry with an unclaimed form."""
    old, geometry = draftmark.LoadedBackend("old", plugin_with("old", forms=())), make_geometry(forms=STRIDED)
    arena = Arena.allocate(old.buffers(geometry), "cpu")
    with pytest.raises(draftmark.BackendRefusal, match=r"form strided_kv is not accepted: it is not in BackendInfo"):
        old.bind(geometry, arena)


def test_guard_mode_refuses_a_claim_of_lse_without_the_argument():
    """A plugin that claims lse and has the arguments of contract 1.4 gives an error that names both."""
    rig = Rig(guard=True)
    rig.backend = draftmark.LoadedBackend("old", plugin_with("old", lse=True)).open(rig.geometry, "cpu", guard=True)
    rig.forward()
    with pytest.raises(BatchError, match=r"BackendInfo.lse is True, but the backend's attend has no argument lse"):
        rig.backend.attend(rig.q, rig.cache, rig.batch, rig.out, torch.empty(8, 4))
