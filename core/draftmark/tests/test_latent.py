"""Latent layers and narrow values: byte formulas, caches of one buffer and of two, refusals, and guard checks."""

from __future__ import annotations

import pytest
import torch

import draftmark
from core.draftmark.tests.bad_calls import Rig
from draftmark import (
    LAYOUT_FORMS,
    AttentionShape,
    BatchError,
    BufferError,
    Form,
    Geometry,
    GeometryError,
    GeometryPair,
    Limits,
    Mode,
)
from draftmark.runtime import KVCache, KVPool, TorchTreeOps

LATENT = {"num_qo_heads": 5, "num_kv_heads": 1, "head_dim": 12, "value_dim": 8, "latent": True, "softmax_scale": 0.3}
PARTS = LATENT | {"forms": (Form.LATENT_PARTS,)}
ROWS = torch.zeros(32, 4, 12)
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
            "before absorption, not from the row; set it as",
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
        (lambda: KVCache.latent(torch.zeros(2, 4, 12), value_dim=13), r"value_dim is 13, .* first 1 … 12 elements"),
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
        draftmark.LoadedBackend("old", _plugin("old")),
        draftmark.LoadedBackend("new", _plugin("new", **claims)),
    )
    assert old.supports(geometry) == [reason] and old.supports(make_geometry()) == []
    assert new.supports(geometry) == []


def test_an_old_plugins_hook_never_sees_unclaimed_rows(make_geometry):
    """Every hook of a plugin that fails on wide or latent rows still leads to a refusal by name."""

    class Strict(type(_plugin("strict"))):
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


def _plugin(name, **claims):
    """Return a plugin with the sizes of the reference, and a step path with the arguments of contract 1.4."""
    from draftmark_reference import ReferencePlugin

    class Old:
        def __init__(self, inner):
            self.plan, self.write_metadata, self._inner = inner.plan, inner.write_metadata, inner

        def write_kv(self, k, v, cache, batch):
            assert v is not None
            self._inner.write_kv(k, v, cache, batch)

        def attend(self, q, cache, batch, out):
            self._inner.attend(q, cache, batch, out)

    class Plugin(ReferencePlugin):
        info = draftmark.BackendInfo(name, "any", 4, True, **{"modes": tuple(Mode), "forms": LAYOUT_FORMS} | claims)

        def open_backend(self, geometry, arena):
            return Old(super().open_backend(geometry, arena))

    return Plugin()


@pytest.mark.parametrize("guard", [False, True])
def test_an_old_plugin_runs_unchanged(guard):
    """A plugin with the old arguments of write_kv and attend gives the same bits, guarded or not."""
    torch.manual_seed(0)
    rig = Rig(guard)
    want = rig.forward().clone()
    rig.backend = draftmark.LoadedBackend("old", _plugin("old")).open(rig.geometry, "cpu", guard=guard)
    assert torch.equal(rig.forward(), want)


def test_info_fields_have_their_types():
    """A claim of another type is refused when the plugin is loaded."""
    for field in ("latent", "narrow_values", "lse", "chosen_keys"):
        with pytest.raises(draftmark.BackendLoadError, match=f"BackendInfo in which {field} is True or False"):
            draftmark.LoadedBackend("odd", _plugin("odd", **{field: 1}))


class LatentRig(Rig):
    """The rig of `bad_calls`, with a latent layer of 4 query heads on a guarded reference backend."""

    def __init__(self, forms: tuple[Form, ...] = (), backend: str = "reference") -> None:
        super().__init__()
        shape = AttentionShape(4, 1, 12, 4, "float32", "float32", softmax_scale=0.3, value_dim=8, latent=True)
        old = self.geometry
        self.geometry = Geometry.create(shape, old.limits, old.draft, modes=old.modes, forms=forms)
        self.backend = self.loaded.open(self.geometry, "cpu", guard=True)
        self.pool = KVPool(self.geometry, 1, 32, 1, "cpu")
        for one in self.pool.tensors:
            one.zero_()
        self.cache = self.pool.layers[0]
        self.q, self.k, self.v = torch.randn(8, 4, 12), torch.randn(8, 1, 12), None
        self.out = torch.empty(8, 4, 8)


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
    from draftmark.guard.layer_cache import check_cache

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
    old.backend = draftmark.LoadedBackend("old", _plugin("old")).open(old.geometry, "cpu", guard=True)
    old.forward()
    with pytest.raises(BatchError, match=r"BackendInfo\.lse is False; pass None"):
        old.backend.attend(old.q, old.cache, old.batch, old.out, good)


def test_a_latent_target_and_a_gqa_draft_share_pages(make_geometry):
    """The two models of a pair share the page size and page ids; the bytes of a page differ."""
    pair = GeometryPair(make_geometry(**LATENT), make_geometry())
    assert pair.target.max_pages_per_req == pair.draft.max_pages_per_req
    assert (pair.target.page_bytes, pair.draft.page_bytes) == (4 * 12 * 4, 2 * 4 * 2 * 8 * 4)
    with pytest.raises(GeometryError, match=r"pair\.page_size is 8, but the target has 4"):
        GeometryPair(make_geometry(**LATENT), make_geometry(page_size=8))


def test_host_lengths_and_pages_of_a_latent_geometry_are_those_of_any_other(make_geometry):
    """No length, page count or row count depends on the form of the layer."""
    fields = {"num_draft_tokens": 7, "topk": 3, "num_steps": 3, "capture_batch_sizes": (2, 8)}
    plain, latent = make_geometry(**fields), make_geometry(**fields | LATENT)
    for name in ("max_tail", "max_kv_len", "max_pages_per_req", "max_reqs", "max_rows_any", "mask_words"):
        assert getattr(plain, name) == getattr(latent, name)
