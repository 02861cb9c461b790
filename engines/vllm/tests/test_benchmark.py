"""What the benchmark of vLLM relies on in packages that come with vLLM."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Looked for, not imported: in a process with numba vLLM 0.32 starts no engine on a CPU. It takes the `vars` of whatever
# any module names, and llvmlite has an object that has others for them.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")

ROOT = Path(__file__).parents[3]
LOOKS_UP = """
import torch
torch.set_num_threads(1)  # as vLLM does for ranks of several GPUs
torch.get_num_threads()  # and reads, after which torch sets no number by itself
import numba

@numba.njit(parallel=True)
def look_up(numbers):
    for n in numba.prange(len(numbers)):
        numbers[n] += 1

import numpy
threads = numba.get_num_threads()  # in the order of vLLM's proposer
numba.set_num_threads(1)
look_up(numpy.zeros(8))
numba.set_num_threads(threads)
print(torch.get_num_threads())
"""


def _threads(before: str, **environment: str) -> int:
    """Torch's threads of the host when n-grams have been looked up."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", before + LOOKS_UP], cwd=ROOT, env=kept | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_torch_keeps_one_thread_where_the_benchmark_looks_up_n_grams() -> None:
    """Else an operation of one number a request is one of as many threads, which wait for cores that others have."""
    assert _threads("import benchmarks.vllm.__main__") == 1


def test_numba_gives_torch_as_many_threads_as_it_has_itself() -> None:
    """Why the benchmark tells numba of one. If this fails, it need not any more."""
    assert _threads("", NUMBA_NUM_THREADS="3") == 3
