"""Tail, verification and compaction kernels are bitwise equal to the core's torch operations."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.batch import BatchBuffers
from draftmark.cache import KVPool
from draftmark.lengths import Unknown
from draftmark.tree import TorchTreeOps, VerifyResult
from plugins.cuda_triton.tests import helpers

CONTEXT = 120


@pytest.fixture(scope="module")
def sides():
    """Function that returns the torch and the Triton tree operations of a geometry."""
    from draftmark_cuda_triton.tree_ops import TritonTreeOps

    return lambda geometry: (TorchTreeOps(geometry), TritonTreeOps(geometry))


def geometry_of(nodes: int, requests: int, shape: tuple[int, int, int] = (2, 64, 16), dtype: str = "float32"):
    """Return the geometry of a target model; `shape` is KV heads, head_dim and page size."""
    heads, dim, page = shape
    q_dtype = "bfloat16" if dtype == "float8_e4m3fn" else dtype
    attention = AttentionShape(heads, heads, dim, page, q_dtype, dtype)
    return Geometry.create(attention, Limits(requests, CONTEXT), DraftShape(2, 1, nodes))


def batch_of(geometry: Geometry, device: str, chance: random.Random):
    """Return a full batch with random lengths and pages; mask, depths and positions are filled with -7."""
    requests = geometry.max_reqs
    buffers = BatchBuffers(geometry, device)
    for tensor in (buffers.mask, buffers.depth, buffers.positions):
        tensor.fill_(-7)
    batch = buffers.uniform(Mode.VERIFY, 0, requests, requests, Unknown(requests, CONTEXT), tree=True)
    batch.prefix_lens.copy_(
        torch.tensor([chance.choice((0, CONTEXT, chance.randrange(CONTEXT))) for _ in range(requests)])
    )
    pages = list(range(1, 1 + requests * geometry.max_pages_per_req))
    chance.shuffle(pages)
    batch.page_table.copy_(torch.tensor(pages).view(requests, -1))
    return buffers, batch


def tree(nodes: int, reach: int, chance: random.Random) -> list[int]:
    """Return random parents, each at most `reach` nodes before its child; a reach of 1 makes a chain."""
    return [-1] + [chance.randrange(max(0, node - reach), node) for node in range(1, nodes)]


@pytest.mark.parametrize(
    ("nodes", "requests", "reach"), [(1, 2, 1), (2, 3, 1), (33, 2, 33), (64, 2, 1), (70, 2, 5), (1000, 1, 40)]
)
def test_tails_match_torch(sides, nodes, requests, reach):
    """Mask words, depths and clamped positions equal torch's, and nothing else is written, for up to 1,000 nodes."""
    chance, geometry = random.Random(nodes), geometry_of(nodes, requests)
    parents = torch.tensor([tree(nodes, reach, chance) for _ in range(requests)], device=helpers.DEVICE)
    buffers, batch = batch_of(geometry, helpers.DEVICE, chance)
    written = []
    for ops in sides(geometry):
        for tensor in (buffers.mask, buffers.depth, buffers.positions):
            tensor.fill_(-7)
        ops.write_tail(batch, parents)
        written.append([tensor.clone() for tensor in (buffers.mask, buffers.depth, buffers.positions)])
    for wanted, got in zip(*written, strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.parametrize(("nodes", "requests", "reach"), [(1, 2, 1), (2, 9, 1), (9, 40, 3), (64, 3, 1), (300, 3, 9)])
def test_verify_results_match_torch(sides, nodes, requests, reach):
    """Results equal torch's when siblings have equal tokens and when a third of the nodes is unused."""
    chance, geometry = random.Random(nodes), geometry_of(nodes, requests)
    parents = torch.tensor([tree(nodes, reach, chance) for _ in range(requests)], device=helpers.DEVICE)
    tokens = [[chance.choice((-1, 3, 3 + 2**32)) for _ in range(nodes)] for _ in range(requests)]
    drafts = torch.tensor(tokens, device=helpers.DEVICE)
    targets = torch.tensor(
        [[chance.choice((3, 3 + 2**32)) for _ in range(nodes)] for _ in range(requests)], device=helpers.DEVICE
    )
    wanted, got = (ops.verify_tree(drafts, parents, targets) for ops in sides(geometry))
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(2, 64, 16), (3, 33, 1), (8, 128, 64)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("nodes", [2, 21])
def test_compacted_pools_match_torch(sides, dtype, shape, nodes):
    """Compacted pools equal torch's for three layers, rows of odd byte counts, and overlapping sources and targets."""
    chance, geometry = random.Random(nodes), geometry_of(nodes, 4, shape, dtype)
    _, batch = batch_of(geometry, helpers.DEVICE, chance)
    kept = [[0, *sorted(chance.sample(range(1, nodes), k))] for k in (0, nodes - 1, nodes // 2, nodes // 3)]
    kept[0] = [0, *range(2, nodes)]
    path = torch.tensor([[*one, *range(len(one), nodes)] for one in kept], device=helpers.DEVICE)
    verdict = VerifyResult(path, torch.tensor([len(one) for one in kept], device=helpers.DEVICE), path)
    pools = []
    for ops in sides(geometry):
        pool = KVPool(geometry, 3, 1 + 4 * geometry.max_pages_per_req, 1, helpers.DEVICE)
        dice = torch.Generator().manual_seed(nodes)
        for tensor in (pool.k, pool.v):
            bits = tensor.view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=dice))
        ops.compact(pool, batch, verdict)
        pools.append((pool.k.view(torch.uint8), pool.v.view(torch.uint8)))
    for wanted, got in zip(*pools, strict=True):
        assert torch.equal(wanted, got)


@pytest.mark.device
def test_compaction_beyond_int32_offsets(sides):
    """A kept node moves correctly in pages beyond the first 2**31 words of a pool."""
    geometry = geometry_of(4, 1, (8, 128, 64), "bfloat16")
    pages = 2**31 // (64 * 8 * 64) + 1 + geometry.max_pages_per_req
    pool = KVPool(geometry, 1, pages, 1, helpers.DEVICE)
    _, batch = batch_of(geometry, helpers.DEVICE, random.Random(0))
    batch.page_table.copy_(torch.arange(pages - geometry.max_pages_per_req, pages).view(1, -1))
    batch.prefix_lens.fill_(60)
    slots = [(pages - geometry.max_pages_per_req + p // 64, p % 64) for p in range(60, 64)]
    for node, (page, offset) in enumerate(slots):
        pool.k[0, page, offset] = node
        pool.v[0, page, offset] = -node
    path = torch.tensor([[0, 2, 3, 3]], device=helpers.DEVICE)
    sides(geometry)[1].compact(pool, batch, VerifyResult(path, torch.tensor([3], device=helpers.DEVICE), path))
    assert [pool.k[0, page, offset, 0, 0].item() for page, offset in slots] == [0, 2, 3, 3]
    assert [pool.v[0, page, offset, 7, 127].item() for page, offset in slots] == [0, -2, -3, -3]
