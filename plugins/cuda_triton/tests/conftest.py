"""Float64 oracle, random batches, and fake GPU drivers. Tests use a GPU if present, else Triton's interpreter."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.lengths import Unknown, UpperBound
from draftmark.runtime import KVCache
from draftmark_cuda_triton import decode_verify, kernel_variants, kv_write, prefill, prefill_fp8, sizing, switches
from draftmark_cuda_triton.heuristics import common, upcast
from draftmark_cuda_triton.kernel_variants import kernels
from draftmark_cuda_triton.launch import launcher, relaunch, tma

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory) -> Iterator[None]:
    """Keep kernels that tests compile out of the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTMARK_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


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


@dataclass(frozen=True)
class Helpers:
    """Holds functions of this conftest for tests, because tests cannot import a conftest."""

    device: str = DEVICE
    problem: Callable[..., Problem] = make_problem
    oracle: Callable[..., tuple[torch.Tensor, torch.Tensor]] = oracle
    ragged_oracle: Callable[..., tuple[torch.Tensor, torch.Tensor]] = ragged_oracle
    fill_cache: Callable[..., list[int]] = fill_cache
    error: Callable[..., float] = error
    poison: Callable[..., torch.Tensor] = poison


@pytest.fixture(scope="session")
def helpers() -> Helpers:
    return Helpers()


@dataclass
class Stages:
    """Holds the tile (NumPy) or the barrier (a name) of each pipeline stage."""

    each: list[Any]

    def index(self, slot: Any) -> Any:
        """Return the tile or barrier of one stage; the tile is no copy, so writes change the pipeline."""
        return self.each[slot]


@pytest.fixture(scope="session")
def make_numpy_pipeline() -> Callable[..., Any]:
    """Factory of `kernels_sm90.pipeline.KvPipeline` over NumPy tiles, for partitions that run in Python.

    Arguments are the parts of K's and V's tiles, each a list of stages. Barriers are the names "k", "k empty", "v" and
    "v empty", each with its stage.
    """

    from draftmark_cuda_triton import kernels_sm90

    def half(name: str, parts: list[list[Any]]) -> Any:
        full, empty = (Stages([(one, slot) for slot in range(len(parts[0]))]) for one in (name, f"{name} empty"))
        return kernels_sm90.pipeline.TensorPipeline(tiles=tuple(map(Stages, parts)), full=full, empty=empty)

    return lambda k, v: kernels_sm90.pipeline.KvPipeline(k=half("k", k), v=half("v", v))


@dataclass
class Result:
    """Holds the tensors that the forward of a uniform batch wrote."""

    out: torch.Tensor
    lse: torch.Tensor
    slots: torch.Tensor
    work: torch.Tensor


@pytest.fixture(scope="session")
def run_decode_verify() -> Callable[..., Result]:
    """Function that runs write_metadata and attend of a problem with a given configuration and number of splits."""
    from draftmark_cuda_triton.heuristics import common
    from draftmark_cuda_triton.launch import attention, metadata, operands

    def run(problem: Problem, config: common.KernelConfig, num_splits: int) -> Result:
        p = problem
        rows, hq, dim = p.q.shape
        hkv, page = p.k.shape[2], p.k.shape[1]
        pdl = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] >= 9
        shape = operands.AttentionParams(hkv, p.group, dim, page, p.scale, p.cap, p.window_left, pdl)
        extent = operands.BatchExtent(p.prefix_lens.numel(), p.q_len, p.tail_len, rows)
        work, slots = poison(2 * num_splits, 4, dtype=torch.int32), poison(rows, dtype=torch.int64)
        metadata.write_metadata_decode_verify(
            shape, config, extent, num_splits, p.prefix_lens, p.page_table, slots, work
        )
        tiles = common.row_tiles(config, p.q_len, p.group * config.kv_heads_per_tile) * hkv // config.kv_heads_per_tile
        parts = 2 * num_splits * tiles * config.block_m
        out, lse = poison(rows, hq, dim, dtype=p.q.dtype), poison(rows, hq)
        given = operands.Operands(
            p.q, p.k, p.v, p.k_scale, p.v_scale, p.sinks, out, lse, p.prefix_lens, None, p.page_table, p.mask, p.depth
        )
        partials = operands.PartialResults(work, poison(parts, dim), poison(parts))
        attention.attend_decode_verify(shape, config, extent, num_splits, given, partials)
        return Result(out, lse, slots, work)

    return run


class Utils:
    """Fakes the driver utilities that Triton calls to load a kernel."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Return module, function, registers, spilled bytes and maximum threads."""
        assert binary
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties of an H200."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}

    def unload_module(self, module: int) -> None:
        """Do nothing, since no module was loaded."""


class FakeDriver:
    """Fake driver of an absent GPU: kernels are compiled to machine code, and launches are recorded, not run.

    Triton ships its own assembler, so compilation is tested on any machine.

    Attributes:
        launched: source and arguments of each launch, in order.
    """

    def __init__(self, arch: int) -> None:
        self.utils, self.launched, self._arch = Utils(), [], arch
        self.launcher_cls = self._launcher

    def _launcher(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launched.append((source, arguments))

    def get_current_target(self) -> GPUTarget:
        """Return a CUDA target with warps of 32 threads."""
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the CPU, where the tensors are."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return a placeholder, because nothing is timed."""
        return torch.cuda


@pytest.fixture
def compiled_kernels() -> list[JITFunction]:
    """Every compiled kernel of `kernels`, and the functions that the kernels call."""
    return functions_of(kernels)


def functions_of(package: ModuleType) -> list[JITFunction]:
    """Return every kernel of a package and the functions that the kernels call."""
    modules = [one for one in vars(package).values() if isinstance(one, ModuleType)]
    return [function for one in modules for function in vars(one).values() if isinstance(function, JITFunction)]


@pytest.fixture
def fake_driver(request, monkeypatch, compiled_kernels) -> Iterator[FakeDriver]:
    """Fake driver in place of Triton's, for sm_90 or the architecture in the test's indirect parameter."""
    found = FakeDriver(getattr(request, "param", 90))
    monkeypatch.setattr(driver, "_active", found)
    # Kernels that another driver compiled must not be launched here, and kernels of this fake must not leak into later
    # tests.
    monkeypatch.setattr(launcher.LAUNCHER, "compiled", {})
    # Stored kernels have no PTX, which tests read.
    monkeypatch.setattr(launcher, "use_store", lambda *_: None)
    monkeypatch.setattr(kv_write, "WRITER", kv_write.KvWriter())
    functions = list(compiled_kernels)
    if tma.has_gluon():
        from draftmark_cuda_triton import kernels_sm90

        functions += functions_of(kernels_sm90)
    for one in functions:
        one.device_caches.clear()
    yield found
    launcher.LAUNCHER.compiled.clear()
    for one in functions:
        for cache, *_ in one.device_caches.values():
            for kernel in cache.values():
                kernel.module = None  # When the kernel is deleted, it would unload this module from the real driver.
        one.device_caches.clear()


@pytest.fixture
def fake_gpu(fake_driver, monkeypatch) -> FakeDriver:
    """Fake driver; in addition the compiled kernels are selected, although the tensors are on the CPU."""
    monkeypatch.setattr(kernel_variants, "runs_compiled", lambda _: True)
    monkeypatch.setattr(tma, "_num_sms", lambda _: 132)
    monkeypatch.setattr(tma, "has_fast_memory", lambda _: True)
    # If another test left TRITON_INTERPRET set, Triton's constexpr functions would not return constants.
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    return fake_driver


@pytest.fixture
def without_machine_code(monkeypatch, tmp_path_factory) -> None:
    """Compile kernels as far as Triton's IR only, which takes a tenth of the time. A fake driver loads no machine code.

    Such kernels lie in a cache folder of their own, because Triton would find them under the keys of the real ones.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "without-machine-code"))
    real = CUDABackend.add_stages

    def add_stages(self: CUDABackend, stages: dict[str, Any], options: Any, language: Any) -> None:
        real(self, stages, options, language)
        first, last = next(iter(stages)), self.binary_ext
        stages.clear()
        stages[first] = lambda ir, metadata: ir

        def assemble(ir: Any, metadata: dict[str, Any]) -> bytes:
            metadata.update(name="kernel", shared=1000, tmem_size=0, tensordesc_meta=[])
            metadata.update(global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0)
            return b"no machine code"

        stages[last] = assemble

    monkeypatch.setattr(CUDABackend, "add_stages", add_stages)


@pytest.fixture
def read_switches() -> Iterator[Callable[[], None]]:
    """Function that reads the environment variables of `switches` again; they are read once more after the test."""

    def forget() -> None:
        for one in (switches.launch_mode, switches.uses_own_launch, switches.is_tested_triton):
            one.cache_clear()

    forget()
    yield forget
    forget()


LAYER_REQS, HEADS = 3, (8, 2)


class GpuTensor(torch.Tensor):
    """CPU tensor with is_cuda = True."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def new_tensor(*shape, dtype=torch.bfloat16, odd=False):
    """Return a new fake GPU tensor of zeros; with `odd` its address is not a multiple of 16 bytes.

    Its memory is mapped, because some Pythons have their heap below 2³², where no GPU has memory.
    """
    count = torch.Size(shape).numel()
    memory = torch.frombuffer(mmap.mmap(-1, (count + 8) * dtype.itemsize), dtype=torch.uint8)
    return as_gpu(memory.view(dtype)[4 * odd :][:count].view(shape))


def as_gpu(view):
    """Return the view as a fake GPU tensor."""
    return view.as_subclass(GpuTensor)


class Layers:
    """Holds one attention implementation on fake GPU tensors, and draws random batches and layers for it.

    Args:
        mode: mode of every batch.
        page: page size in tokens.
        fp8: e4m3 KV cache instead of bfloat16.
        sinks: attention sinks in every layer.
    """

    def __init__(self, mode, page, fp8=False, sinks=False):
        dtype = "float8_e4m3fn" if fp8 else "bfloat16"
        self.mode, self.page, self.kv_dtype, self.has_sinks = mode, page, getattr(torch, dtype), sinks
        shape = AttentionShape(*HEADS, 128, page, kv_dtype=dtype, sinks=sinks)
        self.q_len = {Mode.DECODE: 1, Mode.EXTEND: 20}.get(mode, 8)
        limits, device = Limits(8, 4096, 256), DeviceProfile("cuda", 90, 132)
        geometry = Geometry.create(shape, limits, DraftShape(4, 3, 8), device, (mode,))
        slots = new_tensor(int(geometry.max_rows_any), dtype=torch.int64)
        is_prefill = mode is Mode.EXTEND
        specs = sizing.split_buffers(geometry, [] if is_prefill else [mode], is_prefill)
        specs += sizing.upcast_buffers(geometry) if is_prefill else []
        own = {one.name: new_tensor(*map(int, one.shape), dtype=getattr(torch, one.dtype)) for one in specs}
        if is_prefill:
            tiles = new_tensor(999, 2, dtype=torch.int32)
            if fp8:
                self.attention = prefill_fp8.PrefillFp8(geometry, slots, tiles, own)
            else:
                # Only layers with pages of 16 get split buffers, so that tests cover Prefill with and without splits.
                self.attention = prefill.Prefill(geometry, slots, tiles, own if page == 16 else None)
                self.warm_up, self.attention.warm_up = self.attention.warm_up, lambda *_: None
        else:
            self.attention = decode_verify.DecodeVerify(geometry, slots, own)
        self.words = geometry.mask_words

    def batch(self, chance):
        """Return a batch of 2 or 3 requests at new addresses, with a chain or a tree of new tokens."""
        count = chance.choice((2, LAYER_REQS))
        rows, q_len = count * self.q_len, self.q_len
        tail = Causal()
        if self.mode in (Mode.VERIFY, Mode.RAGGED_VERIFY) and chance.random() < 0.6:
            depth = (rows,) if self.mode is Mode.RAGGED_VERIFY else (count, q_len)
            mask = new_tensor(rows, self.words, dtype=torch.int32, odd=chance.random() < 0.2)
            tail = Tree(mask, new_tensor(*depth, dtype=torch.int32))
        return ForwardBatch(
            self.mode, 0, new_tensor(count, dtype=torch.int32), new_tensor(count + 1, dtype=torch.int32),
            new_tensor(count, chance.choice((300, 4096)), dtype=torch.int32), tail, new_tensor(rows, dtype=torch.int64),
            self.host(count, chance), count, (q_len,) * count, (q_len,) * count, rows, None,
        )  # fmt: skip

    def host(self, count, chance):
        """Return host lengths, for e4m3 prompts known or unknown at random, so that some batches upcast K and V."""
        is_known = self.mode is Mode.EXTEND and self.kv_dtype is torch.float8_e4m3fn and chance.random() < 0.7
        return UpperBound((chance.choice((900, 3000)),) * count) if is_known else Unknown(count, 4000)

    def layer(self, chance):
        """Return a cache of 4 or 6 pages: contiguous K and V, or both interleaved by page."""
        pages, shape = chance.choice((4, 6)), (self.page, HEADS[1], 128)
        if chance.random() < 0.3:
            k, v = map(as_gpu, new_tensor(pages, 2, *shape, dtype=self.kv_dtype).unbind(1))
        else:
            k, v = (new_tensor(pages, *shape, dtype=self.kv_dtype) for _ in range(2))
        scales = [new_tensor(1, dtype=torch.float32, odd=chance.random() < 0.2) for _ in range(2)]
        if self.kv_dtype is torch.bfloat16 or chance.random() < 0.2:
            scales = [None, None]
        elif chance.random() < 0.3:
            scales[1] = scales[0]
        return KVCache(k, v, *scales, new_tensor(HEADS[0], dtype=torch.float32) if self.has_sinks else None)

    def rows(self, batch, chance):
        """Return q and out; q may be a slice of a QKV projection."""
        projected = new_tensor(batch.num_rows, HEADS[0] + 2 * HEADS[1], 128)
        q = as_gpu(projected[:, : HEADS[0]]) if chance.random() < 0.5 else new_tensor(batch.num_rows, HEADS[0], 128)
        return q, new_tensor(batch.num_rows, HEADS[0], 128)

    def new_rows(self, count, chance):
        """Return K and V rows, at random slices of one QKV projection, and their slots."""
        qkv = new_tensor(count, HEADS[0] + 2 * HEADS[1], 128)
        k, v = (as_gpu(one) for one in qkv[:, HEADS[0] :].split(HEADS[1], 1))
        if chance.random() < 0.4:
            k, v = (new_tensor(count, HEADS[1], 128, odd=chance.random() < 0.2) for _ in "kv")
        return k, v, new_tensor(count, dtype=torch.int64)

    new_tensor = staticmethod(new_tensor)
    as_gpu = staticmethod(as_gpu)


@pytest.fixture
def make_layers() -> type[Layers]:
    """`Layers` class: backends on fake GPU tensors, for tests that also use `fake_gpu`."""
    return Layers


@pytest.fixture(
    params=[
        (Mode.DECODE, 16, False, False),
        (Mode.VERIFY, 16, False, True),
        (Mode.VERIFY, 16, True, False),
        (Mode.RAGGED_VERIFY, 1, False, False),
        (Mode.RAGGED_VERIFY, 64, False, False),
        (Mode.EXTEND, 16, False, True),
        (Mode.EXTEND, 1, False, False),
        (Mode.EXTEND, 16, True, True),
        (Mode.EXTEND, 64, True, False),
    ],
    ids=lambda c: f"{c[0].name}-p{c[1]}{'-fp8' * c[2]}{'-sinks' * c[3]}",
)
def layer_calls(request, make_layers, monkeypatch):
    """Layers of one backend and 40 attention calls with random batches and layers in random order.

    The calls differ in addresses, strides, alignment, sizes and missing tensors. The limit for short prompts is
    removed, so e4m3 prompts of any length can be upcast.
    """
    monkeypatch.setattr(upcast, "UPCAST_MIN_ROWS", 0)
    monkeypatch.setattr(upcast, "UPCAST_LAUNCH_COST", 0)
    layers = make_layers(*request.param)
    monkeypatch.setattr(prefill.Prefill, "warm_up", lambda *_: None)
    monkeypatch.setattr(prefill_fp8.PrefillFp8, "_warm_up", lambda *_: None)
    return make_calls(layers)


def make_calls(layers: Layers) -> tuple[Layers, list[tuple[Any, ...]]]:
    """Return the layers and 40 random attention calls; see `layer_calls`."""
    chance = random.Random(1)
    batches, caches = [layers.batch(chance) for _ in range(6)], [layers.layer(chance) for _ in range(5)]
    calls = []
    for _ in range(40):
        batch = chance.choice(batches)
        q, out = layers.rows(batch, chance)
        calls.append((q, chance.choice(caches), batch, out))
    return layers, calls


@pytest.fixture
def decode_calls(make_layers):
    """Like `layer_calls`, for decode with pages of 16."""
    return make_calls(make_layers(Mode.DECODE, 16))


@pytest.fixture
def without_relaunch(monkeypatch) -> Callable[[], AbstractContextManager[None]]:
    """Context manager in which every launch is a new Triton launch, without the relaunch cache."""

    @contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as inside:
            inside.setattr(
                relaunch.RelaunchCache, "__call__", lambda _, layout, tensors, launch, *args: launch(*args, *tensors)
            )
            yield

    return block
