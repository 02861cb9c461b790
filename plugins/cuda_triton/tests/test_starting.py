"""`starting`: a launch that is like an earlier one starts the same compiled kernel; nothing else does."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark_cuda_triton import flavours
from draftmark_cuda_triton.starting import start

NUMBERS = (0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16)


@pytest.fixture
def write_rows(no_gpu):
    """The smallest kernel, compiled."""
    return flavours._load(flavours.OWN, False).kv_write.write_rows


def arguments(rng):
    """Of `write_rows`: tensors of any alignment and dtype, scales or none, integers of every kind."""

    def tensor(*dtypes):
        whole = torch.empty(64, dtype=rng.choice(dtypes))
        return whole[rng.choice((0, 1, 8)) :]

    k, cache = tensor(torch.bfloat16, torch.float16), tensor(torch.bfloat16, torch.float16)
    scale = rng.choice((None, tensor(torch.float32)))
    pitches = [rng.choice(NUMBERS) for _ in range(11)]
    return [k, k, cache, cache, scale, scale, tensor(torch.int64), *pitches]


CONSTANTS = {
    "NUM_HEADS": 1,
    "HEAD_DIM": 16,
    "PAGE": 16,
    "SCALED": 0,
    "NARROW": False,
    "BLOCK": 16,
    "BLOCK_ROWS": 1,
    "PDL": True,
}


def test_the_kernel_is_the_one_that_triton_would_take(no_gpu, write_rows):
    """Of launches that differ in a few arguments, whatever the order in which they come."""
    rng = random.Random(0)
    some = [arguments(rng) for _ in range(4)]
    mixed = [[rng.choice(pair) for pair in zip(*some, strict=True)] for _ in range(30)]
    for values in [*mixed, *mixed]:
        constants = CONSTANTS | {"SCALED": 3 * (values[4] is not None)}
        if (values[4] is None) != (values[5] is None):
            continue
        wanted = write_rows[(1,)](*values, **constants)
        start(write_rows, (1,), *values, **constants)
        assert no_gpu.launched[-1][0] is no_gpu.launched[-2][0] is wanted.src


def test_an_earlier_launch_is_not_bound_anew(no_gpu, write_rows, monkeypatch):
    """Triton's own call is not made a second time, also where rows are more: nothing is compiled for their number."""
    values = arguments(random.Random(1))
    values[7] = 1
    start(write_rows, (1,), *values, **CONSTANTS)
    monkeypatch.setattr(type(write_rows), "run", lambda *_, **__: pytest.fail("bound anew"))
    start(write_rows, (2,), *values[:7], 48, *values[8:], **CONSTANTS)
    grid, given = no_gpu.launched[-1][1][:3], no_gpu.launched[-1][1][-len(values) - len(CONSTANTS) :]
    assert grid == (2, 1, 1) and given[7] == 48 and given[0] is values[0]


@pytest.mark.parametrize("name", ["HEAD_DIM", "PAGE", "BLOCK"])
def test_a_constant_is_compiled_for(no_gpu, write_rows, name):
    """A launch with another constant is another kernel."""
    values = arguments(random.Random(2))
    start(write_rows, (1,), *values, **CONSTANTS)
    start(write_rows, (1,), *values, **CONSTANTS | {name: 64})
    assert no_gpu.launched[-1][0] is not no_gpu.launched[-2][0]
