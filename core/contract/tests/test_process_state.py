"""Tests of the watch on the process: it sees every kind of change, and memory that stays allocated."""

from __future__ import annotations

import builtins
import ctypes
import decimal
import gc
import logging
import os
import random
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from draftmark_contract.check import ContractViolation
from draftmark_contract.harness.held_memory import LIMIT, assert_keeps_no_memory
from draftmark_contract.harness.process_state import changed, process_state
from draftmark_contract.harness.settings import SETTINGS, engine_settings


def _lower_limit(which: int) -> None:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (4096 if soft in (0, resource.RLIM_INFINITY) else soft - 1, hard))


CHANGES: dict[str, tuple[Callable[[Path], object], Callable[[Any], object]]] = {
    "torch's generator": (lambda folder: torch.rand(1), lambda made: None),
    "random's generator": (lambda folder: random.random(), lambda made: None),
    "numpy's generator": (lambda folder: numpy.random.rand(1), lambda made: None),
    "torch.get_default_dtype()": (
        lambda folder: torch.set_default_dtype(torch.float64),
        lambda made: torch.set_default_dtype(torch.float32),
    ),
    "torch.backends.cudnn.benchmark": (
        lambda folder: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
        lambda made: setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark),
    ),
    "flushing of denormal numbers": (
        lambda folder: torch.set_flush_denormal(True),
        lambda made: torch.set_flush_denormal(False),
    ),
    "os.environ": (
        lambda folder: os.environ.update(DRAFTMARK_TEST="1"),
        lambda made: os.environ.pop("DRAFTMARK_TEST"),
    ),
    "the current folder": (lambda folder: (os.getcwd(), os.chdir(folder))[0], os.chdir),
    "the file mode mask": (lambda folder: os.umask(0o77), os.umask),
    f"the handler of signal {int(signal.SIGUSR1)}": (
        lambda folder: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        lambda made: signal.signal(signal.SIGUSR1, made),
    ),
    "warnings.filters": (
        lambda folder: warnings.filterwarnings("ignore", message="a test of the watch"),
        lambda made: warnings.filters.pop(0),  # type: ignore[attr-defined]
    ),
    "sys.getrecursionlimit()": (
        lambda folder: (sys.getrecursionlimit(), sys.setrecursionlimit(2345))[0],
        sys.setrecursionlimit,
    ),
    "the root logger": (
        lambda folder: (logging.root.level, logging.root.setLevel(5))[0],
        lambda made: logging.root.setLevel(made),
    ),
    "the decimal context": (
        lambda folder: setattr(decimal.getcontext(), "prec", 9),
        lambda made: setattr(decimal.getcontext(), "prec", 28),
    ),
    "the limit RLIMIT_CORE": (
        lambda folder: (resource.getrlimit(resource.RLIMIT_CORE), _lower_limit(resource.RLIMIT_CORE))[0],
        lambda made: resource.setrlimit(resource.RLIMIT_CORE, made),
    ),
    "gc": (lambda folder: gc.disable(), lambda made: gc.enable()),
    "functions of builtins: print": (
        lambda folder: (builtins.print, setattr(builtins, "print", repr))[0],
        lambda made: setattr(builtins, "print", made),
    ),
    "functions of torch: zeros": (
        lambda folder: (torch.zeros, setattr(torch, "zeros", torch.ones))[0],
        lambda made: setattr(torch, "zeros", made),
    ),
}
"""Name of the changed state → how a test changes it, and how it takes the change back."""


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize("name", CHANGES)
def test_change_of_the_process_is_seen(name: str, tmp_path: Path) -> None:
    """A change of one kind of state is found by its name, and a process without changes has none."""
    change, restore = CHANGES[name]
    assert not changed(process_state(), process_state())
    before = process_state()
    made = change(tmp_path)
    try:
        found = changed(before, process_state())
    finally:
        restore(made)
    assert name in found, found


def test_engine_settings_differ_and_are_restored() -> None:
    """The two sets of settings differ in every setting, and the process has its own settings again afterwards."""
    before = process_state()
    with engine_settings(0):
        one = [read() for read, _, _ in SETTINGS]
    with engine_settings(1):
        other = [read() for read, _, _ in SETTINGS]
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert not changed(before, process_state())


@pytest.mark.parametrize(
    ("call", "calls"),
    [
        pytest.param(lambda kept: kept.append(torch.zeros(3)), 40, id="tensor"),
        pytest.param(lambda kept: kept.append(bytearray(100)), LIMIT // 8, id="bytes"),
        pytest.param(lambda kept: kept.append(partial(print, torch.zeros(2))), 40, id="closure"),
        pytest.param(lambda kept: kept.append(None), LIMIT, id="list"),
    ],
)
def test_memory_of_calls_is_found(call: Callable[[list[Any]], None], calls: int) -> None:
    """A tensor of each of 40 calls, and a few bytes of each of thousands, are a violation."""
    kept: list[Any] = []
    with pytest.raises(ContractViolation, match="leaves memory"):
        assert_keeps_no_memory("a call", calls, "cpu", lambda number: call(kept))
    assert len(kept) == calls


def test_memory_of_native_code_is_found() -> None:
    """Blocks of the C library's heap that each call keeps are a violation, although Python traces none of them."""
    heap = ctypes.CDLL(None)
    heap.malloc.restype, heap.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    kept = (ctypes.c_void_p * 4000)()
    with pytest.raises(ContractViolation, match="of the heap"):
        assert_keeps_no_memory("a call", 4000, "cpu", lambda number: kept.__setitem__(number, heap.malloc(200)))
    for one in kept:
        heap.free(one)


def test_open_files_of_calls_are_found() -> None:
    """A file that each call leaves open is a violation, also if no Python object holds it."""
    kept: list[int] = [0] * 40
    with pytest.raises(ContractViolation, match="open files"):
        assert_keeps_no_memory(
            "a call", 40, "cpu", lambda number: kept.__setitem__(number, os.open(os.devnull, os.O_RDONLY))
        )
    for one in kept:
        os.close(one)


def test_memory_that_is_freed_is_none() -> None:
    """Calls that free what they allocate pass, and so does one small cache."""
    cache = {}

    def call(number: int) -> None:
        cache[number % 7] = str(torch.zeros(3) + number)

    assert_keeps_no_memory("a call", 1000, "cpu", call)
    assert len(cache) == 7


def test_memory_that_is_added_once_is_none() -> None:
    """Memory that grows in one part of the calls only, such as a lazy import or another thread's, is no violation."""
    kept: list[Any] = []

    def call(number: int) -> None:
        if 500 <= number < 600:
            kept.extend((torch.zeros(number), bytearray(LIMIT)))

    assert_keeps_no_memory("a call", 1000, "cpu", call)
    assert len(kept) == 200


def test_tensors_of_others_are_no_memory_of_the_calls() -> None:
    """Tensors of many shapes that lived before the calls are not counted as memory that the calls leave."""
    alive = [torch.zeros(size) for size in range(1500)]
    assert_keeps_no_memory("a call", 30, "cpu", lambda number: None)
    assert len(alive) == 1500
