"""The split-KV schedule covers every tile once, in equal splits, and lists the split requests."""

from __future__ import annotations

import pytest
import torch

from plugins.cuda_triton.tests import helpers


@pytest.mark.parametrize("num_splits", [1, 2, 3, 33, 264])
@pytest.mark.parametrize(
    "lens", [(0,), (5, 0, 0), (700,), (64, 63, 65, 900), (800, 810, 640), tuple(range(0, 640, 37))]
)
def test_splits_cover_every_tile_once(lens, num_splits):
    """The splits read each KV tile of each request exactly once."""
    from draftmark_cuda_triton.heuristics.common import OVERHEAD_TILES, KernelConfig
    from draftmark_cuda_triton.launch import metadata, operands

    config, tail = KernelConfig(16, 32, 4, 2, 2), 7
    table = torch.zeros(len(lens), 64, dtype=torch.int32, device=helpers.DEVICE)
    work = helpers.poison(2 * num_splits, 4, dtype=torch.int32)
    metadata.write_metadata_decode_verify(
        operands.AttentionParams(2, 2, 64, 16, 1.0), config, operands.BatchExtent(len(lens), 3, tail, 3 * len(lens)),
        num_splits, torch.tensor(lens, dtype=torch.int32, device=helpers.DEVICE), table,
        helpers.poison(3 * len(lens), dtype=torch.int64), work,
    )  # fmt: skip
    ends = [-(-(n + tail) // 32) for n in lens]
    met = []
    parts_of: dict[int, list[tuple[int, int]]] = {}
    for number, (request, start, length, _) in enumerate(work[:num_splits].tolist()):
        half = 0
        while length > 0:
            here = [(request, t) for t in range(start, min(start + length, ends[request]))]
            met += here
            if here:
                parts_of.setdefault(request, []).append((number, half))
            length -= ends[request] + OVERHEAD_TILES - start
            request, start, half = request + 1, 0, 1
    assert met == [(r, t) for r, end in enumerate(ends) for t in range(end)]
    expected = [(request, of[0][0], len(of), of[0][1]) for request, of in parts_of.items() if len(of) > 1]
    records = work[num_splits : num_splits + min(num_splits - 1, len(lens))].tolist()
    assert [tuple(one) for one in records[: len(expected)]] == expected
    assert not any(parts for _, _, parts, _ in records[len(expected) :])
    lengths = [length for _, _, length, _ in work[:num_splits].tolist() if length]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("window_left", [-1, 70])
@pytest.mark.parametrize("lens", [(0,), (5, 0, 0), (700, 31, 64), tuple(range(0, 640, 9))])
def test_whole_requests_have_one_record_each(lens, window_left):
    """With batch invariance record r holds every KV tile of request r; a request without rows has an idle record."""
    from draftmark_cuda_triton.heuristics.common import OVERHEAD_TILES, KernelConfig
    from draftmark_cuda_triton.launch import metadata, operands

    config, rows = KernelConfig(16, 32, 4, 2, 2), [n % 3 for n in range(len(lens))]
    counts = torch.tensor([0, *rows]).cumsum(0).int().to(helpers.DEVICE)
    work, total = helpers.poison(len(lens), 4, dtype=torch.int32), max(1, sum(rows))
    metadata.write_metadata_decode_verify(
        operands.AttentionParams(2, 2, 64, 16, 1.0, window_left=window_left), config,
        operands.BatchExtent(len(lens), 2, 2, total, ragged=True, whole_requests=True), len(lens),
        torch.tensor(lens, dtype=torch.int32, device=helpers.DEVICE),
        torch.zeros(len(lens), 64, dtype=torch.int32, device=helpers.DEVICE),
        helpers.poison(total, dtype=torch.int64), work, counts,
    )  # fmt: skip
    for request, (n, own, record) in enumerate(zip(lens, rows, work.tolist(), strict=True)):
        end = -(-(n + own) // 32)
        first = max(n - window_left, 0) // 32 if window_left >= 0 else 0
        expected = [request, min(first, end), end - min(first, end) + OVERHEAD_TILES]
        assert record[:3] == (expected if own else [request, 0, 0])
