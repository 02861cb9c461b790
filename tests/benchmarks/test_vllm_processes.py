"""Tests of vLLM's benchmark: processes, their compilations, packages and cores."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.vllm import cores, fleet, ranks
from benchmarks.vllm.engines import Engine
from benchmarks.vllm.starts import once
from tests.benchmarks.small_cases import HEAD


class Source:
    """Substitute for Triton's kernel source, with the interface that `compile` needs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def hash(self) -> str:
        """Return the name as the hash."""
        return self.name


def compile_in(folder: Path, name: str, begun: Any, go: Any) -> None:
    """Compile a kernel unless its file exists, and append its name to a file when it was compiled."""

    def compile_kernel(src: Source, target: Any, options: Any) -> None:
        begun.set()
        go.wait()
        if not (folder / src.name).exists():
            with (folder / "compiled").open("a") as f:
                f.write(src.name)
            (folder / src.name).touch()

    once(compile_kernel, folder / "locks")(Source(name), "sm_90", {"num_warps": 4})


def test_one_process_compiles_a_shared_kernel(tmp_path: Path) -> None:
    """If two processes need one kernel, the second waits and reads it from disk; another kernel does not wait."""
    context = multiprocessing.get_context("fork")
    begun, go = [context.Event() for _ in range(3)], context.Event()
    each = [
        context.Process(target=compile_in, args=(tmp_path, name, one, go))
        for name, one in zip("aab", begun, strict=True)
    ]
    for process in each:
        process.start()
    assert begun[2].wait(60)
    while not (begun[0].is_set() or begun[1].is_set()):
        pass
    assert not (begun[0].is_set() and begun[1].is_set())
    go.set()
    for process in each:
        process.join()
    assert sorted((tmp_path / "compiled").read_text()) == ["a", "b"]


def serve(engine: Engine, *given: Any) -> None:
    """Act as an engine's process: with drafts it never becomes ready, and with two GPUs it fails."""
    link = given[-1]
    if engine.num_gpus == 2:
        link.send({"failed": "no second device"})
        return
    if not engine.drafts:
        link.send({"start_s": 0.0, "ready_s": 0.0})
    while True:
        link.send(link.recv()(None, engine))


def name_of(llm: Any, engine: Engine) -> str:
    """Return the engine's backend."""
    return engine.backend


def test_ready_engines_do_not_wait_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When time is over, engines that are not ready are ended; those that are ready run in any order."""
    monkeypatch.setattr(fleet, "_serve", serve)
    usual = {"shape": "small-shape", "page_size": 16}
    each = ({"backend": "A"}, {"backend": "B", "drafts": 4}, {"backend": "C", "num_gpus": 2}, {"backend": "D"})
    engines = fleet.Fleet([Engine(**usual, **one) for one in each], tmp_path, name_of, "cpu")
    try:
        assert engines.wait(0, 600) == [0, 3]
        assert engines.failed[1] == "it was not ready in time" and 2 in engines.failed
        assert [engines.ask(number, name_of) for number in (3, 0)] == ["D", "A"]
        assert engines.ask(1, name_of) == {"failed": "it was not ready in time"}
    finally:
        engines.close()


def test_packages_of_an_engine_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's folder of packages comes first on the import path of its process and its child processes."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    (tmp_path / "flashinfer-0.7.2").mkdir()
    fleet._set_up(Engine(**HEAD, packages="flashinfer-0.7.2"), tmp_path)
    found = str(tmp_path / "flashinfer-0.7.2")
    assert sys.path[0] == found
    assert os.environ["PYTHONPATH"] == os.pathsep.join([found, "before"])


@pytest.mark.skipif(len(cores.ALL) < 2, reason="one core")
def test_engine_runs_on_the_core_of_its_turn() -> None:
    """The main thread runs on its turn's core and other threads on the rest; with too few cores, nothing is pinned."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_stand, args=(theirs,))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    every = found["before"]
    assert found["pinned"] == [({every[turn % len(every)]}, set(every) - {every[turn % len(every)]}) for turn in (0, 3)]
    assert found["few"] == found["pinned"][-1]


def _stand(link: Any) -> None:
    """Send the CPU cores that both threads of this process may use: before, pinned, and with too few cores."""
    thread, stop = threading.Thread(target=lambda: stop.wait()), threading.Event()
    thread.start()
    engine = Engine("small-shape", backend="A", page_size=16)

    def here(llm: Any = None, engine: Any = None) -> tuple[set[int], set[int]]:
        return os.sched_getaffinity(os.getpid()), os.sched_getaffinity(thread.native_id or 0)

    found: dict[str, Any] = {"before": cores.ALL}
    cores.LEAST = 2
    found["pinned"] = [cores.on_core(turn, here, None, engine) for turn in (0, 3)]
    cores.LEAST = len(cores.ALL) + 1
    found["few"] = cores.on_core(0, here, None, engine)
    stop.set()
    link.send(found)


def test_each_rank_has_a_core_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine and its ranks run on different cores, which change with each turn; other threads use the rest.

    After its turn a rank moves to a core that has no work.
    """
    monkeypatch.setattr(cores, "ALL", list(range(9)))
    pinned: list[tuple[int, list[int]]] = []
    for module in (cores, ranks):
        monkeypatch.setattr(module, "pin", lambda core, rest: pinned.append((core, rest)))

    def call(method: str, args: tuple[Any, ...]) -> None:
        for number in range(2):
            rank = ranks.Rank()
            rank.rank = number
            getattr(rank, method)(*args)

    engine = Engine("small-shape", backend="A", page_size=16, num_gpus=2)
    for turn in (0, 1, 2):
        cores.on_core(turn, lambda llm, engine: None, SimpleNamespace(collective_rpc=call), engine)
    turns = [(0, 1, 2), (3, 4, 5), (6, 7, 0)]
    assert pinned == [(core, [one for one in range(9) if one not in turn]) for turn in turns for core in (*turn, 8, 8)]
    monkeypatch.setattr(cores, "ALL", list(range(5)))
    assert cores.on_core(0, lambda llm, engine: "asked", None, engine) == "asked"
    assert len(pinned) == 15
