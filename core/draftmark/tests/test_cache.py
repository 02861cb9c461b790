"""KV pool and sinks: null pages, layer views, overlapping moves, and slots above 2**31."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import Mode
from draftmark.cache import KVCache, KVPool, sinks_of, slots_of
from draftmark.errors import BatchError
from draftmark_testing.paged_scenes import PagedScene
from draftmark_testing.scenes import Request, Scene, chain

LAYERS, PAGES = 3, 6


@pytest.fixture
def pool(make_geometry):
    """Return three layers of six pages of four slots; K and V encode their layer and slot."""
    pool = KVPool(make_geometry(page_size=4, num_kv_heads=2, head_dim=8), LAYERS, PAGES, 1, "cpu")
    slots = torch.arange(LAYERS * PAGES * 4, dtype=torch.float32).view(LAYERS, PAGES, 4, 1, 1)
    pool.k.copy_(slots.expand_as(pool.k))
    pool.v.copy_(-slots.expand_as(pool.v))
    return pool


def by_slot(tensor):
    """Return the first number of each slot, as [layers][slots]."""
    return tensor.flatten(1, 2)[:, :, 0, 0].tolist()


def test_layers_are_views_of_the_pool(pool):
    """A write to a layer's cache changes only that layer of the pool; each layer is contiguous."""
    pool.layers[1].k[2, 3] = 5.0
    assert (pool.k[1, 2, 3] == 5.0).all() and (pool.k[0, 2, 3] != 5.0).all()
    for cache in pool.layers:
        assert cache.k.is_contiguous() and cache.v.is_contiguous()
        assert tuple(cache.k.shape) == (PAGES, 4, 2, 8)
    assert pool.layers[0].k_scale is None


@pytest.mark.parametrize("null_pages", [1, 3])
def test_null_pages_start_as_zeros(make_geometry, null_pages):
    """Null pages are zero after allocation, in every layer."""
    pool = KVPool(make_geometry(), LAYERS, PAGES, null_pages, "cpu")
    assert not pool.k[:, :null_pages].any() and not pool.v[:, :null_pages].any()


def test_fp8_pools_have_unit_scales(make_geometry):
    """fp8 KV has float32 scales of one element with the value 1."""
    pool = KVPool(make_geometry(kv_dtype="float8_e4m3fn"), 1, 2, 1, "cpu")
    scale = pool.layers[0].k_scale
    assert (scale.dtype, scale.tolist()) == (torch.float32, [1.0])


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_belong_to_fp8(name):
    """A scale for 16-bit KV is refused by name, because no kernel reads it; fp8 KV may have either scale."""
    pages, scale = torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16), {name: torch.ones(1)}
    with pytest.raises(BatchError, match=f"{name} is given for a cache of torch.bfloat16"):
        KVCache(pages, pages, **scale)
    fp8 = pages.to(torch.float8_e4m3fn)
    assert getattr(KVCache(fp8, fp8, **scale), name) is scale[name]


@pytest.mark.parametrize(
    "sinks", [torch.zeros(8, dtype=torch.bfloat16), torch.zeros(1, 8), torch.zeros(16)[::2]], ids=["bf16", "2d", "gaps"]
)
def test_sinks_of_a_wrong_dtype_or_shape_are_refused(sinks):
    """Sinks must be contiguous float32, one value per query head; the error contains their dtype and shape."""
    pages = torch.zeros(2, 4, 1, 8)
    with pytest.raises(BatchError, match=r"sinks are .* kernels read contiguous float32 \[num_qo_heads\]"):
        KVCache(pages, pages, sinks=sinks)


def test_sinks_must_be_on_the_device_of_the_pages():
    """Sinks on another device are refused when the cache is created, not in a kernel."""
    pages = torch.zeros(2, 4, 1, 8)
    with pytest.raises(BatchError, match="sinks are on meta, but the pages are on cpu"):
        KVCache(pages, pages, sinks=torch.zeros(8, device="meta"))


def test_sinks_must_match_the_geometry(make_geometry):
    """Missing sinks, unexpected sinks and a wrong number of sinks each raise; matching sinks are returned."""
    without, with_sinks = make_geometry(), make_geometry(sinks=True)
    pages, heads = torch.zeros(2, 4, 1, 8), with_sinks.attention.num_qo_heads
    plain, right = KVCache(pages, pages), KVCache(pages, pages, sinks=torch.zeros(heads))
    assert sinks_of(plain, without) is None and sinks_of(right, with_sinks) is right.sinks
    with pytest.raises(BatchError, match=r"KVCache\.sinks is None"):
        sinks_of(plain, with_sinks)
    with pytest.raises(BatchError, match="the geometry has no sinks"):
        sinks_of(right, without)
    with pytest.raises(BatchError, match=f"has {heads + 1} logits, but the layer has {heads} query heads"):
        sinks_of(KVCache(pages, pages, sinks=torch.zeros(heads + 1)), with_sinks)


def test_fp8_kv_moves(make_geometry):
    """fp8 pages move bit by bit, although torch cannot index fp8 tensors."""
    pool = KVPool(make_geometry(kv_dtype="float8_e4m3fn", page_size=4), 1, 2, 1, "cpu")
    bits = pool.k.view(torch.uint8)
    bits.copy_(torch.arange(bits.numel()).view(bits.shape))
    wanted = bits[0, 1, 3].clone()
    pool.move(torch.tensor([7]), torch.tensor([5]))
    assert torch.equal(bits[0, 1, 1], wanted)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([9, 11, 14], [8, 9, 10]),
        ([8, 9, 10, 11], [9, 10, 11, 12]),
        ([8, 9, 10], [10, 9, 8]),
        ([8, 9, 10], [9, 10, 8]),
        ([8, 8, 8], [8, 9, 10]),
        ([8, 9], [8, 9]),
        ([], []),
    ],
    ids=["down", "up", "reversed", "rotated", "fan out", "in place", "nothing"],
)
def test_a_move_reads_everything_before_it_writes(pool, source, target):
    """Each target slot gets its source slot's old contents, in every layer of K and V, also when slots overlap."""
    old_k, old_v = by_slot(pool.k), by_slot(pool.v)
    pool.move(torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
    for old, new in ((old_k, by_slot(pool.k)), (old_v, by_slot(pool.v))):
        for layer in range(LAYERS):
            want = list(old[layer])
            for s, t in zip(source, target, strict=True):
                want[t] = old[layer][s]
            assert new[layer] == want


def test_random_overlapping_moves_equal_a_copy_by_hand(pool):
    """Two hundred random moves give the result of these moves on Python lists."""
    dice = random.Random(0)
    want = by_slot(pool.k)
    for _ in range(200):
        n = dice.randint(0, 10)
        target = dice.sample(range(4, PAGES * 4), n)
        source = [dice.randrange(PAGES * 4) for _ in range(n)]
        pool.move(torch.tensor(source, dtype=torch.int64), torch.tensor(target, dtype=torch.int64))
        want = [[row[source[target.index(i)]] if i in target else x for i, x in enumerate(row)] for row in want]
    assert by_slot(pool.k) == want


def test_slots_of_padded_requests_may_all_move_to_a_null_page(pool):
    """Padded entries may share null slots as targets; nothing else changes."""
    before = by_slot(pool.k)
    pool.move(torch.tensor([9, 2, 2]), torch.tensor([8, 0, 0]))
    after = by_slot(pool.k)
    assert [row[8] for row in after] == [row[9] for row in before]
    assert [row[1:8] + row[9:] for row in after] == [row[1:8] + row[9:] for row in before]


def test_moves_keep_addresses(pool):
    """Moves are in place, so a graph can capture them."""
    before = pool.k.data_ptr(), pool.v.data_ptr()
    pool.move(torch.tensor([9]), torch.tensor([8]))
    assert (pool.k.data_ptr(), pool.v.data_ptr()) == before


def test_slots_follow_the_page_table():
    """Position p is in page p // P of its own request, at offset p % P."""
    table = torch.tensor([[7, 2, 5], [1, 3, 0]], dtype=torch.int32)
    slots = slots_of(table, torch.tensor([[0, 5, 8], [3, 4, 11]]), 4)
    assert slots.tolist() == [[28, 9, 20], [7, 12, 3]]


def test_slots_above_two_to_the_31_do_not_overflow():
    """A page id near the end of a large pool, multiplied by the page size, needs 64 bits (vllm#47671)."""
    page = 2**31 - 1
    slots = slots_of(torch.tensor([[0, page]], dtype=torch.int32), torch.tensor([[128 + 5]]), 128)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [[page * 128 + 5]]


def test_the_reference_writes_64_bit_slots(make_geometry, open_reference):
    """The reference backend writes the exact slot, page · P + offset, to slot_mapping when it exceeds 2**31."""
    geometry = make_geometry(page_size=16)
    scene = Scene(geometry, Mode.DECODE, (Request(5, chain(1), 1),))
    paged = PagedScene(scene, [torch.zeros(6, 2, 8)], [torch.zeros(6, 2, 8)])
    paged.batch.page_table[0, 0] = 2**31 - 1
    backend, arena = open_reference(geometry)
    backend.plan(paged.batch)
    backend.write_metadata(paged.batch)
    assert arena["slot_mapping"][0] == (2**31 - 1) * 16 + 5
