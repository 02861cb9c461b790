"""EXTEND over an e4m3 cache with K and V upcast before attention."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark.batch import Causal, ForwardBatch
from draftmark.lengths import Exact, Unknown, UpperBound
from draftmark.runtime import KVCache
from draftmark_cuda_triton import sizing
from draftmark_cuda_triton.heuristics import interpreted, upcast
from draftmark_cuda_triton.prefill_fp8 import PrefillFp8
from plugins.cuda_triton.tests import helpers

H200 = DeviceProfile("cuda", 90, 132)
ALIGN_KEYS = interpreted.INTERPRETED_KEYS


def geometry(page=16, reqs=8, context=4096, **attention):
    shape = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": page, **attention}
    made = AttentionShape(**shape, q_dtype="bfloat16", kv_dtype="float8_e4m3fn")
    return Geometry.create(made, Limits(reqs, context, 4096), DraftShape(), H200, (Mode.EXTEND,))


def batch_of(lens, rows, page, host=Exact, padded=0):
    """Return a batch with shuffled pages, plus `padded` requests without rows."""
    count, width = len(lens) + padded, 1 + max(n + t for n, t in zip(lens, rows, strict=True)) // page
    generator = torch.Generator().manual_seed(sum(lens))
    table = (torch.randperm(count * width, generator=generator).view(count, width) + 1).int()
    given = [*lens, *[0] * padded], [*rows, *[0] * padded]
    q_lens = tuple(given[1])
    prefix, q_lens_now = (torch.tensor(one, dtype=torch.int32) for one in given)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int32), q_lens_now.cumsum(0, dtype=torch.int32)])
    known = host(len(lens), 4096) if host is Unknown else host(tuple(lens))
    return ForwardBatch(
        Mode.EXTEND, 0, prefix.to(helpers.DEVICE), indptr.to(helpers.DEVICE), table.to(helpers.DEVICE), Causal(),
        torch.zeros(sum(rows), dtype=torch.int64, device=helpers.DEVICE), known, len(lens), q_lens, q_lens, sum(rows),
        None,
    )  # fmt: skip


def limit_pages(monkeypatch, pages, heads, dim):
    """Limit the upcast buffers to `pages` pages of K and V, with `heads` heads of `dim`."""
    monkeypatch.setattr(upcast, "UPCAST_BYTES", 2 * pages * upcast.UPCAST_PAGE_SIZE * heads * dim * 2)


def upcast_error(
    monkeypatch, options, lens, rows, *, page=16, scales=(None, None), sinks=None, interleaved=True, padded=0,
    parts=1, is_split=None,
):  # fmt: skip
    """Return the error of a batch with upcast K and V, after checking slots, page table and upcast pages.

    Unused slots hold NaN.

    Args:
        interleaved: K and V are views of one interleaved pool instead of contiguous tensors.
        parts: expected number of groups of KV heads that are upcast one after another.
        is_split: whether row tiles must be split along the keys; None to skip the check.
    """
    monkeypatch.setattr(upcast, "UPCAST_MIN_ROWS", 0)
    monkeypatch.setattr(upcast, "UPCAST_LAUNCH_COST", 0)
    described = geometry(page, sinks=sinks is not None, **options)
    a, batch = described.attention, batch_of(lens, rows, page, padded=padded)
    table, generator = batch.page_table.cpu(), torch.Generator().manual_seed(7)
    sizes = (1 + table.numel(), page, 2, a.num_kv_heads, a.head_dim)
    pool = torch.full(sizes, float("nan")).to(torch.float8_e4m3fn)
    q = torch.randn(sum(rows), a.num_qo_heads, a.head_dim, generator=generator).bfloat16()
    # The padding requests after these have no rows and no tokens, so nothing is filled for them.
    slots = helpers.fill_cache((pool[:, :, 0], pool[:, :, 1]), table[: len(lens)], lens, rows, generator)
    k, v = (pool[:, :, one] if interleaved else pool[:, :, one].contiguous() for one in (0, 1))
    real = [one.double() * (1.0 if factor is None else factor) for one, factor in zip((k, v), scales, strict=True)]
    expected, _ = helpers.ragged_oracle(q, *real, lens, rows, table, a.window_left, a.logits_soft_cap, sinks)
    there = [one.to(helpers.DEVICE) for one in (q, k, v)]
    factors = [one if one is None else torch.tensor([one], device=helpers.DEVICE) for one in scales]
    cache = KVCache(*there[1:], *factors, sinks if sinks is None else sinks.to(helpers.DEVICE))
    buffers = {
        spec.name: helpers.poison(*map(int, spec.shape), dtype=getattr(torch, spec.dtype))
        for spec in sizing.buffers(described)
    }
    attention = PrefillFp8(described, buffers[sizing.SLOTS], buffers[sizing.ROW_TILES], buffers)
    out = helpers.poison(*q.shape, dtype=q.dtype)
    attention.write_metadata(batch)
    attention.attend(there[0], cache, batch, out)
    each = -(-max(n + t for n, t in zip(lens, rows, strict=True)) // upcast.UPCAST_PAGE_SIZE)
    how = sizing.plan_upcast(described, batch)
    assert (how.pages_per_request, how.head_groups) == (each, parts)
    assert buffers[sizing.SLOTS][: len(slots)].tolist() == slots
    if is_split is not None:
        assert buffers[sizing.PARTIAL_LSE].isnan().all().item() == (not is_split)
    cells = buffers[sizing.UPCAST_TABLE][: batch.padded_reqs * each].view(-1, each).cpu().long()
    heads = a.num_kv_heads // parts
    for name, fp8_kv in zip((sizing.UPCAST_K, sizing.UPCAST_V), (k, v), strict=True):
        upcast_kv = buffers[name].cpu().view(-1, upcast.UPCAST_PAGE_SIZE, heads, a.head_dim)
        taken = _check_upcast(upcast_kv, cells, fp8_kv[:, :, -heads:], table, lens, rows, a.window_left)
    assert len(set(taken)) == len(taken) and max(taken) < how.pages <= upcast_kv.shape[0]
    return helpers.error(out, expected)


def _check_upcast(upcast_kv, cells, fp8_kv, table, lens, rows, window):
    """Assert that the last head group's visible tokens are upcast exactly, with no write after a request's last token.

    Returns:
        The pages of all requests.
    """
    page, taken = fp8_kv.shape[1], []
    for r, (n, t) in enumerate(zip(lens, rows, strict=True)):
        first, stop = max(n - window, 0) if window >= 0 else 0, n + t
        if t:
            taken += cells[r, first // upcast.UPCAST_PAGE_SIZE : -(-stop // upcast.UPCAST_PAGE_SIZE)].tolist()
            at, after = (
                torch.arange(first, stop),
                torch.arange(stop, -(-stop // upcast.UPCAST_PAGE_SIZE) * upcast.UPCAST_PAGE_SIZE),
            )
            mine, rest = (
                upcast_kv[cells[r, p // upcast.UPCAST_PAGE_SIZE], p % upcast.UPCAST_PAGE_SIZE] for p in (at, after)
            )
            assert torch.equal(mine, fp8_kv[table[r, at // page].long(), at % page].to(upcast_kv.dtype))
            assert rest.isnan().all()
    return taken


@pytest.mark.parametrize(("lens", "rows", "padded"), [
    ((0,), (40,), 0), ((130, 0, 5), (9, 37, 1), 0), ((250, 128, 3), (6, 0, 30), 2), ((0, 0), (128, 127), 0),
])  # fmt: skip
@pytest.mark.parametrize(("page", "interleaved"), [(16, True), (64, False), (1, True)])
def test_prompts_and_chunks(monkeypatch, lens, rows, padded, page, interleaved):
    """Prompts and chunks are right for any page size, for contiguous and interleaved K and V, and with padding."""
    assert upcast_error(monkeypatch, {}, lens, rows, page=page, interleaved=interleaved, padded=padded) < 1e-2


@pytest.mark.parametrize("scales", [(0.25, 2.0), (3.0, None), (None, 0.1)])
@pytest.mark.parametrize("options", [{}, {"window_left": 50, "logits_soft_cap": 9.0}, {"head_dim": 80}])
def test_scales_windows_soft_caps_and_sinks(monkeypatch, scales, options):
    """Scales, windows, soft caps and sinks apply as without upcasting, and keys before a window stay unread."""
    sinks = torch.tensor([1.5, float("-inf"), -2.0, 4.0])
    assert upcast_error(monkeypatch, options, (600, 0, 299), (5, 20, 40), scales=scales, sinks=sinks) < 1e-2


@pytest.mark.parametrize(("room", "parts"), [(4, 1), (3, 1), (2, 2), (1, 4)])
def test_head_groups(monkeypatch, room, parts):
    """If buffers are small, groups of two or one KV head are upcast in sequence, each with its own sinks."""
    options, sinks = {"num_qo_heads": 8, "num_kv_heads": 4}, torch.linspace(-3, 3, 8)
    limit_pages(monkeypatch, room, 4, 64)
    for scales in ((None, None), (0.5, 3.0)):
        found = upcast_error(monkeypatch, options, (200, 0), (5, 30), scales=scales, sinks=sinks, parts=parts)
        assert found < 1e-2


@pytest.mark.parametrize(("room", "parts"), [(25, 1), (13, 2)])
def test_few_rows_are_split(monkeypatch, room, parts):
    """Few row tiles after a long prefix are split, also with head groups."""
    limit_pages(monkeypatch, room, 2, 64)
    sinks = torch.tensor([1.5, float("-inf"), -2.0, 4.0])
    for scales in ((None, None), (0.5, 3.0)):
        found = upcast_error(
            monkeypatch, {}, (3000, 17), (24, 40), scales=scales, sinks=sinks, parts=parts, is_split=True
        )  # fmt: skip
        assert found < 1e-2


def test_upcast_needs_known_lengths_and_enough_rows():
    """Long prompts and large chunks are upcast; short ones, few rows and batches of unknown lengths are not."""
    large = geometry(reqs=4, context=32768, num_qo_heads=32, num_kv_heads=8, head_dim=128)
    plain = replace(large, attention=replace(large.attention, kv_dtype="bfloat16"))
    cases = [
        ((0,), (8192,), (64, 64, 1)), ((24576,), (8192,), (256, 256, 1)), ((0,), (1024,), (8, 8, 1)),
        ((8192,), (64,), None), ((0,), (512,), None), ((8192,), (256,), (66, 66, 1)),
        ((16384, 0), (2048, 100), (144, 145, 1)), ((30000,) * 4, (2000,) * 4, (250, 1000, 4)),
        ((30000, 0, 7, 0), (2000, 0, 2000, 300), (250, 269, 2)),
    ]  # fmt: skip
    for lens, rows, expected in cases:
        for host in (Exact, UpperBound):
            assert sizing.plan_upcast(large, batch_of(lens, rows, 16, host)) == expected
        assert sizing.plan_upcast(large, batch_of(lens, rows, 16, Unknown)) is None
        assert sizing.plan_upcast(plain, batch_of(lens, rows, 16)) is None
    # With a window few rows read each key, so upcasting pays for 8 KV heads but not for 32. Prefix keys before the
    # window need no upcast pages.
    for heads, lens, rows, expected in (
        (8, (0,), (8192,), (64, 64, 1)), (32, (0,), (8192,), None), (8, (24000,), (2048,), (204, 20, 1)),
    ):  # fmt: skip
        under = replace(large, attention=replace(large.attention, num_kv_heads=heads, window_left=255))
        assert sizing.plan_upcast(under, batch_of(lens, rows, 16)) == expected


def test_upcast_pages_stay_within_the_host_bound():
    """A request's upcast pages stay within the host's estimate for any prefix up to the host's bound of its length."""
    for window in (-1, 0, 1, 127, 128, 1000):
        shape = replace(geometry().attention, window_left=window)
        for rows in (1, 127, 128, 129, 500):
            found = {
                n: -(-(n + rows) // upcast.UPCAST_PAGE_SIZE)
                - (max(n - window, 0) // ALIGN_KEYS * 2 if window >= 0 else 0)
                for n in range(2600)
            }
            for bound in (0, 1, 128, 999, 2599):
                most = upcast.request_upcast_pages(shape, rows, bound)
                assert most >= max(found[n] for n in range(bound + 1)) >= most - 3
        assert upcast.request_upcast_pages(shape, 0, 100) == 0


def test_upcast_buffers_are_bounded():
    """Upcast buffers take 128 MiB, or less if the geometry needs less, and nothing if EXTEND never upcasts."""
    names = {sizing.UPCAST_K, sizing.UPCAST_V, sizing.UPCAST_TABLE}
    for reqs, context, heads, pages in ((256, 131072, 8, 256), (2, 1000, 8, 16), (256, 131072, 1, 2048)):
        one = geometry(reqs=reqs, context=context, num_qo_heads=32, num_kv_heads=heads, head_dim=128)
        specs = {spec.name: spec for spec in sizing.buffers(one)}
        assert specs[sizing.UPCAST_K].shape == specs[sizing.UPCAST_V].shape == (pages, 128, heads, 128)
        assert sum(specs[name].nbytes for name in names) <= upcast.UPCAST_BYTES + 4 * upcast.UPCAST_TABLE_CELLS
    plain = replace(one, attention=replace(one.attention, kv_dtype="bfloat16"))
    for other in (plain, replace(one, device=DeviceProfile("cuda", 89, 128)), replace(one, modes=(Mode.DECODE,))):
        assert not names & {spec.name for spec in sizing.buffers(other)}


RANDOM = [
    ({"num_qo_heads": 8, "head_dim": 128}, False),
    ({"num_qo_heads": 14, "head_dim": 128}, False),
    ({"num_qo_heads": 16, "head_dim": 64, "window_left": 127}, True),
    ({"num_qo_heads": 4, "head_dim": 256, "logits_soft_cap": 30.0}, False),
    ({"num_qo_heads": 8, "num_kv_heads": 8, "head_dim": 80, "window_left": 300}, False),
    ({"num_qo_heads": 24, "num_kv_heads": 4, "head_dim": 96}, True),
]


@pytest.mark.parametrize(
    ("options", "with_sinks"), RANDOM, ids=[f"{one['num_qo_heads']}x{one['head_dim']}" for one, _ in RANDOM]
)
def test_random_batches(monkeypatch, options, with_sinks):
    """Random batches are right, with head groups and split row tiles where they occur."""
    chance, shape = random.Random(str(options)), geometry(**options).attention
    for _ in range(int(os.environ.get("DRAFTMARK_BATCHES", "10" if helpers.DEVICE == "cuda" else "1"))):
        lens = tuple(chance.choice((0, 1, 127, 128, 129, chance.randrange(3000))) for _ in range(chance.randint(1, 4)))
        rows = tuple(chance.choice((1, chance.randrange(40), chance.randrange(300))) for _ in lens)
        pages = sum(upcast.request_upcast_pages(shape, t, n) for n, t in zip(lens, rows, strict=True))
        room = chance.choice((256, pages, (pages + 1) // 2))
        limit_pages(monkeypatch, room, shape.num_kv_heads, shape.head_dim)
        found = upcast_error(
            monkeypatch, options, lens, rows,
            sinks=torch.randn(shape.num_qo_heads) * 2 if with_sinks else None, page=chance.choice((1, 16, 48, 64)),
            scales=chance.choice(((None, None), (0.5, 2.0))), interleaved=chance.random() < 0.5,
            parts=upcast.num_head_groups(shape, pages, room),
        )  # fmt: skip
        assert found < 1e-2, (lens, rows)
