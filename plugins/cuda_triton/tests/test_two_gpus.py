"""On a second GPU, while the first one is torch's current device, kernels give the bits of the first GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode, load
from draftmark.runtime import (
    BatchBuffers,
    Exact,
    GraphKey,
    KVCache,
    Program,
    device_profile,
    ragged,
    write_tail,
)

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
HEADS, KV_HEADS, DIM, PAGE, LAYERS = 8, 2, 128, 16, 3
LENS, COUNTS = (300, 17, 512, 64), {Mode.DECODE: 1, Mode.EXTEND: 40}


def outputs(device: str, mode: Mode, captured: bool) -> list[torch.Tensor]:
    """Run two forwards of every layer on a device; the second repeats recorded launches or is a graph's replay."""
    limits = Limits(len(LENS), 1024, 600)
    geometry = Geometry.create(
        AttentionShape(HEADS, KV_HEADS, DIM, PAGE), limits, DraftShape(1, 1, 1), device_profile(device), (mode,)
    )
    loaded, rows = load("cuda_triton"), COUNTS[mode]
    backend = loaded.open(geometry, device)
    make, width = torch.Generator().manual_seed(2), int(geometry.max_pages_per_req)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make).to(device, torch.bfloat16)

    pages = 1 + len(LENS) * width
    caches = [KVCache(draw(pages, PAGE, KV_HEADS, DIM), draw(pages, PAGE, KV_HEADS, DIM)) for _ in range(LAYERS)]
    table = (torch.randperm(pages - 1, generator=make) + 1).int().view(len(LENS), width).to(device)
    prefix = torch.tensor(LENS, dtype=torch.int32, device=device)
    if mode is Mode.EXTEND:
        batch = ragged(geometry, prefix, table, (rows,) * len(LENS), Exact(LENS))
    else:
        batch = BatchBuffers(geometry, device).uniform(mode, 0, len(LENS), len(LENS), Exact(LENS), tree=False)
        batch.prefix_lens.copy_(prefix)
        batch.page_table.copy_(table)
        write_tail(batch, geometry, None)
    given = [[draw(batch.num_rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)] for _ in caches]
    outs = [torch.full_like(q, float("nan")) for q, _, _ in given]

    def step() -> None:
        backend.write_metadata(batch)
        for cache, (q, k, v), out in zip(caches, given, outs, strict=True):
            backend.write_kv(k, v, cache, batch)
            backend.attend(q, cache, batch, out)

    backend.plan(batch)
    step()
    repeat: Callable[[], object] = step
    if captured:
        graphs = loaded.graph_state(geometry, torch.device(device))
        graphs.capture(GraphKey(Program.DECODE, len(LENS)), step)
        repeat = partial(graphs.replay, GraphKey(Program.DECODE, len(LENS)))
    torch.cuda.synchronize(device)
    for out in outs:
        out.fill_(float("nan"))
    repeat()
    torch.cuda.synchronize(device)
    return [out.cpu() for out in outs]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("mode", COUNTS, ids=lambda mode: mode.name)
def test_the_second_gpu_gives_the_bits_of_the_first(mode: Mode, captured: bool) -> None:
    """Launches of both kinds use the tensors' device, and torch's current device stays the first."""
    torch.cuda.set_device(0)
    wanted, found = (outputs(device, mode, captured) for device in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    assert not any(out.isnan().any() for out in wanted)
    assert all(map(torch.equal, found, wanted))
