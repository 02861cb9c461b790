"""GPU tests of latent rows: FlashInfer's MLA kernels against float64, eager and in CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from draftmark import DRAFT_MODES, TARGET_MODES, AttentionShape, Geometry, Mode
from draftmark.arena import Arena
from draftmark.batch import BatchBuffers, ragged
from draftmark.cache import KVCache
from draftmark.devices import device_profile
from draftmark.lengths import Exact
from draftmark_cuda_flashinfer import latent_plan, sizing
from draftmark_cuda_flashinfer.backend import FlashInferBackend
from draftmark_cuda_flashinfer.latent import LatentBackend
from draftmark_testing.latent_rows import assert_latent_row

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
LENS = (0, 63, 4097, 1500)


@pytest.fixture
def make_latent(make_geometry):
    """Return a function that makes a geometry of this GPU with latent rows."""

    def make(modes=TARGET_MODES, heads=16, page=64, rest=64, dtype="bfloat16", **fields):
        made = make_geometry(
            max_num_reqs=4, max_context_len=5000, capture_batch_sizes=(4,), max_extend_tokens=512, modes=modes, **fields
        )
        a = AttentionShape(
            heads, 1, 512 + rest, page, dtype, dtype, softmax_scale=192**-0.5, value_dim=512, latent=True
        )
        return Geometry.create(a, made.limits, made.draft, device_profile("cuda"), modes)

    return make


def opened(geometry):
    arena = Arena.allocate(sizing.buffers(geometry), "cuda", guard=True)
    return LatentBackend(geometry, arena), arena


def cache_of(geometry, batch, parts=False):
    """Return random rows in the pages of the batch, with NaN in every slot that no request has stored."""
    a, dice = geometry.attention, torch.Generator().manual_seed(5)
    rows = torch.randn(1 + int(batch.page_table.max()), a.page_size, a.head_dim, generator=dice)
    for r in range(batch.num_reqs):
        used = int(batch.prefix_lens[r]) + batch.tail_lens[r]
        for column in range(used // a.page_size, batch.page_table.shape[1]):
            rows[int(batch.page_table[r, column]), max(0, used - column * a.page_size) :] = float("nan")
    rows = rows.to(getattr(torch, a.q_dtype)).cuda()
    if parts:
        return KVCache.latent((rows[..., :512].contiguous(), rows[..., 512:].contiguous()))
    return KVCache.latent(rows, value_dim=512)


def forward(backend, batch, cache):
    """Return (step, queries, outputs, log-sum-exps) of one forward."""
    a, dice = backend.geometry.attention, torch.Generator().manual_seed(6)
    kind = getattr(torch, a.q_dtype)
    k, q = (torch.randn(batch.num_rows, n, a.head_dim, generator=dice).to(kind).cuda() for n in (1, a.num_qo_heads))
    out = torch.full((batch.num_rows, a.num_qo_heads, 512), float("nan"), dtype=kind, device="cuda")
    lse = torch.full(out.shape[:2], float("nan"), device="cuda")

    def step():
        backend.write_metadata(batch)
        backend.write_kv(k, None, cache, batch)
        backend.attend(q, cache, batch, out, lse)

    return step, q, out, lse


def check(cache, q, out, lse, visible):
    """Compare rows with attention in float64; `visible` has the KV slots that each row sees."""
    rows = torch.cat(cache.parts, -1).flatten(0, 1)
    for row, slots in enumerate(visible):
        keys = rows[torch.tensor(slots, device="cuda")]
        assert_latent_row(q[row], keys, 512, 192**-0.5, out[row], lse[row], atol=5e-3, about=row)


def seen(truth, geometry, batch):
    return [slots for r in range(batch.num_reqs) for slots in truth(geometry, batch, r)]


CASES = [
    (modes, mode, step, tree)
    for modes, mode, step, tree in (
        (TARGET_MODES, Mode.DECODE, 0, False), (TARGET_MODES, Mode.VERIFY, 0, False),
        (TARGET_MODES, Mode.VERIFY, 0, True), (DRAFT_MODES, Mode.DRAFT, 0, True), (DRAFT_MODES, Mode.DRAFT, 1, True),
        (DRAFT_MODES, Mode.DRAFT_EXTEND, 0, False),
    )
]  # fmt: skip


@pytest.mark.parametrize(("heads", "page"), list(product([1, 5, 16, 20, 96, 128], [1, 16, 48, 64])))
def test_forwards_equal_float64(make_latent, make_batch, truth, heads, page):
    """Decode, chains, trees and draft steps equal float64 at any page and number of heads, with NaN in unused slots."""
    for modes, mode, step, tree in CASES:
        geometry = make_latent(modes, heads, page)
        backend, arena = opened(geometry)
        batch = make_batch(geometry, mode, LENS, padded=4, step=step, tree=tree, device="cuda")
        cache = cache_of(geometry, batch)
        run, q, out, lse = forward(backend, batch, cache)
        backend.plan(batch)
        run()
        check(cache, q, out, lse, seen(truth, geometry, batch))
        arena.check()


@pytest.mark.parametrize(
    ("rest", "dtype", "parts"), [(0, "bfloat16", False), (64, "float16", False), (64, "bfloat16", True)]
)
def test_other_rows_equal_float64(make_latent, make_batch, truth, rest, dtype, parts):
    """Rows without a rest, float16 and rows in two buffers equal float64, for chains and trees."""
    for tree in (False, True):
        geometry = make_latent(rest=rest, dtype=dtype)
        backend, _ = opened(geometry)
        batch = make_batch(geometry, Mode.VERIFY, LENS, padded=4, tree=tree, device="cuda")
        cache = cache_of(geometry, batch, parts)
        run, q, out, lse = forward(backend, batch, cache)
        backend.plan(batch)
        run()
        check(cache, q, out, lse, seen(truth, geometry, batch))


@pytest.mark.parametrize("latent", [True, False])
def test_blocks_see_themselves(make_latent, make_geometry, make_batch, latent):
    """In DRAFT_BLOCK every row sees its prefix and its whole block, in latent layers and in layers with K and V."""
    modes = (Mode.DRAFT_BLOCK,)
    if latent:
        geometry = make_latent(modes, heads=20, block_size=7)
        backend, _ = opened(geometry)
        batch = make_batch(geometry, Mode.DRAFT_BLOCK, LENS, padded=4, tree=False, device="cuda")
        cache = cache_of(geometry, batch)
        run, q, out, lse = forward(backend, batch, cache)
        backend.plan(batch)
        run()
    else:
        made = make_geometry(max_context_len=5000, max_num_reqs=4, capture_batch_sizes=(4,), block_size=7, modes=modes)
        geometry = Geometry.create(made.attention, made.limits, made.draft, device_profile("cuda"), modes)
        backend = FlashInferBackend(geometry, Arena.allocate(sizing.buffers(geometry), "cuda", guard=True))
        batch, a = make_batch(geometry, Mode.DRAFT_BLOCK, LENS, padded=4, tree=False, device="cuda"), geometry.attention
        pages = torch.randn(
            2, 1 + int(batch.page_table.max()), 64, a.num_kv_heads, a.head_dim, device="cuda"
        ).bfloat16()
        cache, q = KVCache(*pages), torch.randn(28, a.num_qo_heads, a.head_dim, device="cuda").bfloat16()
        out, lse = torch.empty_like(q), torch.empty(28, a.num_qo_heads, device="cuda")
        backend.plan(batch)
        backend.write_metadata(batch)
        backend.attend(q, cache, batch, out, lse)
    table = batch.page_table.cpu()
    for r, j in product(range(4), range(7)):
        at = torch.arange(LENS[r] + 7)
        slots = (table[r, at // 64].long() * 64 + at % 64).cuda()
        if latent:
            check(cache, q[r * 7 + j :], out[r * 7 + j :], lse[r * 7 + j :], [slots.tolist()])
            continue
        group = geometry.attention.group_size
        k, v = (one.flatten(0, 1)[slots].double().repeat_interleave(group, 1) for one in (cache.k, cache.v))
        logits = torch.einsum("hd,shd->hs", q[r * 7 + j].double(), k) * geometry.attention.head_dim**-0.5
        want = torch.einsum("hs,shd->hd", logits.softmax(-1), v)
        assert float((out[r * 7 + j].double() - want).norm() / want.norm()) < 1e-2
        torch.testing.assert_close(lse[r * 7 + j].double(), logits.logsumexp(-1), atol=5e-3, rtol=0)


@pytest.mark.parametrize("heads", [5, 16, 128])
def test_prompts_equal_float64(make_latent, heads):
    """EXTEND equals float64 for requests of 0 to 300 rows."""
    geometry = make_latent(heads=heads)
    backend, buffers = opened(geometry)[0], BatchBuffers(geometry, "cuda")
    lens, rows = (5, 63, 0, 4000), (300, 1, 0, 130)
    width = buffers.page_table.shape[1]
    buffers.page_table[:4] = (1 + torch.randperm(4 * width).view(4, width)).int().cuda()
    buffers.prefix_lens[:4] = torch.tensor(lens, dtype=torch.int32).cuda()
    batch = ragged(geometry, buffers.prefix_lens[:4], buffers.page_table[:4], rows, Exact(lens))
    cache = cache_of(geometry, batch)
    run, q, out, lse = forward(backend, batch, cache)
    backend.plan(batch)
    run()
    table = batch.page_table.cpu()
    positions = [(r, torch.arange(lens[r] + j + 1)) for r, n in enumerate(rows) for j in range(n)]
    check(cache, q, out, lse, [(table[r, at // 64].long() * 64 + at % 64).tolist() for r, at in positions])


@pytest.mark.parametrize(("heads", "tree"), list(product([16, 20, 128], [False, True])))
def test_replays_follow_new_lengths(make_latent, make_batch, truth, heads, tree):
    """A graph captured at one batch's lengths is right at other lengths, since its plans lie in the workspace."""
    geometry = make_latent(heads=heads)
    backend, _ = opened(geometry)
    batch = make_batch(geometry, Mode.VERIFY, LENS, padded=4, tree=tree, device="cuda")
    cache = cache_of(geometry, make_batch(geometry, Mode.VERIFY, (5000,) * 4, padded=4, tree=tree, device="cuda"))
    run, q, out, lse = forward(backend, batch, cache)
    backend.plan(batch)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lens in (LENS, (1, 5000, 64, 2), (4990, 4991, 4992, 4993)):
        batch.prefix_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        backend.plan(replace(batch, host=Exact(lens)))
        out.fill_(float("nan"))
        graph.replay()
        check(cache, q, out, lse, seen(truth, geometry, batch))


def test_plan_fills_the_declared_bytes(make_latent, make_batch, monkeypatch):
    """FlashInfer's plan stages exactly the bytes of `latent_plan.int_bytes`."""
    geometry = make_latent()
    backend, _ = opened(geometry)
    module, found = backend._vendor._module, []
    staged = module.plan_with_staged_workspace_bytes
    monkeypatch.setattr(module, "plan_with_staged_workspace_bytes", lambda *a: found.append(staged(*a)) or found[-1])
    backend.plan(make_batch(geometry, Mode.VERIFY, LENS, padded=4, tree=False, device="cuda"))
    assert [size for _, size in found] == [latent_plan.int_bytes(geometry.device.num_sms)]
