"""Engines that start and warm up together, each in a process of its own, and then are asked one at a time.

vLLM takes most of its start to compile, on one core of the host: side by side ten starts take as long as one. Engines
with ``shared`` have their weights and KV in one `memory`. Nothing is timed before all have warmed up, or ended.
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
"""What an engine's process does when asked: with vLLM's `LLM` and the engine."""
KERNELS = "kernels"
"""Triton's kernels, in the folder of models."""
PACKAGES_S = 90
"""Seconds that an engine waits for the folder of its packages."""
ENOUGH = 2
"""Engines that are worth timing."""


class Fleet:
    """Processes of engines. The parent should not have touched the device: then they are forks, and import nothing.

    Args:
        warm: what each does before it is ready.
        weights, kv_bytes: of the shared memory; 0 for none. Its KV is of one dtype.
        first: number of the first engine; those of fleets that live side by side are apart, as their folders and ports.
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
        # A process that has touched the device has no forks that can use it.
        usual = multiprocessing.get_context("spawn" if touched_device() else "fork")
        self._began, self._keeper = time.monotonic(), None
        if weights:
            ranks = range(max(one.num_gpus for one in engines))
            devices = [device] if device == "cpu" else [f"{device}:{rank}" for rank in ranks]
            kept = weights, kv_bytes, _kv_dtype(self.engines)
            self._keeper, self._keeper_link = _start(usual, _keep, kept, devices, len(self.engines))
        self._links, self._processes = [], []
        for number, engine in enumerate(self.engines):
            # What vLLM imports hangs on what is installed, so an engine with packages of its own imports it anew.
            how = multiprocessing.get_context("spawn") if engine.packages else usual
            process, link = _start(how, _serve, engine, folder, warm, first + number, bool(weights and engine.shared))
            self._processes.append(process)
            self._links.append(link)
        if weights:  # made while engines import
            for engine, link, handle in zip(self.engines, self._links, self._keeper_link.recv(), strict=True):
                with contextlib.suppress(OSError):  # one that has ended says so when it is waited for
                    if engine.shared:
                        link.send(handle)

    def wait(self, seconds: float, longest: float) -> list[int]:
        """Wait until every engine is ready, or as many seconds are over; end those that are not. Return the ready.

        Args:
            longest: seconds to wait where one engine or none is ready, which says nothing beside others.
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
                self._hear(waiting.pop(link), _receive(link))
        for number in waiting.values():
            self._hear(number, {"failed": "it was not ready in time"})
        return [number for number in range(len(self.engines)) if number not in self.failed]

    def _hear(self, number: int, found: dict[str, Any]) -> None:
        """Keep how an engine's start ended."""
        if "failed" in found:
            self.failed[number] = found["failed"]
            say({"failed": found["failed"], "engine": asdict(self.engines[number])})
            self._processes[number].kill()
        else:
            self.ready_s[number] = found["ready_s"]
            say({"ready": number, **found, "backend": self.engines[number].backend})

    def ask(self, number: int, work: Work, seconds: float = 90) -> Any:
        """Let one engine do something, and return what it gives; a dict with `failed` if it does not."""
        if number in self.failed:
            return {"failed": self.failed[number]}
        self._links[number].send(work)
        found = _receive(self._links[number]) if self._links[number].poll(seconds) else {"failed": "no answer in time"}
        if isinstance(found, dict) and "failed" in found:
            self.failed[number] = found["failed"]
            self._processes[number].kill()
        return found

    def ask_all(self, work: Work, seconds: float = 90) -> dict[int, Any]:
        """Let all engines do something at the same time."""
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
        """End all processes."""
        for process in [*self._processes, *([self._keeper] if self._keeper else [])]:
            process.kill()
            process.join()


def idle(llm: Any, engine: Engine) -> None:
    """What an engine does before it is ready that needs no warm-up."""


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
    """Of the KV that engines share.

    Raises:
        ValueError: they take it for numbers of two kinds, of which only one can be random ones.
    """
    found = {one.kv_dtype for one in engines if one.shared}
    if len(found) > 1:
        raise ValueError(f"engines share KV, but their kv_dtype is {' and '.join(sorted(found))}; make a plan of each")
    return found.pop()


def _keep(kept: tuple[int, int, str], devices: list[str], copies: int, link: Any) -> None:
    """Own the shared memory: send the handles of each device for each engine, and stay.

    Args:
        kept: elements of weights, bytes of KV, and what these are taken for.
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
        # Each looks for free ports behind its own, and compiles into a folder of its own.
        os.environ["VLLM_PORT"] = str(21000 + 100 * number)
        os.environ["VLLM_CACHE_ROOT"] = str(folder / f"cache-{number}")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor-{number}")
        prepare(engine.architectures)  # the parent has, but this may be no fork of it
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
    os._exit(0)  # vLLM's own shutdown may wait for what is gone


def _set_up(engine: Engine, folder: Path) -> None:
    """The engine's environment and packages, for its process and for those that it starts."""
    os.environ.update(engine.environment)
    if engine.packages:
        packages = str(folder.absolute() / engine.packages)
        _await(Path(packages), PACKAGES_S)
        sys.path.insert(0, packages)
        os.environ["PYTHONPATH"] = os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")])


def _await(path: Path, seconds: float) -> None:
    """Packages may come to a machine behind vLLM, while other engines start."""
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
