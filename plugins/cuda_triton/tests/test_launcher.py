"""`launcher`: a launch with an equal specialization reuses the compiled kernel, and no other launch does."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark_cuda_triton.kernel_variants import kernels
from draftmark_cuda_triton.launch.launcher import COMPILER_OPTIONS, launch_kernel

pytestmark = pytest.mark.usefixtures("without_machine_code")
NUMBERS = (0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16)


@pytest.fixture
def write_rows(fake_driver):
    """The plugin's smallest kernel, compiled by the fake driver."""
    return kernels.kv_write.write_kv_rows


def arguments(rng):
    """Return random arguments of `write_rows`: alignments, dtypes, scales or None, and integers of every kind."""

    def tensor(*dtypes):
        whole = torch.empty(64, dtype=rng.choice(dtypes))
        return whole[rng.choice((0, 1, 8)) :]

    k, cache = tensor(torch.bfloat16, torch.float16), tensor(torch.bfloat16, torch.float16)
    scale = rng.choice((None, tensor(torch.float32)))
    pitches = [rng.choice(NUMBERS) for _ in range(11)]
    return [k, k, cache, cache, scale, scale, tensor(torch.int64), *pitches]


CONSTANTS = {
    "NUM_HEADS": 1,
    "K_DIM": 16,
    "V_DIM": 16,
    "V_FIRST": 0,
    "PAGE_SIZE": 16,
    "SCALED": 0,
    "QUANTIZE": False,
    "BLOCK_K": 16,
    "BLOCK_V": 16,
    "BLOCK_ROWS": 1,
    "PDL": True,
}


def test_launcher_selects_the_kernel_triton_selects(fake_driver, write_rows):
    """For launches that differ in a few arguments, in any order, the launcher and Triton select the same kernel."""
    rng = random.Random(0)
    some = [arguments(rng) for _ in range(4)]
    mixed = [[rng.choice(pair) for pair in zip(*some, strict=True)] for _ in range(30)]
    for values in [*mixed, *mixed]:
        constants = CONSTANTS | {"SCALED": 3 * (values[4] is not None)}
        if (values[4] is None) != (values[5] is None):
            continue
        wanted = write_rows[(1,)](*values, **constants, **COMPILER_OPTIONS)
        launch_kernel(write_rows, (1,), *values, **constants)
        assert fake_driver.launched[-1][0] is fake_driver.launched[-2][0] is wanted.src


def test_repeated_launch_skips_argument_binding(fake_driver, write_rows, monkeypatch):
    """A repeated launch does not call Triton's `run`, also with another number of rows."""
    values = arguments(random.Random(1))
    values[7] = 1
    launch_kernel(write_rows, (1,), *values, **CONSTANTS)
    monkeypatch.setattr(type(write_rows), "run", lambda *_, **__: pytest.fail("bound anew"))
    launch_kernel(write_rows, (2,), *values[:7], 48, *values[8:], **CONSTANTS)
    grid, given = fake_driver.launched[-1][1][:3], fake_driver.launched[-1][1][-len(values) - len(CONSTANTS) :]
    assert grid == (2, 1, 1) and given[7] == 48 and given[0] is values[0]


@pytest.mark.parametrize("name", ["K_DIM", "PAGE_SIZE", "BLOCK_K"])
def test_each_constant_has_its_own_kernel(fake_driver, write_rows, name):
    """Launches with different constants use different kernels."""
    values = arguments(random.Random(2))
    launch_kernel(write_rows, (1,), *values, **CONSTANTS)
    launch_kernel(write_rows, (1,), *values, **CONSTANTS | {name: 64})
    assert fake_driver.launched[-1][0] is not fake_driver.launched[-2][0]
