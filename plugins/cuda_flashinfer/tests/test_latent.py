"""Tests of latent rows on a CPU: passes, plans and bytes, with a stand-in for FlashInfer's MLA module."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from draftmark import DRAFT_MODES, AttentionShape, Form, Mode
from draftmark.arena import Arena
from draftmark.batch import BatchBuffers, ragged
from draftmark.cache import KVCache
from draftmark.errors import BatchError
from draftmark.lengths import Exact
from draftmark_cuda_flashinfer import latent_plan, sizing
from draftmark_cuda_flashinfer.latent import LatentBackend
from draftmark_cuda_flashinfer.support import reasons_against
from draftmark_testing.latent_rows import assert_latent_row, slots_at
from draftmark_testing.pairs import quick

from .latent_stand_in import StandIn

SCALE = 192**-0.5


@pytest.fixture
def make_latent(make_geometry):
    """Return a function that makes a geometry with latent rows of 512+64; keyword arguments replace fields."""

    def make(**fields):
        rows = {"num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True, "softmax_scale": SCALE}
        return make_geometry(**{"num_qo_heads": 4, "max_context_len": 300, **rows, **fields})

    return make


def opened(geometry):
    arena = Arena.allocate(sizing.buffers(geometry), "cpu", guard=True)
    backend = LatentBackend(geometry, arena)
    backend._vendor = StandIn(geometry.attention)
    return backend, arena


def cache_of(geometry, pages, parts=False):
    """Return a cache of random rows, in one buffer or in two."""
    a = geometry.attention
    rows = torch.randn(pages, a.page_size, a.head_dim, generator=torch.Generator().manual_seed(1)).bfloat16()
    if parts:
        return KVCache.latent((rows[..., : a.value_dim].contiguous(), rows[..., a.value_dim :].contiguous()))
    return KVCache.latent(rows, value_dim=a.value_dim)


def served(backend, geometry, batch, cache, lse=False):
    """Run one forward on new rows; return queries, outputs and log-sum-exps."""
    a, dice = geometry.attention, torch.Generator().manual_seed(batch.num_rows)
    k = torch.randn(batch.num_rows, 1, a.head_dim, generator=dice).bfloat16()
    q = torch.randn(batch.num_rows, a.num_qo_heads, a.head_dim, generator=dice).bfloat16()
    out = torch.full((batch.num_rows, a.num_qo_heads, a.value_dim), float("nan"), dtype=torch.bfloat16)
    sums = torch.full(out.shape[:2], float("nan")) if lse else None
    backend.plan(batch)
    backend.write_metadata(batch)
    backend.write_kv(k, None, cache, batch)
    backend.attend(q, cache, batch, out, *([sums] if lse else []))
    return q, out, sums


def check(geometry, cache, q, out, sums, row, slots):
    """Compare one row with attention in float64 over the rows at `slots`."""
    a = geometry.attention
    keys = torch.cat(cache.parts, -1).flatten(0, 1)[slots]
    assert_latent_row(q[row], keys, a.value_dim, a.softmax_scale, out[row], None if sums is None else sums[row])


CASES = quick(product([1, 16, 48, 64], [4, 5, 20], [True, False], [True, False], [64, 0]))


@pytest.mark.parametrize(("page", "heads", "tree", "lse", "rest"), CASES)
def test_rows_see_the_defined_keys(make_latent, make_batch, truth, page, heads, tree, lse, rest):
    """Verification, decode and draft steps equal float64 for trees, chains and heads that do not divide a tile."""
    sizes = {"page_size": page, "num_qo_heads": heads, "head_dim": 512 + rest, "topk": 3 if tree else 1}
    target, draft = make_latent(**sizes), make_latent(**sizes, modes=DRAFT_MODES, num_steps=3)
    forwards = [(target, Mode.VERIFY, 0), (target, Mode.DECODE, 0), (draft, Mode.DRAFT, 0), (draft, Mode.DRAFT, 1)]
    for geometry, mode, step in [*forwards, (draft, Mode.DRAFT_EXTEND, 0)]:
        backend, arena = opened(geometry)
        chain = not tree or mode in (Mode.DECODE, Mode.DRAFT_EXTEND)
        batch = make_batch(geometry, mode, (0, 63, 64 + 4, 300), padded=4, step=step, tree=not chain)
        cache = cache_of(geometry, 1 + int(batch.page_table.max()), parts=rest > 0 and page == 16)
        arena.poison()
        q, out, sums = served(backend, geometry, batch, cache, lse)
        for r, j in product(range(4), range(batch.q_lens[0])):
            slots = torch.tensor(truth(geometry, batch, r)[j])
            check(geometry, cache, q, out, sums, r * batch.q_lens[0] + j, slots)
        arena.check()


@pytest.mark.parametrize("heads", [4, 20])
def test_blocks_see_themselves(make_latent, make_batch, heads):
    """In DRAFT_BLOCK every row sees its prefix and all slots of its block, also slots after its own."""
    geometry = make_latent(num_qo_heads=heads, page_size=16, block_size=7, modes=(Mode.DRAFT_BLOCK,))
    backend, _ = opened(geometry)
    lens = (0, 9, 63, 300)
    batch = make_batch(geometry, Mode.DRAFT_BLOCK, lens, tree=False)
    cache = cache_of(geometry, 1 + int(batch.page_table.max()))
    q, out, sums = served(backend, geometry, batch, cache, lse=True)
    for r, j in product(range(4), range(7)):
        check(geometry, cache, q, out, sums, r * 7 + j, slots_at(batch, r, torch.arange(lens[r] + 7), 16))


@pytest.mark.parametrize("heads", [1, 3, 4, 20, 96, 128, 160])
def test_ragged_prompts_equal_float64(make_latent, heads):
    """EXTEND serves requests of any row count, also of none, and padded requests without rows, in one pass."""
    geometry = make_latent(num_qo_heads=heads, page_size=16, max_extend_tokens=200)
    backend, buffers = opened(geometry)[0], BatchBuffers(geometry, "cpu")
    lens, rows = (5, 63, 0, 129, 0), (33, 1, 0, 2, 0)
    count = len(rows)
    table = 1 + torch.randperm(count * buffers.page_table.shape[1], generator=torch.Generator().manual_seed(3))
    buffers.page_table[:count] = table.view(count, -1).int()
    buffers.prefix_lens[:count] = torch.tensor(lens, dtype=torch.int32)
    prefix, pages = buffers.prefix_lens[:count], buffers.page_table[:count]
    batch = ragged(geometry, prefix, pages, rows, Exact(lens))
    cache = cache_of(geometry, 1 + int(table.max()))
    q, out, sums = served(backend, geometry, batch, cache, lse=True)
    first = 0
    for r, (length, n) in enumerate(zip(lens, rows, strict=True)):
        for j in range(n):
            check(geometry, cache, q, out, sums, first + j, slots_at(batch, r, torch.arange(length + j + 1), 16))
        first += n


def test_chains_of_odd_heads_need_pieces(make_latent, make_batch, truth, monkeypatch):
    """A causal pass over whole requests of 20 heads misses keys, as FlashInfer's wrapper says; pieces do not."""
    geometry = make_latent(num_qo_heads=20, page_size=64)
    batch = make_batch(geometry, Mode.VERIFY, (58, 64, 122, 300), tree=False)
    wrong = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(latent_plan, "splits_a_row", lambda heads, q_len: False)
        backend, _ = opened(geometry)
        cache = cache_of(geometry, 1 + int(batch.page_table.max()))
        q, out, _ = served(backend, geometry, batch, cache)
        for r, j in product(range(4), range(7)):
            try:
                check(geometry, cache, q, out, None, r * 7 + j, torch.tensor(truth(geometry, batch, r)[j]))
            except AssertionError:
                wrong.append((whole, r, j))
    assert wrong and all(whole for whole, _, _ in wrong)


def test_a_piece_is_one_tile():
    """A piece ends with a row and fits one tile, sized by the mean of any pieces. Other requests stay whole."""
    for heads, q_len in product(range(1, 129), (None, 1, 2, 3, 7, 16, 33)):
        piece = latent_plan.rows_of_a_piece(heads, q_len)
        if piece is not None:
            packed = {n * heads for rows in (1, 7, 33) for n in latent_plan.cut(rows, piece)}
            assert max(packed) <= latent_plan.tile_rows(min(packed)), (heads, q_len)
            assert sum(latent_plan.cut(33, piece)) == 33
        elif q_len is not None:
            assert not latent_plan.splits_a_row(heads, q_len)


def test_tiles_that_split_a_row_are_known():
    """`splits_a_row` is 1 exactly if a tile ends between two heads of a row."""
    for heads, q_len in product(range(1, 130), (1, 2, 3, 7, 16, 33)):
        tile = 128 if heads * q_len > 64 else 64
        ends = [end for end in range(tile, heads * q_len, tile) if end % heads]
        assert latent_plan.splits_a_row(heads, q_len) == bool(ends), (heads, q_len)


def works(q_lens, kv_lens, heads, sms, piece):
    """Count work items as `MLAPlan` of FlashInfer 0.7.2 does, for a pass without a mask."""
    kv_lens = [kv for q, kv in zip(q_lens, kv_lens, strict=True) for _ in latent_plan.cut(q, piece)]
    q_lens = [n for q in q_lens for n in latent_plan.cut(q, piece)]
    cluster = 2 if sum(q_lens) * heads // len(q_lens) > 64 else 1
    tiles = [-(-q * heads // (64 * cluster)) for q in q_lens]
    mean = max(1, -(-sum(n * m for n, m in zip(tiles, kv_lens, strict=True)) // (sms // cluster)))
    limits = ((8, 32), (16, 64), (32, 128), (64, 192))
    limit = next((size for most, size in limits if mean <= most), -(-mean // 256) * 256)
    return sum(n * max(1, -(-m // limit)) for n, m in zip(tiles, kv_lens, strict=True))


def test_work_items_have_a_bound(make_latent):
    """No batch makes more work items than `max_works`. In some batch the difference is at most the number of SMs."""
    dice, slack = random.Random(4), []
    for heads in (1, 4, 16, 20, 40, 96, 128):
        geometry = make_latent(num_qo_heads=heads, num_draft_tokens=9, max_extend_tokens=512, max_num_reqs=40)
        for mode, _ in product((Mode.DECODE, Mode.VERIFY, Mode.EXTEND), range(60)):
            count, most = dice.randint(1, geometry.max_reqs), latent_plan.max_works(geometry, mode)
            q_lens = [geometry.extent(mode).q_len] * count
            if mode is Mode.EXTEND:
                q_lens = [dice.choice((1, 2, 12)) for _ in range(count)]
                if sum(q_lens) > 512:
                    continue
            kv_lens = [dice.choice((1, 50, 5000, 100000)) for _ in q_lens]
            piece = latent_plan.rows_of_a_piece(heads, None if mode is Mode.EXTEND else q_lens[0])
            for one in {piece, None if mode is Mode.VERIFY else piece}:  # trees have whole requests
                found = works(q_lens, kv_lens, heads, geometry.device.num_sms, one)
                assert found <= most, (heads, mode, count)
                slack.append(most - found)
    assert min(slack) <= 132


def test_bytes_of_a_plan(make_latent):
    """A plan has nine arrays of 16,384 entries and five of one entry per SM; partials have two tiles per cluster."""
    geometry = make_latent(num_qo_heads=128)
    specs = {spec.name: spec for spec in sizing.buffers(geometry)}
    assert specs[latent_plan.INTS].nbytes == 9 * 16384 * 4 + 5 * 528
    assert specs[latent_plan.FLOATS].nbytes == 2 * 66 * 128 * (512 * 2 + 4)
    assert specs[latent_plan.LSE].shape == (8 * 7, 128)
    assert latent_plan.LSE not in {spec.name for spec in sizing.buffers(make_latent(modes=(Mode.DECODE,)))}


def test_draft_steps_of_a_chain_have_their_own_plans(make_latent):
    """All steps of a chain are planned before one replay, so each has its place; steps of a tree share the prefix's."""
    for topk, places in ((1, 5), (4, 1)):
        geometry = make_latent(topk=topk, num_steps=6, modes=DRAFT_MODES)
        plan = latent_plan.int_bytes(132)
        offsets = [latent_plan.plan_offset(geometry, Mode.DRAFT, step) for step in range(5)]
        assert offsets == [plan * min(step, places - 1) for step in range(5)]
        assert latent_plan.plan_offset(geometry, Mode.DRAFT_EXTEND, 0) == plan * places
        [ints] = [spec for spec in sizing.buffers(geometry) if spec.name == latent_plan.INTS]
        assert ints.nbytes == plan * (places + 1)


REFUSALS = {
    "value": ({"head_dim": 320, "value_dim": 256}, "value_dim 256 is not served"),
    "rest": ({"head_dim": 544}, "a rest of 32 elements"),
    "fp8": ({"kv_dtype": "float8_e4m3fn"}, "takes KV scales as host numbers"),
    "window": ({"window_left": 128}, "window_left 128 is not served for latent rows"),
    "cap": ({"logits_soft_cap": 30.0}, "logits_soft_cap 30.0 is not served for latent rows"),
    "sinks": ({"sinks": True}, "attention sinks are not served"),
    "works": ({"num_qo_heads": 128, "max_extend_tokens": 16384}, "16524 work items of EXTEND are not served"),
    "reqs": ({"num_qo_heads": 128, "max_num_reqs": 2500}, "17632 work items of VERIFY are not served"),
    "table": ({"max_num_reqs": 4096, "max_context_len": 1 << 20, "num_qo_heads": 8}, "tokens in all page tables"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_the_value(make_latent, name):
    """Each unsupported latent geometry is refused with field, value and limit."""
    fields, expected = REFUSALS[name]
    [reason] = reasons_against(make_latent(**fields))
    assert expected in reason


@pytest.mark.parametrize("heads", [1, 5, 12, 16, 20, 96, 128])
def test_any_number_of_heads_is_served(make_latent, heads):
    """Heads of any number per rank, both row widths and both row layouts are served."""
    assert reasons_against(make_latent(num_qo_heads=heads)) == []
    assert reasons_against(make_latent(num_qo_heads=heads, head_dim=512, modes=DRAFT_MODES)) == []


def test_unaligned_queries_raise(make_latent, make_batch):
    """Queries with heads that are not multiples of 16 bytes apart raise, because FlashInfer loads 16 bytes at once."""
    geometry = make_latent()
    backend, _ = opened(geometry)
    batch = make_batch(geometry, Mode.DECODE, (5, 6))
    backend.plan(batch)
    q = torch.zeros(2, 4, 577, dtype=torch.bfloat16)[..., :576]
    with pytest.raises(BatchError, match="strides are multiples of 8 elements"):
        backend.attend(q, cache_of(geometry, 9), batch, torch.empty(2, 4, 512, dtype=torch.bfloat16))


def test_layout_forms_are_claimed():
    """The plugin claims latent rows, rows in two buffers, engines that store KV, and log-sum-exps."""
    from draftmark_cuda_flashinfer import FlashInferPlugin

    info = FlashInferPlugin.info
    assert info.latent and info.lse and {Form.LATENT_PARTS, Form.ENGINE_STORES} <= set(info.forms)
    assert AttentionShape(16, 1, 576, 64, value_dim=512, latent=True, softmax_scale=1.0).value_width == 512
