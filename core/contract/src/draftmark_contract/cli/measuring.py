"""Measurements of `draftmark bench`: kernels of installed backends, compared on one device.

A case is one forward of one mode. Every backend gets equal inputs. Its output is compared with the reference's before
it is timed. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from draftmark.backend import AttentionBackend
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.cache import KVCache
from draftmark.devices import device_profile, synchronize
from draftmark.errors import BackendLoadError, BackendRefusal, DraftmarkError
from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.lengths import Exact
from draftmark.loaded import LoadedBackend
from draftmark.registry import load
from draftmark.tree import ancestors, depths, pack_bits

TOLERANCE = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}
"""Limit of ``‖out - reference‖ / ‖reference‖``, by the dtype of queries."""
REPLAYS, EAGER_CALLS, WARM_SECONDS = 30, 3, 0.1


@dataclass(frozen=True)
class Case:
    """Describes one forward to time: mode, draft shape, number of requests, and committed tokens each (`context`)."""

    name: str
    mode: Mode
    draft: DraftShape
    requests: int
    context: int
    step: int = 0
    chunk: int = 0
    """New tokens per request, for EXTEND."""

    def geometry(self, shape: AttentionShape, device: torch.device) -> Geometry:
        """Return the smallest geometry that can hold the case."""
        rows = max(1, self.requests * self.chunk)
        limits = Limits(self.requests, self.context + max(self.chunk, 1), rows)
        return Geometry.create(shape, limits, self.draft, device_profile(device), (self.mode,))


CASES = {
    "decode": (Mode.DECODE, DraftShape(), 0),
    "draft8": (Mode.DRAFT, DraftShape(8, 3, 16), 1),
    "verify16": (Mode.VERIFY, DraftShape(8, 5, 16), 0),
    "verify64": (Mode.VERIFY, DraftShape(8, 5, 64), 0),
    "extend": (Mode.EXTEND, DraftShape(), 0),
}
"""Mode, draft shape and step, by name. draft8 is the second step with eight branches; verify trees are random."""


def case_of(name: str, requests: int, context: int, chunk: int) -> Case:
    """Return the case with this name. EXTEND has no prefix and `chunk` new tokens per request."""
    mode, draft, step = CASES[name]
    if mode is Mode.EXTEND:
        return Case(name, mode, draft, requests, 0, step, chunk)
    return Case(name, mode, draft, requests, context, step)


@dataclass(frozen=True)
class Row:
    """Holds the result of one backend for one case. `us` is None if it was not timed; `note` then has the reason."""

    case: str
    backend: str
    requests: int
    context: int
    rows: int
    bytes: int
    us: float | None = None
    error: float | None = None
    checked: bool = False
    note: str = ""
    failed: bool = False

    @property
    def tb_per_s(self) -> float | None:
        """Memory bandwidth in TB/s, counting each byte of K and V once."""
        return self.bytes / self.us / 1e6 if self.us else None


class Inputs:
    """Holds the tensors of one case: a batch, queries, and several KV sets that share one page table."""

    def __init__(self, case: Case, shape: AttentionShape, device: torch.device) -> None:
        self.geometry = case.geometry(shape, device)
        self.q_len, self.tail_len = case.chunk, case.chunk
        if case.mode is not Mode.EXTEND:
            extent = self.geometry.extent(case.mode, case.step)
            self.q_len, self.tail_len = extent.q_len, extent.tail_len
        random = torch.Generator(device).manual_seed(7)
        tokens = case.requests * (case.context + self.tail_len)
        self.bytes = 2 * tokens * shape.num_kv_heads * shape.head_dim * torch.finfo(dtype_of(shape)).bits // 8
        self.batch = self._batch(case, device, random)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random, device=device, dtype=dtype_of(shape))

        self.q = normal(case.requests * self.q_len, shape.num_qo_heads, shape.head_dim)
        cache = (self._pages + 1, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.caches = [KVCache(normal(*cache), normal(*cache)) for _ in range(_sets(self.bytes, device))]

    def _batch(self, case: Case, device: torch.device, random: torch.Generator) -> ForwardBatch:
        r, geometry = case.requests, self.geometry
        each = -(-(case.context + self.tail_len) // geometry.attention.page_size)
        self._pages = r * each
        table = torch.zeros(r, geometry.max_pages_per_req, dtype=torch.int32, device=device)
        order = torch.randperm(self._pages, generator=random, device=device).int()
        # Real requests use pages from 1 on; page 0 stays unused as the null page.
        table[:, :each] = order.view(r, each) + 1
        prefix = torch.full((r,), case.context, dtype=torch.int32, device=device)
        depth = torch.arange(self.tail_len, dtype=torch.int32, device=device).expand(r, -1)
        tail: Causal | Tree = Causal()
        if case.mode in (Mode.DRAFT, Mode.VERIFY):
            reach = ancestors(self._parents(case, device, random))
            depth = depths(reach).contiguous()
            rows = reach[:, self.tail_len - self.q_len :].flatten(0, 1)
            tail = Tree(pack_bits(rows, geometry.mask_words), depth)
        positions = prefix[:, None].long() + depth[:, self.tail_len - self.q_len :]
        indptr = torch.arange(r + 1, dtype=torch.int32, device=device) * self.q_len
        host = Exact((case.context,) * r)
        return ForwardBatch(
            case.mode,
            case.step,
            prefix,
            indptr,
            table,
            tail,
            positions.clamp(max=geometry.limits.max_context_len - 1).view(-1),
            host,
            r,
            (self.q_len,) * r,
            (self.tail_len,) * r,
            r * self.q_len,
            None,
        )

    def _parents(self, case: Case, device: torch.device, random: torch.Generator) -> torch.Tensor:
        """Return random parents of draft nodes: any earlier node in VERIFY, a branch of the previous step in DRAFT."""
        slot = torch.arange(self.tail_len, device=device)
        drawn = torch.rand(case.requests, self.tail_len, generator=random, device=device)
        if case.mode is Mode.VERIFY:
            return (drawn * slot).long() - (slot == 0).long()
        first = slot // self.q_len * self.q_len - self.q_len
        return torch.where(first < 0, -1, first + (drawn * self.q_len).long())


def measure(case: Case, names: Sequence[str], shape: AttentionShape, device: torch.device) -> list[Row]:
    """Return one row per backend. If a backend refuses the case or fails, its row has a note instead of a time."""
    inputs = Inputs(case, shape, device)
    expected, why = _answer(load("reference"), inputs, device)
    rows = []
    for name in names:
        known = (case.name, name, case.requests, case.context, inputs.q.shape[0], inputs.bytes)
        if expected is None:
            rows.append(Row(*known, note=f"not compared, so not timed: the reference failed with {why}", failed=True))
            continue
        rows.append(_row(known, load(name), inputs, expected, TOLERANCE[shape.q_dtype], device))
    return rows


def _row(
    known: tuple[str, str, int, int, int, int],
    backend: LoadedBackend,
    inputs: Inputs,
    expected: torch.Tensor,
    tolerance: float,
    device: torch.device,
) -> Row:
    try:
        run = _Run(backend, inputs, device)
        error = relative_error(run.outs[0], expected)
        if not error < tolerance:
            return Row(*known, error=error, note="wrong output, not timed", failed=True)
        return Row(*known, us=run.microseconds(), error=error, checked=True)
    except (BackendRefusal, BackendLoadError) as refusal:
        return Row(*known, note=_line(refusal))
    # A vendor's kernel can raise any exception. The other backends must still get their rows.
    except Exception as failure:
        return Row(*known, note=f"{type(failure).__name__}: {_line(failure)}", failed=True)


def _answer(backend: LoadedBackend, inputs: Inputs, device: torch.device) -> tuple[torch.Tensor | None, str]:
    try:
        return _Run(backend, inputs, device, sets=1).outs[0], ""
    except (DraftmarkError, RuntimeError) as error:  # The usual cause is that the device is out of memory.
        return None, f"{type(error).__name__}: {_line(error)}"


class _Run:
    """Holds one opened backend with its metadata written. Every timed call has already run once."""

    def __init__(self, backend: LoadedBackend, inputs: Inputs, device: torch.device, sets: int | None = None) -> None:
        self.device = device
        opened: AttentionBackend = backend.open(inputs.geometry, device)
        opened.plan(inputs.batch)
        opened.write_metadata(inputs.batch)
        caches = inputs.caches[:sets]
        self.outs = [torch.full_like(inputs.q, float("nan")) for _ in caches]
        self.calls: list[Callable[[], None]] = [
            lambda cache=cache, out=out: opened.attend(inputs.q, cache, inputs.batch, out)  # type: ignore[misc]
            for cache, out in zip(caches, self.outs, strict=True)
        ]
        for call in self.calls:
            call()
        synchronize(self.device)

    def microseconds(self) -> float:
        """Return the median time of a call, measured over graph replays on CUDA and by wall clock on other devices."""
        return replayed_us(self.calls) if self.device.type == "cuda" else self._eager()

    def _eager(self) -> float:
        times = []
        for _ in range(EAGER_CALLS):
            begin = time.perf_counter()
            for call in self.calls:
                call()
            synchronize(self.device)
            times.append((time.perf_counter() - begin) * 1e6 / len(self.calls))
        return median(times)


class Replayed:
    """Captures calls into one CUDA graph on the current device, to time its replays.

    Every call must have run before. Each call uses another KV set, so that no call finds its KV in L2.
    """

    def __init__(self, calls: Sequence[Callable[[], None]]) -> None:
        self._graph, self._calls = torch.cuda.CUDAGraph(), len(calls)
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()

    def microseconds(self, replays: int = 1) -> float:
        """Return the time per call over `replays` consecutive replays, in microseconds."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / replays / self._calls


def replayed_us(calls: Sequence[Callable[[], None]], replays: int = REPLAYS) -> float:
    """Return the median time per call over `replays` replays of one graph of all `calls`, in microseconds."""
    graph = Replayed(calls)
    # Clocks and memory need time to settle after other work. Without warm-up the first replays are up to 20 % slower.
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        graph.microseconds()
    return median([graph.microseconds() for _ in range(replays)])


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ``‖out - expected‖ / ‖expected‖`` in float64; NaN or infinity in `out` makes it NaN or infinite."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def dtype_of(shape: AttentionShape) -> torch.dtype:
    """Return the torch dtype of queries and KV."""
    dtype: torch.dtype = getattr(torch, shape.q_dtype)
    return dtype


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a CUDA device in bytes; None for other devices."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def _sets(nbytes: int, device: torch.device) -> int:
    """Return the number of KV sets needed to exceed the L2 cache together, at most 4. Without CUDA return 1."""
    if device.type != "cuda":
        return 1
    cached = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(4, -(-cached // nbytes)))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
