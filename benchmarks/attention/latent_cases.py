"""Timed cases of latent rows (MLA): requests of one length and one number of rows, with cold caches and floors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from draftmark import DTYPE_BYTES, AttentionShape, DraftShape, Geometry, Limits, Mode, load
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.devices import device_profile
from draftmark.lengths import Exact
from draftmark.runtime import KVCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLD_BYTES = 150_000_000
"""Bytes that the calls of a case read at least, so that L2 is cold."""
MAX_CALLS = 64
BYTES_A_SECOND, FLOP_A_SECOND = 4.4e12, 790e12
"""Floors of an H200: what copies and large products reach."""
SOFTMAX_SCALE = 192**-0.5
MAX_CHAIN_ROWS = 8
"""Cases with more rows are trees."""

Calls = list[Callable[[], torch.Tensor]]
"""One call for each cache of a case; each returns its output ``[rows, heads, value_dim]``."""


@dataclass(frozen=True)
class Case:
    """Names a case: one geometry and one batch.

    Attributes:
        requests, keys, rows: requests, keys of each request (its rows included), and query rows of each request.
        kv_dtype: dtype of the rows; q is bfloat16.
    """

    heads: int
    requests: int
    keys: int
    rows: int
    page: int = 64
    value_dim: int = 512
    rest_dim: int = 64
    kv_dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Name of the batch, for example "verify32-64x4096"."""
        kind = "decode" if self.rows == 1 else f"{'chain' if self.rows <= MAX_CHAIN_ROWS else 'verify'}{self.rows}"
        return f"{kind}-{self.requests}x{self.keys}"

    @property
    def head_dim(self) -> int:
        """Elements of a latent row."""
        return self.value_dim + self.rest_dim

    @property
    def is_tree(self) -> bool:
        """True if the rows of a request are a draft tree."""
        return self.rows > MAX_CHAIN_ROWS

    @property
    def floors(self) -> tuple[float, float]:
        """Microseconds that bytes and products take at least."""
        rows, read = self.requests * self.rows * self.heads, self.head_dim * DTYPE_BYTES[self.kv_dtype]
        moved = self.requests * self.keys * read + rows * (self.head_dim + self.value_dim) * 2
        products = 2 * rows * self.keys * (self.head_dim + self.value_dim)
        return moved / BYTES_A_SECOND * 1e6, products / FLOP_A_SECOND * 1e6

    def geometry(self) -> Geometry:
        """Return the geometry of the case."""
        shape = AttentionShape(
            self.heads, 1, self.head_dim, self.page, kv_dtype=self.kv_dtype, softmax_scale=SOFTMAX_SCALE,
            value_dim=self.value_dim, latent=True,
        )  # fmt: skip
        draft = DraftShape(4, 4, self.rows) if self.is_tree else DraftShape(1, max(self.rows - 1, 1), self.rows)
        mode = Mode.VERIFY if self.rows > 1 else Mode.DECODE
        return Geometry.create(shape, Limits(self.requests, self.keys), draft, device_profile(DEVICE), (mode,))


class Timed:
    """Tensors of a case. Every call has its own pages, so that L2 is cold.

    Attributes:
        case, geometry, batch: the case, its geometry, and its batch on DEVICE.
        pages: latent rows ``[pages, P, elements]`` of each call.
        q, out: ``[rows, heads, elements]``; out is full of NaN at first.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.geometry, self.scale = case, case.geometry(), SOFTMAX_SCALE
        requests, rows, keys = case.requests, case.rows, case.keys
        [mode] = self.geometry.modes
        pages = -(-keys // case.page) + 1
        row_bytes = requests * pages * case.page * case.head_dim * DTYPE_BYTES[case.kv_dtype]
        self.calls = max(1, min(MAX_CALLS, -(-COLD_BYTES // row_bytes)))
        self.pages = [self._rows(requests * pages + 1) for _ in range(self.calls)]
        self.row_scale = None if case.kv_dtype == "bfloat16" else torch.tensor([0.5], device=DEVICE)
        self.caches = [KVCache.latent(one, self.row_scale, value_dim=case.value_dim) for one in self.pages]
        table = (torch.randperm(requests * pages, device=DEVICE) + 1).int().view(requests, pages)
        full = torch.zeros(requests, int(self.geometry.max_pages_per_req), dtype=torch.int32, device=DEVICE)
        full[:, :pages] = table[:, : full.shape[1]]
        total = requests * rows
        self.q = torch.randn(total, case.heads, case.head_dim, dtype=torch.bfloat16, device=DEVICE)
        self.out = self.new_out()
        lens = torch.full((requests,), keys - rows, dtype=torch.int32, device=DEVICE)
        indptr = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE) * rows
        self.batch = ForwardBatch(
            mode, 0, lens, indptr, full, self._tail(), torch.zeros(total, dtype=torch.int64, device=DEVICE),
            Exact((keys - rows,) * requests), requests, (rows,) * requests, (rows,) * requests, total, None,
        )  # fmt: skip

    def _rows(self, pages: int) -> torch.Tensor:
        """Return random rows ``[pages, P, elements]`` in the dtype of the cache."""
        shape = pages, self.case.page, self.case.head_dim
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE).to(getattr(torch, self.case.kv_dtype))

    def _tail(self) -> Causal | Tree:
        rows, words = self.case.rows, int(self.geometry.mask_words)
        if not self.case.is_tree:
            return Causal()
        chance, masks, depths = random.Random(1), [], []
        for _ in range(self.case.requests):
            seen, depth = [1], [0]
            for slot in range(1, rows):
                parent = chance.randrange(max(0, slot - 8), slot)
                seen.append(seen[parent] | 1 << slot)
                depth.append(depth[parent] + 1)
            masks += [
                [(one >> 32 * w & 0xFFFFFFFF) - (one >> 32 * w & 1 << 31) * 2 for w in range(words)] for one in seen
            ]
            depths.append(depth)
        return Tree(*(torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in (masks, depths)))

    def new_out(self) -> torch.Tensor:
        """Return an output tensor full of NaN."""
        shape = len(self.q), self.case.heads, self.case.value_dim
        return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)

    def own_calls(self) -> Calls:
        """Return one `attend` for each cache."""
        backend = load("cuda_triton").open(self.geometry, DEVICE)
        backend.plan(self.batch)
        backend.write_metadata(self.batch)

        def call(cache: KVCache) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                backend.attend(self.q, cache, self.batch, self.out)
                return self.out

            return run

        return [call(cache) for cache in self.caches]

    def microseconds(self) -> float:
        """Return the time of one layer's `attend`."""
        calls = self.own_calls()
        graph = captured(calls)
        return min(replay_time(graph) for _ in range(2)) / self.calls

    def error_of(self, out: torch.Tensor, chain: bool = False) -> float:
        """Return the relative error by norm of the first request's rows in the first cache, against float64.

        Args:
            chain: each row sees all earlier rows of its request, also if the case is a tree.
        """
        rows, keys, width = self.case.rows, self.case.keys, self.case.value_dim
        at, table = torch.arange(keys, device=DEVICE), self.batch.page_table[0].long()
        stored = self.pages[0][table[at // self.case.page], at % self.case.page].double()
        stored *= 1.0 if self.row_scale is None else self.row_scale.double()
        q = self.q[:rows].double().flatten(0, 1)
        seen = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE)
        seen[:, keys - rows :] = self._tail_seen(chain)
        scores = (q @ stored.T * self.scale).view(rows, self.case.heads, -1)
        expected = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ stored[:, :width]
        return ((out[:rows].double() - expected).norm() / expected.norm()).item()

    def _tail_seen(self, chain: bool) -> torch.Tensor:
        """Return bool ``[rows, rows]``: the tail tokens of the first request that each row sees."""
        tail, slot = self.batch.tail, torch.arange(self.case.rows, device=DEVICE)
        if isinstance(tail, Tree) and not chain:
            return (tail.mask[: self.case.rows][:, slot // 32] >> (slot % 32) & 1).bool()
        return slot[None] <= slot[:, None]


def captured(calls: Calls) -> torch.cuda.CUDAGraph:
    """Return a graph of the calls of a case; the calls own memory that the graph uses, so they must outlive it."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_time(graph: torch.cuda.CUDAGraph, replays: int = 25) -> float:
    """Return the median time of replays in microseconds; the first fifth warms up."""
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return median(times[replays // 5 :])
