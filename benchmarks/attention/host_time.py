"""Host time of cuda_triton's step path, without a GPU: the Python time of each call, with launches that do nothing.

    python -m benchmarks.attention.host_time
    python -m benchmarks.attention.host_time --against OTHER_CHECKOUT

Two CPU times of each call, in microseconds, so that a busy machine does not count:

* repeated: the layout is known, as in every layer of an eager forward after the first. Launches repeat through
  `TritonLaunch`, because there is no driver; `cuLaunchKernelEx` is not included.
* first: the layout is new, so the launch code runs and its launches are recorded.

`--against` measures both checkouts in turns, in processes of their own, and prints the ratio of the medians of this
checkout to the other's (lower is faster).
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("core/*/src", "plugins/*/src", "plugins/*/*/src")
LAYERS, REPEATS, TURNS = 16, 41, 5
"""Layers of a forward, timed forwards of a case, and processes of each checkout."""


class Compiled:
    """Compiled kernel with launches that do nothing."""

    run = None

    def __init__(self, kernel: Any) -> None:
        self.src = SimpleNamespace(fn=kernel)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_, **__: None


class Driver:
    """Driver of one H200 that is not there."""

    def get_current_target(self) -> Any:
        """Return a target with warps of 32 threads."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0


def pretend() -> None:
    """Let Triton compile nothing, and torch and Triton report one H200."""
    import torch
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    h200 = SimpleNamespace(multi_processor_count=132, memory_clock_rate=3_200_000, memory_bus_width=6144)
    driver._active = Driver()
    torch.cuda.get_device_properties = lambda _=None: h200
    torch.cuda.is_current_stream_capturing = lambda: False
    JITFunction.warmup = lambda kernel, *_, **__: Compiled(kernel)


def timed(caches: list[Any], call: Callable[[], None]) -> tuple[float, float]:
    """Return the median microseconds of a repeated call, and of a first call.

    Args:
        caches: dictionaries of recorded launches, emptied before each first call.
    """

    def once() -> float:
        start = time.thread_time_ns()
        for _ in range(LAYERS):
            call()
        return (time.thread_time_ns() - start) / LAYERS / 1000

    def first() -> float:
        total = 0
        for _ in range(LAYERS):
            for cache in caches:
                cache.clear()
            start = time.thread_time_ns()
            call()
            total += time.thread_time_ns() - start
        return total / LAYERS / 1000

    once(), first(), once()
    gc.collect()
    gc.disable()  # a collection of all of torch's objects takes longer than every call
    return statistics.median(once() for _ in range(REPEATS)), statistics.median(first() for _ in range(REPEATS))


def attention_cases() -> Iterator[tuple[str, list[Any], Callable[[], None]]]:
    """Yield the name, the caches and a call of each case of attention."""
    from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
    from draftmark.batch import Causal, Chosen, ForwardBatch, Tree
    from draftmark.lengths import Unknown, UpperBound
    from draftmark.runtime import KVCache
    from draftmark_cuda_triton import sizing
    from draftmark_cuda_triton.backend import TritonBackend

    dense = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
    latent = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True, "page_size": 64}
    latent |= {"softmax_scale": 0.1}
    chain, tree = DraftShape(1, 4, 5), DraftShape(4, 3, 16)
    cases: dict[str, tuple[Any, ...]] = {
        "decode": (dense, chain, Mode.DECODE, 64, None),
        "verify, tree": (dense, tree, Mode.VERIFY, 16, None),
        "ragged verify": (dense, chain, Mode.RAGGED_VERIFY, 16, None),
        "decode, e4m3": (dense | {"kv_dtype": "float8_e4m3fn"}, chain, Mode.DECODE, 64, None),
        "prefill": (dense, chain, Mode.EXTEND, 8, None),
        "prefill, e4m3": (dense | {"kv_dtype": "float8_e4m3fn"}, chain, Mode.EXTEND, 2, 3000),
        "latent decode": (latent, chain, Mode.DECODE, 64, None),
        "latent prefill": (latent, chain, Mode.EXTEND, 8, None),
        "chosen decode": (latent | {"chosen_width": 2048}, chain, Mode.DECODE, 16, None),
    }
    for name, (fields, draft, mode, reqs, bound) in cases.items():
        shape = AttentionShape(**fields)
        modes = tuple({mode: None, Mode.DECODE: None})
        geometry = Geometry.create(shape, Limits(64, 8192, 8192), draft, DeviceProfile("cuda", 90, 132), modes)
        arena = {one.name: _new(*map(int, one.shape), dtype=one.dtype) for one in sizing.buffers(geometry)}
        backend = TritonBackend(geometry, arena)
        rows = 512 if mode is Mode.EXTEND else int(geometry.extent(mode).q_len)
        count, q_lens = rows * reqs, (rows,) * reqs
        tail = Causal()
        if draft.topk > 1:
            tail = Tree(_new(count, int(geometry.mask_words), dtype="int32"), _new(reqs, rows, dtype="int32"))
        host = Unknown(reqs, 4000) if bound is None else UpperBound((bound,) * reqs)
        lists = None
        if shape.chosen_width:
            lists = Chosen(_new(count, shape.chosen_width, dtype="int32"), _new(count, dtype="int32"))
        batch = ForwardBatch(
            mode, 0, _new(reqs, dtype="int32"), _new(reqs + 1, dtype="int32"),
            _new(reqs, int(geometry.max_pages_per_req), dtype="int32"), tail, _new(count, dtype="int64"), host, reqs,
            q_lens, q_lens, count, None, chosen=lists,
        )  # fmt: skip
        if shape.latent:
            pools = [_new(4, shape.page_size, shape.head_dim, dtype=shape.kv_dtype) for _ in range(LAYERS)]
            layers = [KVCache.latent(one, value_dim=shape.value_width) for one in pools]
        else:
            scale = _new(1, dtype="float32") if shape.kv_dtype != shape.q_dtype else None
            pages = (4, shape.page_size, shape.num_kv_heads, shape.head_dim)
            layers = [
                KVCache(_new(*pages, dtype=shape.kv_dtype), _new(*pages, dtype=shape.kv_dtype), scale, scale)
                for _ in range(LAYERS)
            ]
        q, out = (_new(count, shape.num_qo_heads, dim) for dim in (shape.head_dim, shape.value_width))
        backend.attend(q, layers[0], batch, out)  # e4m3 prompts create objects in their first call
        caches = _caches()
        turn = cycle(layers)
        yield name, caches, lambda b=backend, q=q, t=turn, x=batch, o=out: b.attend(q, next(t), x, o)
        if name in ("decode", "latent decode"):
            k = _new(count, shape.num_kv_heads, shape.head_dim)
            v = None if shape.latent else k
            own = _caches()
            kind = name.replace("decode", "write_kv")
            yield kind, own, lambda b=backend, k=k, v=v, t=turn, x=batch: b.write_kv(k, v, next(t), x)
            yield name.replace("decode", "write_metadata"), own, lambda b=backend, x=batch: b.write_metadata(x)


def state_cases() -> Iterator[tuple[str, list[Any], Callable[[], None]]]:
    """Yield the name, the caches and a call of each case of recurrent layers: convolution and recurrence of a layer."""
    from dataclasses import replace

    from draftmark import DeviceProfile, DraftShape, Gate, Limits, Mode, Recurrence, StateGeometry, StateShape
    from draftmark.batch import Causal, ForwardBatch
    from draftmark.lengths import Unknown
    from draftmark.runtime import StateCache
    from draftmark_cuda_triton.state.backend import TritonState
    from draftmark_cuda_triton.state.sizing import state_buffers

    shape = StateShape(Recurrence.DELTA, Gate.HEAD, 32, 16, 128, 128, 8192, 4, "bfloat16")
    geometry = StateGeometry.create(shape, Limits(16, 512, 2048), DraftShape(1, 4, 5))
    geometry = replace(geometry, device=DeviceProfile("cuda", 90, 132))
    arena = {one.name: _new(*map(int, one.shape), dtype=one.dtype) for one in state_buffers(geometry)}
    backend, reqs = TritonState(geometry, arena), 16
    pool = _new(2, reqs + 1, 32, 128, 128, dtype=shape.state_dtype)
    conv = _new(2, reqs + 1, 8192, geometry.window, dtype=shape.conv_dtype)
    weight = _new(8192, 4)
    for mode, rows in ((Mode.DECODE, 1), (Mode.VERIFY, 5), (Mode.EXTEND, 128)):
        count, q_lens = rows * reqs, (rows,) * reqs
        batch = ForwardBatch(
            mode, 0, _new(reqs, dtype="int32"), _new(reqs + 1, dtype="int32"), _new(reqs, 4, dtype="int32"), Causal(),
            _new(count, dtype="int64"), Unknown(reqs, 400), reqs, q_lens, q_lens, count, None,
            state_slots=_new(reqs, dtype="int32"),
        )  # fmt: skip
        cache = StateCache(_gpu(pool[0]), _gpu(conv[0]), 0)
        x, y = _new(count, 8192), _new(count, 8192)
        q, v, out = _new(count, 16, 128), _new(count, 32, 128), _new(count, 32, 128)
        decay = _new(count, 32, dtype="float32")

        def call(c: Any = cache, b: Any = batch, x: Any = x, y: Any = y, given: Any = (q, v, decay, out)) -> None:
            q, v, decay, out = given
            backend.convolve(x, weight, None, c, b, y)
            backend.recur(q, q, v, decay, decay, c, b, out)

        yield f"state {mode.name.lower()}", _caches(), call


def _caches() -> list[Any]:
    """Return every dictionary of recorded launches in this process."""
    from draftmark_cuda_triton.launch.relaunch import RelaunchCache

    return [one._cache for one in gc.get_objects() if type(one) is RelaunchCache]


def _gpu(tensor: Any) -> Any:
    """Return a CPU tensor that the launch code takes for a GPU tensor."""
    return tensor.as_subclass(_gpu_tensor_type())


@functools.cache
def _gpu_tensor_type() -> type:
    """Return the type of these tensors."""
    import torch

    class GpuTensor(torch.Tensor):
        """A CPU tensor with ``is_cuda``, also in its parts."""

        is_cuda = True
        __torch_function__ = torch._C._disabled_torch_function_impl

        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index).as_subclass(type(self))

    return GpuTensor


def _new(*shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    memory = torch.zeros(count * kind.itemsize + 16, dtype=torch.uint8)
    first = -memory.data_ptr() % 16
    return _gpu(memory[first : first + count * kind.itemsize].view(kind).view(shape))


def measure() -> dict[str, tuple[float, float]]:
    """Return both times of every case in this process."""
    pretend()
    found = {}
    for cases in (attention_cases, state_cases):
        for name, caches, call in cases():
            found[name] = timed(caches, call)
    return found


def run(checkout: Path) -> dict[str, tuple[float, float]]:
    """Measure a checkout in a process of its own."""
    sources = [str(found) for pattern in SOURCES for found in sorted(checkout.glob(pattern))]
    with tempfile.TemporaryDirectory() as folder:
        variables = {"PYTHONPATH": os.pathsep.join(sources), "DRAFTMARK_CACHE_DIR": folder, "TRITON_INTERPRET": "0"}
        printed = subprocess.run(
            [sys.executable, __file__, "--child"],
            env=os.environ | variables,
            check=True,
            capture_output=True,
            text=True,
        )
    found: dict[str, tuple[float, float]] = json.loads(printed.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a table of medians, and of ratios with --against."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--turns", type=int, default=TURNS, help="processes of each checkout")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure()))
        return
    checkouts = [ROOT] + ([args.against.resolve()] if args.against else [])
    runs: list[list[dict[str, tuple[float, float]]]] = [[] for _ in checkouts]
    for turn in range(args.turns):
        for number in range(len(checkouts))[:: 1 if turn % 2 else -1]:
            runs[number].append(run(checkouts[number]))
    for name in runs[0][0]:
        times = [[min(one[name][kind] for one in mine) for mine in runs] for kind in range(2)]
        cells = [" ".join(f"{value:8.1f}" for value in kind) for kind in times]
        ratios = [f"{kind[0] / kind[1]:5.2f}" if len(kind) > 1 else "" for kind in times]
        print(f"{name:20} repeated {cells[0]} {ratios[0]}   first {cells[1]} {ratios[1]}")


if __name__ == "__main__":
    main()
