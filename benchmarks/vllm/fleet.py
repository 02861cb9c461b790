"""Engines that start and warm up at the same time, each in a process of its own, and then work one at a time.

vLLM compiles for most of its start, on one core. Ten engines that start in parallel therefore take as long as one.
Engines with ``shared`` have their weights and KV in one `memory`. Nothing is timed until every engine has warmed up or
ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .engines import KV_DTYPES, Engine, say
from .starts import prepare, share_kernels, touched_device

Work = Callable[[Any, Engine], Any]
"""A task for an engine's process, called with vLLM's `LLM` and the engine."""
KERNELS = "kernels"
"""Folder of compiled Triton kernels, in the folder of models."""
PACKAGES_S = 90
"""Seconds that an engine waits for the folder of its packages."""
ENOUGH = 2
"""Fewest ready engines with which a comparison makes sense."""


class Fleet:
    """Starts the processes of several vLLM engines, and runs tasks in them.

    If the parent has not initialized the device, the processes are forks and import nothing anew. Otherwise they are
    spawned.

    Args:
        engines: configurations; two or more.
        folder: folder of models.
        warm: task that each engine runs before it is ready.
        device: "cuda" or "cpu".
        weights: bfloat16 elements of the shared weights; 0 for no shared memory.
        kv_bytes: bytes of the shared KV pages, which have one dtype.
        first: number of the first engine. Fleets that live at the same time need different numbers, because folders
            and ports derive from them.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        folder: Path,
        warm: Work,
        device: str,
        weights: int = 0,
        kv_bytes: int = 0,
        first: int = 0,
    ) -> None:
        self.engines, self.failed, self.ready_s, self._waited = list(engines), {}, {}, False
        # A fork of a process that has initialized the device cannot use the device.
        usual = multiprocessing.get_context("spawn" if touched_device() else "fork")
        self._began, self._keeper = time.monotonic(), None
        if weights:
            ranks = range(max(one.num_gpus for one in engines))
            devices = [device] if device == "cpu" else [f"{device}:{rank}" for rank in ranks]
            kept = weights, kv_bytes, _kv_dtype(self.engines)
            self._keeper, self._keeper_link = _start(usual, _keep, kept, devices, len(self.engines))
        self._links, self._processes = [], []
        for number, engine in enumerate(self.engines):
            # vLLM's imports depend on the installed packages, so an engine with packages of its own imports vLLM anew.
            how = multiprocessing.get_context("spawn") if engine.packages else usual
            process, link = _start(how, _serve, engine, folder, warm, first + number, bool(weights and engine.shared))
            self._processes.append(process)
            self._links.append(link)
        if weights:  # the keeper process allocates the memory while the engines import vLLM
            for engine, link, handle in zip(self.engines, self._links, self._keeper_link.recv(), strict=True):
                with contextlib.suppress(OSError):  # the engine has ended; `wait` reports that
                    if engine.shared:
                        link.send(handle)

    def wait(self, seconds: float, longest: float) -> list[int]:
        """Wait until every engine is ready or the time is over, end the others, and return the ready engines' numbers.

        Args:
            seconds: time limit since the start, if at least two engines are ready.
            longest: time limit with fewer ready engines, because one engine has nothing to be compared with.
        """
        if self._waited:
            return [number for number in range(len(self.engines)) if number not in self.failed]
        self._waited = True
        waiting = dict(zip(self._links, range(len(self._links)), strict=True))
        while waiting:
            until = self._began + (seconds if len(self.ready_s) >= ENOUGH else longest)
            ended = multiprocessing.connection.wait(list(waiting), max(0, until - time.monotonic()))
            if not ended:
                break
            for link in ended:
                self._record_start(waiting.pop(link), _receive(link))
        for number in waiting.values():
            self._record_start(number, {"failed": "it was not ready in time"})
        return [number for number in range(len(self.engines)) if number not in self.failed]

    def _record_start(self, number: int, found: dict[str, Any]) -> None:
        """Record whether an engine started or failed."""
        if "failed" in found:
            self.failed[number] = found["failed"]
            say({"failed": found["failed"], "engine": asdict(self.engines[number])})
            self._processes[number].kill()
        else:
            self.ready_s[number] = found["ready_s"]
            say({"ready": number, **found, "backend": self.engines[number].backend})

    def ask(self, number: int, work: Work, seconds: float = 90) -> Any:
        """Run a task in one engine and return its result; a dict with `failed` if it fails or takes too long."""
        if number in self.failed:
            return {"failed": self.failed[number]}
        self._links[number].send(work)
        found = _receive(self._links[number]) if self._links[number].poll(seconds) else {"failed": "no answer in time"}
        if isinstance(found, dict) and "failed" in found:
            self.failed[number] = found["failed"]
            self._processes[number].kill()
        return found

    def ask_all(self, work: Work, seconds: float = 90) -> dict[int, Any]:
        """Run a task in every engine at the same time."""
        found: dict[int, Any] = {}

        def one(number: int) -> None:
            found[number] = self.ask(number, work, seconds)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(len(self.engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def close(self) -> None:
        """Kill all processes."""
        for process in [*self._processes, *([self._keeper] if self._keeper else [])]:
            process.kill()
            process.join()


def _start(context: Any, target: Any, *given: Any) -> tuple[Any, Any]:
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*given, theirs), daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _receive(link: Any) -> Any:
    try:
        return link.recv()
    except EOFError:
        return {"failed": "the process ended without a result"}


def _kv_dtype(engines: Sequence[Engine]) -> str:
    """Return the KV dtype of the engines that share memory.

    Raises:
        ValueError: these engines have different KV dtypes. The shared pages hold random numbers of one dtype only.
    """
    found = {one.kv_dtype for one in engines if one.shared}
    if len(found) > 1:
        raise ValueError(
            f"engines share KV, but their kv_dtype is {' and '.join(sorted(found))}; write a plan for each"
        )
    return found.pop()


def _keep(kept: tuple[int, int, str], devices: list[str], copies: int, link: Any) -> None:
    """Own the shared memory: send the handles of each device to each engine, and keep running.

    Args:
        kept: elements of the weights, bytes of the KV pages, and the KV dtype.
        copies: number of engines.
    """
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing

    from .memory import make

    torch.multiprocessing.set_sharing_strategy("file_system")
    weights, kv_bytes, kv_dtype = kept
    tensors = [make(weights, kv_bytes, device, getattr(torch, KV_DTYPES[kv_dtype])) for device in devices]
    for device in devices:
        if device != "cpu":
            torch.cuda.synchronize(device)
    link.send([[bytes(ForkingPickler.dumps(pair)) for pair in tensors] for _ in range(copies)])
    threading.Event().wait()


def _serve(engine: Engine, folder: Path, warm: Work, number: int, shared: bool, link: Any) -> None:
    try:
        began = time.monotonic()
        _set_up(engine, folder)
        # Each engine searches for free ports from a number of its own, and compiles into folders of its own.
        os.environ["VLLM_PORT"] = str(21000 + 100 * number)
        os.environ["VLLM_CACHE_ROOT"] = str(folder / f"cache-{number}")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor-{number}")
        prepare(engine.architectures)  # a spawned process inherits nothing from the prepared parent
        share_kernels(folder / KERNELS)
        if shared:
            _map(link.recv(), folder / f"handles-{number}")
        from vllm import LLM

        llm = LLM(**engine.arguments(folder))
        start_s = round(time.monotonic() - began, 1)
        warm(llm, engine)
        link.send({"start_s": start_s, "ready_s": round(time.monotonic() - began, 1)})
        while True:
            link.send(link.recv()(llm, engine))
    except EOFError:
        pass
    except BaseException as error:
        traceback.print_exc()
        link.send({"failed": f"{type(error).__name__}: {str(error)[-600:]}"})
    os._exit(0)  # skips vLLM's own shutdown, which can wait for processes that have ended


def _set_up(engine: Engine, folder: Path) -> None:
    """Set the engine's environment and packages, for its process and for the processes that it starts."""
    os.environ.update(engine.environment)
    if engine.packages:
        packages = str(folder.absolute() / engine.packages)
        _await(Path(packages), PACKAGES_S)
        sys.path.insert(0, packages)
        os.environ["PYTHONPATH"] = os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")])


def _await(path: Path, seconds: float) -> None:
    """Wait until a folder of packages exists; it may arrive after vLLM, while other engines start."""
    until = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.2)


def _map(handles: list[bytes], kept: Path) -> None:
    import torch.multiprocessing

    from .memory import HANDLES, Mapped, register

    torch.multiprocessing.set_sharing_strategy("file_system")
    kept.write_bytes(pickle.dumps(handles))
    os.environ[HANDLES] = str(kept)
    register(Mapped(handles))
