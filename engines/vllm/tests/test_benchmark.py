"""Tests of the behaviour of numba and torch that the benchmark of vLLM relies on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# find_spec does not import numba. In a process that has imported numba, vLLM 0.32 cannot start an engine on a CPU: it
# calls `vars` on objects of all modules, and this fails for an object of llvmlite.
pytestmark = [
    pytest.mark.long,  # numba compiles a parallel loop in a process of its own
    pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed"),
]

ROOT = Path(__file__).parents[3]
LOOKS_UP = """
import torch
torch.set_num_threads(1)  # vLLM does this for ranks of several GPUs
torch.get_num_threads()  # vLLM reads the number; after that torch chooses none by itself
import numba

@numba.njit(parallel=True)
def look_up(numbers):
    for n in numba.prange(len(numbers)):
        numbers[n] += 1

import numpy
threads = numba.get_num_threads()  # same order of calls as in vLLM's proposer
numba.set_num_threads(1)
look_up(numpy.zeros(8))
numba.set_num_threads(threads)
print(torch.get_num_threads())
"""


def _threads(before: str, **environment: str) -> int:
    """Return torch's number of threads after numba ran a parallel loop, as in vLLM's n-gram look-up."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", before + LOOKS_UP], cwd=ROOT, env=kept | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_benchmark_keeps_torch_at_one_thread() -> None:
    """The benchmark keeps torch at one thread. With more threads, tiny operations would wait for busy cores."""
    assert _threads("import benchmarks.vllm.__main__") == 1


def test_numba_sets_torchs_number_of_threads() -> None:
    """numba sets torch's thread count, so the benchmark limits numba to one. If this fails, remove that limit."""
    assert _threads("", NUMBA_NUM_THREADS="3") == 3
