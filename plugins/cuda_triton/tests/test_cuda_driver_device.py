"""On a GPU, launches through the driver write the same bits as Triton's launches, on any stream and in CUDA graphs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode, load
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.lengths import Unknown
from draftmark.runtime import KVCache

pytestmark = pytest.mark.device

LAYERS = 4
ROWS = {Mode.DECODE: 1, Mode.VERIFY: 8, Mode.RAGGED_VERIFY: 8, Mode.EXTEND: 70}
CASES = [
    # fields: mode, heads, head_dim, page size, e4m3, sinks
    (Mode.DECODE, (8, 2), 128, 16, False, False),
    (Mode.DECODE, (4, 2), 256, 64, True, False),
    (Mode.VERIFY, (8, 2), 128, 64, False, True),
    (Mode.VERIFY, (14, 2), 128, 16, True, False),
    (Mode.VERIFY, (6, 3), 72, 12, False, False),
    (Mode.RAGGED_VERIFY, (8, 2), 128, 16, False, False),
    (Mode.RAGGED_VERIFY, (8, 2), 64, 1, False, False),
    (Mode.EXTEND, (8, 2), 128, 16, False, True),
    (Mode.EXTEND, (8, 2), 96, 64, True, False),
]


class ForwardSteps:
    """Holds a backend and the caches of several layers, and runs forwards of random batches over them."""

    def __init__(self, mode, heads, dim, page, fp8, sinks, seed):
        from draftmark.devices import device_profile

        self.mode, self.heads, self.dim, self.page, self.chance = mode, heads, dim, page, random.Random(seed)
        kv_dtype = "float8_e4m3fn" if fp8 else "bfloat16"
        shape = AttentionShape(*heads, dim, page, kv_dtype=kv_dtype, sinks=sinks)
        limits, draft = Limits(6, 1024, 600), DraftShape(4, 3, 8)
        self.geometry = Geometry.create(shape, limits, draft, device_profile("cuda"), (mode,))
        self.backend = load("cuda_triton").open(self.geometry, "cuda")
        kv = (1 + 6 * int(self.geometry.max_pages_per_req), page, heads[1], dim)
        kv_torch_dtype = getattr(torch, kv_dtype)
        scales = [torch.tensor([scale], device="cuda") for scale in (0.5, 2.0)] if fp8 else [None, None]
        self.caches = [
            KVCache(*(torch.randn(kv, device="cuda").to(kv_torch_dtype) for _ in "kv"), *scales,
                    torch.randn(heads[0], device="cuda") if sinks else None)
            for _ in range(LAYERS)
        ]  # fmt: skip

    def batch(self, count):
        """Return a batch of `count` requests with random lengths, and random row counts where the mode allows."""
        most = ROWS[self.mode]
        uniform = self.mode in (Mode.DECODE, Mode.VERIFY)
        q_lens = tuple(most if uniform else self.chance.randint(1, most) for _ in range(count))
        lens = torch.tensor([self.chance.randrange(900) for _ in q_lens], dtype=torch.int32, device="cuda")
        width = int(self.geometry.max_pages_per_req)
        pages = (torch.randperm(count * width) + 1).int().view(count, width).cuda()
        starts = torch.tensor([0, *q_lens]).cumsum(0).int().cuda()
        rows, tail = sum(q_lens), Causal()
        if self.mode is Mode.VERIFY:
            seen = [[sum(1 << n for n in range(row + 1) if n == row or self.chance.random() < 0.5)] for row in range(8)]
            depth = torch.arange(8, dtype=torch.int32, device="cuda").repeat(count, 1)
            mask = torch.zeros(rows, int(self.geometry.mask_words), dtype=torch.int32)
            mask[:, 0] = torch.tensor(seen * count, dtype=torch.int32)[:, 0]
            tail = Tree(mask.cuda(), depth)
        return ForwardBatch(
            self.mode, 0, lens, starts, pages, tail, torch.zeros(rows, dtype=torch.int64, device="cuda"),
            Unknown(count, int(self.geometry.max_prefix_len)), count, q_lens, q_lens, rows, None,
        )  # fmt: skip

    def rows(self, batch):
        """Return random q, k and v rows for each layer."""
        shapes = ((self.heads[0],), (self.heads[1],), (self.heads[1],))
        return [
            tuple(torch.randn(batch.num_rows, *one, self.dim, device="cuda", dtype=torch.bfloat16) for one in shapes)
            for _ in self.caches
        ]

    def run(self, batch, rows):
        """Run a forward of every layer, and return the attention outputs."""
        self.backend.plan(batch)
        self.backend.write_metadata(batch)
        outs = [torch.full_like(q, float("nan")) for q, _, _ in rows]
        for cache, (q, k, v), out in zip(self.caches, rows, outs, strict=True):
            self.backend.write_kv(k, v, cache, batch)
            self.backend.attend(q, cache, batch, out)
        return outs

    def cache_bytes(self):
        """Return copies of the caches' bytes."""
        return [one.view(torch.uint8).clone() for cache in self.caches for one in (cache.k, cache.v)]


@pytest.fixture
def driver_launches(monkeypatch):
    """Counters of the launches that the test makes through the CUDA driver: recorded ones, and prepared ones."""
    from draftmark_cuda_triton.launch.prepared import PreparedKernel
    from draftmark_cuda_triton.launch.relaunch import DriverLaunch

    counted, launch, again = SimpleNamespace(count=0, prepared=0), DriverLaunch.__call__, PreparedKernel.again

    def prepared(self, grid, args):
        launched = again(self, grid, args)
        counted.prepared += launched
        return launched

    monkeypatch.setattr(PreparedKernel, "again", prepared)

    def called(self, addresses, stream):
        counted.count += 1
        launch(self, addresses, stream)

    monkeypatch.setattr(DriverLaunch, "__call__", called)
    return counted


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name}-{c[1][0]}-{c[1][1]}x{c[2]}-p{c[3]}")
def test_outputs_and_caches_match_triton_launches(driver_launches, without_relaunch, case):
    """Outputs and caches equal those of Triton's launches, for batches of several sizes that each run twice."""
    step = ForwardSteps(*case, seed=7)
    batches = [step.batch(count) for count in (1, 6, 3, 5, 2, 4)]
    calls = [(batch, step.rows(batch)) for batch in (*batches, *batches)]
    first = step.cache_bytes()
    found = [(step.run(*one), step.cache_bytes()) for one in calls]
    least = LAYERS * len(batches) * 2
    assert driver_launches.count >= least
    # The first launch of each kernel, which prepares the others, is Triton's.
    assert driver_launches.prepared >= (len(calls) - 3) * (step.mode is Mode.EXTEND)
    for cache, before in zip([one for c in step.caches for one in (c.k, c.v)], first, strict=True):
        cache.view(torch.uint8).copy_(before)
    for one, (outs, written) in zip(calls, found, strict=True):
        with without_relaunch():
            expected = step.run(*one)
        for wanted, out in zip(expected, outs, strict=True):
            assert not out.isnan().any() and torch.equal(wanted, out)
        assert all(map(torch.equal, step.cache_bytes(), written))


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[7]], ids=lambda c: c[0].name)
def test_relaunch_on_another_stream_and_in_a_graph(driver_launches, case):
    """A launch recorded on one stream runs on the current stream, and a CUDA graph captures it."""
    step = ForwardSteps(*case, seed=3)
    batch = step.batch(4)
    rows = step.rows(batch)
    wanted = step.run(batch, rows)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        found = step.run(batch, rows)
    side.synchronize()
    assert all(map(torch.equal, found, wanted))
    before = driver_launches.count
    with torch.cuda.graph(graph):
        outs = step.run(batch, rows)
    assert driver_launches.count > before
    for _ in range(2):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, outs, wanted))
