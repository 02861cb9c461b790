"""Compilation of many kernels in parallel processes, because Triton holds Python's lock for much of a compilation."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Lock

from draftmark import Progress

from .assembler import torchs_variables
from .source import Compiled, KernelSource
from .store import Store

MAX_PROCESSES = 16
"""Maximum compiling processes; each needs about 300 MB of memory."""


def compile_all(
    sources: Sequence[KernelSource], store: Store, progress: Progress, processes: int | None = None
) -> list[Compiled]:
    """Compile kernels into a store, and return one result for each.

    The processes see no GPU, import no torch, and use a Triton cache of their own, which is removed afterwards.

    Args:
        processes: number of processes; None for one for each CPU of this process, at most MAX_PROCESSES.
    """
    waiting: SimpleQueue[KernelSource] = SimpleQueue()
    for source in sources:
        waiting.put(source)
    found: list[Compiled] = []
    lock = Lock()

    def report(one: Compiled) -> None:
        with lock:
            found.append(one)
            progress(len(found), len(sources), one.name)

    count = min(len(sources), processes or min(len(os.sched_getaffinity(0)), MAX_PROCESSES))
    if not count:
        return found
    with tempfile.TemporaryDirectory(prefix="draftmark-compile-") as scratch, ThreadPoolExecutor(count) as threads:
        for future in [threads.submit(_serve, waiting, store, scratch, report) for _ in range(count)]:
            future.result()
    return found


def _serve(waiting: SimpleQueue[KernelSource], store: Store, scratch: str, report: Callable[[Compiled], None]) -> None:
    """Pass waiting kernels to one process, one at a time. A process that ends early is replaced."""
    process = None
    try:
        while True:
            try:
                source = waiting.get_nowait()
            except Empty:
                return
            process = process or _start(store, scratch)
            try:
                answer = _ask(process, source)
            except (EOFError, OSError, pickle.UnpicklingError):
                answer = Compiled(source.key, source.name, 0.0, f"its process ended with exit code {process.wait()}")
                process = None
            report(answer)
    finally:
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _ask(process: subprocess.Popen[bytes], source: KernelSource) -> Compiled:
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(source, process.stdin)
    process.stdin.flush()
    answer: Compiled = pickle.load(process.stdout)
    return answer


def _start(store: Store, scratch: str) -> subprocess.Popen[bytes]:
    """Start a process that imports the same modules as this one, and none from the current directory."""
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": scratch,
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    inherited = {name: value for name, value in os.environ.items() if name not in torchs_variables()}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"{__package__}.worker", str(store.root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=inherited | variables,
    )  # fmt: skip
