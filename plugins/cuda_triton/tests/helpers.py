"""Float64 oracle and random batches. Tests use a GPU if present, else Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from draftmark_cuda_triton.heuristics import common
from draftmark_cuda_triton.launch import attention, metadata, operands

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Problem:
    """Holds a uniform batch: every tensor of a launch, on the device, and the expected float64 result, on the CPU."""

    q_len: int
    tail_len: int
    group: int
    window_left: int
    cap: float
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    prefix_lens: torch.Tensor
    page_table: torch.Tensor
    mask: torch.Tensor | None
    depth: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    slots: list[int]
    sinks: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


def make_problem(
    seed: int,
    lens: tuple[int, ...],
    q_len: int,
    tail_len: int,
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page: int = 16,
    tree: bool = True,
    window_left: int = -1,
    cap: float = 0.0,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    sinks: float | None = None,
) -> Problem:
    """Draw a random batch. Unused slots hold NaN, and page ids after a request's last page are 0.

    Args:
        sinks: mean of the random attention sinks; None for no sinks.
    """
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    requests, (hq, hkv) = len(lens), heads
    width = (max(lens) + tail_len - 1) // page + 2
    table = (torch.randperm(requests * width, generator=generator).view(requests, width) + 1).int()
    k = torch.full((1 + requests * width, page, hkv, dim), float("nan"))
    v = k.clone()
    k[0] = v[0] = 0
    for r, n in enumerate(lens):
        position = torch.arange(n + tail_len)
        pages = table[r, position // page].long()
        k[pages, position % page] = torch.randn(n + tail_len, hkv, dim, generator=generator)
        v[pages, position % page] = torch.randn(n + tail_len, hkv, dim, generator=generator)
        table[r, (n + tail_len - 1) // page + 1 :] = 0
    k, v = k.to(kv_dtype or dtype), v.to(kv_dtype or dtype)
    scales = (torch.tensor([0.5]), torch.tensor([2.0])) if kv_dtype else (None, None)
    q = torch.randn(requests * q_len, hq, dim, generator=generator).to(dtype)
    seen, depth = _tails(requests, q_len, tail_len, tree, chance)
    real_k, real_v = (x.double() * (1.0 if s is None else s.double()) for x, s in zip((k, v), scales, strict=True))
    drawn = None if sinks is None else torch.randn(hq, generator=generator) * 2 + sinks
    out, lse = oracle(q, real_k, real_v, lens, table, seen, depth, window_left, cap, drawn)
    slots = [
        int(table[r, p // page]) * page + p % page
        for r, n in enumerate(lens)
        for p in range(n + tail_len - q_len, n + tail_len)
    ]

    def there(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(DEVICE)

    return Problem(
        q_len, tail_len, hq // hkv, window_left, cap, there(q), there(k), there(v), there(scales[0]),
        there(scales[1]), torch.tensor(lens, dtype=torch.int32, device=DEVICE), there(table),
        there(pack(seen)) if tree else None, there(depth) if tree else None, out, lse, slots, there(drawn),
    )  # fmt: skip


def _tails(
    requests: int, q_len: int, tail_len: int, tree: bool, chance: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return visibility (bool ``[R, q, T]``) and depths (``[R, T]``) of random forests, or of chains without `tree`."""
    seen = torch.eye(tail_len, dtype=torch.bool).repeat(requests, 1, 1)
    depth = torch.zeros(requests, tail_len, dtype=torch.int32)
    for r in range(requests):
        for s in range(1, tail_len):
            parent = chance.randrange(-1, s) if tree else s - 1
            if parent >= 0:
                seen[r, s] |= seen[r, parent]
                depth[r, s] = depth[r, parent] + 1
    return seen[:, tail_len - q_len :], depth


def pack(seen: torch.Tensor) -> torch.Tensor:
    """Pack bool ``[R, q, T]`` into int32 ``[R · q, words]``, with one extra word of zeros."""
    requests, q_len, tail_len = seen.shape
    words = -(-tail_len // 32) + 1
    bits = torch.zeros(requests * q_len, words * 32, dtype=torch.int64)
    bits[:, :tail_len] = seen.reshape(-1, tail_len)
    packed = (bits.view(-1, words, 32) << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: tuple[int, ...],
    table: torch.Tensor,
    seen: torch.Tensor,
    depth: torch.Tensor,
    window_left: int,
    cap: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out, and the lse over keys without sinks, in float64, row by row from attention's definition."""
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    q_len, tail_len = seen.shape[1:]
    outs, lses = [], []
    for r, n in enumerate(lens):
        position = torch.arange(n + tail_len)
        pages = table[r, position // page].long()
        keys = k[pages, position % page].repeat_interleave(group, 1).transpose(0, 1)
        values = v[pages, position % page].repeat_interleave(group, 1).transpose(0, 1)
        visible = torch.cat([torch.ones(q_len, n, dtype=torch.bool), seen[r]], 1)
        if window_left >= 0:
            at = torch.cat([torch.arange(n), n + depth[r]])
            visible &= (n + depth[r, tail_len - q_len :])[:, None] - at <= window_left
        scores = q[r * q_len : (r + 1) * q_len].double().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        if cap:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        sink = torch.full((q.shape[1], q_len, 1), float("-inf")) if sinks is None else sinks.view(-1, 1, 1)
        weights = torch.cat([scores, sink.double().expand(-1, q_len, 1)], -1).softmax(-1)[..., :-1]
        outs.append((weights @ values).transpose(0, 1))
        lses.append(scores.logsumexp(-1).T)
    return torch.cat(outs), torch.cat(lses)


def fill_cache(
    caches: tuple[torch.Tensor, ...],
    table: torch.Tensor,
    lens: tuple[int, ...],
    rows: tuple[int, ...],
    generator: torch.Generator,
) -> list[int]:
    """Fill caches ``[pages, P, heads, dim]`` with random values for a ragged batch, and return the rows' slots."""
    slots = []
    for r, (n, t) in enumerate(zip(lens, rows, strict=True)):
        at, page = torch.arange(n + t), caches[0].shape[1]
        pages = table[r, at // page].long()
        for cache in caches:
            cache[pages, at % page] = torch.randn(n + t, *cache.shape[2:], generator=generator).to(cache.dtype)
        slots += (pages * page + at % page)[n:].tolist()
    return slots


def ragged_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: tuple[int, ...],
    rows: tuple[int, ...],
    table: torch.Tensor,
    window_left: int = -1,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of a ragged causal batch from `oracle`; requests may have no rows."""
    found, first = [], 0
    for r, (n, t) in enumerate(zip(lens, rows, strict=True)):
        if t:
            chain, depth = torch.ones(t, t, dtype=torch.bool).tril()[None], torch.arange(t, dtype=torch.int32)[None]
            mine = q[first : first + t], k, v, (n,), table[r : r + 1]
            found.append(oracle(*mine, chain, depth, window_left, cap, sinks))
        first += t
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error ``‖got - expected‖ / ‖expected‖``; NaN fails every comparison."""
    return ((got.cpu().double() - expected).norm() / expected.norm()).item()


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of NaN, or of -7 for integers, to detect reads of unwritten memory."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -7, dtype=dtype, device=DEVICE)


@dataclass
class Result:
    """Holds the tensors that the forward of a uniform batch wrote."""

    out: torch.Tensor
    lse: torch.Tensor
    slots: torch.Tensor
    work: torch.Tensor


def run_decode_verify(problem: Problem, config: common.KernelConfig, num_splits: int) -> Result:
    """Run write_metadata and attend of a problem with a given configuration and number of splits."""
    p = problem
    rows, hq, dim = p.q.shape
    hkv, page = p.k.shape[2], p.k.shape[1]
    pdl = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] >= 9
    shape = operands.AttentionParams(hkv, p.group, dim, page, p.scale, p.cap, p.window_left, pdl)
    extent = operands.BatchExtent(p.prefix_lens.numel(), p.q_len, p.tail_len, rows)
    work, slots = poison(2 * num_splits, 4, dtype=torch.int32), poison(rows, dtype=torch.int64)
    metadata.write_metadata_decode_verify(shape, config, extent, num_splits, p.prefix_lens, p.page_table, slots, work)
    tiles = common.row_tiles(config, p.q_len, p.group * config.kv_heads_per_tile) * hkv // config.kv_heads_per_tile
    parts = 2 * num_splits * tiles * config.block_m
    out, lse = poison(rows, hq, dim, dtype=p.q.dtype), poison(rows, hq)
    given = operands.Operands(
        p.q, p.k, p.v, p.k_scale, p.v_scale, p.sinks, out, lse, p.prefix_lens, None, p.page_table, p.mask, p.depth
    )
    partials = operands.PartialResults(work, poison(parts, dim), poison(parts))
    attention.attend_decode_verify(shape, config, extent, num_splits, given, partials)
    return Result(out, lse, slots, work)
