"""Tests of calls for latent layers: guard mode refuses wrong ones, and layers share pages."""

from __future__ import annotations

import pytest
import torch

import draftmark
from core.draftmark.tests.bad_calls import Rig
from core.draftmark.tests.latent_shapes import LATENT, LatentRig, plugin_with
from draftmark import BatchError, Form
from draftmark.runtime import KVCache

ROWS = torch.zeros(32, 4, 12)


BAD = {
    "v given": ((), lambda rig: {"v": rig.k[..., :8]}, "v is a tensor float32 .* pass None"),
    "k of value width": ((), lambda rig: {"k": rig.k[..., :8]}, "k is a tensor"),
    "out of row width": ((), lambda rig: {"out": torch.empty(8, 4, 12)}, "out is a tensor"),
    "two pools": (
        (),
        lambda rig: {"cache": KVCache(ROWS[:, :, None], ROWS[:, :, None, :8].clone())},
        "cache.v has its own memory, .* create the cache with KVCache.latent",
    ),
    "v of the end of the row": (
        (),
        lambda rig: {"cache": KVCache(ROWS[:, :, None], ROWS[:, :, None, 4:])},
        "cache.v has its own memory",
    ),
    "v of another width": ((), lambda rig: {"cache": KVCache.latent(ROWS, value_dim=9)}, "cache.v is a tensor"),
    "parts without the form": (
        (),
        lambda rig: {"cache": KVCache.latent((ROWS[..., :8], ROWS[..., 8:]))},
        "rows in two buffers, but the geometry lacks Form.LATENT_PARTS; add the form",
    ),
    "parts of other widths": (
        (Form.LATENT_PARTS,),
        lambda rig: {"cache": KVCache.latent((ROWS[..., :9], ROWS[..., 9:]))},
        r"cache.parts\[0\] is a tensor",
    ),
    "pools of K and V where parts are needed": (
        (Form.LATENT_PARTS,),
        lambda rig: {"cache": KVCache(ROWS[:, :, None], ROWS[:, :, None].clone())},
        "only latent rows have parts",
    ),
    "a store by write_kv": ((Form.ENGINE_STORES,), lambda rig: {}, "the engine writes KV itself"),
}


@pytest.mark.parametrize("name", BAD)
def test_guard_mode_refuses_bad_calls_of_a_latent_layer(name):
    """Guard mode names the tensor that does not fit a latent layer, its value and the remedy."""
    forms, changes, words = BAD[name]
    rig = LatentRig(forms)
    with pytest.raises(BatchError, match=words):
        rig.forward(**changes(rig))


def test_guard_mode_refuses_two_scales():
    """Two scales of a latent cache are refused, because a row has one."""
    rig = LatentRig()
    geometry = draftmark.Geometry.create(
        draftmark.AttentionShape(4, 1, 12, 4, "float32", "float8_e4m3fn", 0.3, value_dim=8, latent=True),
        rig.geometry.limits,
    )
    from draftmark_tools.guard.layer_cache import check_cache

    rows = ROWS.to(torch.float8_e4m3fn)[:, :, None]
    one = torch.ones(1)
    check_cache(KVCache(rows, rows[..., :8], one, one), geometry, rows.device, 0)
    with pytest.raises(BatchError, match="k_scale and v_scale differ, but a latent row has one scale"):
        check_cache(KVCache(rows, rows[..., :8], one, torch.ones(1)), geometry, rows.device, 0)


def test_lse_is_asked_only_of_a_backend_that_writes_it():
    """Guard mode refuses an lse of a wrong shape, and any lse for a plugin that does not claim it."""
    rig = LatentRig()
    rig.forward()
    good = torch.empty(8, 4)
    rig.backend.attend(rig.q, rig.cache, rig.batch, rig.out, good)
    assert good.isfinite().all()
    for wrong, words in ((good.double(), "lse"), (good[:7], "lse"), (torch.empty(4, 8).t(), "lse has strides")):
        with pytest.raises(BatchError, match=words):
            rig.backend.attend(rig.q, rig.cache, rig.batch, rig.out, wrong)
    old = Rig()
    old.backend = draftmark.LoadedBackend("old", plugin_with("old")).open(old.geometry, "cpu", guard=True)
    old.forward()
    with pytest.raises(BatchError, match=r"BackendInfo\.lse is False; pass None"):
        old.backend.attend(old.q, old.cache, old.batch, old.out, good)


def test_host_lengths_and_pages_of_a_latent_geometry_are_those_of_any_other(make_geometry):
    """No length, page count or row count depends on the form of the layer."""
    fields = {"num_draft_tokens": 7, "topk": 3, "num_steps": 3, "capture_batch_sizes": (2, 8)}
    plain, latent = make_geometry(**fields), make_geometry(**fields | LATENT)
    for name in ("max_tail", "max_kv_len", "max_pages_per_req", "max_reqs", "max_rows_any", "mask_words"):
        assert getattr(plain, name) == getattr(latent, name)
