"""Runs forwards on a backend in a process that never imports the suite. It is started as a file, not as a module.

    python program.py GIVEN RESULTS PROCESS_STATE NAME [DEVICE]

GIVEN is a file of `torch.save` with the backend's name, the device, geometries and their inputs. RESULTS receives the
outputs, caches and buffers of each life, and the changes of the process. PROCESS_STATE is the path of that module. With
a DEVICE the vendor's runtime of backend NAME is imported first, because GIVEN then has tensors on that device.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from draftmark.registry import load
from draftmark.runtime import Arena, GraphKey, KVCache, Program

ABSENT = ("draftmark_contract", "draftmark_proof", "hypothesis", "pytest", "z3", "xdist")
"""Packages that no engine installs, so that a backend cannot import them."""
M_PERTURB = -6
"""Option of glibc's mallopt: fill all memory of malloc with a byte."""
FRESH_BYTES = 1 << 26
LIVES = (
    ("on the main thread, in memory of bytes 2A", 0x2A, False, False),
    ("in inference mode, in memory of bytes D5", 0xD5, False, True),
    ("with each call on a thread of its own", 0xD5, True, False),
)
"""Description, byte that fills all fresh memory, True if each call has a new thread, True for inference mode."""
THREADS = 2
"""Threads of torch here. The suite's own process has one, so a backend that is wrong with several fails only here."""


class _Absent:
    """Finder that makes the packages of `ABSENT` impossible to import."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r} in an engine's process", name=name)


def _poison(byte: int, device: str) -> None:
    """Fill memory that is allocated from now on with a byte, as far as the allocators of this system allow."""
    if sys.platform == "linux":
        perturb = getattr(ctypes.CDLL(None), "mallopt", None)
        if perturb is not None:
            perturb(M_PERTURB, 255 - byte)  # glibc fills with the complement.
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.full((FRESH_BYTES,), byte, dtype=torch.uint8, device=device)


def _fill(tensor: torch.Tensor, byte: int) -> None:
    tensor.view(-1).view(torch.uint8).fill_(byte)


def _caller(threads: bool, device: str) -> Callable[[Callable[[], Any]], Any]:
    """Return a function that makes a call here, or on a new thread that has the engine's device."""
    if not threads:
        return lambda call: call()
    current = torch.device(device).index or 0  # A new thread's device; torch accepts no "cuda" without an index.

    def on_a_thread(call: Callable[[], Any]) -> Any:
        found: list[Any] = []

        def run() -> None:
            try:
                if torch.device(device).type == "cuda":
                    torch.cuda.set_device(current)
                found.append(call())
            except BaseException as error:  # The main thread raises it.
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    return on_a_thread


def _live(given: dict[str, Any], byte: int, threads: bool) -> list[list[dict[str, Any]]]:
    """Run the forwards of every geometry in memory of one byte, and return their results."""
    call = _caller(threads, given["device"])
    _poison(byte, given["device"])
    return [_opened({**given, "byte": byte, "geometry": one}, call, forwards) for one, forwards in given["worlds"]]


def _opened(
    given: dict[str, Any], call: Callable[[Callable[[], Any]], Any], forwards: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Open the backend for one geometry, run its forwards, and return their results."""
    backend, device, geometry = load(given["name"]), given["device"], given["geometry"]
    arena = Arena.allocate(backend.buffers(geometry), device, guard=False)
    for spec in arena.specs:
        if not spec.zeros:
            _fill(arena[spec.name], given["byte"])
    opened = call(lambda: backend.bind(geometry, arena, checked=False))
    return [_run(given, opened, arena, call, copy.deepcopy(one)) for one in forwards]


def _run(
    given: dict[str, Any], opened: Any, arena: Arena, call: Callable[[Callable[[], Any]], Any], one: dict[str, Any]
) -> dict[str, Any]:
    batch, cache = one["batch"], KVCache(*one["cache"])
    _fill(one["out"], given["byte"])
    call(lambda: opened.plan(batch))
    call(lambda: opened.write_metadata(batch))
    found: dict[str, Any] = {"arena": {name: arena[name].clone() for name in arena}}
    if given["kernels"]:
        call(lambda: opened.write_kv(one["k"], one["v"], cache, batch))
        call(lambda: opened.attend(one["q"], cache, batch, one["out"]))
        found |= {"out": one["out"].clone(), "k": cache.k.clone(), "v": cache.v.clone()}
    if given["kernels"] and one["program"]:
        found["replayed"] = _replayed(given, opened, call, one, cache)
    return found


def _replayed(
    given: dict[str, Any],
    opened: Any,
    call: Callable[[Callable[[], Any]], Any],
    one: dict[str, Any],
    cache: KVCache,
) -> torch.Tensor:
    """Capture the forward, replay it, and return its output."""
    backend, batch = load(given["name"]), one["batch"]

    def step() -> None:
        opened.write_metadata(batch)
        opened.write_kv(one["k"], one["v"], cache, batch)
        opened.attend(one["q"], cache, batch, one["out"])

    state = call(lambda: backend.graph_state(given["geometry"], torch.device(given["device"])))
    key = GraphKey(Program(one["program"]), batch.padded_reqs)
    call(lambda: state.capture(key, step))
    _fill(one["out"], given["byte"])
    call(lambda: opened.plan(batch))
    call(lambda: state.replay(key))
    out: torch.Tensor = one["out"].clone()
    return out


def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("process_state", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _main(given_path: str, results_path: str, process_state: str, name: str, device: str = "") -> None:
    sys.meta_path.insert(0, _Absent())
    if device:
        load(name).require_runtime(device)
    given = torch.load(given_path, weights_only=False)
    state = _module(process_state)
    torch.set_num_threads(THREADS)
    before = state.process_state(modules=False)
    lives = []
    for what, byte, threads, inference in LIVES:
        # Engines run their steps in inference mode. Tensors that are made in it have no version counter.
        with torch.inference_mode(inference):
            lives.append((what, _live(given, byte, threads)))
    changes = {name: repr(values) for name, values in state.changed(before, state.process_state(modules=False)).items()}
    torch.save({"lives": lives, "changes": changes}, results_path)


if __name__ == "__main__":
    _main(*sys.argv[1:])
