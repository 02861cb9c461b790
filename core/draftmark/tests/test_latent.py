"""Latent layers and narrow values: byte formulas, caches of one buffer and of two, refusals, and guard checks."""

from __future__ import annotations

import pytest
import torch

import draftmark
from core.draftmark.tests.bad_calls import Rig
from core.draftmark.tests.latent_shapes import LATENT, plugin_with
from draftmark import AttentionShape, BatchError, BufferError, Form, Geometry, GeometryError, Limits, Mode
from draftmark.runtime import KVCache, KVPool, TorchTreeOps

PARTS = LATENT | {"forms": (Form.LATENT_PARTS,)}
NARROW = {"head_dim": 12, "value_dim": 8}


def deepseek(**more) -> Geometry:
    """Return the geometry of DeepSeek V3 at tensor parallelism 16."""
    shape = AttentionShape(8, 1, 576, 64, softmax_scale=192**-0.5, value_dim=512, latent=True)
    return Geometry.create(shape, Limits(4, 1024), **more)


def test_bytes_and_widths_follow_the_row(make_geometry):
    """A latent token has one row; narrow values shorten V only; an output row has value_width elements a head."""
    latent = deepseek()
    assert (latent.row_bytes, latent.page_bytes) == (1152, 73_728)
    assert (latent.query_width, latent.output_width) == (8 * 576, 8 * 512)
    narrow = make_geometry(**NARROW)
    assert (narrow.row_bytes, narrow.page_bytes) == (2 * (12 + 8) * 4, 4 * 160)
    assert (narrow.query_width, narrow.output_width) == (4 * 12, 4 * 8)
    plain = make_geometry()
    assert plain.page_bytes == 2 * 4 * 2 * 8 * 4
    assert plain.attention.value_width == plain.attention.head_dim == 8


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"num_kv_heads": 5}, "attention.num_kv_heads", "one KV head on every rank; set num_kv_heads to 1"),
        (
            {"softmax_scale": None},
            "attention.softmax_scale",
            "before absorption, not from the row; set the model",
        ),
        ({"value_dim": 13}, "attention.value_dim", "it must be <= head_dim = 12"),
        ({"value_dim": 0}, "attention.value_dim", "it must be >= 1"),
        ({"value_dim": True}, "attention.value_dim", "it must be an integer"),
        ({"latent": 1}, "attention.latent", "it must be True or False"),
        ({"latent": False, "forms": (Form.LATENT_PARTS,)}, "forms", "only a latent layer has rows in two parts"),
        ({"value_dim": 12, "forms": (Form.LATENT_PARTS,)}, "forms", "the rows have no rest"),
        ({"value_dim": None, "forms": (Form.LATENT_PARTS,)}, "forms", "the rows have no rest"),
    ],
)
def test_a_latent_shape_that_contradicts_itself_is_refused(make_geometry, change, field, words):
    """Each error names the field, its value, the limit and the remedy."""
    with pytest.raises(GeometryError) as caught:
        make_geometry(**LATENT | change)
    assert caught.value.field == field and words in str(caught.value), str(caught.value)
    make_geometry(**LATENT)


def test_one_buffer_gives_views_of_its_rows():
    """k is the whole row, v and the first part its leading elements, all in the caller's memory."""
    rows = torch.arange(2 * 4 * 12.0).view(2, 4, 12)
    cache = KVCache.latent(rows, value_dim=8)
    assert cache.k.shape == (2, 4, 1, 12) and cache.v.shape == (2, 4, 1, 8)
    assert torch.equal(cache.k[:, :, 0], rows) and torch.equal(cache.v[:, :, 0], rows[..., :8])
    value, rest = cache.parts
    assert cache.parts is cache.parts and cache.part_pages is cache.part_pages
    assert [tuple(one.shape) for one in cache.part_pages] == [(2, 4, 1, 8), (2, 4, 1, 4)]
    assert torch.equal(torch.cat((value, rest), -1), rows) and rest.shape[-1] == 4
    assert {one.untyped_storage().data_ptr() for one in (cache.k, cache.v, value, rest)} == {rows.data_ptr()}


def test_two_buffers_have_parts_and_no_k_or_v():
    """The cache of two buffers returns them unchanged, and names `parts` where k or v is read."""
    parts, sinks = (torch.zeros(2, 4, 8), torch.zeros(2, 4, 4)), torch.zeros(5)
    cache = KVCache.latent(parts, sinks=sinks)
    assert all(a is b for a, b in zip(cache.parts, parts, strict=True)) and cache.sinks is sinks
    assert repr(cache) == "KVCache.latent((torch.float32 [2, 4, 8], torch.float32 [2, 4, 4]))"
    assert cache in {cache} and cache != KVCache.latent(parts)
    for name in ("k", "v"):
        with pytest.raises(BatchError, match=f"{name} does not exist: the rows .*; read KVCache.parts"):
            getattr(cache, name)


def test_a_latent_cache_has_one_scale():
    """The scale of fp8 rows is the scale of keys and values; a scale for 16-bit rows is refused."""
    scale, eight = torch.ones(1), torch.zeros(2, 4, 12).to(torch.float8_e4m3fn)
    for cache in (KVCache.latent(eight, scale, value_dim=8), KVCache.latent((eight[..., :8], eight[..., 8:]), scale)):
        assert cache.k_scale is scale and cache.v_scale is scale
    with pytest.raises(BatchError, match="only fp8 caches have scales"):
        KVCache.latent((eight.half(), eight.half()), scale)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: KVCache.latent(torch.zeros(2, 4, 1, 12), value_dim=8), r"rows are a tensor float32 \[2, 4, 1, 12\]"),
        (lambda: KVCache.latent(None, value_dim=8), "rows are None"),
        (lambda: KVCache.latent(torch.zeros(2, 4, 12)), "value_dim is None, .* AttentionShape.value_width"),
        (
            lambda: KVCache.latent(torch.zeros(2, 4, 12), value_dim=13),
            r"value_dim is 13, .* 1 … 12; pass AttentionShape",
        ),
        (lambda: KVCache.latent((torch.zeros(2, 4, 8),)), "two buffers are value parts"),
        (lambda: KVCache.latent((torch.zeros(2, 4, 8), torch.zeros(2, 5, 4))), "two buffers are value parts"),
        (lambda: KVCache.latent((torch.zeros(2, 4, 8), torch.zeros(2, 4, 4).half())), "one dtype and device"),
        (lambda: KVCache.latent((torch.zeros(2, 4, 8), torch.zeros(2, 4, 0))), "two buffers are value parts"),
        (lambda: KVCache.latent((torch.zeros(2, 4, 0), torch.zeros(2, 4, 4))), "two buffers are value parts"),
        (lambda: KVCache.latent([torch.zeros(2, 4, 8), torch.zeros(2, 4, 4)]), r"rows are \[tensor.*…, but a latent"),
        (
            lambda: KVCache.latent((torch.zeros(2, 4, 8), torch.zeros(2, 4, 4)), value_dim=7),
            "value parts have 8 elements",
        ),
        (lambda: KVCache(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)).parts, "only latent rows have parts"),
    ],
    ids=range(12),
)
def test_rows_of_a_wrong_form_are_refused(call, words):
    """`KVCache.latent` and `parts` refuse a wrong argument with one sentence."""
    with pytest.raises(BatchError, match=words):
        call()


@pytest.mark.parametrize("fields", [LATENT, PARTS, NARROW], ids=["latent", "parts", "narrow"])
def test_a_pool_moves_every_byte_of_a_slot_once(make_geometry, fields):
    """A pool allocates row_bytes per slot, starts null pages as zeros, and moves slots that overlap."""
    geometry = make_geometry(**fields)
    pool = KVPool(geometry, 3, 6, 2, "cpu")
    assert sum(one.numel() * one.element_size() for one in pool.tensors) == 3 * 6 * geometry.page_bytes
    assert not any(one[:, :2].any() for one in pool.tensors)
    for one in pool.tensors:
        one.copy_(torch.randn(one.shape))
    before = [one.flatten(1, 2).clone() for one in pool.tensors]
    source, target = torch.tensor([9, 10, 11, 20]), torch.tensor([8, 9, 10, 12])
    pool.move(source, target)
    for one, was in zip(pool.tensors, before, strict=True):
        was[:, target] = was[:, source]
        assert torch.equal(one.flatten(1, 2), was)


def test_layers_of_a_latent_pool_are_views_of_it(make_geometry):
    """A write through a layer's k, v or parts changes the pool's one tensor, or its two parts."""
    pool = KVPool(make_geometry(**LATENT), 2, 3, 1, "cpu")
    pool.k.zero_()
    pool.layers[1].v[2, 3] = 1.0
    pool.layers[1].parts[1][2, 3] = 2.0
    assert pool.k[1, 2, 3, 0].tolist() == [1.0] * 8 + [2.0] * 4 and pool.k.sum() == 16
    apart = KVPool(make_geometry(**PARTS), 2, 3, 1, "cpu")
    apart.layers[1].parts[0][2, 3] = 7.0
    assert (apart.tensors[0][1, 2, 3] == 7.0).all()
    with pytest.raises(BufferError, match=r"the pool has no k: .* KVPool.tensors"):
        _ = apart.k
    assert not hasattr(apart, "rows")


@pytest.mark.parametrize("fields", [LATENT, PARTS], ids=["latent", "parts"])
def test_accepted_rows_are_compacted(make_geometry, fields):
    """After verification the rows of accepted nodes lie at consecutive slots, in every layer and buffer."""
    geometry = make_geometry(**fields, num_draft_tokens=4, modes=(Mode.VERIFY,))
    rig = Rig()
    pool = KVPool(geometry, 2, 32, 1, "cpu")
    for one in pool.tensors:
        one.copy_(torch.randn(one.shape))
    before = [one.flatten(1, 2).clone() for one in pool.tensors]
    TorchTreeOps(geometry).compact(pool, rig.batch, rig.accepted([[0, 3, 2, 3], [0, 2, 2, 3]]))
    for one, was in zip(pool.tensors, before, strict=True):
        table, size = rig.batch.page_table, 4
        for request, (prefix, source) in enumerate(((5, 3), (2, 2))):
            at, to = (int(table[request, n // size]) * size + n % size for n in (prefix + source, prefix + 1))
            assert torch.equal(one.flatten(1, 2)[:, to], was[:, at])


@pytest.mark.parametrize(
    ("fields", "claims", "reason"),
    [
        (LATENT, {"latent": True}, "latent attention is not served: BackendInfo.latent is False"),
        (
            NARROW,
            {"narrow_values": True},
            "values of 8 elements with keys of 12 are not served: BackendInfo.narrow_values is False",
        ),
        ({"chosen_width": 3}, {"chosen_keys": True}, "chosen keys are not served: BackendInfo.chosen_keys is False"),
        (
            {"forms": (Form.ENGINE_STORES,)},
            {"forms": (Form.ENGINE_STORES,)},
            "form engine_stores is not accepted: it is not in BackendInfo.forms",
        ),
    ],
    ids=["latent", "narrow", "chosen", "engine_stores"],
)
def test_the_core_refuses_what_a_plugin_does_not_claim(make_geometry, fields, claims, reason):
    """An old plugin never receives a latent layer, chosen keys, narrow values or the form of an engine that stores."""
    geometry = make_geometry(**fields)
    old, new = (
        draftmark.LoadedBackend("old", plugin_with("old")),
        draftmark.LoadedBackend("new", plugin_with("new", **claims)),
    )
    assert old.supports(geometry) == [reason] and old.supports(make_geometry()) == []
    assert new.supports(geometry) == []


def test_an_old_plugins_hook_never_sees_unclaimed_rows(make_geometry):
    """Every hook of a plugin that fails on wide or latent rows still leads to a refusal by name."""

    class Strict(type(plugin_with("strict"))):
        info = draftmark.BackendInfo("strict", "any", 4, True)

        def supports(self, geometry):
            raise AssertionError("the hook is called")

    backend = draftmark.LoadedBackend("strict", Strict())
    lists = LATENT | {"chosen_width": 3}
    for fields, word in ((LATENT, "latent"), (PARTS, "latent"), (NARROW, "narrow_values"), (lists, "chosen_keys")):
        reasons = backend.supports(make_geometry(**fields))
        assert f"BackendInfo.{word} is False" in reasons[0]
        with pytest.raises(draftmark.BackendRefusal, match=f"BackendInfo.{word} is False"):
            backend.allocate(make_geometry(**fields), "cpu")


@pytest.mark.parametrize("guard", [False, True])
def test_an_old_plugin_runs_unchanged(guard):
    """A plugin with the old arguments of write_kv and attend gives the same bits, guarded or not."""
    torch.manual_seed(0)
    rig = Rig(guard)
    want = rig.forward().clone()
    rig.backend = draftmark.LoadedBackend("old", plugin_with("old")).open(rig.geometry, "cpu", guard=guard)
    assert torch.equal(rig.forward(), want)


def test_info_fields_have_their_types():
    """A claim of another type is refused when the plugin is loaded."""
    with pytest.raises(draftmark.BackendLoadError, match="BackendInfo in which row_formats is a tuple of names"):
        draftmark.LoadedBackend("odd", plugin_with("odd", row_formats=(1,)))
    for field in ("latent", "narrow_values", "lse", "chosen_keys"):
        with pytest.raises(draftmark.BackendLoadError, match=f"BackendInfo in which {field} is True or False"):
            draftmark.LoadedBackend("odd", plugin_with("odd", **{field: 1}))
